# SPDX-License-Identifier: Apache-2.0
"""fwd_sm90 and fwd_sm90_self on the emulator: every tile, whatever the plan would choose, on a GPU
of so few SMs that each block gets several query tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

import rawattn
from rawattn.device import Device
from rawattn.plan import Plan, fwd_sm90
from rawattn.plan.fwd_sm90 import DYNAMIC, STATIC
from rawattn.plan.fwd_sm90_tiles import D128, D256, SELF, SELF_SHORT, SPLIT_TILES, TILES
from rawattn.problem import Problem
from rawattn.registry import FwdSm90, FwdSm90Self
from rawattn.testing import Case, Op, law_empty_rows, law_matches_reference
from tools.emulator import attention
from tools.emulator.api import emulated

pytestmark = pytest.mark.emulator

Tile = FwdSm90 | FwdSm90Self
SMALL_H200 = replace(Device.named("H200"), sms=2)


def name(tile: Tile) -> str:
    kind = "-self" if isinstance(tile, FwdSm90Self) else ""
    return f"{tile.head_dim}-{tile.value_dim}-{tile.block_m}x{tile.block_n}{kind}"


@pytest.fixture
def op_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Op]:
    """The op that one tile computes, with scalars of the launch changed."""

    def make(tile: Tile, sms: int = 2, **scalars: int) -> Op:
        def plan(p: Problem, device: Device, backend: str | None) -> Plan:
            gpu = replace(SMALL_H200, sms=sms)
            launch = fwd_sm90.launch(p, gpu, fwd_sm90.config_of(p, tile))
            launch = replace(launch, scalars=tuple((dict(launch.scalars) | scalars).items()))
            size = launch.workspace_bytes
            return Plan(
                problem=p,
                device=device,
                backend="fwd_sm90",
                launches=(launch,),
                workspace_bytes=size,
            )

        monkeypatch.setattr(attention, "plan", plan)
        return attention.emulator_op()

    return make


@pytest.mark.parametrize("tile", (*TILES, SELF, SELF_SHORT), ids=name)
def test_dense(op_of: Callable[..., Op], tile: Tile) -> None:
    """Query tiles in a row, some of which see no key; padded heads; a tail of keys."""
    case = Case(
        q_lens=(400,) * 2,
        k_lens=(250,) * 2,
        dtype="float16",
        q_heads=4,
        kv_heads=2,
        head_dim=tile.head_dim - 8,
        value_dim=tile.value_dim - 16,
        causal=True,
    )
    law_matches_reference(op_of(tile), case)


@pytest.mark.parametrize("tile", (*TILES, SELF, SELF_SHORT), ids=name)
def test_packed(op_of: Callable[..., Op], tile: Tile) -> None:
    """Sequences with NaN around them, empty ones among them and one of more queries than keys, and
    all that scores may need.
    """
    case = Case(
        q_lens=(5, 270, 0, 64, 30),
        k_lens=(33, 300, 7, 0, 20),
        dtype="float16",
        layout="packed_used",
        q_heads=2,
        kv_heads=2,
        head_dim=tile.head_dim,
        value_dim=tile.value_dim,
        window=(100, 3),
        softcap=10.0,
        alibi="batch",
        sink=True,
    )
    law_matches_reference(op_of(tile), case)


@pytest.mark.parametrize("tile", (D256, SELF_SHORT), ids=name)
def test_window(op_of: Callable[..., Op], tile: Tile) -> None:
    """Key tiles that a row does not see whole at both ends, and some between that all see whole."""
    case = Case(q_lens=(70,), k_lens=(300,), dtype="float16", q_heads=1, kv_heads=1)
    case = replace(case, head_dim=tile.head_dim, value_dim=tile.value_dim)
    law_matches_reference(op_of(tile), replace(case, window=(250, 3)))


@pytest.mark.parametrize("tile", (D128, D256), ids=name)
def test_empty_rows(op_of: Callable[..., Op], tile: Tile) -> None:
    """Beside rows that meet a NaN in v, whether out leaves through shared memory or not."""
    case = Case(q_lens=(130,), k_lens=(70,), dtype="float16", causal=True)
    law_empty_rows(op_of(tile), replace(case, head_dim=tile.head_dim, value_dim=tile.value_dim))


@pytest.mark.parametrize("tile", (D128, D256), ids=name)
def test_blocks_without_tiles(op_of: Callable[..., Op], tile: Tile) -> None:
    """Two blocks for two sequences, one of which is empty."""
    case = Case(q_lens=(30, 0), k_lens=(300, 9), dtype="float16", layout="packed")
    law_matches_reference(
        op_of(tile), replace(case, head_dim=tile.head_dim, value_dim=tile.value_dim)
    )


@pytest.mark.parametrize("order", (STATIC, DYNAMIC))
@pytest.mark.parametrize("head_group", (1, 5))
def test_orders(op_of: Callable[..., Op], order: int, head_group: int) -> None:
    """However blocks share the query tiles, dense and packed, with more sequences than a warp."""
    op = op_of(TILES[0], schedule=order, head_group=head_group)
    shape = {"q_heads": 3, "kv_heads": 3, "dtype": "float16"}
    law_matches_reference(op, Case(q_lens=(400,) * 3, k_lens=(40,) * 3, **shape))
    q_lens, k_lens = (0, 1, 200, 600) * 10, (9, 0, 3, 1) * 10
    shape |= {"q_heads": 2, "kv_heads": 2}
    case = Case(q_lens=q_lens, k_lens=k_lens, layout="padded", causal=True, **shape)
    law_matches_reference(op, case)


# Query tiles of 4 heads: SMs, queries, keys
CUTS = {
    "8 tiles, 5 a round": (5, 2, 500),
    "fewer tiles than blocks": (11, 1, 900),
    "a tile in front of them": (3, 1, 300),
    "no tile left": (2, 1, 150),
}


@pytest.mark.parametrize("tile", SPLIT_TILES, ids=name)
@pytest.mark.parametrize(("sms", "m_blocks", "k_len"), CUTS.values(), ids=CUTS)
def test_query_tiles_cut_over_keys(
    op_of: Callable[..., Op], tile: FwdSm90, sms: int, m_blocks: int, k_len: int
) -> None:
    """In pieces that end in the middle of one and go on with the next, with a sink."""
    case = Case(
        q_lens=(tile.block_m * m_blocks - 30,),
        k_lens=(k_len,),
        dtype="float16",
        q_heads=4,
        kv_heads=2,
        head_dim=tile.head_dim - 8,
        value_dim=tile.value_dim - 16,
        sink=True,
    )
    law_matches_reference(op_of(tile, sms), case)


@pytest.mark.parametrize("causal", [True, "top_left"])
@pytest.mark.parametrize("tile", SPLIT_TILES, ids=name)
def test_parts_of_which_nothing_is_seen(
    op_of: Callable[..., Op], tile: FwdSm90, causal: bool | str
) -> None:
    """Under a causal mask, in pieces of one or two key tiles; rows without keys, too."""
    case = Case(q_lens=(400,), k_lens=(370,), dtype="float16", q_heads=2, kv_heads=1)
    case = replace(case, head_dim=tile.head_dim, value_dim=tile.value_dim, causal=causal)
    law_matches_reference(op_of(tile, sms=23), case)


@pytest.mark.parametrize(("layout", "sms"), [("packed", 150), ("padded", 30), ("packed_used", 63)])
@pytest.mark.parametrize("tile", SPLIT_TILES, ids=name)
def test_sequences_that_are_cut_over_keys(
    op_of: Callable[..., Op], tile: FwdSm90, layout: str, sms: int
) -> None:
    """Long and short, empty and of more queries than keys, in as many pieces each, or in pieces
    that go on with the next; what no sequence has is NaN.
    """
    case = Case(
        q_lens=(tile.block_m + 20, 30, 0, 5, 90),
        k_lens=(300, 700, 50, 0, 20),
        dtype="float16",
        layout=layout,
        q_heads=2,
        kv_heads=1,
        head_dim=tile.head_dim,
        value_dim=tile.value_dim,
        causal=True,
        sink=True,
    )
    law_matches_reference(op_of(tile, sms), case)


def test_calls_that_are_cut_work_in_a_workspace() -> None:
    """A call makes its own; a prepared one keeps its own, on other arrays too."""
    rng = np.random.default_rng(0)
    q, q2 = rng.normal(size=(2, 1, 20, 2, 128)).astype(np.float16)
    k, v = rng.normal(size=(2, 1, 1500, 2, 128)).astype(np.float16)
    out = np.empty_like(q)
    with emulated() as launched:
        plan = rawattn.prepare(rawattn.flash_attn_func, q, k, v, out=out, causal=True)
        (launch,) = plan.plan.launches
        assert launch.config.split and launch.grid == 8
        assert plan.workspace_size == launch.workspace_bytes == 9 * launch.config.slot_bytes
        assert plan.run() is out
        assert np.array_equal(out, rawattn.flash_attn_func(q, k, v, causal=True))
        got = rawattn.flash_attn_func(q2, k, v, out=out, causal=True, plan=plan)
        assert np.array_equal(got, rawattn.flash_attn_func(q2, k, v, causal=True))
        ends = [np.array([0, n], np.int32) for n in (20, 1500)]
        packed = rawattn.flash_attn_varlen_func(q[0], k[0], v[0], *ends, causal=True)
        assert np.array_equal(packed, rawattn.flash_attn_func(q, k, v, causal=True)[0])
        assert launched == ["fwd_sm90"] * 6
        short = rawattn.prepare(rawattn.flash_attn_func, q, k[:, :300], v[:, :300])
        assert short.workspace_size == 0
    assert rawattn.prepare(rawattn.flash_attn_func, q, k, v).workspace_size == 0, "NumPy"
    want = rawattn.flash_attn_func(q2, k, v, causal=True)
    assert np.allclose(got, want, atol=2e-3)


def test_padded_keys_may_be_any_distance_apart() -> None:
    """No whole number of rows, with NaN between sequences; values may not."""
    rng = np.random.default_rng(0)
    k, v = rng.normal(size=(2, 3, 20, 2, 64)).astype(np.float16)
    q, starts = v[:, 0], np.arange(4, dtype=np.int32)
    room = np.full((3, 20 * 128 + 64), np.nan, np.float16)
    room[:, : 20 * 128] = k.reshape(3, -1)
    odd = np.lib.stride_tricks.as_strided(room, k.shape, (room.strides[0], *k.strides[1:]))
    used = np.array([20, 0, 7], np.int32)
    call = {"cu_seqlens_q": starts, "seqused_k": used, "backend": "fwd_sm90"}
    with emulated() as launched:
        out = rawattn.flash_attn_varlen_func(q, odd, v, **call)
        assert np.array_equal(out, rawattn.flash_attn_varlen_func(q, k, v, **call))
        assert all(kernel.startswith("fwd_sm90") for kernel in launched)
        with pytest.raises(rawattn.Unsupported, match="strides"):
            rawattn.flash_attn_varlen_func(q, k, odd, **call)
