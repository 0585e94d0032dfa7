# SPDX-License-Identifier: Apache-2.0
"""What is asked for around a paged cache: storing tokens, turning queries, copying blocks, merging
partial results. As in `problem.Problem`, all that chooses code or launch shape, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from rawattn.problem import CacheLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWriteProblem:
    """New keys and values into the slots of a cache.

    `aligned`: every row of k, v, cos and sin, and in the caches every row (x-major: every page of
    keys, and of values) starts on 16 bytes and is a multiple of 16 bytes; with `rotary` so is half
    of what is turned.
    """

    dtype: str  # of k, v, cos and sin: "float16", "bfloat16", "float32"
    cache_dtype: str  # of both caches: `dtype`, or "float8_e4m3fn", "float8_e5m2", "int8"
    tokens: int  # new ones, all sequences together; an upper bound where the GPU knows
    kv_heads: int
    head_dim: int
    value_dim: int
    layout: CacheLayout
    rotary: bool = False
    aligned: bool = True

    @property
    def empty(self) -> bool:
        """Whether there is nothing to store, so that nothing is launched."""
        return 0 in (self.tokens, self.kv_heads) or self.head_dim + self.value_dim == 0

    def __str__(self) -> str:
        return (
            f"{self.tokens} tokens of {self.dtype} into a {self.layout.value} cache of "
            f"{self.cache_dtype}, {self.kv_heads} KV heads, head dims {self.head_dim} and "
            f"{self.value_dim}" + ", rotary" * self.rotary
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryProblem:
    """Rows turned by their positions, into another array or in place. `aligned` as above."""

    dtype: str
    tokens: int
    heads: int
    head_dim: int
    aligned: bool = True

    @property
    def empty(self) -> bool:
        return 0 in (self.tokens, self.heads, self.head_dim)

    def __str__(self) -> str:
        return f"rotary, {self.tokens} tokens of {self.dtype}, {self.heads} x {self.head_dim}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SequencesProblem:
    """How many keys each sequence of a batch has, and where they begin, worked out on the GPU."""

    batch: int

    @property
    def empty(self) -> bool:
        return self.batch == 0

    def __str__(self) -> str:
        return f"the keys of {self.batch} sequences"


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocksProblem:
    """Blocks copied to other blocks of the same cache, in each of several caches."""

    caches: int  # of equal shape and strides
    pairs: int
    block_bytes: int
    copy_bytes: int = 16  # every block starts on, and is a multiple of: 16, 4 or 1

    @property
    def empty(self) -> bool:
        return 0 in (self.caches, self.pairs, self.block_bytes)

    def __str__(self) -> str:
        return f"{self.pairs} blocks of {self.block_bytes} bytes in each of {self.caches} caches"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeProblem:
    """Outs and lses over disjoint sets of keys into those of their union.

    `aligned`: every row of every out starts on 16 bytes and is a multiple of 16 bytes.
    """

    dtype: str  # of the states: "float16", "bfloat16", "float32"
    out_dtype: str  # `dtype`, or narrower: of float32 a 16-bit type, of all "float8_e4m3fn"
    states: int
    tokens: int
    heads: int
    head_dim: int
    aligned: bool = True

    @property
    def empty(self) -> bool:
        """Whether there is no row. Rows without columns still have an lse."""
        return 0 in (self.tokens, self.heads)

    def __str__(self) -> str:
        return (
            f"{self.states} states of {self.dtype}, {self.tokens} x {self.heads} x "
            f"{self.head_dim}, to {self.out_dtype}"
        )
