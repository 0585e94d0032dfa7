# SPDX-License-Identifier: Apache-2.0
"""The tests of the tests: cases, inputs, the comparison, and that broken kernels break laws."""

from __future__ import annotations

import dataclasses
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings

from rawattn import reference
from rawattn.problem import Mask
from rawattn.testing import (
    LAWS,
    Case,
    Limits,
    Op,
    Record,
    assert_close,
    assert_same,
    expected,
    make_inputs,
    public_op,
    tensors,
)
from rawattn.testing.cases import MEMORIES
from rawattn.testing.strategies import problems

LAW = {law.name: law for law in LAWS}


def toy(
    q: Any,
    k: Any,
    v: Any,
    *,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    seqused_k: Any,
    max_seqlen_q: int,
    max_seqlen_k: int,
    softmax_scale: float | None,
    causal: bool | str,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Any,
    sink: Any,
    out: Any,
    lse: Any,
) -> None:
    """A right attention: the rounded twin of the reference."""
    o, x = reference.attention(
        *(a.astype(np.float32) for a in (q, k, v)),
        mask=Mask.of(causal, window_size),
        scale=softmax_scale,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sink=sink,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        seqused_k=seqused_k,
        rounding=str(q.dtype),
    )
    first, last = (0, len(q)) if cu_seqlens_q is None else cu_seqlens_q[[0, -1]]
    if cu_seqlens_q is None:
        out[...], lse[...] = o, x
    else:
        out[first:last], lse[:, first:last] = o[first:last], x[:, first:last]


def op_of(call: Callable[..., Any]) -> Op:
    return Op(name="toy", call=call, limits=Limits(max_len=40), bitwise=False)


# ---- broken kernels: each must be caught by the law named beside it ------------------------------


def changed(**replaced: Callable[[dict[str, Any]], Any]) -> Callable[..., None]:
    """The toy kernel with some of its arguments computed from all of them."""

    def call(q: Any, k: Any, v: Any, **arguments: Any) -> None:
        given_ = {"q": q, "k": k, "v": v, **arguments}
        toy(**{**given_, **{name: change(given_) for name, change in replaced.items()}})

    return call


def after(change: Callable[[dict[str, Any]], Any]) -> Callable[..., None]:
    """The toy kernel, then a change to what it wrote."""

    def call(q: Any, k: Any, v: Any, **arguments: Any) -> None:
        toy(q, k, v, **arguments)
        change({"q": q, "k": k, "v": v, **arguments})

    return call


def write_before_the_first_row(a: dict[str, Any]) -> None:
    if a["cu_seqlens_q"] is not None:
        a["out"][: a["cu_seqlens_q"][0]] = 0


def nan_in_empty_rows(a: dict[str, Any]) -> None:
    a["out"][np.isneginf(a["lse"]).swapaxes(-1, -2)] = np.nan


def scaled_values(factor: Callable[[], float]) -> Callable[..., None]:
    return changed(v=lambda a: (a["v"] * factor()).astype(a["v"].dtype))


# name: (kernel, the law that it breaks, what the message says)
MUTANTS = {
    "mask one to the right": (
        changed(window_size=lambda a: (-1, 1 if a["causal"] else a["window_size"][1])),
        "law_matches_reference",
        "error / bound",
    ),
    "top left for bottom right": (
        changed(causal=lambda a: "top_left" if a["causal"] is True else a["causal"]),
        "law_matches_reference",
        "error / bound",
    ),
    "no sink": (changed(sink=lambda a: None), "law_matches_reference", "error / bound"),
    "no ALiBi": (changed(alibi_slopes=lambda a: None), "law_matches_reference", "error / bound"),
    "no softcap": (changed(softcap=lambda a: 0.0), "law_matches_reference", "error / bound"),
    "reads unused slots": (
        changed(seqused_k=lambda a: None),
        "law_unused_slots_are_never_read",
        "want the bits",
    ),
    "writes padding rows": (
        after(write_before_the_first_row),
        "law_matches_reference",
        "outside its rows",
    ),
    "writes to q": (
        after(lambda a: a["q"].fill(0)),
        "law_matches_reference",
        "q: an input was written",
    ),
    "writes to its table": (
        after(lambda a: a["cu_seqlens_q"] is not None and a["cu_seqlens_q"].fill(0)),
        "law_matches_reference",
        "cu_seqlens_q: an input was written",
    ),
    "NaN in empty rows": (after(nan_in_empty_rows), "law_empty_rows", "is not 0"),
    "other bits each time": (
        scaled_values(lambda: 1 + np.random.default_rng().random()),
        "law_reruns_are_equal",
        "want the bits",
    ),
    "weights do not sum to 1": (scaled_values(lambda: 1.05), "law_values_of_one", "error / bound"),
    "head 0 of KV for all": (
        changed(
            k=lambda a: np.broadcast_to(a["k"][..., :1, :], a["k"].shape),
            v=lambda a: np.broadcast_to(a["v"][..., :1, :], a["v"].shape),
        ),
        "law_order_of_heads",
        "error / bound",
    ),
    "window drops its far end": (
        changed(window_size=lambda a: tuple(w if w <= 0 else w - 1 for w in a["window_size"])),
        "law_wide_window_is_no_window",
        "want the bits",
    ),
}


