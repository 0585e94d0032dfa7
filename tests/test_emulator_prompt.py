# SPDX-License-Identifier: Apache-2.0
"""fwd_sm90_paged on the emulator, through the public API: many queries over pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.plan import fwd_sm90, fwd_sm90_paged, paged
from rawattn.testing.paged_cases import PagedCase, PagedLimits
from rawattn.testing.paged_laws import law_paged_matches_reference, law_tables_are_equal
from tests.cascades import cascade_is_the_whole
from tools.emulator.api import Template, emulated, paged_emulator_op

pytestmark = pytest.mark.emulator

COMMON: dict[str, Any] = {"dtype": "float16", "q_heads": 4, "kv_heads": 2, "head_dim": 64}
CASES = {
    "causal": PagedCase(**COMMON, q_lens=(200, 200), k_lens=(300, 200), causal=True),
    "more queries than keys": PagedCase(**COMMON, q_lens=(70, 70), k_lens=(9, 0), causal=True),
    "packed": PagedCase(
        **COMMON, q_lens=(200, 0, 1, 70), k_lens=(200, 5, 140, 71), packed=True, causal=True
    ),
    "window": PagedCase(
        **COMMON, q_lens=(130, 130), k_lens=(300, 131), page=48, window=(70, 3), memory="gaps"
    ),
    "HND": PagedCase(
        **COMMON, q_lens=(100,), k_lens=(150,), layout="HND", page=32, softcap=5.0, causal=True
    ),
    "HND, gaps": PagedCase(
        **COMMON, q_lens=(9, 9), k_lens=(150, 33), layout="HND", page=32, memory="gaps", alibi=True
    ),
    "new tokens": PagedCase(
        **COMMON, q_lens=(40, 40), k_lens=(140, 40), new=40, rotary="halves", causal=True, sink=True
    ),
    "a contiguous cache": PagedCase(
        **COMMON, q_lens=(20, 20), k_lens=(256, 3), table="rows", causal=True
    ),
    "a token a page": PagedCase(**COMMON, q_lens=(3, 3), k_lens=(1, 1), page=1, tight=True),
    "a token a page, HND": PagedCase(
        **COMMON, q_lens=(1, 3, 2), k_lens=(1, 1, 0), packed=True, layout="HND", page=1, tight=True,
        memory="gaps", sink=True,
    ),
    "a contiguous cache of one token": PagedCase(
        **COMMON, q_lens=(3, 3), k_lens=(1, 1), table="rows", new=1, tight=True, causal=True
    ),
    "a contiguous cache of one token, HND": PagedCase(
        **COMMON, q_lens=(3, 3), k_lens=(1, 0), table="rows", layout="HND", tight=True
    ),
    "one block": PagedCase(**COMMON, q_lens=(20,), k_lens=(16,), tight=True, causal=True),
    "wide heads": PagedCase(
        **{**COMMON, "head_dim": 256}, q_lens=(65,), k_lens=(170,), causal=True, page=16
    ),
    "padded heads": PagedCase(
        **{**COMMON, "head_dim": 104}, q_lens=(3,), k_lens=(140,), value_dim=120, page=16
    ),
    "bfloat16": PagedCase(
        **{**COMMON, "dtype": "bfloat16", "head_dim": 96}, q_lens=(129,), k_lens=(129,), causal=True
    ),
    "x-major": PagedCase(
        **COMMON, q_lens=(200, 200), k_lens=(301, 200), layout="x-major", causal=True
    ),
    "x-major, packed": PagedCase(
        **COMMON, q_lens=(200, 0, 1, 70), k_lens=(200, 5, 140, 71), layout="x-major", packed=True,
        causal=True,
    ),
    "x-major, window": PagedCase(
        **COMMON, q_lens=(130, 130), k_lens=(300, 131), layout="x-major", page=48, window=(70, 3),
        memory="gaps",
    ),
    "x-major, softcap": PagedCase(
        **COMMON, q_lens=(100,), k_lens=(150,), layout="x-major", page=32, softcap=5.0, causal=True
    ),
    "x-major, ALiBi": PagedCase(
        **COMMON, q_lens=(9, 9), k_lens=(150, 33), layout="x-major", page=32, alibi=True
    ),
    "x-major, new tokens": PagedCase(
        **COMMON, q_lens=(40, 40), k_lens=(140, 40), layout="x-major", new=40, rotary="halves",
        causal=True, sink=True,
    ),
    "x-major, wide heads": PagedCase(
        **{**COMMON, "head_dim": 256}, q_lens=(65,), k_lens=(170,), layout="x-major", causal=True
    ),
    "x-major, 128": PagedCase(
        **{**COMMON, "dtype": "bfloat16", "head_dim": 128}, q_lens=(130, 3), k_lens=(263, 130),
        packed=True, layout="x-major", page=64, causal=True,
    ),
    "x-major, padded heads": PagedCase(
        **{**COMMON, "head_dim": 104}, q_lens=(3,), k_lens=(140,), value_dim=120, layout="x-major"
    ),
    "e4m3": PagedCase(
        **COMMON, q_lens=(200, 200), k_lens=(301, 200), cache_dtype="float8_e4m3fn",
        scales="number", causal=True,
    ),
    "e4m3, packed, HND": PagedCase(
        **{**COMMON, "dtype": "bfloat16", "head_dim": 128}, q_lens=(130, 0, 1, 70),
        k_lens=(200, 5, 140, 71), packed=True, layout="HND", cache_dtype="float8_e4m3fn",
        scales="heads", causal=True,
    ),
    "e4m3, window, gaps": PagedCase(
        **{**COMMON, "head_dim": 128}, q_lens=(130, 130), k_lens=(300, 131), page=48,
        window=(70, 3), memory="gaps", cache_dtype="float8_e4m3fn", scales="tensor",
    ),
    "e4m3, all scores": PagedCase(
        **{**COMMON, "dtype": "bfloat16"}, q_lens=(9, 9), k_lens=(150, 33), page=32, softcap=5.0,
        alibi=True, sink=True, cache_dtype="float8_e4m3fn", scales="heads", by_sequence=True,
        causal=True,
    ),
    "e4m3, x-major": PagedCase(
        **COMMON, q_lens=(200, 200), k_lens=(301, 200), cache_dtype="float8_e4m3fn",
        layout="x-major", scales="tensor", causal=True,
    ),
    "e4m3, x-major, pages of 48": PagedCase(
        **{**COMMON, "dtype": "bfloat16", "head_dim": 128}, q_lens=(130, 3, 70),
        k_lens=(263, 130, 0), packed=True, layout="x-major", page=48, cache_dtype="float8_e4m3fn",
        scales="heads", window=(70, 3), sink=True,
    ),
    "e4m3, x-major, padded heads": PagedCase(
        **{**COMMON, "head_dim": 80}, q_lens=(3, 70), k_lens=(140, 9), value_dim=112, packed=True,
        cache_dtype="float8_e4m3fn", layout="x-major",
    ),
    "e4m3, x-major, few values": PagedCase(
        **COMMON, q_lens=(20,), k_lens=(70,), value_dim=24, cache_dtype="float8_e4m3fn",
        layout="x-major", causal=True,
    ),
    "e4m3, a scale of 0": PagedCase(
        **COMMON, q_lens=(20,), k_lens=(70,), cache_dtype="float8_e4m3fn", scale=0.0, causal=True
    ),
    "e4m3, turned scores": PagedCase(
        **COMMON, q_lens=(20,), k_lens=(70,), cache_dtype="float8_e4m3fn", scale=-0.3
    ),
    "e4m3, padded heads": PagedCase(
        **{**COMMON, "head_dim": 80}, q_lens=(3, 70), k_lens=(140, 9), value_dim=112, packed=True,
        cache_dtype="float8_e4m3fn",
    ),
    "x-major, more queries than keys": PagedCase(
        **COMMON, q_lens=(70, 70), k_lens=(9, 0), layout="x-major", causal=True
    ),
    "CSR": PagedCase(
        **{**COMMON, "dtype": "bfloat16"}, q_lens=(200, 200), k_lens=(301, 200), table="csr",
        causal=True,
    ),
    "CSR, packed, a sequence without pages": PagedCase(
        **COMMON, q_lens=(130, 0, 70, 3), k_lens=(200, 5, 0, 71), packed=True, table="csr",
        causal=True, sink=True,
    ),
    "CSR, HND, gaps": PagedCase(
        **COMMON, q_lens=(130, 130), k_lens=(300, 131), layout="HND", page=48, table="csr",
        window=(70, 3), memory="gaps",
    ),
    "CSR, no pages at all but one": PagedCase(
        **COMMON, q_lens=(70, 70, 70), k_lens=(0, 16, 0), table="csr", tight=True
    ),
    "CSR, a token a page": PagedCase(
        **COMMON, q_lens=(3,), k_lens=(1,), page=1, table="csr", tight=True
    ),
    "CSR, more sequences than lanes": PagedCase(
        **COMMON, q_lens=(1, 70) * 17, k_lens=(33, 9, 0, 90, 16) * 6 + (1, 2, 3, 4), packed=True,
        table="csr",
    ),
    "CSR, x-major": PagedCase(
        **COMMON, q_lens=(200, 0, 1, 70), k_lens=(200, 5, 140, 0), layout="x-major", packed=True,
        table="csr", causal=True,
    ),
    "CSR, e4m3": PagedCase(
        **{**COMMON, "dtype": "bfloat16"}, q_lens=(200, 0, 70), k_lens=(301, 0, 33), packed=True,
        table="csr", cache_dtype="float8_e4m3fn", scales="heads", by_sequence=True, causal=True,
    ),
    "CSR, e4m3, x-major": PagedCase(
        **COMMON, q_lens=(70, 70), k_lens=(263, 0), layout="x-major", page=48, table="csr",
        cache_dtype="float8_e4m3fn", scales="tensor", causal=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prompt(name: str) -> None:
    for seed in range(2):
        law_paged_matches_reference(paged_emulator_op(seed, "fwd_sm90_paged"), CASES[name])
        assert Template.launched[-1] == "fwd_sm90_paged"


def test_a_capped_score_that_lse_cancels() -> None:
    """The log of the number of keys is as large as the score: a law had measured its error by lse,
    0.83, not by the score, 4.6.
    """
    case = PagedCase(
        q_lens=(1,), k_lens=(43,), dtype="float16", q_heads=5, scale=0.3, softcap=30.0,
        data="equal", seed=244,
    )  # fmt: skip
    law_paged_matches_reference(paged_emulator_op(0, "fwd_sm90_paged"), case)


# Of more key tiles than one, without steps of scores or a window to the left.
LONG = [
    name
    for name, c in CASES.items()
    if max(c.k_lens) > 129
    and c.window[0] < 0
    and not (c.softcap or c.alibi)
    # the one that would spill
    and not (c.quantized and c.layout == "x-major" and c.head_dim > 64)
]


@pytest.mark.parametrize("name", LONG)
def test_a_prompt_that_is_cut_over_its_keys(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However few key tiles that saves."""
    cuts, cut = [], fwd_sm90_paged._cut
    monkeypatch.setattr(fwd_sm90, "SAVED_ALONE", 1)
    monkeypatch.setattr(fwd_sm90_paged, "_cut", lambda *args: cuts.append(cut(*args)) or cuts[-1])
    paged.plan.cache_clear()
    try:
        for seed in range(2):
            law_paged_matches_reference(paged_emulator_op(seed, "fwd_sm90_paged"), CASES[name])
    finally:
        paged.plan.cache_clear()
    assert any(cuts)


