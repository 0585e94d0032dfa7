# SPDX-License-Identifier: Apache-2.0
"""The three loop orders of `rawattn.roofline.traffic`, run on NumPy arrays of one head.

`Memory` stands for device memory: what is read from it is a copy, what is written goes back, and
both are counted. The rest is arithmetic on the chip, in float64, which costs nothing here.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np

from rawattn.problem import Mask
from rawattn.roofline.traffic import Traffic

Array = np.ndarray[Any, Any]


class Memory:
    """Named arrays, and the bytes that went in and out of them."""

    def __init__(self, **arrays: Array) -> None:
        self.arrays = arrays
        self._moved: Counter[str] = Counter()

    def read(self, name: str, *where: slice) -> Array:
        """A float64 copy of a part of an array."""
        part = self.arrays[name][where]
        self._moved[f"{name}_read"] += part.nbytes
        return part.astype(np.float64)

    def write(self, name: str, values: Array, *where: slice) -> None:
        """Store values into a part of an array, in its type."""
        part = self.arrays[name][where]
        part[...] = values.astype(part.dtype)
        self._moved[f"{name}_written"] += part.nbytes

    @property
    def traffic(self) -> Traffic:
        return Traffic(**self._moved)


def _memory(q: Array, k: Array, v: Array) -> Memory:
    """q (Sq, D), k (Sk, D), v (Sk, Dv), and room for O in their type."""
    return Memory(q=q, k=k, v=v, o=np.zeros((len(q), v.shape[1]), q.dtype))


def visible(q_len: int, k_len: int, mask: Mask) -> Array:
    """(Sq, Sk) which keys each row sees, by the definition in `Mask`."""
    diagonal = np.arange(q_len)[:, None] + (0 if mask.top_left else k_len - q_len)
    keys, seen = np.arange(k_len)[None, :], np.ones((q_len, k_len), bool)
    if mask.left >= 0:
        seen &= keys >= diagonal - mask.left
    if mask.right >= 0:
        seen &= keys <= diagonal + mask.right
    return seen


def standard(q: Array, k: Array, v: Array, mask: Mask | None = None) -> tuple[Array, Traffic]:
    """O (Sq, Dv) and the traffic of three kernels with S and P between them."""
    memory, seen = _memory(q, k, v), visible(len(q), len(k), mask or Mask())
    scale = q.shape[1] ** -0.5
    memory.arrays |= {name: np.empty((len(q), len(k)), q.dtype) for name in "sp"}
    memory.write("s", scale * memory.read("q") @ memory.read("k").T)
    scores = np.where(seen, memory.read("s"), -np.inf)
    top = scores.max(axis=1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isinf(top), 0.0, top))
    total = weights.sum(axis=1, keepdims=True)
    memory.write("p", weights / np.where(total > 0, total, 1.0))
    memory.write("o", memory.read("p") @ memory.read("v"))
    return memory.arrays["o"], memory.traffic


def _step(
    scores: Array, values: Array, top: Array, total: Array, out: Array
) -> tuple[Array, Array, Array]:
    """One step of the online softmax: running maximum and sum (rows, 1), O not yet divided."""
    new = np.maximum(top, scores.max(axis=1, keepdims=True))
    base = np.where(np.isinf(new), 0.0, new)
    weights, factor = np.exp(scores - base), np.exp(top - base)
    return new, total * factor + weights.sum(axis=1, keepdims=True), out * factor + weights @ values


def queries_outside(
    q: Array, k: Array, v: Array, block_m: int, block_n: int, mask: Mask | None = None
) -> tuple[Array, Traffic]:
    """O (Sq, Dv) and the traffic of FlashAttention-2: O stays on the chip."""
    memory, seen = _memory(q, k, v), visible(len(q), len(k), mask or Mask())
    for i in (slice(s, s + block_m) for s in range(0, len(q), block_m)):
        queries = memory.read("q", i) * q.shape[1] ** -0.5
        out = np.zeros((len(queries), v.shape[1]))
        top, total = np.full((len(queries), 1), -np.inf), np.zeros((len(queries), 1))
        for j in (slice(s, s + block_n) for s in range(0, len(k), block_n)):
            if seen[i, j].any():
                scores = np.where(seen[i, j], queries @ memory.read("k", j).T, -np.inf)
                top, total, out = _step(scores, memory.read("v", j), top, total, out)
        memory.write("o", out / np.where(total > 0, total, 1.0), i)
    return memory.arrays["o"], memory.traffic


def keys_outside(
    q: Array, k: Array, v: Array, block_m: int, block_n: int, mask: Mask | None = None
) -> tuple[Array, Traffic]:
    """O (Sq, Dv) and the traffic of FlashAttention-1: O, divided, goes out and in again."""
    memory, seen = _memory(q, k, v), visible(len(q), len(k), mask or Mask())
    memory.arrays["stats"] = np.tile(np.array([-np.inf, 0.0], np.float32), (len(q), 1))
    for j in (slice(s, s + block_n) for s in range(0, len(k), block_n)):
        if not seen[:, j].any():
            continue
        keys, values = memory.read("k", j), memory.read("v", j)
        for i in (slice(s, s + block_m) for s in range(0, len(q), block_m)):
            if not seen[i, j].any():
                continue
            queries = memory.read("q", i) * q.shape[1] ** -0.5
            scores = np.where(seen[i, j], queries @ keys.T, -np.inf)
            top, total = np.split(memory.read("stats", i), 2, axis=1)
            out = memory.read("o", i) * total
            top, total, out = _step(scores, values, top, total, out)
            memory.write("o", out / np.where(total > 0, total, 1.0), i)
            memory.write("stats", np.hstack([top, total]), i)
    return memory.arrays["o"], memory.traffic
