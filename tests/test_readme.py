# SPDX-License-Identifier: Apache-2.0
"""Figures of speed in the pages are committed rows."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from bench import first_output, table
from bench.cases import SUITES
from bench.host_time import host_row
from bench.install_size import InstallRow
from bench.newcomer import StepRow
from bench.rows import Row, append
from tests import bench_rows
from tests.markdown import ROOT, blocks, pages


@pytest.mark.parametrize("page", table.PAGES)
def test_figures_of_speed_are_the_committed_rows(page: str) -> None:
    text = (ROOT / page).read_text()
    assert table.section(text) == table.markdown(page), "python bench/table.py --write"


# Pages of computed limits, and of kernels, which name their rows, have other figures.
@pytest.mark.parametrize(
    "page",
    [
        page
        for page in pages()
        if page.startswith(("README", "docs/"))
        and not page.startswith(("docs/kernels/", "docs/roofline", "docs/command-line"))
    ],
)
def test_no_other_figure_of_speed_is_in_a_page(page: str) -> None:
    text = (ROOT / page).read_text()
    rest = table.replaced(text, "") if page in table.PAGES else text
    assert not re.search(r"\d\s*(TFLOP|GB/s|TB/s|x faster|times faster|µs|us\b|ms\b)", rest)


def test_the_bench_counts_its_cells() -> None:
    text = (ROOT / "bench" / "README.md").read_text()
    ampere, hopper, decode = (len(SUITES[n].cases) for n in ("fwd_sm80", "fwd_sm90", "decode"))
    assert f"# {ampere} cells, ours" in text and f"# these and {hopper - ampere} more" in text
    assert f"# {decode} cells over paged caches" in text


def test_the_examples_for_cupy_and_numpy_are_one() -> None:
    found = blocks((ROOT / "README.md").read_text())
    gpu, cpu = (b.text for b in found if "q = rng.standard_normal((2, 1000, 32" in b.text)
    assert gpu.replace("cupy", "np").replace("import np", "import numpy as np") == cpu


# ---- the tables ----------------------------------------------------------------------------------


def rows_of(head_dim: int, causal: bool, length: int, **times: float) -> list[Row]:
    """Rows of one case, with these times in us; 10 us are 100 TFLOP/s."""
    return [
        bench_rows.row(
            backend,
            us,
            case=f"{head_dim}-{causal}-{length}",
            head_dim=head_dim,
            value_dim=head_dim,
            window_right=0 if causal else -1,
            max_q=length,
            max_k=length,
        )
        for backend, us in times.items()
    ]


def test_the_table_spans_lengths_and_shows_gaps(tmp_path: Path) -> None:
    results, page = tmp_path / "bench" / "results", "docs/bench.md"
    assert table.markdown(page, results) == table.NO_ROWS
    append(
        results / "nvidia-h200" / "fwd_sm80.csv",
        [
            *rows_of(64, True, 512, fwd_sm80=99.0, fa2=1.0),  # measured again further down
            *rows_of(128, False, 512, fwd_sm80=4.0, fa2=4.0),
            *rows_of(128, True, 512, fwd_sm80=5.0, fa2=4.0),
            *[replace(r, timestamp="later") for r in rows_of(64, True, 512, fwd_sm80=10, fa2=11)],
            *rows_of(64, True, 4096, fwd_sm80=5.0, fa2=4.0, cudnn=10.0),
            *rows_of(64, True, 9999, fa2=1.0),  # ours was wrong there: no row of ours
        ],
    )
    made = table.markdown(page, results)
    assert (
        "| 64 | causal | 2, 512 to 4096 | 100 to 200 | 0.80 to 1.10 | 2.00 (1 of 2) | - |\n" in made
    )
    assert "| 128 | none | 1, 512 | 250 | 1.00 | - | - |\n" in made
    assert made.index("| 64 |") < made.index("| 128 | none") < made.index("| 128 | causal")
    assert "(../bench/results/nvidia-h200/fwd_sm80.csv)" in made and "cuDNN in 1.0" in made
    assert " Not measured: FlashAttention-3. " in made


def test_the_readme_has_lines_of_many_lengths_alone(tmp_path: Path) -> None:
    results = tmp_path / "bench" / "results"
    rows = [r for n in (512, 1024, 2048) for r in rows_of(64, True, n, fwd_sm80=5.0, fa2=4.0)]
    rows += rows_of(128, True, 512, fwd_sm80=5.0, fa2=4.0)
    append(results / "nvidia-h200" / "fwd_sm80.csv", rows)
    made = table.markdown("README.md", results)
    assert "| 3, 512 to 2048 | 200 | 0.80 |\n" in made and "1, 512" not in made
    assert "/ cuDNN" not in made and " Not measured: cuDNN; FlashAttention-3. " in made
    # it has one value among the lines
    assert "| head dim |" not in made and "All lines: head dim 64, causal" in made
    assert "(bench/results/" in made
    assert "head dim" in table.markdown("docs/bench.md", results)


def test_what_memory_binds_is_told_in_bytes(tmp_path: Path) -> None:
    results = tmp_path / "bench" / "results"
    rows = [replace(r, bound="memory") for r in rows_of(64, True, 512, fwd_sm80=5.0, fa2=4.0)]
    append(results / "nvidia-h200" / "fwd_sm80.csv", rows)
    assert "| 1, 512 | 100 | 0.80 |" in table.markdown("README.md", results)
    assert "| GB/s |" in table.markdown("README.md", results)


def test_an_unknown_commit_gives_way_to_the_digest_of_the_sources(tmp_path: Path) -> None:
    (row,) = rows_of(64, False, 512, fwd_sm80=1.0)
    for commit, shown in (("abc123", "Commit abc123,"), ("unknown", "Sources 0f0f,")):
        file = tmp_path / commit / "bench" / "results" / "nvidia-h200" / "fwd_sm80.csv"
        append(file, [replace(row, commit=commit, sources="0f0f")])
        assert shown in table.markdown("README.md", file.parents[1])


def test_writing_changes_what_is_between_the_comments_alone() -> None:
    text = f"before\n{table.BEGIN}old\n{table.END}after\n"
    assert table.section(text) == "old\n"
    written = table.replaced(text, "new\n")
    assert written == f"before\n{table.BEGIN}new\n{table.END}after\n"
    with pytest.raises(ValueError):
        table.section("no comments here")


def test_what_could_not_be_installed_has_dashes(tmp_path: Path) -> None:
    folder = tmp_path / "install"
    known = dict.fromkeys(("cpu", "python", "commit", "timestamp"), "x")
    sizes = {"packages": 3, "size_mb": 1234.0, "install_seconds": 5.0}
    append(
        folder / "install_size.csv",
        [
            InstallRow(stack=s, versions="v 1", first_output_seconds=f, result=r, **sizes, **known)
            for s, f, r in (("a", 0.25, "ok"), ("b", math.nan, "ok"), ("c", math.nan, "failed: x"))
        ],
    )
    made = table.markdown(table.INSTALL, tmp_path)
    assert "| a | v 1 | 3 | 1,234 | 5 | 0.2 |\n| b | v 1 | 3 | 1,234 | 5 | - |\n" in made
    assert "| c (could not be installed here) | v 1 | - | - | - | - |\n" in made
    append(
        folder / "newcomer.csv",
        [StepRow(step="make demo", seconds=s, result="ok", cores=2, **known) for s in (9.0, 7.5)],
    )
    assert "| make demo | 7.5 |\n" in table.markdown(table.INSTALL, tmp_path)
    append(
        folder / "newcomer.csv",
        [StepRow(step="make test", seconds=3.0, result="a test failed", cores=2, **known)],
    )
    assert "make test" not in table.markdown(table.INSTALL, tmp_path)


def test_first_outputs_are_beside_one_another(tmp_path: Path) -> None:
    assert "first output on a GPU" not in table.markdown(table.INSTALL, tmp_path)
    for what, seconds in (("torch", 5.0), ("rawattn", 9.0), ("rawattn", 2.0)):
        times = [1e6 * seconds * f for f in (0.9, 1.0, 1.2)]
        made = host_row(f"{first_output.FIRST_OUTPUT}{what}", times, "NVIDIA H200")
        append(tmp_path / "nvidia-h200" / "host_time.csv", [made])
    append(tmp_path / "nvidia-h200" / "host_time.csv", [host_row("call", [5.0], "NVIDIA H200")])
    lines = table.markdown(table.INSTALL, tmp_path).splitlines()
    assert lines[-2:] == [
        "| torch, NVIDIA H200 | 5.0 | 4.7 to 5.6 |",
        "| rawattn, NVIDIA H200 | 2.0 | 1.9 to 2.2 |",
    ]


def test_cells_where_a_peer_is_faster_are_named(tmp_path: Path) -> None:
    results, page = tmp_path / "bench" / "results", "docs/bench.md"
    rows = [
        *rows_of(64, True, 512, fwd_sm90=10.0, fa3=8.0, cudnn=9.0),
        *rows_of(64, True, 1024, fwd_sm90=10.0, fa3=9.95, cudnn_fp8=1.0),  # equal, to 1 %
        *rows_of(64, True, 2048, fwd_sm90=10.0, fa3=11.0),
    ]
    append(results / "nvidia-h200" / "fwd_sm90.csv", rows)
    line = "A peer was more than 1 % faster in 1 of 3 cells, ours at: "
    line += "64-True-512 0.80 of FlashAttention-3."
    assert line in table.markdown(page, results).splitlines()
    assert line in table.markdown("README.md", results)
    more = [r for n in range(5) for r in rows_of(128, True, n, fwd_sm90=10.0, fa3=9.0 - n)]
    append(results / "nvidia-h200" / "fwd_sm90.csv", more)
    short, full = (table.markdown(page, results) for page in ("README.md", "docs/bench.md"))
    assert (
        "in 6 of 8 cells, ours at: 128-True-4 0.50" in short
        and "2 more [there](docs/bench.md)" in short
    )
    assert "128-True-0 0.90 of FlashAttention-3." in full and "more [there]" not in full
