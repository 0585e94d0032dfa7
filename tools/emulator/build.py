# SPDX-License-Identifier: Apache-2.0
"""A generated unit -> one C++ file -> g++ -> a shared object, cached on disk.

The unit and every header that it includes become one file, with ``#line`` marks that keep the
sources' own line numbers. ``ptx_*.cuh`` is taken from ``include/`` here and not from the kernel
folder: that is the whole seam. Three declarations change on the way, because C++ has no words for
them: ``__shared__``, ``extern __shared__``, and parameters that are ``__grid_constant__``, which
become references.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
KERNELS = HERE.parents[1] / "cuda"

FLAGS = (
    *("-std=c++20", "-g", "-fPIC", "-march=native", "-fvisibility=hidden", "-fno-gnu-unique"),
    *("-fno-omit-frame-pointer", "-fno-optimize-sibling-calls", "-Wno-psabi", f"-I{INCLUDE}"),
)
RUNTIME_FLAGS = ("-O3", "-Wall", "-Wextra", "-Wno-restrict")
RUNTIME_SOURCES = tuple(
    f"{name}.cpp" for name in ("launch", "runtime", "memory", "warp", "bulk", "wgmma")
)
# The sanitizers report every access (thread), and what a GPU traps on or does silently wrong
# (alignment, bounds); none of their libraries is linked, memory.cpp answers the calls. Not
# optimised: -O2 takes g++ three times as long, 2 s for a forward kernel, and what tests run then
# takes a fifth less, since most of a run is spent in the runtime.
UNIT_FLAGS = (
    *("-O0", "-include", "emulator.hpp", "-fno-strict-aliasing", "-fwrapv", "-fno-exceptions"),
    *("-fno-math-errno", "-Wno-unknown-pragmas", "-Werror=return-type"),
    *("-fsanitize=thread,alignment,bounds", "--param=tsan-instrument-func-entry-exit=0"),
    "--param=tsan-distinguish-volatile=1",
)


class EmulatorError(Exception):
    """A kernel did something that a GPU forbids; the text names kernel, block, thread, access and
    source lines."""


class BuildError(EmulatorError):
    """A unit does not compile; the text is what g++ says."""


@functools.cache
def compiler() -> str | None:
    """The g++ to use (``CXX`` or ``g++``), or None."""
    return shutil.which(os.environ.get("CXX", "g++"))


@functools.cache
def available() -> str | None:
    """Why the emulator cannot run here, or None if it can."""
    if compiler() is None:
        return "the emulator needs g++ 12 or newer, found none"
    query = [str(compiler()), "-dumpfullversion"]  # which clang does not know
    version = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    if version and int(version.split(".")[0]) >= 12:
        return None
    return f"the emulator needs g++ 12 or newer, found {compiler()} {version}".rstrip()


# ---- Source ----

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"')
_CONSTANT = re.compile(r"const\s+__grid_constant__\s+(\w+)\s+(\w+)")
_ALIGN = r"(?:(?:__align__|alignas)\((?P<{}>[^()]+)\)\s*)?"
_TYPE = r"(?P<type>[\w:]+(?:<[^;=]*>)?(?:\s+[\w:]+)*?)"
_SHARED = _ALIGN.format("before") + r"__shared__\s+" + _ALIGN.format("behind") + _TYPE
_NAME = r"\w+(?:\s*\[[^\]]*\])*"
_DYNAMIC = re.compile(rf"extern\s+{_SHARED}\s+(?P<name>\w+)\s*\[\s*\]\s*;")
_STATIC = re.compile(rf"(?:static\s+)?{_SHARED}\s+(?P<names>{_NAME}(?:\s*,\s*{_NAME})*)\s*;")


def translate(line: str, key: int) -> str:
    """A source line with CUDA's declarations in C++ words; `key` tells static memory apart."""

    def dynamic(m: re.Match[str]) -> str:
        align = m["before"] or m["behind"] or 16
        return f"{m['type']}* const {m['name']} = emu::dynamic_shared<{m['type']}, {align}>();"

    def static(m: re.Match[str]) -> str:
        align = m["before"] or m["behind"] or 1
        declared = []
        for number, declarator in enumerate(m["names"].split(",")):
            name, bracket, dimensions = declarator.strip().partition("[")
            arguments = f"{key * 16 + number}, {m['type']}{bracket}{dimensions}, {align}"
            declared.append(f"auto& {name.strip()} = emu::static_shared<{arguments}>();")
        return " ".join(declared)

    line = _CONSTANT.sub(r"const \1& \2", line)
    return _STATIC.sub(static, _DYNAMIC.sub(dynamic, line))


