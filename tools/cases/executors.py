# SPDX-License-Identifier: Apache-2.0
"""Where a case runs: on the emulator, or on the GPU. Both give its outputs as NumPy arrays."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from rawattn import launch
from rawattn.arrays import view
from rawattn.testing.paged_cases import PagedLimits
from rawattn.testing.paged_laws import PagedOp
from tools.cases.base import Array, Arrays, KernelCase
from tools.emulator.api import paged_emulator_op
from tools.emulator.plans import run_plan

Executor = Callable[[KernelCase], Arrays]


def on_emulator(case: KernelCase, seed: int = 0, **options: Any) -> Arrays:
    """`seed` decides the schedule; `options` are those of `run_plan`. The case is used up: outputs
    are its own arrays.
    """
    placed = case.place(lambda x: x, lambda x: x.ctypes.data)
    run_plan(case.plan, placed, case.scalars, seed, outputs=tuple(case.want), **options)
    return {name: placed[name] for name in case.want}


def on_gpu(case: KernelCase) -> Arrays:
    """On the current device."""
    placed = case.place(_to_device, lambda x: x.data.ptr)
    views = {name: None if x is None else view(name, x) for name, x in placed.items()}
    specs = {name: x and x.spec for name, x in views.items()}
    template = launch.Template(case.plan, 0, case.scalars, specs)
    template.pack([x.pointer if x else 0 for x in views.values()])()
    return {
        name: np.ascontiguousarray(placed[name].get()).view(case.arrays[name].dtype)
        for name in case.want
    }


@functools.cache
def emulated_op(backend: str) -> PagedOp:
    """`flash_attn_with_kvcache` on the emulator, by a backend that promises `PagedOp.bitwise`."""
    op = paged_emulator_op(1, backend)
    return dataclasses.replace(op, limits=PagedLimits(), bitwise=True)


def _to_device(x: Array) -> Any:
    """The same bytes, gaps included, as far from a multiple of 16. What CuPy has no type for, bytes
    alone.
    """
    import cupy

    span = x.itemsize + sum((n - 1) * s for n, s in zip(x.shape, x.strides, strict=True))
    span = span if x.size else 0
    first = x.ctypes.data % 16
    memory = cupy.zeros(span + 16, np.uint8)
    if span:
        held = (ctypes.c_uint8 * span).from_address(x.ctypes.data)
        memory[first : first + span] = cupy.asarray(np.frombuffer(held, np.uint8))
    dtype = np.uint8 if x.itemsize == 1 else x.dtype
    return cupy.ndarray(x.shape, dtype, memory.data + first, strides=x.strides)
