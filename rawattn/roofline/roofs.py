# SPDX-License-Identifier: Apache-2.0
"""The least time that work takes on a device: the higher of its two roofs, and the third limit
that the roofs do not show, exponentials.
"""

from __future__ import annotations

from dataclasses import dataclass

from rawattn.device import DEVICES, Device
from rawattn.roofline.counts import Attention, Lengths, Movement, Work, work

# Exponentials that a multiprocessor computes each clock, on every architecture of the table.
EXP_PER_CLOCK = 16
DOUBLED_FP8 = ("sm_89", "sm_90a", "sm_100", "sm_120")
TENSOR_CORE_DTYPES = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The least time that a device needs for some work, and which of its two limits sets it."""

    work: Work
    compute_seconds: float
    memory_seconds: float

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    def efficiency(self, seconds: float) -> float:
        """The share of the limit that a measured time reaches, 0 to 1."""
        return self.seconds / seconds


def peaks(device: Device, dtype: str = "bfloat16") -> tuple[float, float]:
    """TFLOP/s of matrix products and GB/s of memory, as the vendor states them.

    ValueError where they are not known for the device, or for the dtype on it.
    """
    if device.tflops is None or device.gb_per_s is None:
        raise ValueError(
            f"device={device.name!r}: its peaks are not known; accepted are {', '.join(DEVICES)}"
        )
    if dtype not in TENSOR_CORE_DTYPES:
        raise ValueError(f"dtype={dtype!r}: peaks are known for {', '.join(TENSOR_CORE_DTYPES)}")
    if not dtype.startswith("float8"):
        return device.tflops, device.gb_per_s
    if device.arch not in DOUBLED_FP8:
        raise ValueError(f"dtype={dtype!r}: {device.name} has no tensor cores for it")
    return 2 * device.tflops, device.gb_per_s


def ridge(device: Device, dtype: str = "bfloat16") -> float:
    """FLOPs a byte from which on a device is bound by computing. ValueError as in `peaks`."""
    tflops, gb_per_s = peaks(device, dtype)
    return 1e3 * tflops / gb_per_s


def limit_of(needed: Work, device: Device, dtype: str = "bfloat16") -> Roofline:
    """The least time of any work on a device. ValueError as in `peaks`."""
    tflops, gb_per_s = peaks(device, dtype)
    return Roofline(
        work=needed,
        compute_seconds=needed.flops / (1e12 * tflops),
        memory_seconds=needed.bytes / (1e9 * gb_per_s),
    )


def limit(
    problem: Attention | Movement, device: Device, lengths: Lengths | None = None
) -> Roofline:
    """The least time that the work of a problem takes on a device; `lengths` as in `work`.

    ValueError where the peaks of the device are not known, or not for the dtype.
    """
    needed = work(problem, lengths)
    if isinstance(problem, Movement):
        return limit_of(needed, device)
    return limit_of(needed, device, problem.dtype)


def exp_share(device: Device, head_dim: int, value_dim: int | None = None) -> float:
    """Cycles of the exponentials over cycles of the matrix products, of fp16 and bf16 attention.

    One score costs ``head_dim + value_dim`` multiply-adds on the tensor cores and one exponential;
    both are counted a clock and multiprocessor. ValueError where the rates are not known.
    """
    multiply_adds = head_dim + (head_dim if value_dim is None else value_dim)
    return fma_per_clock(device) / (EXP_PER_CLOCK * multiply_adds)


def exp_tera_per_second(device: Device) -> float:
    """10^12 exponentials a second, at the clock of the vendor's TFLOP/s. ValueError as above."""
    tflops, _ = peaks(device)
    return tflops * EXP_PER_CLOCK / (2 * fma_per_clock(device))


def fma_per_clock(device: Device) -> int:
    """fp16 and bf16 multiply-adds of a multiprocessor each clock. ValueError: not known."""
    if device.fma_per_clock is None:
        raise ValueError(
            f"device={device.name!r}: its rates are not known; accepted are {', '.join(DEVICES)}"
        )
    return device.fma_per_clock
