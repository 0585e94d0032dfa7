# SPDX-License-Identifier: Apache-2.0
"""Every tile shape of fwd_sm80 on the emulator: what the laws, which stay with few configs, leave
out."""

from __future__ import annotations

import functools
import math
import re
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rawattn import registry
from rawattn.plan import configs
from rawattn.testing import Case, Op, law_matches_reference, run, tensors
from tools import emulator
from tools.emulator import pack
from tools.emulator.attention import attention, emulator_op

pytestmark = pytest.mark.emulator

TILES = sorted({(c.head_dim, c.value_dim) for c in configs("fwd_sm80", "sm_90a")})


@pytest.fixture(scope="module")
def op() -> Op:
    return replace(emulator_op(), call=functools.partial(attention, backend="fwd_sm80"))


@pytest.mark.parametrize(("head_dim", "value_dim"), TILES)
def test_aligned(op: Op, head_dim: int, value_dim: int) -> None:
    """Two query tiles, three key tiles, a padded head, two query heads for each of two KV heads."""
    case = Case(
        q_lens=(140,),
        k_lens=(150,),
        q_heads=4,
        kv_heads=2,
        head_dim=head_dim - 8,
        value_dim=value_dim,
        causal=True,
    )
    law_matches_reference(op, case)


@pytest.mark.parametrize(("head_dim", "value_dim"), TILES)
def test_unaligned(op: Op, head_dim: int, value_dim: int) -> None:
    """Copies of 2 bytes, every score feature, packed sequences: an empty one among them, and one
    of more queries than keys, whose first rows begin before the first key.
    """
    case = Case(
        q_lens=(5, 70, 0, 30),
        k_lens=(33, 129, 7, 20),
        q_heads=2,
        kv_heads=2,
        dtype="float16",
        layout="packed",
        memory="unaligned",
        head_dim=head_dim - 3,
        value_dim=value_dim - 1,
        window=(100, 3),
        softcap=10.0,
        alibi="batch",
        sink=True,
    )
    law_matches_reference(op, case)


def call(**changes: Any) -> tuple[np.ndarray, np.ndarray]:
    """out and lse of a small call, with arguments of its own; what is not written is NaN."""
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 20, 2, 64)).astype(np.float16)
    out, lse = np.full_like(q, np.nan), np.full((1, 2, 20), np.nan, np.float32)
    attention(q, k, v, **{"out": out, "lse": lse, "seeds": (0,), **changes})
    return out, lse


def test_lse_need_not_be_wanted() -> None:
    (want, lse), (out, untouched) = call(), call(lse=None)
    assert out.tobytes() == want.tobytes() and np.isfinite(want).all() and np.isfinite(lse).all()
    assert np.isnan(untouched).all()


def test_rows_without_keys_are_0_beside_nan() -> None:
    """Causal rows before the first key: their products have met the NaN that later rows see."""
    q = np.random.default_rng(0).standard_normal((1, 20, 2, 64)).astype(np.float16)
    k, v = q[:, 8:].copy(), np.full_like(q[:, 8:], np.nan)
    out, lse = np.ones_like(q), np.ones((1, 2, 20), np.float32)
    attention(q, k, v, out=out, lse=lse, causal=True, backend="fwd_sm80", seeds=(0,))
    assert (out[:, :8] == 0).all() and np.isneginf(lse[..., :8]).all()
    assert np.isnan(out[:, 8:]).all() and np.isfinite(lse[..., 8:]).all()


def test_lengths_outside_of_their_storage_are_capped() -> None:
    """They lie on the GPU, where nobody has checked them; a neighbour's keys are not theirs."""
    starts = np.array([0, 7, 14, 20], np.int32)
    options = {"max_seqlen_q": 7, "max_seqlen_k": 7, "backend": "fwd_sm80"}

    def of(*used: int) -> bytes:
        rng = np.random.default_rng(0)
        q, k, v = rng.standard_normal((3, 20, 2, 64)).astype(np.float16)
        out, lse = np.full_like(q, np.nan), np.full((2, 20), np.nan, np.float32)
        options["seqused_k"] = np.array(used, np.int32)
        cu = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
        attention(q, k, v, out=out, lse=lse, seeds=(0,), **cu, **options)
        return out.tobytes() + lse.tobytes()

    assert of(-5, 9, 6) == of(0, 7, 6) != of(0, 6, 6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seeds": 0}, "seeds=0: accepted are a count from 1"),
        ({"seeds": -1}, "seeds=-1: accepted are a count from 1"),
        ({"seeds": True}, "seeds=True: accepted are a count from 1"),
        ({"seeds": []}, "seeds=[]: accepted are a count from 1"),
        ({"seeds": "ab"}, "seeds='ab': accepted are a count from 1"),
        ({"seeds": (0.5,)}, "seeds=(0.5,): accepted are a count from 1"),
        ({"kernels": "nowhere"}, "kernels='nowhere': accepted is the folder of the sources"),
        ({"kernels": ""}, "kernels='': accepted is the folder of the sources"),
        ({"device": "host"}, "device='host': accepted are GPUs, A100"),
    ],
)
def test_what_would_run_nothing_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        call(**changes)


def test_kernels_may_be_a_name() -> None:
    assert call(kernels=str(registry.cuda_folder()))[0].tobytes() == call()[0].tobytes()


def test_time() -> None:
    """256 x 256, two heads of 128, in two seconds of one core."""
    case = Case(q_lens=(256,), k_lens=(256,), q_heads=2, kv_heads=2, head_dim=128, value_dim=128)
    op = Op(name="attention", call=functools.partial(attention, seeds=(0,)))
    run(op, tensors(case))  # compiles
    start = time.process_time()
    run(op, tensors(case))
    assert time.process_time() - start < 2


SOFT_CAP = """
#include "scores.cuh"
struct Params { const float* x; float* near; float* any; float cap_log2; float unit; int n; };

extern "C" __global__ void soft_cap(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  const SoftCap capped(p.cap_log2, p.unit);
  if (i < p.n) p.near[i] = capped.near(p.x[i]), p.any[i] = capped(p.x[i]);
}
"""


@pytest.mark.parametrize("unit", [1.0, -0.125])
@pytest.mark.parametrize("cap", [1e-18, 0.5, 50.0, 1e18])
def test_softcap_is_exact_to_a_millionth(cap: float, unit: float) -> None:
    """For scores of any size, on both sides of where its two forms meet, in the same bits."""
    size = np.concatenate([np.geomspace(1e-12, 1e3, 3000), np.linspace(0.4, 0.6, 1000)])
    x = (np.concatenate([size, -size]) * cap / unit).astype(np.float32)
    near, found = np.zeros_like(x), np.zeros_like(x)
    scores = x.astype(np.float64) * unit
    log2e = math.log2(math.e)
    params = pack(x, near, found, cap * log2e, unit * log2e, x.size)
    emulator.run(SOFT_CAP, "soft_cap", params, -(-x.size // 256), 256, 0, [x, near, found], 1)
    want = cap * np.tanh(scores / cap) * log2e
    np.testing.assert_allclose(found, want, rtol=1e-6)
    below = np.abs(scores) < 0.48 * cap
    np.testing.assert_array_equal(near[below], found[below])
