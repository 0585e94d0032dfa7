# SPDX-License-Identifier: Apache-2.0
"""The same work in two forms, timed side by side: fp16 and bf16, packed rows and dense ones, scores
with softcap or ALiBi and without.

A candidate named "fwd_sm90 (bf16)" is the twin of "fwd_sm90" in its group. Ratios are its time over
that of the other: the speed of the first form as a multiple of the second's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from bench.facets import FACETS, Group, length, mask, name
from bench.report import geometric_mean
from bench.rows import Row, groups

FP16 = "float16 beside bfloat16"
LEAST = 3  # lengths that make a line of a picture


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row, and that of its twin in the same group."""

    row: Row
    twin: Row

    @property
    def ratio(self) -> float:
        return self.twin.p50_us / self.row.p50_us

    @property
    def scored(self) -> bool:
        """Whether the twin is without a step of the row's scores: not the same work."""
        return self.row.scores != self.twin.scores

    @property
    def forms(self) -> str:
        """What differs: "float16 beside bfloat16"."""
        differ = [(f(self.row), f(self.twin)) for f in FACETS.values()]
        return next(f"{a} beside {b}" for a, b in differ if a != b)


def pairs(groups: Iterable[Group]) -> Iterator[Pair]:
    """All pairs, group by group."""
    for group in groups:
        for backend, twin in group.items():
            owner = backend.partition(" (")[0]
            if owner != backend and owner in group:
                yield Pair(row=group[owner], twin=twin)


def fp16_lines(rows: Iterable[Row], backend: str) -> dict[tuple[str, int, str], list[Pair]]:
    """Pairs of fp16 and bf16 by backend, head size and mask, in order of length; none where no kind
    of `backend` has LEAST lengths.
    """
    kinds: dict[tuple[str, int, str], list[Pair]] = {}
    for pair in sorted(pairs(groups(rows).values()), key=lambda pair: length(pair.row)):
        if pair.forms == FP16:
            kind = pair.row.backend, pair.row.head_dim, mask(pair.row)
            kinds.setdefault(kind, []).append(pair)
    long = any(len(some) >= LEAST for kind, some in kinds.items() if kind[0] == backend)
    return kinds if long else {}


def table(found: Sequence[Pair], backend: str) -> list[list[str]]:
    """Lines of a table: of all cells, of each head size, and of peers, with ours in their cells."""
    kinds: dict[tuple[str, str], list[Pair]] = {}
    for pair in found:
        kinds.setdefault((pair.forms, pair.row.backend), []).append(pair)
    lines = []
    for (forms, owner), some in kinds.items():
        if owner == backend:
            sizes = sorted({pair.row.head_dim for pair in some})
            parts = {"all": some}
            if len(sizes) > 1:
                parts |= {str(d): [p for p in some if p.row.head_dim == d] for d in sizes}
            lines += [_line(owner, forms, label, part) for label, part in parts.items()]
            continue
        cells = {pair.row.case for pair in some}
        ours = [p for p in kinds.get((forms, backend), []) if p.row.case in cells]
        label = f"all, where {name(owner)} was measured in both"
        lines += [_line(backend, forms, label, ours)] if ours else []
        lines.append(_line(name(owner), forms, "all", some))
    heads = ["", "forms", "head dim", "cells", "geometric mean", "least", "most"]
    return [heads, ["---"] * 3 + ["---:"] * 4, *lines] if lines else []


def scored(groups: Iterable[Group], backend: str, peer: str) -> list[list[str]]:
    """Lines of a table: each cell with a step of scores beside the same without, of ours and of a
    peer, where it was measured.
    """
    heads = ["case", *[x for who in (backend, name(peer)) for x in (f"{who}, us", "without", "x")]]
    lines = []
    for group in groups:
        found = {pair.row.backend: pair for pair in pairs([group]) if pair.scored}
        if (ours := found.get(backend)) is None:
            continue
        times = [*_times(ours.row, ours), *_times(group.get(peer), found.get(peer))]
        ratio = f"{group[peer].p50_us / ours.row.p50_us:.2f}" if peer in group else "-"
        lines.append([ours.row.case, *times, ratio])
    heads = [*heads, f"/ {name(peer)}"]
    return [heads, ["---", *["---:"] * (len(heads) - 1)], *lines] if lines else []


def _times(row: Row | None, pair: Pair | None) -> list[str]:
    """Microseconds with and without, and how many times as long it takes; dashes for gaps."""
    without = [f"{pair.twin.p50_us:.1f}", f"{1 / pair.ratio:.2f}"] if pair else ["-", "-"]
    return [f"{row.p50_us:.1f}" if row else "-", *without]


def _line(owner: str, forms: str, label: str, some: Sequence[Pair]) -> list[str]:
    ranked = sorted(some, key=lambda pair: pair.ratio)
    least, most = (f"{pair.ratio:.3f} ({pair.row.case})" for pair in (ranked[0], ranked[-1]))
    mean = geometric_mean(pair.ratio for pair in some)
    return [owner, forms, label, str(len(some)), f"{mean:.3f}", least, most]
