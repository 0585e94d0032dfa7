# SPDX-License-Identifier: Apache-2.0
"""When a paged call is for fwd_sm90_paged, and what is launched then."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.device import Device
from rawattn.paged_problem import PageTable
from rawattn.plan.paged import LONGER, plan
from rawattn.problem import CacheLayout, Mask, Rows, Scores, Unsupported
from tests.problems import decode_problem
from tools.emulator.api import emulated

H200 = Device.named("H200")
CAUSAL = Mask.of(True)


@pytest.mark.parametrize(
    ("batch", "queries", "backend"),
    [
        (1, 64, "decode_split"),
        (1, 128, "fwd_sm90_paged"),  # query tiles are cut over their keys
        (1, 256, "fwd_sm90_paged"),
        (1, 512, "fwd_sm90_paged"),
        (4, 64, "decode_split"),
        (4, 128, "fwd_sm90_paged"),
        (16, 64, "decode_split"),
        (16, 128, "fwd_sm90_paged"),
        (32, 16, "decode_split"),
        (4, 4096, "fwd_sm90_paged"),
    ],
)
def test_the_faster_one_is_chosen(batch: int, queries: int, backend: str) -> None:
    """As measured, docs/kernels/fwd_sm90.md."""
    problem = decode_problem(batch=batch, max_q=queries, mask=CAUSAL)
    made = plan(problem, H200)
    assert made.backend == backend
    assert made.why == (() if backend == "decode_split" else (LONGER,))
    for name in ("decode_split", "fwd_sm90_paged"):
        forced = plan(problem, H200, name)
        assert forced.backend == name and forced.why == ()


@pytest.mark.parametrize(
    ("layout", "head_dim", "queries", "backend"),
    [
        (CacheLayout.NHD, 96, 16, "decode_split"),
        (CacheLayout.NHD, 96, 32, "fwd_sm90_paged"),
        (CacheLayout.NHD, 256, 8, "decode_split"),
        (CacheLayout.NHD, 256, 16, "fwd_sm90_paged"),
        (CacheLayout.X_MAJOR, 64, 64, "decode_split"),
        (CacheLayout.X_MAJOR, 128, 64, "decode_split"),
        (CacheLayout.X_MAJOR, 128, 128, "fwd_sm90_paged"),
        (CacheLayout.X_MAJOR, 256, 8, "decode_split"),
        (CacheLayout.X_MAJOR, 256, 16, "fwd_sm90_paged"),
    ],
)
def test_the_faster_one_is_chosen_of_other_caches(
    layout: CacheLayout, head_dim: int, queries: int, backend: str
) -> None:
    """As measured, 32 sequences of 4 k keys."""
    problem = decode_problem(
        batch=32,
        max_q=queries,
        max_k=4096,
        head_dim=head_dim,
        value_dim=head_dim,
        layout=layout,
        mask=CAUSAL,
    )
    assert plan(problem, H200).backend == backend


@pytest.mark.parametrize(
    ("batch", "queries", "backend"),
    [(32, 16, "decode_split"), (32, 64, "fwd_sm90_paged"), (4, 512, "fwd_sm90_paged")],
)
def test_the_faster_one_is_chosen_of_e4m3(batch: int, queries: int, backend: str) -> None:
    """As measured."""
    problem = decode_problem(
        batch=batch, max_q=queries, max_k=4096, cache_dtype="float8_e4m3fn", mask=CAUSAL
    )
    made = plan(problem, H200)
    assert made.backend == backend
    (forced,) = plan(problem, H200, "fwd_sm90_paged").launches
    assert forced.config.e4m3 and not forced.config.scores
    boxes = {m.field: (m.box, m.swizzle) for m in forced.maps}
    assert boxes["k_map"] == ((128, 16, 1, 1), 0) and boxes["v_map"] == ((128, 16, 1), 0)


def test_an_x_major_cache_is_read_as_it_lies() -> None:
    problem = decode_problem(
        batch=4, max_q=512, max_k=4096, layout=CacheLayout.X_MAJOR, page=32, mask=CAUSAL
    )
    (launch,) = plan(problem, H200).launches
    maps = {
        m.field: (m.box, m.swizzle, m.ragged) for m in launch.maps if m.field in ("k_map", "v_map")
    }
    assert maps == {"k_map": ((128, 16, 1, 1, 1), 0, False), "v_map": ((16, 128, 1, 1), 32, False)}
    capped = replace(problem, scores=Scores(softcap=True))
    (launch,) = plan(capped, H200).launches
    assert launch.config.xmajor and launch.config.scores and not launch.config.softcap


@pytest.mark.parametrize("layout", [CacheLayout.NHD, CacheLayout.X_MAJOR])
def test_csr_tables_have_the_launches_of_block_tables(layout: CacheLayout) -> None:
    for cache_dtype in ("bfloat16", "float8_e4m3fn"):
        problem = decode_problem(
            batch=4, max_q=512, layout=layout, cache_dtype=cache_dtype, mask=CAUSAL
        )
        made = plan(replace(problem, table=PageTable.CSR), H200)
        assert made.backend == "fwd_sm90_paged"
        assert made.launches == plan(problem, H200).launches


def test_single_tokens_beside_a_prompt_stay_with_decoding() -> None:
    packed: dict[str, Any] = {"q_rows": Rows.PACKED, "max_q": 512, "mask": CAUSAL}
    assert plan(decode_problem(batch=1, packed_q=512, **packed), H200).backend == "fwd_sm90_paged"
    assert plan(decode_problem(batch=4, packed_q=2048, **packed), H200).backend == "fwd_sm90_paged"
    assert plan(decode_problem(batch=64, packed_q=575, **packed), H200).backend == "decode_split"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_dtype": "float8_e5m2"}, "a cache of float8_e5m2"),
        ({"cache_dtype": "int8"}, "a cache of int8"),
        ({"cache_dtype": "float8_e4m3fn", "head_dim": 192}, "head_dim=192"),
        ({"layout": CacheLayout.X_MAJOR, "page": 8}, "pages of 8 tokens"),
        ({"layout": CacheLayout.X_MAJOR, "page": 40, "max_k": 40}, "pages of 40 tokens"),
        (
            {"layout": CacheLayout.X_MAJOR, "page": 2**28, "max_k": 2**28},
            f"pages of {2**28} tokens",
        ),
        ({"page": 24}, "pages of 24 tokens: takes multiples of 16"),
        ({"leftpad": True}, "takes no left padding"),
        ({"tree": True}, "trees of drafts"),
        ({"split": 64}, "fixed split"),
        ({"head_dim": 300}, "takes up to 256"),
        ({"copy_bytes": 8}, "16-byte aligned"),
        ({"tma": False}, "a tensor map can describe"),
        ({"max_k": 0}, "no keys"),
    ],
)
def test_what_it_refuses(changes: dict[str, Any], reason: str) -> None:
    problem = decode_problem(batch=4, max_q=4096, mask=CAUSAL, **changes)
    with pytest.raises(Unsupported, match=reason):
        plan(problem, H200, "fwd_sm90_paged")
    assert all("fwd_sm90_paged" not in launch.kernel for launch in plan(problem, H200).launches)


def test_a_row_of_a_contiguous_cache_may_have_any_length() -> None:
    problem = decode_problem(batch=4, max_q=4096, page=5000, max_k=5000, mask=CAUSAL)
    assert plan(problem, H200).backend == "fwd_sm90_paged"


def test_boxes_cross_no_page() -> None:
    (launch,) = plan(
        decode_problem(batch=4, max_q=512, head_dim=96, value_dim=96), H200, "fwd_sm90_paged"
    ).launches
    boxes = {wanted.field: (wanted.box, wanted.ragged) for wanted in launch.maps}
    assert boxes["k_map"] == ((32, 16, 1, 1), False) and boxes["v_map"] == ((32, 16, 1), True)


def paged(**changes: Any) -> tuple[np.ndarray, str]:
    """out of 20 queries over 40 keys on the emulator, and the kernel of attention."""
    rng = np.random.default_rng(0)
    q, k_cache, v_cache = (
        rng.standard_normal(shape).astype(np.float16)
        for shape in ((1, 20, 4, 64), (5, 16, 2, 64), (5, 16, 2, 64))
    )
    call: dict[str, Any] = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "causal": True}
    call |= {"block_table": np.array([[4, 0, 3]], np.int32), "cache_seqlens": 40}
    changed = {name: change(call[name]) for name, change in changes.items() if callable(change)}
    with emulated() as ran:
        out = rawattn.flash_attn_with_kvcache(**call | changes | changed)
    return out, ran[-1]


def half_a_token_apart(cache: np.ndarray) -> np.ndarray:
    """The same, with NaN of half a token between pages."""
    blocks, size = len(cache), cache[0].size
    room = np.full((blocks, size + cache[0, 0].size // 2), np.nan, cache.dtype)
    room[:, :size] = cache.reshape(blocks, size)
    return np.lib.stride_tricks.as_strided(
        room, cache.shape, (room.strides[0], *cache.strides[1:]), writeable=False
    )


def test_values_are_a_whole_number_of_tokens_apart() -> None:
    """Else their pages are no sequences of one array, and decoding takes them."""
    assert paged(backend="fwd_sm90_paged")[1] == "fwd_sm90_paged"
    with pytest.raises(Unsupported, match="a tensor map can describe"):
        paged(v_cache=half_a_token_apart, backend="fwd_sm90_paged")
    out, kernel = paged(v_cache=half_a_token_apart)
    assert kernel == "decode_sm90"
    assert np.isfinite(out).all()


def test_keys_may_be_any_distance_apart() -> None:
    """A tensor map of keys has a dimension of pages."""
    want, _ = paged(backend="fwd_sm90_paged")
    out, kernel = paged(k_cache=half_a_token_apart, backend="fwd_sm90_paged")
    assert kernel == "fwd_sm90_paged"
    np.testing.assert_array_equal(out, want)
