# SPDX-License-Identifier: Apache-2.0
"""Tables of rows that are bound by memory: microseconds and TB/s of ours, and the others' times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from bench.facets import CEILINGS
from bench.report import geometric_mean
from bench.rows import Row, groups
from bench.suite import Suite

CASE = 28  # columns of an id


def times(rows: Iterable[Row], suite: Suite) -> str:
    """One line a case: microseconds and TB/s of ours; of each other its time, and that over ours.

    Lines where a peer is faster end with its name; a dash stands for a candidate that has no row.
    The last line holds geometric means.
    """
    by_case = groups(rows)
    present = [name for group in by_case.values() for name in group]
    others = [n for n in dict.fromkeys([*suite.peers, *present]) if n != suite.backend]
    widths = [max(16, len(name) + 1) for name in others]
    heads = [name.rjust(w) for name, w in zip(others, widths, strict=True)]
    lines = [f"{'case'.ljust(CASE)}{suite.backend.rjust(14)}{'TB/s':>7}" + "".join(heads)]
    ratios: dict[str, list[float]] = {name: [] for name in others}
    for case, group in by_case.items():
        ours = group.get(suite.backend)
        line = case.ljust(CASE) + (
            f"{ours.p50_us:14.2f}{ours.gb_per_s / 1e3:7.2f}" if ours else f"{'-':>14}{'-':>7}"
        )
        for name, width in zip(others, widths, strict=True):
            line += _cell(group.get(name), ours).rjust(width)
            if ours and name in group:
                ratios[name].append(group[name].p50_us / ours.p50_us)
        behind = faster(group, suite) if ours else []
        lines.append(line + (f"  < {', '.join(behind)}" if behind else ""))
    means = [
        (f"x {geometric_mean(ratios[n]):.3f}" if ratios[n] else "-").rjust(w)
        for n, w in zip(others, widths, strict=True)
    ]
    return "\n".join([*lines, f"{'geometric mean'.ljust(CASE)}{'':21}" + "".join(means)])


def faster(group: dict[str, Row], suite: Suite) -> Sequence[str]:
    """The peers, no ceilings, that took less time than ours."""
    ours = group[suite.backend].p50_us
    peers = [n for n in suite.peers if n not in CEILINGS and n in group]
    return [n for n in peers if group[n].p50_us < ours]


def _cell(other: Row | None, ours: Row | None) -> str:
    if other is None:
        return "-"
    return f"{other.p50_us:.2f}" + (f" x {other.p50_us / ours.p50_us:.3f}" if ours else "")