def judge(call: Callable[..., Any], law: str, examples: int) -> None:
    """The law over some cases; raises what it raises."""
    judge_op(op_of(call), law, examples)


def judge_op(op: Op, law: str, examples: int) -> None:
    @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate])
    @given(problems(op.limits & LAW[law].limits))
    def check(case: Case) -> None:
        LAW[law](op, case)

    check()


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_breaks_its_law(name: str) -> None:
    call, law, message = MUTANTS[name]
    with pytest.raises(AssertionError, match=f"{law} on toy: .*{message}"):
        judge(call, law, 300)


def test_who_multiplies_with_weights_of_0_is_told_to_select() -> None:
    def multiply(a: dict[str, Any]) -> None:
        a["out"][...] += 0 * a["v"].astype(np.float32).sum()

    with pytest.raises(AssertionError, match="select 0 there, a product with weights of 0 is NaN"):
        LAW["law_empty_rows"](op_of(after(multiply)), Case(q_lens=(3,), k_lens=(1,), causal=True))


PLAIN = Limits(
    layouts=("dense",),
    causal=(False,),
    windows=False,
    softcap=False,
    alibi=("none",),
    sink=(False,),
    memories=("contiguous",),
    max_len=40,
)


def plain(q: Any, k: Any, v: Any, **arguments: Any) -> None:
    """The toy kernel of `PLAIN`, which refuses the rest."""
    for name in ("cu_seqlens_q", "cu_seqlens_k", "seqused_k", "alibi_slopes", "sink"):
        assert arguments[name] is None, name
    assert arguments["causal"] is False and arguments["window_size"] == (-1, -1)
    assert arguments["softcap"] == 0
    toy(q, k, v, **arguments)


@pytest.mark.parametrize("law", LAW)
def test_a_plain_kernel_gets_only_what_it_takes_and_a_reason_for_the_rest(law: str) -> None:
    op = dataclasses.replace(op_of(plain), name="plain", limits=PLAIN)
    why_not = LAW[law].why_not(op)
    if why_not is None:
        judge_op(op, law, 10)
    else:
        field = "(layouts|memories|causal|windows)"
        sentence = rf"{law} (?:needs|is about) {field}=.*, and plain takes \1=.*"
        assert re.fullmatch(sentence, why_not)


def test_every_law_is_about_an_op_that_takes_all() -> None:
    assert [law.why_not(op_of(toy)) for law in LAWS] == [None] * len(LAWS)
    few = dataclasses.replace(op_of(toy), limits=Limits(data=("huge",)))
    assert "is about data=('integers',)" in str(LAW["law_shift_of_keys"].why_not(few))


@pytest.mark.parametrize("law", LAW)
def test_a_right_kernel_obeys_every_law(law: str) -> None:
    judge(toy, law, 25)


# ---- strategies and inputs -----------------------------------------------------------------------


def drawn(limits: Limits, examples: int) -> list[Case]:
    cases: list[Case] = []

    @settings(max_examples=examples, derandomize=True, database=None, phases=[Phase.generate])
    @given(problems(limits))
    def draw(case: Case) -> None:
        cases.append(case)

    draw()
    return cases


def test_problems_cover_what_they_should() -> None:
    cases = drawn(Limits(), 400)
    seen = Counter(n for c in cases for n in c.q_lens + c.k_lens)
    assert 0.05 < seen[0] / seen.total() < 0.25, "about a tenth of the lengths are 0"
    assert {1, 15, 16, 17, 63, 64, 65, 127, 128, 129} <= set(seen)
    assert {c.layout for c in cases} == set(Limits().layouts)
    assert {c.memory for c in cases} == set(MEMORIES)
    assert {c.data for c in cases} == set(Limits().data)
    assert {c.causal for c in cases} == {False, True, "top_left"}
    assert {c.mask.left < 0 for c in cases} == {c.mask.right > 0 for c in cases} == {False, True}
    assert any(c.head_dim != c.value_dim for c in cases)
    assert any(c.head_dim % 8 for c in cases)
    assert any(c.group == 3 for c in cases)
    assert any(c.batch == 0 for c in cases)


def test_problems_keep_to_limits() -> None:
    limits = Limits(dtypes=("float16",), head_dims=(40,), max_len=17, max_heads=2, windows=False)
    for case in drawn(limits & Limits(layouts=("packed", "padded")), 50):
        assert case.dtype == "float16"
        assert case.head_dim == case.value_dim == 40
        assert max(case.q_lens + case.k_lens, default=0) <= 17
        assert case.q_heads <= 2
        assert case.window == (-1, -1)
        assert case.layout in ("packed", "padded")


