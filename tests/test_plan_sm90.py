# SPDX-License-Identifier: Apache-2.0
"""Plans of the Hopper forward kernels: which Config a problem gets, how many blocks, what is
refused.
"""

from __future__ import annotations

import ctypes
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import registry
from rawattn.device import Device
from rawattn.plan import Launch, configs, fwd_sm90, plan
from rawattn.plan.fwd_sm90 import DYNAMIC, STATIC
from rawattn.plan.fwd_sm90_tiles import SELF
from rawattn.problem import Mask, Problem, Rows, Scores
from rawattn.registry import FwdSm90
from rawattn.testing.strategies import plannable
from tools import emulator

H200 = Device.named("H200")
PROBLEM = Problem(
    dtype="bfloat16",
    batch=2,
    q_heads=16,
    kv_heads=4,
    head_dim=128,
    value_dim=128,
    max_q=4096,
    max_k=4096,
)
CAUSAL = Mask.of(True)


def launch_of(problem: Problem, device: Device = H200) -> Launch:
    (launch,) = plan(problem, device, "fwd_sm90").launches
    return launch


@given(problem=plannable())
def test_any_problem_is_planned_within_the_device(problem: Problem) -> None:
    reason = fwd_sm90.refuses(problem, H200)
    if problem.empty or reason:
        assert reason is None or any(word in reason for word in ("strides", "no keys", "tiles"))
        return
    launch = launch_of(problem)
    config = launch.config
    assert config in set(configs(launch.kernel, "sm_90a")), "a config that nobody compiles"
    assert config.smem_bytes * config.blocks_per_sm <= H200.smem_per_block
    assert config.head_dim >= problem.head_dim and config.value_dim >= problem.value_dim
    assert config.scores or not problem.scores.alibi
    assert config.scores or config.softcap or not problem.scores.softcap
    assert 1 <= dict(launch.scalars)["head_group"] <= problem.batch * problem.q_heads
    packed = {wanted.field for wanted in launch.maps if wanted.ragged}
    assert ("out_map" in packed) == (problem.q_rows is not Rows.DENSE)
    assert ("v_map" in packed) == (problem.k_rows is not Rows.DENSE)
    for wanted in launch.maps:
        assert wanted.box[0] * 2 == wanted.swizzle


