# SPDX-License-Identifier: Apache-2.0
"""Softcap as the softmax of the forward kernels takes it in."""

from __future__ import annotations

import numpy as np
import pytest

import rawattn
from rawattn import reference
from rawattn.arrays import contiguous
from rawattn.device import Device
from rawattn.plan import plan
from rawattn.problem import Mask, Problem
from rawattn.request import Arrays, Options, problem_of
from rawattn.softcap import LOG2_E, NEAR, NONE, extreme, fold
from tools.emulator.api import emulated


@pytest.mark.parametrize(("scale", "softcap"), [(0.125, 50.0), (3.0, 0.5), (1e-4, 1e4), (7.0, 1e6)])
def test_the_polynomial_is_the_softcap_to_2e_6(scale: float, softcap: float) -> None:
    f = fold(scale, softcap)
    x = np.linspace(-1, 1, 20001) * f["fold_near"]
    x = x[x != 0]
    got = x * (f["fold_x"] + x**2 * (f["fold_x3"] + x**2 * f["fold_x5"]))
    want = softcap * np.tanh(x * scale / softcap) * LOG2_E
    assert np.abs(got / want - 1).max() < 1.5e-6
    assert f["fold_near"] * scale == pytest.approx(NEAR * softcap)
    assert 2 ** (f["fold_power"] * 3.0) == pytest.approx(np.exp(2 * 3.0 * scale / softcap))


@pytest.mark.parametrize(
    ("scale", "softcap"), [(0.0, 50.0), (-1.0, 50.0), (1.0, 0.0), (1e-18, 1e18), (1e18, 1e-18)]
)
def test_what_does_not_fold(scale: float, softcap: float) -> None:
    assert fold(scale, softcap) is NONE
    assert extreme(scale, 64, softcap) == (scale > 0 and softcap > 0)


def _problem(scale: float | None, softcap: float) -> Problem:
    x = contiguous((1, 5, 2, 64), "float16", None)
    return problem_of(Arrays(q=x, k=x, v=x), Options(softmax_scale=scale, softcap=softcap))


@pytest.mark.parametrize(
    ("scale", "softcap", "forms"),
    [
        (None, 0.0, (False, False)),
        (None, 50.0, (True, False)),
        (-1.0, 50.0, (False, True)),
        (1e-18, 1e18, (False, True)),
    ],
)
def test_the_kernel_of_numbers(
    scale: float | None, softcap: float, forms: tuple[bool, bool]
) -> None:
    (launch,) = plan(_problem(scale, softcap), Device.named("H200")).launches
    assert (launch.config.softcap, launch.config.scores) == forms


@pytest.mark.emulator
@pytest.mark.parametrize("negative", [False, True])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_bits_do_not_depend_on_what_others_of_a_warp_need(head_dim: int, negative: bool) -> None:
    """A row beside one with scores far from 0 takes the other form of the same softmax."""
    rng = np.random.default_rng(0)
    q, k, v = rng.standard_normal((3, 1, 1100, 1, head_dim), np.float32).astype(np.float16)
    if negative:
        q, k = abs(q), -abs(k)
    far = q.copy()
    far[0, 3] *= 100
    results = []
    for x in q, far:
        with emulated("H200"):
            out, lse = rawattn.flash_attn_func(
                x, k, v, softmax_scale=0.05, softcap=10.0, return_lse=True
            )
        want, want_lse = reference.attention(
            *(a.astype(float) for a in (x, k, v)), mask=Mask(), scale=0.05, softcap=10.0
        )
        assert abs(lse - want_lse).max() < 4e-5 and abs(out - want).max() < 4e-3
        results.append((out, lse))
    (out, lse), (other, other_lse) = results
    kept = np.arange(1100) != 3
    assert np.array_equal(out[0, kept], other[0, kept])
    assert np.array_equal(lse[0, 0, kept], other_lse[0, 0, kept])
