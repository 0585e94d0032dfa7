# SPDX-License-Identifier: Apache-2.0
"""What attention means, in NumPy float64, written to be read; every kernel is held to it.

    s[i, j] = scale * q[i] . k[j]                     scale is 1 / sqrt(D) unless given
    s       = softcap * tanh(s / softcap)             where softcap > 0
    s       = s - slope * |i + Sk - Sq - j|           ALiBi; from the bottom right under every mask
    s       = -inf                                    where the mask hides key j from row i
    lse[i]  = log(e^sink + sum over j of e^s[i, j])   natural log; without a sink, no first term
    out[i]  = sum over j of e^(s[i, j] - lse[i]) * v[j]

A row with no key has out 0, lse -inf (the sink, where there is one), and gradients 0.

Arrays, here and in every function below: q (B, Sq, Hq, D), k (B, Sk, Hkv, D), v (B, Sk, Hkv, Dv),
out (B, Sq, Hq, Dv), lse (B, Hq, Sq). Query head h reads KV head h // (Hq / Hkv). With
`cu_seqlens_q` (B + 1,) the sequences of q and out are packed, (total_q, Hq, D), and lse is
(Hq, total_q); with `cu_seqlens_k` those of k and v are. `seqused_k` (B,) counts the keys of each
sequence that exist; what lies behind them is never read. `alibi_slopes` is (Hq,) or (B, Hq) and
`sink` is (Hq,), in units of a score. `seen`, besides the mask, says which keys a row sees: for each
sequence booleans that broadcast to (Hq, Sq, Sk).

Results are float64. Packed rows that belong to no sequence (before cu_seqlens[0], and from
cu_seqlens[-1]) come back as NaN: a kernel leaves them alone, so there is nothing to compare with.

`rounding` names a storage type ("float16", "bfloat16", "float32") and gives the twin that measures
how much error is fair: float32 arithmetic, the weights and score gradients rounded to the storage
type before they enter a matrix product, as a kernel holds them, and the results rounded to it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16") known
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rawattn.problem import Mask

Array = NDArray[Any]
Index = tuple[int | slice, ...]


# ---- rules, shared with the tiled backend --------------------------------------------------------


def distance(rows: Array, cols: Array, shift: int) -> Array:
    """How far key j lies past the diagonal of row i, j - (i + shift), shape (rows, cols)."""
    return cols - (rows[:, None] + shift)


def visible(mask: Mask, rows: Array, cols: Array, q_len: int, k_len: int) -> NDArray[np.bool_]:
    """Whether row i sees key j, shape (rows, cols)."""
    offset = distance(rows, cols, 0 if mask.top_left else k_len - q_len)
    seen = np.ones(offset.shape, bool)
    if mask.left >= 0:
        seen &= offset >= -mask.left
    if mask.right >= 0:
        seen &= offset <= mask.right
    return seen


def sequence_rows(
    x: Array, cu_seqlens: ArrayLike | None = None, seqused: ArrayLike | None = None
) -> list[Index]:
    """What to index x with, dense or packed, to get the rows of each sequence: (S, heads, size)."""
    if cu_seqlens is None:
        bounds = [(0, x.shape[1])] * x.shape[0]
    else:
        bounds = list(itertools.pairwise(np.asarray(cu_seqlens).tolist()))
    if seqused is not None:
        used = np.asarray(seqused).tolist()
        bounds = [(first, first + n) for (first, _), n in zip(bounds, used, strict=True)]
    if cu_seqlens is None:
        return [(b, slice(first, stop)) for b, (first, stop) in enumerate(bounds)]
    return [(slice(first, stop),) for first, stop in bounds]


def per_head(values: ArrayLike | None, batch: int, q_heads: int, absent: float) -> Array:
    """Sinks or slopes, (Hq,) or (B, Hq), as (B, Hq); all `absent` where there are none."""
    given = np.asarray(absent if values is None else values, np.float64)
    return np.broadcast_to(given, (batch, q_heads))


def softmax_scale(scale: float | None, head_dim: int) -> float:
    """The scale, or what it is where none is given."""
    return 1.0 / math.sqrt(head_dim) if scale is None else float(scale)


# ---- one query head of one sequence --------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """How one query head of one sequence turns products into scores."""

    mask: Mask
    scale: float
    softcap: float  # 0: none
    slope: float  # 0: none
    sink: float  # -inf: none
    seen: Array  # bool, broadcasts to (Sq, Sk)
    storage: np.dtype[Any]  # float64 is exact; any other makes the rounded twin

    @property
    def compute(self) -> np.dtype[Any]:
        return np.dtype(np.float64 if self.storage == np.float64 else np.float32)

    def rounded(self, x: Array) -> Array:
        """What is left of x when it has been stored."""
        return x.astype(self.storage).astype(self.compute)


def _products(q: Array, k: Array, rule: Rule) -> Array:
    """scale * q.k, shape (Sq, Sk)."""
    return rule.scale * (q @ k.T)


def _scores(products: Array, rule: Rule) -> Array:
    """Softcap, ALiBi and mask, in this order; shape (Sq, Sk)."""
    q_len, k_len = products.shape
    rows, cols = np.arange(q_len), np.arange(k_len)
    scores = products
    if rule.softcap:
        scores = rule.softcap * np.tanh(scores / rule.softcap)
    if rule.slope:
        steps = np.abs(distance(rows, cols, k_len - q_len)).astype(rule.compute)
        scores = scores - rule.slope * steps
    seen = visible(rule.mask, rows, cols, q_len, k_len) & rule.seen
    return np.where(seen, scores, -math.inf)


def _forward(q: Array, k: Array, v: Array, rule: Rule) -> tuple[Array, Array]:
    """out (Sq, Dv) and lse (Sq,) of q (Sq, D), k (Sk, D), v (Sk, Dv)."""
    q, k, v = (x.astype(rule.compute) for x in (q, k, v))
    scores = _scores(_products(q, k, rule), rule)
    row_max = scores.max(axis=-1, initial=-math.inf)
    no_key = np.isneginf(row_max)
    top = np.where(no_key, 0.0, row_max)
    weights = np.exp(scores - top[:, None])
    total = weights.sum(axis=-1)
    lse = np.logaddexp(top + np.log(total), rule.sink)
    out = (rule.rounded(weights) @ v) / (total + np.exp(rule.sink - top))[:, None]
    out[no_key] = 0.0
    return rule.rounded(out), lse


def _backward(dout: Array, q: Array, k: Array, v: Array, rule: Rule) -> tuple[Array, ...]:
    """What the head adds to dq (Sq, D), dk (Sk, D), dv (Sk, Dv) and dsink ()."""
    out, lse = _forward(q, k, v, rule)
    dout, q, k, v = (x.astype(rule.compute) for x in (dout, q, k, v))
    products = _products(q, k, rule)
    finite_lse = np.where(np.isneginf(lse), 0.0, lse)
    weights = np.exp(_scores(products, rule) - finite_lse[:, None])
    delta = (dout * out).sum(axis=-1)
    dscores = weights * (dout @ v.T - delta[:, None])
    if rule.softcap:
        dscores = dscores * (1.0 - np.tanh(products / rule.softcap) ** 2)
    dscores = rule.rounded(dscores)
    dsink = -(np.exp(rule.sink - finite_lse) * delta).sum()
    return (
        rule.scale * (dscores @ k),
        rule.scale * (dscores.T @ q),
        rule.rounded(weights).T @ dout,
        dsink,
    )


# ---- every head of every sequence ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """A query head of a sequence, its rule, and where its rows are."""

    rule: Rule
    number: int
    q: Index  # into q, out and their gradients, and into lse with its last two axes swapped
    kv: Index  # into k, v and their gradients


def _heads(
    q: Array,
    k: Array,
    mask: Mask,
    scale: float | None,
    softcap: float,
    alibi_slopes: ArrayLike | None,
    sink: ArrayLike | None,
    cu_seqlens_q: ArrayLike | None,
    cu_seqlens_k: ArrayLike | None,
    seqused_k: ArrayLike | None,
    seen: Sequence[Array] | None,
    rounding: str | None,
) -> Iterator[Head]:
    """Every query head of every sequence; the arguments are those of `attention`."""
    (q_heads, head_dim), kv_heads = q.shape[-2:], k.shape[-2]
    q_rows = sequence_rows(q, cu_seqlens_q)
    k_rows = sequence_rows(k, cu_seqlens_k, seqused_k)
    slopes = per_head(alibi_slopes, len(q_rows), q_heads, 0.0).tolist()
    sinks = per_head(sink, len(q_rows), q_heads, -math.inf).tolist()
    for b, (of_q, of_k) in enumerate(zip(q_rows, k_rows, strict=True)):
        shape = (q_heads, len(q[of_q]), len(k[of_k]))
        seen_by_head = np.broadcast_to(True if seen is None else seen[b], shape)
        for h in range(q_heads):
            rule = Rule(
                mask=mask,
                scale=softmax_scale(scale, head_dim),
                softcap=float(softcap),
                slope=slopes[b][h],
                sink=sinks[b][h],
                seen=seen_by_head[h],
                storage=np.dtype(rounding or np.float64),
            )
            kv_head = h * kv_heads // q_heads
            yield Head(rule=rule, number=h, q=(*of_q, h), kv=(*of_k, kv_head))


def _no_gradient(x: Array, cu_seqlens: ArrayLike | None) -> Array:
    """Zeros of the shape of x in the rows of its sequences, NaN in other rows."""
    gradient = np.full(x.shape, math.nan)
    for rows in sequence_rows(x, cu_seqlens):
        gradient[rows] = 0.0
    return gradient


def attention(
    q: Array,
    k: Array,
    v: Array,
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
    rounding: str | None = None,
) -> tuple[Array, Array]:
    """out and lse, as the module says."""
    out = np.full((*q.shape[:-1], v.shape[-1]), math.nan)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), math.nan)
    lse_of_row = lse.swapaxes(-1, -2)
    heads = _heads(
        q,
        k,
        mask,
        scale,
        softcap,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        seen,
        rounding,
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for head in heads:
            out[head.q], lse_of_row[head.q] = _forward(q[head.q], k[head.kv], v[head.kv], head.rule)
    return out, lse


def attention_backward(
    dout: Array,
    q: Array,
    k: Array,
    v: Array,
    *,
    mask: Mask,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: ArrayLike | None = None,
    sink: ArrayLike | None = None,
    cu_seqlens_q: ArrayLike | None = None,
    cu_seqlens_k: ArrayLike | None = None,
    seqused_k: ArrayLike | None = None,
    rounding: str | None = None,
) -> tuple[Array, ...]:
    """(dq, dk, dv), or with a sink (dq, dk, dv, dsink): gradients of sum(dout * out).

    dout has the shape of out, and each gradient that of its input. The keys of a sequence that
    `seqused_k` leaves out get 0.
    """
    dq, dk, dv = (
        _no_gradient(x, cu) for x, cu in ((q, cu_seqlens_q), (k, cu_seqlens_k), (v, cu_seqlens_k))
    )
    dsink = np.zeros(q.shape[-2])
    heads = _heads(
        q,
        k,
        mask,
        scale,
        softcap,
        alibi_slopes,
        sink,
        cu_seqlens_q,
        cu_seqlens_k,
        seqused_k,
        None,
        rounding,
    )
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        for head in heads:
            dq[head.q], dk_of_head, dv_of_head, dsink_of_head = _backward(
                dout[head.q], q[head.q], k[head.kv], v[head.kv], head.rule
            )
            dk[head.kv] += dk_of_head
            dv[head.kv] += dv_of_head
            dsink[head.number] += dsink_of_head
    if rounding is not None:
        dq, dk, dv = (x.astype(rounding).astype(np.float64) for x in (dq, dk, dv))
    return (dq, dk, dv) if sink is None else (dq, dk, dv, dsink)


# ---- partial results -----------------------------------------------------------------------------


def merge_states(outs: ArrayLike, lses: ArrayLike) -> tuple[Array, Array]:
    """Attention over the union of disjoint key sets: out (..., D) and lse (...).

    outs : (n, ..., D) and lses : (n, ...) are the results over each of the n sets. An lse of -inf
    means no keys, and so does +inf, which older kernels write; the out of such a set is not used.
    Where one set alone has keys its out and lse are returned as they are, bit for bit.
    """
    outs, lses = np.asarray(outs, np.float64), np.asarray(lses, np.float64)
    lses = np.where(np.isposinf(lses), -math.inf, lses)
    has_keys = ~np.isneginf(lses)
    outs = np.where(has_keys[..., None], outs, 0.0)
    largest = lses.max(axis=0, initial=-math.inf)
    top = np.where(np.isneginf(largest), 0.0, largest)
    with np.errstate(divide="ignore", over="ignore"):
        weights = np.exp(lses - top)
        total = weights.sum(axis=0)
        lse = top + np.log(total)
    # By their own sum: a large lse absorbs its logarithm.
    shares = weights / np.where(total == 0, 1.0, total)
    out = (outs * shares[..., None]).sum(axis=0)
    # Added to 0 a lone -0 would lose its sign, so lone sets are picked, not summed.
    lone = has_keys.sum(axis=0) == 1
    for out_i, has_keys_i in zip(outs, has_keys, strict=True):
        out[lone & has_keys_i] = out_i[lone & has_keys_i]
    return out, lse
