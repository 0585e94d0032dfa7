# SPDX-License-Identifier: Apache-2.0
"""``info``: what is on this machine, and what can run here. It needs neither GPU nor NumPy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import rawattn
from rawattn import cache, compile, settings
from rawattn.cache_problem import (
    CopyBlocksProblem,
    KvWriteProblem,
    MergeProblem,
    RotaryProblem,
)
from rawattn.cli.cache import folder_facts
from rawattn.device import DEVICES, Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import BACKENDS, Backend, kv_write, merge
from rawattn.plan import paged as paged_plan
from rawattn.problem import CacheLayout, Problem
from rawattn.registry import KERNELS, cuda_folder

PACKAGES = ("numpy", "ml_dtypes", "cupy-cuda12x", "cupy-cuda13x", "cuda-bindings", "rich")
TYPICAL = Problem(
    dtype="bfloat16",
    batch=1,
    q_heads=1,
    kv_heads=1,
    head_dim=128,
    value_dim=128,
    max_q=128,
    max_k=128,
)
PAGED = PagedProblem(
    dtype="bfloat16",
    cache_dtype="bfloat16",
    batch=1,
    q_heads=1,
    kv_heads=1,
    head_dim=128,
    value_dim=128,
    max_q=1,
    max_k=128,
    page=16,
    layout=CacheLayout.NHD,
)
WRITE = KvWriteProblem(
    dtype="bfloat16",
    cache_dtype="bfloat16",
    tokens=1,
    kv_heads=1,
    head_dim=128,
    value_dim=128,
    layout=CacheLayout.X_MAJOR,
)
ROTARY = RotaryProblem(dtype="bfloat16", tokens=1, heads=1, head_dim=128)
COPY = CopyBlocksProblem(caches=1, pairs=1, block_bytes=4096)
MERGE = MergeProblem(
    dtype="bfloat16", out_dtype="bfloat16", states=2, tokens=1, heads=1, head_dim=128
)


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of this machine; what is missing is named in their place, and never an error."""
    device, compiler = _device(), _compiler()
    current: Any = device
    if isinstance(device, Device):
        current = {"name": device.name, "arch": device.arch, "sms": device.sms}
    return {
        "rawattn": rawattn.__version__,
        "python": f"{platform.python_version()} on {sys.platform} {platform.machine()}",
        "packages": {name: _version(name) for name in PACKAGES},
        "gpus": _nvidia_smi(),
        "device": current,
        "compiler": compiler,
        "g++ (emulator)": _gxx(),
        "sources": str(cuda_folder()),
        "cache": _cache(),
        "environment": {k: v for k, v in sorted(os.environ.items()) if k.startswith("RAWATTN_")},
        "remarks": settings.remarks(),
        "backends": [
            {"for": op, "name": b.name, "runs_here": why is None, "why_not": why}
            for op, (backends, typical) in operations().items()
            for b in backends
            for why in [why_not(b, typical, device, compiler)]
        ],
        "devices_known": ", ".join(("host", *DEVICES)),
    }, 0


def operations() -> dict[str, tuple[Sequence[Backend], Any]]:
    """What can be asked for: its backends in order, and a problem that all of them should take."""
    moves = {"store tokens": WRITE, "rotary": ROTARY, "copy blocks": COPY}
    return {
        "attention": (BACKENDS, TYPICAL),
        "paged attention": (paged_plan.BACKENDS, PAGED),
        **{op: (kv_write.BACKENDS[type(p)], p) for op, p in moves.items()},
        "merge": (merge.BACKENDS, MERGE),
    }


def why_not(
    backend: Backend, typical: Any, device: Device | str, compiler: dict[str, str] | str
) -> str | None:
    """Why a backend cannot run here; None where it can. A str says why there is no such thing."""
    if backend.refuses(typical, Device.host()) is None:
        return None
    if isinstance(device, str):
        return device
    return backend.refuses(typical, device) or (compiler if isinstance(compiler, str) else None)


def _device() -> Device | str:
    try:
        return Device.current()
    except RuntimeError as error:
        return str(error)


def _cache() -> dict[str, Any]:
    try:
        return folder_facts(cache.default())
    except (OSError, RuntimeError) as error:  # not to be read, or below no home
        return {"error": str(error)}


def _compiler() -> dict[str, str] | str:
    """The version of NVRTC, or what is missing to compile kernels."""
    try:
        _, (major, minor) = compile.load_nvrtc()
        for kernel in KERNELS.values():
            compile.header_folder(kernel, compile.sources(kernel).system, major)
    except compile.CompileError as error:
        return f"not here: {error}"
    return {"nvrtc": f"{major}.{minor}"}


def _gxx() -> str:
    """The version of g++, which only the emulator of a clone needs."""
    needs = "the emulator needs 12 or newer"
    command = [os.environ.get("CXX", "g++"), "-dumpfullversion"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return f"not here: {needs}"
    version = done.stdout.strip()
    major = version.split(".")[0]
    return version if major.isdigit() and int(major) >= 12 else f"{version or 'not g++'}: {needs}"


def _nvidia_smi() -> list[str]:
    """Name and driver of each GPU; it sees them without CuPy, and before CUDA works."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return []
    if done.returncode:
        return []
    names = (line.rsplit(", ", 1) for line in done.stdout.splitlines())
    return [f"{name}, driver {driver}" for name, driver in names]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
