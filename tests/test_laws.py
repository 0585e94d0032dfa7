# SPDX-License-Identifier: Apache-2.0
"""The laws, on every executor: NumPy arrays, CuPy arrays, and the kernels themselves on the CPU emulator."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import given

from rawattn.testing import LAWS, Law, Op, Record, public_op
from rawattn.testing.strategies import problems


def reference_op() -> Op:
    return public_op("numpy")


def cuda_op() -> Op:
    return public_op("cupy")


def emulator_op() -> Op:
    if importlib.util.find_spec("tools.emulator.attention") is None:
        pytest.skip("tools/emulator is not there yet")
    raise NotImplementedError


EXECUTORS = {
    "reference": reference_op,
    "emulator": emulator_op,
    "cuda": cuda_op,
}


@pytest.fixture(
    scope="session",
    params=["reference", "emulator", pytest.param("cuda", marks=pytest.mark.gpu)],
)
def op(request: pytest.FixtureRequest, records: dict[str, Record]) -> Op:
    op = EXECUTORS[request.param]()
    records[request.param] = op.record
    return op


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_law(op: Op, law: Law) -> None:
    @given(problems(op.limits & law.limits))
    def check(case) -> None:  # type: ignore[no-untyped-def]
        law(op, case)

    check()
