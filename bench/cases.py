# SPDX-License-Identifier: Apache-2.0
"""What is measured: suites of named problems, and the random tensors of one.

A case is nothing but a `Problem` and a name. Only `random_tensors` needs a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

import numpy as np

from rawattn.arrays import DTYPES
from rawattn.problem import Mask, Problem

TOKENS = 16384
HIDDEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of a suite. `id` is what rows and ``--case`` name, and never changes its meaning."""

    id: str
    problem: Problem
    quick: bool = False  # part of a ``--quick`` run


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Cases of one op, our backend for them, and the peers they are compared with."""

    name: str
    op: str
    backend: str
    peers: tuple[str, ...]
    cases: tuple[Case, ...]

    def select(self, pattern: str | None, quick: bool) -> list[Case]:
        """Cases whose id matches a shell pattern, or ValueError where none does."""
        chosen = [c for c in self.cases if fnmatch(c.id, pattern or "*") and (c.quick or not quick)]
        if not chosen:
            known = ", ".join(c.id for c in self.cases)
            raise ValueError(f"case={pattern!r}, quick={quick}: suite {self.name} has {known}")
        return chosen


def dense(head_dim: int, causal: bool, length: int, *, dtype: str = "bfloat16") -> Case:
    """Self-attention over 16 k tokens of hidden size 2048, as the field publishes it."""
    heads = HIDDEN // head_dim
    return Case(
        id=f"d{head_dim}-{'causal' if causal else 'full'}-s{length}",
        problem=Problem(
            dtype=dtype,
            batch=TOKENS // length,
            q_heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=head_dim,
            max_q=length,
            max_k=length,
            mask=Mask.of(causal=causal),
        ),
        quick=length in (1024, 8192),
    )


SUITES = {
    s.name: s
    for s in (
        Suite(
            name="fwd_sm80",
            op="forward",
            backend="fwd_sm80",
            peers=("fa2", "cudnn", "fa3"),
            cases=tuple(
                dense(head_dim, causal, length)
                for head_dim in (64, 128, 256)
                for causal in (False, True)
                for length in (512, 1024, 2048, 4096, 8192, 16384)
            ),
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The CuPy arrays of one dense case, and its softmax scale."""

    q: Any  # (B, Sq, Hq, D)
    k: Any  # (B, Sk, Hkv, D)
    v: Any  # (B, Sk, Hkv, Dv)
    out: Any  # (B, Sq, Hq, Dv)
    lse: Any  # (B, Hq, Sq) float32
    scale: float

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k, self.v, self.out))


@functools.lru_cache(maxsize=1)
def _normal(count: int, dtype: str) -> Any:
    """`count` random normal numbers on the GPU; kept, since every case of a suite holds as many."""
    import cupy

    numbers = np.random.default_rng(0).standard_normal(count, dtype=np.float32)
    return cupy.asarray(numbers).astype(DTYPES[dtype])


def random_tensors(problem: Problem) -> Tensors:
    """Random normal q, k and v, and an `out` that holds NaN."""
    import cupy

    p = problem
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
    return Tensors(q=q, k=k, v=v, out=out, lse=lse, scale=p.head_dim**-0.5)


def poison(array: Any) -> None:
    """Fill an array with NaN, whatever its float type."""
    array.view(np.uint8).fill(0xFF)
