# SPDX-License-Identifier: Apache-2.0
"""What is asked for over a paged KV cache: `PagedProblem`, the paged twin of `problem.Problem`.

Bounds only, never lengths: those live on the GPU, where kernels read them, so that a captured graph
can be replayed with others.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from rawattn.problem import CacheLayout, Mask, Rows, Scores

ITEMSIZES = {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int8": 1,
}
PARTITION = 512  # keys of a part, as PagedAttention v2 defines it


def cache_shapes(
    layout: CacheLayout,
    dtype: str,
    *,
    blocks: int,
    page: int,
    kv_heads: int,
    head_dim: int,
    value_dim: int,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of k_cache and v_cache, of elements of a type of ITEMSIZES."""
    if layout is CacheLayout.X_MAJOR:
        x = 16 // ITEMSIZES[dtype]
        return (blocks, kv_heads, head_dim // x, page, x), (blocks, kv_heads, value_dim, page)
    rows = (page, kv_heads) if layout is CacheLayout.NHD else (kv_heads, page)
    return (blocks, *rows, head_dim), (blocks, *rows, value_dim)


class PageTable(enum.Enum):
    """How the pages of a sequence are found."""

    DENSE = "block_table"  # block_table (B, max_blocks) and seqused_k (B,)
    CSR = "CSR"  # kv_indptr (B + 1,), kv_indices, kv_last_page_len (B,)


class Scale(enum.Enum):
    """What multiplies the values of an 8-bit cache."""

    NONE = "none"  # they mean themselves
    NUMBER = "number"  # a number known on the host
    TENSOR = "tensor"  # a float32 on the device
    HEAD = "head"  # (Hkv,) on the device
    BATCH_HEAD = "batch, head"  # (B, Hkv) on the device


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedProblem:
    """One attention call of queries over a paged cache.

    The queries are the last tokens of their sequences: the keys count them. `q_rows` is DENSE,
    (B, S, Hq, D), or PACKED, (total, Hq, D) with cu_seqlens_q.
    """

    dtype: str  # of q and out
    cache_dtype: str  # of both caches: `dtype`, or an 8-bit type
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_q: int  # bounds the queries of a sequence
    max_k: int  # bounds its keys: max_blocks * page, or what the caller says
    page: int  # tokens a page
    layout: CacheLayout
    table: PageTable = PageTable.DENSE
    q_rows: Rows = Rows.DENSE
    mask: Mask = field(default_factory=Mask)
    scores: Scores = field(default_factory=Scores)
    tree: bool = False  # a mask among the last queries and keys of each sequence, `tree_mask`
    block_sparse: bool = False  # PagedAttention's: a head sees some blocks of keys only
    leftpad: bool = False  # sequences begin anywhere in their row of a contiguous cache
    k_scale: Scale = Scale.NONE
    v_scale: Scale = Scale.NONE
    # Tokens of a part, the unit that is merged; 0: whatever balances the batch. Where it is fixed,
    # a row's bits do not depend on the other sequences.
    split: int = 0
    # every row of q and out, and every token (x-major: every page) of the caches, starts on, and is
    # a multiple of, this many bytes; 16 allows wide copies and TMA
    copy_bytes: int = 16
    # whether tensor maps can describe q, out and the caches, where copy_bytes is 16, values also as
    # rows, a whole number of tokens from a page to the next; those of an x-major cache always are
    # where `in_boxes` of plan/decode_sm90.py holds
    tma: bool = True
    packed_q: int = 0  # rows of all packed queries
    # whether rotary turns each query by its own position: where a tree, a causal mask or a window,
    # be it one that hides no key, tells those of a sequence apart
    own_positions: bool = False

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // max(1, self.kv_heads)

    @property
    def rows(self) -> int:
        """Rows, (query, head of a group), that share the keys of one sequence and KV head."""
        return self.max_q * self.group

    @property
    def queries(self) -> int:
        """Of all sequences; bounds them."""
        return self.packed_q if self.q_rows is Rows.PACKED else self.batch * self.max_q

    @property
    def max_blocks(self) -> int:
        """Pages that a sequence has at most."""
        return -(-self.max_k // self.page)

    @property
    def quantized(self) -> bool:
        """Whether the cache holds an 8-bit type."""
        return ITEMSIZES[self.cache_dtype] == 1

    @property
    def empty(self) -> bool:
        """Whether there is no output row to write, so that nothing is launched."""
        return 0 in (self.batch, self.max_q, self.q_heads, self.value_dim)

    def __str__(self) -> str:
        words = [name for name in Scores.__slots__ if getattr(self.scores, name)]
        words += ["tree mask"] if self.tree else []
        words += ["block-sparse"] if self.block_sparse else []
        words += ["left padding"] if self.leftpad else []
        words += [f"split {self.split}"] if self.split else []
        window = f"window ({self.mask.left}, {self.mask.right})"
        return (
            f"{self.dtype} over a {self.layout.value} cache of {self.cache_dtype}, page "
            f"{self.page}, {self.table.value}, batch {self.batch}, heads {self.q_heads} over "
            f"{self.kv_heads}, head dims {self.head_dim} and {self.value_dim}, up to {self.max_q} "
            f"queries and {self.max_k} keys, {'no mask' if self.mask.trivial else window}"
            + "".join(f", {word}" for word in words)
        )
