# SPDX-License-Identifier: Apache-2.0
"""Plans that tools/tune.py times, with the Params of their kernels, on the emulator."""

from __future__ import annotations

import numpy as np
import pytest

from bench.candidates import variant_candidate
from bench.cases import Tensors
from rawattn import plan
from rawattn.device import Device
from rawattn.problem import Problem
from tests.bench_arrays import random_tensors
from tools.emulator.api import Template
from tools.tune import varied

pytestmark = pytest.mark.emulator

H200 = Device.named("H200")


@pytest.mark.parametrize("other", [False, True], ids=["planned", "varied"])
@pytest.mark.parametrize(("k_len", "split"), [(1500, True), (200, False)])
def test_a_variant_has_the_workspace_that_it_needs(
    monkeypatch: pytest.MonkeyPatch, k_len: int, split: bool, other: bool
) -> None:
    """Query tiles that are cut over their keys, and whole ones, as planned and not."""
    monkeypatch.setattr("bench.candidates.Template", Template)
    p = Problem(
        dtype="float16",
        batch=1,
        q_heads=2,
        kv_heads=2,
        head_dim=128,
        value_dim=128,
        max_q=20,
        max_k=k_len,
    )
    planned = plan.plan(p, H200, "fwd_sm90")
    assert planned.launches[0].config.split == split == (planned.workspace_bytes > 0)
    made = varied(planned, {"split": split != other})
    assert made is not None
    (launch,) = made.launches
    assert made.workspace_bytes == launch.workspace_bytes
    assert (made.workspace_bytes > 0) == (split != other)
    q, k, v = random_tensors(p, 0)
    out, lse = np.full_like(q, np.nan), np.full((1, 2, 20), np.nan, np.float32)
    tensors = Tensors(q=q, k=k, v=v, out=out, lse=lse, scale=0.1)
    assert variant_candidate("x", made, tensors).run() is out
    assert tensors.expected(p, np).error_ratio(out) <= 1
