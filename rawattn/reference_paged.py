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
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import ArrayLike

from rawattn.problem import CacheLayout, Mask
from rawattn.reference import Array, attention


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
) -> tuple[Array, Array, Array]:
    """The keys and values of the sequences, packed: k, v, cu_seqlens_k (B + 1,) int32."""
    k_slots, v_slots = slots(k_cache, layout), slots(v_cache, layout)
    page, kv_heads = k_slots.shape[1:3]
    pages = _pages(page, block_table, seqused_k, kv_indptr, kv_indices, kv_last_page_len)
    cu_seqlens_k = np.cumsum([0, *(length for _, length in pages)], dtype=np.int32)
    none = np.empty(0, np.int64)
    block = np.concatenate([none, *(np.repeat(ids, page)[:length] for ids, length in pages)])
    offset = np.concatenate([none, *(np.arange(length) % page for _, length in pages)])
    k, v = (
        x[block, offset].reshape(len(block), kv_heads, math.prod(x.shape[3:]))
        for x in (k_slots, v_slots)
    )
    return k, v, cu_seqlens_k


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
        rounding=rounding,
    )


def write_cache(
    k: Array, v: Array, k_cache: Array, v_cache: Array, slot_mapping: ArrayLike, layout: CacheLayout
) -> None:
    """Store k (tokens, Hkv, D) and v (tokens, Hkv, Dv) at slots block * page + offset, in place.

    slot_mapping : (tokens,); a token with a negative slot is skipped. A slot past the end of the
    cache is an IndexError, and then nothing is written.
    """
    slot = np.asarray(slot_mapping)
    kept = slot >= 0
    k_slots, v_slots = slots(k_cache, layout), slots(v_cache, layout)
    block, offset = np.divmod(slot[kept], k_slots.shape[1])
    for x, cache in ((k, k_slots), (v, v_slots)):
        cache[block, offset] = x[kept].reshape(len(block), *cache.shape[2:])
