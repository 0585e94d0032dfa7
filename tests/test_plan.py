# SPDX-License-Identifier: Apache-2.0
"""The planner, on a machine without a GPU: what it chooses, that all work is covered, what it
refuses.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import registry
from rawattn.device import DEVICES, Device
from rawattn.plan import Launch, Plan, configs, plan
from rawattn.problem import Mask, Problem, Scores, Unsupported
from rawattn.testing.strategies import plannable
from tools import emulator

H200 = Device.named("H200")
PROBLEM = Problem(
    dtype="bfloat16",
    batch=2,
    q_heads=8,
    kv_heads=2,
    head_dim=128,
    value_dim=128,
    max_q=1000,
    max_k=1000,
)
devices = st.sampled_from(list(DEVICES.values()))


def longest_first(index: int, m_blocks: int, pairs: int, head_group: int) -> tuple[int, int]:
    """cuda/schedule.cuh in Python: (query tile, pair of sequence and head) of a block."""
    first = index // (m_blocks * head_group) * head_group
    width = min(head_group, pairs - first)
    rest = index - first * m_blocks
    return m_blocks - 1 - rest // width, first + rest % width


def launch_of(made: Plan) -> Launch:
    (launch,) = made.launches
    return launch


# ---- every work item, once -----------------------------------------------------------------------


@given(
    batch=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    max_q=st.integers(1, 700),
    max_k=st.integers(0, 1 << 20),
    head_dim=st.integers(1, 256),
    device=devices,
)
def test_every_query_tile_has_one_block(
    batch: int, kv_heads: int, group: int, max_q: int, max_k: int, head_dim: int, device: Device
) -> None:
    problem = Problem(
        dtype="float16",
        batch=batch,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=head_dim,
        max_q=max_q,
        max_k=max_k,
    )
    launch = launch_of(plan(problem, device, "fwd_sm80"))
    scalars = dict(launch.scalars)
    m_blocks, pairs = scalars["m_blocks"], batch * problem.q_heads
    assert (m_blocks - 1) * launch.config.block_m < max_q <= m_blocks * launch.config.block_m
    tiles = Counter(
        longest_first(i, m_blocks, pairs, scalars["head_group"]) for i in range(launch.grid)
    )
    assert set(tiles.values()) == {1}
    assert set(tiles) == {(m, pair) for m in range(m_blocks) for pair in range(pairs)}


WALK = """
#include "schedule.cuh"
extern "C" __global__ void walk(const __grid_constant__ FwdParams p) {
  const QueryTile tile = longest_first(blockIdx.x, p);
  float* row = p.lse + 2 * blockIdx.x;
  row[0] = tile.m_block;
  row[1] = tile.batch * p.q_heads + tile.q_head;
}
"""


@pytest.mark.emulator
@pytest.mark.parametrize(
    ("m_blocks", "batch", "q_heads", "head_group"), [(1, 1, 1, 1), (3, 2, 5, 4), (4, 3, 2, 6)]
)
def test_the_kernel_walks_as_the_tests_think(
    m_blocks: int, batch: int, q_heads: int, head_group: int
) -> None:
    grid = m_blocks * batch * q_heads
    tiles = np.empty((grid, 2), np.float32)
    params = registry.params_struct("FwdParams")(
        lse=ctypes.c_void_p(tiles.ctypes.data),
        m_blocks=m_blocks,
        batch=batch,
        q_heads=q_heads,
        head_group=head_group,
    )
    emulator.run(WALK, "walk", bytes(params), grid, 1, 0, [tiles], seed=0)
    want = [longest_first(i, m_blocks, batch * q_heads, head_group) for i in range(grid)]
    assert tiles.tolist() == [list(tile) for tile in want]


# ---- what a plan holds ---------------------------------------------------------------------------


@given(problem=plannable(), device=devices)
def test_any_problem_is_planned_within_the_device(problem: Problem, device: Device) -> None:
    made = plan(problem, device, "fwd_sm80")
    assert made == plan(replace(problem), replace(device), "fwd_sm80"), "same problem, same plan"
    assert made.backend == "fwd_sm80"
    assert bool(made.launches) != problem.empty
    for launch in made.launches:
        config = launch.config
        assert config in set(configs(launch.kernel, device.arch)), "a config that nobody compiles"
        assert config.smem_bytes <= device.smem_per_block
        assert config.threads <= 1024
        assert config.head_dim >= problem.head_dim
        assert config.value_dim >= problem.value_dim
        assert config.narrow == (problem.copy_bytes < 16)
        assert config.scores or not (problem.scores.softcap or problem.scores.alibi)
        assert launch.grid > 0
        assert 1 <= dict(launch.scalars)["head_group"] <= problem.batch * problem.q_heads
        fields = {name for name, _ in registry.params_struct("FwdParams")._fields_}
        assert {name for name, _ in launch.scalars} <= fields


@pytest.mark.parametrize("arch", registry.ARCHITECTURES)
def test_every_bucket_dtype_and_feature_has_a_config(arch: str) -> None:
    device = next(d for d in (*DEVICES.values(), replace(H200, arch="sm_100")) if d.arch == arch)
    chosen = {
        launch_of(
            plan(
                replace(
                    PROBLEM,
                    dtype=dtype,
                    head_dim=d,
                    value_dim=dv,
                    copy_bytes=copy_bytes,
                    scores=Scores(softcap=softcap, alibi=alibi, sink=sink),
                ),
                device,
                "fwd_sm80",
            )
        ).config
        for dtype in ("float16", "bfloat16")
        for d, dv in (
            (1, 1),
            (64, 64),
            (90, 96),
            (128, 128),
            (160, 8),
            (192, 128),
            (192, 192),
            (256, 256),
        )
        for copy_bytes in (2, 4, 16)
        for softcap, alibi, sink in ((0, 0, 0), (1, 0, 1), (0, 1, 0))
    }
    assert chosen == set(configs("fwd_sm80", arch)), "a config that no problem reaches"


@pytest.mark.parametrize("arch", registry.ARCHITECTURES)
def test_configs_fit_every_device_of_their_architecture(arch: str) -> None:
    found = [(kernel.name, config) for kernel, config in registry.all_configs(arch)]
    assert len(found) == len(set(found))
    for device in DEVICES.values():
        if device.arch == arch:
            assert max(config.smem_bytes for _, config in found) <= device.smem_per_block


# ---- golden plans: who changes one shows rows of the bench from before and after -----------------

GOLDEN = """
H200      64  64: 128 x 64, 4 warps, 2 stages, 128 blocks
H200     128 128: 128 x 64, 4 warps, 1 stages, 128 blocks
H200     192 128: 64 x 64, 4 warps, 1 stages, 256 blocks
H200     256 256: 64 x 64, 4 warps, 1 stages, 256 blocks
RTX 4090 128 128: 128 x 32, 4 warps, 1 stages, 128 blocks
RTX 4090 256 256: 64 x 32, 4 warps, 1 stages, 256 blocks
"""


@pytest.mark.parametrize("golden", GOLDEN.strip().splitlines())
def test_golden_plans(golden: str) -> None:
    name, head_dim, value_dim = golden[:8].strip(), int(golden[8:12]), int(golden[12:16])
    problem = replace(PROBLEM, head_dim=head_dim, value_dim=value_dim)
    launch = launch_of(plan(problem, Device.named(name), "fwd_sm80"))
    c = launch.config
    assert golden == (
        f"{name:8} {head_dim:3} {value_dim:3}: {c.block_m} x {c.block_n}, {c.warps} warps, "
        f"{c.stages} stages, {launch.grid} blocks"
    )


# ---- refusals ------------------------------------------------------------------------------------


def test_numpy_arrays_take_the_reference() -> None:
    made = plan(PROBLEM, Device.host())
    assert made.backend == "reference"
    assert made.launches == ()
    assert "fwd_sm80: needs CUDA arrays, found NumPy arrays" in made.why


def test_unsupported_names_every_reason() -> None:
    with pytest.raises(Unsupported) as caught:
        plan(replace(PROBLEM, dtype="float32"), H200)
    message = str(caught.value)
    assert "fwd_sm80: dtype float32: takes float16 and bfloat16" in message
    assert "reference: takes NumPy arrays, found arrays on NVIDIA H200" in message
    with pytest.raises(Unsupported, match="head_dim=257, value_dim=128: takes up to 256"):
        plan(replace(PROBLEM, head_dim=257), H200)
    with pytest.raises(Unsupported, match=r"needs one of sm_80, .*, found sm_75"):
        plan(PROBLEM, replace(H200, arch="sm_75"))


def test_a_forced_backend_is_taken_or_fails() -> None:
    assert plan(PROBLEM, H200, "fwd_sm80").backend == "fwd_sm80"
    with pytest.raises(Unsupported) as caught:
        plan(PROBLEM, H200, "reference")
    assert "reference: takes NumPy arrays" in str(caught.value)
    assert "fwd_sm80:" not in str(caught.value), "only the reason of the one that was asked for"
    with pytest.raises(ValueError, match=r"backend='fa2': accepted are .*fwd_sm80, reference"):
        plan(PROBLEM, H200, "fa2")


@pytest.mark.parametrize("field", ["batch", "max_q", "value_dim"])
def test_an_empty_problem_launches_nothing(field: str) -> None:
    made = plan(replace(PROBLEM, **{field: 0}), H200)
    assert made.backend.startswith("fwd_")
    assert made.launches == ()


def test_no_keys_still_launch() -> None:
    assert launch_of(plan(replace(PROBLEM, max_k=0), H200)).grid == 8 * 16


def test_the_mask_is_no_part_of_the_config() -> None:
    masks = (Mask(), Mask.of(True), Mask.of("top_left", (5, 5)))
    found = {launch_of(plan(replace(PROBLEM, mask=m), H200, "fwd_sm80")).config for m in masks}
    assert len(found) == 1
