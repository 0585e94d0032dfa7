# SPDX-License-Identifier: Apache-2.0
"""Configs of the kernels around attention: cache writes, merging, and PagedAttention's own; a part
of `registry`.
"""

from __future__ import annotations

from dataclasses import dataclass

from rawattn.paged_problem import PARTITION


class Streaming:
    """What Configs of kernels have in common whose data pass through registers alone."""

    __slots__ = ()

    @property
    def threads(self) -> int:
        return 256

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KvWrite:
    """One specialisation of kv_write in ``cuda/kv_write.cu``."""

    element: str  # of k and v
    cache: str  # of the caches: the same, or an 8-bit type
    rotary: bool  # whether keys are turned by their positions

    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return 256

    @property
    def quantized(self) -> bool:
        return self.cache != self.element

    @property
    def max_tokens(self) -> int:
        """Tokens that a thread block has room for."""
        return 128

    @property
    def smem_bytes(self) -> int:
        """sizeof(KvWriteSmem<Config>): where each token goes."""
        return 32 * self.max_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotary(Streaming):
    """One specialisation of rotary in ``cuda/kv_write.cu``."""

    element: str
    blocks_per_sm: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyBlocks(Streaming):
    """One specialisation of copy_blocks in ``cuda/kv_write.cu``."""

    unit: str  # what a thread copies at a time: uint4, unsigned or "unsigned char"
    blocks_per_sm: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequences:
    """The one specialisation of `sequences` in ``cuda/kv_write.cu``."""

    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return 128

    @property
    def smem_bytes(self) -> int:
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Merge(Streaming):
    """One specialisation of ``cuda/merge.cu``."""

    element: str  # of the states
    out: str  # of the result
    pair: bool  # whether there are two states: both are read at once
    parts: int  # pieces of a row, 16 bytes of out each, a thread
    blocks_per_sm: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedV1:
    """One specialisation of ``cuda/paged_v1.cu``, or of either kernel of ``cuda/paged_v2.cu``."""

    cache: str  # of the caches; q and out are of its type, or, of 8-bit ones, of two that may be
    head_dim: int  # least upper bound of that of keys and of values
    blocks_per_sm: int = 1

    @property
    def warps(self) -> int:
        """With 4, small batches take up to 1.8 times as long, large ones as long (H200)."""
        return 8

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def partition(self) -> int:
        """Keys of a partition of v2."""
        return PARTITION

    @property
    def smem_bytes(self) -> int:
        """sizeof(PagedSmem<Config>)."""
        return 4 * (self.head_dim * (1 + self.warps) + self.warps * (32 + 2))
