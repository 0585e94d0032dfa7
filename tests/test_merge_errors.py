# SPDX-License-Identifier: Apache-2.0
"""What is wrong with cascades, storing tokens and merging is said before anything runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from tests.refusals import (  # noqa: F401  two of them are fixtures
    F16,
    F32,
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

# ---- cascade_attention ---------------------------------------------------------------------------


def cascade(**changes: Any) -> dict[str, Any]:
    call = paged(block_table=np.array([[1, 2, 3], [1, 5, 0]], I32), common_prefix_len=8, **changes)
    call["cache_seqlens"] = changes.get("cache_seqlens", np.array([11, 20], I32))
    return call


BAD_CASCADES: Bad = [
    ({"common_prefix_len": 4}, VALUE, "common_prefix_len=4: accepted are multiples of the 8 token"),
    ({"common_prefix_len": 32}, VALUE, "common_prefix_len=32: accepted are multiples of the 8 tok"),
    ({"common_prefix_len": -8}, VALUE, "common_prefix_len=-8: accepted are integers from 0"),
    ({"common_prefix_len": None}, TYPE, "common_prefix_len is None: accepted is a number"),
    ({"common_prefix_len": 8.0}, TYPE, "common_prefix_len=8.0: accepted is an integer"),
    ({"block_table": None}, TYPE, "block_table is None: accepted is an array"),
    ({"cache_seqlens": None}, TYPE, "cache_seqlens is None: accepted is an array"),
    ({"cache_seqlens": np.array([10, 20], I32)}, VALUE, "cache_seqlens[0] is 10: accepted are 11 "),
    ({"causal": "top_left"}, VALUE, "causal='top_left': the queries are the last tokens"),
    ({"out": zeros(2, 4, 4, 16)[:, :3]}, VALUE, "accepted are rows of all sequences at equal dist"),
    ({"lse": zeros(2, 4, 3)}, VALUE, "lse of shape (2, 4, 3) has strides (48, 12, 4) bytes: accep"),
    ({"k_descale": 2.0}, VALUE, "k_descale is 2.0, and the cache holds float32: accepted is 1.0"),
    ({"backend": "merge"}, VALUE, "backend='merge': accepted are decode_split"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CASCADES, ids=name_of)
def test_cascade(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.cascade_attention, {**cascade(), **changes}, error, message)


@pytest.mark.parametrize("name", ["k_descale", "v_descale"])
def test_a_shared_prefix_has_no_scale_of_a_sequence(name: str) -> None:
    call = cascade(kv_cache_dtype="int8", **{name: np.ones((2, 2), F32)})
    for cache in ("k_cache", "v_cache"):
        call[cache] = zeros(6, 8, 2, 16, dtype=np.int8)
    message = f"{name} has shape (2, 2): accepted are (), (1,), (2,), as sequences share the prefix"
    refuses(rawattn.cascade_attention, call, VALUE, message)


def test_rows_at_equal_distances_in_a_cascade() -> None:
    with pytest.raises(AssertionError, match="has run"):
        rawattn.cascade_attention(**cascade(), out=zeros(2, 6, 4, 16)[:, ::2])


def test_packed_rows_of_nobody_in_a_cascade() -> None:
    call = cascade() | {"q": zeros(7, 4, 16), "cu_seqlens_q": np.array([0, 3, 6], I32)}
    message = "cu_seqlens_q goes from 0 to 6: accepted is 0 to 7, all rows of q"
    refuses(rawattn.cascade_attention, call, VALUE, message)


# ---- storing and merging -------------------------------------------------------------------------


def write(**changes: Any) -> dict[str, Any]:
    return {
        "key": zeros(3, 2, 16),
        "value": zeros(3, 2, 16),
        "key_cache": zeros(6, 8, 2, 16),
        "value_cache": zeros(6, 8, 2, 16),
        "slot_mapping": np.array([3, -1, 47]),
        **changes,
    }


BAD_WRITES: Bad = [
    ({"key": zeros(3, 4, 16)}, VALUE, "key has shape (3, 4, 16): accepted is (tokens, 2, 16)"),
    ({"key": zeros(3, 2, 16, dtype=float)}, TYPE, "key has dtype float64: accepted are float16"),
    ({"value": zeros(2, 2, 16)}, VALUE, "value has shape (2, 2, 16): accepted is (3, 2, 16)"),
    ({"value": zeros(3, 2, 16, dtype=F16)}, TYPE, "value has dtype float16: accepted is float32"),
    ({"slot_mapping": np.zeros(3, I32)}, TYPE, "slot_mapping has dtype int32: accepted is int64"),
    ({"slot_mapping": np.zeros(4, I64)}, VALUE, "slot_mapping has shape (4,): accepted are up to"),
    ({"slot_mapping": np.array([0, 48, 1])}, VALUE, "slot_mapping[1] is 48: accepted are slots be"),
    ({"layout": "x"}, VALUE, "layout='x': accepted are NHD, HND, x-major"),
    ({"kv_cache_dtype": "int8"}, TYPE, "key_cache has dtype float32: accepted is int8"),
    ({"k_scale": 0.5}, VALUE, "k_scale is 0.5, and the cache holds float32: accepted is 1.0"),
    ({"backend": "merge"}, VALUE, "backend='merge': accepted are kv_write, reference"),
    ({"backend": "kv_write"}, rawattn.Unsupported, "kv_write: needs CUDA arrays, found NumPy arra"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_WRITES, ids=name_of)
def test_storing(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.reshape_and_cache_flash, write(**changes), error, message)


def merge(**changes: Any) -> dict[str, Any]:
    states = {"prefix_output": zeros(5, 4, 16), "suffix_output": zeros(5, 4, 16)}
    lses = {"prefix_lse": zeros(4, 5), "suffix_lse": zeros(4, 5)}
    return {"output": None, **states, **lses, **changes}


BAD_MERGES: Bad = [
    ({"prefix_output": zeros(5, 16)}, VALUE, "prefix_output has shape (5, 16): accepted is (token"),
    ({"prefix_output": zeros(5, 4, 16, dtype=int)}, TYPE, "prefix_output has dtype int64: accepte"),
    ({"suffix_output": zeros(5, 4, 8)}, VALUE, "suffix_output has shape (5, 4, 8): accepted is (5"),
    ({"suffix_output": zeros(5, 4, 16, dtype=F16)}, TYPE, "suffix_output has dtype float16: accep"),
    ({"prefix_lse": zeros(5, 4)}, VALUE, "prefix_lse has shape (5, 4): accepted is (4, 5)"),
    ({"suffix_lse": zeros(4, 5, dtype=float)}, TYPE, "suffix_lse has dtype float64: accepted is f"),
    ({"output_lse": zeros(5, 4)}, VALUE, "output_lse has shape (5, 4): accepted is (4, 5)"),
    ({"output": zeros(5, 4, 16, dtype=F16)}, TYPE, "output has dtype float16: accepted is float32"),
    ({"output_scale": 0.5}, VALUE, "output is None: with output_scale accepted is an array"),
    ({"output_scale": 0.0}, VALUE, "output_scale=0.0: accepted are numbers from 1e-18"),
    ({"output_scale": 1.0, "output": zeros(5, 4, 16)}, TYPE, "output has dtype float32: accepted"),
    ({"output_scale": zeros(2)}, VALUE, "output_scale has shape (2,): accepted is (1,)"),
    ({"prefill_tokens_with_context": -1}, VALUE, "prefill_tokens_with_context=-1: accepted are"),
    ({"backend": "fast"}, VALUE, "backend='fast': accepted are merge, reference"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_MERGES, ids=name_of)
def test_merging(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.merge_attn_states, merge(**changes), error, message)


def test_stacked_states() -> None:
    for outs, lses, message in (
        (zeros(0, 5, 4, 16), zeros(0, 4, 5), "outs has shape (0, 5, 4, 16): accepted is one state"),
        (zeros(5, 4, 16), zeros(4, 5), "outs has shape (5, 4, 16): accepted is (states, tokens, h"),
        (zeros(2, 5, 4, 16), zeros(2, 5, 4), "lses has shape (2, 5, 4): accepted is (2, 4, 5)"),
    ):
        refuses(rawattn.merge_states, {"outs": outs, "lses": lses}, VALUE, message)
    call = merge()
    call["output"] = call["prefix_output"]
    message = "output shares memory with prefix_output: accepted is an output of its own"
    refuses(rawattn.merge_attn_states, call, VALUE, message)


def test_good_calls_run() -> None:
    for function, call in (
        (rawattn.cascade_attention, cascade()),
        (rawattn.reshape_and_cache_flash, write()),
        (rawattn.merge_attn_states, merge()),
    ):
        with pytest.raises(AssertionError, match="has run"):
            function(**call)
