# SPDX-License-Identifier: Apache-2.0
"""The one table of kernels: which source, which Config fields, which Params struct, which
architectures.

A Config is a frozen dataclass; its fields are the only definition of the `Config` struct that a
generated unit holds. A Params layout is read from ``cuda/params*.cuh``; a unit asserts its size.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from rawattn.cache_configs import CopyBlocks, KvWrite, Merge, PagedV1, Rotary, Sequences
from rawattn.decode_configs import DecodeSm90

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")
HOPPER = ("sm_90a",)  # what has wgmma


def cuda_folder() -> Path:
    """The folder of the kernel sources: in the installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "params.cuh").is_file():
            return folder
    raise FileNotFoundError(f"no kernel sources in {package / 'cuda'} or {package.parent / 'cuda'}")


class Config(Protocol):
    """What every Config has beside its own fields."""

    def __hash__(self) -> int: ...
    @property
    def threads(self) -> int: ...
    @property
    def blocks_per_sm(self) -> int: ...
    @property
    def smem_bytes(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FwdSm80:
    """One specialisation of ``cuda/fwd_sm80.cu``; `plan/fwd_sm80.py` chooses the values."""

    element: str  # storage type, a C++ type name of cuda/types.cuh
    head_dim: int  # columns of the Q and K tiles; a stored head_dim below it is padded with zeros
    value_dim: int  # columns of the V and O tiles
    block_m: int  # query rows a block
    block_n: int  # keys a tile
    warps: int
    # 1: a warp has its rows for itself; 2: a pair of warps shares rows, each half of keys and
    # columns
    column_warps: int
    # 1: K and V wait for each other's arithmetic; 2: the next K, V pair loads during this one's
    stages: int
    q_in_registers: bool  # whether Q fragments are read from shared memory once, not once a tile
    fragments_ahead: int  # 16 x 16 blocks of K or V that are read before the products that use them
    # copies are issued in the first 1 / copy_spread of the products that they run under
    copy_spread: int
    vote_rescale: bool  # whether a warp skips the rescaling of out where no row's max changed
    scores: bool  # whether softcap or ALiBi steps are compiled in
    narrow: bool  # whether rows allow no 16-byte copies: Params::copy_bytes says which they allow
    blocks_per_sm: int  # resident blocks that the register limit leaves room for

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def smem_bytes(self) -> int:
        """sizeof(FwdSm80Smem<Config>): rows are 16 bytes longer than their data, so that ldmatrix
        meets no bank twice.
        """
        q = self.block_m * (max(self.head_dim, self.value_dim) + 8)
        kv = self.stages * self.block_n * (self.head_dim + 8 + self.value_dim + 8)
        pair = (
            2 * (4 * self.block_m + self.block_m * (self.block_n + 8))
            if self.column_warps == 2
            else 16
        )
        return 2 * (q + kv) + pair + 24 * self.warps


@dataclass(frozen=True, slots=True, kw_only=True)
class FwdSm90:
    """One specialisation of ``cuda/fwd_sm90.cu`` or ``cuda/fwd_sm90_paged.cu``; `plan/fwd_sm90.py`
    has the values, of which `plan/fwd_sm90_paged.py` chooses for pages.
    """

    element: str  # storage type, a C++ type name of cuda/types.cuh
    head_dim: int  # columns of the Q and K tiles; a stored head_dim below it is padded with zeros
    value_dim: int  # columns of the V and O tiles
    block_n: int  # keys a tile
    consumers: int  # warpgroups of 64 query rows each
    stages: int  # tiles of K, and of V, that shared memory holds
    q_buffers: int  # 2: the next Q loads during this tile, and out leaves through the old one's
    q_registers: bool  # whether Q is read from shared memory once a query tile, not once a key tile
    pingpong: bool  # whether consumers take turns at issuing products
    overlap: bool  # whether exponentials of a thread's first row are kept beside P V
    late_draw: bool  # whether the next query tile is drawn near the end of one, not at its start
    window: bool  # whether rows may begin behind the first key
    softcap: bool  # whether the softmax takes in a softcap, in place of a scale
    scores: bool  # whether softcap and ALiBi steps are compiled in
    split: bool = False  # whether blocks may share the keys of a query tile: fwd_sm90_parts.cuh
    xmajor: bool = False  # pages: layout of the cache; NHD and HND differ in strides alone
    e4m3: bool = False  # pages: whether the cache holds e4m3, which is widened on its way
    blocks_per_sm: int = 1

    @property
    def block_m(self) -> int:
        return 64 * self.consumers

    @property
    def threads(self) -> int:
        return 128 * (self.consumers + 1 + self.e4m3)

    @property
    def producer_registers(self) -> int:
        """A thread, of those that widen too; the sum over the block is what it is launched with."""
        return {1: 56, 2: 40, 3: 32}[self.consumers]

    @property
    def consumer_registers(self) -> int:
        return 216 if self.e4m3 else {1: 200, 2: 232, 3: 160}[self.consumers]

    @property
    def smem_bytes(self) -> int:
        """sizeof(FwdSm90Smem<Config>): tiles, barriers, and descriptions of query tiles; bytes, and
        barriers of theirs.
        """
        q = self.q_buffers * self.block_m * max(self.head_dim, self.value_dim)
        kv = self.stages * self.block_n * (self.head_dim + self.value_dim)
        barriers = 3 * self.q_buffers * self.consumers + 4 * self.stages + 2
        tile = 56 if self.split else 44
        narrow = 2 * self.block_n * (self.head_dim + self.value_dim) + 64 if self.e4m3 else 0
        return sum(-(-n // 1024) * 1024 for n in (2 * (q + kv) + 8 * barriers + tile, narrow))

    @property
    def slot_bytes(self) -> int:
        """Of the workspace, for out, max and sum of a part of a query tile."""
        return 128 * self.consumers * 16 * (self.value_dim // 8 + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class FwdSm90Self:
    """One specialisation of ``cuda/fwd_sm90_self.cu``; `plan/fwd_sm90.py` chooses the values."""

    element: str  # storage type, a C++ type name of cuda/types.cuh
    head_dim: int  # columns of the Q and K tiles; a stored head_dim below it is padded with zeros
    value_dim: int  # columns of the V and O tiles
    block_n: int  # keys a tile
    stages: int  # tiles of K, and of V, that shared memory holds
    overlap: bool  # whether exponentials of a thread's first row are kept beside P V
    window: bool  # whether rows may begin behind the first key
    softcap: bool  # whether the softmax takes in a softcap, in place of a scale
    scores: bool  # whether softcap and ALiBi steps are compiled in
    blocks_per_sm: int  # resident blocks that the register limit leaves room for

    @property
    def threads(self) -> int:
        return 128

    @property
    def block_m(self) -> int:
        return 64

    @property
    def q_registers(self) -> bool:
        """As in FwdSm90; three blocks an SM have none to spare for it."""
        return False

    @property
    def xmajor(self) -> bool:
        """As in FwdSm90."""
        return False

    @property
    def e4m3(self) -> bool:
        """As in FwdSm90."""
        return False

    @property
    def smem_bytes(self) -> int:
        """sizeof(FwdSm90SelfSmem<Config>): tiles and barriers."""
        q = self.block_m * max(self.head_dim, self.value_dim)
        kv = self.stages * self.block_n * (self.head_dim + self.value_dim)
        return -(-(2 * (q + kv) + 8 * (1 + 2 * self.stages)) // 1024) * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSplit:
    """One specialisation of ``cuda/decode_split.cu``; `plan/decode.py` chooses the values."""

    element: str  # type of products; of q and out too, but for 8-bit caches (Params::q_bf16)
    cache: str  # storage type of keys and values: `element`, e4m3, e5m2 or int8
    head_dim: int  # columns of the tiles; stored sizes below it are padded with zeros
    row_tiles: int  # tiles of 8 rows, (query, head of a group), that a warp has
    warps: int
    unit: int  # keys that a stage holds
    stages: int  # of a warp
    tma: bool  # whether pages come by tensor and bulk copies; else by cp.async
    xmajor: bool  # layout of the cache; NHD and HND differ in strides alone
    features: bool  # whether windows, causal rows, trees, softcap and ALiBi are compiled in
    cluster: int  # blocks that share one segment; 1: balanced over the grid
    blocks_per_sm: int
    # whether rows of q, out and the caches may lie anywhere, and x-major pages hold any number of
    # tokens: elements are moved one by one, whatever the layout; tiles are row by row
    unaligned: bool = False
    # KV heads that a unit holds, of which each has as many of the rows: read together
    heads: int = 1

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Rows that a block has at a time, of all its KV heads."""
        return 8 * self.row_tiles

    @property
    def stage_bytes(self) -> int:
        """Of the keys and values of a unit: KvTile<Config>::kStageBytes."""
        item = 2 if self.cache == self.element else 1
        row = self.head_dim * item + (0 if self.tma or self.xmajor else 16)
        return 2 * self.unit * self.heads * row

    @property
    def smem_bytes(self) -> int:
        """sizeof(DecodeSplitSmem<Config>)."""
        ring = self.warps * self.stages * (self.stage_bytes + 8)
        out = self.warps * (32 * (self.head_dim + 4) + 68)  # with max, sum, and who has arrived
        q = 4 * self.rows * (self.head_dim + 8) if self.staged else 32
        walks = 48 * (self.warps if self.staged else 1)
        peers = 16 * (4 * self.head_dim if self.cluster > 1 else 1)
        return -(-(ring + out + q + walks + peers + 8) // 1024) * 1024

    @property
    def ahead(self) -> int:
        """Stages that are being filled at a time: all but one that is read, or both of two."""
        return self.stages - 1 if self.stages > 2 else self.stages

    @property
    def staged(self) -> bool:
        """Whether q is in shared memory: registers would not hold it."""
        item = 2 if self.cache == self.element else 1
        return self.row_tiles > 2 or self.row_tiles * self.head_dim * item > 512

    @property
    def workers(self) -> int:
        """Who may have parts of its own: warps, each alone, or the block; none in a cluster."""
        alone = self.tma and not self.staged  # else registers would not suffice
        return int(self.cluster == 1) * (self.warps if alone else 1)

    @property
    def counters(self) -> int:
        """Of a segment."""
        return 1

    @property
    def slot_bytes(self) -> int:
        """Of the workspace, for the sums of a part."""
        return 8 * self.rows * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel family: everything but its Config values."""

    name: str
    source: str  # file in the kernel folder
    config: type
    params: str  # struct in cuda/params*.cuh
    architectures: tuple[str, ...] = ARCHITECTURES  # that it can run on


_TABLE = (
    Kernel(name="fwd_sm80", source="fwd_sm80.cu", config=FwdSm80, params="FwdParams"),
    Kernel(
        name="fwd_sm90",
        source="fwd_sm90.cu",
        config=FwdSm90,
        params="FwdSm90Params",
        architectures=HOPPER,
    ),
    Kernel(
        name="fwd_sm90_self",
        source="fwd_sm90_self.cu",
        config=FwdSm90Self,
        params="FwdSm90Params",
        architectures=HOPPER,
    ),
    Kernel(
        name="fwd_sm90_paged",
        source="fwd_sm90_paged.cu",
        config=FwdSm90,
        params="FwdSm90PagedParams",
        architectures=HOPPER,
    ),
    Kernel(name="kv_write", source="kv_write.cu", config=KvWrite, params="KvWriteParams"),
    Kernel(name="rotary", source="kv_write.cu", config=Rotary, params="RotaryParams"),
    Kernel(name="sequences", source="kv_write.cu", config=Sequences, params="SequencesParams"),
    Kernel(name="copy_blocks", source="kv_write.cu", config=CopyBlocks, params="CopyBlocksParams"),
    Kernel(name="paged_v1", source="paged_v1.cu", config=PagedV1, params="PagedV1Params"),
    Kernel(name="paged_v2", source="paged_v2.cu", config=PagedV1, params="PagedV2Params"),
    Kernel(name="paged_v2_reduce", source="paged_v2.cu", config=PagedV1, params="PagedV2Params"),
    Kernel(name="merge", source="merge.cu", config=Merge, params="MergeParams"),
    Kernel(
        name="decode_split",
        source="decode_split.cu",
        config=DecodeSplit,
        params="DecodeSplitParams",
    ),
    Kernel(
        name="decode_sm90",
        source="decode_sm90.cu",
        config=DecodeSm90,
        params="DecodeSplitParams",
        architectures=HOPPER,
    ),
)
KERNELS: dict[str, Kernel] = {kernel.name: kernel for kernel in _TABLE}

TensorMap = ctypes.c_uint64 * 16  # ptx::TensorMap, which is aligned to 64 bytes
C_TYPES: dict[str, tuple[Any, int]] = {  # kind, alignment
    "int": (ctypes.c_int32, 4),
    "unsigned": (ctypes.c_uint32, 4),
    "long long": (ctypes.c_int64, 8),
    "float": (ctypes.c_float, 4),
    "ptx::TensorMap": (TensorMap, 64),
}
POINTER = ctypes.c_void_p, 8


@functools.cache
def params_struct(name: str) -> type[ctypes.Structure]:
    """The ctypes twin of a struct of ``cuda/params*.cuh``: fields that it inherits, then its own.

    Padding is a field too, whose name begins with an underscore. Raises KeyError for what is not
    there.
    """
    fields: list[tuple[str, Any]] = []
    size, largest = 0, 1

    def pad(alignment: int) -> None:
        nonlocal size
        if size % alignment:
            fields.append((f"_{size}", ctypes.c_uint8 * (-size % alignment)))
            size += -size % alignment

    text = "".join(path.read_text() for path in sorted(cuda_folder().glob("params*.cuh")))
    for struct in _with_bases(name, text):
        for field, (kind, alignment) in struct:
            pad(alignment)
            fields.append((field, kind))
            size, largest = size + ctypes.sizeof(kind), max(largest, alignment)
        pad(largest)
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def _with_bases(name: str, text: str) -> list[list[tuple[str, tuple[Any, int]]]]:
    """Names and types of the fields of a struct, after those of the struct that it inherits."""
    found = re.search(rf"^struct {name}(?: : (\w+))? {{\n(.*?)^}};", text, re.S | re.M)
    if found is None:
        raise KeyError(f"cuda/params*.cuh have no struct {name}")
    own = []
    for line in found[2].splitlines():
        if line.split("//")[0].strip():
            kind, pointer, field = re.fullmatch(r"\s*(.+?)(\*?) (\w+);.*", line).groups()  # type: ignore[union-attr]
            own.append((field, POINTER if pointer else C_TYPES[kind]))
    return [*(_with_bases(found[1], text) if found[1] else []), own]


def all_configs(arch: str) -> Iterator[tuple[Kernel, Config]]:
    """Every Config that a plan can choose on an architecture, kernel by kernel."""
    from rawattn import plan

    for kernel in KERNELS.values():
        if arch in kernel.architectures:
            for config in plan.configs(kernel.name, arch):
                yield kernel, config