@given(
    q_len=st.integers(1, 3000),
    k_len=st.integers(1, 9000),
    pairs=st.integers(1, 40),
    head_dim=st.sampled_from((64, 96, 128, 192, 256)),
    causal=st.booleans(),
)
def test_blocks_share_all_query_tiles(
    q_len: int, k_len: int, pairs: int, head_dim: int, causal: bool
) -> None:
    problem = replace(
        PROBLEM, batch=1, q_heads=pairs, kv_heads=pairs, head_dim=head_dim, value_dim=head_dim
    )
    mask = CAUSAL if causal else Mask()
    launch = launch_of(replace(problem, max_q=q_len, max_k=k_len, mask=mask))
    scalars, rows = dict(launch.scalars), launch.config.block_m
    assert (scalars["m_blocks"] - 1) * rows < q_len <= scalars["m_blocks"] * rows
    tiles, config = scalars["m_blocks"] * pairs, launch.config
    if getattr(config, "split", False):
        assert_every_key_tile_has_a_piece(launch, tiles, -(-k_len // config.block_n))
    else:
        assert launch.grid == (tiles if launch.kernel == "fwd_sm90_self" else min(tiles, H200.sms))


def assert_every_key_tile_has_a_piece(launch: Launch, tiles: int, k_tiles: int) -> None:
    """The last round's tiles are cut into as many pieces as blocks take; slots are all parts'."""
    scalars, config = dict(launch.scalars), launch.config
    left, span, places = tiles - scalars["whole"], scalars["span"], scalars["places"]
    assert scalars["whole"] % H200.sms == 0 and 0 < left < H200.sms
    assert 1 <= span < places <= k_tiles and scalars["axis"] == left * places
    pieces = -(-scalars["axis"] // span)
    assert pieces <= launch.grid == (H200.sms if scalars["whole"] else pieces) <= H200.sms
    slots = launch.workspace_bytes // config.slot_bytes
    assert launch.counters == 2 + slots * 4 * config.consumers
    parts = {  # number of tile and piece of each
        (tile, position // span)
        for tile in range(left)
        for position in range(tile * places, (tile + 1) * places)
    }
    found = sorted(tile + piece for tile, piece in parts)
    assert len(set(found)) == len(found) and found[-1] == slots - 1


WALK = """
#include "fwd_sm90_schedule.cuh"
extern "C" __global__ void walk(const __grid_constant__ FwdSm90Params p) {
  TileWalk<64, 64, FwdSm90Params> walk(p);
  float* row = p.lse;
  for (FwdSm90Tile t = walk.tile(); t.first < t.last; t = walk.tile()) {
    if (threadIdx.x == 0) {
      row[0] = t.row / 64;
      row[1] = t.batch;
      row[2] = t.q_head;
    }
    row += 3;
    walk.draw();
  }
}
"""


@pytest.mark.emulator
@pytest.mark.parametrize(("head_group", "last_sweep"), [(2, 4), (4, 0), (4, 2), (1, 5), (6, 3)])
def test_the_last_sweep_covers_all_sequences_that_are_left(
    head_group: int, last_sweep: int
) -> None:
    """Every tile once; sweeps of a head group each, the last query blocks first, and then one."""
    m_blocks, batch, q_heads = 3, 5, 2
    tiles = np.empty((m_blocks * batch * q_heads, 3), np.float32)
    params = registry.params_struct("FwdSm90Params")(
        lse=ctypes.c_void_p(tiles.ctypes.data),
        batch=batch,
        q_heads=q_heads,
        group=1,
        q_len=64 * m_blocks,
        k_len=64,
        window_left=-1,
        window_right=-1,
        head_group=head_group,
        last_sweep=last_sweep,
    )
    emulator.run(WALK, "walk", bytes(params), 1, 32, 0, [tiles], seed=0)
    sequences, heads = max(1, head_group // q_heads), min(head_group, q_heads)
    firsts = [*range(0, last_sweep, sequences), *{last_sweep, batch}]
    want = [
        [m_block, sequence, head]
        for first, end in itertools.pairwise(sorted(firsts))
        for first_head in range(0, q_heads, heads)
        for m_block in reversed(range(m_blocks))
        for sequence in range(first, end)
        for head in range(first_head, first_head + heads)
    ]
    assert tiles.tolist() == want


def test_every_config_is_reached() -> None:
    chosen: dict[str, set[registry.Config]] = {"fwd_sm90": set(), "fwd_sm90_self": set()}
    for dtype, (d, dv), length, mask, scores, rows in itertools.product(
        ("float16", "bfloat16"),
        ((64, 64), (72, 96), (128, 128), (192, 128), (160, 160), (256, 200)),
        (512, 1024, 2048, 4096, 8192, 16384),
        (Mask(), CAUSAL, Mask(left=100), replace(CAUSAL, left=100)),
        (Scores(), Scores(softcap=True), Scores(alibi=True)),
        (Rows.DENSE, Rows.PACKED),
    ):
        launch = launch_of(
            replace(
                PROBLEM,
                dtype=dtype,
                head_dim=d,
                value_dim=dv,
                max_q=length,
                max_k=length,
                q_rows=rows,
                k_rows=rows,
                mask=mask,
                scores=scores,
            )
        )
        chosen[launch.kernel].add(launch.config)
    for kernel, found in chosen.items():
        assert found == set(configs(kernel, "sm_90a")), "a config that no problem reaches"


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_a_wide_window_gets_the_config_of_none(head_dim: int) -> None:
    """And so its bits."""
    problem = replace(PROBLEM, head_dim=head_dim, value_dim=head_dim)
    for window in ((4095, 4095), (-1, 4095), (5000, -1)):
        assert launch_of(replace(problem, mask=Mask.of(False, window))) == launch_of(problem)


@pytest.mark.parametrize("length", [70, 600, 1500, 5000, 9000])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_tiles_do_not_depend_on_how_wide_a_window_is(head_dim: int, length: int) -> None:
    """Lengths may be smaller than their bounds: it may be wide enough for them. Of so many tiles
    none is cut.
    """
    problem = replace(
        PROBLEM,
        head_dim=head_dim,
        value_dim=head_dim,
        max_q=length,
        max_k=length,
        q_heads=80,
        q_rows=Rows.PACKED,
        k_rows=Rows.PACKED,
    )

    def config(causal: bool, window: tuple[int, int]) -> Any:
        return launch_of(replace(problem, mask=Mask.of(causal, window))).config

    for causal, right in ((False, length // 2), (True, 0)):
        narrow, none = config(False, (length // 2, right)), config(causal, (-1, -1))
        assert narrow.window and narrow == replace(none, window=True)


# ---- golden plans: who changes one shows rows of the bench from before and after -----------------

GOLDEN = """
full     512  64: 64 x 128 self, static, groups of 16
full    4096  64: 192 x 128, static, groups of 1, 44 in 132 pieces
full   16384  64: 192 x 128, static, groups of 1, 112 in 132 pieces
full     512  96: 128 x 128, static, groups of 1
full    4096  96: 192 x 112, static, groups of 1
full   16384  96: 192 x 112, static, groups of 1, 90 in 131 pieces
full     512 128: 128 x 128, static, groups of 1
full    4096 128: 128 x 128, static, groups of 1, 68 in 128 pieces
full   16384 128: 128 x 128, static, groups of 4, 68 in 132 pieces
full     512 256: 128 x 64, dynamic, groups of 1
full    2048 256: 128 x 80, dynamic, groups of 1
full    4096 256: 128 x 64, dynamic, groups of 1, 100 in 131 pieces
full   16384 256: 128 x 64, dynamic, groups of 2, 100 in 132 pieces
causal   512  64: 64 x 64 self, dynamic, groups of 32
causal  4096  64: 192 x 128, dynamic, groups of 32
causal 16384  64: 192 x 128, dynamic, groups of 32
causal   512  96: 128 x 128, dynamic, groups of 32, last of 168
causal  4096  96: 192 x 112, dynamic, groups of 32
causal 16384  96: 192 x 112, dynamic, groups of 21
causal   512 128: 128 x 128, dynamic, groups of 32, last of 128
causal  4096 128: 128 x 128, dynamic, groups of 8
causal 16384 128: 128 x 128, dynamic, groups of 2
causal   512 256: 128 x 64, dynamic, groups of 64
causal  4096 256: 128 x 80, dynamic, groups of 8
causal 16384 256: 128 x 80, dynamic, groups of 2
"""


@pytest.mark.parametrize("golden", GOLDEN.strip().splitlines())
def test_golden_plans(golden: str) -> None:
    mask, length, head_dim = golden[:6].strip(), int(golden[6:12]), int(golden[12:16])
    problem = replace(
        PROBLEM,
        batch=16384 // length,
        q_heads=2048 // head_dim,
        kv_heads=2048 // head_dim,
        head_dim=head_dim,
        value_dim=head_dim,
        max_q=length,
        max_k=length,
        mask=CAUSAL if mask == "causal" else Mask(),
    )
    launch = launch_of(problem)
    c, scalars = launch.config, dict(launch.scalars)
    order = {STATIC: "static", DYNAMIC: "dynamic"}[scalars["schedule"]]
    shape = f"{c.block_m} x {c.block_n}" + (" self" if isinstance(c, type(SELF)) else "")
    group, left = scalars["head_group"], problem.batch - scalars["last_sweep"]
    last = f", last of {left * problem.q_heads}" if left else ""
    if scalars["axis"]:
        cut, pieces = scalars["axis"] // scalars["places"], -(-scalars["axis"] // scalars["span"])
        last += f", {cut} in {pieces} pieces"
    assert golden == f"{mask:6}{length:6}{head_dim:4}: {shape}, {order}, groups of {group}{last}"


@pytest.mark.parametrize(
    ("length", "left", "heads"),
    [
        (16384, -1, 8),  # of two KV heads, with 8 MB of keys and values each
        (65536, -1, 4),  # of one, which has 32 MB
        (65536, 8191, 16),  # of four: in sight are 4 MB of each
        (4096, -1, 32),  # a sweep has no more
    ],
)
def test_sweeps_cover_the_queries_of_whole_kv_heads(length: int, left: int, heads: int) -> None:
    problem = replace(
        PROBLEM,
        batch=1,
        q_heads=32,
        kv_heads=8,
        max_q=length,
        max_k=length,
        mask=Mask(left=left, right=0),
    )
    assert dict(launch_of(problem).scalars)["head_group"] == heads


@pytest.mark.parametrize(
    ("changes", "cut"),  # query tiles in front of those that are cut; None: none is
    [
        ({}, 0),
        ({"mask": Mask.of("top_left")}, 0),
        ({"mask": Mask(right=5)}, 0),
        ({"scores": Scores(sink=True)}, 0),
        ({"max_q": 512}, None),  # 128 tiles for 132 SMs: pieces of 63 key tiles instead of 64
        ({"max_q": 512, "max_k": 131072}, None),  # 1.03 times as long, aligned
        ({"max_q": 1024, "q_heads": 20}, 132),
        ({"max_q": 1152, "q_heads": 20}, None),  # under a mask that hides more: dynamic order
        ({"max_q": 1152, "q_heads": 20, "mask": Mask()}, 132),
        ({"max_q": 2112, "q_heads": 8, "mask": Mask()}, 132),
        ({"max_k": 1024}, 0),
        ({"max_k": 896}, None),
        ({"scores": Scores(softcap=True)}, None),
        ({"mask": Mask(left=4000, right=0)}, None),
        ({"q_rows": Rows.PACKED, "k_rows": Rows.PACKED}, 0),
        ({"k_rows": Rows.PADDED}, 0),
        ({"k_rows": Rows.PADDED, "max_q": 1024, "q_heads": 20}, None),  # nor where some are whole
        ({"head_dim": 192, "value_dim": 192}, None),
        ({"max_k": 2**30, "q_heads": 96}, None),  # positions of the axis are 32 bits wide
    ],
)
def test_what_is_cut_over_keys(changes: dict[str, Any], cut: int | None) -> None:
    chunk = replace(PROBLEM, batch=1, q_heads=32, kv_heads=4, max_q=128, max_k=8192, mask=CAUSAL)
    launch = launch_of(replace(chunk, **changes))
    scalars, config = dict(launch.scalars), launch.config
    assert isinstance(config, FwdSm90)
    assert config.split == (cut is not None)
    assert not config.split or scalars["whole"] == cut
    assert config.split == (launch.workspace_bytes > 0) == (scalars["axis"] > 0)


# ---- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float32"}, "dtype float32: takes float16 and bfloat16"),
        ({"head_dim": 264}, "head_dim=264, value_dim=128: takes up to 256"),
        ({"copy_bytes": 4}, "strides"),
        ({"tma": False}, "strides"),
        ({"max_k": 0}, "no keys"),
        ({"max_q": 2**30 + 1}, "takes up to 1073741824"),
        ({"batch": 2**24, "q_heads": 64}, "query tiles: takes up to 1073741824"),
    ],
)
def test_refusals(changes: dict[str, object], reason: str) -> None:
    problem = replace(PROBLEM, **changes)  # type: ignore[arg-type]
    assert reason in (fwd_sm90.refuses(problem, H200) or "")
    assert "needs sm_90a, found sm_80" in (fwd_sm90.refuses(PROBLEM, Device.named("A100")) or "")
