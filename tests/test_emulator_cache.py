# SPDX-License-Identifier: Apache-2.0
"""kv_write, rotary, copy_blocks, merge, paged_v1 and paged_v2 on the emulator, and the conversions
and functions that they share.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import rawattn
from rawattn.problem import CacheLayout
from rawattn.reference_paged import BlockSparse, slots
from rawattn.settings import Settings
from rawattn.testing.closeness import bounds, ulp
from rawattn.testing.ops import expected
from rawattn.testing.paged_cases import PagedCase, PagedLimits
from rawattn.testing.paged_inputs import paged_tensors, spread
from rawattn.testing.paged_laws import (
    law_neighbours_are_invisible,
    law_page_sizes_are_equal,
    law_paged_matches_reference,
    law_pages_are_invisible,
    law_tables_are_equal,
)
from rawattn.testing.paged_strategies import paged_cases
from tools.cases import CASES
from tools.cases.base import Array
from tools.cases.checks import check
from tools.cases.executors import emulated_op, on_emulator
from tools.emulator import pack, run
from tools.emulator.api import emulated

pytestmark = pytest.mark.emulator

SEEDS = range(8)  # problems of a kind; more of them, and other ones, are compared with a GPU
OLD_GPU = ("-D__CUDA_ARCH__=800",)  # no instructions for 8-bit floats

# ---- conversions and functions -------------------------------------------------------------------

CONVERT = """
#include "types.cuh"
struct Params { const float* x; TYPE* narrow; float* wide; int n; };

// Two of four numbers from `first` on, as halves.
template <int kLow, int kHigh>
__device__ void widen(const Params& p, int first) {
  const unsigned four = first * 0x01010101u + 0x03020100u;
  const unsigned wide = TYPE::widen<kLow, kHigh>(four);
  float* to = p.wide + (kHigh == kLow + 1 ? 0 : 256) + first;
  to[kLow] = to_float(fp16{static_cast<unsigned short>(wide)});
  to[kHigh] = to_float(fp16{static_cast<unsigned short>(wide >> 16)});
}

extern "C" __global__ void convert(const __grid_constant__ Params p) {
  const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
  if (i >= p.n) return;
  const unsigned pair = TYPE::narrow(p.x[i], p.x[i + 1]);
  p.narrow[i] = {static_cast<unsigned char>(pair)};
  p.narrow[i + 1] = {static_cast<unsigned char>(pair >> 8)};
  if (i < 512) {
    p.wide[512 + i / 2] = to_float(TYPE{static_cast<unsigned char>(i / 2)});
  }
  if (i < 256 && i % 4 == 0) {
    widen<0, 1>(p, i);
    widen<2, 3>(p, i);
    widen<0, 2>(p, i);
    widen<1, 3>(p, i);
  }
}
"""


@functools.cache
def floats() -> Array:
    """Everything that a half can be, its neighbours in float32, and numbers of all sizes."""
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1 << 16, np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32)
        up, down = (np.nextafter(halves, np.float32(end)) for end in (np.inf, -np.inf))
        return np.concatenate([halves, up, down, bits])


@pytest.mark.parametrize("flags", [(), OLD_GPU], ids=["instructions", "integers"])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_conversions(name: str, flags: tuple[str, ...]) -> None:
    x = floats()
    narrow, wide = np.zeros(x.size, np.uint8), np.zeros((3, 256), np.float32)
    params = pack(x, narrow, wide, x.size)
    unit = CONVERT.replace("TYPE", name)
    run(unit, "convert", params, -(-x.size // 512), 256, 0, [x, narrow, wide], 1, flags=flags)
    with np.errstate(invalid="ignore"):
        if name == "int8":
            kind: Any = np.int8
            want = np.where(np.isnan(x), -128, np.clip(np.rint(x), -128, 127)).astype(kind)
        else:
            kind = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[name]
            largest = float(ml_dtypes.finfo(kind).max)
            want = np.clip(x, -largest, largest).astype(kind)
    nan = np.isnan(x) if name != "int8" else np.zeros(x.size, bool)
    np.testing.assert_array_equal(narrow[~nan], want.view(np.uint8)[~nan])
    assert (narrow[nan] == 0x7F).all()
    for ways in wide:  # neighbours; both even or odd ones; one by one
        np.testing.assert_array_equal(ways, np.arange(256, dtype=np.uint8).view(kind).astype("f4"))


EXP_LOG = """
#include "exp_log.cuh"
struct Params { const float* x; const float* y; float* exp; float* log; int n; };

