# SPDX-License-Identifier: Apache-2.0
"""``info``: what is on this machine, and what can run here. It needs neither GPU nor NumPy."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from argparse import Namespace
from importlib import metadata
from typing import Any

import rawattn
from rawattn import cache, compile
from rawattn.cli.cache import folder_facts
from rawattn.device import DEVICES, Device
from rawattn.plan import BACKENDS, Backend
from rawattn.problem import Problem
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
        "backends": [
            {"name": b.name, "runs_here": why is None, "why_not": why}
            for b in BACKENDS
            for why in [why_not(b, device, compiler)]
        ],
        "devices_known": ", ".join(("host", *DEVICES)),
    }, 0


def why_not(backend: Backend, device: Device | str, compiler: dict[str, str] | str) -> str | None:
    """Why a backend cannot run here; None where it can. A str says why there is no such thing."""
    if backend.refuses(TYPICAL, Device.host()) is None:
        return None
    if isinstance(device, str):
        return device
    return backend.refuses(TYPICAL, device) or (compiler if isinstance(compiler, str) else None)


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
