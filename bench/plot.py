# SPDX-License-Identifier: Apache-2.0
"""All pictures of docs/img/, from the committed rows.

    python bench/plot.py            draw them (`make plots`)
    python bench/plot.py --check    say which are not of the committed rows; exits with 1 for some

Needs matplotlib, and no GPU. Each PNG holds a digest of the rows that it was drawn from. A peer
that has rows nowhere is named as such in the legend.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import twins
from bench.cases import SUITES, Suite
from bench.facets import OTHERS, Group, length, name, shared, short, split, words
from bench.host_time import HostRow
from bench.install_size import InstallRow
from bench.plot_fp16 import draw_fp16
from bench.plot_traffic import draw_traffic
from bench.rows import RESULTS, ROOT, Row, groups, load
from rawattn import roofline
from rawattn.device import Device
from rawattn.roofline.draw import COLOURS, MARKERS, STYLE, draw, points, pyplot, save

IMAGES = ROOT / "docs" / "img"
KEY = "Rows"  # of the PNG text chunk
COLUMNS = 3  # panels side by side
GREY = COLOURS[7]
# One colour for a library in all pictures. Its forms differ by marker; those of FORMS are hollow,
# and their lines are broken.
LOOKS = {
    "fa3": (COLOURS[1], "s"),
    "cudnn": (COLOURS[2], "^"),
    "cudnn_fe": (COLOURS[2], "v"),
    "cudnn_fp8": (COLOURS[2], "*"),
    "fa2": (COLOURS[3], "D"),
    "flashinfer": (COLOURS[4], "P"),
    "flashinfer_cuda": (COLOURS[4], "p"),
    "jax": (COLOURS[5], "h"),
    "triton": (COLOURS[6], "x"),
    "vllm": (COLOURS[6], "X"),
    "vllm_v1": (COLOURS[6], "<"),
    "vllm_v2": (COLOURS[6], ">"),
    "read": (GREY, "*"),
    "copy": (GREY, "*"),
    "add": (GREY, "P"),
}
FORMS = ("cudnn_fe", "flashinfer_cuda", "vllm_v2")
BARS = "bars: p20 to p80"
LEAST = 3  # lengths that make a line; kinds of cases with fewer are in the tables alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A PNG, the files that it is drawn from, and how."""

    name: str
    sources: tuple[Path, ...]
    draw: Callable[[Path, dict[str, str]], None]  # into a file, with text chunks

    @property
    def digest(self) -> str:
        """12 hex digits over the sources."""
        return hashlib.sha256(b"\0".join(p.read_bytes() for p in self.sources)).hexdigest()[:12]


def pictures(results: Path = RESULTS) -> list[Picture]:
    """Every picture that there are rows for."""
    found = []
    for folder in sorted(p for p in results.iterdir() if p.is_dir()):
        own = [(s, folder / f"{s.name}.csv") for s in SUITES.values()]
        own = [(suite, path) for suite, path in own if path.exists()]
        for suite, path in own:
            found.append(_picture(f"{suite.name}-{folder.name}", (path,), _draw_suite, suite))
            if twins.fp16_lines(load(path), suite.backend):
                found.append(_picture(f"fp16-{folder.name}", (path,), draw_fp16, suite))
        if own:
            found.append(_picture(f"roofline-{folder.name}", tuple(p for _, p in own), _draw_roofs))
        host = folder / "host_time.csv"
        if host.exists():
            found.append(_picture(f"host_time-{folder.name}", (host,), _draw_host))
    install = results / "install" / "install_size.csv"
    if install.exists():
        found.append(_picture("install", (install,), _draw_install))
    return [*found, _picture("traffic", (), draw_traffic)]


def _picture(
    stem: str, sources: tuple[Path, ...], draw: Callable[..., None], *more: Any
) -> Picture:
    return Picture(
        name=f"{stem}.png",
        sources=sources,
        draw=lambda path, text: draw(path, text, *more, *sources),
    )


