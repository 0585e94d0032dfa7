# SPDX-License-Identifier: Apache-2.0
"""``python -m rawattn``, the commands that compile, run and remove kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rawattn import cache, host, plan
from rawattn.__main__ import parser
from rawattn.cli import compile as compile_command
from rawattn.cli import flags
from rawattn.device import Device

pytest_plugins = ("tests.cli",)
H200 = Device.named("H200")


# ---- compile and cache ---------------------------------------------------------------------------


def test_compile_fills_the_cache_which_lists_and_clears(run: Any, folder: Path) -> None:
    assert run("cache size --json").facts["entries"] == 0
    line = "compile --arch sm_80 --head-dim 32 --json"
    made = run(line)
    assert made.code == 0, made.err
    assert (made.facts["ready"], made.facts["failed"], made.facts["cache"]["entries"]) == (1, 0, 1)
    again = run(line).facts
    assert again["cache"] == made.facts["cache"]
    (entry,) = run("cache --json").facts["kernels"]
    assert entry["key"].startswith("fwd_sm80-sm_80-") and entry["intact"]
    (folder / entry["key"] / "kernel.cubin").write_bytes(b"")
    assert not run("cache list --json").facts["kernels"][0]["intact"]
    size = run("cache size --json").facts["size_bytes"]
    gone = run("cache clear --json").facts
    assert (gone["folder"], gone["removed"], gone["removed_bytes"]) == (str(folder), 1, size)
    assert list(folder.iterdir()) == []


def test_an_empty_variable_clears_nothing(
    run: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It means the default folder, which whoever wrote it may not have meant."""
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    entry = cache.Cache(tmp_path / "rawattn").get(KEY, lambda: {"kernel.cubin": b"code"})
    cache.default.cache_clear()
    assert run("cache size --json").facts["entries"] == 1
    found = run("cache clear")
    assert found.code == 2 and f"RAWATTN_CACHE_DIR='': that is {tmp_path / 'rawattn'}" in found.err
    assert entry.exists()


