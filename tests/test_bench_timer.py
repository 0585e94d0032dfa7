# SPDX-License-Identifier: Apache-2.0
"""The timer, on a pretended stream."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from bench import timer


class PretendedStream:
    """A GPU and a host whose clocks move when told: a launch takes both."""

    def __init__(self, host_us: float = 10.0) -> None:
        self.host_us, self.host, self.gpu = host_us, 0.0, 0.0

    def enqueue(self, us: float) -> None:
        self.host += self.host_us
        self.gpu = max(self.gpu, self.host) + us

    def wait(self, us: float) -> None:
        self.enqueue(us)

    def record(self) -> float:
        return self.gpu

    def reached(self, event: float) -> bool:
        return event <= self.host

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        self.host = max(self.host, self.gpu)


@pytest.mark.parametrize("host_us", [1.0, 300.0])
def test_events_hold_gpu_time_alone(host_us: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timer, "SHORT_SECONDS", 60.0)
    stream = PretendedStream(host_us)
    launches: list[str] = []

    def run(name: str, us: float) -> Callable[[], None]:
        return lambda: (launches.append(name), stream.enqueue(us))[0]

    runs = {"a": run("a", 5.0), "b": run("b", 7.0), "c": run("c", 2.0)}
    times = timer.interleave(runs, stream, rounds=6)
    assert times == {
        "a": [pytest.approx(5.0)] * 24,
        "b": [pytest.approx(7.0)] * 24,
        "c": [pytest.approx(2.0)] * 24,
    }
    # a round: two launches of each candidate, behind two more of the first
    rounds = ["".join(launches)[-8 * i :][:8] for i in range(24, 0, -1)]
    assert all(order[::2] == order[1::2] and order[0] == order[2] for order in rounds)
    orders = [order[2::2] for order in rounds]
    assert len(set(orders)) > 3
    for i in range(0, 24, 3):  # each is once in each place
        assert all(
            sorted(place) == ["a", "b", "c"] for place in zip(*orders[i : i + 3], strict=True)
        )


@pytest.mark.parametrize("count", range(1, 10))
def test_each_candidate_follows_each_other_one_equally_often(count: int) -> None:
    names = list("abcdefghi"[:count])
    orders = list(itertools.islice(timer.squares(names), 2 * count))
    for square in (orders[:count], orders[count:]):
        assert all(sorted(place) == names for place in zip(*square, strict=True))
    behind = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert behind == dict.fromkeys(itertools.permutations(names, 2), 2)


def test_a_time_does_not_depend_on_the_company() -> None:
    """A launch that follows one of another kernel takes longer."""
    stream = PretendedStream()
    last = ""

    def run(name: str) -> Callable[[], None]:
        def launch() -> None:
            nonlocal last
            stream.enqueue(5.0 if last == name else 8.0)
            last = name

        return launch

    for names in ("ab", "ba", "acb", "a"):
        times = timer.interleave({n: run(n) for n in names}, stream, rounds=5)
        assert times["a"] == [pytest.approx(5.0)] * len(times["a"])


def test_long_launches_have_fewer_rounds_and_short_ones_more() -> None:
    def count(rounds: int, seconds: float) -> int:
        """Rounds that take so long each."""
        done = 0
        while timer.goes_on(done, rounds, done * seconds):
            done += 1
        return done

    assert count(25, 4.0) == timer.LEAST_ROUNDS and count(5, 10.0) == 5
    assert count(25, 0.8) == 25
    assert count(25, 0.01) == 25
    assert 25 < count(25, 0.002) < 100 == count(25, 0.0)


def test_what_runs_before_a_launch_is_not_timed() -> None:
    stream = PretendedStream()
    times = timer.interleave(
        {"a": lambda: stream.enqueue(5.0)}, stream, rounds=3, before=lambda: stream.enqueue(50.0)
    )
    assert times == {"a": [pytest.approx(5.0)] * len(times["a"])}


def test_nothing_to_time_takes_no_time() -> None:
    assert timer.interleave({}, PretendedStream(), rounds=3) == {}


def test_a_host_that_never_catches_up_is_an_error() -> None:
    stream = PretendedStream(host_us=1e6)
    with pytest.raises(RuntimeError, match="no round submitted"):
        timer.interleave({"a": lambda: stream.enqueue(5.0)}, stream, rounds=1)
