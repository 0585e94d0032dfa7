# SPDX-License-Identifier: Apache-2.0
"""The one comparison of results. No tolerance is typed: the bound of a row is the rounding error that the reference
itself makes in it when it computes and stores as a kernel does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rawattn.testing.cases import Case
from rawattn.testing.inputs import Results

Array = NDArray[Any]


@dataclass(kw_only=True)
class Record:
    """What the checks of an op have seen: how many ran, and the worst error as a share of its bound."""

    examples: int = 0
    worst: dict[str, float] = field(default_factory=dict)

    def saw(self, output: str, ratio: float) -> None:
        self.worst[output] = max(self.worst.get(output, 0.0), ratio)


def ulp(x: Array, dtype: str) -> Array:
    """From |x| to the next larger value of a storage type; x is finite."""
    facts = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(facts.smallest_normal))))
    return np.exp2(exponent) * float(facts.eps)


def bound(want: Array, rounded: Array, dtype: str, axes: tuple[int, ...]) -> Array:
    """2 max |rounded - want| + 2 ulp of the largest |want|, both over a row, which `axes` span."""
    finite = np.isfinite(want) & np.isfinite(rounded)
    error = np.abs(np.where(finite, rounded, 0.0) - np.where(finite, want, 0.0))
    largest = np.abs(np.where(finite, want, 0.0)).max(axis=axes, keepdims=True, initial=0.0)
    return 2 * error.max(axis=axes, keepdims=True, initial=0.0) + 2 * ulp(largest, dtype)


def assert_close(got: Results, want: Results, rounded: Results, case: Case, record: Record) -> None:
    """Holds out and lse of a kernel to the reference; a row of out is its columns, lse is one row.

    First the positions of inf and NaN must be the same; then |got - want| <= `bound`. `want` and `rounded` may have
    more heads and columns than `got`: those only help to measure the rounding.
    """
    __tracebackhide__ = True
    for name, dtype, axes, x, y, z in (
        ("out", case.dtype, (-1,), got[0], want[0], rounded[0]),
        ("lse", "float32", (-2, -1), got[1], want[1], rounded[1]),
    ):
        limit = bound(y, z, dtype, axes)
        part = tuple(map(slice, x.shape))
        y, limit = y[part], np.broadcast_to(limit, y.shape)[part]
        if x.shape != y.shape:
            raise AssertionError(f"{name}: shape {x.shape}, want {y.shape}; {case!r}")
        odd = ~(np.isfinite(x) & np.isfinite(y))
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        error = np.abs(np.where(odd, 0.0, x) - np.where(odd, 0.0, y))
        ratio = np.where(odd, np.where(same, 0.0, np.inf), error / limit)
        if ratio.size == 0:
            continue
        record.saw(name, float(ratio.max()))
        if ratio.max() > 1:
            worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
            raise AssertionError(
                f"{name}[{', '.join(map(str, worst))}] = {x[worst]:.9g}, want {y[worst]:.9g} +- {limit[worst]:.3g} "
                f"(error / bound {ratio[worst]:.3g}; {int((ratio > 1).sum())} of {ratio.size} are outside); {case!r}"
            )


def assert_same(got: Results, want: Results, case: Case) -> None:
    """Holds out and lse to other results, bit for bit (0 and -0 are different)."""
    __tracebackhide__ = True
    for name, x, y in (("out", got[0], want[0]), ("lse", got[1], want[1])):
        if x.shape != y.shape:
            raise AssertionError(f"{name}: shape {x.shape}, want {y.shape}; {case!r}")
        nan = np.isnan(x) & np.isnan(y)
        differ = ((x != y) | (np.signbit(x) != np.signbit(y))) & ~nan
        if differ.any():
            first = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{name}[{', '.join(map(str, first))}] = {x[first]:.9g}, want the bits of {y[first]:.9g} "
                f"({int(differ.sum())} of {differ.size} differ); {case!r}"
            )