def stale(images: Path = IMAGES, results: Path = RESULTS) -> list[str]:
    """Pictures that are missing or not of the rows, and files that are no pictures of ours."""
    from PIL import Image

    wanted = {p.name: p.digest for p in pictures(results)}
    here = {path.name: Image.open(path).text.get(KEY) for path in images.glob("*.png")}
    return sorted(n for n in wanted.keys() | here.keys() if wanted.get(n) != here.get(n))


# ---- the pictures --------------------------------------------------------------------------------


def _draw_suite(path: Path, text: dict[str, str], suite: Suite, source: Path) -> None:
    """A panel for each kind of case; speed over length, bars from p20 to p80."""
    facets, kinds = split(groups(load(source)).values(), suite.backend, LEAST)
    cells = [group for part in kinds.values() for group in part]
    by_compute = [g[suite.backend].bound for g in cells].count("compute") * 2 >= len(cells)
    measured = {row.backend for row in load(source)}
    if len(cells) == len(kinds) > 1:
        _draw_cells(path, text, suite, facets, kinds, by_compute, measured)
        return
    plt = pyplot()
    with plt.rc_context(STYLE):
        wide = 2 if len(kinds) == 4 else min(COLUMNS, len(kinds))
        rows = math.ceil(len(kinds) / wide)
        size = 3.6 * wide, 2.9 * rows
        figure, grid = plt.subplots(rows, wide, figsize=size, sharey=True, squeeze=False)
        panels = list(grid.flat)
        order = _by_column(len(kinds), facets, list(kinds))
        for place, labels in enumerate(order):
            _panel(panels[place], suite, kinds[labels], by_compute)
            title = ", ".join(words(f, x) for f, x in zip(facets, labels, strict=True))
            panels[place].set_title(textwrap.fill(title, 48), fontsize=8.5)
        for panel in panels[len(order) :]:
            panel.set_visible(False)
        figure.supylabel(_figure(by_compute), fontsize=10)
        what = "keys of a sequence" if cells[0][suite.backend].max_k else "tokens"
        told = "; ".join([f"{what} (log scale)", *_common(suite, cells, facets), BARS])
        figure.supxlabel(told, fontsize=10)
        gpu = cells[0][suite.backend].gpu
        _peak(panels[: len(order)], Device.named(gpu), by_compute)
        figure.suptitle(f"{suite.name} on {gpu}: higher is faster", fontsize=12)
        figure.tight_layout(rect=(0, 0, 1, 1 - 0.2 / size[1]))  # below the title
        _legend(figure, suite, cells, measured)
        save(figure, path, **text)


def _draw_cells(
    path: Path,
    text: dict[str, str],
    suite: Suite,
    facets: Sequence[str],
    kinds: dict[tuple[str, ...], list[Group]],
    by_compute: bool,
    measured: Collection[str],
) -> None:
    """A line for each cell, where no two differ in length alone: there is nothing to connect."""
    cells = [part[0] for part in kinds.values()]
    labels = [
        ", ".join([*map(words, facets, values), f"{short(length(group[suite.backend]))} keys"])
        for values, group in zip(kinds, cells, strict=True)
    ]
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(11, 0.4 * len(cells) + 1.6))
        for backend in (suite.backend, *suite.peers):
            at = [i for i, group in enumerate(cells) if backend in group]
            numbers = [_speed(cells[i][backend], by_compute) for i in at]
            bars = tuple(zip(*[(low, high) for _, low, high in numbers], strict=True))
            look = _look(suite, backend) | {"linestyle": "none", "elinewidth": 1.3}
            if at:
                axes.errorbar([speed for speed, _, _ in numbers], at, xerr=bars, **look)
        axes.set_yticks(range(len(cells)), labels)
        axes.invert_yaxis()
        gpu = cells[0][suite.backend].gpu
        peak, unit = _vendors(Device.named(gpu), by_compute)
        axes.set_xlim(0, 1.05 * max(peak, axes.get_xlim()[1]))
        axes.axvline(peak, color="#444444", linestyle=":", linewidth=1)
        axes.set_xlabel(f"{_figure(by_compute)}; {BARS}; dotted: vendor's peak {peak:.0f} {unit}")
        told = "; ".join([f"{suite.name} on {gpu}", *_common(suite, cells, facets)])
        axes.set_title(f"{told}: farther right is faster", fontsize=12)
        figure.tight_layout()
        _legend(figure, suite, cells, measured)
        save(figure, path, **text)


