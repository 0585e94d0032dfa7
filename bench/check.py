# SPDX-License-Identifier: Apache-2.0
"""Compares big outputs with float64, on the GPU that made them, before anything is timed.

Written for NumPy and CuPy alike, so that a test holds it to `rawattn.reference`. Every (batch,
head) pair is compared in whole while a problem has at most `SCORES` scores, else evenly spaced
pairs, the first and the last among them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn.arrays import DTYPES
from rawattn.problem import Problem, Scores
from rawattn.testing.closeness import ulp

SOFTCAP = 50.0  # of the cases that have one: Gemma 2's
SCORES = 2**34
CHUNK = 2**25  # scores held at once, in about six float64 arrays


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """How P and the output are stored: times a scale, in a type; they fit."""

    dtype: str
    scale: float = 1.0

    def ulp(self, x: Any) -> Any:
        """From |x| to the next larger value."""
        return ulp(x * self.scale, self.dtype) / self.scale

    def rounded(self, x: Any) -> Any:
        """What becomes of float64 values."""
        if DTYPES[self.dtype].itemsize == 1:  # which CuPy cannot convert to
            step = self.ulp(x)
            return np.rint(x / step) * step
        scaled = (x * self.scale).astype(np.float32).astype(DTYPES[self.dtype])
        return scaled.astype(np.float32).astype(np.float64) / self.scale


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """Attention of some (batch, head) pairs, and how far from it a correct output may lie."""

    pairs: Any  # (n,) batch * q_heads + q_head
    out: Any  # (n, Sq, Dv) float64
    bound: Any  # (n, Sq, 1) as `rawattn.testing.closeness.bound` has it

    def error_ratio(self, out: Any, xp: Any = np) -> float:
        """The largest error of `out` (B, Sq, Hq, Dv) over its bound; above 1, or NaN, is wrong."""
        got = _pairs_first(out, xp)[self.pairs]
        return float(xp.max(xp.abs(got - self.out) / self.bound))


def expected(
    problem: Problem,
    q: Any,
    k: Any,
    v: Any,
    *,
    scale: float,
    softcap: float = 0.0,
    slopes: Any = None,
    xp: Any = np,
    storage: Storage | None = None,
) -> Expected:
    """Float64 attention of dense float arrays.

    q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv), slopes (Hq,); `xp` is NumPy or CuPy.
    `storage` is that of P and the output, where it is not the problem's type. ValueError where the
    problem asks for other steps between q.k and the softmax than the values do.
    """
    p, storage = problem, storage or Storage(dtype=problem.dtype)
    check_steps(p.scores, scale, softcap, slopes)
    q, k, v = (_pairs_first(x, xp) for x in (q, k, v))
    pairs = _chosen_pairs(p)
    out = xp.empty((len(pairs), p.max_q, p.value_dim))
    bound = xp.empty((len(pairs), p.max_q, 1))
    rows = max(1, min(p.max_q, CHUNK // max(1, p.max_k)))
    heads = max(1, CHUNK // max(1, rows * p.max_k))
    for i in range(0, len(pairs), heads):
        some = slice(i, i + heads)
        q_heads, kv_heads = xp.asarray(pairs[some]), xp.asarray(pairs[some] // p.group)
        for row in range(0, p.max_q, rows):
            part = slice(row, min(row + rows, p.max_q))
            scores = q[q_heads, part] @ k[kv_heads].swapaxes(1, 2) * scale
            if softcap:
                scores = softcap * xp.tanh(scores / softcap)
            if slopes is not None:
                slope = slopes[q_heads % p.q_heads].astype(np.float64)[:, None, None]
                scores = scores - slope * xp.abs(_ahead(p, part, p.max_k - p.max_q, xp))
            scores = xp.where(_visible(p, part, xp), scores, -xp.inf)
            exact, rounded = softmax_v(scores, v[kv_heads], storage, xp)
            out[some, part] = exact
            error, largest = (
                xp.abs(x).max(axis=-1, keepdims=True) for x in (rounded - exact, exact)
            )
            bound[some, part] = 2 * error + 2 * storage.ulp(largest)
    return Expected(pairs=xp.asarray(pairs), out=out, bound=bound)


def steps(problem: Any) -> frozenset[str]:
    """The steps between q.k and the softmax that a problem of any class asks for, by name."""
    asked = getattr(problem, "scores", Scores())
    return frozenset(name for name in Scores.__slots__ if getattr(asked, name))


def check_steps(asked: Scores, scale: float, softcap: float, slopes: Any) -> None:
    """ValueError where these values are not the steps of scores that are asked for: what is timed
    would be another problem than its row says.
    """
    given = Scores(softcap=softcap != 0, alibi=slopes is not None, reversed=scale <= 0)
    if given != asked:
        raise ValueError(f"scores={asked}: the values that are there make {given}")


def softmax_v(scores: Any, values: Any, storage: Storage, xp: Any) -> tuple[Any, Any]:
    """softmax(scores) @ values, exact and with P and O rounded; rows without a key are 0."""
    top = scores.max(axis=-1, keepdims=True)
    weights = xp.exp(scores - xp.where(xp.isinf(top), 0.0, top))
    total = weights.sum(axis=-1, keepdims=True)
    total = xp.where(total > 0, total, 1.0)
    return weights @ values / total, storage.rounded(storage.rounded(weights) @ values / total)


def _visible(p: Problem, part: slice, xp: Any) -> Any:
    """(rows, Sk) which keys the query rows of `part` see."""
    ahead = _ahead(p, part, 0 if p.mask.top_left else p.max_k - p.max_q, xp)
    left = p.mask.left if p.mask.left >= 0 else p.max_k + p.max_q
    right = p.mask.right if p.mask.right >= 0 else p.max_k + p.max_q
    return (ahead >= -left) & (ahead <= right)


def _ahead(p: Problem, part: slice, shift: int, xp: Any) -> Any:
    """(rows, Sk) how far key j lies past the diagonal of row i, which is at key i + shift."""
    rows, keys = xp.arange(part.start, part.stop)[:, None], xp.arange(p.max_k)[None, :]
    return keys - rows - shift


def _chosen_pairs(p: Problem) -> np.ndarray:
    count = p.batch * p.q_heads
    most = max(2, SCORES // max(1, p.max_q * p.max_k))
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _pairs_first(x: Any, xp: Any) -> Any:
    """(B, S, H, D) of any dtype -> (B * H, S, D) float64."""
    x = x.astype(np.float32).astype(np.float64).transpose(0, 2, 1, 3)
    return xp.ascontiguousarray(x).reshape(-1, *x.shape[2:])
