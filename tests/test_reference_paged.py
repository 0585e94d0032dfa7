# SPDX-License-Identifier: Apache-2.0
"""Paged caches: the same keys in every layout, table and page order; no other slot is touched."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.problem import CacheLayout, Mask
from rawattn.reference import attention
from rawattn.reference_paged import gather_cache, paged_attention, write_cache

Array = np.ndarray[Any, Any]
NOWHERE = 2_147_480_000  # a page id past every cache


def empty_caches(layout: CacheLayout, blocks: int, page: int, dtype: str) -> tuple[Array, Array]:
    """K and V caches of 2 KV heads, D = 16 and Dv = 8, full of NaN."""
    x = 16 // np.dtype(dtype).itemsize
    shapes = {
        CacheLayout.NHD: ((page, 2, 16), (page, 2, 8)),
        CacheLayout.HND: ((2, page, 16), (2, page, 8)),
        CacheLayout.X_MAJOR: ((2, 16 // x, page, x), (2, 8, page)),
    }
    k_shape, v_shape = shapes[layout]
    return np.full((blocks, *k_shape), np.nan, dtype), np.full((blocks, *v_shape), np.nan, dtype)


def slot(cache: Array, layout: CacheLayout, block: int, offset: int, head: int, d: int) -> Any:
    """One element, by the definition of the layout."""
    if layout is CacheLayout.NHD:
        return cache[block, offset, head, d]
    if layout is CacheLayout.HND:
        return cache[block, head, offset, d]
    if cache.ndim == 4:
        return cache[block, head, d, offset]
    return cache[block, head, d // cache.shape[-1], offset, d % cache.shape[-1]]


class Paged:
    """Random sequences, stored in pages of a random order."""

    def __init__(self, layout: CacheLayout, lengths: list[int], page: int, dtype: str, seed: int):
        rng = np.random.default_rng(seed)
        counts = [-(-n // page) for n in lengths]
        blocks = sum(counts) + 2
        order = rng.permutation(blocks).tolist()
        self.pages = [[order.pop() for _ in range(count)] for count in counts]
        self.lengths = np.array(lengths, np.int32)
        self.cu_seqlens = np.cumsum([0, *lengths], dtype=np.int32)
        total = int(self.cu_seqlens[-1])
        self.k = rng.standard_normal((total, 2, 16)).astype(dtype)
        self.v = rng.standard_normal((total, 2, 8)).astype(dtype)
        self.k_cache, self.v_cache = empty_caches(layout, blocks, page, dtype)
        self.slots = np.array(
            [
                ids[i // page] * page + i % page
                for ids, n in zip(self.pages, lengths, strict=True)
                for i in range(n)
            ],
            np.int64,
        )
        write_cache(self.k, self.v, self.k_cache, self.v_cache, self.slots, layout)
        self.table = np.full((len(lengths), max([0, *counts]) + 1), -1, np.int32)
        self.table[:, -1] = NOWHERE
        for row, ids in zip(self.table, self.pages, strict=True):
            row[: len(ids)] = ids

    def csr(self, page: int) -> dict[str, Array]:
        counts = [len(ids) for ids in self.pages]
        indices = [i for ids in self.pages for i in ids]
        return {
            "kv_indptr": np.cumsum([0, *counts], dtype=np.int32),
            "kv_indices": np.array([*indices, NOWHERE], np.int32),
            "kv_last_page_len": np.array([(n - 1) % page + 1 for n in self.lengths], np.int32),
        }


@given(
    st.sampled_from(CacheLayout),
    st.lists(st.integers(0, 9), max_size=4),
    st.integers(1, 5),
    st.sampled_from(["float32", "bfloat16"]),
    st.integers(0, 99),
)
def test_what_was_written_is_gathered(
    layout: CacheLayout, lengths: list[int], page: int, dtype: str, seed: int
) -> None:
    paged = Paged(layout, lengths, page, dtype, seed)
    for i, where in enumerate(paged.slots.tolist()):
        at = (*divmod(where, page), i % 2, i % 8)
        assert slot(paged.k_cache, layout, *at) == paged.k[i, i % 2, i % 8]
        assert slot(paged.v_cache, layout, *at) == paged.v[i, i % 2, i % 8]
    for cache, x in ((paged.k_cache, paged.k), (paged.v_cache, paged.v)):
        assert (~np.isnan(cache)).sum() == x.size, "slots of nobody were written"
    tables = ({"block_table": paged.table, "seqused_k": paged.lengths}, paged.csr(page))
    for table in tables:
        k, v, cu_seqlens_k = gather_cache(paged.k_cache, paged.v_cache, layout=layout, **table)
        assert k.tobytes() == paged.k.tobytes() and k.shape == paged.k.shape
        assert v.tobytes() == paged.v.tobytes() and v.shape == paged.v.shape
        assert np.array_equal(cu_seqlens_k, paged.cu_seqlens) and cu_seqlens_k.dtype == np.int32


@pytest.mark.parametrize("layout", CacheLayout)
def test_paged_attention_is_attention(layout: CacheLayout) -> None:
    paged = Paged(layout, [7, 0, 4], 4, "float32", 1)
    rng = np.random.default_rng(2)
    q, dense_q = rng.standard_normal((5, 4, 16)), rng.standard_normal((3, 2, 4, 16))
    options: dict[str, Any] = {
        "mask": Mask.of(True, (3, 0)),
        "scale": 0.3,
        "softcap": 2.0,
        "alibi_slopes": rng.uniform(0.1, 1, (3, 4)),
        "sink": rng.standard_normal(4),
    }
    for query, cu_seqlens_q in ((q, np.array([0, 2, 4, 5])), (dense_q, None)):
        want = attention(
            query,
            paged.k,
            paged.v,
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=paged.cu_seqlens,
            **options,
        )
        for table in ({"block_table": paged.table, "seqused_k": paged.lengths}, paged.csr(4)):
            got = paged_attention(
                query,
                paged.k_cache,
                paged.v_cache,
                layout=layout,
                cu_seqlens_q=cu_seqlens_q,
                **table,
                **options,
            )
            for x, y in zip(got, want, strict=True):
                assert np.array_equal(x, y) and np.isfinite(x).all()


@pytest.mark.parametrize("layout", CacheLayout)
def test_skipped_tokens_and_slots_past_the_cache(layout: CacheLayout) -> None:
    k_cache, v_cache = empty_caches(layout, 3, 4, "float32")
    rng = np.random.default_rng(0)
    k, v = rng.standard_normal((4, 2, 16)), rng.standard_normal((4, 2, 8))
    with pytest.raises(IndexError):
        write_cache(k, v, k_cache, v_cache, np.array([0, 1, 2, 12]), layout)
    assert np.isnan(k_cache).all() and np.isnan(v_cache).all()
    write_cache(k, v, k_cache, v_cache, np.array([-1, 11, -7, -1]), layout)
    assert (~np.isnan(k_cache)).sum() == 32 and (~np.isnan(v_cache)).sum() == 16
    assert slot(k_cache, layout, 2, 3, 1, 5) == np.float32(k[1, 1, 5])
    assert slot(v_cache, layout, 2, 3, 0, 6) == np.float32(v[1, 0, 6])
    before = k_cache.tobytes(), v_cache.tobytes()
    write_cache(k[:0], v[:0], k_cache, v_cache, np.array([], np.int64), layout)
    assert (k_cache.tobytes(), v_cache.tobytes()) == before


@pytest.mark.parametrize("layout", CacheLayout)
def test_caches_with_room_between_blocks(layout: CacheLayout) -> None:
    """Every second block of a larger allocation: written and read in place."""
    rng = np.random.default_rng(0)
    k, v = (rng.standard_normal((6, 2, d)).astype(np.float32) for d in (16, 8))
    k_room, v_room = empty_caches(layout, 6, 2, "float32")
    slots = np.array([5, 4, 0, 1, 3, 2])
    write_cache(k, v, k_room[::2], v_room[::2], slots, layout)
    assert np.isnan(k_room[1::2]).all() and np.isnan(v_room[1::2]).all()
    got = gather_cache(
        k_room[::2], v_room[::2], layout=layout, block_table=[[0, 1, 2]], seqused_k=[6]
    )
    assert np.array_equal(got[0][slots], k) and np.array_equal(got[1][slots], v)
