# SPDX-License-Identifier: Apache-2.0
"""Hypothesis strategies of paged calls. They draw shapes and seeds, never elements."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy

from rawattn.testing.paged_cases import SCALES, PagedCase, PagedLimits
from rawattn.testing.strategies import head_dims, windows

MAX_WORK = 1 << 17  # scores of one case; keeps the reference at some milliseconds


def key_lengths(least: int, most: int, page: int) -> SearchStrategy[int]:
    """Keys of a sequence: about a tenth have none; whole pages and their neighbours are common."""
    edges = {n for m in (1, 2, 3) for n in (m * page - 1, m * page, m * page + 1) if n <= most}
    edges |= {n for n in (1, 15, 16, 17, 31, 32, 33) if n <= most}
    allowed = sorted(n for n in edges if n >= least) or [least]
    some = st.integers(least, max(least, most)) | st.sampled_from(allowed)
    return some if least else st.integers(0, 9).flatmap(lambda n: st.just(0) if n == 9 else some)


@st.composite
def stored_keys(draw: DrawFn, limits: PagedLimits) -> tuple[str, str, str, int]:
    """dtype, cache_dtype, layout and head_dim: in x-major caches whole chunks of 16 bytes."""
    head_dim = draw(head_dims(limits.head_dims))
    dtype = draw(st.sampled_from(limits.dtypes))
    cache_dtypes = limits.cache_dtypes if draw(st.booleans()) else limits.cache_dtypes[:1]
    cache_dtype = draw(st.sampled_from(cache_dtypes))
    layout = draw(st.sampled_from(limits.layouts))
    if layout == "x-major":
        chunk = 16 // np.dtype(dtype if cache_dtype == "same" else cache_dtype).itemsize
        head_dim = -(-head_dim // chunk) * chunk
    return dtype, cache_dtype, layout, head_dim


@st.composite
def paged_cases(draw: DrawFn, limits: PagedLimits = PagedLimits()) -> PagedCase:  # noqa: B008
    """One case within `limits`."""
    packed = draw(st.sampled_from(limits.packed))
    batch = draw(st.integers(0, limits.max_batch))
    group = draw(st.sampled_from([g for g in (1, 2, 3, 4, 5, 7, 8) if g <= limits.max_heads]))
    kv_heads = draw(st.integers(1, max(1, limits.max_heads // group)))
    page = draw(st.sampled_from(limits.pages))
    queries = st.one_of(st.just(1), st.integers(0, limits.max_q))
    one = draw(queries)
    q_lens = tuple(draw(queries) if packed else one for _ in range(batch))
    table = draw(st.sampled_from(limits.tables))
    growing = table != "csr" and batch > 0
    new = draw(st.integers(0, limits.max_new)) if growing and draw(st.booleans()) else 0
    work = MAX_WORK // (max(1, batch) * group * kv_heads * max([1, *q_lens]))
    most = max(new, min(limits.max_k, work))
    dtype, cache_dtype, layout, head_dim = draw(stored_keys(limits))
    window = draw(st.just((-1, -1)) | windows(most)) if limits.windows else (-1, -1)
    tree = draw(st.sampled_from(limits.tree)) and draw(st.booleans())
    scales = draw(st.sampled_from(SCALES))
    return PagedCase(
        q_lens=q_lens,
        k_lens=tuple(draw(key_lengths(new, most, page)) for _ in range(batch)),
        dtype=dtype,
        cache_dtype=cache_dtype,
        q_heads=group * kv_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=draw(st.one_of(st.just(head_dim), head_dims(limits.head_dims))),
        layout=layout,
        page=page,
        table=table,
        packed=packed,
        causal=draw(st.sampled_from(limits.causal)) and not tree,
        window=(window[0], -1) if tree else window,
        scale=draw(st.sampled_from((None, None, 0.3, 1.0, -0.5, 0.0))),
        softcap=draw(st.sampled_from((0.0, 0.0, 5.0, 30.0))) if limits.softcap else 0.0,
        alibi=draw(st.sampled_from(limits.alibi)),
        sink=draw(st.sampled_from(limits.sink)),
        tree=tree,
        scales=scales,
        by_sequence=not (new and scales == "heads") and draw(st.sampled_from(limits.by_sequence)),
        new=new,
        new_packed=new > 0 and draw(st.sampled_from(limits.new_packed)),
        leftpad=table == "rows" and layout != "x-major" and draw(st.sampled_from(limits.leftpad)),
        rotary=draw(st.sampled_from(limits.rotary)) if new and head_dim >= 4 else "none",
        split=draw(st.sampled_from(limits.splits)),
        memory=draw(st.sampled_from(limits.memories)),
        tight=draw(st.sampled_from(limits.tight)),
        data=draw(st.sampled_from(limits.data)),
        seed=draw(st.integers(0, 2**16)),
    )
