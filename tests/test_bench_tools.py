# SPDX-License-Identifier: Apache-2.0
"""What reads and orders the bench's rows: running, comparing. No GPU."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import compare, first_output, install_size, newcomer, run
from bench.cases import SUITES
from bench.rows import RESULTS, ROOT, Row, append, load, results_path, sources_digest
from rawattn.device import Device
from tests.bench_rows import row

pytest_plugins = ("tests.cli",)
H200 = Device.named("H200")
FWD = SUITES["fwd_sm80"]


# ---- run -----------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that measures at once; the list holds the cases that it was asked for."""
    asked: list[str] = []

    def run_case(suite: Any, case: Any, rounds: int) -> list[Row]:
        asked.append(f"{case.id} {rounds}")
        rows = [row("fa2", 20.0, case=case.id, max_k=case.problem.max_k)]
        if "d256" not in case.id:
            ours = {"case": case.id, "sources": sources_digest(), "max_k": case.problem.max_k}
            rows.append(row(suite.backend, 10.0, **ours))
        return rows

    monkeypatch.setattr(run, "run_case", run_case)
    monkeypatch.setattr(run, "compile_ahead", lambda cases: None)
    monkeypatch.setattr(Device, "current", staticmethod(lambda device_id=None: H200))
    return asked


def test_a_run_resumes_where_it_stopped(
    gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--suite", "fwd_sm80", "--out", str(tmp_path), "--case"]
    assert run.main([*line, "d64-full-s512"]) == 0
    assert run.main([*line, "d64-full-*"]) == 0
    assert gpu == [f"d64-full-s{n} 25" for n in (512, 1024, 2048, 4096, 8192, 16384)]
    assert run.main([*line, "d64-full-*"]) == 0 and len(gpu) == 6
    assert "0 cases in 0 s" in capsys.readouterr().out
    assert run.main([*line, "d64-full-s512", "--again", "--json"]) == 0
    assert len(gpu) == 7
    assert json.loads(capsys.readouterr().out)["rows"] == 2
    assert len(load(results_path(tmp_path, H200.name, "fwd_sm80"))) == 14


def test_quick_stops_within_its_time_and_says_what_is_left(
    gpu: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["--suite", "fwd_sm80", "--case", "d128-*", "--quick", "--out", str(tmp_path)]
    monkeypatch.setattr(run, "QUICK_SECONDS", -1)
    assert run.main(line) == run.LEFT and gpu == []
    assert "LEFT: fwd_sm80/d128-full-s1024, " in capsys.readouterr().out
    monkeypatch.setattr(run, "QUICK_SECONDS", 60)
    assert run.main(line) == 0
    assert len(gpu) == 4 and all(case.endswith(f" {run.QUICK_ROUNDS}") for case in gpu)


def test_a_wrong_output_of_ours_is_an_exit_code(
    gpu: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--suite", "fwd_sm80", "--case", "d256-full-s512", "--out", str(tmp_path)]
    assert run.main(line) == run.WRONG
    assert "WRONG: fwd_sm80/d256-full-s512" in capsys.readouterr().out
    assert run.main([*line[:2], "--case", "x"]) == run.REFUSED
    assert "suite fwd_sm80 has d64-full-s512" in capsys.readouterr().err
    assert run.main([*line[:2], "--case", "x", "--json"]) == run.REFUSED
    assert json.loads(capsys.readouterr().out)["error"] == "ValueError"


def test_without_a_suite_all_are_measured(gpu: list[str], tmp_path: Path) -> None:
    run.main(["--quick", "--case", "d*", "--out", str(tmp_path)])
    assert {case.split()[0] for case in gpu} >= {c.id for c in FWD.cases if c.quick}


def test_some_peers_can_be_asked_for(
    gpu: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked: list[tuple[str, ...]] = []
    inner = run.run_case
    monkeypatch.setattr(
        run, "run_case", lambda s, c, rounds: asked.append(s.peers) or inner(s, c, rounds)
    )
    line = ["--suite", "fwd_sm80", "--case", "d64-full-s512", "--out", str(tmp_path), "--peers"]
    assert run.main([*line, "fa3,fa2"]) == 0 and asked == [("fa2", "fa3")]
    shown = capsys.readouterr().out
    assert "/fa2" in shown and "/cudnn" not in shown and "d64-full-s512" in shown
    assert run.main([*line, "fa2,fa9"]) == run.REFUSED
    assert "peers='fa2,fa9': accepted are cudnn,fa2,fa3" in capsys.readouterr().err


def test_peers_that_take_long_are_measured_on_some_cases() -> None:
    chosen = run.selected(["fwd_sm90"], None, False)
    by_case = {case.id: suite.peers for suite, case in chosen}
    assert by_case["d64-full-s512"] == ("fa3", "cudnn", "fa2", "jax")
    assert by_case["d64-full-s1024"] == by_case["d64-full-s4096-fp16"] == SUITES["fwd_sm90"].peers
    for suite in SUITES.values():
        assert set(suite.seldom) <= set(suite.peers)
        assert not suite.seldom or all(c.all_peers for c in suite.cases if c.quick)
    (asked,) = run.selected(["fwd_sm90"], "d64-full-s512", False, "fa3,cudnn_fe")
    assert asked[0].peers == ("fa3", "cudnn_fe")


def test_the_command_line_runs_it(run: Any, gpu: list[str], tmp_path: Path) -> None:
    found = run(f"bench --suite fwd_sm80 --case d64-full-s512 --json --out {tmp_path}")
    assert (found.code, found.facts["measured"], found.facts["wrong"]) == (0, 1, [])
    shown = run(f"bench --suite fwd_sm80 --case d64-full-s512 --out {tmp_path}")
    assert "d64-full-s512" in shown.out and "already_measured" in shown.out
    assert run("bench --suite fast").code == 2


def test_an_installed_package_has_no_bench(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from rawattn.cli import bench

    monkeypatch.setattr(bench, "ROOT", tmp_path)
    found = run("bench")
    assert found.code == 1 and "a part of a clone" in found.err


# ---- compare -------------------------------------------------------------------------------------


def changes(before: list[Row], after: list[Row]) -> dict[str, compare.Change]:
    return {c.case: c for c in compare.compare(before, after, None)}


def test_slower_is_what_exceeds_the_spread() -> None:
    before = [row("fwd_sm80", 100.0, case=c) for c in "abcd"]
    before += [row("fa2", 50.0, case=c) for c in "abcd"]
    after = [
        row("fwd_sm80", us, case=c) for c, us in zip("abcd", (102, 98, 100.9, 110), strict=True)
    ]
    after += [row("fa2", us, case=c) for c, us in zip("abcd", (50, 50, 50, 55), strict=True)]
    found = changes(before, after)
    verdicts = {case: c.verdict for case, c in found.items()}
    assert verdicts == {"a": "slower", "b": "faster", "c": "same", "d": "same"}
    assert found["d"].drift == pytest.approx(1.1) and found["d"].change == pytest.approx(0)
    assert found["a"].spread == 0.01


def test_more_can_be_forgiven(tmp_path: Path) -> None:
    files = []
    for i, us in enumerate((100.0, 103.0)):
        files.append(str(tmp_path / f"{i}.csv"))
        append(Path(files[-1]), [row("fwd_sm80", us), row("fa2", 50.0)])
    assert compare.main(files) == 1
    assert compare.main([*files, "--forgive", "2.9"]) == 1
    assert compare.main([*files, "--forgive", "3.1"]) == 0


def test_a_wide_spread_forgives_more() -> None:
    before, after = [row("fa2", 50.0)], [row("fa2", 50.0)]
    noisy = row("fwd_sm80", 100.0, p20_us=90.0, p80_us=110.0)
    assert changes([noisy, *before], [row("fwd_sm80", 109.0), *after])["c"].verdict == "same"
    assert changes([noisy, *before], [row("fwd_sm80", 111.0), *after])["c"].verdict == "slower"


def test_peers_that_disagree_widen_it_and_others_do_not_count() -> None:
    before = [row("fwd_sm80", 100.0), row("fa2", 50.0), row("cudnn", 50.0)]
    after = [row("fwd_sm80", 106.0), row("fa2", 50.0), row("cudnn", 56.0)]
    assert changes(before, after)["c"].verdict == "same"
    spread = 0.01 + 56 / (50 * 56) ** 0.5 - 1  # of the times, and by how much the peers disagree
    assert changes(before, after)["c"].spread == pytest.approx(spread)
    after[2] = replace(after[2], peer_version="2.0")
    assert changes(before, after)["c"].verdict == "slower"


def test_without_a_peer_the_drift_is_unknown_and_more_is_forgiven() -> None:
    found = changes([row("fwd_sm80", 100.0)], [row("fwd_sm80", 103.9)])["c"]
    assert (
        found.verdict == "same" and found.spread == pytest.approx(0.04) and math.isnan(found.drift)
    )
    assert changes([row("fwd_sm80", 100.0)], [row("fwd_sm80", 104.1)])["c"].verdict == "slower"


def test_only_the_newest_rows_of_a_case_count() -> None:
    old = [row("fwd_sm80", 1.0, timestamp="1"), row("fwd_sm80", 100.0, timestamp="2")]
    assert changes(old, [row("fwd_sm80", 100.0)])["c"].verdict == "same"


def test_compare_as_a_program(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b, c, d = (str(tmp_path / f"{x}.csv") for x in "abcd")
    append(Path(a), [row("fwd_sm80", 100.0), row("fa2", 50.0)])
    append(Path(b), [row("fwd_sm80", 120.0), row("fa2", 50.0)])
    append(Path(c), [row("fa2", 50.0)])
    append(Path(d), [row("fwd_sm80", 100.0, case="other", gpu="A100")])
    assert compare.main([a, a]) == 0
    assert compare.main([b, a]) == 0 and "FASTER" in capsys.readouterr().out
    assert compare.main([a, b]) == 1 and "SLOWER" in capsys.readouterr().out
    assert compare.main([a, c]) == 1 and "GONE" in capsys.readouterr().out
    assert compare.main([a, c, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["after_us"] is None
    for after, words in ((d, "accepted are rows of one GPU"), ("x", "there is no such file")):
        assert compare.main([a, after]) == 2 and words in capsys.readouterr().err
    assert compare.main([a, b, "--backend", "z"]) == 2
    committed = str(RESULTS / "nvidia-h200" / "fwd_sm80.csv")
    assert compare.main([committed, committed]) == 0


# ---- rows ----------------------------------------------------------------------------------------


def test_folders_are_compared_suite_by_suite(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Suites share the ids of cases."""
    a, b = tmp_path / "a", tmp_path / "b"
    for folder, us in ((a, 100.0), (b, 101.0)):
        append(folder / "fwd_sm80.csv", [row("fwd_sm80", us), row("fa2", 50.0)])
        append(folder / "fwd_sm90.csv", [row("fwd_sm90", us / 2), row("fa2", 50.0)])
    append(a / "decode.csv", [row("decode_split", 1.0)])
    assert compare.main([str(a), str(b)]) == 0
    shown = capsys.readouterr().out
    assert "2 same" in shown and "fwd_sm80" in shown and "fwd_sm90" in shown
    (tmp_path / "c").mkdir()
    assert compare.main([str(a), str(tmp_path / "c")]) == 2
    assert "folders with a suite in common" in capsys.readouterr().err


def test_a_file_from_before_a_column_is_still_read_and_grows(tmp_path: Path) -> None:
    path, first = tmp_path / "x.csv", row("fwd_sm80", 1.0)
    append(path, [first])
    lines = [line.split(",") for line in path.read_text().splitlines()]
    place = lines[0].index("page_size")
    path.write_text("".join(",".join(x[:place] + x[place + 1 :]) + "\n" for x in lines))
    assert load(path) == [first]
    append(path, [replace(first, page_size=16)])
    assert [r.page_size for r in load(path)] == [0, 16]
    assert path.read_text().count("page_size") == 1


# ---- install -------------------------------------------------------------------------------------


def test_a_failed_installation_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'ERROR: some text'\necho 'OSError: no compiler'\nexit 1\n")
    python.chmod(0o755)
    assert install_size.pip(python, ["x"]) == "failed: OSError: no compiler"
    python.write_text("#!/bin/sh\nexit 0\n")
    assert install_size.pip(python, ["x"]) is None
    python.write_text("#!/bin/sh\nexec sleep 5\n")
    monkeypatch.setattr(install_size, "TIMEOUT", 0.1)
    assert "not done after" in str(install_size.pip(python, ["x"]))


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "x").write_bytes(b"12345")
    (tmp_path / "y").write_bytes(b"123")
    assert install_size.folder_size(tmp_path) == 8


def test_programs_of_the_stacks_compile() -> None:
    stacks = install_size.stacks(Path("rawattn.whl"))
    assert len({s.name for s in stacks}) == len(stacks)
    for stack in stacks:
        compile(stack.first or "", stack.name, "exec")
    exec(install_size.NUMPY, {})


def test_first_outputs_share_a_cache_in_each_round(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def timed(program: str, cache: str) -> float:
        seen.append((program, cache))
        return float(len(seen))

    monkeypatch.setattr(first_output, "microseconds", timed)
    times = first_output.measure()
    assert {len(x) for x in times.values()} == {first_output.PROCESSES}
    caches = [cache for program, cache in seen if program == first_output.OURS]
    assert caches[0] == caches[1] != caches[2] and len(set(caches)) == first_output.PROCESSES
    compile(first_output.TORCH, "torch", "exec")
    numpy = "import numpy, rawattn; cupy = numpy"
    code = first_output.OURS.replace("import cupy, numpy, rawattn", numpy)
    exec(code, {})


# ---- newcomer ------------------------------------------------------------------------------------


def test_steps_of_a_newcomer_are_timed_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In an environment without ours; a step that fails is told, and ends the run."""
    monkeypatch.setenv("RAWATTN_BACKEND", "x")
    monkeypatch.setenv("PYTHONPATH", "x")
    steps = {
        "good": [
            "sh",
            "-c",
            'test -z "$RAWATTN_BACKEND$PYTHONPATH" && test -n "$RAWATTN_CACHE_DIR"',
        ],
        "bad": ["sh", "-c", "echo something; echo no compiler; exit 3"],
        "after": ["sh", "-c", "exit 0"],
    }
    monkeypatch.setattr(newcomer, "steps", lambda clone: steps)
    assert newcomer.main(["--out", str(tmp_path)]) == 1
    rows = load(tmp_path / "install" / "newcomer.csv", newcomer.StepRow)
    assert [(r.step, r.result) for r in rows] == [
        ("good", "ok"),
        ("bad", "exit code 3: no compiler"),
    ]
    assert "something" in capsys.readouterr().err


def test_a_newcomer_takes_the_steps_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    for step in newcomer.steps(Path("clone")):
        assert step in readme or step == "first own call"
    compile(newcomer.first_call(readme), "README", "exec")
    assert newcomer.ACTIVATE in readme
