# SPDX-License-Identifier: Apache-2.0
"""What algorithms move through device memory, tensor by tensor, where no cache helps.

Three of them: the standard one, which writes S and P; FlashAttention's first loop order, keys
outside, which reads and writes O once a block of keys; and its second, queries outside, which reads
K and V once a block of queries. `rawattn.roofline.walk` runs all three on NumPy arrays and counts
the bytes that it moves; tests hold the formulas here to it.

Every query head is counted with keys and values of its own: sharing them across the heads of a
group is the work of a cache, or of a kernel that packs the group. Blocks of keys that a mask hides
from a whole block of queries are not read; the standard algorithm reads and writes all of S.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, dataclass

from rawattn.arrays import DTYPES
from rawattn.problem import Mask, Problem
from rawattn.roofline.counts import Lengths, edges, lengths_of

STATISTIC = 4  # bytes of a running maximum, or of a running sum


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes read from and written to device memory."""

    q_read: int = 0
    k_read: int = 0
    v_read: int = 0
    s_written: int = 0
    s_read: int = 0
    p_written: int = 0
    p_read: int = 0
    o_read: int = 0
    o_written: int = 0
    stats_read: int = 0  # running maxima and sums
    stats_written: int = 0

    @property
    def total(self) -> int:
        return sum(astuple(self))

    def __add__(self, other: Traffic) -> Traffic:
        pairs = zip(self.__slots__, astuple(self), astuple(other), strict=True)
        return Traffic(**{name: a + b for name, a, b in pairs})

    def times(self, count: int) -> Traffic:
        """The traffic of `count` of them."""
        pairs = zip(self.__slots__, astuple(self), strict=True)
        return Traffic(**{name: a * count for name, a in pairs})


def standard(problem: Problem, lengths: Lengths | None = None, *, passes: int = 0) -> Traffic:
    """Three kernels: S = Q K^T, P = softmax(S), O = P V, with S and P in the storage type.

    `passes` are further kernels that read and write S or P whole, as a mask and dropout are.
    """
    p, total = problem, Traffic()
    size = DTYPES[p.dtype].itemsize
    for q_len, k_len in lengths_of(p, lengths):
        scores = q_len * k_len * size
        total += Traffic(
            q_read=q_len * p.head_dim * size,
            k_read=k_len * p.head_dim * size,
            v_read=k_len * p.value_dim * size,
            s_written=(1 + passes) * scores,
            s_read=(1 + passes) * scores,
            p_written=scores,
            p_read=scores,
            o_written=q_len * p.value_dim * size,
        )
    return total.times(p.q_heads)


def keys_outside(
    problem: Problem, block_m: int, block_n: int, lengths: Lengths | None = None
) -> Traffic:
    """FlashAttention-1: for each block of keys, for each block of queries that sees it.

    O (in the storage type) and its running maximum and sum are read and written each time. That
    they hold 0 and -inf beforehand is not counted.
    """
    p, total = problem, Traffic()
    size = DTYPES[p.dtype].itemsize
    for q_len, k_len in lengths_of(p, lengths):
        keys = rows = 0
        for length, seen in _rows_of_key_blocks(q_len, k_len, p.mask, block_m, block_n):
            keys += length
            rows += seen
        total += Traffic(
            q_read=rows * p.head_dim * size,
            k_read=keys * p.head_dim * size,
            v_read=keys * p.value_dim * size,
            o_read=rows * p.value_dim * size,
            o_written=rows * p.value_dim * size,
            stats_read=2 * rows * STATISTIC,
            stats_written=2 * rows * STATISTIC,
        )
    return total.times(p.q_heads)


def queries_outside(
    problem: Problem, block_m: int, block_n: int, lengths: Lengths | None = None
) -> Traffic:
    """FlashAttention-2 and later: for each block of queries, for each block of keys it sees.

    O stays on the chip and is written once; K and V are read once a block of queries.
    """
    p, total = problem, Traffic()
    size = DTYPES[p.dtype].itemsize
    for q_len, k_len in lengths_of(p, lengths):
        keys = sum(_keys_of_query_blocks(q_len, k_len, p.mask, block_m, block_n))
        total += Traffic(
            q_read=q_len * p.head_dim * size,
            k_read=keys * p.head_dim * size,
            v_read=keys * p.value_dim * size,
            o_written=q_len * p.value_dim * size,
        )
    return total.times(p.q_heads)


def rescale_flops(problem: Problem, block_m: int, block_n: int) -> int:
    """Multiplications that tiling adds: O by a factor a row and tile, and once by 1 / l.

    They come to about ``1 / (4 block_n)`` of the two products; masks leave out tiles as above.
    """
    p = problem
    tiles = 0
    for q_len, k_len in lengths_of(p, None):
        tiles += sum(
            rows for _, rows in _rows_of_key_blocks(q_len, k_len, p.mask, block_m, block_n)
        )
        tiles += q_len
    return tiles * p.value_dim * p.q_heads


def paper_tiles(elements: int, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) that the first FlashAttention paper takes for `elements` on the chip:
    K, V, Q and O share it.
    """
    block_n = max(1, elements // (4 * head_dim))
    return min(block_n, head_dim), block_n


def _seen_keys(q_len: int, k_len: int, mask: Mask, start: int, stop: int) -> tuple[int, int]:
    """First key and the key past the last that rows `start` to `stop` see; equal: none."""
    first, past = edges(q_len, k_len, mask)
    low, high = max(0, first + start), min(k_len, past + stop - 1)
    return (low, high) if low < high else (0, 0)


def _keys_of_query_blocks(
    q_len: int, k_len: int, mask: Mask, block_m: int, block_n: int
) -> Iterator[int]:
    """Keys that each block of queries reads, in whole blocks of keys."""
    for start in range(0, q_len, block_m):
        low, high = _seen_keys(q_len, k_len, mask, start, min(q_len, start + block_m))
        yield min(k_len, -(-high // block_n) * block_n) - low // block_n * block_n


def _rows_of_key_blocks(
    q_len: int, k_len: int, mask: Mask, block_m: int, block_n: int
) -> Iterator[tuple[int, int]]:
    """Length of each block of keys that is read, and how many rows its blocks of queries hold."""
    blocks = [
        (min(q_len, start + block_m) - start, *seen)
        for start in range(0, q_len, block_m)
        for seen in [_seen_keys(q_len, k_len, mask, start, min(q_len, start + block_m))]
    ]
    for start in range(0, k_len, block_n):
        stop = min(k_len, start + block_n)
        rows = sum(length for length, low, high in blocks if low < stop and high > start)
        if rows:
            yield stop - start, rows