def _figure(by_compute: bool) -> str:
    return "TFLOP/s" if by_compute else "GB/s of least bytes"


def _common(suite: Suite, cells: Sequence[Group], facets: Sequence[str]) -> list[str]:
    """What all cells have in common, as one part of a label; none where that is nothing."""
    told = shared([group[suite.backend] for group in cells], facets)
    return [", ".join(told)] if told else []


def _by_column(
    count: int, facets: Sequence[str], kinds: Sequence[tuple[str, ...]]
) -> list[tuple[str, ...]]:
    """Panels so that the first facet goes from left to right, where it fills the rows evenly."""
    first = len({labels[0] for labels in kinds}) if facets else 0
    if first != COLUMNS or count % COLUMNS:
        return list(kinds)
    return sorted(kinds, key=lambda labels: (kinds.index(labels) % (count // first),))


def _panel(axes: Any, suite: Suite, cells: Sequence[Group], by_compute: bool) -> None:
    """Speed of each candidate; a line breaks where a length has no row of it."""
    for backend in (suite.backend, *suite.peers):
        rows = [group.get(backend) for group in cells]
        if not any(rows):
            continue
        numbers = [_speed(row, by_compute) for row in rows]
        axes.errorbar(
            [length(group[suite.backend]) for group in cells],
            [speed for speed, _, _ in numbers],
            yerr=tuple(zip(*[(low, high) for _, low, high in numbers], strict=True)),
            **_look(suite, backend),
        )
    lengths = sorted({length(group[suite.backend]) for group in cells})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(n) for n in lengths])
    axes.minorticks_off()


def _speed(row: Row | None, by_compute: bool) -> tuple[float, float, float]:
    """The figure of a row, and how far its bar goes down and up; NaN without a row."""
    if row is None:
        return math.nan, math.nan, math.nan
    speed = row.tflops if by_compute else row.gb_per_s
    return speed, speed * (1 - row.p50_us / row.p80_us), speed * (row.p50_us / row.p20_us - 1)


def _look(suite: Suite, backend: str) -> dict[str, Any]:
    ours = backend == suite.backend
    colour, marker = (COLOURS[0], MARKERS[0]) if ours else LOOKS[backend]
    return {
        "color": colour,
        "marker": marker,
        "markersize": 7 if backend in FORMS else 5,
        "markerfacecolor": "none" if backend in FORMS else colour,
        "linewidth": 2.2 if ours else 1.3,
        "linestyle": "--" if backend in OTHERS else "-." if backend in FORMS else "-",
        "zorder": 3 if ours else 2,
    }


def _legend(figure: Any, suite: Suite, cells: Sequence[Group], measured: Collection[str]) -> None:
    """One for all panels; a peer that has rows nowhere is named as a gap."""
    from matplotlib.lines import Line2D

    shown = {backend for group in cells for backend in group}
    handles = []
    for b in (suite.backend, *suite.peers):
        if b in shown:
            handles.append(Line2D([], [], label=name(b), **_look(suite, b)))
        elif b not in measured:
            handles.append(Line2D([], [], color="none", label=f"{name(b)} (not measured)"))
    figure.legend(handles=handles, loc="upper center", ncols=4, bbox_to_anchor=(0.5, 0.0))


def _peak(panels: Sequence[Any], device: Device, by_compute: bool) -> None:
    """The vendor's peak in each panel; all share one scale."""
    peak, unit = _vendors(device, by_compute)
    panels[0].set_ylim(0, 1.05 * max(peak, panels[0].get_ylim()[1]))  # all share it
    for axes in panels:
        axes.axhline(peak, color="#444444", linestyle=":", linewidth=1)
    panels[0].annotate(
        f"vendor's peak {peak:.0f} {unit}",
        (0.02, peak),
        xycoords=("axes fraction", "data"),
        textcoords="offset points",
        xytext=(0, -4),
        va="top",
        fontsize=8,
    )


def _vendors(device: Device, by_compute: bool) -> tuple[float, str]:
    """A peak, and its unit."""
    tflops, gb_per_s = roofline.peaks(device)
    return (tflops, "TFLOP/s of 16 bits") if by_compute else (gb_per_s, "GB/s")


def _draw_roofs(path: Path, text: dict[str, str], *sources: Path) -> None:
    device = Device.named(load(sources[0])[0].gpu)
    found = [point for source in sources for point in points(source, device)]
    draw(device, [p for p in found if p.backend not in OTHERS], path, **text)


def _draw_host(path: Path, text: dict[str, str], source: Path) -> None:
    """Microseconds of host time of a call, beside a bare launch."""
    newest = {row.what: row for row in load(source, HostRow)}
    rows = [r for r in newest.values() if "call" in r.what or r.what.startswith("bare")]
    plt = pyplot()
    with plt.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, axes = plt.subplots(figsize=(8, 0.5 * len(rows) + 1.4))
        _bars(axes, [r.what for r in rows], [r.p50_us for r in rows], "{:.1f} us")
        axes.set_xlabel("microseconds of host time a call, median")
        axes.set_title(f"Host time around a launch, {rows[0].gpu}: shorter is better")
        save(figure, path, **text)


def _draw_install(path: Path, text: dict[str, str], source: Path) -> None:
    """Size and time of each stack; what could not be installed keeps its place."""
    newest = {row.stack: row for row in load(source, InstallRow)}
    rows = list(newest.values())
    plt = pyplot()
    with plt.rc_context({**STYLE, "axes.grid.axis": "x"}):
        figure, panels = plt.subplots(1, 3, figsize=(13, 0.45 * len(rows) + 1.6), sharey=True)
        good = [r.result == "ok" for r in rows]
        columns = {
            "MB of files in an empty environment": ([r.size_mb for r in rows], "{:,.0f} MB"),
            "seconds of pip, download included": ([r.install_seconds for r in rows], "{:.0f} s"),
            "seconds to a first output on the CPU": (
                [r.first_output_seconds for r in rows],
                "{:.1f} s",
            ),
        }
        for axes, (label, (values, form)) in zip(panels, columns.items(), strict=True):
            _bars(axes, [r.stack for r in rows], _where(good, values), form)
            axes.set_xlabel(label)
        for i, row in enumerate(rows):
            if not good[i]:
                panels[0].text(0, i, "  could not be installed here", va="center")
            elif math.isnan(row.first_output_seconds):
                panels[2].text(0, i, "  runs on a GPU alone", va="center")
        figure.suptitle("What an installation takes, one run each: shorter is better")
        figure.tight_layout()
        save(figure, path, **text)


def _where(good: Sequence[bool], values: Sequence[float]) -> list[float]:
    return [v if ok else math.nan for ok, v in zip(good, values, strict=True)]


def _bars(axes: Any, names: Sequence[str], values: Sequence[float], form: str) -> None:
    """Horizontal bars from the top down, ours in the first colour; NaN leaves its place empty."""
    for i, (label, value) in enumerate(zip(names, values, strict=True)):
        ours = label.startswith(("rawattn", "call"))
        gap = math.isnan(value)
        axes.barh(i, 0 if gap else value, color=COLOURS[0] if ours else GREY)
        shown = "" if gap else form.format(value)
        axes.annotate(
            shown, (0 if gap else value, i), textcoords="offset points", xytext=(4, 0), va="center"
        )
    axes.set_yticks(range(len(names)), names)
    axes.margins(x=0.18)
    if not axes.yaxis_inverted():
        axes.invert_yaxis()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="draw nothing, say what is stale")
    parser.add_argument("--out", type=Path, default=IMAGES, metavar="DIR")
    args = parser.parse_args(argv)
    if args.check:
        names = stale(args.out)
        print("\n".join(f"{n}: not of the committed rows (make plots)" for n in names))
        return int(bool(names))
    for picture in pictures():
        picture.draw(args.out / picture.name, {KEY: picture.digest})
        print(args.out / picture.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
