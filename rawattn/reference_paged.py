# SPDX-License-Identifier: Apache-2.0
"""What a paged KV cache means, in NumPy: where tokens lie, and which slots are read.

Caches, with x = 16 bytes worth of elements:

    NHD       k_cache (blocks, page, Hkv, D)         v_cache (blocks, page, Hkv, Dv)
    HND       k_cache (blocks, Hkv, page, D)         v_cache (blocks, Hkv, page, Dv)
    x-major   k_cache (blocks, Hkv, D / x, page, x)  v_cache (blocks, Hkv, Dv, page)

The pages of a sequence are its row of `block_table` (B, max_blocks), with `seqused_k` (B,), the
number of its keys; or in CSR kv_indices[kv_indptr[b] : kv_indptr[b + 1]], all full but the last,
which holds kv_last_page_len[b] keys. Slots and table entries past the end of a sequence are never
read: they may hold NaN, or page ids that do not exist.

Caches of 8-bit types hold values divided by a scale: a number, one for each KV head (Hkv,), or
where they are read one for each sequence and head (B, Hkv).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import ArrayLike

from rawattn.problem import CacheLayout, Mask
from rawattn.reference import Array, attention


class BlockSparse(NamedTuple):
    """The keys that PagedAttention's block-sparse arguments leave a query, which is the last token.

    In blocks of `block_size` keys a head sees the last `local_blocks`, the query's own among them,
    and every `vert_stride`-th, counted from an offset that moves from head to head.
    """

    local_blocks: int
    vert_stride: int
    block_size: int
    head_sliding_step: int  # from 0: of query heads; below: minus that of KV heads
    tp_rank: int  # times as many heads come before these

    def seen(self, q_heads: int, kv_heads: int, k_len: int) -> Array:
        """Which of `k_len` keys each head sees, (Hq, 1, k_len)."""
        step = self.head_sliding_step
        heads = kv_heads if step < 0 else q_heads
        offset = (self.tp_rank * heads + np.arange(heads)) * abs(step) + 1
        offset = np.repeat(offset, q_heads // heads)[:, None, None]
        block = np.arange(k_len) // self.block_size
        local = block > (k_len - 1) // self.block_size - self.local_blocks
        return ((block + offset) % self.vert_stride == 0) | local


def tree_seen(tree_mask: Array, q_len: int, k_len: int) -> Array:
    """Which keys the rows of a sequence see, (1, Sq, Sk): row i its draft token j, which is key
    Sk - Sq + j, where tree_mask[i, j] says so, and all keys before the drafts.
    """
    seen = np.ones((1, q_len, k_len), bool)
    drafts = min(q_len, k_len)
    seen[0, :, k_len - drafts :] = tree_mask[:q_len, q_len - drafts : q_len] != 0
    return seen


# ---- 8-bit caches and rotation -------------------------------------------------------------------


def quantized(x: Array, scale: ArrayLike, dtype: np.dtype[Any]) -> Array:
    """x (tokens, Hkv, size) as a cache of a type holds it; 8-bit types saturate, and int8, which
    has no NaN, holds -128 for it.

    `scale` broadcasts to (tokens, Hkv).
    """
    if np.dtype(dtype).itemsize > 1:
        return x.astype(dtype)
    with np.errstate(all="ignore"):
        divided = x.astype(np.float32) / np.asarray(scale, np.float32)[..., None]
        if dtype == np.int8:
            return np.clip(np.nan_to_num(np.rint(divided), nan=-128), -128, 127).astype(np.int8)
        largest = float(ml_dtypes.finfo(dtype).max)
        return np.clip(divided, -largest, largest).astype(dtype)


def dequantized(x: Array, scale: ArrayLike) -> Array:
    """What a cache means by x (tokens, Hkv, size); caches of wider types mean what they hold."""
    if x.dtype.itemsize > 1:
        return x
    return x.astype(np.float32) * np.asarray(scale, np.float32)[..., None]


def rotated(x: Array, cos: Array, sin: Array, positions: Array, *, interleaved: bool) -> Array:
    """x (tokens, heads, size) with its first 2 R columns turned in pairs, in its own dtype.

    cos, sin (longest, R): row `positions[t]` turns token t. A pair is columns 2 r and 2 r + 1 where
    they are interleaved, else r and R + r.
    """
    cos, sin = (table[positions, None].astype(np.float32) for table in (cos, sin))
    turned, width = x.astype(np.float32), cos.shape[-1]
    pair = (
        (np.s_[..., 0 : 2 * width : 2], np.s_[..., 1 : 2 * width : 2])
        if interleaved
        else (np.s_[..., :width], np.s_[..., width : 2 * width])
    )
    a, b = (turned[columns].copy() for columns in pair)
    turned[pair[0]], turned[pair[1]] = a * cos - b * sin, a * sin + b * cos
    return turned.astype(x.dtype)


# ---- caches --------------------------------------------------------------------------------------


def slots(cache: Array, layout: CacheLayout) -> Array:
    """A view of a cache, (blocks, page, Hkv, D); of x-major keys, (blocks, page, Hkv, D / x, x)."""
    if layout is CacheLayout.NHD:
        return cache
    if layout is CacheLayout.HND:
        return cache.swapaxes(1, 2)
    return np.moveaxis(cache, 3, 1)


def _pages(
    page: int,
    block_table: ArrayLike | None,
    seqused_k: ArrayLike | None,
    kv_indptr: ArrayLike | None,
    kv_indices: ArrayLike | None,
    kv_last_page_len: ArrayLike | None,
) -> list[tuple[Array, int]]:
    """The page ids and the number of keys of each sequence."""
    if block_table is not None:
        table = np.asarray(block_table)
        lengths = np.asarray(seqused_k).tolist()
        return [(table[b, : -(-length // page)], length) for b, length in enumerate(lengths)]
    indptr, indices = np.asarray(kv_indptr).tolist(), np.asarray(kv_indices)
    pages = [indices[first:stop] for first, stop in itertools.pairwise(indptr)]
    last = np.asarray(kv_last_page_len).tolist()
    return [
        (ids, (len(ids) - 1) * page + n if len(ids) else 0)
        for ids, n in zip(pages, last, strict=True)
    ]


def gather_cache(
    k_cache: Array,
    v_cache: Array,
    *,
    layout: CacheLayout,
    block_table: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    kv_indptr: ArrayLike | None = None,
    kv_indices: ArrayLike | None = None,
    kv_last_page_len: ArrayLike | None = None,
    leftpad: ArrayLike | None = None,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> tuple[Array, Array, Array]:
    """The keys and values of the sequences, packed: k, v, cu_seqlens_k (B + 1,) int32.

    leftpad : (B,); a sequence begins behind so many of the tokens of its pages. None: with them.
    """
    k_slots, v_slots = slots(k_cache, layout), slots(v_cache, layout)
    page, kv_heads = k_slots.shape[1:3]
    pages = _pages(page, block_table, seqused_k, kv_indptr, kv_indices, kv_last_page_len)
    pads = np.zeros(len(pages), int) if leftpad is None else np.asarray(leftpad)
    at = [np.arange(pad, length) for pad, (_, length) in zip(pads, pages, strict=True)]
    lengths = [len(tokens) for tokens in at]
    cu_seqlens_k = np.cumsum([0, *lengths], dtype=np.int32)
    none = np.empty(0, np.int64)
    ids = [of_pages[tokens // page] for (of_pages, _), tokens in zip(pages, at, strict=True)]
    block, offset = np.concatenate([none, *ids]), np.concatenate([none, *at]) % page
    k, v = (
        x[block, offset].reshape(len(block), kv_heads, math.prod(x.shape[3:]))
        for x in (k_slots, v_slots)
    )
    by_token = [
        np.repeat(np.broadcast_to(scale, (len(pages), kv_heads)), lengths, axis=0)
        for scale in (k_scale, v_scale)
    ]
    return dequantized(k, by_token[0]), dequantized(v, by_token[1]), cu_seqlens_k


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    *,
    layout: CacheLayout,
    mask: Mask,
    block_table: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    kv_indptr: ArrayLike | None = None,
    kv_indices: ArrayLike | None = None,
    kv_last_page_len: ArrayLike | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
    seen: Sequence[Array] | None = None,
    rounding: str | None = None,
) -> tuple[Array, Array]:
    """out and lse of dense or packed queries over the cache; as `reference.attention` otherwise."""
    k, v, cu_seqlens_k = gather_cache(
        k_cache,
        v_cache,
        layout=layout,
        block_table=block_table,
        seqused_k=seqused_k,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        kv_last_page_len=kv_last_page_len,
        k_scale=k_scale,
        v_scale=v_scale,
    )
    return attention(
        q,
        k,
        v,
        mask=mask,
        scale=scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seen=seen,
        rounding=rounding,
    )


def write_cache(
    k: Array,
    v: Array,
    k_cache: Array,
    v_cache: Array,
    slot_mapping: ArrayLike,
    layout: CacheLayout,
    *,
    k_scale: ArrayLike = 1.0,
    v_scale: ArrayLike = 1.0,
) -> None:
    """Store k (tokens, Hkv, D) and v (tokens, Hkv, Dv) at slots block * page + offset, in place.

    slot_mapping : (tokens,); a token with a negative slot is skipped. A slot past the end of the
    cache is an IndexError, and then nothing is written.
    """
    slot = np.asarray(slot_mapping)
    kept = slot >= 0
    k_slots, v_slots = slots(k_cache, layout), slots(v_cache, layout)
    block, offset = np.divmod(slot[kept], k_slots.shape[1])
    for x, cache, scale in ((k, k_slots, k_scale), (v, v_slots, v_scale)):
        stored = quantized(x[kept], scale, cache.dtype)
        cache[block, offset] = stored.reshape(len(block), *cache.shape[2:])


def slots_of(block_table: ArrayLike, sequence: ArrayLike, positions: ArrayLike, page: int) -> Array:
    """Where token `positions[t]` of sequence `sequence[t]` lies: block * page + offset, int64."""
    table, at = np.asarray(block_table, np.int64), np.asarray(positions)
    return table[np.asarray(sequence), at // page] * page + at % page
