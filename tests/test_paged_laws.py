# SPDX-License-Identifier: Apache-2.0
"""The laws of attention over paged caches, on every executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, reject, settings

from rawattn import Unsupported
from rawattn.plan.base import REFERENCE
from rawattn.plan.paged import BACKENDS
from rawattn.testing import Record
from rawattn.testing.paged_cases import PagedCase, PagedLimits
from rawattn.testing.paged_laws import (
    PAGED_LAWS,
    PagedLaw,
    PagedOp,
    law_paged_matches_reference,
    paged_op,
)
from rawattn.testing.paged_strategies import paged_cases
from tools.emulator.api import paged_emulator_op

PROMPTS = PagedLimits(
    dtypes=("float16", "bfloat16"),
    cache_dtypes=("same", "float8_e4m3fn"),
    pages=(1, 16, 32, 48, 64, 128, 256, 544),
    leftpad=(False,),
    splits=(0,),
    tree=(False,),
)
ONE_QUERY = PagedLimits(layouts=("x-major",), packed=(False,), max_q=1, tree=(False,))


def prompts() -> PagedOp:
    return replace(paged_op("cupy", "fwd_sm90_paged"), limits=PROMPTS)


# Executors, and their share of the profile's examples.
EXECUTORS: dict[str, tuple[Callable[[], PagedOp], float]] = {
    "reference": (lambda: paged_op("numpy"), 1.0),
    "emulator": (paged_emulator_op, 0.06),
    "cuda": (lambda: paged_op("cupy"), 0.6),
    "cuda fwd_sm90_paged": (prompts, 0.3),
    "cuda paged_v1": (lambda: paged_op("cupy", "paged_v1"), 0.15),
    "cuda paged_v2": (lambda: paged_op("cupy", "paged_v2"), 0.15),
}


@pytest.fixture(
    scope="session",
    params=[
        "reference",
        pytest.param("emulator", marks=pytest.mark.emulator),
        *(pytest.param(n, marks=pytest.mark.gpu) for n in EXECUTORS if n.startswith("cuda")),
    ],
)
def executor(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("law", PAGED_LAWS, ids=lambda law: law.name)
def test_law(law: PagedLaw, executor: str, records: dict[str, Record]) -> None:
    make, share = EXECUTORS[executor]
    op = make()
    if why_not := law.why_not(op):
        pytest.skip(why_not)
    record = records.setdefault(f"paged {executor}", op.record)

    @settings(
        max_examples=max(1, round(settings.default.max_examples * share)),
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(paged_cases(op.limits & law.limits))
    def check(case: PagedCase) -> None:
        try:
            law(op, case)
        except Unsupported:
            reject()

    check()
    if record is not op.record:
        record.examples += op.record.examples
        for output, ratio in op.record.worst.items():
            record.saw(output, ratio)


def test_every_backend_obeys_the_laws() -> None:
    """The first is what "cuda" chooses; others run only where an executor names them."""
    _, *others = [backend.name for backend in BACKENDS if backend is not REFERENCE]
    assert set(EXECUTORS) == {"reference", "emulator", "cuda", *(f"cuda {x}" for x in others)}


COMMON: dict[str, Any] = {"dtype": "float16", "q_heads": 4, "kv_heads": 2}
# What few examples may not draw, one thing in each.
CASES = (
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 9), window=(20, 3)),
    PagedCase(**COMMON, q_lens=(1, 3, 0), k_lens=(70, 9, 5), packed=True, causal=True),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(70, 0), softcap=5.0, alibi=True, sink=True),
    PagedCase(**COMMON, q_lens=(4, 4), k_lens=(70, 4), tree=True),
    PagedCase(**COMMON, q_lens=(2, 3), k_lens=(70, 9), tree=True, packed=True, window=(9, -1)),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(33, 16), table="csr", scale=-0.5),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(70, 9), cache_dtype="float8_e4m3fn", scales="heads"),
    PagedCase(
        **COMMON, q_lens=(1, 1), k_lens=(70, 9), cache_dtype="float8_e4m3fn", scales="heads",
        by_sequence=True,
    ),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 9), alibi=True, by_sequence=True, causal=True),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 9), new=2, rotary="halves", causal=True),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(70, 9), new=1, rotary="interleaved", split=32),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(70, 9), layout="x-major", page=8, memory="gaps"),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 9), layout="x-major", page=5, value_dim=7),
    PagedCase(**COMMON, q_lens=(1, 1), k_lens=(600, 9), head_dim=576, value_dim=512),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 9), new=2, rotary="halves", head_dim=65),
    PagedCase(
        **COMMON, q_lens=(1, 3, 2), k_lens=(70, 9, 5), new=4, new_packed=True, packed=True,
        rotary="interleaved", causal=True, seed=3,
    ),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(70, 0), table="rows", leftpad=True, window=(9, 0)),
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(0, 0), tight=True),  # a table without columns
    PagedCase(**COMMON, q_lens=(2, 2), k_lens=(0, 0), tight=True, layout="x-major"),
    PagedCase(  # a window that hides no key still tells queries apart
        **COMMON, q_lens=(3, 3), k_lens=(70, 9), new=2, rotary="halves", window=(500, 500),
    ),
    PagedCase(
        **COMMON, q_lens=(2, 2), k_lens=(70, 9), table="rows", leftpad=True, layout="HND",
        memory="gaps", new=2, new_packed=True, rotary="halves", causal=True, alibi=True,
    ),
)  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_what_few_examples_would_miss(executor: str, case: PagedCase) -> None:
    try:
        law_paged_matches_reference(EXECUTORS[executor][0](), case)
    except Unsupported as refusal:
        assert executor.startswith("cuda "), refusal  # of a backend that is forced


def test_a_law_says_whether_it_is_about_an_op() -> None:
    everything = paged_op("numpy")
    assert [law.why_not(everything) for law in PAGED_LAWS] == [None] * len(PAGED_LAWS)
    one_query = replace(everything, limits=PagedLimits() & ONE_QUERY)
    refused = {law.name: why for law in PAGED_LAWS if (why := law.why_not(one_query))}
    assert "law_paged_matches_reference" not in refused
    assert "is about packed=(True,)" in refused["law_merged_parts_are_the_whole"]
