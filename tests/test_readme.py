# SPDX-License-Identifier: Apache-2.0
"""Every code block of the README runs, its links lead somewhere, its figures are committed rows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

import pytest

from bench import table
from bench.cases import SUITES
from bench.rows import Row, append

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
NEEDS = {"needs a GPU": pytest.mark.gpu, "needs g++": pytest.mark.emulator}


class Block(NamedTuple):
    """A fenced block, and the comment on the line before it."""

    comment: str
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    found = re.findall(r"(?:^<!-- (.*?) -->\n)?^```(\w*)\n(.*?)^```$", markdown, re.M | re.S)
    return [Block(*groups) for groups in found]


BLOCKS = blocks(README)


def lines_of(language: str) -> list[str]:
    return [line for b in BLOCKS if b.language == language for line in b.text.splitlines() if line]


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


def test_all_blocks_are_of_a_kind_that_runs() -> None:
    assert README.count("```") == 2 * len(BLOCKS)
    assert {b.language for b in BLOCKS} == {"python", "sh", "console"}
    assert {b.comment for b in BLOCKS} - {""} == set(NEEDS)


PYTHON = [
    pytest.param(b.text, id=f"block{i}", marks=[NEEDS[b.comment]] if b.comment else [])
    for i, b in enumerate(BLOCKS)
    if b.language == "python"
]


@pytest.mark.parametrize("code", PYTHON)
def test_python(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})


def test_the_examples_for_cupy_and_numpy_are_one() -> None:
    gpu, cpu = (b.text for b in BLOCKS if b.language == "python" and "rng = " in b.text)
    assert gpu.replace("cupy", "np").replace("import np", "import numpy as np") == cpu


@pytest.mark.parametrize("line", lines_of("sh"))
def test_shell(line: str, tmp_path: Path) -> None:
    words = shlex.split(line, comments=True)
    if words[:1] == ["make"]:  # takes minutes, and `make test` is what runs this
        env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
        dry = subprocess.run(["make", "-n", *words[1:]], cwd=ROOT, env=env, capture_output=True)
        assert dry.returncode == 0 and dry.stdout
    elif words[:2] == [
        "pip",
        "install",
    ]:  # test_packaging.py installs; here: is there such an extra?
        (extra,) = re.fullmatch(r"\.(?:\[(\w+)\])?", words[2]).groups()
        assert extra is None or f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
    else:
        done = rawattn(line, tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr


def test_console_blocks_show_what_commands_print(tmp_path: Path) -> None:
    for block in BLOCKS:
        if block.language == "console":
            command, shown = re.fullmatch(r"\$ (.*?)\n(.*)", block.text, re.S).groups()
            assert rawattn(command, tmp_path).stdout == shown


@pytest.mark.parametrize(
    "page",
    ["README.md", "CONTRIBUTING.md", "docs/emulator.md", "examples/README.md", "bench/README.md"],
)
def test_links_lead_to_files(page: str) -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)", (ROOT / page).read_text())
    assert links
    for link in links:
        assert (ROOT / page).parent.joinpath(link).is_file(), link


@pytest.mark.emulator
def test_the_example_of_the_emulator_page_runs() -> None:
    (code,) = (b.text for b in blocks((ROOT / "docs/emulator.md").read_text()) if b.language)
    exec(compile(code, "emulator.md", "exec"), {"__name__": "emulator"})


# ---- the table of speed --------------------------------------------------------------------------


def test_figures_of_speed_are_the_committed_rows() -> None:
    assert table.section(README) == table.markdown(), "python bench/table.py --write"
    rest = table.replaced(README, "")
    assert not re.search(r"\d\s*(TFLOP|GB/s|x faster|times faster|µs|us\b|ms\b)", rest)


BLANK: dict[str, object] = {"int": 0, "float": 0.0, "str": "", "bool": False}
ROW = Row(**{field.name: BLANK[str(field.type)] for field in fields(Row)})


def rows_of(head_dim: int, causal: bool, length: int, **times: float) -> list[Row]:
    """Rows of one case, with these times in us; 10 us are 100 TFLOP/s."""
    values = {
        "case": f"{head_dim}-{causal}-{length}",
        "head_dim": head_dim,
        "window_right": 0 if causal else -1,
        "max_q": length,
        "gpu": "NVIDIA H200",
    }
    return [
        replace(ROW, **values, backend=backend, p50_us=us, tflops=1000 / us, peer_version="1.0")
        for backend, us in times.items()
    ]


def test_the_table_spans_lengths_and_shows_gaps(tmp_path: Path) -> None:
    results = tmp_path / "bench" / "results"
    assert table.markdown(results) == table.NO_ROWS
    append(
        results / "nvidia-h200" / "fwd_sm80.csv",
        [
            *rows_of(64, True, 512, fwd_sm80=99.0, fa2=1.0),  # measured again further down
            *rows_of(128, False, 512, fwd_sm80=4.0, fa2=4.0),
            *[replace(r, timestamp="later") for r in rows_of(64, True, 512, fwd_sm80=10, fa2=11)],
            *rows_of(64, True, 4096, fwd_sm80=5.0, fa2=4.0, cudnn=10.0),
            *rows_of(64, True, 9999, fa2=1.0),  # ours was wrong there: no row of ours
        ],
    )
    made = table.markdown(results)
    assert "| 64 | causal | 2, 512 to 4096 | 100 to 200 | 0.80 to 1.10 | 2.00 | - |\n" in made
    assert "| 128 | none | 1, 512 | 250 | 1.00 | - | - |\n" in made
    assert made.index("| 64 |") < made.index("| 128 |")
    assert "(bench/results/nvidia-h200/fwd_sm80.csv)" in made and "cuDNN in 1.0" in made


def test_an_unknown_commit_gives_way_to_the_digest_of_the_sources(tmp_path: Path) -> None:
    (row,) = rows_of(64, False, 512, fwd_sm80=1.0)
    for commit, shown in (("abc123", "Commit abc123,"), ("unknown", "Sources 0f0f,")):
        file = tmp_path / commit / "bench" / "results" / "nvidia-h200" / "fwd_sm80.csv"
        append(file, [replace(row, commit=commit, sources="0f0f")])
        assert shown in table.markdown(file.parents[1])


def test_writing_changes_what_is_between_the_comments_alone() -> None:
    text = f"before\n{table.BEGIN}old\n{table.END}after\n"
    assert table.section(text) == "old\n"
    written = table.replaced(text, "new\n")
    assert written == f"before\n{table.BEGIN}new\n{table.END}after\n"
    with pytest.raises(ValueError):
        table.section("no comments here")
    assert SUITES["fwd_sm80"].peers == tuple(table.NAMES)