@settings(max_examples=50)
@given(problems())
def test_a_case_is_its_repr(case: Case) -> None:
    assert eval(repr(case), {"Case": Case}) == case
    first, second = tensors(case), tensors(case)
    for f in dataclasses.fields(first):
        x, y = getattr(first, f.name), getattr(second, f.name)
        assert x is y or np.array_equal(x, y, equal_nan=isinstance(x, np.ndarray))


@settings(max_examples=50)
@given(problems(Limits(max_len=40)))
def test_inputs_hold_the_tensors(case: Case) -> None:
    inputs = make_inputs(case)
    for name in ("q", "k", "v"):
        view, buffer = getattr(inputs, name).view, getattr(inputs, name).buffer
        assert np.array_equal(view, getattr(inputs.tensors, name), equal_nan=True)
        assert np.isnan(buffer).sum() == buffer.size - np.isfinite(view).sum(), "the rest is NaN"
    with pytest.raises(AssertionError, match="outside its rows were written"):
        inputs.out.buffer[0] = 0
        inputs.results()


@pytest.mark.parametrize("memory", MEMORIES)
def test_memories_are_what_they_are_called(memory: str) -> None:
    case = Case(q_lens=(5, 5), k_lens=(7, 7), q_heads=2, kv_heads=1, memory=memory)
    inputs = make_inputs(case)
    q, k = (np.array(x.view.strides) // 2 for x in (inputs.q, inputs.k))
    aligned = inputs.q.view.ctypes.data % 16 == inputs.q.buffer.ctypes.data % 16
    assert aligned == (not any(q[:-1] % 8)) == (memory != "unaligned")
    assert inputs.q.view.flags.c_contiguous == (memory in ("contiguous", "odd_ones"))
    assert (q[2] > q[1]) == (memory == "transposed")
    assert (k[2] > 2**31) == (memory == "odd_ones")


# ---- the comparison ------------------------------------------------------------------------------

CASE = Case(q_lens=(3,), k_lens=(9,), head_dim=32, value_dim=32)


def outcome(change: Callable[[np.ndarray, np.ndarray], None]) -> float:
    """The worst share of its bound that the rounded twin has after a change to it; raises as
    `assert_close`.
    """
    want, record = expected(tensors(CASE)), Record()
    got = want.twin_out[..., :32].copy(), want.twin_lse.copy()
    change(*got)
    assert_close(got, want, CASE, record)
    return max(record.worst.values())


def put(output: int, value: float) -> Callable[[np.ndarray, np.ndarray], None]:
    def change(*got: np.ndarray) -> None:
        got[output].flat[0] = value

    return change


def test_rounding_is_close() -> None:
    assert 0 < outcome(lambda out, lse: None) <= 0.5


@pytest.mark.parametrize("output", [0, 1])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 3.5])
def test_what_is_wrong_is_not_close(output: int, value: float) -> None:
    with pytest.raises(AssertionError, match=rf"{('out', 'lse')[output]}\[0, 0, 0.*error / bound"):
        outcome(put(output, value))


def test_three_ulp_are_too_many() -> None:
    def add(out: np.ndarray, lse: np.ndarray) -> None:
        lse += 3 * 2.0**-23 * np.abs(lse) + 1e-5

    with pytest.raises(AssertionError, match="lse"):
        outcome(add)


def test_same_is_bitwise() -> None:
    zero = np.zeros((1, 1)), np.zeros((1, 1))
    assert_same(zero, zero, CASE)
    with pytest.raises(AssertionError, match="out"):
        assert_same((-zero[0], zero[1]), zero, CASE)
    with pytest.raises(AssertionError, match="shape"):
        assert_same((zero[0][:0], zero[1]), zero, CASE)


def test_a_repro_line_runs() -> None:
    """It names another op than the one that failed here, a right one: so it must end well."""
    wrong, _, _ = MUTANTS["no softcap"]
    right = public_op("numpy")
    op = dataclasses.replace(op_of(wrong), name=right.name, imports=right.imports)
    with pytest.raises(AssertionError) as caught:
        LAW["law_matches_reference"](op, dataclasses.replace(CASE, softcap=5.0))
    assert op.record.examples == 1
    line = str(caught.value).splitlines()[-1]
    command = shlex.split(line.replace("python", sys.executable, 1))
    subprocess.run(command, check=True, cwd=Path(__file__).parent.parent)


def test_without_imports_the_call_is_the_repro() -> None:
    wrong, _, _ = MUTANTS["no softcap"]
    case = dataclasses.replace(CASE, softcap=5.0)
    with pytest.raises(AssertionError) as caught:
        LAW["law_matches_reference"](op_of(wrong), case)
    assert str(caught.value).splitlines()[-1] == f"  law_matches_reference(toy, {case!r})"