extern "C" __global__ void exp_log(const __grid_constant__ Params p) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.exp[i] = exact_exp(p.x[i]), p.log[i] = exact_log(p.y[i]);
}
"""


def test_exp_and_log_are_within_two_ulp() -> None:
    rng = np.random.default_rng(0)
    x = -np.concatenate([[0, np.inf, 87, 88, 1e30], rng.uniform(0, 88, 20000)]).astype(np.float32)
    y = np.concatenate([[1, 2, 3, 1e9, 3e38], np.exp(rng.uniform(0, 20, 20000))]).astype(np.float32)
    exp, log = np.zeros_like(x), np.zeros_like(y)
    params = pack(x, y, exp, log, x.size)
    run(EXP_LOG, "exp_log", params, -(-x.size // 256), 256, 0, [x, y, exp, log], 1)
    want = np.exp(x.astype(np.float64))
    smallest = float(np.finfo(np.float32).tiny)
    normal = want >= 2 * smallest
    assert (np.abs(exp - want) <= 2 * ulp(want, "float32"))[normal].all()
    assert (exp[~normal] <= 4 * smallest).all()
    exact = np.log(y.astype(np.float64))
    assert (np.abs(log - exact) <= 2 * ulp(np.maximum(exact, 1.0), "float32")).all()
    assert exp[0] == 1 and exp[1] == 0 and log[0] == 0


# ---- one launch ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_kernel(name: str) -> None:
    for seed in SEEDS:
        case = CASES[name](seed)
        check(case, on_emulator(case, seed))


def test_another_schedule_gives_the_same_bits() -> None:
    for name in ("kv_write bfloat16 to bfloat16 rotary", "merge 5 bfloat16 to bfloat16"):
        outputs = [on_emulator(CASES[name](3), seed) for seed in range(6)]
        for name, x in outputs[0].items():
            assert len({other[name].tobytes() for other in outputs}) == 1, (name, x.shape)


def test_nan_is_not_lost_in_merging() -> None:
    case = CASES["merge 2 float32 to float32"](0)
    case.arrays["first_lse"][3, 0] = np.nan
    got = on_emulator(case)
    assert np.isnan(got["out"][3, 0]).all() and np.isnan(got["lse"][3, 0])
    for name, x in got.items():
        assert np.isnan(x).any(axis=-1).sum() == 1, name


def test_older_gpus_store_the_same_bits() -> None:
    for seed in SEEDS:
        case = CASES["kv_write bfloat16 to float8_e4m3fn"](seed)
        check(case, on_emulator(case, flags=OLD_GPU))


# ---- PagedAttention ------------------------------------------------------------------------------

LADDER = PagedLimits(
    dtypes=("float16", "bfloat16"),
    cache_dtypes=("same", "float8_e4m3fn", "int8"),
    head_dims=tuple(range(16, 129, 16)),
    layouts=("x-major",),
    pages=(1, 3, 5, 8, 16, 32, 48),
    tables=("block_table", "csr"),
    rotary=("none",),
    splits=(0,),
    max_q=3,
    max_k=600,
    max_new=0,
    max_heads=4,
    max_batch=3,
)


BACKENDS = pytest.mark.parametrize("backend", ["paged_v1", "paged_v2"])


@BACKENDS
@settings(max_examples=12, derandomize=True)
@given(case=paged_cases(LADDER))
def test_paged_attention_is_the_reference(backend: str, case: PagedCase) -> None:
    law_paged_matches_reference(emulated_op(backend), case)


@BACKENDS
@pytest.mark.parametrize(
    "law",
    [
        law_paged_matches_reference,
        law_pages_are_invisible,
        law_page_sizes_are_equal,
        law_tables_are_equal,
        law_neighbours_are_invisible,
    ],
    ids=lambda law: law.name,
)
def test_laws_of_paged_attention(backend: str, law: Any) -> None:
    """Of three partitions of v2, the last one short; values that do not lie 16 bytes apart."""
    case = PagedCase(
        q_lens=(1, 1, 1),
        k_lens=(1030, 0, 77),
        layout="x-major",
        page=8,
        q_heads=2,
        head_dim=40,
        value_dim=24,
        sink=True,
        softcap=20.0,
        window=(900, 0),
    )
    law(emulated_op(backend), case)


@BACKENDS
@pytest.mark.parametrize(
    ("dtype", "cache", "size", "page", "layout"),
    [
        ("float32", "same", 200, 16, "x-major"),
        ("bfloat16", "float8_e5m2", 96, 32, "x-major"),
        ("float16", "same", 256, 1, "x-major"),
        ("float32", "same", 66, 16, "NHD"),
        ("float32", "same", 64, 8, "HND"),
        ("float16", "float8_e4m3fn", 272, 16, "x-major"),
        ("float16", "same", 520, 3, "NHD"),
    ],
)
def test_other_types_and_wide_heads(
    backend: str, dtype: str, cache: str, size: int, page: int, layout: str
) -> None:
    case = PagedCase(
        q_lens=(1, 1),
        k_lens=(70, 33) if size < 257 else (530, 0),
        dtype=dtype,
        cache_dtype=cache,
        q_heads=4,
        kv_heads=2,
        layout=layout,
        page=page,
        head_dim=size,
        value_dim=size - 3,
        memory="gaps",
        scale=-0.5,
        scales="heads",
        alibi=True,
        by_sequence=True,
    )
    law_paged_matches_reference(emulated_op(backend), case)


@BACKENDS
@pytest.mark.parametrize(
    "how",
    [
        {"dtype": "float32", "causal": True, "alibi": True, "window": (500, 0)},
        {"dtype": "float32", "window": (20, 1), "layout": "NHD", "packed": True, "alibi": True},
        {"head_dim": 272, "value_dim": 300, "causal": True, "layout": "HND", "table": "csr"},
        {"tree": True, "packed": True, "window": (600, -1), "sink": True},
        {"tree": True, "dtype": "float16", "cache_dtype": "int8", "scales": "heads"},
    ],
    ids=lambda how: ",".join(how),
)
def test_several_queries(backend: str, how: dict[str, Any]) -> None:
    case = {"q_lens": (3, 1, 4), "k_lens": (530, 1, 70), "page": 16, "q_heads": 2, "head_dim": 40}
    if not how.get("packed"):
        case["q_lens"] = (3, 3, 3)
    law_paged_matches_reference(emulated_op(backend), PagedCase(**{**case, **how}))


@pytest.mark.parametrize(("dtype", "value_dim"), [("float16", 8), ("bfloat16", 24)])
def test_new_values_narrower_than_a_piece(dtype: str, value_dim: int) -> None:
    """Rows of 16 bytes in v, but no 16 bytes in a cache of 8 bits: nothing past them is read."""
    case = PagedCase(
        q_lens=(1,),
        k_lens=(1,),
        dtype=dtype,
        cache_dtype="float8_e4m3fn",
        head_dim=32,
        value_dim=value_dim,
        layout="x-major",
        page=2,
        new=1,
    )
    law_paged_matches_reference(emulated_op("paged_v1"), case)


def test_tables_of_a_gpu_are_checked_where_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "read", lambda: Settings(backend=None, check=True))
    q, cache = np.ones((1, 1, 2, 64), np.float16), np.ones((4, 16, 2, 64), np.float16)
    call = {"cache_seqlens": np.array([20], np.int32), "block_table": np.array([[1, 2]], np.int32)}
    with emulated():  # forgets kinds of calls before and after
        rawattn.flash_attn_with_kvcache(q, cache, cache, **call)
        call["block_table"][0, 1] = 9
        with pytest.raises(ValueError, match=r"block_table\[0, 1\] is 9: accepted are 0 to 3"):
            rawattn.flash_attn_with_kvcache(q, cache, cache, **call)


SPARSE = [
    BlockSparse(local_blocks=2, vert_stride=6, block_size=32, head_sliding_step=1, tp_rank=0),
    BlockSparse(local_blocks=0, vert_stride=7, block_size=16, head_sliding_step=-2, tp_rank=3),
    BlockSparse(local_blocks=1, vert_stride=2, block_size=48, head_sliding_step=0, tp_rank=0),
]


@pytest.mark.parametrize("function", ["paged_attention_v1", "paged_attention_v2"])
@pytest.mark.parametrize("sparse", SPARSE, ids=str)
def test_block_sparse(function: str, sparse: BlockSparse) -> None:
    """Hidden keys hold NaN: they are not as much as multiplied by 0."""
    case = PagedCase(
        q_lens=(1, 1),
        k_lens=(1000, 75),
        layout="x-major",
        q_heads=4,
        kv_heads=2,
        head_dim=48,
        value_dim=48,
        alibi=True,
    )
    t = paged_tensors(case)
    seen = [sparse.seen(case.q_heads, case.kv_heads, n) for n in case.k_lens]
    inputs = spread(t)
    a = inputs.arguments
    for b, (some, pages) in enumerate(zip(seen, a["block_table"], strict=True)):
        hidden = np.flatnonzero(~some.any(axis=(0, 1)))
        for cache in (a["k_cache"], a["v_cache"]):
            slots(cache, CacheLayout.X_MAJOR)[pages[hidden // 16], hidden % 16] = np.nan
        assert b or len(hidden)
    query, out = a["q"][:, 0], a["out"][:, 0]
    before = (None,) * 3 if function.endswith("2") else ()
    with emulated("H200", seed=2) as launched:
        getattr(rawattn, function)(
            out,
            *before,
            query,
            a["k_cache"],
            a["v_cache"],
            2,
            48**-0.5,
            a["block_table"],
            a["cache_seqlens"],
            16,
            1000,
            a["alibi_slopes"],
            tp_rank=sparse.tp_rank,
            backend=function.replace("attention_", ""),
            **{f"blocksparse_{k}": v for k, v in sparse._asdict().items() if k != "tp_rank"},
        )
    assert len(launched) == len(before) // 3 + 1
    want = expected(dataclasses.replace(t.gathered(), seen=seen))
    exact = want.out[..., : case.value_dim]
    limit = bounds(want, case.dtype)[0]
    got = out.astype(np.float64)
    assert (np.abs(got - exact) <= limit).all()