def expand(text: str, folders: Sequence[Path], name: str = "unit.cu") -> str:
    """`text` with its quoted includes in place, each once, found in `folders` in order."""
    seen: set[Path] = set()
    lines: list[str] = []

    def add(text: str, name: str) -> None:
        lines.append(f'#line 1 "{name}"')
        for number, line in enumerate(text.splitlines(), start=1):
            match = _INCLUDE.match(line)
            found = [f / match[1] for f in folders if (f / match[1]).is_file()] if match else []
            if found and found[0].resolve() not in seen:
                seen.add(found[0].resolve())
                add(found[0].read_text(), str(found[0]))
                lines.append(f'#line {number + 1} "{name}"')
            elif found or line.strip() == "#pragma once":
                lines.append("")
            else:
                lines.append(translate(line, len(lines)))

    add(text, name)
    return "\n".join(lines) + "\n"


# ---- Objects ----


def cache_folder() -> Path:
    """Where objects are kept: beside the cubins, if ``RAWATTN_CACHE_DIR`` says where those are."""
    base = os.environ.get("RAWATTN_CACHE_DIR") or Path.home() / ".cache" / "rawattn"
    return Path(base) / "emulator"


@functools.cache
def _toolchain() -> str:
    """What an object depends on beside its source: the compiler, and what -march=native means."""
    query = [str(compiler()), "-march=native", "-Q", "--help=target", "--version"]
    return subprocess.run(query, capture_output=True, text=True, check=False).stdout


def _cached(key: Sequence[str], suffix: str, make: Callable[[Path], None]) -> Path:
    """The file for `key`; `make(target)` builds it in a folder of its own, then it is renamed."""
    digest = hashlib.sha256("\0".join((_toolchain(), *key)).encode()).hexdigest()[:32]
    target = cache_folder() / f"{digest}{suffix}"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            made = Path(folder) / f"made{suffix}"
            make(made)
            os.replace(made, target)
    return target


def gcc(*arguments: object) -> None:
    """Runs the compiler; BuildError where it fails."""
    command = [str(compiler()), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise BuildError(f"g++ failed:\n{done.stderr[-8000:]}")


@functools.cache
def _runtime() -> tuple[Path, ...]:
    """The runtime's objects."""
    headers = [(HERE / h).read_text() for h in ("runtime.hpp", "switch.hpp", "include/convert.hpp")]
    flags = (*FLAGS, *RUNTIME_FLAGS)

    def build(name: str) -> Path:
        source = HERE / name
        key = [*flags, source.read_text(), *headers]
        return _cached(key, ".o", lambda made: gcc(*flags, "-c", source, "-o", made))

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return tuple(pool.map(build, RUNTIME_SOURCES))


def compile_unit(
    unit: str,
    kernel: str,
    *,
    folders: Sequence[Path] = (KERNELS,),
    flags: Sequence[str] = (),
) -> Path:
    """The shared object of a unit whose entry is `kernel`, from the disk cache where it is known.

    `folders` hold the kernel sources. `flags` come last: ``-O2`` for a long run, say. Raises
    BuildError.
    """
    if reason := available():
        raise BuildError(reason)
    text = expand(unit, (INCLUDE, *folders))
    text += f'extern "C" void emu_entry(const void* p) {{ emu::call({kernel}, p); }}\n'
    runtime = _runtime()

    def build(made: Path) -> None:
        source, unit_object = made.with_suffix(".cpp"), made.with_suffix(".o")
        source.write_text(text)
        gcc(*FLAGS, *UNIT_FLAGS, *flags, "-c", source, "-o", unit_object)
        gcc("-shared", "-Wl,-z,defs", unit_object, *runtime, "-ldl", "-o", made)

    prelude = (INCLUDE / "emulator.hpp").read_text()
    key = [*FLAGS, *UNIT_FLAGS, *flags, prelude, text, *(o.name for o in runtime)]
    return _cached(key, ".so", build)
