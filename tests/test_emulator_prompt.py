# SPDX-License-Identifier: Apache-2.0
"""fwd_sm90_paged on the emulator, through the public API: many queries over pages."""

from __future__ import annotations

from typing import Any

import pytest

from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_laws import law_paged_matches_reference
from tools.emulator.api import Template, paged_emulator_op

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
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_prompt(name: str) -> None:
    for seed in range(2):
        law_paged_matches_reference(paged_emulator_op(seed, "fwd_sm90_paged"), CASES[name])
        assert Template.launched[-1] == "fwd_sm90_paged"
