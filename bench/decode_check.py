# SPDX-License-Identifier: Apache-2.0
"""Compares outputs of decoding with float64 attention over the pages, all of them, on the GPU that
made them. Written for NumPy and CuPy alike, so that a test holds it to `rawattn.reference`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from bench.check import Expected, Storage, check_steps, softmax_v
from rawattn.arrays import DTYPES
from rawattn.paged_problem import PagedProblem
from rawattn.reference_paged import slots
from rawattn.testing.closeness import ulp

CHUNK = 2**28  # keys x heads x columns held at once, in a few float64 arrays
QUANTIZED = 2  # times the bound: of 8-bit caches


def expected(
    problem: PagedProblem,
    caches: tuple[Any, Any],
    q: Any,
    table: Any,
    keys: Sequence[int],
    scale: float,
    softcap: float = 0.0,
) -> Expected:
    """Attention of q (B, Sq, Hq, D) over k_cache, v_cache; sequence b has keys[b] keys. ValueError
    where the problem asks for other steps of scores.
    """
    p, xp = problem, _module(q)
    check_steps(p.scores, scale, softcap, None)
    size = max(p.head_dim, p.value_dim) * p.kv_heads
    out = xp.empty((p.batch, p.q_heads, p.max_q, p.value_dim))
    bound = xp.empty((p.batch, p.q_heads, p.max_q, 1))
    start = 0
    for length, alike in itertools.groupby(keys):
        stop = start + len(list(alike))
        step = max(1, CHUNK // (length * size))
        for i in range(start, stop, step):
            some = slice(i, min(i + step, stop))
            pages = table[some, : -(-length // p.page)]
            k, v = (_gather(x, pages, length, p) for x in caches)
            exact, rounded = _attend(p, q[some], k, v, scale, softcap)
            error, largest = (
                xp.abs(x).max(axis=-1, keepdims=True) for x in (rounded - exact, exact)
            )
            out[some] = exact
            allowed = 2 * error + 2 * ulp(largest, p.dtype)
            bound[some] = allowed * (QUANTIZED if p.quantized else 1)
        start = stop
    pairs = xp.arange(p.batch * p.q_heads)
    rows = (len(pairs), p.max_q)
    return Expected(pairs=pairs, out=out.reshape(*rows, -1), bound=bound.reshape(*rows, 1))


def _attend(
    p: PagedProblem, q: Any, k: Any, v: Any, scale: float, softcap: float
) -> tuple[Any, Any]:
    """Exact and rounded out (n, Hq, Sq, Dv) of q (n, Sq, Hq, D), k and v (n, Hkv, S, D) float64."""
    xp, n, length = _module(q), len(q), k.shape[2]
    q = q.astype(np.float32).astype(np.float64).transpose(0, 2, 1, 3)
    q = xp.ascontiguousarray(q).reshape(n, p.kv_heads, p.group * p.max_q, -1)
    scores = (q @ k.swapaxes(2, 3) * scale).reshape(n, p.kv_heads, p.group, p.max_q, length)
    if softcap:
        scores = softcap * xp.tanh(scores / softcap)
    ahead = xp.arange(length) - xp.arange(p.max_q)[:, None] - (length - p.max_q)
    if p.mask.causal:
        scores = xp.where(ahead <= 0, scores, -xp.inf)
    scores = scores.reshape(n, p.kv_heads, -1, length)
    found = softmax_v(scores, v, Storage(dtype=p.dtype), xp)
    exact, rounded = (x.reshape(n, p.q_heads, p.max_q, -1) for x in found)
    return exact, rounded


def _gather(cache: Any, pages: Any, length: int, p: PagedProblem) -> Any:
    """The keys or values on pages (n, count) of a cache, (n, Hkv, length, D) float64."""
    xp, (n, count) = _module(cache), pages.shape
    bits = cache.view(np.uint8 if p.quantized else np.uint16)[pages.reshape(-1)]
    tokens = slots(bits, p.layout).reshape(n, count * p.page, p.kv_heads, -1)[:, :length]
    tokens = xp.ascontiguousarray(tokens.transpose(0, 2, 1, 3))
    if p.quantized:
        return xp.asarray(meanings(p.cache_dtype))[tokens]
    return tokens.view(DTYPES[p.cache_dtype]).astype(np.float32).astype(np.float64)


@functools.cache
def meanings(dtype: str) -> np.ndarray:
    """What each of the 256 bit patterns of an 8-bit type means, float64."""
    return np.arange(256, dtype=np.uint8).view(DTYPES[dtype]).astype(np.float64)


def _module(x: Any) -> Any:
    """NumPy or CuPy, whose array it is."""
    if isinstance(x, np.ndarray):
        return np
    import cupy

    return cupy
