# SPDX-License-Identifier: Apache-2.0
"""Runs a kernel of a unit on NumPy arrays, under the schedule that a seed decides."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rawattn.arrays import DTYPES, view
from rawattn.plan.base import TensorMap
from rawattn.tensor_map import ENCODED_DTYPES, SWIZZLES, Described, describe
from tools.emulator.build import KERNELS, EmulatorError, compile_unit

Size = int | Sequence[int]


# ---- The launch, as runtime.hpp has it ----


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    @classmethod
    def of(cls, size: Size) -> _Dim:
        sizes = (size,) if isinstance(size, int) else tuple(size)
        return cls(*sizes, *(1,) * (3 - len(sizes)))


class _Array(ctypes.Structure):
    _fields_ = [
        ("begin", ctypes.c_uint64),
        ("end", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("number", ctypes.c_uint32),
    ]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("params", ctypes.c_void_p),
        ("params_bytes", ctypes.c_uint64),
        ("grid", _Dim),
        ("block", _Dim),
        ("cluster", _Dim),
        ("dynamic_bytes", ctypes.c_uint32),
        ("resident", ctypes.c_uint32),
        ("in_order", ctypes.c_uint32),
        ("arrays", ctypes.POINTER(_Array)),
        ("array_count", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("seconds", ctypes.c_double),
        ("error", ctypes.c_char_p),
        ("error_bytes", ctypes.c_uint64),
    ]


def run(
    unit: str,
    kernel: str,
    params: bytes,
    grid: Size,
    block: Size,
    smem_bytes: int,
    arrays: Sequence[np.ndarray],
    seed: int,
    *,
    cluster: Size = 1,
    resident: int = 0,
    in_order: bool = False,
    seconds: float = 120.0,
    folders: Sequence[Path] = (KERNELS,),
    flags: Sequence[str] = (),
) -> None:
    """Compile `unit` if need be, and run `kernel` with one by-value struct until every block ends.

    Parameters
    ----------
    params : bytes
        The struct. Pointers in it are host addresses of `arrays`, which are all that the kernel may
        touch; an array that is not writable may only be read.
    grid, block, cluster : int or up to three ints
        Blocks of the grid, threads of a block, blocks of a cluster.
    smem_bytes : int
        Dynamic shared memory of a block.
    seed : int
        Decides the schedule. The same seed gives the same run.
    resident : int
        Clusters that run side by side; 0: one to three, as the seed says. A kernel whose blocks
        wait for one another needs as many as the grid has, or `in_order`.
    in_order : bool
        Whether clusters start in the order of their index.
    seconds : float
        After which the run counts as one that never ends.

    Raises
    ------
    EmulatorError
        The kernel does what a GPU forbids.
    BuildError
        The unit does not compile.
    """
    path = compile_unit(unit, kernel, folders=folders, flags=flags)
    table = (_Array * max(1, len(arrays)))()
    for number, array in enumerate(arrays):
        table[number] = _Array(*_bounds(array), array.flags.writeable, number)
    # A tensor map in the struct has to lie on a multiple of 64 bytes.
    data = np.zeros(len(params) + 64, np.uint8)
    offset = -data.ctypes.data % 64
    data[offset : offset + len(params)] = np.frombuffer(params, np.uint8)
    error = ctypes.create_string_buffer(1 << 16)
    launch = _Launch(
        name=kernel.encode(),
        params=data.ctypes.data + offset,
        params_bytes=len(params),
        grid=_Dim.of(grid),
        block=_Dim.of(block),
        cluster=_Dim.of(cluster),
        dynamic_bytes=smem_bytes,
        resident=resident,
        in_order=in_order,
        arrays=table,
        array_count=len(arrays),
        seed=seed & (1 << 64) - 1,
        seconds=seconds,
        error=ctypes.cast(error, ctypes.c_char_p),
        error_bytes=len(error),
    )
    if _load(path).emu_launch(ctypes.byref(launch)) != 0:
        raise EmulatorError(f"{_with_lines(error.value.decode(), path)}\n(seed {seed})")


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """First byte and end of what an array covers, gaps included."""
    low = high = array.ctypes.data
    if array.size == 0:
        return low, low
    for size, stride in zip(array.shape, array.strides, strict=True):
        low += min(0, (size - 1) * stride)
        high += max(0, (size - 1) * stride)
    return low, high + array.itemsize


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


# ---- Parameters ----


def pack(*values: np.ndarray | int | float | bytes) -> bytes:
    """A by-value struct of pointers (arrays), ints, floats, and bytes, such as tensor maps."""
    data = b""
    for value in values:
        if isinstance(value, bytes):
            part, align = value, 64
        elif isinstance(value, np.ndarray):
            part, align = struct.pack("Q", value.ctypes.data), 8
        else:
            part, align = struct.pack("f" if isinstance(value, float) else "i", value), 4
        data += bytes(-len(data) % align) + part
    return data


MAGIC = 0x70616D20756D6520  # as bulk.cpp has it


def tensor_map(array: np.ndarray, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """What a kernel of the emulator takes for a CUtensorMap of `array`: 128 bytes.

    The last axis is innermost, and `box` has the order of the axes. Raises ValueError where
    cuTensorMapEncodeTiled would refuse, and for swizzled boxes whose rows are not `swizzle` bytes.
    """
    axes = tuple(reversed(range(array.ndim)))
    wanted = TensorMap(field="map", array="array", box=tuple(box[::-1]), axes=axes, swizzle=swizzle)
    made = ctypes.create_string_buffer(encode(describe(wanted, view("array", array).spec)))
    move(ctypes.addressof(made), array.ctypes.data)
    return made.raw[:-1]


def encode(described: Described) -> bytes:
    """What a kernel of the emulator takes for a CUtensorMap of an array at address 0.

    ValueError for swizzled boxes whose rows are not as long as the pattern: there the emulator does
    not know where bytes go.
    """
    itemsize = DTYPES[described.dtype].itemsize
    row = described.box[0] * itemsize
    if described.swizzle not in (0, row):
        raise ValueError(
            f"tensor map: a row of the box has {row} bytes, the swizzle {described.swizzle}: "
            "accepted is the same"
        )
    rank = len(described.sizes)
    pad = (0,) * (5 - rank)
    return struct.pack(
        "<QQ5I5I5Q4B",
        MAGIC,
        0,
        *(*described.sizes, *pad),
        *(*described.box, *pad),
        *(itemsize, *described.strides, *pad),
        rank,
        ENCODED_DTYPES[described.dtype],
        itemsize,
        SWIZZLES.index(described.swizzle),
    ).ljust(128, b"\0")


def move(place: int, address: int) -> int:
    """Gives the map at `place` the address of its array; 0, as of a driver that has done so.

    ValueError for an address that is no multiple of 16.
    """
    if address % 16:
        raise ValueError(f"tensor map: address {address:#x}: accepted are multiples of 16")
    ctypes.c_uint64.from_address(place + 8).value = address
    return 0


# ---- Messages ----


def _with_lines(text: str, library: Path) -> str:
    """`text` with source lines for its call chains, which come as `` @offset`` of each caller."""
    addresses = sorted(set(re.findall(r" @([0-9a-f]+)", text)))
    tool = shutil.which("addr2line")
    if not addresses or tool is None:
        return text
    query = [tool, "-e", str(library), "-a", "-i", "-f", "-C", *addresses]
    lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    chains: dict[int, list[str]] = {}
    address, function = 0, ""
    for line in lines:  # an address, then pairs of lines: function, place
        if line.startswith("0x"):
            address, function = int(line, 16), ""
            chains[address] = []
        elif not function:
            function = line
        else:
            place = line.split(" (discriminator")[0]
            if function != "emu_entry" and not re.search(r"^\?\?|tools/emulator/", place):
                chains[address].append(f"{Path(place).name} in {function.split('(')[0]}")
            function = ""

    def readable(match: re.Match[str]) -> str:
        marks = [int(mark[1:], 16) for mark in match[0].split()]
        places = [place for mark in marks for place in chains.get(mark, [])]
        places = [p for i, p in enumerate(places) if i == 0 or places[i - 1] != p]
        return " at " + ", from ".join(places) if places else ""

    return re.sub(r"(?: @[0-9a-f]+)+", readable, text)
