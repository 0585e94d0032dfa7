# SPDX-License-Identifier: Apache-2.0
"""What tells the cases of a suite apart, beside their length: panels of a plot, lines of a table.

A facet counts where it takes several values at one length, among cases that are alike in the facets
before it; so a suite that varies head counts with head sizes is split by one of the two alone. The
number of queries counts too where it differs along a line and is not the length itself.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

from bench.rows import Row

Group = dict[str, Row]  # backend -> row, of one case
Labels = tuple[str, ...]  # a value for each facet that counts

CEILINGS = ("read", "copy", "add")  # no attention: what memory gives in the same run
OTHERS = ("cudnn_fp8", *CEILINGS)  # that are no rivals: less precise, or no attention
QUERIES = "queries"
FIRST = ("none", "plain")  # masks, and scores, that others are compared with
NAMES = {
    "fa2": "FlashAttention-2",
    "cudnn": "cuDNN",
    "cudnn_fe": "cuDNN frontend",
    "cudnn_fp8": "cuDNN frontend in fp8",
    "fa3": "FlashAttention-3",
    "flashinfer": "FlashInfer",
    "flashinfer_cuda": "FlashInfer, CUDA cores",
    "vllm": "vLLM",
    "vllm_v1": "vLLM paged v1",
    "vllm_v2": "vLLM paged v2",
    "jax": "JAX",
    "triton": "Triton's tutorial",
    "read": "plain read",
    "copy": "plain copy",
    "add": "plain sum",
}


def name(backend: str) -> str:
    """How a peer is called in tables and plots; ours go by their own names."""
    return NAMES.get(backend, backend)


def length(row: Row) -> int:
    """Keys of a sequence; tokens, where there are no keys."""
    return row.max_k or row.max_q


def short(count: int) -> str:
    """How a length is written at an axis."""
    return f"{count // 1024}k" if count % 1024 == 0 else str(count)


def mask(row: Row) -> str:
    """ "none", "causal", or the window."""
    if row.window_left < 0 and row.window_right <= 0:
        return "causal" if row.window_right == 0 else "none"
    return f"window {row.window_left}, {row.window_right}"


FACETS: dict[str, Callable[[Row], str]] = {
    "head dim": lambda r: (
        str(r.head_dim) if r.head_dim == r.value_dim else f"{r.head_dim}, values {r.value_dim}"
    ),
    "mask": mask,
    "type": lambda r: r.dtype,
    "rows": lambda r: r.rows or "dense",  # rows from before there was such a column are dense
    "scores": lambda r: r.scores or "plain",
    "cache": lambda r: r.kv_dtype,
    "layout": lambda r: r.layout,
    "page": lambda r: str(r.page_size),
    "heads": lambda r: f"{r.q_heads} over {r.kv_heads}",
    "batch": lambda r: str(r.batch),
    QUERIES: lambda r: str(r.max_q),
}


def facets(rows: Sequence[Row]) -> list[str]:
    """The facets that count among rows of one backend, in the order above."""
    found: list[str] = []
    for facet, value in FACETS.items():
        seen: dict[tuple[object, ...], set[str]] = {}
        for row in rows:
            alike = (length(row), *(FACETS[f](row) for f in found))
            seen.setdefault(alike, set()).add(value(row))
        if any(len(values) > 1 for values in seen.values()) or (
            facet == QUERIES and _several_queries(rows, found)
        ):
            found.append(facet)
    return found


def _several_queries(rows: Sequence[Row], names: Sequence[str]) -> bool:
    """Whether cases that are alike in some facets have other numbers of queries over their keys."""
    seen: dict[Labels, set[int]] = {}
    for row in (r for r in rows if _few_queries(r)):
        seen.setdefault(tuple(FACETS[f](row) for f in names), set()).add(row.max_q)
    return any(len(queries) > 1 for queries in seen.values())


def _few_queries(row: Row) -> bool:
    """Whether a case is not one of as many queries as keys."""
    return row.max_k not in (0, row.max_q)


def shared(rows: Sequence[Row], names: Sequence[str]) -> list[str]:
    """What all attention of some rows has in common, beside its type, and the facets `names` do not
    say; in words.
    """
    if not all(row.max_k for row in rows):
        return []
    told = {
        facet: values.pop()
        for facet, value in FACETS.items()
        if facet not in ("type", *names) and len(values := {value(row) for row in rows}) == 1
    }
    if not all(_few_queries(row) for row in rows):
        told.pop(QUERIES, None)
    if all(row.kv_dtype == row.dtype for row in rows):
        told.pop("cache", None)
    return [words(f, x) for f, x in told.items() if x not in ("", "0", "plain", "dense")]


def split(
    groups: Iterable[Group], backend: str, least: int = 1
) -> tuple[list[str], dict[Labels, list[Group]]]:
    """The facets that count, and the groups that hold a row of `backend`, by their values; both in
    order of size, and groups in order of length.

    Kinds of fewer than `least` groups are left out, where there are others; so is a facet that
    then has one value.
    """
    cells = [group for group in groups if backend in group]
    names = facets([group[backend] for group in cells])
    parts: dict[Labels, list[Group]] = {}
    for group in sorted(cells, key=lambda g: length(g[backend])):
        parts.setdefault(tuple(FACETS[f](group[backend]) for f in names), []).append(group)
    parts = {labels: part for labels, part in parts.items() if len(part) >= least} or parts
    kept = [i for i in range(len(names)) if len({labels[i] for labels in parts}) > 1]
    return [names[i] for i in kept], {
        tuple(labels[i] for i in kept): parts[labels] for labels in sorted(parts, key=_order)
    }


def _order(labels: Labels) -> tuple[tuple[float, str], ...]:
    """Numbers by size, FIRST before other words, those as they are."""
    return tuple(
        (float(found[0]) if (found := re.findall(r"\d+", x)) else float(x not in FIRST), x)
        for x in labels
    )


def words(facet: str, value: str) -> str:
    """A value of a facet, as a title has it."""
    if facet == "mask":
        return {"none": "no mask"}.get(value, value)
    if facet == "type":
        return value
    return f"{value} heads" if facet == "heads" else f"{facet} {value}"
