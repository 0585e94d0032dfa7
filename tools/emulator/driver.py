# SPDX-License-Identifier: Apache-2.0
"""Compiles a generated unit with g++ and runs one of its kernels on NumPy arrays.

A unit and every header it includes become one C++ file, with ``#line`` marks that keep the sources' own line numbers.
Three declarations change on the way, because C++ has no words for them: ``__shared__``, ``extern __shared__``, and
parameters that are ``__grid_constant__``, which become references.
``ptx_*.cuh`` is taken from ``include/`` here and not from the kernel folder: that is the whole seam.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import ml_dtypes
import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = HERE.parents[1] / "cuda"
FLAGS = ("-std=c++20", "-O2", "-g", "-fPIC", "-march=native", "-fvisibility=hidden")
FLAGS += ("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-fno-gnu-unique")
RUNTIME_FLAGS = ("-O3", "-Wall", "-Wextra", "-Wno-psabi", "-Wno-restrict")
# -fsanitize=thread reports every access to the runtime, =alignment and =bounds what a GPU traps on or does silently wrong;
# no sanitizer library is linked, runtime.cpp answers the calls. Variables without a value start as 0xfe bytes.
UNIT_FLAGS = (
    "-fsanitize=thread,alignment,bounds",
    "--param=tsan-instrument-func-entry-exit=0",
    "--param=tsan-distinguish-volatile=1",
    "-fno-strict-aliasing",
    "-fwrapv",
    "-fno-exceptions",
    "-fno-math-errno",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
    "-Werror=return-type",
)
RUNTIME_SOURCES = ("launch.cpp", "runtime.cpp", "memory.cpp", "warp.cpp", "bulk.cpp", "wgmma.cpp")


class EmulatorError(Exception):
    """A kernel did something that a GPU forbids; the text names kernel, block, thread, access and source lines."""


@functools.cache
def compiler() -> str | None:
    """The g++ to use (``CXX`` or ``g++``), or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


def available() -> str | None:
    """Why the emulator cannot run here, or None if it can."""
    return None if compiler() else "the emulator needs g++ 12 or newer (C++20)"


def cache_folder() -> Path:
    base = os.environ.get("RAWATTN_CACHE_DIR") or Path.home() / ".cache" / "rawattn"
    return Path(base) / "emulator"


