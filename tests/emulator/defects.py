# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects, one at a time, in copies of kernels; each must show within a few schedules.

``python -m tests.emulator.defects`` prints the catch table.
"""

from __future__ import annotations

import argparse
import functools
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np

from rawattn import registry
from rawattn.testing import Case, Op, Record, assert_close, expected, tensors
from rawattn.testing import run as run_op
from tests.emulator import cache_defects
from tools.emulator import BuildError, EmulatorError, available, pack, run, tensor_map
from tools.emulator.attention import attention

SEEDS = 10  # schedules within which a defect must show
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Defect:
    """`old`, a regular expression, becomes `new` wherever it stands in `file`."""

    what: str
    file: str
    old: str
    new: str
    run: Callable[
        [Path, int], None
    ]  # (folder of the sources, seed); raises where something is wrong

    def apply(self, folder: Path) -> None:
        path = folder / self.file
        text, count = re.subn(self.old, self.new, path.read_text())
        if count == 0:
            raise LookupError(
                f"{self.what}: {self.file} no longer has {self.old!r}; adapt the defect"
            )
        path.write_text(text)

    def caught(self) -> tuple[int, str] | None:
        """The first seed that shows it, and what it says."""
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name) / "kernels"
            shutil.copytree(registry.cuda_folder(), folder)
            for source in HERE.glob("*.cu"):
                shutil.copy(source, folder)
            self.apply(folder)
            for seed in range(SEEDS):
                try:
                    self.run(folder, seed)
                except BuildError:
                    raise
                except (EmulatorError, AssertionError) as error:
                    return seed, " ".join(str(error).split())
        return None


# ---- fwd_sm80 ----


@functools.cache
def _expected(case: Case):  # type: ignore[no-untyped-def]
    return expected(tensors(case))


def forward(case: Case, folder: Path, seed: int) -> None:
    options = {"seeds": (seed,), "kernels": folder, "backend": "fwd_sm80"}
    op = Op(name="defect", call=functools.partial(attention, **options))
    assert_close(run_op(op, tensors(case)), _expected(case), case, Record())


def case(q_len: int, k_len: int, head_dim: int, value_dim: int) -> Case:
    return Case(
        q_lens=(q_len,),
        k_lens=(k_len,),
        q_heads=4,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=value_dim,
        causal=True,
    )


two_stages = functools.partial(forward, case(75, 200, 56, 40))
one_stage = functools.partial(forward, case(140, 130, 88, 72))  # with rows that see no key
pairs = functools.partial(forward, case(70, 140, 136, 160))  # two warps share rows

KERNEL = "fwd_sm80.cu"
WAIT, SYNC = r"ptx::cp_async_wait_group<0>\(\);", r"__syncthreads\(\);"
TILE = rf"(\n    ){WAIT}(\n    ){SYNC}(  //)"  # what is waited for before a tile
V_OF_TILE = rf"(\n      ){WAIT}(\n      ){SYNC}(  //)"  # and before its V, with one stage
START = r"(?=  FwdSm80Warp<C> warp\()"

SM80 = {
    two_stages: [
        ("no wait for a tile", KERNEL, TILE, r"\1__syncthreads();\3"),
        ("no barrier before a tile", KERNEL, TILE, r"\1ptx::cp_async_wait_group<0>();\3"),
        ("a group too many pending", KERNEL, r"(\n    ptx::cp_async_wait_group)<0>", r"\1<1>"),
        ("fills the stage in use", KERNEL, r"\[1 - stage\]", "[stage]"),
        (
            "V of the other stage",
            KERNEL,
            r"accumulate\(smem, stage,",
            "accumulate(smem, 1 - stage,",
        ),
        ("no barrier before Q", KERNEL, rf"{SYNC}(\s+#pragma unroll\s+for \(int step)", r"\1"),
        ("row bound of copies", "tile.cuh", r"\br < rows", "r <= rows"),
        ("column bound of copies", "tile.cuh", r"\b(c|col\(\)) < cols", r"\1 <= cols"),
        ("copies do not step back", "tile.cuh", r"kBack = T::kRows", "kBack = 0"),
        ("V with the strides of K", KERNEL, r"stride_v_row, p.val", "stride_k_row, p.val"),
        ("KV head of the query head", KERNEL, r"kv_head = [^;]*;", "kv_head = tile.q_head;"),
        ("query tile off by one", "schedule.cuh", r"m_blocks - 1 - ", "m_blocks - "),
        (
            "tiles end too early",
            "mask.cuh",
            r"ceil_div\((keys.end\(last_row\)),",
            r"ceil_div(\1 - 63,",
        ),
        ("diagonal off by one", "mask.cuh", r"\+ right \+ 1\b", "+ right + 2"),
        ("row bound of out", KERNEL, r"if \(r < rows\)", "if (r <= rows)"),
        ("column bound of out", KERNEL, r"min\((first_col\(\) \+ kCols), p.*\);", r"\1;"),
        ("row bound of lse", KERNEL, r"(2 \* kMTiles && row) <", r"\1 <="),
        ("no __syncwarp before out", KERNEL, r"__syncwarp\(\);(\s+auto\* out)", r"\1"),
        ("scores not cleared", KERNEL, r"s\[mt\]\[nt\]\[e\] = 0.f;", ";"),
        ("out not cleared", KERNEL, r"out\[mt\]\[ot\]\[e\] = 0.f;", ";"),
        ("misaligned ldmatrix", "tile.cuh", r"lane / 16 \* 8\]\);", "lane / 16 * 4]);"),
        ("V not transposed", KERNEL, r"ldmatrix_x4_trans", "ldmatrix_x4"),
        ("K fragments in V's order", "tile.cuh", r"lane / 8 % 2 \* 8", "lane / 16 * 8"),
        ("half of the row maximum", "softmax.cuh", r"return fmaxf\(x, __shfl.*\);", "return x;"),
        ("half of the row sum", "softmax.cuh", r"return x \+ __shfl_xor.*;", "return x;"),
        (
            "divergent shuffle",
            "softmax.cuh",
            r"return (x \+ __shfl)",
            r"if (threadIdx.x & 2) return x; return \1",
        ),
        ("mask without all lanes", "softmax.cuh", r"(x \+= __shfl_xor_sync)\(0xffff", r"\1(0x"),
        ("out not rescaled", "softmax.cuh", r"(\[2 \* half\] \*=) alpha.*;", r"\1 1.f;"),
        ("lanes leave early", KERNEL, START, "if (threadIdx.x % 32 == 31) return;\n"),
        ("warps leave early", KERNEL, START, "if (threadIdx.x / 32 == 3) return;\n"),
    ],
    one_stage: [
        ("no wait for V", KERNEL, V_OF_TILE, r"\1__syncthreads();\3"),
        ("no barrier before V", KERNEL, V_OF_TILE, r"\1ptx::cp_async_wait_group<0>();\3"),
        (
            "first group not committed",
            KERNEL,
            r"ptx::cp_async_commit_group\(\);(\s+if \(thr)",
            r"\1",
        ),
        ("tail rows of V not zeroed", KERNEL, r"copy_part<!kMasked>", "copy_part<true>"),
        ("no guard of empty rows", "softmax.cuh", r"fmaxf\(max, -kLargest\)", "max"),
    ],
    pairs: [
        ("pair: no barrier in exchange", KERNEL, r"\n    sync_pair\(\);\n", "\n"),
        ("pair: no barrier before P", KERNEL, r"\n      sync_pair\(\);\n", "\n"),
        ("pair: one barrier for all", KERNEL, r"1 \+ threadIdx.x / 64", "1"),
        ("pair: barrier of one warp", KERNEL, r"/ 64, 64\)", "/ 64, 32)"),
    ],
}

# ---- the pipelined GEMM with the instructions of sm_90 ----


def gemm(folder: Path, seed: int) -> None:
    unit = (folder / "gemm_sm90.cu").read_text()
    m, n, k = 100, 72, 200
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(ml_dtypes.bfloat16) for shape in ((m, k), (n, k)))
    c = np.full((m, n), np.nan, ml_dtypes.bfloat16)
    boxes = ((a, (64, 64)), (b, (32, 64)), (c, (64, 64)))
    params = pack(*(tensor_map(x, box, swizzle=128) for x, box in boxes), -(-k // 64)).ljust(448)
    for x in (a, b):
        x.flags.writeable = False
    smem = 2 * 2 * 64 * 64 * 2 + 64 * 64 * 2 + 1024
    run(unit, "gemm_sm90", params, (2, 2), 160, smem, [a, b, c], seed, cluster=2)
    want = a.astype(np.float32) @ b.astype(np.float32).T
    error = np.abs(c.astype(np.float32) - want).max() / np.abs(want).max()
    assert error < 2.0**-7, f"relative error {error}"


RELEASE = r"( +if \(threadIdx.x < kCluster\).*;\n)"
LAST_SYNC = r"  ptx::barrier_cluster_arrive\(\);  // nobody.*\n  ptx::barrier_cluster_wait\(\);\n"
FIRST_SYNC = r"ptx::barrier_cluster_arrive\(\);\n  ptx::barrier_cluster_wait\(\);(\n  if)"
SM90 = [
    ("parity of full", r"s.full\[stage\]\), parity\)", "s.full[stage]), parity ^ 1)"),
    ("parity of empty", r"parity \^ 1\)", "parity)"),
    ("no wait for empty", r"wait\(ptx::shared_address\(&s.empty.*\n", "\n"),
    ("no wait for full", r"wait\(ptx::shared_address\(&s.full.*\n", "\n"),
    ("expects too few bytes", r"kN \* 64 \* 2\)", "kN * 64)"),
    ("expects too many bytes", r"kN \* 64 \* 2\)", "kN * 64 * 4)"),
    ("released before the wait", rf"( +ptx::wgmma_wait_group<0>\(\);\n){RELEASE}", r"\2\1"),
    ("released to this block alone", r"ptx::mapa\(empty, threadIdx.x\)", "empty"),
    ("released by one lane too many", r"threadIdx.x < kCluster", "threadIdx.x <= kCluster"),
    ("released by every warp", r"threadIdx.x( < kCluster|\)\);)", r"threadIdx.x % 32\1"),
    ("no wgmma.fence", r"ptx::wgmma_fence\(\);", ""),
    ("no wgmma.commit_group", r"ptx::wgmma_commit_group\(\);", ""),
    ("no wgmma.wait_group", r"ptx::wgmma_wait_group<0>\(\);", ""),
    ("a wgmma group too many pending", r"wgmma_wait_group<0>", "wgmma_wait_group<1>"),
    ("accumulates on nothing", r"step > 0 \|\| k > 0", "true"),
    ("wrong swizzle", r"1024, ptx::Swizzle::b128\)", "1024, ptx::Swizzle::b64)"),
    ("wrong stride", r"b \+ 32 \* k, 16, 1024", "b + 32 * k, 16, 512"),
    ("wrong step along K", r"a \+ 32 \* k", "a + 16 * k"),
    ("wrong swizzle of c", r"row % 8 \* 16", "row % 4 * 16"),
    ("no proxy fence before the store", r"ptx::fence_proxy_async\(\);", ""),
    ("no barrier before the store", r"ptx::bar_sync\(1, 128\);", ""),
    ("barrier of too many threads", r"bar_sync\(1, 128\)", "bar_sync(1, 160)"),
    ("no wait_group.read", r"ptx::bulk_wait_group_read<0>\(\);", ""),
    ("store not committed", r"ptx::bulk_commit_group\(\);", ""),
    ("no fence.mbarrier_init", r"ptx::fence_mbarrier_init\(\);", ""),
    ("too many arrivals awaited", r"s.empty\[i\]\), kCluster", "s.empty[i]), kCluster + 1"),
    ("no cluster barrier at the start", FIRST_SYNC, r"__syncthreads();\1"),
    ("no cluster barrier at the end", LAST_SYNC, ""),
    ("multicast to one block", r"full, 3, 64", "full, 1, 64"),
    ("coordinates swapped", r"64 \* step, (64 \* blockIdx.x)", r"\1, 64 * step"),
    ("half of b misplaced", r"kN / kCluster \* 64\)", "kN / kCluster * 32)"),
    ("shared memory not aligned", r"__align__\(1024\) unsigned", "__align__(16) unsigned"),
    ("two producers", r"threadIdx.x == 128\)", "threadIdx.x < 130)"),
]

DEFECTS = [
    Defect(what=what, file=file, old=old, new=new, run=probe)
    for probe, table in (*SM80.items(), *cache_defects.TABLES.items())
    for what, file, old, new in table
]
DEFECTS += [Defect(what=w, file="gemm_sm90.cu", old=o, new=n, run=gemm) for w, o, n in SM90]


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    if why_not := available():
        print(f"tests.emulator.defects: {why_not}", file=sys.stderr)
        return 1
    missed = 0
    for defect in DEFECTS:
        caught = defect.caught()
        missed += caught is None
        seed, message = caught or ("-", "NOT CAUGHT")
        print(f"{defect.file:14} {defect.what:32} seed {seed}: {message[:200]}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
