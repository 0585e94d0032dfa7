# SPDX-License-Identifier: Apache-2.0
"""What draws the bench's rows. No GPU."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from bench import facets, install_size, plot
from bench.cases import SUITES
from bench.rows import append
from tests.bench_rows import row

FWD = SUITES["fwd_sm80"]


def test_facets_are_what_differs_at_one_length() -> None:
    rows = [
        row("fwd_sm80", 1.0, head_dim=d, value_dim=d, q_heads=2048 // d, window_right=w, max_k=n)
        for d in (64, 128)
        for w in (-1, 0)
        for n in (512, 1024)
    ]
    assert facets.facets(rows) == ["head dim", "mask"]
    assert facets.facets([r for r in rows if r.head_dim == 64]) == ["mask"]
    decode = [row("decode_split", 1.0, batch=b, max_k=n) for b in (1, 8) for n in (512, 1024)]
    names, parts = facets.split([{"decode_split": r} for r in decode[::-1]], "decode_split")
    assert names == ["batch"] and list(parts) == [("1",), ("8",)]
    assert [g["decode_split"].max_k for g in parts[("8",)]] == [512, 1024]
    assert facets.mask(row("x", 1.0, window_left=5, window_right=0)) == "window 5, 0"


def test_queries_count_where_a_line_would_mix_them() -> None:
    chunks = [row("x", 1.0, max_q=q, max_k=k) for q, k in ((512, 32768), (2048, 8192))]
    assert facets.facets(chunks) == ["queries"]
    assert facets.facets([row("x", 1.0, max_q=n, max_k=n) for n in (512, 1024)]) == []


def test_what_all_cells_have_in_common_is_told() -> None:
    cells = [row("x", 1.0, max_q=1, max_k=n, page_size=p) for n in (512, 1024) for p in (16, 64)]
    told = facets.shared(cells, ["page"])
    assert {"no mask", "queries 1"} <= set(told) and not any("page" in words for words in told)
    assert facets.shared([row("x", 1.0, max_q=n, max_k=n) for n in (512, 1024)], []) != []
    assert facets.shared([row("merge", 1.0, max_q=512, max_k=0)], []) == []


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Figures, in place of files."""
    pytest.importorskip("matplotlib")
    figures: list[Any] = []
    monkeypatch.setattr(plot, "save", lambda figure, path, **text: figures.append(figure))
    return figures


