# SPDX-License-Identifier: Apache-2.0
"""A roofline plot: the roofs of a device, and measured rows under them. Needs matplotlib."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rawattn.device import INSTALL, Device
from rawattn.roofline.roofs import peaks, ridge

COLUMNS = ("gpu", "case", "backend", "tflops", "gb_per_s", "peer_version")
# One look for all plots of the project: colours that colour-blind readers tell apart, and markers
# that a black-and-white print does.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#7F7F7F")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
STYLE: dict[str, Any] = {
    "figure.dpi": 110,
    "font.size": 10,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#dddddd",
    "legend.frameon": False,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a row of the bench says of one candidate on one case."""

    case: str
    backend: str
    ours: bool
    intensity: float  # FLOPs a byte: of the field's convention, over the least bytes
    tflops: float


def points(path: Path, device: Device) -> list[Point]:
    """Points of a CSV file of the bench; the newest row of each candidate and case counts. What
    only moves bytes has none, nor has another form of a case, "fwd_sm90 (dense)".

    ValueError where there is no such file, where it lacks a column, or holds rows of other GPUs
    alone.
    """
    if not path.is_file():
        raise ValueError(f"rows={str(path)!r}: accepted are CSV files, and there is none")
    with path.open(newline="") as file:
        reader = csv.DictReader(file)
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"rows={str(path)!r}: has no column {', '.join(missing)}")
        rows = [row for row in reader if row["gpu"] == device.name]
    if not rows:
        raise ValueError(f"rows={str(path)!r}: has no row of {device.name}")
    newest = {
        (row["case"], row["backend"]): Point(
            case=row["case"],
            backend=row["backend"],
            ours=not row["peer_version"],
            intensity=1e3 * float(row["tflops"]) / float(row["gb_per_s"]),
            tflops=float(row["tflops"]),
        )
        for row in rows
        if float(row["tflops"]) > 0 and "(" not in row["backend"]
    }
    return list(newest.values())


def pyplot() -> Any:
    """matplotlib.pyplot, drawing into files. RuntimeError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        how = INSTALL.format("bench")
        raise RuntimeError(f"plots need matplotlib: {how} ({error})") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path, **metadata: str) -> None:
    """Writes a PNG, with text chunks beside the picture."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None, **metadata}, bbox_inches="tight")
    pyplot().close(figure)


def draw(device: Device, found: Sequence[Point], path: Path, **metadata: str) -> None:
    """Draws into a PNG; `metadata` as in `save`. Errors as in `peaks` and `pyplot`.

    Kernels of ours are filled, a colour each; other libraries are hollow and grey, so that equal
    results of both show.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 5))
        _roofs(axes, device, found)
        ours = dict.fromkeys(p.backend for p in found if p.ours)
        for i, backend in enumerate(ours):
            own = [p for p in found if p.backend == backend]
            look = {"marker": MARKERS[i], "color": COLOURS[i], "markersize": 4.5, "zorder": 3}
            _scatter(axes, own, label=backend, **look)
        others = [p for p in found if not p.ours]
        look = {"marker": "o", "color": "#777777", "markersize": 8, "markerfacecolor": "none"}
        if others:
            _scatter(axes, others, label="other libraries", **look)
        axes.set_xlabel("FLOPs a byte, were each tensor moved once")
        axes.set_ylabel("TFLOP/s")
        axes.set_title(f"{device.name}: measured attention under the vendor's dense 16-bit peaks")
        if found:
            axes.legend(loc="lower right")
        save(figure, path, **metadata)


def _scatter(axes: Any, found: Sequence[Point], **look: Any) -> None:
    axes.plot([p.intensity for p in found], [p.tflops for p in found], linestyle="", **look)


def _roofs(axes: Any, device: Device, found: Sequence[Point]) -> None:
    """The two roofs of 16-bit types, around what was measured."""
    tflops, gb_per_s = peaks(device)
    knee = ridge(device)
    low = min([p.intensity for p in found] + [knee / 8]) / 2
    high = max([p.intensity for p in found] + [8 * knee]) * 1.5
    axes.set(xscale="log", yscale="log", xlim=(low, high))
    axes.set_ylim(min([p.tflops for p in found] + [low * gb_per_s / 1e3]) / 1.5, tflops * 1.8)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    axes.plot([low, knee, high], [low * gb_per_s / 1e3, tflops, tflops], color="#444444")
    axes.text(high, tflops * 1.06, f"{tflops:.0f} TFLOP/s", ha="right", va="bottom")
    middle = (low * knee) ** 0.5
    axes.annotate(
        f"{gb_per_s / 1e3:.2f} TB/s",
        (middle, middle * gb_per_s / 1e3),
        textcoords="offset points",
        xytext=(-8, 8),
        ha="right",
    )
    axes.axvline(knee, color="#444444", linestyle=":", linewidth=1)
    axes.text(knee * 1.06, axes.get_ylim()[0] * 1.1, f"ridge {knee:.0f}", va="bottom")
