# SPDX-License-Identifier: Apache-2.0
"""The picture of what fp16 costs beside bf16. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path

from bench import twins
from bench.facets import length, name, short, words
from bench.rows import load
from bench.suite import Suite
from rawattn.roofline.draw import COLOURS, MARKERS, STYLE, pyplot, save


def draw_fp16(path: Path, text: dict[str, str], suite: Suite, source: Path) -> None:
    """A panel for each mask: the speed of fp16 as a share of that of bf16, over length.

    A colour a head dim, a marker a library; those of peers are hollow.
    """
    rows = load(source)
    kinds = twins.fp16_lines(rows, suite.backend)
    masks = sorted({mask for _, _, mask in kinds}, key=lambda mask: mask != "none")
    sizes = sorted({head_dim for _, head_dim, _ in kinds})
    backends = list(dict.fromkeys(backend for backend, _, _ in kinds))
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, grid = plt.subplots(
            1, len(masks), figsize=(4.2 * len(masks), 3.4), sharey=True, squeeze=False
        )
        for (backend, head_dim, mask), pairs in kinds.items():
            ours, axes = backend == suite.backend, grid[0][masks.index(mask)]
            axes.plot(
                [length(pair.row) for pair in pairs],
                [100 * pair.ratio for pair in pairs],
                color=COLOURS[sizes.index(head_dim)],
                marker=MARKERS[backends.index(backend)],
                markerfacecolor=None if ours else "none",
                markersize=5 if ours else 8,
                linestyle="-" if ours else "",
                label=f"{name(backend)}, head dim {head_dim}",
            )
        lengths = sorted({length(pair.row) for pairs in kinds.values() for pair in pairs})
        for axes, mask in zip(grid[0], masks, strict=True):
            axes.set_xscale("log", base=2)
            axes.set_xticks(lengths, [short(n) for n in lengths])
            axes.minorticks_off()
            axes.set_title(words("mask", mask), fontsize=9)
            axes.set_xlabel("keys of a sequence (log scale)")
        grid[0][0].set_ylabel("% of the speed in bf16")
        figure.suptitle(f"fp16 beside bf16 on {rows[-1].gpu}", fontsize=12)
        figure.tight_layout()
        labels = grid[0][0].get_legend_handles_labels()
        figure.legend(*labels, loc="upper center", ncols=3, bbox_to_anchor=(0.5, 0.0))
        save(figure, path, **text)
