# SPDX-License-Identifier: Apache-2.0
"""The laws on every executor: NumPy arrays, CuPy arrays, the kernels themselves on the emulator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import given, settings

from rawattn.testing import LAWS, Case, Law, Op, Record, public_op
from rawattn.testing.strategies import problems
from tools.emulator.attention import emulator_op


@dataclass(frozen=True, slots=True, kw_only=True)
class Executor:
    """Who runs the laws, and its share of the profile's examples."""

    op: Callable[[], Op]
    share: float = 1.0


EXECUTORS = {
    "reference": Executor(op=lambda: public_op("numpy")),
    "emulator": Executor(op=emulator_op, share=0.1),
    "cuda": Executor(op=lambda: public_op("cupy")),
}


@pytest.fixture(
    scope="session",
    params=[
        "reference",
        pytest.param("emulator", marks=pytest.mark.emulator),
        pytest.param("cuda", marks=pytest.mark.gpu),
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
    examples = settings.default.max_examples * EXECUTORS[executor].share

    @settings(max_examples=max(1, round(examples)))
    @given(problems(op.limits & law.limits))
    def check(case: Case) -> None:
        law(op, case)

    check()
