# SPDX-License-Identifier: Apache-2.0
"""The `reference` backend of paged attention: NumPy arrays, gathered sequence by sequence.

New tokens are stored first; then the keys and values of every sequence are read out of their pages
and `host.run` attends. What layouts, scales and masks mean is defined in `reference_paged`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from rawattn import host
from rawattn.arrays import DTYPES
from rawattn.cache_request import Cache
from rawattn.paged_problem import PagedProblem
from rawattn.paged_request import PagedArrays, PagedOptions
from rawattn.reference import Array, sequence_rows
from rawattn.reference_paged import gather_cache, rotated, slots_of, tree_seen, write_cache


def run(arrays: list[Any], *, problem: PagedProblem, cache: Cache, options: PagedOptions) -> None:
    """Stores the new tokens, fills out and lse."""
    a = with_tables(PagedArrays(*arrays), cache)
    a = a._replace(
        k_cache=a.k_cache.view(DTYPES[cache.dtype]), v_cache=a.v_cache.view(DTYPES[cache.dtype])
    )
    if a.k is not None:
        a = _append(a, problem, cache, options)
    if problem.empty:
        return
    k, v, cu_seqlens_k = gather_cache(
        a.k_cache,
        a.v_cache,
        layout=cache.layout,
        block_table=a.block_table,
        seqused_k=a.seqused_k,
        kv_indptr=a.kv_indptr,
        kv_indices=a.kv_indices,
        kv_last_page_len=a.kv_last_page_len,
        leftpad=a.leftpad,
        k_scale=scale(a.k_scale, options.k_scale),
        v_scale=scale(a.v_scale, options.v_scale),
    )
    host.run(
        a.q,
        k,
        v,
        a.out,
        a.lse,
        mask=replace(problem.mask, right=-1) if problem.tree else problem.mask,
        scale=options.softmax_scale,
        softcap=options.softcap,
        alibi_slopes=a.alibi_slopes,
        sink=a.sink,
        cu_seqlens_q=a.cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seen=_seen(a, problem, options, np.diff(cu_seqlens_k).tolist()),
    )


def with_tables(a: PagedArrays, cache: Cache) -> PagedArrays:
    """The arrays with a table and lengths: a cache without one has a page for each sequence."""
    if a.kv_indptr is not None or a.block_table is not None:
        return a
    rows = np.arange(cache.blocks) if a.cache_batch_idx is None else a.cache_batch_idx
    used = np.full(len(rows), cache.page, np.int32) if a.seqused_k is None else a.seqused_k
    return a._replace(block_table=rows[:, None], seqused_k=used)


def scale(array: Array | None, number: float) -> Array | float:
    """The scale of a cache, as `gather_cache` takes it."""
    if array is None:
        return number
    return array.reshape(()) if array.size == 1 else array


def _append(
    a: PagedArrays, problem: PagedProblem, cache: Cache, options: PagedOptions
) -> PagedArrays:
    """Stores k and v behind their sequences; returns the arrays with turned queries, and lengths
    that count the new tokens.
    """
    new = new_lengths(a)
    sequence, positions = new_places(a.seqused_k, new)
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (a.k, a.v))
    if a.cu_seqlens_new is not None:
        k, v = (x[a.cu_seqlens_new[0] : a.cu_seqlens_new[-1]] for x in (k, v))
    if a.rotary_cos is not None:
        tables: Any = {"cos": a.rotary_cos, "sin": a.rotary_sin}
        tables["interleaved"] = options.rotary_interleaved
        k = rotated(k, positions=positions, **tables)
        a = a._replace(q=_turned_queries(a, problem, tables))
    write_cache(
        k,
        v,
        a.k_cache,
        a.v_cache,
        slots_of(a.block_table, sequence, positions, cache.page),
        cache.layout,
        k_scale=scale(a.k_scale, options.k_scale),
        v_scale=scale(a.v_scale, options.v_scale),
    )
    return a._replace(seqused_k=a.seqused_k + new)


def new_lengths(a: PagedArrays) -> Array:
    """New tokens of each sequence."""
    if a.cu_seqlens_new is not None:
        return np.diff(a.cu_seqlens_new)
    return np.full(len(a.seqused_k), 0 if a.k is None else a.k.shape[1])


def new_places(used: Array, new: Array) -> tuple[Array, Array]:
    """The sequence of each new token, and its position there."""
    sequence = np.repeat(np.arange(len(used)), new)
    behind = np.arange(len(sequence)) - np.repeat(np.cumsum(new) - new, new)
    return sequence, used[sequence] + behind


def _turned_queries(a: PagedArrays, problem: PagedProblem, tables: dict[str, Any]) -> Array:
    """The queries, each turned by its position, which is that of the first new token where no
    query is told apart from another.
    """
    q: Array = a.q.copy()
    for used, rows in zip(a.seqused_k.tolist(), sequence_rows(q, a.cu_seqlens_q), strict=True):
        steps = np.arange(len(q[rows])) * problem.own_positions
        q[rows] = rotated(q[rows], positions=used + steps, **tables)
    return q


def _seen(
    a: PagedArrays, problem: PagedProblem, options: PagedOptions, k_lens: list[int]
) -> list[Array] | None:
    """What block-sparse attention and trees of draft tokens hide, as `reference` takes it."""
    if options.block_sparse is not None:
        heads = problem.q_heads, problem.kv_heads
        return [options.block_sparse.seen(*heads, k_len) for k_len in k_lens]
    if not problem.tree:
        return None
    rows = sequence_rows(a.q, a.cu_seqlens_q)
    masks = a.tree_mask if a.cu_seqlens_q is None else [a.tree_mask[r] for r in rows]
    return [
        tree_seen(mask, len(a.q[r]), k_len)
        for mask, r, k_len in zip(masks, rows, k_lens, strict=True)
    ]
