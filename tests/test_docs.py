# SPDX-License-Identifier: Apache-2.0
"""Every block of code in the pages runs, every link leads somewhere, every message is one of ours.

The comment before a block says what it needs: "needs a GPU", "needs a GPU and jax", "needs g++".
Blocks for a GPU compile here, and those for CuPy run with NumPy in its place.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rawattn as public
from rawattn.plan import fwd_sm80
from tests.markdown import ROOT, Block, blocks, pages
from tools import docs_hooks

PAGES = pages()
BLOCKS = {page: blocks((ROOT / page).read_text()) for page in PAGES}


def of(language: str) -> list[Any]:
    """The blocks of a language, as parameters with the marks of what they need."""
    return [
        pytest.param(b, id=f"{page}:{i}", marks=marks(page, b))
        for page, found in BLOCKS.items()
        for i, b in enumerate(found)
        if b.language == language
    ]


def marks(page: str, block: Block) -> list[Any]:
    found = [pytest.mark.emulator] if page == "docs/emulator.md" else []
    if not block.comment.startswith("needs "):
        return found
    for need in block.comment.removeprefix("needs ").split(" and "):
        if need == "a GPU":
            found.append(pytest.mark.gpu)
        elif need == "g++":
            found.append(pytest.mark.emulator)
        else:
            here = importlib.util.find_spec(need) is not None
            found.append(pytest.mark.skipif(not here, reason=f"needs {need}"))
    return found


def run(code: str) -> None:
    exec(compile(code, "page", "exec"), {"__name__": "page"})


def test_every_fence_is_a_block_of_a_known_kind() -> None:
    for page, found in BLOCKS.items():
        assert (ROOT / page).read_text().count("```") == 2 * len(found), page
        known = {"python", "sh", "console", "text", "cpp", ""}
        assert {b.language for b in found} <= known, page


@pytest.mark.parametrize("block", of("python"))
def test_python(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # JAX leaves memory to others
    run(block.text)


@pytest.mark.parametrize("page", PAGES)
def test_python_for_a_gpu_compiles_and_runs_with_numpy(page: str) -> None:
    for block in BLOCKS[page]:
        if block.language == "python" and "a GPU" in block.comment:
            compile(block.text, page, "exec")
            if block.comment == "needs a GPU":
                run(block.text.replace("import cupy", "import numpy as cupy"))


def rawattn(line: str, cache: Path) -> subprocess.CompletedProcess[str]:
    """Runs ``python -m rawattn ...``."""
    assert line.startswith("python -m rawattn"), line
    return subprocess.run(
        [sys.executable, *shlex.split(line, comments=True)[1:]],
        cwd=ROOT,
        env={**os.environ, "RAWATTN_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        check=False,
    )


LINES = {
    shlex.join(shlex.split(line, comments=True))
    for page, found in BLOCKS.items()
    if page.startswith(("README", "docs/"))
    for block in found
    if block.language == "sh"
    for line in block.text.splitlines()
    if line
}


@pytest.mark.parametrize("line", sorted(LINES))
def test_shell(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:  # takes minutes, and `make test` is what runs this
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        dry = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, env=env, capture_output=True)
        assert dry.returncode == 0 and dry.stdout
    elif words[:2] == ["pip", "install"]:  # `make dist` installs; here: is there such an extra?
        (extra,) = re.fullmatch(r"\.(?:\[(\w+)\])?", words[2]).groups()
        assert extra is None or f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
    else:
        done = rawattn(line, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("block", of("console"))
def test_console_blocks_show_what_commands_print(block: Block, tmp_path: Path) -> None:
    command, shown = re.fullmatch(r"\$ (.*?)\n(.*)", block.text, re.S).groups()
    assert rawattn(command, tmp_path).stdout == shown


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_to_files_and_headings(page: str) -> None:
    text = (ROOT / page).read_text()
    for target, anchor in re.findall(r"\]\((?!http)([^)#]*)#?([^)]*)\)", text):
        path = (ROOT / page).parent.joinpath(target) if target else ROOT / page
        assert path.exists(), target
        if anchor and path.suffix == ".md":
            assert anchor in anchors(path.read_text()), f"{target}#{anchor}"


def anchors(markdown: str) -> set[str]:
    """Of the headings of a page."""
    heads = re.findall(r"^#+ (.*)$", markdown, re.M)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


# ---- the pages -----------------------------------------------------------------------------------


def test_messages_of_the_troubleshooting_page_are_those_of_the_code() -> None:
    page = (ROOT / "docs/troubleshooting.md").read_text()
    quoted = [
        m for line in re.findall(r"^(`.*`)$", page, re.M) for m in re.findall(r"`(.*?)`", line)
    ]
    assert len(quoted) > 12
    code = "".join(path.read_text() for path in (ROOT / "rawattn").rglob("*.py"))
    joined = re.sub(r'"\s*\n\s*f?"', "", code)  # strings that go on in the next line
    # a value in the middle of a message is an expression in the code
    missing = [m for m in quoted if m not in joined and m not in re.sub(r"\{.*?\}", "{}", joined)]
    assert not missing


def test_every_public_name_is_in_the_api_page() -> None:
    page = (ROOT / "docs/api.md").read_text()
    homes = {f"rawattn.{module}.{name}" for name, module in public._HOMES.items()}
    assert set(re.findall(r"^::: (\S+)", page, re.M)) == homes


def test_the_migration_tables_name_what_there_is() -> None:
    """On our side of them: functions that are public, arguments that one of them takes."""
    page = (ROOT / "docs/migrate.md").read_text()
    functions = {name: getattr(public, name) for name in public._HOMES}
    arguments = {
        argument
        for function in functions.values()
        if inspect.isfunction(function)
        for argument in inspect.signature(function).parameters
    }
    sides = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")]
    code = " ".join(text for side in sides for text in re.findall(r"`(.*?)`", side))
    called = set(re.findall(r"(?<![.\w])([a-z_]+)\(", code))
    named = set(re.findall(r"(?<![.\w])([a-z_]+)=", code))
    alone = {text for side in sides for text in re.findall(r"`([a-z]+_[a-z_]+)`", side)}
    assert len(called) > 2 and len(named) > 5 and len(alone) > 20
    assert called <= functions.keys()
    assert named <= arguments
    assert alone <= functions.keys() | arguments


def test_exit_codes_of_the_command_line_are_documented() -> None:
    from rawattn.__main__ import EPILOG

    page = (ROOT / "docs/command-line.md").read_text()
    assert re.findall(r"^\| (\d) \|", page, re.M) == re.findall(r"\b(\d) ", EPILOG)


def test_the_tiles_of_the_kernel_s_page_are_those_of_its_plan() -> None:
    page = (ROOT / "docs/kernels/fwd_sm80.md").read_text()
    lines = [
        f"| {t.head_dim}, {t.value_dim} | {t.block_m} x {t.block_n} | "
        f"{'yes' if t.column_warps == 2 else 'no'} | {t.stages} | "
        f"{'yes' if t.q_in_registers else 'no'} |"
        for t in fwd_sm80.TILES
    ]
    assert re.findall(r"^\| \d+, \d+ \|.*\|$", page, re.M) == lines


def test_all_pages_are_in_the_navigation() -> None:
    listed = [page for part in docs_hooks.nav() for pages in part.values() for page in pages]
    assert len(listed) == len(set(listed))
    here = {p.relative_to(ROOT / "docs").as_posix() for p in ROOT.glob("docs/**/*.md")}
    assert set(listed) == here


def test_links_that_leave_the_docs_become_names() -> None:
    text = "[a](../README.md#x), [`CHANGELOG.md`](../CHANGELOG.md), [b](guide.md), ![c](../d.png)"
    assert docs_hooks.in_docs(text, "index.md") == (
        "a (`README.md`), `CHANGELOG.md`, [b](guide.md), ![c](../d.png)"
    )
    inside = "[a](../guide.md), [b](../../tests/ledger.csv)"
    assert (
        docs_hooks.in_docs(inside, "kernels/index.md") == "[a](../guide.md), b (`tests/ledger.csv`)"
    )
