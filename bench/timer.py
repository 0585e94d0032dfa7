# SPDX-License-Identifier: Apache-2.0
"""Times launches with events, all candidates in turn, with no host time inside the events.

Each round first occupies the stream with a kernel that only waits, then submits every candidate
between two events. Where the wait ended before everything was submitted, the round is thrown away
and repeated behind a longer wait. So the GPU always has the next launch at hand, and what the
events hold is GPU time alone.

What a launch takes depends on what ran before it: whether its code is still in the caches, what
clock the power of that has left, and whether it is the first after the wait. So each timed launch
follows one of its own that is not timed, a round begins with one that does not count, and in as
many rounds as there are candidates, each is once in each place, in two times as many equally often
behind each other, but for the first of a round, which follows itself. Medians of one case then
repeat within 2 % at 10 us and 0.5 % at 0.1 ms, where rotating the order gave 5 % and 4 % (H200,
results/nvidia-h200/tuning/timer.csv). Launches of 50 ms spread 0.5 % alone, p20 to p80, and 2 to
3 % where some follow a kernel that takes twice as long (tuning/long-launches.csv).
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

Runs = dict[str, Callable[[], Any]]

FIRST_WAIT_US = 400.0
LONGEST_WAIT_US = 400_000.0
LEAST_ROUNDS, SECONDS = 11, 20.0  # of a case whose launches are long
SHORT_SECONDS = 0.1  # in which short launches are timed more often
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


def goes_on(done: int, rounds: int, seconds: float) -> bool:
    """Whether there is another round after so many of them, and so many seconds."""
    if seconds > SECONDS:
        return done < min(rounds, LEAST_ROUNDS)
    return done < rounds or (seconds < SHORT_SECONDS and done < 4 * rounds)


def squares(names: list[str]) -> Iterator[list[str]]:
    """Orders without end: of as many as there are names, each has each of them in each place; of
    those and the next as many, each name follows each other one equally often (Williams, Aust. J.
    Sci. Res. A 2, 1949).
    """
    drawn = random.Random(0)
    zigzag = [(place + 1) // 2 * (1 if place % 2 else -1) for place in range(len(names))]
    while True:
        square = drawn.sample(names, len(names))
        for sign in (1, -1):
            for first in range(len(names)):
                yield [square[(first + sign * step) % len(names)] for step in zigzag]


def interleave(
    runs: Runs, stream: Stream, *, rounds: int, before: Callable[[], Any] | None = None
) -> dict[str, list[float]]:
    """Microseconds of each launch, `rounds` a candidate; up to four times as many of short ones,
    fewer, but LEAST_ROUNDS, of long ones.

    `before` runs between the launch that is not timed and the one that is, outside its events.
    RuntimeError where the host cannot submit a round within the longest wait.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    if not runs:
        return times
    wait, done, begun = FIRST_WAIT_US, 0, time.perf_counter()
    orders = squares(list(runs))
    order = next(orders)
    while goes_on(done, rounds, time.perf_counter() - begun):
        stream.wait(wait)
        gate = stream.record()
        events = {}
        for name in (order[0], *order):  # what is timed twice counts the second time
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
        done, order = done + 1, next(orders)
    return times
