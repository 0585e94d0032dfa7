# SPDX-License-Identifier: Apache-2.0
"""What a plan needs to know of a GPU: of one by name, anywhere, or of the one that is there."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from rawattn.problem import shown

# Compute capability -> the newest of `registry.ARCHITECTURES` whose cubins run there. A cubin runs
# on its own capability and on later minor ones of its major, but one with the suffix "a" on its own
# alone, and none crosses over to the system-on-chip parts (8.7, 10.1, 11.0).
ARCH_OF_CAPABILITY = {
    (8, 0): "sm_80",
    (8, 6): "sm_86",
    (8, 9): "sm_89",
    (9, 0): "sm_90a",
    (10, 0): "sm_100",
    (10, 3): "sm_100",
    (12, 0): "sm_120",
    (12, 1): "sm_120",
}

# How to install an extra, from a clone or with the file of a wheel.
INSTALL = "pip install '.[{0}]' in the clone, or 'rawattn-VERSION-py3-none-any.whl[{0}]' of a wheel"
INSTALL_GPU = INSTALL.format("cuda12") + "; cuda13 if your driver is for CUDA 13"


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU, or the host. Hashable; equal devices get equal plans.

    The peaks are the vendor's figures, found by the exact name that CUDA reports; they are None for
    a name that is not in the table, and whoever divides by them must say so.
    """

    name: str  # as CUDA reports it
    arch: str  # one of registry.ARCHITECTURES, or "host"
    sms: int = 0
    smem_per_block: int = 0  # bytes a block can opt in to
    smem_per_sm: int = 0  # bytes, of which the system takes 1024 a block
    l2_bytes: int = 0
    tflops: float | None = None  # dense fp16 and bf16 tensor cores, float32 accumulation
    gb_per_s: float | None = None  # device memory
    fma_per_clock: int | None = None  # of an SM, on tensor cores, in the type of `tflops`

    @staticmethod
    def named(name: str) -> Device:
        """The device of a short name, "H200", or of the name that CUDA reports, "NVIDIA H200".

        Raises ValueError for a name that is not known, TypeError for what is none.
        """
        if not isinstance(name, str):
            raise TypeError(f"device={shown(name)}: accepted are names, as H200")
        if name == "host":
            return Device.host()
        for short, device in DEVICES.items():
            if name.upper() == short.upper() or name == device.name:
                return device
        raise ValueError(f"device={name!r}: accepted are host, {', '.join(DEVICES)}")

    @staticmethod
    def host() -> Device:
        """What runs calls on NumPy arrays."""
        return Device(name="host", arch="host")

    @staticmethod
    def current(device_id: int | None = None) -> Device:
        """The GPU with that number, by default CuPy's current one.

        Raises RuntimeError where CuPy is not installed, where there is no GPU, or where no kernel
        runs on it.
        """
        cupy = import_cupy()
        return _read(cupy.cuda.runtime.getDevice() if device_id is None else device_id)


def import_cupy() -> Any:
    """CuPy with a working GPU; a RuntimeError says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise RuntimeError(f"GPU arrays need CuPy: {INSTALL_GPU} ({error})") from None
    try:
        count = cupy.cuda.runtime.getDeviceCount()
    except RuntimeError as error:
        raise RuntimeError(f"no CUDA GPU here ({error}); NumPy arrays need none") from None
    if count == 0:
        raise RuntimeError("no CUDA GPU here (CUDA lists 0 devices); NumPy arrays need none")
    return cupy


@functools.cache
def _read(device_id: int) -> Device:
    facts = import_cupy().cuda.runtime.getDeviceProperties(device_id)
    name = facts["name"].decode()
    capability = facts["major"], facts["minor"]
    if capability not in ARCH_OF_CAPABILITY:
        accepted = ", ".join(f"{major}.{minor}" for major, minor in ARCH_OF_CAPABILITY)
        raise RuntimeError(
            f"device {device_id} ({name}) has compute capability {capability[0]}.{capability[1]}: "
            f"accepted are {accepted}"
        )
    known = next((d for d in DEVICES.values() if d.name == name), Device.host())  # without peaks
    return Device(
        name=name,
        arch=ARCH_OF_CAPABILITY[capability],
        sms=facts["multiProcessorCount"],
        smem_per_block=facts["sharedMemPerBlockOptin"],
        smem_per_sm=facts["sharedMemPerMultiprocessor"],
        l2_bytes=facts["l2CacheSize"],
        tflops=known.tflops,
        gb_per_s=known.gb_per_s,
        fma_per_clock=known.fma_per_clock,
    )


_KB, _MB = 1 << 10, 1 << 20
# Shared memory that a block can have.
SMEM_KB = {"sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100": 227, "sm_120": 99}


def _gpu(
    name: str, arch: str, sms: int, l2_mb: int, tflops: float, gb_per_s: float, fma_per_clock: int
) -> Device:
    return Device(
        name=name,
        arch=arch,
        sms=sms,
        smem_per_block=SMEM_KB[arch] * _KB,
        smem_per_sm=(SMEM_KB[arch] + 1) * _KB,
        l2_bytes=l2_mb * _MB,
        tflops=tflops,
        gb_per_s=gb_per_s,
        fma_per_clock=fma_per_clock,
    )


# Figures of the vendor's data sheets and architecture papers, without sparsity.
# fmt: off
DEVICES = {  # name, architecture, SMs, MB of L2, TFLOP/s, GB/s, multiply-adds of an SM per clock
    "A100": _gpu("NVIDIA A100-SXM4-80GB", "sm_80", 108, 40, 311.9, 2039.0, 1024),
    "H100": _gpu("NVIDIA H100 80GB HBM3", "sm_90a", 132, 50, 989.4, 3350.0, 2048),
    "H200": _gpu("NVIDIA H200", "sm_90a", 132, 60, 989.4, 4800.0, 2048),
    "B200": _gpu("NVIDIA B200", "sm_100", 148, 126, 2250.0, 8000.0, 4096),
    "A10": _gpu("NVIDIA A10", "sm_86", 72, 6, 125.0, 600.0, 512),
    "RTX 3090": _gpu("NVIDIA GeForce RTX 3090", "sm_86", 82, 6, 71.2, 936.2, 256),
    "L40S": _gpu("NVIDIA L40S", "sm_89", 142, 96, 362.0, 864.0, 512),
    "RTX 4090": _gpu("NVIDIA GeForce RTX 4090", "sm_89", 128, 72, 165.2, 1008.0, 256),
    "RTX 5090": _gpu("NVIDIA GeForce RTX 5090", "sm_120", 170, 96, 209.5, 1792.0, 256),
}
# fmt: on
