# SPDX-License-Identifier: Apache-2.0
"""Tables of rows: TFLOP/s of each candidate, and how ours compare with the peers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from bench.rows import Row, groups


def geometric_mean(values: Iterable[float]) -> float:
    """NaN where there is no value."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def table(rows: Iterable[Row], ours: Sequence[str], peers: Sequence[str], bar: str) -> str:
    """One line a case: TFLOP/s, then speed of each of `ours` as a multiple of each peer's.

    Cases where one of `ours` is slower than the peer `bar` end with its name; a dash stands for a
    candidate that has no row. The last line holds geometric means.
    """
    columns = [*ours, *peers]
    ratios = [(o, p) for o in ours for p in peers]
    heads = [*columns, *(f"{o}/{p}" if len(ours) > 1 else f"/{p}" for o, p in ratios), "% limit"]
    widths = [max(8, len(h) + 1) for h in heads]
    lines = ["case".ljust(22) + "".join(h.rjust(w) for h, w in zip(heads, widths, strict=True))]
    found: dict[tuple[str, str], list[float]] = {pair: [] for pair in ratios}
    for case, group in groups(rows).items():
        cells = [f"{group[c].tflops:.0f}" if c in group else "-" for c in columns]
        behind = []
        for pair in ratios:
            if not all(x in group for x in pair):
                cells.append("-")
                continue
            ratio = group[pair[1]].p50_us / group[pair[0]].p50_us
            found[pair].append(ratio)
            cells.append(f"{ratio:.3f}")
            if pair[1] == bar and ratio < 1:
                behind.append(pair[0])
        limits = [group[o].roofline_percent for o in ours if o in group]
        cells.append(f"{max(limits):.1f}" if limits else "-")
        line = case.ljust(22) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
        lines.append(line + (f"  < {bar}: {', '.join(behind)}" if behind else ""))
    means = [f"{geometric_mean(v):.3f}" if v else "-" for v in found.values()]
    cells = [*([""] * len(columns)), *means, ""]
    lines.append(
        "geometric mean".ljust(22) + "".join(c.rjust(w) for c, w in zip(cells, widths, strict=True))
    )
    return "\n".join(lines)