def test_a_plot_of_a_suite_shows_its_rows_and_names_gaps(
    drawn: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.csv"
    rows = []
    for n, us in ((512, 10.0), (1024, 5.0)):
        rows += [
            row("fwd_sm80", us, case=str(n), max_k=n, timestamp=str(n)),
            row("fa2", 8.0, case=str(n), max_k=n, timestamp=str(n)),
        ]
    lone = {"case": "lone", "head_dim": 128, "value_dim": 128, "max_k": 512, "timestamp": "0"}
    rows += [row("fwd_sm80", 10.0, **lone), row("cudnn", 5.0, **lone)]
    append(path, rows)
    monkeypatch.setattr(plot, "LEAST", 2)
    plot._draw_suite(path, {}, FWD, path)
    (figure,) = drawn
    (axes,) = (a for a in figure.axes if a.get_visible())
    first, second = axes.containers
    assert list(first.lines[0].get_xdata()) == [512, 1024]
    assert list(first.lines[0].get_ydata()) == [100.0, 200.0]
    assert list(second.lines[0].get_ydata()) == [125.0, 125.0]
    low, high = first.lines[2][0].get_segments()[0][:, 1]
    assert (low, high) == (pytest.approx(100 / 1.01), pytest.approx(100 / 0.99))
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [
        "fwd_sm80",
        "FlashAttention-2",
        "FlashAttention-3 (not measured)",
    ]
    assert axes.get_ylim()[0] == 0


def test_cells_that_differ_in_queries_are_not_connected(drawn: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    kind = {"op": "decode", "q_heads": 32, "kv_heads": 8, "window_right": 0, "page_size": 16}
    for queries, keys in ((512, 4096), (2048, 8192)):
        cell = {**kind, "case": str(queries), "max_q": queries, "max_k": keys, "timestamp": "0"}
        append(path, [row("fwd_sm90_paged", 10.0, **cell), row("fa3", 20.0, **cell)])
    plot._draw_suite(path, {}, SUITES["prompts"], path)
    (axes,) = drawn[0].axes
    words = [label.get_text() for label in axes.get_yticklabels()]
    assert words == ["queries 512, 4k keys", "queries 2048, 8k keys"]
    ours, peer = axes.containers
    assert ours.lines[0].get_linestyle() == "None"
    assert (list(ours.lines[0].get_xdata()), list(peer.lines[0].get_xdata())) == (
        [100.0, 100.0],
        [50.0, 50.0],
    )
    assert "causal" in axes.get_title() and "32 over 8 heads" in axes.get_title()


def test_a_line_breaks_where_a_peer_was_not_measured(drawn: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    for n in (512, 1024, 2048):
        times = {"fwd_sm80": 10.0} | ({"fa2": 20.0} if n != 1024 else {})
        append(path, [row(b, us, case=str(n), max_k=n) for b, us in times.items()])
    plot._draw_suite(path, {}, FWD, path)
    ours, peer = next(a for a in drawn[0].axes if a.get_visible()).containers
    assert list(ours.lines[0].get_ydata()) == [100.0] * 3
    first, gap, last = peer.lines[0].get_ydata()
    assert (first, last) == (50.0, 50.0) and math.isnan(gap)


def test_a_library_looks_alike_in_all_pictures() -> None:
    """And no two candidates of a suite look alike."""
    for suite in SUITES.values():
        looks = [plot._look(suite, name) for name in (suite.backend, *suite.peers)]
        assert len({(look["color"], look["marker"]) for look in looks}) == len(looks)
    ours = plot.COLOURS[0]
    assert all(colour != ours for colour, _ in plot.LOOKS.values())


def test_what_could_not_be_installed_keeps_its_place(drawn: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    known: dict[str, Any] = dict.fromkeys(("versions", "cpu", "python", "commit", "timestamp"), "")
    rows = [
        install_size.InstallRow(
            stack=name,
            packages=3,
            size_mb=5.0,
            install_seconds=2.0,
            first_output_seconds=first,
            result=result,
            **known,
        )
        for name, first, result in (
            ("rawattn", 0.5, "ok"),
            ("broken", math.nan, "failed"),
            ("gpu", math.nan, "ok"),
        )
    ]
    append(path, rows)
    plot._draw_install(path, {}, path)
    size, _, first = drawn[0].axes
    assert [bar.get_width() for bar in size.patches] == [5.0, 0.0, 5.0]
    assert [bar.get_width() for bar in first.patches] == [0.5, 0.0, 0.0]
    assert "could not be installed" in "".join(t.get_text() for t in size.texts)
    assert "runs on a GPU" in "".join(t.get_text() for t in first.texts)


def test_the_pictures_of_the_docs_are_of_the_committed_rows() -> None:
    pytest.importorskip("PIL")
    assert plot.stale() == [], "make plots"


def test_a_stale_picture_is_found(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    results = tmp_path / "results"
    (results / "nvidia-h200").mkdir(parents=True)
    path = results / "nvidia-h200" / "fwd_sm80.csv"
    append(path, [row("fwd_sm80", 1.0, max_k=512), row("fa2", 2.0, max_k=512)])
    names = [p.name for p in plot.pictures(results)]
    assert names == ["fwd_sm80-nvidia-h200.png", "roofline-nvidia-h200.png", "traffic.png"]
    for picture in plot.pictures(results):
        picture.draw(tmp_path / picture.name, {plot.KEY: picture.digest})
    assert plot.stale(tmp_path, results) == []
    append(path, [row("fwd_sm80", 3.0, case="d")])
    assert plot.stale(tmp_path, results) == names[:2]
    (tmp_path / "old.png").write_bytes((tmp_path / "traffic.png").read_bytes())
    assert plot.stale(tmp_path, results) == [*names[:1], "old.png", names[1]]
