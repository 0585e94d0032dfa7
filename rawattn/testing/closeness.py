# SPDX-License-Identifier: Apache-2.0
"""The one comparison of results. No tolerance is typed: the bound of a row is the rounding error
that the reference itself makes in it when it computes and stores as a kernel does.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from rawattn.testing.cases import Case
from rawattn.testing.inputs import Results

Array = NDArray[Any]
SAMPLES = 32  # of rounding errors, at least, that make the bound of a row of out


@dataclass(kw_only=True)
class Record:
    """What the checks of an op have seen: how many ran, and the worst error as a share of its
    bound.
    """

    examples: int = 0
    worst: dict[str, float] = field(default_factory=dict)

    def saw(self, output: str, ratio: float) -> None:
        self.worst[output] = max(self.worst.get(output, 0.0), ratio)


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The float64 reference, its rounded twin, and the sizes that rounding errors scale with.

    `out` and `twin_out` may have more columns than a kernel: samples of the same rounding.
    """

    out: Array
    lse: Array
    twin_out: Array
    twin_lse: Array
    values: Array  # as out, one column: the largest sum of weight times |value|
    terms: Array  # as lse: what is added up to a score and to lse, in absolute values
    # Of all keys' |value|: GPUs flush a weight below float32's smallest normal number to 0.
    sum_of_values: float


def ulp(x: Array, dtype: str) -> Array:
    """From |x| to the next larger value of a storage type; x is finite."""
    facts = ml_dtypes.finfo(dtype)
    exponent = np.floor(np.log2(np.maximum(np.abs(x), float(facts.smallest_normal))))
    return np.exp2(exponent) * float(facts.eps)


def sum_of_values(v: Array) -> float:
    """The largest sum of |v| over all keys, of a head's column; v is ([B,] S, H, D), NaN where no
    key is.
    """
    sums = np.nansum(np.abs(v.astype(np.float64)).reshape(-1, *v.shape[-2:]), axis=0)
    return float(sums.max(initial=0.0))


def with_samples(v: Array, seed: int) -> Array:
    """A v of at least SAMPLES columns: where it is narrower, its own follow with random signs.

    They round alike, and so the bound of a row of one column is not one of chance.
    """
    copies = -(-SAMPLES // v.shape[-1])
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], v.dtype), (copies - 1, *v.shape))
    return np.concatenate([v, *(signs * v)], axis=-1)


def bounds(want: Expected, dtype: str) -> Results:
    """How far out and lse may be off: 2 max |twin - reference| of the row, and 2 ulp.

    The ulp of out is that of the largest value of its row. The ulp of lse is float32's, of the
    terms that it is the sum of; so far off may each score be as well, and with it the weights. One
    of these terms is the log of a sum of weights, the largest of them 1: an ulp of 1 off as well.
    """
    noise = 2 * ulp(np.maximum(want.terms, 1.0), "float32")
    weights = noise.swapaxes(-1, -2)[..., None]
    largest = np.abs(want.out).max(axis=-1, keepdims=True, initial=0.0)
    error = np.abs(want.twin_out - want.out).max(axis=-1, keepdims=True, initial=0.0)
    flushed = float(np.finfo(np.float32).smallest_normal) * want.sum_of_values
    finite = np.isfinite(want.lse) & np.isfinite(want.twin_lse)
    lse_error = np.abs(np.where(finite, want.twin_lse, 0.0) - np.where(finite, want.lse, 0.0))
    return (
        2 * error + 2 * ulp(largest, dtype) + 2 * weights * want.values + flushed,
        2 * lse_error.max(axis=-1, keepdims=True, initial=0.0) + noise,
    )


def assert_close(got: Results, want: Expected, case: Case, record: Record) -> None:
    """Holds out and lse of a kernel to the reference.

    First the positions of inf and NaN must be the same; then |got - want| <= `bounds`.
    """
    __tracebackhide__ = True
    exact = want.out[..., : case.value_dim], want.lse
    assert_within(got, exact, bounds(want, case.dtype), case, record)


def assert_within(got: Results, want: Results, limits: Results, case: Case, record: Record) -> None:
    """Holds out and lse to other results: inf and NaN at the same positions, all else within
    `limits`.
    """
    __tracebackhide__ = True
    for name, x, y, limit in zip(("out", "lse"), got, want, limits, strict=True):
        if x.shape != y.shape:
            raise AssertionError(f"{name}: shape {x.shape}, want {y.shape}; {case!r}")
        if x.size == 0:
            continue
        same = (x == y) | (np.isnan(x) & np.isnan(y))
        finite = np.isfinite(x) & np.isfinite(y)
        error = np.abs(np.where(finite, x, 0.0) - np.where(finite, y, 0.0))
        ratio = np.where(finite, error / limit, np.where(same, 0.0, np.inf))
        record.saw(name, float(ratio.max()))
        if ratio.max() > 1:
            worst = np.unravel_index(int(ratio.argmax()), ratio.shape)
            raise AssertionError(
                f"{name}[{', '.join(map(str, worst))}] = {x[worst]:.9g}, want {y[worst]:.9g} "
                f"+- {np.broadcast_to(limit, x.shape)[worst]:.3g} (error / bound "
                f"{ratio[worst]:.3g}; {(ratio > 1).sum()} of {ratio.size} are outside); {case!r}"
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
                f"{name}[{', '.join(map(str, first))}] = {x[first]:.9g}, want the bits of "
                f"{y[first]:.9g} ({int(differ.sum())} of {differ.size} differ); {case!r}"
            )
