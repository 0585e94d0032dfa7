# SPDX-License-Identifier: Apache-2.0
"""A `PagedCase` is one attention call over a paged cache, which its repr builds again."""

from __future__ import annotations

from dataclasses import dataclass

from rawattn.cache_request import CACHE_DTYPES
from rawattn.problem import CacheLayout
from rawattn.testing.cases import DATA, Narrowed, short_repr

# dtype: the first kv_cache_dtype that means it
CACHE_WORDS = {dtype: word for word, dtype in reversed(CACHE_DTYPES.items())}

LAYOUTS = tuple(layout.value for layout in CacheLayout)
TABLES = (
    "block_table",
    "csr",  # kv_indptr, kv_indices, kv_last_page_len
    "rows",  # a contiguous cache: a page for each sequence, or more, and cache_batch_idx
)
MEMORIES = (
    "contiguous",
    "gaps",  # room between blocks, and between rows of q and out
)
ROTARY = ("none", "interleaved", "halves")  # of appended tokens
SCALES = ("number", "tensor", "heads")  # of 8-bit caches: a float, (1,), (Hkv,) or (B, Hkv)


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PagedCase:
    """One call. `q_lens` and `k_lens` hold a length a sequence; keys count those of the queries,
    and the `new` last ones of every sequence, or up to as many where they are packed, are appended
    by the call. The rest means what the arguments of `flash_attn_with_kvcache` mean.
    """

    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    dtype: str = "bfloat16"
    cache_dtype: str = "same"  # as dtype, or an 8-bit type
    q_heads: int = 1
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    layout: str = "NHD"
    page: int = 16
    table: str = "block_table"
    packed: bool = False  # else all sequences have as many queries
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    alibi: bool = False
    sink: bool = False
    tree: bool = False
    scales: str = "number"
    by_sequence: bool = False  # slopes are (B, Hq), not (Hq,), and scales of heads (B, Hkv)
    new: int = 0
    new_packed: bool = False
    leftpad: bool = False
    rotary: str = "none"
    split: int = 0
    memory: str = "contiguous"
    tight: bool = False  # no page, table entry or slot that no sequence has; else some
    data: str = "normal"
    seed: int = 0

    def __post_init__(self) -> None:
        assert len(self.q_lens) == len(self.k_lens), "one length a sequence"
        assert self.packed or len(set(self.q_lens)) <= 1, "dense queries: as many everywhere"
        assert self.q_heads % self.kv_heads == 0, "whole groups of query heads"
        assert self.new == 0 or self.table != "csr", "tables that grow"
        assert self.new <= min(self.k_lens, default=self.new), "new tokens are keys"
        assert not self.leftpad or (self.table == "rows" and self.layout != "x-major"), (
            "padded rows"
        )
        assert self.rotary == "none" or self.new, "keys that are turned are new"
        assert not (self.new and self.by_sequence and self.scales == "heads"), (
            "new tokens have no scale a sequence"
        )
        assert self.layout in LAYOUTS and self.table in TABLES and self.memory in MEMORIES
        assert self.data in DATA and self.rotary in ROTARY and self.scales in SCALES

    @property
    def stored(self) -> str:
        """The dtype of the cache."""
        return self.dtype if self.cache_dtype == "same" else self.cache_dtype

    @property
    def quantized(self) -> bool:
        return self.cache_dtype != "same"

    def __repr__(self) -> str:
        return short_repr(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLimits(Narrowed):
    """Which cases an op takes, or a law is about; every field that is not given allows all."""

    dtypes: tuple[str, ...] = ("float16", "bfloat16", "float32")
    cache_dtypes: tuple[str, ...] = ("same", "float8_e4m3fn", "float8_e5m2", "int8")
    # others than multiples of 8 move element by element
    head_dims: tuple[int, ...] = (*range(8, 257, 8), 1, 2, 3, 5, 7, 12, 65, 66, 100, 131, 250)
    layouts: tuple[str, ...] = LAYOUTS
    pages: tuple[int, ...] = (1, 2, 3, 5, 8, 16, 19, 32, 48, 64, 128, 256, 544)
    tables: tuple[str, ...] = TABLES
    memories: tuple[str, ...] = MEMORIES
    tight: tuple[bool, ...] = (False, True)
    rotary: tuple[str, ...] = ROTARY
    new_packed: tuple[bool, ...] = (False, True)
    leftpad: tuple[bool, ...] = (False, True)
    splits: tuple[int, ...] = (0, 16, 32, 64, 96, 256)
    packed: tuple[bool, ...] = (False, True)
    causal: tuple[bool, ...] = (False, True)
    alibi: tuple[bool, ...] = (False, True)
    sink: tuple[bool, ...] = (False, True)
    tree: tuple[bool, ...] = (False, True)
    by_sequence: tuple[bool, ...] = (False, True)
    data: tuple[str, ...] = DATA
    windows: bool = True
    softcap: bool = True
    max_q: int = 12  # queries of a sequence
    max_k: int = 700
    max_new: int = 8
    max_heads: int = 8
    max_batch: int = 5