# ---- Source: one file out of a unit and its include closure ----

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_ALIGN = r"(?:(?:__align__|alignas)\((?P<{}>[^()]+)\)\s*)?"
_TYPE = r"(?P<type>[\w:]+(?:<[^;=]*>)?(?:\s+[\w:]+)*?)"
_DIMENSIONS = r"(?:\s*\[[^\]]*\])*"
_SHARED = _ALIGN.format("before") + r"__shared__\s+" + _ALIGN.format("behind") + _TYPE
_DYNAMIC = re.compile(rf"extern\s+{_SHARED}\s+(?P<name>\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(rf"(?:static\s+)?{_SHARED}\s+(?P<names>\w+{_DIMENSIONS}(?:\s*,\s*\w+{_DIMENSIONS})*)\s*;")
_CONSTANT = re.compile(r"const\s+__grid_constant__\s+(\w+)\s+(\w+)")


def translate(line: str, key: int) -> str:
    """One source line, with CUDA's declarations in C++ words; `key` makes those of static shared memory distinct."""
    line = _CONSTANT.sub(r"const \1& \2", line)

    def dynamic(m: re.Match[str]) -> str:
        return f"{m['type']}* const {m['name']} = emu::dynamic_shared<{m['type']}, {m['before'] or m['behind'] or 16}>();"

    def static(m: re.Match[str]) -> str:
        declared = []
        for number, declarator in enumerate(m["names"].split(",")):
            name, brackets, dimensions = declarator.strip().partition("[")
            where = f"{key * 16 + number}, {m['type']}{brackets}{dimensions}, {m['before'] or m['behind'] or 1}"
            declared.append(f"auto& {name.strip()} = emu::static_shared<{where}>();")
        return " ".join(declared)

    return _STATIC.sub(static, _DYNAMIC.sub(dynamic, line))


def expand(text: str, folders: Sequence[Path], name: str = "unit.cu") -> str:
    """`text` with its quoted includes in place, each once, found in `folders` in order."""
    seen: set[Path] = set()
    lines: list[str] = []

    def add(text: str, name: str, folders: Sequence[Path]) -> None:
        lines.append(f'#line 1 "{name}"')
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            path = match and next((f / match[1] for f in folders if (f / match[1]).is_file()), None)
            if path and path.resolve() not in seen:
                seen.add(path.resolve())
                add(path.read_text(), str(path), folders)
                lines.append(f'#line {number + 1} "{name}"')
            elif path or line.strip() == "#pragma once":
                lines.append("")
            else:
                lines.append(translate(line, len(lines)))

    add(text, name, folders)
    return "\n".join(lines) + "\n"


# ---- Build ----


@functools.cache
def _toolchain() -> str:
    """What a built object depends on beside its source: the compiler and the CPU that -march=native means."""
    query = [str(compiler()), "-march=native", "-Q", "--help=target", "--version"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout


def _build(key: Sequence[str], suffix: str, commands: object) -> Path:
    """The cached file for `key`, made by `commands(folder, target)` in a folder of its own and then renamed."""
    digest = hashlib.sha256("\0".join((_toolchain(), *key)).encode()).hexdigest()[:32]
    target = cache_folder() / f"{digest}{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / f"made{suffix}"
            commands(Path(folder), made)  # type: ignore[operator]
            os.replace(made, target)
    return target


def _compile(*arguments: object) -> None:
    done = subprocess.run([str(compiler()), *map(str, arguments)], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise EmulatorError(f"g++ failed:\n{done.stderr[-8000:]}")


@functools.cache
def _runtime() -> list[Path]:
    """The runtime's objects."""
    shared = [p.read_text() for p in (HERE / "runtime.hpp", HERE / "switch.hpp", HERE / "include" / "convert.hpp")]
    objects = []
    for source in RUNTIME_SOURCES:
        path = HERE / source

        def build(folder: Path, made: Path, path: Path = path) -> None:
            _compile(*FLAGS, *RUNTIME_FLAGS, f"-I{HERE / 'include'}", "-c", path, "-o", made)

        objects.append(_build([*FLAGS, *RUNTIME_FLAGS, path.read_text(), *shared], ".o", build))
    return objects


def compile_unit(
    unit: str, kernel: str, *, folders: Sequence[Path] = (KERNELS,), flags: Sequence[str] = ()
) -> Path:
    """The shared object of a unit whose entry is `kernel`, from the disk cache where it is known.

    ``folders`` hold the kernel sources; tests pass mutated copies. ``flags`` come last: ``-O0`` for a debugger.
    """
    if reason := available():
        raise EmulatorError(reason)
    text = expand(unit, (HERE / "include", *folders))
    text += f'\nextern "C" void emu_entry(const void* params) {{ emu::call({kernel}, params); }}\n'
    prelude = (HERE / "include" / "emulator.hpp").read_text()
    objects = _runtime()

    def build(folder: Path, made: Path) -> None:
        source = made.with_suffix(".cpp")
        source.write_text(text)
        objects_made = folder / "unit.o"
        include = f"-I{HERE / 'include'}"
        _compile(*FLAGS, *UNIT_FLAGS, include, "-include", "emulator.hpp", *flags, "-c", source, "-o", objects_made)
        _compile("-shared", "-Wl,-z,defs", objects_made, *objects, "-ldl", "-o", made)

    return _build([*FLAGS, *UNIT_FLAGS, *flags, prelude, text, *(o.name for o in objects)], ".so", build)


# ---- Run ----


class _Dim(ctypes.Structure):
    _fields_ = [("x", ctypes.c_uint32), ("y", ctypes.c_uint32), ("z", ctypes.c_uint32)]

    @classmethod
    def of(cls, size: int | Sequence[int]) -> _Dim:
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


def _bounds(array: np.ndarray) -> tuple[int, int]:
    """First byte and end of what a (possibly strided) array covers."""
    low = high = array.__array_interface__["data"][0]
    if array.size == 0:
        return low, low
    for size, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (size - 1) * stride
        else:
            high += (size - 1) * stride
    return low, high + array.itemsize


def run(
    unit: str,
    kernel: str,
    params: bytes,
    grid: int | Sequence[int],
    block: int | Sequence[int],
    smem_bytes: int,
    arrays: Sequence[np.ndarray],
    seed: int,
    *,
    cluster: int | Sequence[int] = 1,
    resident: int = 0,
    in_order: bool = False,
    seconds: float = 120.0,
    folders: Sequence[Path] = (KERNELS,),
    flags: Sequence[str] = (),
) -> None:
    """Compile `unit` if need be, and run `kernel` with one by-value struct `params` until every block has ended.

    Pointers inside `params` are the host addresses of `arrays`, which are all that the kernel may touch; an array that
    is not writable may only be read. `seed` decides the schedule. `resident`: clusters that run side by side (0: one to
    three, as the seed says); a kernel whose blocks wait for one another needs as many as the grid has, or `in_order`.
    Raises EmulatorError.
    """
    library = _load(compile_unit(unit, kernel, folders=folders, flags=flags))
    table = (_Array * max(1, len(arrays)))()
    for number, array in enumerate(arrays):
        table[number] = _Array(*_bounds(array), array.flags.writeable, number)
    data = np.zeros(len(params) + 64, np.uint8)  # by-value structs may hold a tensor map, which wants 64-byte alignment
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
    if library.emu_launch(ctypes.byref(launch)) != 0:
        raise EmulatorError(_with_lines(error.value.decode(), library._name) + f"\n(seed {seed})")


SWIZZLES = (0, 32, 64, 128)  # bytes
ELEMENTS = {  # as CUtensorMapDataType
    np.dtype(np.uint8): 0,
    np.dtype(np.uint16): 1,
    np.dtype(np.uint32): 2,
    np.dtype(np.int32): 3,
    np.dtype(np.float16): 6,
    np.dtype(np.float32): 7,
    np.dtype(ml_dtypes.bfloat16): 9,
    np.dtype(ml_dtypes.float8_e4m3fn): 0,
}


def tensor_map(array: np.ndarray, box: Sequence[int], *, swizzle: int = 0) -> bytes:
    """The 128 bytes that a kernel of the emulator takes for a CUtensorMap of `array`, whose last axis is innermost.

    ``box`` is given in the order of the axes. Raises ValueError where cuTensorMapEncodeTiled would refuse.
    """
    rank = array.ndim
    strides = array.strides[::-1]
    inner = box[-1] * array.itemsize
    refusals = (
        (array.dtype not in ELEMENTS, f"dtype {array.dtype}"),
        (not 1 <= rank <= 5 or len(box) != rank, f"{rank} axes, box of {len(box)}"),
        (array.ctypes.data % 16 != 0, f"address {array.ctypes.data:#x}: accepted are multiples of 16"),
        (strides[0] != array.itemsize, f"innermost stride {strides[0]} bytes: accepted is {array.itemsize}"),
        (any(s % 16 or not 0 <= s < 1 << 40 for s in strides[1:]), f"strides {strides}: accepted are multiples of 16"),
        (any(not 1 <= b <= 256 for b in box), f"box {tuple(box)}: accepted are 1 to 256"),
        (any(n < 1 for n in array.shape), f"shape {array.shape}: accepted are 1 and more"),
        (inner % 16 != 0, f"{inner} bytes of a row of the box: accepted are multiples of 16"),
        (swizzle not in SWIZZLES, f"swizzle {swizzle}: accepted are {SWIZZLES}"),
        (swizzle != 0 and inner != swizzle, f"{inner} bytes of a row of the box with swizzle {swizzle}"),
    )
    for refused, why in refusals:
        if refused:
            raise ValueError(f"tensor map: {why}")
    pad = (0,) * (5 - rank)
    return struct.pack(
        "<QQ5I5I5Q4B",
        0x70616D20756D6520,
        array.ctypes.data,
        *(*array.shape[::-1], *pad),
        *(*tuple(box)[::-1], *pad),
        *(*strides, *pad),
        rank,
        ELEMENTS[array.dtype],
        array.itemsize,
        SWIZZLES.index(swizzle),
    ).ljust(128, b"\0")


def pack(*values: np.ndarray | int | float | bytes) -> bytes:
    """A by-value struct of pointers (arrays), int, float, and members that are bytes already, such as tensor maps."""
    data = b""
    for value in values:
        if isinstance(value, bytes):
            part, align = value, 64 if len(value) % 64 == 0 else 4
        elif isinstance(value, np.ndarray):
            part, align = struct.pack("Q", value.ctypes.data), 8
        else:
            part, align = struct.pack("f" if isinstance(value, float) else "i", value), 4
        data += bytes(-len(data) % align) + part
    return data


@functools.cache
def _load(path: Path) -> ctypes.CDLL:
    return ctypes.CDLL(str(path), mode=os.RTLD_LOCAL | os.RTLD_NOW)


def _with_lines(text: str, library: str) -> str:
    """`text` with each group of `` @offset`` marks replaced by the source lines of that call chain."""
    addresses = sorted(set(re.findall(r" @([0-9a-f]+)", text)))
    tool = shutil.which("addr2line")
    if not addresses or tool is None:
        return text
    query = [tool, "-e", library, "-a", "-i", "-f", "-C", *addresses]
    output = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    chains: dict[int, list[str]] = {}
    chain: list[str] = []
    lines = iter(output.splitlines())
    for line in lines:
        if line.startswith("0x"):
            chain = chains.setdefault(int(line, 16), [])
            continue
        where = next(lines).split(" (discriminator")[0]
        inner = "emulator.hpp" in where or "/tools/emulator/" in where or where.startswith("??")
        if not inner and "emu_entry" not in line:
            chain.append(f"{Path(where).name} in {line.split('(')[0]}")

    def readable(match: re.Match[str]) -> str:
        found = [place for mark in match[0].split() for place in chains.get(int(mark[1:], 16), [])]
        unique = [p for i, p in enumerate(found) if i == 0 or found[i - 1] != p]
        return " at " + ", from ".join(unique) if unique else ""

    return re.sub(r"(?: @[0-9a-f]+)+", readable, text)
