# SPDX-License-Identifier: Apache-2.0
"""Merging and storing: their laws on every executor, and what NumPy arrays make easy to see."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings

import rawattn
from rawattn.forward import Settings
from rawattn.reference import merge_states
from rawattn.testing.cache_laws import (
    MergeCase,
    WriteCase,
    law_merged_is_the_union,
    law_written_is_read,
    merge_cases,
    write_cases,
)
from tools.emulator.api import emulated

FLOATS = ("float16", "bfloat16", "float32")
WRITES = rawattn.reshape_and_cache, rawattn.reshape_and_cache_flash
MERGES = rawattn.merge_states, rawattn.merge_attn_states


class Executor(NamedTuple):
    module: str
    share: float  # of the profile's examples
    dtypes: tuple[str, ...]
    on: Any  # what to run calls in


EXECUTORS = {
    "reference": Executor("numpy", 1.0, FLOATS, contextlib.nullcontext),
    "emulator": Executor("numpy", 0.3, ("float16",), emulated),  # g++ takes seconds a dtype
    "cuda": Executor("cupy", 2.0, FLOATS, contextlib.nullcontext),
}


@pytest.fixture(
    params=[
        "reference",
        pytest.param("emulator", marks=pytest.mark.emulator),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def executor(request: pytest.FixtureRequest) -> Executor:
    return EXECUTORS[request.param]


def examples(executor: Executor) -> Any:
    return settings(max_examples=max(1, round(settings.default.max_examples * executor.share)))


def test_what_is_written_is_read(executor: Executor) -> None:
    xp = importlib.import_module(executor.module)

    @examples(executor)
    @given(write_cases(executor.dtypes))
    def check(case: WriteCase) -> None:
        with executor.on():
            law_written_is_read(WRITES, xp, case)

    check()


def test_what_is_merged_is_the_union(executor: Executor) -> None:
    xp = importlib.import_module(executor.module)

    @examples(executor)
    @given(merge_cases(executor.dtypes))
    def check(case: MergeCase) -> None:
        with executor.on():
            law_merged_is_the_union(MERGES, xp, case)

    check()


CASES = (
    MergeCase(states=2, tokens=6, dtype="float16", first_tokens=2),
    MergeCase(states=2, tokens=6, dtype="float16", first_tokens=0, empty=0.3),
    MergeCase(states=2, tokens=3, dtype="float16", apart=1e30),
    MergeCase(states=3, tokens=5, dtype="float16", empty=1.0),
)


@pytest.mark.parametrize("case", CASES, ids=repr)
def test_what_few_examples_would_miss(executor: Executor, case: MergeCase) -> None:
    with executor.on():
        law_merged_is_the_union(MERGES, importlib.import_module(executor.module), case)


def test_a_call_that_writes_to_its_inputs_is_caught() -> None:
    def clearing(call: Callable[..., Any], at: int) -> Callable[..., Any]:
        def cleared(*arguments: Any, **options: Any) -> None:
            call(*arguments, **options)
            arguments[at][...] = 0

        return cleared

    with pytest.raises(AssertionError, match="value: an input was written"):
        law_written_is_read((WRITES[0], clearing(WRITES[1], 1)), np, WriteCase(tokens=3))
    for at, name in ((0, "outs"), (1, "lses")):
        with pytest.raises(AssertionError, match=f"{name}: an input was written"):
            law_merged_is_the_union((clearing(MERGES[0], at), MERGES[1]), np, CASES[3])
    for at, name in ((1, "prefix_output"), (4, "suffix_lse")):
        with pytest.raises(AssertionError, match=f"{name}: an input was written"):
            law_merged_is_the_union((MERGES[0], clearing(MERGES[1], at)), np, CASES[0])


@pytest.mark.parametrize("as_array", [False, True])
def test_an_output_of_8_bits(executor: Executor, as_array: bool) -> None:
    """Divided by its scale, rounded once, saturated."""
    xp, rng = importlib.import_module(executor.module), np.random.default_rng(0)
    outs = 40 * rng.standard_normal((2, 9, 3, 64), np.float32).astype(np.float16)
    lses = rng.standard_normal((2, 3, 9), np.float32)
    outs[0, 0, 0, 0], lses[1, 0, 0] = 60000, -np.inf
    scale = np.float32([0.25])
    out = xp.zeros((9, 3, 64), np.uint8)
    states = [xp.asarray(x) for pair in zip(outs, lses, strict=True) for x in pair]
    with executor.on():
        given = xp.asarray(scale) if as_array else 0.25
        assert rawattn.merge_attn_states(out, *states, output_scale=given) is out
    exact, _ = merge_states(outs, lses.swapaxes(-1, -2))
    got = out.get() if hasattr(out, "get") else out
    got = got.view(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert got[0, 0, 0] == 448
    want = np.clip(exact / 0.25, -448, 448)
    assert (np.abs(got - want) <= np.maximum(np.abs(want) * 2.0**-4, 2.0**-10) * 1.001).all()


def test_an_unknown_name_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def named(backend: str) -> None:
        settings = Settings(backend=backend, check=False)
        monkeypatch.setattr(Settings, "read", staticmethod(lambda: settings))

    out, lse = np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 2, 3), np.float32)
    named("nope")
    with pytest.raises(ValueError, match=r"RAWATTN_BACKEND='nope': accepted are .*merge"):
        rawattn.merge_states(out, lse)
    named("fwd_sm80")  # of another operation
    rawattn.merge_states(out, lse)


def test_a_dense_plan_is_for_a_dense_call() -> None:
    out, lse = np.zeros((2, 3, 2, 8), np.float32), np.zeros((2, 2, 3), np.float32)
    plan = rawattn.prepare(rawattn.flash_attn_func, out, out, out)
    with pytest.raises(ValueError, match="prepared for another function"):
        rawattn.merge_states(out, lse, plan=plan)
