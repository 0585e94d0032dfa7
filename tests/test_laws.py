# SPDX-License-Identifier: Apache-2.0
"""The laws on every executor: NumPy arrays, CuPy arrays, the kernels themselves on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from rawattn.plan import BACKENDS
from rawattn.plan.base import REFERENCE
from rawattn.testing import LAWS, Case, Law, Op, Record, law_matches_reference, public_op
from rawattn.testing.strategies import problems
from tools.emulator.attention import emulator_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Who runs the laws, and its share of the profile's examples."""

    op: Callable[[], Op]
    share: float = 1.0


EXECUTORS = {
    "reference": Executor(op=lambda: public_op("numpy")),
    "emulator": Executor(op=emulator_op, share=0.25),
    "cuda": Executor(op=lambda: public_op("cupy")),  # what a GPU would run
    "cuda fwd_sm80": Executor(op=lambda: public_op("cupy", "fwd_sm80")),  # what any runs
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


@pytest.fixture(scope="session")
def op(executor: str, records: dict[str, Record]) -> Op:
    op = EXECUTORS[executor].op()
    records[executor] = op.record
    return op


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_law(op: Op, executor: str, law: Law) -> None:
    if why_not := law.why_not(op):
        pytest.skip(why_not)
    examples = settings.default.max_examples * EXECUTORS[executor].share

    @settings(max_examples=max(1, round(examples)))
    @given(problems(op.limits & law.limits))
    def check(case: Case) -> None:
        law(op, case)

    check()


def test_every_backend_obeys_the_laws() -> None:
    """The first is what "cuda" chooses; others run only where an executor names them."""
    _, *others = [backend.name for backend in BACKENDS if backend is not REFERENCE]
    assert set(EXECUTORS) == {"reference", "emulator", "cuda", *(f"cuda {x}" for x in others)}


# Cases that once failed, and that few examples would find again.
FOUND = (
    # Rows behind the last one were addressed through the stride of an axis of size 1.
    Case(q_lens=(1,), k_lens=(1,), dtype="float16", memory="odd_ones"),
    # The row maximum is not that of q.k where the scale is not positive.
    Case(q_lens=(40,), k_lens=(70,), scale=-0.5, causal=True),
    Case(q_lens=(40,), k_lens=(70,), scale=0.0, causal=True),
    # NumPy picked another memory order for a product with one key, and a reshape copied it.
    Case(q_lens=(128,), k_lens=(1,), dtype="float16", q_heads=2, kv_heads=2, head_dim=64),
    # Beside a sink, weights below float32's smallest normal number, which a GPU takes for 0.
    Case(
        q_lens=(252,),
        k_lens=(4,),
        head_dim=32,
        value_dim=32,
        layout="packed",
        alibi="heads",
        sink=True,
    ),
)


@pytest.mark.parametrize("case", FOUND, ids=repr)
def test_what_once_failed(op: Op, case: Case) -> None:
    law_matches_reference(op, case)
