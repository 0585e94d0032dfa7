# SPDX-License-Identifier: Apache-2.0
"""Which backend takes a paged call, and how that is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_call
from rawattn.__main__ import parser
from rawattn.cli import paged_flags
from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan.paged import BACKENDS, plan
from rawattn.problem import CacheLayout, Mask, Unsupported
from tests.problems import decode_problem
from tools.emulator.api import emulated

pytest_plugins = ("tests.cli",)
H200 = Device.named("H200")
DECODE = decode_problem(layout=CacheLayout.X_MAJOR)


def test_the_first_that_takes_it() -> None:
    assert [b.name for b in BACKENDS] == [
        "decode_split",
        "fwd_sm90_paged",
        "paged_v2",
        "paged_v1",
        "reference",
    ]
    assert plan(DECODE, H200).backend == "decode_split"
    sparse = plan(replace(DECODE, block_sparse=True), H200)
    assert sparse.backend == "paged_v2" and sparse.why[0].startswith("decode_split: block-sparse")
    for name in ("paged_v2", "paged_v1"):
        assert plan(DECODE, H200, name).backend == name
    several = replace(DECODE, dtype="float32", cache_dtype="float32", max_q=4, mask=Mask(right=0))
    for queries, backend in ((4, "paged_v2"), (500, "paged_v1")):
        made = plan(replace(several, max_q=queries), H200)
        assert made.backend == backend
        assert made.why[0] == "decode_split: dtype float32: takes float16 and bfloat16"
    wide = plan(replace(DECODE, layout=CacheLayout.NHD, head_dim=300, max_q=2), H200)
    assert wide.backend == "paged_v2" and "takes up to 256" in wide.why[0]
    host = plan(DECODE, Device.host())
    assert host.backend == "reference"
    assert all(reason.endswith("needs CUDA arrays, found NumPy arrays") for reason in host.why)


def test_what_nobody_takes_has_all_reasons() -> None:
    with pytest.raises(Unsupported) as caught:
        plan(replace(DECODE, layout=CacheLayout.NHD, dtype="float64", max_q=2), H200)
    message = str(caught.value)
    assert all(f"{backend.name}: " in message for backend in BACKENDS)
    assert "over a NHD cache of bfloat16, page 16" in message


@pytest.mark.parametrize("what", [{"batch": 0}, {"q_heads": 0, "kv_heads": 8}, {"max_q": 0}])
def test_an_empty_problem_launches_nothing(what: dict[str, int]) -> None:
    made = plan(replace(DECODE, **what), H200)  # type: ignore[arg-type]
    assert made.launches == () and made.workspace_bytes == 0


def test_no_tokens_are_stored_by_an_empty_call() -> None:
    with emulated() as ran:
        q, cache = np.zeros((0, 1, 4, 64), np.float16), np.zeros((3, 8, 2, 64), np.float16)
        table, lengths = np.zeros((0, 2), np.int32), np.zeros(0, np.int32)
        out = rawattn.flash_attn_with_kvcache(
            q,
            cache,
            cache.copy(),
            q[:, :, :2],
            q[:, :, :2],
            cache_seqlens=lengths,
            block_table=table,
        )
    assert out.shape == q.shape and ran == []


def test_a_cache_without_blocks_has_no_keys() -> None:
    q, cache = np.ones((1, 1, 4, 128), np.float16), np.zeros((0, 16, 2, 128), np.float16)
    with emulated() as ran:  # nothing is read, whatever the table holds
        out = rawattn.flash_attn_with_kvcache(
            q,
            cache,
            cache.copy(),
            cache_seqlens=np.zeros(1, np.int32),
            block_table=np.zeros((1, 4), np.int32),
        )
    assert len(ran) == 1 and not out.any()


def test_the_environment_names_a_backend_of_the_list(backend: Any) -> None:
    q, cache = np.zeros((1, 1, 4, 64), np.float32), np.zeros((1, 8, 2, 64), np.float32)
    for name, refused in (("fwd_sm80", False), ("reference", False), ("decode_split", True)):
        backend(name)
        paged_call.resolve.cache_clear()
        if refused:
            with pytest.raises(Unsupported, match="decode_split: needs CUDA arrays"):
                rawattn.flash_attn_with_kvcache(q, cache, cache)
        else:
            rawattn.flash_attn_with_kvcache(q, cache, cache)
    paged_call.resolve.cache_clear()


def of_flags(line: str) -> PagedProblem:
    return paged_flags.request(parser().parse_args(["plan", *line.split()])).problem


def test_flags_state_the_problem_of_the_call() -> None:
    line = "--batch 3 --q-len 2 --k-len 40 --heads 4 --kv-heads 2 --head-dim 64 --dtype float16"
    q, table = np.zeros((3, 2, 4, 64), np.float16), np.zeros((3, 3), np.int32)
    call: Any = {"cache_seqlens": np.zeros(3, np.int32), "block_table": table, "max_seqlen_k": 40}
    for layout, shape, extra in (
        ("NHD", (9, 16, 2, 64), {"causal": True}),
        ("HND", (9, 2, 16, 64), {"window_size": (7, 3), "split_tokens": 64}),
    ):
        cache = np.zeros(shape, np.float16)
        made = rawattn.prepare(
            rawattn.flash_attn_with_kvcache, q, cache, cache, layout=layout, **call, **extra
        )
        words = "--causal" if "causal" in extra else "--window 7 3 --split 64"
        assert of_flags(f"{line} --cache {layout} {words}") == made.plan.problem
    cache = np.zeros((9, 16, 2, 64), np.uint8)
    call |= {"kv_cache_dtype": "fp8", "k_descale": 0.5}
    made = rawattn.prepare(rawattn.flash_attn_with_kvcache, q, cache, cache, **call)
    assert of_flags(f"{line} --cache NHD --cache-dtype fp8") == made.plan.problem


@pytest.mark.parametrize("side", ["{} -1", "-1 {}", "{} {}"])
def test_a_window_that_reaches_every_key_is_none(side: str) -> None:
    """It took the kernels with masks, which divide the work in another way: other bits."""
    line = "--cache NHD --batch 8 --q-len 1 --k-len 640 --heads 4 --window "
    none = of_flags(line + "-1 -1")
    for wide in 639, 640, 10**6:
        assert of_flags(line + side.format(wide, wide)) == none
    assert of_flags(line + side.format(638, 638)) != none
    # A row's diagonal lies before the first key where queries outnumber keys.
    few = "--cache NHD --q-len 9 --k-len 4 --window "
    assert of_flags(few + "-1 7").mask == Mask(right=7)
    assert of_flags(few + "-1 8").mask == of_flags(few + "8 -1").mask == Mask()


def test_flags_state_the_problem_of_other_tables_and_masks() -> None:
    line = "--batch 3 --q-len 2 --k-len 40 --heads 4 --kv-heads 2 --head-dim 64 --dtype float16"
    q, lengths = np.zeros((3, 2, 4, 64), np.float16), np.full(3, 9, np.int32)
    pages, row = np.zeros((9, 16, 2, 64), np.float16), np.zeros((3, 40, 2, 64), np.float16)
    csr = {
        "kv_indptr": np.array([0, 3, 6, 9], np.int32),
        "kv_indices": np.arange(9, dtype=np.int32),
        "kv_last_page_len": np.full(3, 8, np.int32),
        "max_seqlen_k": 40,
    }
    where = {"block_table": np.zeros((3, 3), np.int32), "max_seqlen_k": 40}
    tree = {"tree_mask": np.ones((3, 2, 2), bool)}
    for words, cache, arguments in (
        ("--csr", pages, csr),
        ("--tree", pages, {"cache_seqlens": lengths, **where, **tree}),
        ("--leftpad", row, {"cache_seqlens": lengths, "cache_leftpad": lengths}),
    ):
        made = rawattn.prepare(rawattn.flash_attn_with_kvcache, q, cache, cache, **arguments)
        assert of_flags(f"{line} --cache NHD {words}") == made.plan.problem


def test_the_command_says_what_the_planner_says(run: Any) -> None:
    line = "--device H200 --cache x-major --batch 32 --q-len 1 --k-len 4096 --heads 32 --kv-heads 8"
    found = run(f"plan {line} --json").facts
    made = plan(of_flags(line), H200)
    assert found["backend"] == made.backend == "decode_split"
    assert found["workspace_bytes"] == made.workspace_bytes > 0
    assert found["problem"]["layout"] == "x-major" and found["problem"]["page"] == 16
    refused = run("plan --device H200 --cache NHD --dtype float32 --cache-dtype int8 --json")
    assert refused.code == 2 and len(refused.facts["passed_over"]) == len(BACKENDS)
    assert run("plan --device H200 --cache NHD --cache-dtype fp4").code == 2


def test_the_plan_of_several_steps_is_that_of_attention() -> None:
    q, cache = np.zeros((2, 1, 4, 64), np.float16), np.zeros((6, 8, 2, 64), np.float16)
    table, lengths = np.array([[1, 2], [1, 3]], np.int32), np.array([9, 16], np.int32)
    call = {"cache_seqlens": lengths, "block_table": table, "common_prefix_len": 8}
    made = rawattn.prepare(rawattn.cascade_attention, q, cache, cache, **call)
    problems = [step.problem for step in made.plans]
    assert [type(p).__name__ for p in problems] == ["PagedProblem", "PagedProblem", "MergeProblem"]
    assert made.plan.problem is problems[1]
    assert (problems[0].batch, problems[0].max_q, problems[0].max_k) == (1, 2, 8)
    assert (problems[1].batch, problems[1].max_q, problems[1].max_k) == (2, 1, 8)
    nothing = rawattn.prepare(rawattn.copy_blocks, [], [], np.array([[0, 1]]))
    assert nothing.plan.launches == () and nothing.run() is None
