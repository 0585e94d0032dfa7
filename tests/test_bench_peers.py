# SPDX-License-Identifier: Apache-2.0
"""What peers of other types and masks are held to, and what their rows say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bench import check, measure
from bench.cases import dense
from rawattn.arrays import DTYPES
from rawattn.device import Device
from rawattn.problem import Mask

STATE = measure.GpuState(driver="580.1", clock_mhz=1980, temperature_c=40)
SETTING = measure.Setting(
    op="forward",
    case=dense(64, False, 4096),
    device=Device.named("H200"),
    before=STATE,
    after=STATE,
    l2="exceeded",
    timestamp="t",
)


def row_of(setting: measure.Setting, problem: object = None) -> measure.Row:
    candidate = measure.Candidate(backend="x", run=int, problem=problem)
    return measure.make_row(setting, candidate, [100.0], 0.1)


@pytest.mark.parametrize("scale", [1.0, 64.0])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_rounding_is_that_of_the_type(dtype: str, scale: float) -> None:
    """By its ulp, where CuPy cannot convert, as where it can."""
    x = np.random.default_rng(0).standard_normal(4096) * 2.0 ** np.linspace(-25, 0, 4096)
    storage = check.Storage(dtype=dtype, scale=scale)
    stored = (x * scale).astype(np.float32).astype(DTYPES[dtype]).astype(np.float64) / scale
    assert np.array_equal(storage.rounded(x), stored)
    assert (abs(stored - x) <= storage.ulp(x) / 2 * (1 + 2.0**-12)).all()


def test_an_8_bit_output_is_held_to_8_bits() -> None:
    p = dense(64, True, 512).problem
    p = replace(p, batch=1, q_heads=1, kv_heads=1, max_q=70, max_k=70)
    rng = np.random.default_rng(2)
    q, k, v = (rng.standard_normal((1, 70, 1, 64)) for _ in range(3))
    storage = check.Storage(dtype="float8_e4m3fn", scale=64.0)
    found = check.expected(p, q, k, v, scale=0.125, storage=storage)
    strict = check.expected(p, q, k, v, scale=0.125)
    out = found.out.transpose(1, 0, 2)[None]
    assert found.error_ratio(storage.rounded(out)) <= 0.5
    assert strict.error_ratio(storage.rounded(out)) > 1
    assert found.error_ratio(out + 4 * found.bound.transpose(1, 0, 2)[None]) > 1


def test_a_window_counts_what_it_shows() -> None:
    case = dense(64, True, 4096)
    window = replace(case, problem=replace(case.problem, mask=Mask.of(True, (63, 0))))
    pairs = 64 * 4096 - 64 * 63 // 2  # of each of 4 sequences of 32 heads
    flops = 4 * 4 * 32 * pairs * 64
    assert row_of(replace(SETTING, case=window)).tflops == round(flops / 100e6, 1)
    assert row_of(replace(SETTING, case=case)).tflops == round(128 * 2**30 * 2 / 100e6, 1)


def test_a_candidate_may_compute_another_problem() -> None:
    """A peer in 8 bits has a row of 8 bits, and their roofline."""
    eight = replace(SETTING.case.problem, dtype="float8_e4m3fn")
    rows = [row_of(SETTING), row_of(SETTING, eight)]
    assert [row.dtype for row in rows] == ["bfloat16", "float8_e4m3fn"]
    assert rows[0].roofline_percent == pytest.approx(2 * rows[1].roofline_percent, rel=0.01)
    assert rows[0].tflops == rows[1].tflops
