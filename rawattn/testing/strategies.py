# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies: cases for kernels, problems for the planner. They draw shapes and seeds,
never elements.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from rawattn.plan import MAX_GRID
from rawattn.problem import Mask, Problem, Rows, Scores
from rawattn.testing.cases import Case, Limits

EDGES = tuple(
    sorted({m * n + d for m in (16, 64, 128) for n in (1, 2) for d in (-1, 0, 1)} | {1, 2})
)
SMALLEST_BLOCK = 64  # query rows
MAX_WORK = 1 << 19  # scores of one case; keeps the reference at some milliseconds


def lengths(max_len: int) -> SearchStrategy[int]:
    """A sequence length: about a tenth are 0; tile multiples and their neighbours are common."""
    edges = [n for n in EDGES if n <= max_len]
    some = st.one_of(st.integers(1, max_len), st.sampled_from(edges), st.sampled_from(edges))
    return st.integers(0, 9).flatmap(lambda tenth: st.just(0) if tenth == 9 else some)


def head_dims(allowed: tuple[int, ...]) -> SearchStrategy[int]:
    """A head dimension: half are the usual ones."""
    usual = [d for d in (32, 64, 96, 128, 192, 256) if d in allowed]
    return st.one_of(*([st.sampled_from(usual)] if usual else []), st.sampled_from(allowed))


@st.composite
def windows(draw: DrawFn, max_len: int) -> tuple[int, int]:
    """A window on none, one or both sides."""
    side = st.one_of(st.just(-1), st.just(0), st.integers(1, max_len))
    return draw(side), draw(side)


@st.composite
def problems(draw: DrawFn, limits: Limits = Limits()) -> Case:  # noqa: B008  frozen
    """One case within `limits`; about a tenth of its lengths are 0."""
    layout = draw(st.sampled_from(limits.layouts))
    batch = draw(st.integers(0, limits.max_batch)) if draw(st.booleans()) else 1
    group = draw(st.sampled_from([g for g in (1, 1, 2, 3, 4) if g <= limits.max_heads]))
    kv_heads = draw(st.integers(1, max(1, limits.max_heads // group)))
    work = max(1, MAX_WORK // (max(1, batch) * group * kv_heads))
    longest = min(limits.max_len, int(work**0.5))
    if layout == "dense":
        q_lens = (draw(lengths(longest)),) * batch
        k_lens = (draw(lengths(longest)),) * batch
    else:
        q_lens = tuple(draw(lengths(longest)) for _ in range(batch))
        k_lens = tuple(draw(lengths(longest)) for _ in range(batch))
    head_dim = draw(head_dims(limits.head_dims))
    return Case(
        q_lens=q_lens,
        k_lens=k_lens,
        dtype=draw(st.sampled_from(limits.dtypes)),
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(head_dim), head_dims(limits.head_dims))),
        layout=layout,
        causal=draw(st.sampled_from(limits.causal)),
        window=draw(st.just((-1, -1)) | windows(longest)) if limits.windows else (-1, -1),
        scale=draw(st.sampled_from(limits.scales)),
        softcap=draw(st.sampled_from((0.0, 0.0, 5.0, 30.0))) if limits.softcap else 0.0,
        alibi=draw(st.sampled_from(limits.alibi)),
        sink=draw(st.sampled_from(limits.sink)),
        data=draw(st.sampled_from(limits.data)),
        memory=draw(st.sampled_from(limits.memories)),
        seed=draw(st.integers(0, 2**16)),
    )


@st.composite
def plannable(draw: DrawFn, dtypes: tuple[str, ...] = ("float16", "bfloat16")) -> Problem:
    """A `Problem` of any size that a grid can count, for the planner: nothing is allocated."""
    sizes = st.one_of(st.integers(0, 300), st.integers(1, 1 << 20))
    kv_heads = draw(st.integers(1, 64))
    dims = st.integers(1, 256)
    head_dim = draw(dims)
    flags: Any = {name: draw(st.booleans()) for name in ("softcap", "alibi", "sink")}
    batch = draw(st.integers(0, 70_000))
    q_heads = kv_heads * draw(st.integers(1, 16))
    rows = SMALLEST_BLOCK * (MAX_GRID // max(1, batch * q_heads))
    return Problem(
        dtype=draw(st.sampled_from(dtypes)),
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(head_dim), dims)),
        max_q=min(draw(sizes), rows),
        max_k=draw(sizes),
        q_rows=draw(st.sampled_from((Rows.DENSE, Rows.PACKED))),
        k_rows=draw(st.sampled_from(tuple(Rows))),
        mask=draw(st.builds(Mask.of, st.sampled_from((False, True, "top_left")), windows(300))),
        scores=Scores(**flags),
        copy_bytes=draw(st.sampled_from((16, 4, 2))),
    )
