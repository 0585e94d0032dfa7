# SPDX-License-Identifier: Apache-2.0
"""The `reference` backend: attention of NumPy arrays, tiled, in float32, on every core.

FlashAttention's loop in NumPy. A strip is a range of query rows of one sequence under one or more KV
heads; it walks the keys tile by tile and carries three things per row: the largest score, the sum of
the weights, and the weighted sum of the values. Memory therefore does not grow with Sq * Sk. What
scores and masks are is defined in `reference`, whose module also describes the arrays.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from rawattn.problem import Mask
from rawattn.reference import Array, distance, per_head, sequence_rows, softmax_scale, visible

TILE_ROWS = 512  # query rows times query heads
TILE_KEYS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Strip:
    """Query rows [first, first + rows) of a sequence, for some of its KV heads. Arrays are views."""

    mask: Mask
    scale: float
    softcap: float  # 0: none
    alibi: bool
    first: int
    q_len: int
    q: Array  # (rows, kv_heads, group, D)
    k: Array  # (k_len, kv_heads, D)
    v: Array  # (k_len, kv_heads, Dv)
    slopes: Array  # (kv_heads, group)
    sink: Array  # (kv_heads, group), -inf: none
    out: Array  # (rows, kv_heads, group, Dv), to be written
    lse: Array  # (rows, kv_heads, group), to be written

    @property
    def rows(self) -> Array:
        return np.arange(self.first, self.first + len(self.q))

    def span(self) -> tuple[int, int]:
        """The first key that any row sees, and the one after the last."""
        k_len = len(self.k)
        shift = 0 if self.mask.top_left else k_len - self.q_len
        lowest, highest = self.first + shift, self.first + shift + len(self.q) - 1
        begin = 0 if self.mask.left < 0 else max(0, lowest - self.mask.left)
        end = k_len if self.mask.right < 0 else min(k_len, highest + self.mask.right + 1)
        return begin, end


def _shape_scores(scores: Array, strip: Strip, first_key: int) -> None:
    """Softcap, ALiBi and mask in place; scores (kv_heads, rows, group, keys) hold scale * q.k."""
    rows, cols = strip.rows, np.arange(first_key, first_key + scores.shape[-1])
    if strip.softcap:
        scores /= strip.softcap
        np.tanh(scores, out=scores)
        scores *= strip.softcap
    if strip.alibi:
        steps = np.abs(distance(rows, cols, len(strip.k) - strip.q_len)).astype(np.float32)
        scores -= strip.slopes[:, None, :, None] * steps[:, None, :]
    if not strip.mask.trivial:
        hidden = ~visible(strip.mask, rows, cols, strip.q_len, len(strip.k))
        if hidden.any():
            np.copyto(scores, -np.inf, where=hidden[:, None, :])


def _finite(row_max: Array) -> Array:
    """What to subtract from the scores of a row: its maximum, or 0 where it has no key so far."""
    return np.where(np.isneginf(row_max), np.float32(0), row_max)


def _attend(strip: Strip) -> None:
    """Write out and lse of a strip."""
    rows, kv_heads, group, head_dim = strip.q.shape
    per_row = (kv_heads, rows * group)
    q = strip.q.transpose(1, 0, 2, 3).astype(np.float32).reshape(*per_row, head_dim)
    q *= strip.scale
    row_max = np.full(per_row, -np.inf, np.float32)
    total = np.zeros(per_row, np.float32)
    out = np.zeros((*per_row, strip.v.shape[-1]), np.float32)
    begin, end = strip.span()
    for first in range(begin, end, TILE_KEYS):
        tile = slice(first, min(first + TILE_KEYS, end))
        k, v = (x[tile].astype(np.float32, copy=False) for x in (strip.k, strip.v))
        scores = q @ k.transpose(1, 2, 0)
        _shape_scores(scores.reshape(kv_heads, rows, group, -1), strip, first)
        old_max, row_max = row_max, np.maximum(row_max, scores.max(axis=-1))
        scores -= _finite(row_max)[..., None]
        weights = np.exp(scores, out=scores)
        shrink = np.exp(old_max - _finite(row_max))
        total = total * shrink + weights.sum(axis=-1)
        out *= shrink[..., None]
        out += weights @ v.swapaxes(0, 1)
    _finish(strip, row_max, total, out)


def _finish(strip: Strip, row_max: Array, total: Array, out: Array) -> None:
    """Divide by the sum of the weights, which the sink joins, and store."""
    rows, kv_heads, group, _ = strip.q.shape
    top = _finite(row_max).reshape(kv_heads, rows, group)
    total = total.reshape(kv_heads, rows, group)
    sink = strip.sink[:, None, :]
    lse = np.logaddexp(top + np.log(total), sink)
    denominator = total + np.exp(sink - top)
    out = out.reshape(kv_heads, rows, group, -1) / np.where(total == 0, 1, denominator)[..., None]
    strip.out[...] = out.swapaxes(0, 1)
    strip.lse[...] = lse.swapaxes(0, 1)
