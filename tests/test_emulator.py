# SPDX-License-Identifier: Apache-2.0
"""The emulator itself: threads, warps, memory checks and their messages, sm_80, conversions,
building."""

from __future__ import annotations

import re
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rawattn.registry import cuda_folder
from tools.emulator import BuildError, EmulatorError, build, compile_unit, pack, run

pytestmark = pytest.mark.emulator

KERNELS = Path(__file__).parent / "emulator"
SIMT = (KERNELS / "simt.cu").read_text()
GEMM = (KERNELS / "gemm_sm80.cu").read_text()
SEEDS = range(8)


def replaced(text: str, old: str, new: str) -> str:
    assert old in text
    return text.replace(old, new, 1)


# ---- Threads, shared memory, warps, atomics ----


def block_sums(unit: str, seed: int, seconds: float = 60) -> list[float]:
    x, sums = np.ones(1000, np.float32), np.full(8, np.nan, np.float32)
    x.flags.writeable = False
    params = pack(x, sums, x.size)
    run(unit, "block_sums", params, 8, 128, 512, [x, sums], seed, seconds=seconds)
    return sums.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_block_sums(seed: int) -> None:
    assert block_sums(SIMT, seed) == [128.0] * 7 + [104.0]


SYNC_STAGED, SYNC_PARTIAL = "__syncthreads();  // staged", "__syncthreads();  // partial"
BROKEN = (  # old text, what takes its place, what the message says
    ("i < p.n ?", "i <= p.n ?", r"global load of 4 bytes .* byte 4000 of array 0, which has 4000"),
    ("p.sums[block", "p.sums[~0u - block", r"global store of 4 bytes .* outside every array"),
    ("p.sums[blockIdx.x] =", "*(float*)p.x =", "store of 4 bytes into array 0, which is read-only"),
    (
        "staged[threadIdx.x] =",
        "staged[threadIdx.x + 1] =",
        r"shared store of 4 bytes at dynamic \+ 512: outside the block's 512 bytes",
    ),
    ("+= partial[w]", "+= partial[w + 32]", r"index 3[2-5] is outside 'float \[32\]'"),
    ("float x = ", "float x = *(float*)((char*)staged + 2) + ", "not a multiple of 4"),
    (SYNC_STAGED, "if (threadIdx.x == 77) return;", "mask ffffffff, but lane 13 (has )?return"),
    (SYNC_STAGED, "if (threadIdx.x % 2) __syncthreads();", "divergence: this lane calls "),
    (SYNC_PARTIAL, "while (threadIdx.x == 0) __nanosleep(9);", "no end within the time limit"),
    (SYNC_PARTIAL, "__trap();", r"__trap\(\)"),
    ("bit /= 2) x", "bit /= 2) if (threadIdx.x < 16) x", "divergence: this lane calls "),
    ("0xffffffffu, x, bit", "0xffu, x, bit", "shuffle: mask 000000ff lacks the calling lane"),
)


@pytest.mark.parametrize(("old", "new", "message"), BROKEN)
def test_block_sums_broken(old: str, new: str, message: str) -> None:
    """Each defect is named, with its block, thread, access and source line."""
    line = SIMT[: SIMT.index(old)].count("\n") + 1
    with pytest.raises(EmulatorError, match=message) as caught:
        block_sums(replaced(SIMT, old, new), seed=3, seconds=0.3)
    text = str(caught.value)
    assert text.startswith("block_sums: ") and text.endswith("(seed 3)")
    assert re.search(r"block \(\d, 0, 0\) (thread \(\d+, 0, 0\) \[)?warp \d", text)
    places = [int(n) for n in re.findall(r"unit\.cu:(\d+) in block_sums", text)]
    assert any(line <= place <= line + 4 for place in places), text


@pytest.mark.parametrize("barrier", [SYNC_STAGED, SYNC_PARTIAL])
def test_missing_barrier_shows(barrier: str) -> None:
    unit = replaced(SIMT, barrier, "")
    want = block_sums(SIMT, 0)
    assert any(block_sums(unit, seed) != want for seed in SEEDS)


def test_same_seed_same_run() -> None:
    unit = replaced(SIMT, SYNC_PARTIAL, "")
    for seed in SEEDS:
        first, second = block_sums(unit, seed), block_sums(unit, seed)
        assert np.array_equal(first, second, equal_nan=True)


