# SPDX-License-Identifier: Apache-2.0
"""Rows measured again, held to the committed ones. No GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import repeat, run, table
from bench.rows import append
from tests.bench_rows import row


def write(folder: Path, times: dict[str, tuple[float, float]], **values: Any) -> Path:
    """Rows of fwd_sm90: case -> microseconds of ours and of a peer."""
    for case, (ours, peer) in times.items():
        pair = row("fwd_sm90", ours, case=case, **values), row("fa3", peer, case=case, **values)
        append(folder / "nvidia-h200" / "fwd_sm90.csv", pair)
    return folder


@pytest.fixture
def committed(tmp_path: Path) -> Path:
    """Ten cases as they are committed: 100 us of ours, 200 of a peer."""
    folder = tmp_path / "bench" / "results"
    return write(folder, {str(i): (100.0, 200.0) for i in range(10)})


def verdict(committed: Path, times: dict[str, tuple[float, float]]) -> bool:
    after = write(committed / f"{len(list(committed.iterdir()))}", times)
    return repeat.repeats(repeat.offs(committed / "nvidia-h200", after / "nvidia-h200"))


def test_the_stated_spread_is_held(committed: Path) -> None:
    same = {str(i): (100.0, 200.0) for i in range(10)}
    assert verdict(committed, same)
    assert verdict(committed, {str(i): (104.0, 208.0) for i in range(10)})  # another clock
    assert not verdict(committed, {str(i): (113.0, 226.0) for i in range(10)})
    assert verdict(committed, same | {"3": (100.0, 215.0)})  # one ratio of ten, by 7.5 %
    assert not verdict(committed, same | {"3": (100.0, 183.0)})
    assert not verdict(committed, same | {"3": (100.0, 208.0), "4": (100.0, 208.0)})


def test_what_is_not_in_both_is_not_compared(committed: Path) -> None:
    after = write(committed / "x", {"3": (100.0, 400.0)}, peer_version="2.0")
    rows = row("fwd_sm90", 101.0, case="3", timestamp="t"), row("fa2", 9.0, case="3", timestamp="t")
    append(after / "nvidia-h200" / "fwd_sm90.csv", rows)
    (only,) = repeat.offs(committed / "nvidia-h200", after / "nvidia-h200")
    assert only.peer == "" and only.share == pytest.approx(0.01)
    other = write(committed / "y", {"99": (1.0, 1.0)})
    with pytest.raises(ValueError, match="a case in common"):
        repeat.offs(committed / "nvidia-h200", other / "nvidia-h200")


def test_as_a_program(committed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    against = ["--against", str(committed)]
    good = write(tmp_path / "good", {"3": (100.0, 204.0)})
    bad = write(tmp_path / "bad", {"3": (100.0, 300.0)})
    assert repeat.main(["--rows", str(good), *against]) == 0
    assert "1 of 1 ratios within 3 %, the farthest +2.0 % (3, FlashAttention-3)" in (
        capsys.readouterr().out
    )
    assert repeat.main(["--rows", str(bad), "--json", *against]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert facts["repeats"] is False and facts["off"][0]["peer"] == "fa3"
    assert repeat.main(["--rows", str(tmp_path / "none"), *against]) == run.REFUSED
    assert "accepted is a folder as bench/results is" in capsys.readouterr().err


def test_it_measures_the_quick_cells(
    committed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines: list[list[str]] = []
    left = run.LEFT

    def measure(line: list[str]) -> int:
        lines.append(line)
        print("what the run prints")
        write(tmp_path / "out", {"3": (100.0, 204.0)})
        return left

    monkeypatch.setattr(run, "main", measure)
    out = ["--out", str(tmp_path / "out")]
    against = ["--against", str(committed)]
    assert repeat.main([*out, *against, "--json"]) == run.LEFT
    assert lines == [["--quick", "--again", *out]]
    assert json.loads(capsys.readouterr().out)["repeats"] is True
    left = run.WRONG
    assert repeat.main([*out, *against]) == run.WRONG


def test_the_pages_say_what_was_seen(committed: Path) -> None:
    made = table.markdown("README.md", committed)
    assert made.endswith(f"numbers repeat: {repeat.stated()}.\n")
    write(committed / "again", {"3": (100.0, 204.0)}, timestamp="2026-12-01T00:00:00Z")
    made = table.markdown("README.md", committed)
    assert "NVIDIA H200, 2026-12-01: 1 of 1 ratios within 3 %" in made
