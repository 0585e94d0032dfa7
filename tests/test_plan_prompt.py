# SPDX-License-Identifier: Apache-2.0
"""When a paged call is for fwd_sm90_paged, and what is launched then."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.device import Device
from rawattn.paged_problem import PageTable, Scale
from rawattn.plan.paged import plan
from rawattn.problem import CacheLayout, Mask, Rows, Unsupported
from tests.problems import decode_problem
from tools.emulator.api import emulated

H200 = Device.named("H200")
CAUSAL = Mask.of(True)


@pytest.mark.parametrize(
    ("batch", "queries", "backend"),
    [
        (1, 256, "decode_split"),
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
    assert plan(problem, H200).backend == backend
    for name in ("decode_split", "fwd_sm90_paged"):
        assert plan(problem, H200, name).backend == name


def test_single_tokens_beside_a_prompt_stay_with_decoding() -> None:
    packed: dict[str, Any] = {"q_rows": Rows.PACKED, "max_q": 512, "mask": CAUSAL}
    assert plan(decode_problem(batch=1, packed_q=512, **packed), H200).backend == "fwd_sm90_paged"
    assert plan(decode_problem(batch=4, packed_q=2048, **packed), H200).backend == "fwd_sm90_paged"
    assert plan(decode_problem(batch=64, packed_q=575, **packed), H200).backend == "decode_split"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"cache_dtype": "float8_e4m3fn"}, "a cache of float8_e4m3fn"),
        ({"layout": CacheLayout.X_MAJOR}, "takes NHD and HND"),
        ({"page": 24}, "pages of 24 tokens: takes multiples of 16"),
        ({"table": PageTable.CSR}, "takes pages of a block table"),
        ({"leftpad": True}, "takes pages of a block table"),
        ({"tree": True}, "no trees of drafts"),
        ({"split": 64}, "no fixed split"),
        ({"k_scale": Scale.NUMBER}, "takes none"),
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


def test_values_are_a_whole_number_of_tokens_apart() -> None:
    """Else their pages are no sequences of one array, and decoding takes them."""
    q = np.zeros((1, 700, 8, 64), np.float16)
    whole = np.zeros((80, 16, 1, 64), np.float16)
    ragged = np.zeros(80 * (16 * 64 + 8), np.float16)
    odd = np.lib.stride_tricks.as_strided(ragged, whole.shape, (2 * (16 * 64 + 8), 128, 128, 2))
    table = np.arange(80, dtype=np.int32)[None]
    for cache, kernel in ((whole, "fwd_sm90_paged"), (odd, "decode_sm90")):
        with emulated() as ran:
            backend = None if cache is odd else "fwd_sm90_paged"
            rawattn.flash_attn_with_kvcache(
                q,
                whole,
                cache,
                cache_seqlens=np.array([3], np.int32),
                block_table=table,
                causal=True,
                backend=backend,
            )
        assert ran[-1] == kernel
