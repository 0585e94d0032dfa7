# SPDX-License-Identifier: Apache-2.0
"""The Config class of decode_sm90, of the table of kernels in ``registry.py``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSm90:
    """One specialisation of ``cuda/decode_sm90.cu``; `plan/decode_sm90.py` chooses the values."""

    element: str  # storage type, a C++ type name of cuda/types.cuh
    head_dim: int  # columns of all tiles
    unit: int  # keys that a stage holds
    stages: int
    cluster: int  # blocks that share one segment; 1: balanced over the grid
    xmajor: bool  # layout of the cache; NHD and HND differ in strides alone
    blocks_per_sm: int = 1

    # What headers that it shares with decode_split ask for.
    @property
    def cache(self) -> str:
        return self.element

    @property
    def row_tiles(self) -> int:
        return self.rows // 8

    @property
    def heads(self) -> int:
        return 1

    @property
    def features(self) -> bool:
        return True

    @property
    def unaligned(self) -> bool:
        return False

    @property
    def warps(self) -> int:
        """Of the two warpgroups that compute."""
        return 8

    @property
    def threads(self) -> int:
        return 384

    @property
    def producer_registers(self) -> int:
        """A thread; the sum over the block is what it is launched with."""
        return 40

    @property
    def consumer_registers(self) -> int:
        return 232

    @property
    def rows(self) -> int:
        """Rows that a block has at a time."""
        return 64

    @property
    def counters(self) -> int:
        """Of a segment: one for the rows of each warp."""
        return self.warps

    @property
    def smem_bytes(self) -> int:
        """sizeof(DecodeSm90Smem<Config>): tiles, the sums of a part, barriers."""
        tiles = 2 * self.head_dim * (self.rows + 2 * self.stages * self.unit)
        sums = 8 * self.rows * (self.head_dim + 8)
        return -(-(tiles + sums + 16 * self.stages + 8) // 1024) * 1024

    @property
    def slot_bytes(self) -> int:
        """Of the workspace, for the sums of a part."""
        return 4 * self.rows * (self.head_dim + 4)
