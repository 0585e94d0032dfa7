# SPDX-License-Identifier: Apache-2.0
"""The tiled NumPy backend obeys every law, also across tile edges, and keeps its memory small."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import host
from rawattn.problem import Mask
from rawattn.reference import attention, visible
from rawattn.testing import Case, Law, Limits, Op
from rawattn.testing.laws import (
    law_empty_rows,
    law_matches_reference,
    law_memory_is_invisible,
    law_unused_slots_are_never_read,
    law_wide_window_is_no_window,
)
from rawattn.testing.strategies import problems

Array = np.ndarray[Any, Any]


def small_tiles(
    q: Array,
    k: Array,
    v: Array,
    *,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool | str,
    window_size: tuple[int, int],
    out: Array,
    lse: Array,
    **arguments: Any,
) -> None:
    """The backend with strips of a few rows and tiles of a few keys, so that cases have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "BLOCK_ROWS", 3)
        patch.setattr(host, "STRIP_ROWS", 24)
        patch.setattr(host, "TILE_KEYS", 4)
        patch.setattr(host, "PRODUCT", 4 * 3 * 64)
        patch.setattr(host, "SERIAL", 500)
        mask = Mask.of(causal, window_size)
        host.run(q, k, v, out, lse, mask=mask, scale=softmax_scale, **arguments)


OP = Op(name="small_tiles", call=small_tiles, limits=Limits(max_len=24), bitwise=False)


@pytest.mark.parametrize(
    "law",
    [
        law_matches_reference,
        law_empty_rows,
        law_memory_is_invisible,
        law_unused_slots_are_never_read,
        law_wide_window_is_no_window,
    ],
    ids=lambda law: law.name,
)
def test_law_across_tiles(law: Law) -> None:
    """Those that tiles could break; test_laws.py has all laws, on tiles of real size."""

    @given(problems(OP.limits & law.limits))
    def check(case: Case) -> None:
        law(OP, case)

    check()


def strip_of(mask: Mask, rows: int, k_len: int, *, first: int = 0, q_len: int = 1) -> host.Strip:
    q, kv = np.zeros((rows, 1, 1, 1)), np.zeros((k_len, 1, 1))
    each = np.zeros((1, 1))
    return host.Strip(
        mask=mask,
        scale=1.0,
        softcap=0.0,
        first=first,
        block=1,
        q_len=q_len,
        q=q,
        k=kv,
        v=kv,
        slopes=each,
        sink=each,
        out=q,
        lse=q[..., 0],
    )


@given(
    st.builds(Mask, left=st.integers(-1, 5), right=st.integers(-1, 5), top_left=st.booleans()),
    st.integers(1, 12),
    st.integers(0, 30),
    st.data(),
)
def test_tiles_cover_exactly_the_keys_that_are_seen(
    mask: Mask, q_len: int, k_len: int, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, q_len - 1))
    rows = data.draw(st.integers(1, q_len - first))
    strip = strip_of(mask, rows, k_len, first=first, q_len=q_len)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "TILE_KEYS", 1)
        keys = [key for tile in strip.tiles() for key in range(tile.start, tile.stop)]
    seen = visible(mask, np.arange(first, first + rows), np.arange(k_len), q_len, k_len)
    assert keys == np.flatnonzero(seen.any(axis=0)).tolist()


def test_a_window_walks_few_tiles() -> None:
    window = strip_of(Mask(left=1000, right=0), 512, 32768, first=16384, q_len=32768)
    keys = [key for tile in window.tiles() for key in (tile.start, tile.stop)]
    assert (min(keys), max(keys)) == (16384 - 1000, 16384 + 512)


