# SPDX-License-Identifier: Apache-2.0
"""Kernel x Config x architecture -> cubin: a generated unit, NVRTC, the disk cache. No GPU."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rawattn import cache, registry
from rawattn.device import INSTALL_GPU
from rawattn.registry import Config, Kernel

SCHEMA = 1  # raise it when the meaning of a cache entry changes
# NVRTC keeps a cache of its own, and answers from it with an empty log: no registers, no warnings.
FLAGS = ("-std=c++17", "-default-device", "-lineinfo", "--ptxas-options=-v", "--no-cache")


class CompileError(RuntimeError):
    """A kernel does not compile; the message holds the numbered source and the compiler's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """A kernel source and all that it includes."""

    texts: tuple[tuple[str, str], ...]  # (name, text) of our own files, the kernel first
    system: tuple[str, ...]  # headers in angle brackets: CUDA's

    @property
    def digest(self) -> str:
        return hashlib.sha256(repr(self).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """What ptxas reports of a kernel."""

    registers: int  # a thread
    spill_stores: int  # bytes a thread
    spill_loads: int
    stack: int
    smem: int  # static shared memory, bytes a block
    warnings: tuple[str, ...]  # lines of the log, with ptxas's advice on performance (C75xx)


def sources(kernel: Kernel) -> Sources:
    """The include closure of a kernel, read from the kernel folder."""
    folder = registry.cuda_folder()
    texts: dict[str, str] = {}
    system: set[str] = set()
    pending = [kernel.source]
    while pending:
        name = pending.pop()
        if name not in texts:
            texts[name] = (folder / name).read_text()
            pending += re.findall(r'^\s*#\s*include\s*"([^"]+)"', texts[name], re.M)
            system.update(re.findall(r"^\s*#\s*include\s*<([^>]+)>", texts[name], re.M))
    return Sources(texts=tuple(texts.items()), system=tuple(sorted(system)))


def unit(kernel: Kernel, config: Config) -> str:
    """The translation unit that NVRTC compiles: the kernel source, and the Config by name."""
    names = [f.name for f in fields(config)]  # type: ignore[arg-type]
    for kind in type(config).__mro__:
        names += [n for n, value in vars(kind).items() if isinstance(value, property)]
    size = ctypes.sizeof(registry.params_struct(kernel.params))
    smem = "".join(word.capitalize() for word in kernel.name.split("_")) + "Smem"
    members = "\n".join(_member(name, getattr(config, name)) for name in names)
    checks = f'static_assert(sizeof({kernel.params}) == {size}, "ABI: {kernel.params}");\n'
    if config.smem_bytes:
        checks += f"""\
static_assert(sizeof({smem}<Config>) == Config::smem_bytes,
              "plan and kernel disagree on shared memory");
"""
    return f"""\
// rawattn {kernel.name}  sources {sources(kernel).digest[:16]}
#include "{kernel.source}"
struct Config {{
{members}
}};
{checks}extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
{entry_name(kernel)}(const __grid_constant__ {kernel.params} p) {{ {kernel.name}<Config>(p); }}
"""


def entry_name(kernel: Kernel) -> str:
    """The name of the function that a cubin holds."""
    return f"rawattn_{kernel.name}"


def cubin(kernel: Kernel, config: Config, arch: str) -> Path:
    """The cubin for an architecture, from the disk cache or from NVRTC.

    Beside it lie the unit, ``kernel.cu``, and the compiler's log, ``kernel.log``. Raises
    `CompileError`.
    """
    text = unit(kernel, config)

    def key(version: str) -> str:
        parts = (SCHEMA, text, arch, FLAGS, version)
        return f"{kernel.name}-{arch}-{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"

    # An entry is named after the NVRTC that built it; the one installed is where we look first.
    installed = _installed_nvrtc()
    entry = cache.default().find(key(installed)) if installed else None
    if entry is None:
        version = nvrtc_version()
        entry = cache.default().get(key(version), lambda: _build(kernel, text, arch))
    return entry / "kernel.cubin"


def resources(kernel: Kernel, config: Config, arch: str) -> Resources:
    """Registers, spills, stack, shared memory and warnings of a compiled kernel."""
    return parse_log(cubin(kernel, config, arch).with_suffix(".log").read_text())


def parse_log(log: str) -> Resources:
    """The resources in the log of a unit with one entry function."""
    used = re.search(r"Used (\d+) registers", log)
    if used is None:
        raise ValueError(f"no ptxas report in the compiler's log: {log!r}")

    def number(pattern: str) -> int:
        return sum(int(n) for n in re.findall(pattern, log))

    return Resources(
        registers=int(used[1]),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack=number(r"(\d+) bytes stack frame"),
        smem=number(r"(\d+) bytes smem"),
        warnings=tuple(
            line for line in log.splitlines() if re.search(r"warning|\(C75\d\d\)", line, re.I)
        ),
    )


def _member(name: str, value: bool | int | str) -> str:
    if isinstance(value, str):
        return f"  using {''.join(word.capitalize() for word in name.split('_'))} = {value};"
    if isinstance(value, bool):
        return f"  static constexpr bool {name} = {str(value).lower()};"
    return f"  static constexpr int {name} = {value};"


@functools.cache
def _installed_nvrtc() -> str | None:
    """The version of the one NVRTC among NVIDIA's wheels, which its builtins have in their name.

    It is enough to find what is compiled; NVRTC itself takes far longer to load than that. None
    where there is no such wheel, or several.
    """
    names = [file.name for w in _wheels() for file in w.glob("*/lib/libnvrtc-builtins.so.*")]
    versions = {version for name in names for version in re.findall(r"so\.(\d+\.\d+)", name)}
    return versions.pop() if len(versions) == 1 else None


@functools.cache
def load_nvrtc() -> tuple[Any, tuple[int, int]]:
    """The bindings of NVRTC, and its version."""
    try:
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise CompileError(f"compiling needs cuda-bindings: {INSTALL_GPU} ({error})") from None
    try:
        status, major, minor = nvrtc.nvrtcVersion()
    except (RuntimeError, OSError) as error:
        raise CompileError(f"compiling needs the NVRTC library: {INSTALL_GPU} ({error})") from None
    if int(status):
        raise CompileError(f"NVRTC does not work: nvrtcVersion answers {status!r}")
    return nvrtc, (major, minor)


def nvrtc_version() -> str:
    """The compiler here, "12.9". Raises CompileError where there is none."""
    return "{}.{}".format(*load_nvrtc()[1])


def _build(kernel: Kernel, text: str, arch: str) -> dict[str, bytes]:
    """The files of a cache entry."""
    nvrtc, (major, _) = load_nvrtc()
    closure = sources(kernel)
    options = [f"-arch={arch}", *FLAGS]
    if closure.system:
        options.append(f"-I{header_folder(kernel, closure.system, major)}")
    names = [name.encode() for name, _ in closure.texts]
    texts = [source.encode() for _, source in closure.texts]
    program = _check(
        nvrtc, nvrtc.nvrtcCreateProgram(text.encode(), b"kernel.cu", len(names), texts, names)
    )
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        # Buffers are bytearrays: CPython shares short bytes objects, and all would see the write.
        log = bytearray(_check(nvrtc, nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetProgramLog(program, log))
        report = log.decode(errors="replace").rstrip("\0\n")
        if int(status):
            raise CompileError(_failure(kernel, text, closure, options, report or repr(status)))
        code = bytearray(_check(nvrtc, nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc, nvrtc.nvrtcGetCUBIN(program, code))
    finally:
        nvrtc.nvrtcDestroyProgram(program)
    report = re.sub(r"^.*Compile time = .*\n?", "", report, flags=re.M)  # all else is repeatable
    return {"kernel.cu": text.encode(), "kernel.cubin": bytes(code), "kernel.log": report.encode()}


def _check(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    if int(answer[0]):
        raise CompileError(f"NVRTC: {nvrtc.nvrtcGetErrorString(answer[0])[1].decode()}")
    return answer[1] if len(answer) > 1 else None


def _failure(kernel: Kernel, text: str, closure: Sources, options: list[str], log: str) -> str:
    """What a CompileError says: log, numbered unit, numbered lines around errors elsewhere."""
    parts = [
        f"{kernel.name} does not compile ({' '.join(options)}):\n{log}",
        "kernel.cu:\n" + _numbered(text),
    ]
    for name, source in closure.texts:
        errors = re.findall(rf"^{re.escape(name)}\((\d+)\): .*error", log, re.M)
        for line in sorted(set(map(int, errors))):
            parts.append(f"{name}, around line {line}:\n" + _numbered(source, line - 4, line + 3))
    return "\n\n".join(parts)


def _numbered(text: str, first: int = 0, last: int | None = None) -> str:
    lines = [f"{n:5d}  {line}" for n, line in enumerate(text.splitlines(), 1)]
    return "\n".join(lines[max(first, 0) : last])


def header_folder(kernel: Kernel, headers: tuple[str, ...], major: int) -> Path:
    """The folder of the CUDA headers that a kernel includes: of wheels, or of a CUDA toolkit."""
    folders = [
        wheel / name / "include" for wheel in _wheels() for name in (f"cu{major}", "cuda_runtime")
    ]
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    for folder in folders:
        if all((folder / header).is_file() for header in headers):
            return folder
    raise CompileError(
        f"{kernel.name} includes {', '.join(f'<{h}>' for h in headers)}, found in none of "
        f"{', '.join(map(str, folders))}: {INSTALL_GPU}, or set CUDA_PATH to a CUDA toolkit"
    )


def _wheels() -> list[Path]:
    """The folders of NVIDIA's wheels, one a site-packages."""
    found = importlib.util.find_spec("nvidia")
    return [Path(folder) for folder in found.submodule_search_locations or ()] if found else []