def test_ctrl_c_takes_one_line(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(compile_command, "compile_all", interrupted)
    assert run("compile --arch sm_80 --all") == (130, "", "rawattn compile: interrupted\n")
    assert run("compile --arch sm_80 --all --json").facts["message"] == "interrupted"


def test_a_kernel_that_does_not_compile_exits_with_1(
    run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compile_command, "compile_all", lambda *_: iter([None, "line 7: error"]))
    found = run("compile --arch sm_80 --all --json")
    assert found.code == 1 and found.facts["errors"] == ["line 7: error"]


def test_a_cache_that_cannot_be_written_is_an_error(folder: Path) -> None:
    folder.write_text("a file, not a folder")
    problem = flags.problem(parser().parse_args(["plan", "--head-dim", "32"]))
    launch = plan.plan(problem, H200, "fwd_sm80").launches[0]
    with pytest.warns(RuntimeWarning, match="cannot write"):
        why = compile_command._compile_one("fwd_sm80", launch.config, "sm_80")
    assert why is not None and "cannot be written" in why


def test_progress_needs_no_rich(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = [None, "error", None]
    assert list(compile_command._progress(iter(results), 3)) == results
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "rich.console", None)
    assert list(compile_command._progress(iter(results), 3)) == results
    assert capsys.readouterr() == ("", "compiled 1 of 3\ncompiled 2 of 3\ncompiled 3 of 3\n")


KEY = "fwd_sm80-sm_80-" + 32 * "0"
SCRATCH = f".{KEY}-{32 * 'f'}"


@pytest.mark.parametrize("place", [".", KEY, SCRATCH])
def test_a_folder_with_other_files_is_not_cleared(run: Any, folder: Path, place: str) -> None:
    cache.Cache(folder).get(KEY, lambda: {"kernel.cubin": b"code"})
    (folder / SCRATCH).mkdir()
    (folder / place / "thesis.tex").write_text("years of work")
    found = run("cache clear")
    assert found.code == 1 and "thesis.tex', which is no kernel" in found.err
    assert (folder / KEY / "kernel.cubin").exists() and (folder / SCRATCH).exists()
    (entry,) = run("cache --json").facts["kernels"]
    assert (entry["key"], entry["intact"]) == (KEY, place != KEY)
    (folder / place / "thesis.tex").unlink()
    assert run("cache clear --json").facts["removed"] == 1
    assert list(folder.iterdir()) == []


def test_objects_of_the_emulator_are_neither_counted_nor_cleared(run: Any, folder: Path) -> None:
    (folder / "emulator").mkdir(parents=True)
    (folder / "emulator" / "object.so").write_bytes(b"code")
    assert run("cache size --json").facts["size_bytes"] == 0
    assert run("cache clear --json").facts["removed"] == 0
    assert (folder / "emulator" / "object.so").exists()


def test_of_a_link_to_an_entry_the_link_is_cleared(run: Any, folder: Path, tmp_path: Path) -> None:
    elsewhere = cache.Cache(tmp_path / "elsewhere").get(KEY, lambda: {"kernel.cubin": b"code"})
    folder.mkdir()
    (folder / KEY).symlink_to(elsewhere)
    (folder / SCRATCH).symlink_to(tmp_path / "nowhere")
    assert run("cache --json").facts["kernels"][0]["intact"]
    assert run("cache clear --json").facts["removed"] == 1
    assert list(folder.iterdir()) == [] and cache.is_intact(elsewhere)


@pytest.mark.parametrize("action", ["list", "size", "clear"])
def test_a_cache_folder_that_cannot_be_written_is_named(
    run: Any, folder: Path, action: str
) -> None:
    folder.write_text("a file, not a folder")
    found = run(f"cache {action} --json")
    assert found.code == 1 and "Not a directory" in found.facts["unwritable"]
    assert "Not a directory. Is RAWATTN_CACHE_DIR right?" in run(f"cache {action}").out
    found = run("info --json")
    assert found.code == 0 and "Not a directory" in found.facts["cache"]["unwritable"]


def test_compile_takes_the_backend_of_the_environment(
    run: Any, folder: Path, backend: Callable[[str], None]
) -> None:
    backend("reference")
    found = run("compile --device H200")
    assert found.code == 2 and "reference: takes NumPy arrays" in found.err
    assert not folder.exists()


@pytest.fixture
def no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Any:
        raise RuntimeError("no CUDA GPU here")

    monkeypatch.setattr("rawattn.cli.selftest.import_cupy", refuse)


# ---- selftest ------------------------------------------------------------------------------------


def test_selftest_passes(run: Any) -> None:
    found = run("selftest --json")
    assert found.code == 0, found.out
    arrays = {c["arrays"] for c in found.facts["checks"]}
    assert arrays == ({"numpy"} if found.facts["no_gpu"] else {"numpy", "cupy"})
    assert all(0 <= c["error_of_bound"] <= 1 for c in found.facts["checks"])
    assert len(found.facts["checks"]) >= 9


def test_selftest_refuses_a_backend_that_there_is_not(
    run: Any, backend: Callable[[str], None]
) -> None:
    backend("fast")
    found = run("selftest --json")
    assert (
        found.code == 2
        and "RAWATTN_BACKEND='fast': accepted are fwd_sm90, fwd_sm80" in found.facts["message"]
    )


@pytest.mark.parametrize("name", ["fwd_sm80", "paged_v2"])
def test_selftest_without_a_gpu_names_the_variable(
    run: Any, backend: Callable[[str], None], no_cupy: None, name: str
) -> None:
    backend(name)
    code, out, err = run("selftest")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    assert f"RAWATTN_BACKEND='{name}' takes GPU arrays: no CUDA GPU here" in err


def test_selftest_finds_a_wrong_kernel(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = host.run

    def wrong(q: Any, k: Any, v: Any, out: Any, lse: Any = None, **arguments: Any) -> None:
        right(q, k, v, out, lse, **arguments)
        out *= 1.02

    monkeypatch.setattr(host, "run", wrong)
    found = run("selftest --json")
    assert found.code == 1 and found.facts["failed"] >= 9
    assert "AssertionError: out[" in found.facts["checks"][0]["result"]
