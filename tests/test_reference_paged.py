# SPDX-License-Identifier: Apache-2.0
"""Paged caches: the same keys in every layout, table and page order; no other slot is touched."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.problem import CacheLayout, Mask
from rawattn.reference import attention
from rawattn.reference_paged import (
    dequantized,
    gather_cache,
    paged_attention,
    quantized,
    rotated,
    slots_of,
    tree_seen,
    write_cache,
)
from rawattn.testing.paged_inputs import NOWHERE

Array = np.ndarray[Any, Any]


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
        self.table[:, -1] = NOWHERE[1]
        for row, ids in zip(self.table, self.pages, strict=True):
            row[: len(ids)] = ids

    def csr(self, page: int) -> dict[str, Array]:
        counts = [len(ids) for ids in self.pages]
        indices = [i for ids in self.pages for i in ids]
        return {
            "kv_indptr": np.cumsum([0, *counts], dtype=np.int32),
            "kv_indices": np.array([*indices, NOWHERE[1]], np.int32),
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


def test_pairs_are_turned_as_complex_numbers() -> None:
    rng = np.random.default_rng(0)
    x, angles = rng.standard_normal((5, 2, 10)).astype(np.float32), rng.uniform(0, 6, (7, 3))
    positions = np.array([6, 0, 3, 3, 1])
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    turn = np.exp(1j * angles)[positions, None]
    for interleaved, real, imaginary in (
        (True, np.s_[..., 0:6:2], np.s_[..., 1:6:2]),
        (False, np.s_[..., 0:3], np.s_[..., 3:6]),
    ):
        got = rotated(x, cos, sin, positions, interleaved=interleaved)
        want = (x[real] + 1j * x[imaginary]) * turn
        assert np.allclose(got[real] + 1j * got[imaginary], want, atol=1e-6)
        assert np.array_equal(got[..., 6:], x[..., 6:]) and got.dtype == np.float32


def test_8_bit_values() -> None:
    """Rounded to the nearest, ties to even, saturated; multiplied by the scale of their head."""
    x = np.array([[[0.0, 0.26, -9.0, 1e6]], [[-1e6, 1.25, 1.75, np.nan]]], np.float32)
    got = quantized(x, 0.5, np.dtype(np.int8))[:, 0]
    assert got[0].tolist() == [0, 1, -18, 127] and got[1, :3].tolist() == [-128, 2, 4]
    for name, largest in (("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)):
        dtype = np.dtype(getattr(ml_dtypes, name))
        got = quantized(x, 0.5, dtype).astype(np.float32)[:, 0]
        middle = -18.0 if name == "float8_e4m3fn" else -16.0  # 2 bits: -16 and -20 tie
        assert got[0].tolist() == [0, 0.5, middle, largest]
        assert got[1, 0] == -largest and np.isnan(got[1, 3])
    scales = np.array([0.5, 2.0], np.float32)
    stored = np.array([[[3, -4], [3, -4]]], np.int8)
    assert dequantized(stored, scales).tolist() == [[[1.5, -2.0], [6.0, -8.0]]]
    wide = np.ones((1, 2, 2), np.float16)
    assert dequantized(wide, scales) is wide
    assert quantized(wide, scales, np.dtype(np.float16)).tolist() == wide.tolist()


@pytest.mark.parametrize("k_len", [0, 2, 3, 7])
def test_drafts_see_their_branch(k_len: int) -> None:
    mask = np.array([[1, 0, 0], [1, 1, 0], [1, 0, 1]], bool)
    seen = tree_seen(mask, 3, k_len)
    assert seen.shape == (1, 3, k_len)
    for row in range(3):
        for key in range(k_len):
            draft = key - (k_len - 3)
            assert seen[0, row, key] == (draft < 0 or mask[row, draft])


def test_scales_of_sequences_and_heads() -> None:
    cache = np.arange(16, dtype=np.int8).reshape(4, 1, 2, 2)  # 4 pages of a token, 2 heads
    scales = np.array([[1, 10], [100, 1000]], np.float32)
    table, lengths = np.array([[3, -1], [0, 2]]), np.array([1, 2])
    k, v, starts = gather_cache(
        cache,
        cache,
        layout=CacheLayout.NHD,
        block_table=table,
        seqused_k=lengths,
        k_scale=scales,
        v_scale=2.0,
    )
    assert starts.tolist() == [0, 1, 3]
    assert k.tolist() == [
        [[12, 13], [140, 150]],
        [[0, 100], [2000, 3000]],
        [[800, 900], [10000, 11000]],
    ]
    assert v[0].tolist() == [[24, 26], [28, 30]]


def test_slots_of_positions() -> None:
    table = np.array([[7, 2, -1], [0, 5, 9]], np.int32)
    found = slots_of(table, [0, 0, 1, 1], [0, 7, 4, 11], 4)
    assert found.tolist() == [28, 11, 20, 39] and found.dtype == np.int64
