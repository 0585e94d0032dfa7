# SPDX-License-Identifier: Apache-2.0
"""What a small problem of a kernel is: the launches of its plan, and what must come out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rawattn import registry
from rawattn.device import Device
from rawattn.plan import Plan

Array = NDArray[Any]
Arrays = dict[str, Array]
H200 = Device.named("H200")


@dataclass(frozen=True, kw_only=True)
class KernelCase:
    """A plan, and the arrays and scalars that its Params name. `want` holds what must come out."""

    plan: Plan
    arrays: Arrays
    scalars: Mapping[str, float]
    want: Arrays
    tables: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # of addresses of arrays
    exact: bool = True  # whether NumPy gives the very bits; else numbers in float64

    def place(self, put: Callable[[Array], Any], address: Callable[[Any], int]) -> dict[str, Any]:
        """The arrays by their names in Params, None where absent, each as `put` copies it."""
        placed: dict[str, Any] = {}
        for launch in self.plan.launches:
            struct = registry.params_struct(registry.KERNELS[launch.kernel].params)
            placed |= {name: None for name, kind in struct._fields_ if kind is ctypes.c_void_p}
        placed |= {name: put(x) for name, x in self.arrays.items()}
        for name, others in self.tables.items():
            placed[name] = put(np.array([address(placed[x]) for x in others], np.int64))
        return placed


def values(rng: np.random.Generator, shape: tuple[int, ...], dtype: str, *, odd: bool) -> Array:
    """Numbers of every size; `odd`: infinities and NaN too."""
    with np.errstate(over="ignore"):
        x = rng.standard_normal(shape) * np.exp2(rng.integers(-14, 10, shape))
        x[rng.random(shape) < 0.02] = -0.0
        if odd:
            x[rng.random(shape) < 0.01] = np.inf
            x[rng.random(shape) < 0.01] = np.nan
        return stored(x, dtype)


def stored(x: Array, dtype: str) -> Array:
    """Numbers in a storage type, the same with any ml_dtypes: since 0.7 it rounds float64 to its
    types in one step, before by way of float32.
    """
    own = np.dtype(dtype).isbuiltin == 1  # NumPy's
    return (x if own else x.astype(np.float32)).astype(dtype)


def spaced(rng: np.random.Generator, x: Array, step: int) -> Array:
    """The same values, with up to two times `step` elements between rows and before the first."""
    gap, start = step * int(rng.integers(3)), step * int(rng.integers(3))
    wide = np.zeros((*x.shape[:-1], x.shape[-1] + gap + start), x.dtype)
    view = wide[..., start : start + x.shape[-1]]
    view[:] = x
    return view


def strides(name: str, axes: str, x: Array) -> dict[str, int]:
    """Scalars of Params: `stride_{name}_{axis}` for each of the first axes."""
    words = axes.split()
    return {f"stride_{name}_{w}": s // x.itemsize for w, s in zip(words, x.strides, strict=False)}
