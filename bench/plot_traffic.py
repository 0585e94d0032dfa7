# SPDX-License-Identifier: Apache-2.0
"""The picture of the bytes that attention moves, by formulas. Needs matplotlib."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from bench.cases import dense
from bench.facets import short
from rawattn import roofline
from rawattn.device import DEVICES
from rawattn.roofline.draw import COLOURS, MARKERS, STYLE, pyplot, save


def draw_traffic(path: Path, text: dict[str, str]) -> None:
    """Bytes of one head over the length: the formulas of `rawattn.roofline.traffic`."""
    lengths = [2**i for i in range(9, 18)]
    problems = [
        replace(dense(128, False, 512).problem, batch=1, q_heads=1, kv_heads=1, max_q=n, max_k=n)
        for n in lengths
    ]
    lines = {
        "standard: S and P written and read": [roofline.standard(p).total for p in problems],
        "FlashAttention-1, 128 x 128 tiles": [
            roofline.keys_outside(p, 128, 128).total for p in problems
        ],
        "FlashAttention-2, 128 x 64 tiles": [
            roofline.queries_outside(p, 128, 64).total for p in problems
        ],
        "each tensor once": [roofline.work(p).bytes for p in problems],
    }
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(8, 4.6))
        for i, (label, moved) in enumerate(lines.items()):
            axes.plot(
                lengths,
                [x / 2**20 for x in moved],
                color=COLOURS[i],
                marker=MARKERS[i],
                markersize=5,
                label=label,
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.set_xticks(lengths, [short(n) for n in lengths])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("queries and keys")
        axes.set_ylabel("MiB through device memory, no cache")
        axes.set_title("One head, head_dim 128, bf16, no mask: computed, not measured")
        axes.legend()
        l2 = DEVICES["A100"].l2_bytes / 2**20
        axes.axhline(l2, color="#444444", linestyle=":", linewidth=1)
        axes.text(lengths[0], l2 * 1.1, f"L2 of an A100, {l2:.0f} MiB", va="bottom")
        save(figure, path, **text)
