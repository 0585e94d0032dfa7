# SPDX-License-Identifier: Apache-2.0
"""Small inputs that a hostile reader has found accepted, ignored, or refused in unclear words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from tests.refusals import (  # noqa: F401  two of them are fixtures
    I32,
    I64,
    TYPE,
    VALUE,
    Bad,
    forget,
    name_of,
    nothing_runs,
    paged,
    refuses,
    zeros,
)

pytest_plugins = ("tests.cli",)
F64 = np.float64
NEW = {"k": zeros(2, 1, 2, 16), "v": zeros(2, 1, 2, 16)}
NO_TABLE = {"block_table": None, "cache_seqlens": None}
CSR = {
    **NO_TABLE,
    "kv_indptr": np.array([0, 2, 3], I32),
    "kv_indices": np.array([1, 2, 3], I32),
    "kv_last_page_len": np.array([8, 3], I32),
}
FULL = {**NO_TABLE, "k_cache": zeros(2, 8, 2, 16), "v_cache": zeros(2, 8, 2, 16)}

BAD: Bad = [
    ({**NEW, "k": zeros(2, 1, 2, 16, dtype=F64)}, TYPE, "k has dtype float64: accepted is float32"),
    ({"v": zeros(2, 1, 2, 16, dtype=F64)}, VALUE, "v: without k accepted is None"),
    ({**NEW, "rotary_cos": zeros(24, 8, dtype=F64), "rotary_sin": zeros(24, 8, dtype=F64)},
     TYPE, "rotary_cos has dtype float64: accepted is float32"),
    ({"workspace": zeros(9, dtype=F64)}, TYPE, "workspace has dtype float64: accepted is uint8"),
    ({"cache_seqlens": True}, TYPE, "cache_seqlens is a builtins.bool: accepted are arrays"),
    ({"max_seqlen_q": 2}, VALUE, "max_seqlen_q=2: accepted are 3, the rows of q, or more"),
    ({**FULL, "max_seqlen_k": 7}, VALUE, "max_seqlen_k=7: accepted are 8, the rows of k_cache"),
    ({**CSR, **NEW}, VALUE, "k: with kv_indptr accepted is None; store them before"),
    ({**CSR, "max_seqlen_k": 15}, VALUE, "which max_seqlen_k bounds, of sequence 0: found 16, ac"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD, ids=name_of)
def test_with_kvcache(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_with_kvcache, paged(**changes), error, message)


def test_bounds_that_hold_are_accepted() -> None:
    for changes in ({"max_seqlen_q": 3}, {**FULL, "max_seqlen_k": 8}, {**CSR, "max_seqlen_k": 16}):
        with pytest.raises(AssertionError, match="has run"):
            rawattn.flash_attn_with_kvcache(**paged(**changes))


@pytest.mark.parametrize("name", ["exp_sum", "max_logits", "tmp_out"])
def test_rooms_of_v2_in_float64(name: str) -> None:
    room = {"exp_sum": None, "max_logits": None, "tmp_out": None}
    room[name] = zeros(2, 4, 1, *([16] if name == "tmp_out" else []), dtype=F64)
    call = {"out": None, "query": zeros(2, 4, 16), "key_cache": zeros(6, 2, 4, 8, 4)}
    call |= {"value_cache": zeros(6, 2, 16, 8), "num_kv_heads": 2, "scale": 0.25, "block_size": 8}
    call |= {"block_tables": zeros(2, 3, dtype=I32), "seq_lens": zeros(2, dtype=I32)}
    refuses(rawattn.paged_attention_v2, {**call, **room, "max_seq_len": 24}, TYPE, f"{name} has dt")


def test_a_cache_that_is_only_read_may_be_read_only() -> None:
    caches = [zeros(6, 8, 2, 16), zeros(6, 8, 2, 16)]
    for cache in caches:
        cache.flags.writeable = False
    call = paged(k_cache=caches[0], v_cache=caches[1])
    with pytest.raises(AssertionError, match="has run"):
        rawattn.flash_attn_with_kvcache(**call)
    message = "k_cache is read-only: accepted is an array that can be written"
    refuses(rawattn.flash_attn_with_kvcache, {**call, **NEW}, VALUE, message)


def test_bits_of_bfloat16_beside_a_cache() -> None:
    """`dtype=` goes with caches of 8 bits, and with those whose bits it says the meaning of."""
    q = zeros(2, 3, 4, 16, dtype=np.uint16)
    for dtype, kind in ((np.uint8, "fp8"), (np.int8, "int8"), (np.uint16, "auto")):
        caches = [zeros(6, 8, 2, 16, dtype=dtype) for _ in range(2)]
        with pytest.raises(AssertionError, match="has run"):
            rawattn.flash_attn_with_kvcache(
                q, *caches, cache_seqlens=3, kv_cache_dtype=kind, dtype="bfloat16",
                block_table=np.array([[1], [2]], I32),
            )  # fmt: skip
        with pytest.raises(AssertionError, match="has run"):
            rawattn.reshape_and_cache_flash(
                q[0, :, :2], q[1, :, :2], *caches, np.array([0, 5, 9]), kind, dtype="bfloat16"
            )
    bits = zeros(6, 8, 2, 16, dtype=np.uint16)
    bad = paged(q=q.astype(np.uint8), k_cache=bits, v_cache=bits, dtype="bfloat16")
    refuses(rawattn.flash_attn_with_kvcache, bad, TYPE, "q has dtype uint8: accepted are float16")


def test_a_slot_is_named_once() -> None:
    call = {"key": zeros(3, 2, 16), "value": zeros(3, 2, 16), "key_cache": zeros(6, 8, 2, 16)}
    call |= {"value_cache": zeros(6, 8, 2, 16), "slot_mapping": np.array([5, -1, 5], I64)}
    message = "slot_mapping[2] is 5: accepted is a slot that no other token has"
    refuses(rawattn.reshape_and_cache_flash, call, VALUE, message)
    call["slot_mapping"] = np.array([-1, 5, -1], I64)
    with pytest.raises(AssertionError, match="has run"):
        rawattn.reshape_and_cache_flash(**call)


@pytest.mark.parametrize("scale", [0.0, -1.0, np.nan, np.inf, 1e30])
def test_scales_of_a_merged_output(scale: float) -> None:
    part = zeros(3, 2, 16), zeros(2, 3)
    out, number = zeros(3, 2, 16, dtype=np.uint8), np.array([scale], np.float32)
    with pytest.raises(ValueError, match=r"output_scale\[0\] is .*: accepted are numbers from"):
        rawattn.merge_attn_states(out, *part, *part, output_scale=number)


def test_no_blocks_to_copy() -> None:
    """A mapping without pairs is accepted; caches that are no list are named."""
    pairs = zeros(0, 2, dtype=I64)
    for caches in ([zeros(5, 4)], []):
        with pytest.raises(AssertionError, match="has run"):
            rawattn.copy_blocks(caches, [], pairs)
    for caches in (None, zeros(2, 5, 4)):
        with pytest.raises(TypeError, match=r"key_caches is a .*: accepted are lists and tuples"):
            rawattn.copy_blocks(caches, [], pairs)  # type: ignore[arg-type]


def test_a_plan_of_another_function() -> None:
    x = zeros(2, 8, 4, 16)
    plan = rawattn.prepare(rawattn.flash_attn_with_kvcache, **paged())
    with pytest.raises(ValueError, match="plan was prepared for another function"):
        rawattn.flash_attn_func(x, x, x, plan=plan)


@pytest.mark.parametrize(
    "line",
    [
        "plan --device H200 --page 8: --page: says nothing without --cache",
        "plan --device H200 --split 64: --split: says nothing without --cache",
        "plan --device H200 --cache-dtype fp8: --cache-dtype: says nothing without --cache",
        "roofline --device H200 --kv-bits 8: --kv-bits: says nothing without --model",
        "roofline --device H200 --rows x.csv: --rows: says nothing without --plot",
        "roofline --device H200 --model llama-3-8b --causal: --causal: says nothing with --model",
        "compile --arch sm_90a --all --head-dim 64: --head-dim: says nothing with --all",
        "plan --device H200 --cache x-major --head-dim 68: head_dim=68: accepted in x-major caches",
    ],
)
def test_flags_that_say_nothing(run: Any, line: str) -> None:
    command, message = line.split(": ", 1)
    code, out, err = run(command)
    assert (code, out) == (2, "")
    assert message in err
