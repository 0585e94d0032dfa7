# SPDX-License-Identifier: Apache-2.0
"""The record of the GPU tests: what it counts, and that no file with GPU tests was left out."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.conftest import counts
from tools import gpu_outputs, gpu_tests

GENERATE, PAGED = gpu_tests.EXAMPLE_FILES


def record(**files: dict[str, dict[str, int]]) -> dict[str, Any]:
    """A record whose parts counted these files."""
    known = {"gpu": "NVIDIA H200", "date": "today", "sources": gpu_tests.sources_digest()}
    outcomes = ("passed", "failed", "skipped")
    return known | {
        part: {key: sum(n.get(key, 0) for n in found.values()) for key in outcomes}
        | {"files": found}
        for part, found in files.items()
    }


def complete() -> dict[str, dict[str, dict[str, int]]]:
    """Counts by part and file, every file once."""
    found: dict[str, dict[str, dict[str, int]]] = {"laws": {}, "example": {}, "pytest": {}}
    for name in gpu_tests.gpu_files():
        part = "laws" if name in gpu_tests.LAW_FILES else "pytest"
        found["example" if name in gpu_tests.EXAMPLE_FILES else part][name] = {"passed": 2}
    return found


def test_every_file_with_gpu_tests_ran_when_it_was_recorded() -> None:
    found = gpu_tests.load()
    if not gpu_tests.counts_files(found):
        pytest.skip("tests/gpu_record.json was made before files were counted: make gpu-record")
    assert gpu_tests.missing(found) == [], "make gpu-record, with gguf and the weights installed"


def test_the_example_and_the_kernels_have_gpu_tests() -> None:
    files = gpu_tests.gpu_files()
    assert {GENERATE, PAGED, *gpu_tests.LAW_FILES, "tests/test_gpu_dense.py"} <= set(files)
    assert "tests/test_gpu_outputs.py" not in files and "tests/test_gpu_record.py" not in files


def test_the_digest_is_of_code_that_there_is() -> None:
    package = gpu_tests.ROOT / "rawattn"
    for name in {*gpu_tests.LAUNCH_CODE, *gpu_outputs.CODE}:
        assert (package / f"{name}.py").is_file() or (package / name).is_dir(), name


@pytest.mark.parametrize("count", [{"skipped": 1}, {"failed": 2}, {}])
def test_a_file_of_which_nothing_passed_is_missing(
    count: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert gpu_tests.missing(record(**complete())) == []
    files = complete()
    files["example"][GENERATE] = count
    found = record(**files)
    assert gpu_tests.missing(found) == [GENERATE]
    monkeypatch.setattr(gpu_tests, "load", lambda: found)
    assert f"(none passed of {GENERATE})" in gpu_tests.status()
    del found["example"]
    assert gpu_tests.missing(found) == [GENERATE, PAGED]


def report(nodeid: str, why: str = "") -> SimpleNamespace:
    return SimpleNamespace(nodeid=nodeid, longrepr=("a.py", 1, f"Skipped: {why}"))


def test_tests_are_counted_by_file_and_skips_by_reason() -> None:
    stats = {
        "passed": [report("tests/b.py::x[1]"), report("tests/b.py::x[2]"), report("tests/a.py::y")],
        "error": [report("tests/a.py::z")],
        "failed": [report("tests/a.py::w")],
        "skipped": [report(GENERATE, "no gguf"), report(PAGED, "no gguf")],
        "deselected": [report("tests/c.py::x")],
    }
    found = json.loads(json.dumps(counts(stats)))
    assert (found["passed"], found["failed"], found["skipped"]) == (3, 2, 2)
    assert found["why_skipped"] == {"no gguf": 2}
    assert found["files"] == {
        "tests/a.py": {"passed": 1, "failed": 2},
        "tests/b.py": {"passed": 2},
        GENERATE: {"skipped": 1},
        PAGED: {"skipped": 1},
    }
    assert counts({})["passed"] == 0


def test_the_example_runs_beside_the_laws(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    together, written = threading.Barrier(2, timeout=10), []

    def pytest_of(*arguments: str, **environment: str) -> dict[str, Any]:
        if {*gpu_tests.LAW_FILES, *gpu_tests.EXAMPLE_FILES} & set(arguments):
            together.wait()
        files = [name for name in arguments if name.endswith(".py") and not name.startswith("-")]
        numbers = {"passed": 1, "failed": 0, "skipped": 0, "seconds": 0.0}
        return numbers | {"why_skipped": {}, "laws": {}, "files": dict.fromkeys(files, numbers)}

    monkeypatch.setattr(gpu_tests, "pytest", pytest_of)
    monkeypatch.setattr(gpu_tests, "compile_all", lambda: None)
    monkeypatch.setattr(gpu_tests, "write", lambda part, result: written.append((part, result)))
    monkeypatch.setattr("sys.argv", ["gpu_tests", "--laws", "40", "--pytest"])
    assert not gpu_tests.main()
    assert [part for part, _ in written] == ["laws", "example", "pytest"]
    assert list(dict(written)["example"]["files"]) == list(gpu_tests.EXAMPLE_FILES)
    assert dict(written)["laws"]["files"].keys() == set(gpu_tests.LAW_FILES)