def test_last_block() -> None:
    """Blocks run side by side, in any order; an atomic tells which is the last."""
    x = np.arange(320, dtype=np.float32)
    for seed in SEEDS:
        partial, total = np.full(10, np.nan, np.float32), np.zeros(1, np.float32)
        arrived = np.zeros(1, np.uint32)
        params = pack(x, partial, arrived, total)
        run(SIMT, "last_block", params, 10, 32, 0, [x, partial, arrived, total], seed)
        assert total[0] == x.sum() and arrived[0] == 0


def test_warp_operations() -> None:
    x = np.random.default_rng(0).integers(-99, 99, 32).astype(np.int32)
    lane, out = np.arange(32), np.zeros((8, 32), np.int32)
    run(SIMT, "warp_operations", pack(x, out), 1, 32, 0, [x, out], seed=1)
    bits = np.uint32(1) << np.arange(32, dtype=np.uint32)
    same = ((x[:, None] & 3) == (x[None] & 3)) @ bits
    want = [
        x[lane // 8 * 8 + 5],
        np.where(lane >= 3, x[lane - 3], x),
        np.where(lane % 16 + 3 < 16, x[np.minimum(lane + 3, 31)], x),
        x[lane ^ 9],
        np.full(32, (x > 0) @ bits).astype(np.uint32).view(np.int32),
        np.full(32, 2),
        np.full(32, x.max()),
        same.astype(np.uint32).view(np.int32),
    ]
    assert np.array_equal(out, want)


def test_named_barriers() -> None:
    for seed in SEEDS:
        out = np.zeros(20, np.int32)
        run(SIMT, "named_barriers", pack(out, 20), 1, 64, 0, [out], seed)
        assert np.array_equal(out, np.arange(20) ** 2)
    unit = replaced(SIMT, "if (i > 0) ptx::bar_sync(2, 64);", "if (i > 0) ptx::bar_sync(2, 96);")
    with pytest.raises(
        EmulatorError, match=r"barrier 2: (64|96) threads expected here, (64|96) by"
    ):
        run(unit, "named_barriers", pack(out, 20), 1, 64, 0, [out], seed=0)


# ---- Conversions: the GPU's rounding, which ml_dtypes has too ----


def test_conversions() -> None:
    rng = np.random.default_rng(0)
    numbers = np.ldexp(rng.uniform(1, 2, 20000), rng.integers(-140, 127, 20000))
    halves = np.arange(-600, 600) + 0.5  # ties of e4m3 and float16, and more than e4m3 has
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        65519.99,
        65520,
        6e-8,
        2.98e-8,
        2.0**-10,
        464,
        448,
    ]
    x = np.concatenate([numbers, -numbers, halves, halves / 64, special]).astype(np.float32)
    bf16, f16, e4m3 = np.empty(x.size, "u2"), np.empty(x.size, "u2"), np.empty(x.size, "u1")
    back = np.empty(256, np.uint16)
    arrays = [x, bf16, f16, e4m3, back]
    run(SIMT, "conversions", pack(*arrays, x.size), 1, 64, 0, arrays, seed=0)
    with np.errstate(over="ignore"):
        want = x.astype(ml_dtypes.bfloat16), x.astype(np.float16)
        saturated = np.clip(x, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    for got, wanted in ((bf16, want[0]), (f16, want[1]), (e4m3, saturated)):
        nan = np.isnan(wanted.astype(np.float32))
        assert np.array_equal(got[~nan], wanted.view(got.dtype)[~nan])
        assert np.isnan(got.view(wanted.dtype)[nan].astype(np.float32)).all()
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
    assert np.array_equal(back.view(np.float16), every, equal_nan=True)


# ---- sm_80: cp.async, ldmatrix, mma.sync ----


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("trans_b", [False, True])
def test_gemm(dtype: type, trans_b: bool) -> None:
    """Integers come out exactly."""
    kind = "f16" if dtype is np.float16 else "bf16"
    unit = f"#define MMA mma_m16n8k16_{kind}\n#define TRANS_B {int(trans_b)}\n{GEMM}"
    m, n, k = 40, 32, 80
    for seed in SEEDS:
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-8, 9, shape).astype(dtype) for shape in ((m, k), (n, k)))
        given = np.ascontiguousarray(b.T) if trans_b else b
        c = np.full((m, n), np.nan, np.float32)
        params = pack(a, given, c, m, n, k)
        run(unit, "gemm_sm80", params, (3, 2), 32, 3072, [a, given, c], seed)
        assert np.array_equal(c, a.astype(np.float32) @ b.astype(np.float32).T)


# ---- Building ----


def test_compile_errors_name_the_source(tmp_path: Path) -> None:
    (tmp_path / "part.cuh").write_text("#pragma once\nint broken = unknown;\n")
    with pytest.raises(BuildError, match=r"part\.cuh:2:14"):
        compile_unit('#include "part.cuh"\n', "kernel", folders=(tmp_path,))


