# SPDX-License-Identifier: Apache-2.0
"""The emulator itself: threads, warps, memory checks and their messages, sm_80, conversions, building."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rawattn import registry
from tools.emulator import EmulatorError, available, compile_unit, driver, pack, run

pytestmark = pytest.mark.skipif(available() is not None, reason=str(available()))

KERNELS = Path(__file__).parent / "emulator"
SIMT = (KERNELS / "simt.cu").read_text()
GEMM = (KERNELS / "gemm_sm80.cu").read_text()
SEEDS = range(8)


def normal(*shape: int, dtype: type = np.float32, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32).astype(dtype)


# ---- Threads, shared memory, warps, atomics ----


def block_sums(unit: str = SIMT, seed: int = 0, n: int = 1000, smem: int = 512) -> np.ndarray:
    x, sums = np.ones(n, np.float32), np.full(8, np.nan, np.float32)
    x.flags.writeable = False
    run(unit, "block_sums", pack(x, sums, n), 8, 128, smem, [x, sums], seed)
    return sums


@pytest.mark.parametrize("seed", SEEDS)
def test_block_sums(seed: int) -> None:
    assert block_sums(seed=seed).tolist() == [128.0] * 7 + [104.0]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("i < p.n ?", "i <= p.n ?", r"global load of 4 bytes .* byte 4000 of array 0, which has 4000\n"),
        ("p.sums[blockIdx.x]", "p.sums[blockIdx.x - 1]", "global store .* byte -4 of array 1"),
        ("p.sums[blockIdx.x] = total", "const_cast<float*>(p.x)[0] = total", "array 0, which is read-only"),
        ("staged[threadIdx.x] =", "staged[threadIdx.x + 1] =", r"shared store .* \(dynamic \+ 512\): outside"),
        ("total += partial[w]", "total += partial[w + 32]", "index 3[2-5] is outside 'float \\[32\\]'"),
        ("= partial[w]", "= *(float*)((char*)partial + 4 * w + 2)", "not a multiple of 4"),
        ("__syncthreads();  // partial", "if (threadIdx.x % 2) __syncthreads();", "divergence: .*__syncthreads.*__shfl|returns"),
        ("__syncthreads();  // partial", "if (threadIdx.x < 64) __syncthreads(); else return;", "^$"),
        ("__syncthreads();  // staged", "if (threadIdx.x == 77) return;", "shuffle with mask ffffffff, but lane 13"),
        ("float total = 0.f;", "while (threadIdx.x == 0) __nanosleep(9); float total = 0.f;", "no end within"),
        ("__syncthreads();  // partial", "if (blockIdx.x == 3) __trap();", r"block \(3, 0, 0\).*__trap\(\)"),
        ("bit /= 2) x", "bit /= 2) if (threadIdx.x % 32 < 16) x", "divergence: this lane calls shuffle"),
        ("0xffffffffu, x, bit", "0xffu, x, bit", "mask 000000ff lacks the calling lane"),
    ],
)  # fmt: skip
def test_block_sums_broken(old: str, new: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each defect is named with its block, thread, access and source line."""
    unit = SIMT.replace("total += partial[w]", "total = total + partial[w]")
    old = old.replace("total += ", "total + ")
    new = new.replace("total += ", "total + ")
    assert unit.count(old) == 1