@pytest.mark.parametrize("layout", ["NHD", "x-major"])
def test_tables_give_the_same_bits(layout: str) -> None:
    case = PagedCase(**COMMON, q_lens=(70, 70, 70), k_lens=(201, 0, 33), layout=layout, causal=True)
    op = replace(
        paged_emulator_op(0, "fwd_sm90_paged"),
        bitwise=True,
        limits=PagedLimits(tables=("csr",) if layout == "x-major" else ("csr", "rows")),
    )
    law_tables_are_equal(op, case)


@pytest.mark.parametrize("layout", ["NHD", "x-major"])
def test_a_scale_that_is_nearly_0_hides_no_key_twice(layout: str) -> None:
    """Rows of zeros, whose scale would be 0 in float32: -inf times 0 is NaN."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((1, 20, 2, 64)).astype(np.float16)
    q[0, 3:5] = 0
    k, v = rng.integers(0, 100, (2, 3, 2, 64, 16), np.uint8)  # x-major values, of 16 tokens
    caches = (
        (k.reshape(3, 2, 4, 16, 16), v)
        if layout == "x-major"
        else (k.reshape(3, 16, 2, 64), v.reshape(3, 16, 2, 64))
    )
    call: dict[str, Any] = {
        "cache_seqlens": np.array([40], np.int32),
        "block_table": np.array([[2, 0, 1]], np.int32),
        "kv_cache_dtype": "fp8",
        "layout": layout,
        "causal": True,
        "softmax_scale": 1e-10,
        "k_descale": 1e-9,
    }
    want = rawattn.flash_attn_with_kvcache(q, *caches, **call)
    with emulated():
        out = rawattn.flash_attn_with_kvcache(q, *caches, **call, backend="fwd_sm90_paged")
    np.testing.assert_allclose(
        out.astype(np.float32), want.astype(np.float32), atol=2e-2, rtol=2e-3
    )


# ---- cascades, both of whose parts it is for -----------------------------------------------------

CASCADES = {
    "dense": PagedCase(**COMMON, q_lens=(40, 40), k_lens=(60, 0), causal=True),
    "packed": PagedCase(
        **COMMON, q_lens=(70, 1, 0), k_lens=(5, 140, 9), packed=True, causal=True
    ),
    "sink and softcap": PagedCase(
        **COMMON, q_lens=(30, 30), k_lens=(9, 50), causal=True, sink=True, softcap=5.0
    ),
    "rows of q with gaps": PagedCase(
        **COMMON, q_lens=(30, 30), k_lens=(9, 50), causal=True, memory="gaps", layout="HND"
    ),
    "x-major": PagedCase(
        **COMMON, q_lens=(30, 30), k_lens=(9, 50), layout="x-major", causal=True
    ),
    "e4m3": PagedCase(
        **COMMON, q_lens=(30, 30), k_lens=(9, 50), cache_dtype="float8_e4m3fn", scales="heads",
        causal=True,
    ),
    "one query a sequence": PagedCase(
        **COMMON, q_lens=(1, 1, 1), k_lens=(9, 50, 0), causal=True, page=32
    ),
    "one sequence, no mask": PagedCase(**COMMON, q_lens=(20,), k_lens=(30,), tight=True),
}  # fmt: skip


@pytest.mark.parametrize("name", CASCADES)
def test_cascade(name: str) -> None:
    for seed, pages in ((0, 3), (1, 1)):
        cascade_is_the_whole(
            CASCADES[name], pages, lambda seed=seed: emulated(seed=seed), "fwd_sm90_paged"
        )
        assert Template.launched == ["fwd_sm90_paged", "fwd_sm90_paged", "merge"]


@pytest.mark.parametrize(
    ("prefix", "part"), [(0, "the shared prefix"), (32, "what follows the shared prefix")]
)
def test_a_cascade_of_which_a_part_has_no_keys(prefix: int, part: str) -> None:
    """The kernel refuses that part, as any call without keys; what chooses by itself takes it."""
    rng = np.random.default_rng(0)
    q = rng.standard_normal((2, 3, 4, 64)).astype(np.float16)
    k_cache, v_cache = rng.standard_normal((2, 3, 16, 2, 64)).astype(np.float16)
    call: dict[str, Any] = {
        "cache_seqlens": np.array([32, 32], np.int32),
        "block_table": np.array([[2, 0], [2, 0]], np.int32),
        "common_prefix_len": prefix,
        "causal": False,
    }
    with emulated() as ran:
        rawattn.cascade_attention(q, k_cache, v_cache, **call)
        assert ran[-1] == "merge" and all("decode" in kernel for kernel in ran[:-1])
        with pytest.raises(rawattn.Unsupported, match=f"attention to {part}: .*no keys"):
            rawattn.cascade_attention(q, k_cache, v_cache, **call, backend="fwd_sm90_paged")


def test_a_cascade_of_kernels_without_a_prefix() -> None:
    cascade_is_the_whole(CASCADES["dense"], 0, emulated)
