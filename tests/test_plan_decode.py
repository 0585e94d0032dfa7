# SPDX-License-Identifier: Apache-2.0
"""Plans of decode_split: what is chosen, refused, and handed to the kernel."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.device import SMEM_KB, Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import decode
from rawattn.problem import CacheLayout, Mask, Scores
from rawattn.registry import all_configs
from tests.problems import decode_problem

H200 = Device.named("H200")
DECODE = decode_problem(mask=Mask(right=0))


def _with(**changes: object) -> PagedProblem:
    return dataclasses.replace(DECODE, **changes)  # type: ignore[arg-type]


@given(st.integers(1, 2**20), st.integers(0, 2**31 - 1))
def test_magic_divides(divisor: int, n: int) -> None:
    (_, magic), (_, shift) = decode._magic("x", divisor)
    for x in {n, n // divisor * divisor, max(0, n // divisor * divisor - 1), 2**31 - 1}:
        assert magic < 2**32
        assert x * magic >> shift == x // divisor


@given(st.integers(1, 200), st.integers(1, 300))
def test_columns_divide_the_lines_and_use_the_gpu(lines: int, blocks: int) -> None:
    columns = decode._columns(lines, blocks)
    assert lines % columns == 0
    assert columns <= blocks
    assert columns * (blocks // columns) >= (blocks - 1) / decode.LOCKSTEP - 1


def test_every_choice_is_compiled() -> None:
    seen = set()
    for arch in ("sm_80", "sm_89", "sm_90a", "sm_120"):
        device = dataclasses.replace(H200, arch=arch)
        compiled = {c for kernel, c in all_configs(arch) if kernel.name.startswith("decode")}
        assert all(c.smem_bytes <= SMEM_KB[arch] * 1024 for c in compiled)
        for head_dim in (64, 80, 128, 192, 256):
            for layout in CacheLayout:
                for page in (1, 8, 16, 48, 256):
                    for cache in ("bfloat16", "float8_e4m3fn", "int8"):
                        for max_q in (1, 4):
                            p = _with(
                                head_dim=head_dim,
                                value_dim=head_dim,
                                layout=layout,
                                page=page,
                                cache_dtype=cache,
                                max_q=max_q,
                            )
                            if decode.refuses(p, device) is None:
                                (launch,) = decode.launches(p, device)
                                assert launch.config in compiled, (p, arch)
                                seen.add((arch, launch.config))
    assert len(seen) > 40


@pytest.mark.parametrize(
    ("problem", "chosen"),
    [
        (DECODE, {"tma": True, "features": False, "cluster": 1}),
        (_with(page=24), {"tma": False, "unaligned": False}),
        (_with(leftpad=True), {"tma": False, "unaligned": False}),
        (_with(copy_bytes=8, max_q=9), {"tma": False, "unaligned": True, "row_tiles": 1}),
        (_with(copy_bytes=2, head_dim=1, value_dim=1), {"unaligned": True, "head_dim": 128}),
        (_with(layout=CacheLayout.X_MAJOR, page=4), {"unaligned": True, "xmajor": False}),
        (_with(layout=CacheLayout.X_MAJOR, page=8), {"unaligned": False, "xmajor": True}),
        (
            _with(layout=CacheLayout.X_MAJOR, page=8, cache_dtype="int8"),
            {"unaligned": True, "cache": "int8"},
        ),
        (_with(head_dim=96, value_dim=96), {"tma": False, "head_dim": 128}),
        (_with(mask=Mask(left=100, right=0)), {"tma": True, "features": True}),
        (_with(scores=Scores(softcap=True)), {"features": True}),
        (_with(scores=Scores(sink=True)), {"features": False}),
        (_with(tree=True, max_q=2), {"features": True}),
        (_with(batch=1), {"cluster": 8}),
        (_with(batch=2), {"cluster": 4}),
        (_with(batch=4), {"cluster": 2}),
        (_with(batch=8, max_k=8192), {"cluster": 2}),
        (_with(batch=8, max_k=8193), {"cluster": 1}),
        (_with(batch=9), {"cluster": 1}),
        (_with(batch=1, split=512), {"cluster": 1}),
        (_with(batch=1, max_k=1 << 16), {"cluster": 8}),
        (_with(batch=1, max_k=1 << 20), {"cluster": 1}),
        (_with(max_q=2), {"features": True, "tma": True, "row_tiles": 1}),
        (_with(max_q=4), {"row_tiles": 2, "features": True, "staged": False}),
        (_with(max_q=4, split=512), {"rows": 64, "unit": 64, "cluster": 1}),
        (_with(max_q=4, batch=15), {"rows": 64, "cluster": 1}),
        (_with(max_q=5), {"rows": 64, "unit": 64, "cluster": 1}),
        (_with(max_q=16, batch=1), {"rows": 64, "cluster": 8}),
        (_with(max_q=4, page=24), {"tma": False, "row_tiles": 4}),
        (_with(max_q=2, cache_dtype="float8_e4m3fn"), {"tma": True, "row_tiles": 4, "unit": 16}),
        (_with(max_q=2, cache_dtype="float8_e4m3fn", mask=Mask()), {"row_tiles": 1, "tma": True}),
        (_with(max_q=9, cache_dtype="float8_e4m3fn"), {"tma": True, "row_tiles": 4}),
        (_with(q_heads=72, cache_dtype="float8_e4m3fn"), {"tma": True, "row_tiles": 4}),
        (_with(max_q=9, cache_dtype="float8_e4m3fn", split=512), {"tma": False, "row_tiles": 1}),
        (_with(max_q=9, cache_dtype="float8_e4m3fn", page=24), {"tma": False, "row_tiles": 1}),
        (_with(max_q=9, cache_dtype="int8"), {"tma": False, "row_tiles": 1}),
        (
            _with(max_q=9, cache_dtype="float8_e4m3fn", layout=CacheLayout.X_MAJOR),
            {"tma": False, "row_tiles": 1},
        ),
        (_with(batch=1, q_heads=4, kv_heads=1), {"cluster": 8}),
        (_with(batch=1, q_heads=4, kv_heads=1, max_k=1 << 15), {"cluster": 1}),
        (_with(cache_dtype="int8"), {"element": "fp16", "cache": "int8", "heads": 2, "unit": 16}),
        (_with(cache_dtype="int8", batch=31), {"heads": 1, "unit": 32}),
        (_with(cache_dtype="int8", max_k=4095), {"heads": 1}),
        (_with(cache_dtype="int8", max_k=2**14 + 1), {"heads": 1}),
        (_with(cache_dtype="int8", layout=CacheLayout.HND), {"heads": 1}),
        (_with(cache_dtype="int8", q_heads=40), {"heads": 1}),
        (_with(cache_dtype="int8", q_heads=28, kv_heads=7), {"heads": 1}),
        (_with(head_dim=64, value_dim=64), {"heads": 2, "unit": 16}),
        (_with(head_dim=64, value_dim=64, max_q=2), {"heads": 1, "features": True}),
        (_with(cache_dtype="int8", batch=1), {"cluster": 1}),
        (_with(cache_dtype="float8_e4m3fn", batch=1), {"cluster": 8, "cache": "e4m3"}),
    ],
)
def test_config(problem: PagedProblem, chosen: dict[str, object]) -> None:
    (launch,) = decode.launches(problem, H200)
    assert {name: getattr(launch.config, name) for name in chosen} == chosen
    assert (len(launch.maps) == 2) == getattr(launch.config, "tma", True)


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize(("page", "batch"), [(16, 1), (16, 32), (32, 32)])
def test_x_major_copies(page: int, batch: int, cache_dtype: str) -> None:
    problem = _with(
        layout=CacheLayout.X_MAJOR, page=page, batch=batch, max_k=1024, cache_dtype=cache_dtype
    )
    (launch,) = decode.launches(problem, H200)
    assert len(launch.maps) == 2
    item = 2 if cache_dtype == "bfloat16" else 1
    for wanted in launch.maps:
        assert math.prod(wanted.box) == 16 * 128, "what a stage has room for"
        whole = page == 16 or wanted.field == "k_map"
        assert wanted.box[0] * item == (256 if whole else 16 * item), wanted


@pytest.mark.parametrize(
    "problem",
    [
        _with(layout=CacheLayout.X_MAJOR, page=4, kv_heads=16),
        _with(layout=CacheLayout.X_MAJOR, page=1, kv_heads=32),
        _with(layout=CacheLayout.X_MAJOR, page=4, kv_heads=32, max_q=2),
    ],
)
def test_odd_pages_that_are_its_own(problem: PagedProblem) -> None:
    assert decode.refuses(problem, H200) is None


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (_with(dtype="float32", cache_dtype="float32"), "dtype float32"),
        (_with(cache_dtype="float16"), "a cache of float16"),
        (_with(head_dim=512), "head_dim=512"),
        (_with(mask=Mask(right=0, top_left=True)), "top left"),
        (
            _with(layout=CacheLayout.X_MAJOR, page=4, kv_heads=32),
            "x-major pages of 4 tokens for one row a KV head: paged_v2 takes less time",
        ),
    ],
)
def test_refusals(problem: PagedProblem, words: str) -> None:
    reason = decode.refuses(problem, H200)
    assert reason is not None and words in reason


def test_workspace_holds_two_parts_a_worker_or_every_part_of_a_fixed_split() -> None:
    (launch,) = decode.launches(DECODE, H200)
    assert launch.grid == 128  # 8 columns of 16 on 132 SMs
    assert launch.counters == 2 * launch.grid * launch.config.warps  # each of which may be alone
    (staged,) = decode.launches(_with(max_q=4, page=24), H200)
    assert staged.counters == 2 * staged.grid
    (cluster,) = decode.launches(_with(batch=4), H200)
    assert cluster.counters == cluster.workspace_bytes == 0
    assert launch.workspace_bytes == launch.counters * 8 * 64 * 16
    (fixed,) = decode.launches(_with(split=500), H200)
    assert dict(fixed.scalars)["span"] == 512 // fixed.config.unit
    parts = 32 * 8 * 8  # sequences, heads, parts of 512 of 4096 keys
    assert fixed.kernel == "decode_sm90"
    assert fixed.counters == parts * 8  # one a warp
    assert fixed.workspace_bytes == parts * 4 * 64 * (128 + 4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_a_fixed_split_sums_alike_however_long_the_longest_query_is(arch: str) -> None:
    device = dataclasses.replace(H200, arch=arch)
    for cache in ("bfloat16", "float8_e4m3fn", "int8"):
        for layout in CacheLayout:
            for head_dim in (64, 128, 256):
                sums = set()
                for max_q in (1, 4, 16):
                    p = _with(
                        cache_dtype=cache,
                        layout=layout,
                        head_dim=head_dim,
                        value_dim=head_dim,
                        max_q=max_q,
                        split=256,
                    )
                    (launch,) = decode.launches(p, device)
                    c = launch.config
                    sums.add((launch.kernel, c.unit, c.row_tiles, dict(launch.scalars)["span"]))
                assert len(sums) == 1, (cache, layout, head_dim, sums)
