# SPDX-License-Identifier: Apache-2.0
"""The one table of kernels: which source, which Config fields, which Params struct, which
architectures.

A Config is a frozen dataclass; its fields are the only definition of the `Config` struct that a
generated unit holds. A Params layout is read from ``cuda/params.cuh``; a unit asserts its size.
"""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100", "sm_120")


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
        return 2 * (q + kv) + pair + 16 * self.warps


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel family: everything but its Config values."""

    name: str
    source: str  # file in the kernel folder
    config: type
    params: str  # struct in cuda/params.cuh
    architectures: tuple[str, ...]


KERNELS: dict[str, Kernel] = {
    k.name: k
    for k in (
        Kernel(
            name="fwd_sm80",
            source="fwd_sm80.cu",
            config=FwdSm80,
            params="FwdParams",
            architectures=ARCHITECTURES,
        ),
    )
}

C_TYPES = {
    "int": ctypes.c_int32,
    "long long": ctypes.c_int64,
    "float": ctypes.c_float,
}


@functools.cache
def params_struct(name: str) -> type[ctypes.Structure]:
    """The ctypes twin of a struct of ``cuda/params.cuh``."""
    text = (cuda_folder() / "params.cuh").read_text()
    body = re.search(rf"struct {name} {{\n(.*?)\n}};", text, re.S)
    if body is None:
        raise KeyError(f"cuda/params.cuh has no struct {name}")
    fields = []
    for line in body[1].splitlines():
        kind, pointer, field = re.fullmatch(r"\s*(.+?)(\*?) (\w+);.*", line).groups()  # type: ignore[union-attr]
        fields.append((field, ctypes.c_void_p if pointer else C_TYPES[kind]))
    return type(name, (ctypes.Structure,), {"_fields_": fields})


def all_configs(arch: str) -> Iterator[tuple[Kernel, Config]]:
    """Every Config that a plan can choose on an architecture, kernel by kernel."""
    from rawattn import plan

    for kernel in KERNELS.values():
        if arch in kernel.architectures:
            for config in plan.configs(kernel.name, arch):
                yield kernel, config
