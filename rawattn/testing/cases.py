# SPDX-License-Identifier: Apache-2.0
"""A `Case` is one attention call that anyone can build again from its repr: shapes, features,
memory, data, seed.
"""

from __future__ import annotations

import dataclasses
import reprlib
from dataclasses import dataclass
from typing import Any, TypeVar

from rawattn.problem import Mask

Same = TypeVar("Same", bound="Narrowed")
LAYOUTS = (
    "dense",  # q (B, Sq, Hq, D), k (B, Sk, Hkv, D): every sequence has the same lengths
    "packed",  # q (total_q, Hq, D), k (total_k, Hkv, D), with rows of nobody before and after
    "padded",  # q packed; k (B, longest + 3, Hkv, D) with seqused_k
    "packed_used",  # q packed; k packed with room behind each sequence, and seqused_k
)
MEMORIES = (
    "contiguous",
    "gaps",  # 16-byte multiples between heads, rows and sequences
    "transposed",  # heads outside rows, as (B, H, S, D) seen through a transpose
    "unaligned",  # odd offset and strides: no row starts on 4 bytes
    "odd_ones",  # axes of size 1 with strides that point nowhere
)
DATA = (
    "normal",
    "tiny",  # near the smallest normal numbers of float16
    "huge",  # finite, with scores in the hundreds
    "dominant",  # one key far longer than the others
    "equal",  # all scores of a row equal
    "negative_zero",
    "integers",  # keys and values from -4 to 4: their sums are exact in every storage type
)
ALIBI = ("none", "heads", "batch")  # no slopes, (Hq,), (B, Hq)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Case:
    """One call. `q_lens` and `k_lens` hold a length a sequence; the rest means what the public
    arguments mean.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    layout: str = "dense"
    causal: bool | str = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: str = "none"
    sink: bool = False
    data: str = "normal"
    memory: str = "contiguous"
    seed: int = 0

    def __post_init__(self) -> None:
        dense = self.layout == "dense"
        assert len(self.q_lens) == len(self.k_lens), "one length a sequence"
        assert not dense or len(set(self.q_lens)) <= 1 >= len(set(self.k_lens)), (
            "dense: same lengths"
        )
        assert self.q_heads % self.kv_heads == 0, "whole groups of query heads"
        assert self.layout in LAYOUTS and self.memory in MEMORIES
        assert self.data in DATA and self.alibi in ALIBI

    @property
    def batch(self) -> int:
        return len(self.q_lens)

    @property
    def group(self) -> int:
        return self.q_heads // self.kv_heads

    @property
    def mask(self) -> Mask:
        return Mask.of(self.causal, self.window)

    def __repr__(self) -> str:
        return short_repr(self)


def short_repr(x: Any) -> str:
    """The call that builds a dataclass, without the fields that have their default."""
    shown = [
        f"{f.name}={getattr(x, f.name)!r}"
        for f in dataclasses.fields(x)
        if f.default is dataclasses.MISSING or getattr(x, f.name) != f.default
    ]
    return f"{type(x).__name__}({', '.join(shown)})"


class Sizes(tuple[int, ...]):
    """Sizes from 1 on, whose repr is short."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"tuple(range(1, {len(self) + 1}))"


def _kind(x: Any) -> type:
    return tuple if isinstance(x, tuple) else type(x)


class Narrowed:
    """A dataclass of what is allowed: `a & b` allows what both do.

    Its defaults are all that there is to allow: TypeError and ValueError for anything else, which
    `&` would drop in silence, and with it the cases that somebody believes to be tested.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            found: Any = getattr(self, field.name)
            most: Any = field.default
            if _kind(found) is not _kind(most):
                kind = {tuple: "tuples", bool: "False and True", int: "integers"}[_kind(most)]
                raise TypeError(f"{field.name}={found!r}: accepted are {kind}")
            if isinstance(most, tuple):
                if unknown := [x for x in found if x not in most]:
                    raise ValueError(
                        f"{field.name} holds {unknown[0]!r}: accepted are {reprlib.repr(most)}"
                    )
            elif not 0 <= found <= most:
                raise ValueError(f"{field.name}={found}: accepted are 0 to {most}")

    def __and__(self: Same, other: Same) -> Same:
        def both(mine, theirs):  # type: ignore[no-untyped-def]
            if isinstance(mine, tuple):
                return tuple(x for x in mine if x in theirs)
            return min(mine, theirs)  # of sizes, and of booleans

        names = [f.name for f in dataclasses.fields(self)]  # type: ignore[arg-type]
        return type(self)(**{n: both(getattr(self, n), getattr(other, n)) for n in names})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Narrowed):
    """Which cases an op takes, or a law is about. `a & b` takes what both take.

    Every field that is not given allows everything, so name all that your kernel lacks. What is not
    drawn, as a head_dim above 256, is a ValueError:

    dtypes      of q, k, v and out: "float16", "bfloat16", "float32"
    head_dims   of q and k, and of v, which is drawn apart
    layouts     from `LAYOUTS`: "dense", and three with `cu_seqlens_q`
    causal      False, True (the diagonal ends at the bottom right), "top_left"
    memories    from `MEMORIES`: how arrays lie in memory
    data        from `DATA`: what values they hold
    alibi       from `ALIBI`: "none", slopes of (Hq,), slopes of (B, Hq)
    scales      of scores; None is 1 / sqrt(head_dim)
    sink        whether there are attention sinks: False, True
    windows     False: none but (-1, -1)
    softcap     False: none but 0
    max_len     of any sequence, in queries or keys; a length may always be 0
    max_heads   of q; from 2 on, some share a KV head
    max_batch   sequences of a call; there may always be 0
    """

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    head_dims: tuple[int, ...] = Sizes(range(1, 257))
    layouts: tuple[str, ...] = LAYOUTS
    causal: tuple[bool | str, ...] = (False, True, "top_left")
    memories: tuple[str, ...] = MEMORIES
    data: tuple[str, ...] = DATA
    alibi: tuple[str, ...] = ALIBI
    scales: tuple[float | None, ...] = (None, 0.3, 1.0, -0.5, 0.0)
    sink: tuple[bool, ...] = (False, True)
    windows: bool = True
    softcap: bool = True
    max_len: int = 300
    max_heads: int = 6
    max_batch: int = 4


NOTHING = Limits(
    dtypes=(),
    head_dims=(),
    layouts=(),
    causal=(),
    memories=(),
    data=(),
    alibi=(),
    scales=(),
    sink=(),
    windows=False,
    softcap=False,
    max_len=0,
    max_heads=0,
    max_batch=0,
)