def test_objects_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By what goes into them: the unit, what it includes, flags."""
    (tmp_path / "part.cuh").write_text("constexpr int kValue = 1;\n")
    unit = """
struct P { int* x; };
#include "part.cuh"
extern "C" __global__ void set(const P p) { *p.x = kValue; }
"""
    first = compile_unit(unit, "set", folders=(tmp_path,))
    with monkeypatch.context() as patch:
        patch.setattr(build, "gcc", None)
        assert compile_unit(unit, "set", folders=(tmp_path,)) == first
    (tmp_path / "part.cuh").write_text("constexpr int kValue = 2;\n")
    assert compile_unit(unit, "set", folders=(tmp_path,)) != first
    x = np.zeros(1, np.int32)
    run(unit, "set", pack(x), 1, 1, 0, [x], seed=0, folders=(tmp_path,))
    assert x[0] == 2


TRANSLATIONS = {
    "extern __shared__ __align__(128) unsigned char s[];": (
        "unsigned char* const s = emu::dynamic_shared<unsigned char, 128>();"
    ),
    "__shared__ float x[2][N], y;": (
        "auto& x = emu::static_shared<48, float[2][N], 1>(); "
        "auto& y = emu::static_shared<49, float, 1>();"
    ),
    "__shared__ __align__(16) Pair<int, 3> t;": (
        "auto& t = emu::static_shared<48, Pair<int, 3>, 16>();"
    ),
    "k(const __grid_constant__ FwdParams p) {": "k(const FwdParams& p) {",
    "// of __shared__ memory, 3 blocks": "// of __shared__ memory, 3 blocks",
}


@pytest.mark.parametrize("line", TRANSLATIONS)
def test_translation(line: str) -> None:
    assert build.translate(line, 3) == TRANSLATIONS[line]


def functions(path: Path) -> dict[str, str]:
    """The signatures of the functions of namespace ptx, by name."""
    text = path.read_text()
    text = text[text.index("namespace ptx {") :]
    parameters = r"\(([^()]*(?:\([^()]*\)[^()]*)*)\)\s*\{"
    pattern = rf"^(?:__device__ __forceinline__|inline)\s+([\w: ]+?)\s+(\w+){parameters}"
    found = re.findall(pattern, text, re.M)
    return {
        name: " ".join(re.sub(r"\[\[.*?\]\]", "", f"{kind} {rest}").split())
        for kind, name, rest in found
    }


@pytest.mark.parametrize("name", sorted(p.name for p in cuda_folder().glob("ptx_*.cuh")))
def test_twins_have_the_same_functions(name: str) -> None:
    real, twin = functions(cuda_folder() / name), functions(build.INCLUDE / name)
    assert real and {function: twin.get(function) for function in real} == real


@pytest.mark.parametrize("name", sorted(p.name for p in KERNELS.glob("*.cu")))
def test_nvrtc_takes_these_kernels(name: str) -> None:
    """They are CUDA; so the sm_90 headers are known to compile before a kernel uses them."""
    nvrtc = pytest.importorskip("cuda.bindings.nvrtc")
    headers = sorted(cuda_folder().glob("*.cuh"))
    texts, names = [h.read_bytes() for h in headers], [h.name.encode() for h in headers]
    source = (KERNELS / name).read_bytes()
    made = nvrtc.nvrtcCreateProgram(source, name.encode(), len(names), texts, names)[1]
    options = [b"-arch=sm_90a", b"-std=c++17", b"-default-device", b"-DIS_8BIT=0"]
    status = nvrtc.nvrtcCompileProgram(made, len(options), options)[0]
    log = bytearray(nvrtc.nvrtcGetProgramLogSize(made)[1])
    nvrtc.nvrtcGetProgramLog(made, log)
    nvrtc.nvrtcDestroyProgram(made)
    assert int(status) == 0, log.decode()


@pytest.mark.parametrize(
    ("block", "smem", "cluster", "message"),
    [
        (1056, 0, 1, "a block of 1056 threads"),
        (128, 228 << 10, 1, "233472 bytes of dynamic shared memory"),
        (128, 0, 3, "no whole number of clusters"),
    ],
)
def test_refused_launches(block: int, smem: int, cluster: int, message: str) -> None:
    with pytest.raises(EmulatorError, match=f"block_sums: .*{message}"):
        run(SIMT, "block_sums", bytes(24), 8, block, smem, [], seed=0, cluster=cluster)
