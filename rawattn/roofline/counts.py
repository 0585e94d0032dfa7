# SPDX-License-Identifier: Apache-2.0
"""The one formula for work: exact FLOPs and least bytes of a problem, whatever computes it.

FLOPs count the two matrix products, 2 a multiply-add, over exactly the (query, key) pairs that the
mask lets through; softmax, score steps and masked halves of a tile are not counted. Bytes count
what must cross device memory at least once: query rows that see a key, keys and values that some
row sees, every output row. Tables, slopes, sinks and cumulated lengths are left out; so both are
lower bounds, and a measured efficiency never flatters.

`convention_flops` is what published TFLOP/s figures divide by, the field's convention. Exact FLOPs
of a causal square are larger by (S + 1) / S; those of a window differ freely.

Storing, copying, turning and merging multiply nothing that counts: they have bytes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rawattn.arrays import DTYPES
from rawattn.cache_problem import (
    CopyBlocksProblem,
    KvWriteProblem,
    MergeProblem,
    RotaryProblem,
)
from rawattn.paged_problem import PagedProblem
from rawattn.problem import Mask, Problem

Attention = Problem | PagedProblem
Movement = KvWriteProblem | CopyBlocksProblem | RotaryProblem | MergeProblem

Lengths = Sequence[tuple[int, int]]  # (queries, keys) of each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a problem asks of any device."""

    flops: int
    bytes: int

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte; None where nothing moves."""
        return self.flops / self.bytes if self.bytes else None


def _clamped_sum(count: int, start: int, cap: int) -> int:
    """The sum of min(max(start + i, 0), cap) over 0 <= i < count."""

    def triangle(n: int) -> int:
        return n * (n - 1) // 2 if n > 0 else 0

    def above(floor: int) -> int:
        return triangle(start + count - floor) - triangle(start - floor)

    return above(0) - above(cap)


def edges(q_len: int, k_len: int, mask: Mask) -> tuple[int, int]:
    """First key of row 0 and the key past its last, unclamped; each later row adds 1 to both."""
    diagonal = 0 if mask.top_left else k_len - q_len
    first = -q_len if mask.left < 0 else diagonal - mask.left
    past = k_len if mask.right < 0 else diagonal + mask.right + 1
    return first, past


def visible_pairs(q_len: int, k_len: int, mask: Mask) -> int:
    """(query, key) pairs that a mask lets through, of one head of one sequence, in closed form."""
    first, past = edges(q_len, k_len, mask)
    return _clamped_sum(q_len, past, k_len) - _clamped_sum(q_len, first, k_len)


def visible_rows(q_len: int, k_len: int, mask: Mask) -> tuple[int, int]:
    """Query rows that see some key, and keys that some row sees, of one sequence."""
    if q_len == 0 or k_len == 0:
        return 0, 0
    first, past = edges(q_len, k_len, mask)
    queries = min(q_len, k_len - first) - max(0, 1 - past)
    keys = min(k_len, past + q_len - 1) - max(0, first)
    return max(0, queries), max(0, keys)


def lengths_of(problem: Attention, lengths: Lengths | None) -> Sequence[tuple[int, int, int]]:
    """Queries and keys, and how many sequences have as many; without `lengths` all have `max_q` and
    `max_k`, which is exact for dense rows and an upper bound for others. ValueError for another
    number of `lengths` than there are sequences.
    """
    if lengths is None:
        return [(problem.max_q, problem.max_k, problem.batch)]
    if len(lengths) != problem.batch:
        raise ValueError(
            f"lengths={lengths!r}: accepted is a pair for each of {problem.batch} sequences"
        )
    return [(q_len, k_len, 1) for q_len, k_len in lengths]


def work(
    problem: Attention | Movement, lengths: Lengths | None = None, *, lse: bool = False
) -> Work:
    """Exact FLOPs and least bytes of a problem; `lengths` as in `lengths_of`. `lse` counts the
    log-sum-exp output of an attention too.
    """
    if isinstance(problem, Movement):
        return Work(flops=0, bytes=_moved(problem))
    p, flops, q_elements, kv_elements, out_rows = problem, 0, 0, 0, 0
    for q_len, k_len, count in lengths_of(problem, lengths):
        queries, keys = visible_rows(q_len, k_len, p.mask)
        pairs = count * visible_pairs(q_len, k_len, p.mask)
        flops += 2 * p.q_heads * (p.head_dim + p.value_dim) * pairs
        q_elements += count * queries * p.q_heads * p.head_dim
        kv_elements += count * keys * p.kv_heads * (p.head_dim + p.value_dim)
        out_rows += count * q_len * p.q_heads
    cache = p.cache_dtype if isinstance(p, PagedProblem) else p.dtype
    moved = (
        (q_elements + out_rows * p.value_dim) * itemsize(p.dtype)
        + kv_elements * itemsize(cache)
        + (4 * out_rows if lse else 0)
    )
    return Work(flops=flops, bytes=moved)


def itemsize(dtype: str) -> int:
    """Bytes of an element."""
    return DTYPES[dtype].itemsize


def _moved(p: Movement) -> int:
    """Bytes of every input and output once; tables, positions and scales are left out."""
    if isinstance(p, KvWriteProblem):
        elements = p.tokens * p.kv_heads * (p.head_dim + p.value_dim)
        return elements * (itemsize(p.dtype) + itemsize(p.cache_dtype))
    if isinstance(p, CopyBlocksProblem):
        return 2 * p.caches * p.pairs * p.block_bytes
    if isinstance(p, RotaryProblem):
        return 2 * p.tokens * p.heads * p.head_dim * itemsize(p.dtype)
    rows = p.tokens * p.heads
    read = p.states * rows * (p.head_dim * itemsize(p.dtype) + 4)
    return read + rows * (p.head_dim * itemsize(p.out_dtype) + 4)


def convention_flops(problem: Attention | Movement) -> int:
    """The FLOPs of published figures: 2 B H Sq Sk (D + Dv) where nothing is masked. A causal row is
    taken to see ``Sk - Sq / 2`` keys, half of a square; windows do not count.
    """
    if isinstance(problem, Movement):
        return 0
    p = problem
    twice_keys = max(0, p.max_k - p.max_q) + p.max_k if p.mask.causal else 2 * p.max_k
    return p.batch * p.q_heads * p.max_q * twice_keys * (p.head_dim + p.value_dim)


def backward_flops(problem: Problem, lengths: Lengths | None = None) -> int:
    """Exact FLOPs of the backward pass that keeps O and lse alone: five products where the forward
    has two, one of them S = Q K^T again, in place of an N x N matrix read from memory.
    """
    p, pairs = problem, 0
    for q_len, k_len, count in lengths_of(problem, lengths):
        pairs += count * visible_pairs(q_len, k_len, p.mask)
    # S, dQ and dK multiply over head_dim, dP and dV over value_dim
    return 2 * p.q_heads * pairs * (3 * p.head_dim + 2 * p.value_dim)
