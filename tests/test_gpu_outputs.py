# SPDX-License-Identifier: Apache-2.0
"""The emulator gives what a GPU gave, for the problems of tests/gpu_outputs.npz."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn.testing import Case, Op, Record, expected, public_op, run, tensors
from rawattn.testing.cases import ALIBI, DATA, LAYOUTS, MEMORIES
from rawattn.testing.closeness import bounds
from tools import gpu_bits, gpu_outputs
from tools.cases import CASES
from tools.cases.executors import emulated_op, on_emulator
from tools.emulator import attention
from tools.gpu_bits import GATHERS
from tools.gpu_outputs import Output, Outputs

WHY_NOT = gpu_outputs.why_not()
RECORDED = gpu_outputs.load() if WHY_NOT is None else None
OUTPUTS, BITS = (RECORDED.outputs, RECORDED.bits) if RECORDED else ((), ())

EMULATOR = Op(
    name="emulator", call=functools.partial(attention.attention, seeds=1, backend="fwd_sm80")
)


@pytest.mark.emulator
@pytest.mark.parametrize(
    "output",
    OUTPUTS or [pytest.param(None, marks=pytest.mark.skip(reason=str(WHY_NOT)))],
    ids=lambda output: repr(getattr(output, "case", None)),
)
def test_emulator_gives_what_the_gpu_gave(output: Output, records: dict[str, Record]) -> None:
    gpu_outputs.hold(EMULATOR, output, records.setdefault("emulator beside GPU", Record()))


@pytest.mark.emulator
@pytest.mark.parametrize("name", (*CASES, *GATHERS))
def test_emulator_gives_the_bits_that_the_gpu_gave(name: str) -> None:
    """Where no approximate instruction has a part in it."""
    if WHY_NOT is not None:
        pytest.skip(WHY_NOT)
    recorded = [bits for bits in BITS if bits.name == name]
    assert recorded, f"nothing was recorded of {name}"
    for bits in recorded:
        gpu_bits.hold(bits, on_emulator, emulated_op)


def test_the_problems_cover_what_they_should(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [output.case for output in OUTPUTS] or gpu_outputs.draw_cases()
    planned = set()

    def look(plan: Any, *rest: Any, **more: Any) -> None:
        planned.update(launch.config for launch in plan.launches)

    monkeypatch.setattr(attention, "run_plan", look)
    for case in cases:
        run(EMULATOR, tensors(case))
    assert planned == set(gpu_outputs.chosen_configs())
    assert len(set(cases)) >= 200
    assert {(c.layout, c.memory) for c in cases} == {(x, y) for x in LAYOUTS for y in MEMORIES}
    assert {c.data for c in cases} == set(DATA)
    assert {(c.alibi, c.sink) for c in cases} == {(x, y) for x in ALIBI for y in (False, True)}
    assert {c.causal for c in cases} == {False, True, "top_left"}
    windows = {(c.window[0] >= 0, c.window[1] >= 0) for c in cases}
    assert len(windows) == 4, "windows on no, one, another, both sides"
    assert any(c.softcap for c in cases) and any(c.scale == 0 for c in cases)


def test_there_are_enough_problems_bit_for_bit() -> None:
    assert len(set(gpu_bits.problems())) >= 200


@pytest.mark.emulator
@pytest.mark.parametrize("name", ["merge 2 float32 to float32", "gather paged_v1 x-major same"])
def test_other_bits_are_found(name: str) -> None:
    bits = gpu_bits.bits_of(name, 1, on_emulator, emulated_op)
    gpu_bits.hold(bits, on_emulator, emulated_op)
    for changes, words in (
        ({"outputs": ("0" * 16, *bits.outputs[1:])}, f"other bits than the GPU's: {name}, seed 1"),
        ({"inputs": 1}, "the GPU had other inputs"),
    ):
        with pytest.raises(AssertionError, match=words):
            gpu_bits.hold(dataclasses.replace(bits, **changes), on_emulator, emulated_op)


# ---- the comparison itself -----------------------------------------------------------------------

CASES = (
    Case(q_lens=(70,), k_lens=(100,), q_heads=4, kv_heads=2, causal=True),
    Case(q_lens=(5, 0, 33), k_lens=(9, 7, 0), dtype="float16", layout="packed", memory="gaps"),
)


@pytest.fixture(scope="module")
def outputs() -> Outputs:
    """As a GPU with other rounding would give them."""
    return gpu_outputs.record(public_op("numpy"), CASES, "none")


def changed(output: Output, **arrays: tuple[int, Any]) -> Output:
    """An output with one element of out or lse another one."""
    new = {name: getattr(output, name).copy() for name in arrays}
    for name, (index, value) in arrays.items():
        new[name][index] = value
    return dataclasses.replace(output, **new)


@pytest.mark.emulator
def test_the_same_results_pass(outputs: Outputs) -> None:
    record = Record()
    for output in outputs.outputs:
        gpu_outputs.hold(EMULATOR, output, record)
    assert record.examples == len(CASES) and 0 < record.worst["out"] <= 1


@pytest.mark.parametrize(
    "element",
    [
        {"out": (3, 0x7F80)},  # inf
        {"out": (-1, 0x4000)},  # 2
        {"lse": (0, np.nan)},
        {"lse": (-1, -np.inf)},
        {"lse": (7, 0.0)},
    ],
    ids=str,
)
def test_a_wrong_element_is_found(outputs: Outputs, element: dict[str, tuple[int, Any]]) -> None:
    wrong = changed(outputs.outputs[0], **element)
    with pytest.raises(AssertionError, match=rf"^GPU: {next(iter(element))}\["):
        gpu_outputs.hold(public_op("numpy"), wrong, Record())


def test_results_that_are_right_may_be_too_far_from_each_other(outputs: Outputs) -> None:
    output = outputs.outputs[0]
    want = expected(tensors(output.case))
    part = 0.7 * bounds(want, output.case.dtype)[1].min()

    def high(*arrays: Any, lse: Any, **more: Any) -> None:
        public_op("numpy").call(*arrays, lse=lse, **more)
        lse += part

    low = dataclasses.replace(output, lse=(output.lse - part).astype(np.float32))
    gpu_outputs.hold(public_op("numpy"), low, Record())
    gpu_outputs.hold(Op(name="high", call=high), output, Record())
    with pytest.raises(AssertionError, match=r"^high beside GPU: lse\["):
        gpu_outputs.hold(Op(name="high", call=high), low, Record())


def test_other_inputs_are_found(outputs: Outputs) -> None:
    other = dataclasses.replace(outputs.outputs[0], inputs=1)
    with pytest.raises(AssertionError, match="the GPU had other inputs"):
        gpu_outputs.hold(public_op("numpy"), other, Record())


def test_the_file_gives_back_what_was_saved(outputs: Outputs, tmp_path: Path) -> None:
    path = tmp_path / "outputs.npz"
    assert "there is no tests/outputs.npz" in str(gpu_outputs.why_not(path))
    gpu_outputs.save(outputs, path)
    assert gpu_outputs.why_not(path) is None
    loaded = gpu_outputs.load(path)
    assert (loaded.gpu, loaded.sources) == (outputs.gpu, outputs.sources)
    for x, y in zip(loaded.outputs, outputs.outputs, strict=True):
        assert (x.case, x.inputs) == (y.case, y.inputs)
        assert np.array_equal(x.out, y.out) and np.array_equal(x.lse, y.lse)
    gpu_outputs.save(dataclasses.replace(outputs, sources="old"), path)
    assert "is of other sources (old, not" in str(gpu_outputs.why_not(path))


@pytest.mark.parametrize("shape", [(7, 3, 64), (500, 2, 96), (1, 1, 1), (0, 2, 8), (2, 3, 0), (0,)])
def test_a_sample_has_every_column(shape: tuple[int, ...]) -> None:
    index = gpu_outputs.sample(shape, 1024)
    columns = set(np.unravel_index(index, shape)[-1].tolist()) if index.size else set()
    assert len(index) <= 1024 and columns == set(range(shape[-1] if 0 not in shape else 0))
