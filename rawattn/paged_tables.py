# SPDX-License-Identifier: Apache-2.0
"""Whether the values in the tables of a paged call are in bounds. Always looked at in NumPy arrays;
in those on a GPU with ``RAWATTN_CHECK=1``, which waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rawattn.arrays import View, to_host
from rawattn.cache_request import Cache
from rawattn.paged_host import new_places
from rawattn.paged_problem import PagedProblem
from rawattn.paged_request import PagedArrays
from rawattn.problem import LARGEST, SMALLEST
from rawattn.reference import Array
from rawattn.reference_paged import slots_of
from rawattn.request import check_each, check_scores, check_values, row_lengths


def check_tables(
    views: Sequence[View | None],
    *,
    names: PagedArrays,
    problem: PagedProblem,
    cache: Cache,
    new_k: int,
    shared: int = 0,
) -> None:
    """ValueError, with the index at fault, for a length, a page id, a slope, a sink or a scale out
    of bounds, and for a new token in a place that is taken. `shared`: the first pages of all
    sequences are those of the first one.
    """
    of = PagedArrays(*views)
    q_lens = [problem.max_q] * problem.batch
    if of.cu_seqlens_q is not None:
        rows = of.q.spec.shape[0]
        q_lens = row_lengths(names.cu_seqlens_q, to_host(of.cu_seqlens_q).tolist(), rows)
        what = f"the rows that {names.cu_seqlens_q} gives sequence"
        check_each(what, q_lens, [problem.max_q] * len(q_lens))
    if of.cache_batch_idx is not None:
        rows_of = to_host(of.cache_batch_idx)
        check_entries(names.cache_batch_idx, rows_of, np.ones(len(rows_of), bool), cache.blocks)
    if of.kv_indptr is not None:
        _check_csr(of, names, problem, cache)
    else:
        _check_dense(of, names, problem, cache, new_k, shared)
        _check_turned(of, names, problem, q_lens)
    for name in ("k_scale", "v_scale"):
        check_scales(getattr(names, name), getattr(of, name))
    check_scores(*(x and to_host(x) for x in (of.alibi_slopes, of.sink)))


def _check_dense(
    of: PagedArrays,
    names: PagedArrays,
    problem: PagedProblem,
    cache: Cache,
    new_k: int,
    shared: int,
) -> None:
    """Lengths, page ids and new tokens of sequences that have no CSR table."""
    used, new = np.full(problem.batch, cache.page), np.full(problem.batch, new_k)
    if of.cu_seqlens_new is not None:
        starts = to_host(of.cu_seqlens_new).tolist()
        new = np.array(row_lengths(names.cu_seqlens_new, starts, of.k.spec.shape[0]), int)
        what = f"the new tokens that {names.cu_seqlens_new} gives sequence"
        check_each(what, new.tolist(), [problem.max_k] * len(new))
    if of.seqused_k is not None:
        used = to_host(of.seqused_k)
        limits = (problem.max_k - new).tolist()
        check_each(f"{names.seqused_k} of sequence", used.tolist(), limits)
    if of.leftpad is not None:
        check_each(f"{names.leftpad} of sequence", to_host(of.leftpad).tolist(), used.tolist())
    if of.block_table is not None:
        table = to_host(of.block_table)
        pages = -(-(used + new) // cache.page)
        counted = np.arange(table.shape[1]) < pages[:, None]
        counted[1:, :shared] = False
        check_entries(names.block_table, table, counted, cache.blocks)
    if of.k is not None:
        _check_places(of, names, cache, used, new)


def _check_turned(
    of: PagedArrays, names: PagedArrays, problem: PagedProblem, q_lens: Sequence[int]
) -> None:
    """ValueError for queries at positions that tables of rotary angles do not have."""
    if of.rotary_cos is None:
        return
    shape = of.rotary_cos.spec.shape
    for n, (first, count) in enumerate(zip(to_host(of.seqused_k).tolist(), q_lens, strict=True)):
        past = first + (count if problem.own_positions else min(count, 1))
        if count and past > shape[0]:
            raise ValueError(
                f"{names.rotary_cos} has shape {shape}: accepted are {past} rows or more, for the "
                f"queries of sequence {n}, of which there are {count} from position {first} on"
            )


def _check_places(
    of: PagedArrays, names: PagedArrays, cache: Cache, used: Array, new: Array
) -> None:
    """ValueError for a place of the cache that a new token would be stored at, where another new
    token goes, or one lies that a sequence counts.
    """
    name, table = names.block_table, np.arange(len(used))[:, None]
    if of.block_table is not None:
        table = to_host(of.block_table)
    elif of.cache_batch_idx is not None:
        name, table = names.cache_batch_idx, to_host(of.cache_batch_idx)[:, None]
    sequence, positions = new_places(used, new)
    slots = slots_of(table, sequence, positions, cache.page)
    order = np.argsort(slots, kind="stable")
    twice = np.flatnonzero(np.diff(slots[order]) == 0)
    if len(twice):
        first, second = order[twice[0]], order[twice[0] + 1]
        block, place = divmod(int(slots[first]), cache.page)
        raise ValueError(
            f"{name}: sequences {sequence[first]} and {sequence[second]} would both store a new "
            f"token at place {place} of block {block}: accepted are places of their own"
        )
    pads = np.zeros_like(used) if of.leftpad is None else to_host(of.leftpad)
    owner, positions = new_places(pads, used - pads)
    counted = slots_of(table, owner, positions, cache.page)
    taken = np.flatnonzero(np.isin(slots, counted))
    if len(taken):
        slot = slots[taken[0]]
        block, place = divmod(int(slot), cache.page)
        raise ValueError(
            f"{name}: sequence {sequence[taken[0]]} would store a new token at place {place} of "
            f"block {block}, which sequence {owner[counted == slot][0]} counts already: accepted "
            "are places of their own"
        )


def _check_csr(of: PagedArrays, names: PagedArrays, problem: PagedProblem, cache: Cache) -> None:
    indptr, indices = to_host(of.kv_indptr), to_host(of.kv_indices)
    counts = row_lengths(names.kv_indptr, indptr.tolist(), len(indices))
    counted = np.zeros(len(indices), bool)
    counted[indptr[0] : indptr[-1]] = True
    check_entries(names.kv_indices, indices, counted, cache.blocks)
    for index, (last, count) in enumerate(
        zip(to_host(of.kv_last_page_len).tolist(), counts, strict=True)
    ):
        if count and not 1 <= last <= cache.page:
            raise ValueError(
                f"{names.kv_last_page_len}[{index}] is {last}: accepted are 1 to {cache.page}"
            )
    lasts = to_host(of.kv_last_page_len).tolist()
    lengths = [n and (n - 1) * cache.page + x for n, x in zip(counts, lasts, strict=True)]
    what = "the tokens, which max_seqlen_k bounds, of sequence"
    check_each(what, lengths, [problem.max_k] * len(lengths))


def check_entries(name: str, table: Array, counted: Array, limit: int) -> None:
    """ValueError, with its index, for an entry that counts and is not in [0, limit)."""
    wrong = counted & ((table < 0) | (table >= limit))
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        accepted = f"accepted are 0 to {limit - 1}" if limit else "the cache has no block"
        raise ValueError(f"{name}[{', '.join(map(str, index))}] is {table[index]}: {accepted}")


def check_scales(name: str, scale: View | None) -> None:
    """ValueError for a scale of 8-bit values that `check_scalar` would refuse as a number."""
    if scale is None:
        return
    values = np.atleast_1d(to_host(scale))
    good = (values >= np.float32(SMALLEST)) & (values <= np.float32(LARGEST))
    check_values(name, values, good, f"numbers from {SMALLEST} to {LARGEST}")
