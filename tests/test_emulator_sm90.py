# SPDX-License-Identifier: Apache-2.0
"""The emulator's sm_90 instructions: one by one against NumPy, and together in a pipelined GEMM."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tools.emulator import EmulatorError, pack, run, tensor_map

pytestmark = pytest.mark.emulator

KERNELS = Path(__file__).parent / "emulator"
INSTRUCTIONS = (KERNELS / "instructions_sm90.cu").read_text()
BF16, E4M3 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn
SEEDS = range(4)
Ints = tuple[int, ...]


def normal(*shape: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(len(shape)).standard_normal(shape, np.float32).astype(dtype)


def with_macros(**macros: object) -> str:
    return "".join(f"#define {name} {value}\n" for name, value in macros.items()) + INSTRUCTIONS


# ---- TMA ----


def swizzled(offset: np.ndarray, swizzle: int) -> np.ndarray:
    """Where a byte goes: 16-byte chunks change places within a pattern of 8 rows."""
    mask = {0: 0, 16: 0, 32: 1, 64: 3, 128: 7}[swizzle]
    return offset ^ (offset >> 7 & mask) << 4


def moved(source: np.ndarray, target: np.ndarray, box: Ints, load: Ints, store: Ints) -> np.ndarray:
    """A box of zeros with what it finds in `source` at `load`; stored into `target` at `store`."""
    found = np.zeros(box, source.dtype)
    for index in np.ndindex(*box):
        for array, start in ((source, load), (target, store)):
            at = tuple(a + i for a, i in zip(start, index, strict=True))
            if all(0 <= i < n for i, n in zip(at, array.shape, strict=True)):
                if array is source:
                    found[index] = source[at]
                else:
                    target[at] = found[index]
    return found


@pytest.mark.parametrize(
    ("shape", "box", "load", "store", "swizzle"),
    [
        ((20, 96), (16, 64), (3, 16), (0, 0), 128),
        ((20, 96), (16, 64), (-5, 64), (10, -8), 128),
        ((5, 9, 40), (2, 8, 32), (4, 3, 8), (0, 0, 9), 64),
        ((3, 4, 5, 16), (2, 1, 8, 16), (-1, 2, 1, 0), (1, 1, -2, 0), 32),
        ((2, 3, 4, 5, 24), (1, 2, 2, 3, 24), (1, 1, 3, 4, 7), (0, 2, 0, 0, -16), 0),
    ],
)
def test_tensor_copies(shape: Ints, box: Ints, load: Ints, store: Ints, swizzle: int) -> None:
    """Boxes of 2 to 5 dimensions, inside and partly outside, in every swizzle."""
    x = np.repeat(normal(*shape, dtype=BF16), 2, axis=0)[::2]  # rows with gaps
    expected = np.full(shape, 7, BF16)
    want = moved(x, expected, box, load, store)
    image = np.empty(want.nbytes, np.uint8)
    image[swizzled(np.arange(want.nbytes), swizzle)] = want.reshape(-1).view(np.uint8)
    pad = (0,) * (5 - len(box))
    for seed in SEEDS:
        out, seen = np.full(shape, 7, BF16), np.empty(want.nbytes // 4, np.uint32)
        maps = tensor_map(x, box, swizzle=swizzle), tensor_map(out, box, swizzle=swizzle)
        params = pack(*maps, seen, *load[::-1], *pad, *store[::-1], *pad, want.nbytes)
        unit = with_macros(RANK=len(box))
        run(unit, "box", params, 1, 64, want.nbytes, [x, out, seen], seed)
        assert np.array_equal(seen.view(np.uint8), image)
        assert np.array_equal(out, expected)


def test_tensor_reduction() -> None:
    x, sums, seen = normal(8, 32), normal(8, 32) + 1, np.empty(256, np.uint32)
    want = sums + x
    maps = tensor_map(x, (8, 32)), tensor_map(sums, (8, 32))
    params = pack(*maps, seen, *(0,) * 10, x.nbytes)
    unit = with_macros(RANK=2, STORE="tma_reduce_add")
    run(unit, "box", params, 1, 32, x.nbytes, [x, sums, seen], seed=0)
    assert np.array_equal(sums, want)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": (8, 16), "swizzle": 128}, "32 bytes, the swizzle 128"),
        ({"box": (300, 64)}, "accepted are 1 to 256"),
        ({"box": (8, 3)}, "accepted are multiples of 16"),
        ({"array": normal(8, 36, dtype=BF16)}, "strides"),
        ({"array": normal(8, 72, dtype=BF16)[:, 1:65]}, "address"),
        ({"array": normal(8, 64, dtype=BF16).T}, "not its contiguous axis"),
    ],
)
def test_tensor_map_refuses(change: dict, message: str) -> None:
    arguments = {"array": normal(8, 64, dtype=BF16), "box": (8, 8), "swizzle": 0} | change
    with pytest.raises(ValueError, match=message):
        tensor_map(arguments["array"], arguments["box"], swizzle=arguments["swizzle"])


def test_contiguous_copies() -> None:
    for seed in SEEDS:
        x, copy, sums = normal(60), np.zeros(60, np.float32), normal(60)
        want = sums + (x + 1)
        params = pack(x, copy, sums, 60)
        run(INSTRUCTIONS, "bulk", params, 1, 64, 240, [x, copy, sums], seed)
        assert np.array_equal(copy, x + 1) and np.array_equal(sums, want)


# ---- Clusters, stmatrix ----


def test_distributed_shared_memory() -> None:
    ranks = np.arange(8, dtype=np.float32) % 4
    before = (ranks - 1) % 4
    for seed in SEEDS:
        arrays = [np.full((8, 4), np.nan, np.float32) for _ in range(3)]  # got, read, sent
        run(INSTRUCTIONS, "ring", pack(*arrays), 8, 32, 0, arrays, seed, cluster=4)
        want = before[:, None] + np.arange(4) / 4
        assert all(np.array_equal(x, want) for x in arrays)


def test_stmatrix() -> None:
    fragments = np.random.default_rng(0).integers(0, 1 << 32, (32, 4), dtype=np.uint32)
    plain, transposed = (np.empty((4, 8, 8), np.uint16) for _ in range(2))
    elected = np.zeros(1, np.int32)
    arrays = [fragments, plain, transposed, elected]
    run(INSTRUCTIONS, "matrices", pack(*arrays), 1, 32, 0, arrays, seed=5)
    # Lane l holds columns 2 (l % 4) and the next of row l / 4.
    want = fragments.T.copy().view(np.uint16).reshape(4, 8, 8)
    assert np.array_equal(plain, want)
    assert np.array_equal(transposed, want.transpose(0, 2, 1))
    assert elected[0] == 1


# ---- wgmma ----


class Image:
    """An operand, rows x K, as it lies in shared memory; span 16 is no swizzle."""

    def __init__(self, x: np.ndarray, span: int, mn_major: bool) -> None:
        rows, depth = x.shape
        size = x.itemsize
        row, k = np.indices(x.shape)
        if span == 16:  # 8 x 16-byte blocks, those of one step along K apart from the next's
            self.leading, self.stride, self.step = rows * 16, 128, rows * 32
            inner = k % 8 * 16 + row % 8 * size if mn_major else row % 8 * 16 + k * size % 16
            across = k // 8 if mn_major else k * size // 16
            offset = across * self.leading + row // 8 * self.stride + inner
        elif mn_major:
            width = span // size
            self.leading, self.stride, self.step = depth * span, 8 * span, 16 * span
            inner = k % 8 * span + row % width * size
            offset = row // width * self.leading + k // 8 * self.stride + inner
        else:
            self.leading, self.stride, self.step = 16, 8 * span, 32
            offset = row // 8 * self.stride + row % 8 * span + k * size
        self.bytes = np.zeros(-(-x.nbytes // 1024) * 1024, np.uint8)
        at = swizzled(offset[..., None] + np.arange(size), span)
        self.bytes[at] = np.ascontiguousarray(x).view(np.uint8).reshape(*x.shape, size)


def fragments(a: np.ndarray, steps: int) -> np.ndarray:
    """A operand of each step and thread: four registers."""
    data = a.view(np.uint8)
    step, thread, i, byte = np.indices((steps, 128, 4, 4))
    row = thread // 32 * 16 + thread % 32 // 4 + i % 2 * 8
    column = 32 * step + thread % 4 * 4 + i // 2 * 16 + byte
    return np.ascontiguousarray(data[row, column]).view(np.uint32)


SPANS = {16: 0, 32: 3, 64: 2, 128: 1}  # bytes: ptx::Swizzle


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize(
    ("dtype", "trans_a", "trans_b", "registers", "n"),
    [
        (BF16, 0, 0, 0, 64),
        (np.float16, 0, 1, 0, 128),
        (BF16, 1, 1, 0, 64),
        (BF16, 0, 0, 1, 16),
        (np.float16, 0, 1, 1, 256),
        (E4M3, 0, 0, 0, 96),
        (E4M3, 0, 0, 1, 32),
    ],
)
def test_wgmma(  # type: ignore[no-untyped-def]
    dtype, trans_a: int, trans_b: int, registers: int, n: int, span: int
) -> None:
    """Every type, major and swizzle, with A from shared memory and from registers."""
    if trans_b and n % (span // 2):
        pytest.skip(f"{n} columns are no whole pattern")
    item = np.dtype(dtype).itemsize
    depth = 64 // item if span == 16 or (trans_a and trans_b) else span // item
    rng = np.random.default_rng(n)
    a = rng.integers(-4, 5, (64, depth)).astype(dtype)
    b = rng.integers(-4, 5, (n, depth)).astype(dtype)
    image_a, image_b = Image(a, span, bool(trans_a)), Image(b, span, bool(trans_b))
    steps = depth * item // 32
    held = fragments(a, steps)
    unit = with_macros(
        N=n,
        TYPE={BF16: "bf16", np.float16: "f16", E4M3: "e4m3"}[dtype],
        TRANS_A=trans_a,
        TRANS_B=trans_b,
        A_IN_REGISTERS=registers,
        IS_8BIT=int(item == 1),
    )
    for seed in range(2):
        d = np.full((64, n), np.nan, np.float32)
        sizes = len(image_a.bytes), len(image_b.bytes)
        steps_of = [x for m in (image_a, image_b) for x in (m.leading, m.stride, m.step)]
        params = pack(image_a.bytes, image_b.bytes, held, d, *sizes, *steps_of, steps, SPANS[span])
        arrays = [image_a.bytes, image_b.bytes, held, d]
        run(unit, "product", params, 1, 128, sum(sizes), arrays, seed)
        assert np.array_equal(d, a.astype(np.float32) @ b.astype(np.float32).T)


FENCE = "  ptx::fence_proxy_async();\n  __syncthreads();\n  ptx::setmaxnreg"
DESCRIPTOR = "ptx::wgmma_descriptor(ptx::shared_address(image)"
ACCUMULATE = "step > 0);\n#endif"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (FENCE, "  __syncthreads();\n  ptx::setmaxnreg", "without fence.proxy.async"),
        (DESCRIPTOR, f"1ull << 50 | {DESCRIPTOR}", "base offset"),
        (DESCRIPTOR, f"1ull << 14 | {DESCRIPTOR}", "reserved bits"),
        (ACCUMULATE, "threadIdx.x > 3);\n#endif", "differ from lane 0"),
        (ACCUMULATE, "threadIdx.x > 31);\n#endif", "another warp of the warpgroup"),
        ("setmaxnreg_inc<232>", "setmaxnreg_inc<230>", "230 registers"),
        ("p.steps; ++step", "p.steps + 9; ++step", "outside the block"),
    ],
)
def test_wgmma_refuses(old: str, new: str, message: str) -> None:
    a = np.zeros((64, 64), BF16)
    image = Image(a, 128, False)
    unit = with_macros(N=64, IS_8BIT=0)
    assert unit.count(old) == 1
    d = np.empty((64, 64), np.float32)
    step = [image.leading, image.stride, image.step]
    params = pack(image.bytes, image.bytes, image.bytes, d, 8192, 8192, *step, *step, 4, SPANS[128])
    with pytest.raises(EmulatorError, match=message):
        run(unit.replace(old, new), "product", params, 1, 128, 16384, [image.bytes, d], seed=0)
