# SPDX-License-Identifier: Apache-2.0
"""Whether what a kernel gave for a case is right."""

from __future__ import annotations

import numpy as np

from rawattn.testing.closeness import Record, assert_within, ulp
from tools.cases.base import Array, KernelCase


def check(case: KernelCase, got: dict[str, Array]) -> None:
    """AssertionError where the outputs are not what NumPy says."""
    (_check_bits if case.exact else _check_merged)(case, got)


def _check_bits(case: KernelCase, got: dict[str, Array]) -> None:
    """The very bytes, but for NaN, of which there are many."""
    for name, want in case.want.items():
        x, y = (np.ascontiguousarray(a) for a in (got[name], want))
        same = (x.view(np.uint8) == y.view(np.uint8)).reshape(*x.shape, x.itemsize).all(axis=-1)
        if x.dtype.kind not in "iu":
            same |= np.isnan(x.astype(np.float32)) & np.isnan(y.astype(np.float32))
        assert same.all(), f"{name}: {(~same).sum()} of {same.size}, {case.plan.problem}"


def _check_merged(case: KernelCase, got: dict[str, Array]) -> None:
    """Infinities where they should be, rows of one state bit for bit, all else by the rounding of
    float32 and of the type of out.
    """
    out, lse, scale = got["out"], got["lse"], case.arrays["out_scale"]
    want_out, want_lse = case.want["out"], case.want["lse"]
    terms = np.abs(np.where(np.isfinite(want_lse), want_lse, 0)) + np.log(case.plan.problem.states)
    noise = 2 * ulp(np.maximum(terms, 1.0), "float32")
    largest = np.abs(want_out).max(axis=-1, keepdims=True)
    limit = 2 * ulp(largest, case.plan.problem.out_dtype) + 2 * noise[..., None] * largest
    results = out.astype(np.float64), lse.astype(np.float64)
    assert_within(results, (want_out, want_lse), (limit, noise), case.plan.problem, Record())
    first, others = case.arrays["first"], case.arrays["others"]
    outs = np.stack([first, *others])
    lses = np.stack([case.arrays["first_lse"], *case.arrays["others_lse"]])
    lses[0, int(case.scalars["first_tokens"]) :] = -np.inf
    keys = np.isfinite(lses)
    lone = keys.sum(axis=0) == 1
    state = keys.argmax(axis=0)[lone]
    theirs = outs[(state, *np.nonzero(lone))]
    if out.itemsize == 1:
        theirs = (theirs.astype(np.float32) / scale).astype(out.dtype)
    assert np.ascontiguousarray(out[lone]).tobytes() == theirs.astype(out.dtype).tobytes()
    np.testing.assert_array_equal(lse[lone], lses[(state, *np.nonzero(lone))])
