# SPDX-License-Identifier: Apache-2.0
"""What is measured: suites of named problems, and the random tensors of a forward one.

A case is nothing but a problem and a name. Only `random_tensors` needs a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from bench import decode_cases
from bench.check import SOFTCAP, Expected, check_steps, expected
from bench.forward_cases import CHUNKS, FWD_SM80, FWD_SM90, dense
from bench.suite import Case, Suite
from rawattn.arrays import DTYPES
from rawattn.problem import Problem, Rows

__all__ = ["SUITES", "Case", "Suite", "Tensors", "dense", "poison", "random_tensors"]

SUITES = {
    s.name: s
    for s in (
        FWD_SM80,
        FWD_SM90,
        CHUNKS,
        decode_cases.DECODE,
        decode_cases.PROMPTS,
        decode_cases.MERGE,
        decode_cases.KV_WRITE,
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The CuPy arrays of one forward case, and its softmax scale."""

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hkv, D)
    v: Any  # (B, Sk, Hkv, Dv)
    out: Any  # (B, Sq, Hq, Dv)
    lse: Any  # (B, Hq, Sq) float32
    scale: float
    softcap: float = 0.0  # 0: none
    slopes: Any = None  # (Hq,) float32, of ALiBi
    # first rows of the sequences among those of q and k, (B + 1,) int32, where calls take them
    # packed: the same memory without the axis of the batch
    starts: tuple[Any, Any] | None = None

    always_clear = False  # whether L2 is cleared before each launch even where they exceed it

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.out))

    def expected(self, problem: Problem, xp: Any) -> Expected:
        """What `out` must hold, computed in float64."""
        steps = {"scale": self.scale, "softcap": self.softcap, "slopes": self.slopes}
        return expected(problem, self.q, self.k, self.v, **steps, xp=xp)


@functools.lru_cache(maxsize=1)
def _normal(count: int, dtype: str) -> Any:
    """`count` random normal numbers on the GPU; kept, since every case of a suite holds as many."""
    import cupy

    numbers = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    return cupy.asarray(numbers).astype(DTYPES[dtype])


def alibi_slopes(heads: int) -> np.ndarray:
    """(heads,) float32, as the ALiBi paper has them: 2^(-8 / n), 2^(-16 / n) and so on for n heads,
    a power of two; else those of the next smaller one, and every second of the next larger one.
    """
    whole = 1 << (heads.bit_length() - 1)
    first = 2.0 ** (-8.0 / whole * np.arange(1, whole + 1))
    between = 2.0 ** (-4.0 / whole * np.arange(1, 2 * (heads - whole), 2))
    return np.concatenate([first, between]).astype(np.float32)


def random_tensors(problem: Problem) -> Tensors:
    """Random normal q, k and v, the values of the problem's score steps, and an `out` that holds
    NaN. ValueError for steps that it has no values for.
    """
    import cupy

    p = problem
    slopes = cupy.asarray(alibi_slopes(p.q_heads)) if p.scores.alibi else None
    steps = {"scale": p.head_dim**-0.5, "softcap": SOFTCAP if p.scores.softcap else 0.0}
    check_steps(p.scores, **steps, slopes=slopes)
    shapes = (
        (p.batch, p.max_q, p.q_heads, p.head_dim),
        (p.batch, p.max_k, p.kv_heads, p.head_dim),
        (p.batch, p.max_k, p.kv_heads, p.value_dim),
    )
    ends = np.cumsum([math.prod(s) for s in shapes])
    numbers = _normal(int(ends[-1]), p.dtype)
    q, k, v = (
        numbers[end - math.prod(s) : end].reshape(s) for s, end in zip(shapes, ends, strict=True)
    )
    out = cupy.empty((p.batch, p.max_q, p.q_heads, p.value_dim), DTYPES[p.dtype])
    lse = cupy.empty((p.batch, p.q_heads, p.max_q), np.float32)
    poison(out)
    starts = None
    if p.q_rows is Rows.PACKED:
        starts = tuple(cupy.arange(p.batch + 1, dtype=np.int32) * n for n in (p.max_q, p.max_k))
    return Tensors(q=q, k=k, v=v, out=out, lse=lse, slopes=slopes, starts=starts, **steps)


def poison(array: Any) -> None:
    """Fill an array with NaN, whatever its float type."""
    array.view(np.uint8).fill(0xFF)