@pytest.mark.parametrize(
    ("rows", "heads", "blocks"),
    [(1, 32, [1]), (16, 32, [16]), (300, 4, [64, 44, 64, 44]), (2048, 1, [64, 64])],
)
def test_strips(rows: int, heads: int, blocks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences are one strip, of all heads, whose products are one block of rows."""
    strips: list[host.Strip] = []
    monkeypatch.setattr(host, "_attend", strips.append)
    monkeypatch.setattr(host, "SERIAL", 1 << 60)
    x = np.zeros((1, rows, heads, 4), np.float32)
    host.run(x, x, x, x.copy(), mask=Mask())
    assert sum(strip.lse.size for strip in strips) == rows * heads
    assert all(len(strip.q) % strip.block == 0 for strip in strips)
    assert sorted(strip.block for strip in strips) == sorted(blocks)


@pytest.mark.parametrize("k_len", [1, 2, 70])
def test_several_heads_and_blocks_in_a_strip(k_len: int) -> None:
    """The scores of such a strip once came out of NumPy in another order, and lost their mask."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, s, 2, 64), np.float32) for s in (64, k_len, k_len))
    out, mask = np.full_like(q, np.nan), Mask(right=0)
    host.run(q, k, v, out, mask=mask)
    want, _ = attention(q, k, v, mask=mask)
    twin, _ = attention(q, k, v, mask=mask, rounding="float32")
    assert np.abs(out - want).max() <= 2 * np.abs(twin - want).max()


def test_real_tiles_and_no_lse() -> None:
    """Sizes beyond one tile of the real sizes, in both directions."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, s, 1, 8), np.float32) for s in (700, 1300, 1300))
    out, mask = np.full_like(q, np.nan), Mask(left=900, right=0)
    host.run(q, k, v, out, mask=mask)
    want, _ = attention(q, k, v, mask=mask)
    twin, _ = attention(q, k, v, mask=mask, rounding="float32")
    assert np.abs(out - want).max() <= 2 * np.abs(twin - want).max()


@pytest.mark.parametrize("sink", [None, np.float32([0.5])])
def test_rows_without_keys_are_zero_where_values_are_nan(sink: Array | None) -> None:
    """Two keys, five rows under a causal mask: the first three see none, in the tile of others."""
    q, k = np.ones((1, 5, 1, 8), np.float32), np.ones((1, 2, 1, 8), np.float32)
    out, lse = np.full_like(q, np.nan), np.full((1, 1, 5), np.nan, np.float32)
    host.run(q, k, np.full_like(k, np.nan), out, lse, mask=Mask(right=0), sink=sink)
    assert (out[0, :3] == 0).all()
    assert (lse[0, 0, :3] == (-np.inf if sink is None else sink[0])).all()


def test_errors_of_the_caller_are_not_ours() -> None:
    """What NumPy shall raise for the caller, as for underflow, is not raised in here."""
    q = np.full((1, 70, 1, 8), 40.0, np.float32)
    q[0, ::2] = -40
    out = np.empty_like(q, dtype=np.float16)
    with np.errstate(all="raise"):
        host.run(q, q, q, out, mask=Mask(right=0))
    assert np.isfinite(out).all()


LATE = """
import atexit
import numpy as np
from rawattn import host
from rawattn.problem import Mask

x = np.ones((1, 300, 8, 4), np.float32)
host.SERIAL = 0
def late():
    out = np.zeros_like(x)
    host.run(x, x, x, out, mask=Mask())
    print("mean", out.mean())
atexit.register(late)
"""


def test_a_call_after_the_end() -> None:
    """No thread starts any more when the interpreter shuts down."""
    done = subprocess.run([sys.executable, "-c", LATE], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("mean 1.0\n", "")


def test_scores_are_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "SERIAL", 1 << 60)  # each thread has a tile

    def peak(length: int) -> int:
        x = np.zeros((1, length, 1, 8), np.float32)
        out = x.copy()
        tracemalloc.start()
        try:
            host.run(x, x, x, out, mask=Mask(right=0))
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    small, large = peak(1024), peak(4096)
    assert large < 1.5 * small
    assert large < 4096 * 4096 * 4 / 8
