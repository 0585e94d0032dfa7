# SPDX-License-Identifier: Apache-2.0
"""As `test_found`, of the command line and of the environment."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from rawattn.__main__ import ROOFS, problem_flags
from rawattn.arrays import FLOATS
from rawattn.roofline.roofs import TENSOR_CORE_DTYPES
from rawattn.settings import Settings

pytest_plugins = ("tests.cli",)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan --device H200 --page 16", "--page: says nothing without --cache"),
        ("plan --device H200 --split=0", "--split: says nothing without --cache"),
        ("roofline --device H200 --weight-bits 16", "--weight-bits: says nothing without --model"),
        ("roofline --device H200 --model llama-3-8b --heads 16", "--heads: says nothing with --mo"),
        ("roofline --device H200 --model llama-3-8b --q-len 9", "--q-len: says nothing with --mod"),
        ("compile --arch sm_80 --all --batch 1", "--batch: says nothing with --all"),
        ("roofline --device H200 --model=", "model='': accepted are llama-3-8b"),
        ("roofline --device H200 --plot=", "plot='': accepted are names of PNG files"),
        ("roofline --device H200 --plot roofs", "plot='roofs': accepted are names of PNG files"),
        ("plan --device H200 --backend=", "backend='': accepted are fwd_sm90"),
        ("plan --device H200 --causa", "unrecognized arguments: --causa"),
        ("plan --head-dim 0", "--head-dim: '0': accepted are integers from 1 to 2147483647"),
        ("plan --head-dim -1", "--head-dim: '-1': accepted are integers from 1 to 2147483647"),
        ("plan --window x 0", "--window: 'x': accepted are integers from -1 to 2147483647"),
        ("plan --window -2 0", "--window: '-2': accepted are integers from -1 to 2147483647"),
        ("plan --window 1_0 0", "--window: '1_0': accepted are integers from -1"),
        ("plan --q-len \u0663", "'\u0663': accepted are integers from 0"),
        ("roofline --batch 99999999999", "'99999999999': accepted are integers from 0 to 21474836"),
        (f"roofline --batch {'9' * 5000}", "accepted are integers from 0 to 2147483647"),
        ("plan --cache NHD --page 99999999999", "accepted are integers from 1 to 2147483647"),
        ("plan --device H200 --cache NHD --causal top_left", "causal='top_left': the queries are"),
        ("plan --device H200 --cache NHD --softcap nan", "softcap=nan: accepted are 0 and numbers"),
        ("plan --device H200 --cache NHD --softcap=-1", "softcap=-1.0: accepted are 0 and numbers"),
    ],
)
def test_flags(run: Any, line: str, words: str) -> None:
    code, out, err = run(line)
    assert (code, out) == (2, "") and words in err


def test_the_largest_sizes_take_no_time_and_no_memory(run: Any) -> None:
    most = 2**31 - 1
    sizes = f"--batch {most} --heads {most} --q-len {most} --tiles 1 1 --causal"
    facts = run(f"roofline --device H200 --json {sizes}").facts
    assert facts["flops"] == 4 * 128 * most**3 * (most + 1) // 2
    moved = {x["moves"].split("(")[-1]: x["bytes"] for x in facts["algorithms"]}
    rows = most * (most + 1) // 2  # that meet a key, one by one
    assert moved["FlashAttention-2)"] == most**2 * 2 * 128 * 2 * (rows + most)


@pytest.mark.parametrize("line", ["selftest", "compile --device H200", "plan --device H200"])
def test_a_variable_that_names_no_backend(
    run: Any, backend: Callable[[str], None], line: str
) -> None:
    backend("foo")
    found = run(line)
    assert found.code == 2 and "RAWATTN_BACKEND='foo': accepted are fwd_sm90" in found.err


@pytest.mark.parametrize("word", ["no", "false", "2"])
def test_a_variable_that_is_neither_on_nor_off(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    monkeypatch.setenv("RAWATTN_CHECK", word)
    with pytest.raises(ValueError, match=f"RAWATTN_CHECK='{word}': accepted are 0 and 1"):
        Settings.read.__wrapped__()


def test_info_remarks_on_variables(run: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("info --json").facts["remarks"] == []
    monkeypatch.setenv("RAWATTN_BACKENDS", "fwd_sm80")
    backend("fast")
    unknown, wrong = run("info --json").facts["remarks"]
    assert unknown.startswith("RAWATTN_BACKENDS: there is no such variable; accepted are RAWATTN_B")
    assert wrong.startswith("RAWATTN_BACKEND='fast': accepted are fwd_sm90, fwd_sm80")
    monkeypatch.setenv("RAWATTN_CHECK", "yes")
    Settings.read.cache_clear()
    assert run("info --json").facts["remarks"][1] == "RAWATTN_CHECK='yes': accepted are 0 and 1"


@pytest.mark.parametrize(
    ("line", "program"),
    [
        ("plan --page 8", "rawattn plan"),
        ("plan --head-dim 0", "rawattn plan"),
        ("roofline --causa", "rawattn"),
        ("", "rawattn"),
    ],
)
def test_a_usage_error_takes_one_line(run: Any, line: str, program: str) -> None:
    code, out, err = run(line)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert err.startswith(f"{program}: ") and err.endswith(f". See python -m {program} --help\n")


def test_dtypes_of_a_roofline_are_one_list(run: Any) -> None:
    for dtype in ("float32", "float8_e4m3fn", "fp16"):
        found = run(f"roofline --device H200 --dtype {dtype}").err
        assert "--dtype" in found and re.findall(r"b?float\d+", found.split("choose from")[1]) == [
            *ROOFS
        ]
    assert set(ROOFS) == set(FLOATS) & set(TENSOR_CORE_DTYPES)
    for dtype in ROOFS:
        assert run(f"roofline --device H200 --dtype {dtype}").code == 0
    assert f"{ROOFS[0]}, {ROOFS[1]} (default)\n" in problem_flags(roofs=True).format_help()
