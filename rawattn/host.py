# SPDX-License-Identifier: Apache-2.0
"""The `reference` backend: attention of NumPy arrays, in float32 and in tiles.

FlashAttention's loop in NumPy. A strip is a range of query rows of one sequence under some of its
KV heads; it walks the keys tile by tile and carries per row the largest score, the sum of weights
and the weighted sum of values. Memory therefore does not grow with Sq * Sk. Threads take strips.
What scores and masks are is defined in `reference`, as are the arrays.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from rawattn.problem import Mask
from rawattn.reference import Array, distance, per_head, sequence_rows, softmax_scale, visible

# Products are so small that OpenBLAS does each on the thread that asks, batched by NumPy; strips
# are spread over the cores instead. Large products on BLAS's own threads gain little on idle cores,
# as exp takes half of the time, and lose tenfold where other processes take turns on the cores:
# 1760 against 144 ms for 4096 x 4096 scores (head dim 64, two busy cores, 2026-11-30).
PRODUCT = 1 << 18  # rows x keys x head dim of one product, at most
BLOCK_ROWS = 64  # score rows (query rows times query heads) of one product, at most
TILE_KEYS = 128  # keys of a long sequence; more where rows are few, as in decoding
STRIP_ROWS = 1024  # score rows of a strip; with TILE_KEYS keys, its scores fit into L2
SERIAL = 1 << 20  # scores, below which starting threads costs more than it saves


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Query rows of a sequence, from row `first` on, under some KV heads. Arrays are views."""

    mask: Mask
    scale: float
    softcap: float  # 0: none
    first: int
    block: int  # query rows of one product; divides rows
    q_len: int
    q: Array  # (rows, kv_heads, group, D)
    k: Array  # (k_len, kv_heads, D)
    v: Array  # (k_len, kv_heads, Dv)
    slopes: Array  # (kv_heads, group), 0: none
    sink: Array  # (kv_heads, group), -inf: none
    seen: Array | None = None  # bool (kv_heads, group, rows, k_len), besides the mask; None: all
    out: Array  # (rows, kv_heads, group, Dv), to be written
    lse: Array  # (rows, kv_heads, group), to be written

    @property
    def dim(self) -> int:
        """The longer of the two head dimensions."""
        return max(self.q.shape[-1], self.v.shape[-1])

    @property
    def scores(self) -> int:
        return self.lse.size * len(self.k)

    def tiles(self) -> Iterator[slice]:
        """The tiles of keys, from the first key that any row sees to the last."""
        k_len, group = len(self.k), self.q.shape[2]
        diagonal = self.first + (0 if self.mask.top_left else k_len - self.q_len)
        begin = 0 if self.mask.left < 0 else max(0, diagonal - self.mask.left)
        last = diagonal + len(self.q) - 1
        end = k_len if self.mask.right < 0 else min(k_len, last + self.mask.right + 1)
        step = min(
            PRODUCT // (self.block * group * self.dim),
            STRIP_ROWS * TILE_KEYS // self.lse.size,
            TILE_KEYS * 8,
        )
        step = max(step, TILE_KEYS // 2)
        return (slice(key, min(key + step, end)) for key in range(begin, end, step))


def _shape_scores(scores: Array, strip: Strip, tile: slice) -> None:
    """From q.k to scores, in place: scale, softcap, ALiBi, mask. (kv_heads, rows, group, keys)."""
    rows = np.arange(strip.first, strip.first + len(strip.q))
    cols = np.arange(tile.start, tile.stop)
    q_len, k_len = strip.q_len, len(strip.k)
    scores *= strip.scale / (strip.softcap or 1.0)
    if strip.softcap:
        np.tanh(scores, out=scores)
        scores *= strip.softcap
    if strip.slopes.any():
        steps = np.abs(distance(rows, cols, k_len - q_len)).astype(np.float32)
        scores -= strip.slopes[:, None, :, None] * steps[:, None, :]
    # A row sees an interval of keys, which moves with the row: if the corners are seen, all is.
    if not visible(strip.mask, rows[[0, -1]], cols[[0, -1]], q_len, k_len).all():
        seen = visible(strip.mask, rows, cols, q_len, k_len)
        np.copyto(scores, -np.inf, where=~seen[:, None, :])
    if strip.seen is not None:
        np.copyto(scores, -np.inf, where=~strip.seen[..., tile].swapaxes(1, 2))


def _finite(row_max: Array) -> Array:
    """What to subtract from the scores of a row: the largest so far, 0 where there is none."""
    return np.where(np.isneginf(row_max), np.float32(0), row_max)


def _attend(strip: Strip) -> None:
    """Write out and lse of a strip."""
    with np.errstate(all="ignore"):  # whatever the caller has set
        _finish(strip, *_walk(strip))


def _walk(strip: Strip) -> tuple[Array, Array, Array]:
    """Per score row the largest score, the sum of weights and the weighted sum of values."""
    rows, kv_heads, group, head_dim = strip.q.shape
    state = (kv_heads, rows // strip.block, strip.block * group)
    q = strip.q.transpose(1, 0, 2, 3).astype(np.float32).reshape(*state, head_dim)
    row_max = np.full(state, -np.inf, np.float32)
    total = np.zeros(state, np.float32)
    out = np.zeros((*state, strip.v.shape[-1]), np.float32)
    for tile in strip.tiles():
        k, v = (x[tile].astype(np.float32, copy=False) for x in (strip.k, strip.v))
        # In C order: a result that lies in memory as q does may not reshape without a copy.
        scores = np.matmul(q, k.transpose(1, 2, 0)[:, None], order="C")
        _shape_scores(scores.reshape(kv_heads, rows, group, -1), strip, tile)
        old_max, row_max = row_max, np.maximum(row_max, scores.max(axis=-1))
        scores -= _finite(row_max)[..., None]
        weights = np.exp(scores, out=scores)
        shrink = np.exp(old_max - _finite(row_max))
        total = total * shrink + weights.sum(axis=-1)
        out *= shrink[..., None]
        out += weights @ v.swapaxes(0, 1)[:, None]
    return row_max, total, out


def _finish(strip: Strip, row_max: Array, total: Array, out: Array) -> None:
    """Divide by the sum of the weights, which the sink joins, and store."""
    rows, kv_heads, group, _ = strip.q.shape
    row_max, total = (x.reshape(kv_heads, rows, group) for x in (row_max, total))
    sink, top = strip.sink[:, None, :], _finite(row_max)
    denominator = np.where(total == 0, np.float32(1), total + np.exp(sink - top))
    out = out.reshape(kv_heads, rows, group, -1) / denominator[..., None]
    np.copyto(out, 0, where=(total == 0)[..., None])  # no key; but 0 * NaN from V is NaN
    strip.out[...] = out.swapaxes(0, 1)
    strip.lse[...] = np.logaddexp(top + np.log(total), sink).swapaxes(0, 1)


def _grouped(x: Array, axis: int, kv_heads: int) -> Array:
    """A view with the axis of query heads split into (kv_heads, group)."""
    group = x.shape[axis] // kv_heads
    return x.reshape(*x.shape[:axis], kv_heads, group, *x.shape[axis + 1 :])


def _cut(whole: Strip) -> Iterator[Strip]:
    """The strips of a sequence: of all its KV heads where it is short, else of fewer."""
    rows, kv_heads, group, _ = whole.q.shape
    if rows == 0:
        return
    block = min(BLOCK_ROWS, PRODUCT // (TILE_KEYS * whole.dim)) // group
    block = min(rows, max(1, block))
    width = min(kv_heads, max(1, STRIP_ROWS // (rows * group)))
    height = max(1, STRIP_ROWS // (width * group * block)) * block
    in_blocks = rows - rows % block
    edges = [*range(0, in_blocks, height), in_blocks, rows]
    for first, stop in itertools.pairwise(edges):
        for head in range(0, kv_heads, width) if first < stop else ():
            part, heads = slice(first, stop), slice(head, head + width)
            yield replace(
                whole,
                first=first,
                block=min(block, stop - first),
                q=whole.q[part, heads],
                k=whole.k[:, heads],
                v=whole.v[:, heads],
                slopes=whole.slopes[heads],
                sink=whole.sink[heads],
                seen=None if whole.seen is None else whole.seen[heads, :, part],
                out=whole.out[part, heads],
                lse=whole.lse[part, heads],
            )


def _attend_all(strips: list[Strip]) -> None:
    """Write out and lse of every strip, on all cores where there is enough to do."""
    if len(strips) == 1 or sum(strip.scores for strip in strips) < SERIAL:
        for strip in strips:
            _attend(strip)
        return
    with ThreadPoolExecutor(min(len(strips), os.cpu_count() or 1)) as pool:
        try:
            # The last strips see most keys under a causal mask, so they go first.
            done = pool.map(_attend, reversed(strips))
        except RuntimeError:  # no thread starts any more, as when the interpreter shuts down
            done = map(_attend, strips)
        for _ in done:
            pass


def run(
    q: Array,
    k: Array,
    v: Array,
    out: Array,
    lse: Array | None = None,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    seen: Sequence[Array] | None = None,
) -> None:
    """Fill out and lse, whose rows outside of every sequence are left as they are.

    q, k, v, out : any strides; float16, bfloat16 or float32. lse : float32, or None.
    seen : as in `reference`.
    """
    if lse is None:
        lse = np.empty((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.float32)
    lse_of_row = lse.swapaxes(-1, -2)
    of_q = sequence_rows(q, cu_seqlens_q)
    of_k = sequence_rows(k, cu_seqlens_k, seqused_k)
    q_heads, kv_heads = q.shape[-2], k.shape[-2]
    slopes = per_head(alibi_slopes, len(of_q), q_heads, 0.0).astype(np.float32)
    sinks = per_head(sink, len(of_q), q_heads, -np.inf).astype(np.float32)
    strips: list[Strip] = []
    for b, (q_rows, k_rows) in enumerate(zip(of_q, of_k, strict=True)):
        shape = (q_heads, len(q[q_rows]), len(k[k_rows]))
        whole = Strip(
            mask=mask,
            scale=softmax_scale(scale, q.shape[-1]),
            softcap=softcap,
            first=0,
            block=1,
            q_len=len(q[q_rows]),
            q=_grouped(q[q_rows], 1, kv_heads),
            k=k[k_rows],
            v=v[k_rows],
            slopes=_grouped(slopes[b], 0, kv_heads),
            sink=_grouped(sinks[b], 0, kv_heads),
            seen=None if seen is None else _grouped(np.broadcast_to(seen[b], shape), 0, kv_heads),
            out=_grouped(out[q_rows], 1, kv_heads),
            lse=_grouped(lse_of_row[q_rows], 1, kv_heads),
        )
        strips.extend(_cut(whole))
    _attend_all(strips)
