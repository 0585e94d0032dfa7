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

from dataclasses import astuple, dataclass
from typing import NamedTuple

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
    for q_len, k_len, count in lengths_of(p, lengths):
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
        ).times(count)
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
    for q_len, k_len, count in lengths_of(p, lengths):
        tiles = _tiles(q_len, k_len, p.mask, block_m, block_n)
        total += Traffic(
            q_read=tiles.rows * p.head_dim * size,
            k_read=tiles.keys_once * p.head_dim * size,
            v_read=tiles.keys_once * p.value_dim * size,
            o_read=tiles.rows * p.value_dim * size,
            o_written=tiles.rows * p.value_dim * size,
            stats_read=2 * tiles.rows * STATISTIC,
            stats_written=2 * tiles.rows * STATISTIC,
        ).times(count)
    return total.times(p.q_heads)


def queries_outside(
    problem: Problem, block_m: int, block_n: int, lengths: Lengths | None = None
) -> Traffic:
    """FlashAttention-2 and later: for each block of queries, for each block of keys it sees.

    O stays on the chip and is written once; K and V are read once a block of queries.
    """
    p, total = problem, Traffic()
    size = DTYPES[p.dtype].itemsize
    for q_len, k_len, count in lengths_of(p, lengths):
        tiles = _tiles(q_len, k_len, p.mask, block_m, block_n)
        total += Traffic(
            q_read=q_len * p.head_dim * size,
            k_read=tiles.keys * p.head_dim * size,
            v_read=tiles.keys * p.value_dim * size,
            o_written=q_len * p.value_dim * size,
        ).times(count)
    return total.times(p.q_heads)


def rescale_flops(problem: Problem, block_m: int, block_n: int) -> int:
    """Multiplications that tiling adds: O by a factor a row and tile, and once by 1 / l.

    They come to about ``1 / (4 block_n)`` of the two products; masks leave out tiles as above.
    """
    p = problem
    rows = _tiles(p.max_q, p.max_k, p.mask, block_m, block_n).rows + p.max_q
    return rows * p.batch * p.value_dim * p.q_heads


def paper_tiles(elements: int, head_dim: int) -> tuple[int, int]:
    """(block_m, block_n) that the first FlashAttention paper takes for `elements` on the chip:
    K, V, Q and O share it.
    """
    block_n = max(1, elements // (4 * head_dim))
    return min(block_n, head_dim), block_n


# ---- tiles, in closed form -----------------------------------------------------------------------


class Tiles(NamedTuple):
    """What the tiles of a sequence add up to: blocks of queries, each under the blocks of keys that
    some row of it sees.
    """

    rows: int  # query rows, over all tiles
    keys: int  # likewise
    keys_once: int  # keys of the blocks that lie in some tile


def _tiles(q_len: int, k_len: int, mask: Mask, block_m: int, block_n: int) -> Tiles:
    """Counts them in time that does not grow with the lengths."""
    first, past = edges(q_len, k_len, mask)
    # Block i reads keys first + i block_m to past + (i + 1) block_m - 1, as far as there are such;
    # blocks that begin behind all keys read none.
    blocks = min(-(-q_len // block_m), _steps_to(k_len, first, block_m))
    if blocks == 0:
        return Tiles(0, 0, 0)
    whole, end = blocks - 1, past + block_m - 1
    tiles = _quotients(whole, end + block_n - 1, block_m, k_len + block_n - 1, block_n)
    tiles -= _quotients(whole, first, block_m, k_len, block_n)
    # The last block of queries may be cut off, ...
    rows = min(q_len, blocks * block_m) - whole * block_m
    high = min(max(past + whole * block_m + rows - 1, 0), k_len)
    last = -(-high // block_n) - max(first + whole * block_m, 0) // block_n
    # ... and so may the last one of keys, which is read by whoever reads its first key.
    lacking, reached = -k_len % block_n, k_len - k_len % block_n + 1
    readers = max(0, whole - _steps_to(reached, end, block_m)) + (high >= reached)
    begin = max(first, 0) // block_n * block_n
    return Tiles(
        rows=tiles * block_m + last * rows,
        keys=(tiles + last) * block_n - readers * lacking,
        keys_once=max(0, min(k_len, -(-high // block_n) * block_n) - begin),
    )


def _steps_to(goal: int, start: int, step: int) -> int:
    """The first i from 0 with ``start + i step >= goal``."""
    return max(0, -(-(goal - start) // step))


def _quotients(count: int, start: int, step: int, cap: int, size: int) -> int:
    """The sum of ``min(max(start + i step, 0), cap) // size`` over 0 <= i < count."""
    above = min(count, _steps_to(0, start, step))
    below = min(count, max(above, _steps_to(cap, start, step)))
    middle = _floor_sum(below - above, start + above * step, step, size)
    return middle + (count - below) * (cap // size)


def _floor_sum(count: int, start: int, step: int, size: int) -> int:
    """The sum of ``(start + i step) // size`` over 0 <= i < count, for numbers from 0, as Euclid's
    algorithm finds it.
    """
    total = 0
    while count:
        total += count * (start // size) + count * (count - 1) // 2 * (step // size)
        start, step = start % size, step % size
        count, start, step, size = *divmod(start + step * count, size), size, step
    return total
