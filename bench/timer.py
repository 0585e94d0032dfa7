# SPDX-License-Identifier: Apache-2.0
"""Times launches with events, all candidates in turn, with no host time inside the events.

Each round first occupies the stream with a kernel that only waits, then submits every candidate
between two events. Where the wait ended before everything was submitted, the round is thrown away
and repeated behind a longer wait. So the GPU always has the next launch at hand, and what the
events hold is GPU time alone.

What a launch takes depends on what ran before it: whether its code is still in the caches, and what
clock the power of that has left. So each timed launch follows one of its own that is not timed, in
an order that is drawn anew for each round: it does not matter who else is measured, or in which
place.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, Protocol

Runs = dict[str, Callable[[], Any]]

FIRST_WAIT_US = 400.0
LONGEST_WAIT_US = 400_000.0
LEAST_ROUNDS, SECONDS = 11, 4.0  # of a case whose launches are long
CYCLES_PER_US = 2000  # a GPU with a slower clock waits longer, which is harmless


class Stream(Protocol):
    """The few things that a timer asks of a GPU; tests have one that is not a GPU."""

    def wait(self, us: float) -> None: ...
    def record(self) -> Any: ...
    def reached(self, event: Any) -> bool: ...
    def elapsed_us(self, start: Any, end: Any) -> float: ...
    def synchronize(self) -> None: ...


class CupyStream:
    """CuPy's current stream: the null stream by default, which is also torch's."""

    SPIN = r"""
    extern "C" __global__ void spin(long long cycles) {
      const long long start = clock64();
      while (clock64() - start < cycles) {
      }
    }
    """

    def __init__(self) -> None:
        import cupy

        self._cupy = cupy
        self._spin = cupy.RawKernel(self.SPIN, "spin")

    def wait(self, us: float) -> None:
        self._spin((1,), (1,), (self._cupy.int64(us * CYCLES_PER_US),))

    def record(self) -> Any:
        event = self._cupy.cuda.Event()
        event.record()
        return event

    def reached(self, event: Any) -> bool:
        return event.done

    def elapsed_us(self, start: Any, end: Any) -> float:
        return 1e3 * self._cupy.cuda.get_elapsed_time(start, end)

    def synchronize(self) -> None:
        self._cupy.cuda.get_current_stream().synchronize()


def clear_l2(size: int) -> Callable[[], Any]:
    """A function that reads `size` bytes: after a write, the next launch would pay for it."""
    import cupy

    buffer = cupy.zeros(size // 4, cupy.float32)
    result = cupy.empty((), cupy.float32)
    return lambda: buffer.sum(out=result)


def warm_up(runs: Runs, stream: Stream, seconds: float = 0.1) -> None:
    """Run every candidate at least twice, and all of them for `seconds`."""
    start, rounds = time.perf_counter(), 0
    while rounds < 2 or time.perf_counter() - start < seconds:
        for run in runs.values():
            run()
        stream.synchronize()
        rounds += 1


def interleave(
    runs: Runs, stream: Stream, *, rounds: int, before: Callable[[], Any] | None = None
) -> dict[str, list[float]]:
    """Microseconds of each launch, `rounds` a candidate; fewer, but LEAST_ROUNDS, after SECONDS.

    `before` runs between the launch that is not timed and the one that is, outside its events.
    RuntimeError where the host cannot submit a round within the longest wait.
    """
    start_s = time.perf_counter()
    times: dict[str, list[float]] = {name: [] for name in runs}
    wait, done, drawn = FIRST_WAIT_US, 0, random.Random(0)
    while done < rounds:
        if done >= LEAST_ROUNDS and time.perf_counter() - start_s > SECONDS:
            break
        stream.wait(wait)
        gate = stream.record()
        events = {}
        for name in drawn.sample(list(runs), len(runs)):
            runs[name]()
            if before is not None:
                before()
            start = stream.record()
            runs[name]()
            events[name] = start, stream.record()
        late = stream.reached(gate)
        stream.synchronize()
        if late:
            wait *= 2
            if wait > LONGEST_WAIT_US:
                raise RuntimeError(
                    f"{', '.join(runs)}: no round submitted within {LONGEST_WAIT_US:.0f} us"
                )
            continue
        for name, (start, end) in events.items():
            times[name].append(stream.elapsed_us(start, end))
        done += 1
    return times
