# SPDX-License-Identifier: Apache-2.0
"""Small calls that a hostile reader of README and `help` has found refused without need, accepted
without effect, or wrong in silence: each with the value that it has, or the words that refuse it.
"""

from __future__ import annotations

import copy
import ctypes
import pickle
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import registry
from rawattn.cache_problem import MergeProblem
from rawattn.device import Device
from rawattn.params import Params
from rawattn.plan import merge
from rawattn.reference_paged import rotated
from tests import refusals
from tests.refusals import I32, VALUE, Bad, name_of, refuses
from tools.emulator.api import emulated
from tools.emulator.attention import attention

F32 = np.float32


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def paged(**changes: Any) -> dict[str, Any]:
    """A good call that stores a token for each of two sequences, with changes."""
    rows, new = changes.pop("rows", 24), changes.pop("new", 1)
    return {
        "q": normal(2, changes.pop("queries", 1), 4, 16),
        "k_cache": normal(6, 8, 2, 16, seed=1),
        "v_cache": normal(6, 8, 2, 16, seed=2),
        "k": normal(2, new, 2, 16, seed=3),
        "v": normal(2, new, 2, 16, seed=4),
        "rotary_cos": np.cos(np.arange(rows * 4).reshape(rows, 4)).astype(F32),
        "rotary_sin": np.sin(np.arange(rows * 4).reshape(rows, 4)).astype(F32),
        "cache_seqlens": np.array([9, 20], I32),
        "block_table": np.array([[1, 2, 3], [4, 5, 0]], I32),
        "causal": True,
        **changes,
    }


NO_ROTARY: dict[str, Any] = {"rotary_cos": None, "rotary_sin": None}

# ---- tables of rotary angles ---------------------------------------------------------------------


@pytest.mark.parametrize("causal", [True, False])
def test_queries_may_be_more_than_new_tokens_within_the_angles(causal: bool) -> None:
    """With a mask rows 20 to 23 of 24 turn them; without one row 20 turns all."""
    call = paged(queries=4, causal=causal)
    found = rawattn.flash_attn_with_kvcache(**call)
    fresh, used = paged(queries=4, causal=causal), call["cache_seqlens"]
    tables: Any = {"cos": fresh["rotary_cos"], "sin": fresh["rotary_sin"], "interleaved": True}
    q = [
        rotated(x, positions=n + np.arange(4) * causal, **tables)
        for x, n in zip(fresh["q"], used.tolist(), strict=True)
    ]
    k = rotated(fresh["k"][:, 0], positions=used, **tables)[:, None]
    turned = {**fresh, **NO_ROTARY, "q": np.stack(q), "k": k}
    np.testing.assert_array_equal(found, rawattn.flash_attn_with_kvcache(**turned))


BAD_ANGLES: Bad = [
    ({"rows": 23}, VALUE, "rotary_cos has shape (23, 4): accepted are 24 rows or more, one for ea"),
    ({"queries": 5}, VALUE, "rotary_cos has shape (24, 4): accepted are 25 rows or more, for the "
     "queries of sequence 1, of which there are 5 from position 20 on"),
    ({"rows": 0, "max_seqlen_k": 0, "new": 0, "cache_seqlens": np.zeros(2, I32)}, VALUE,
     "accepted are 1 rows or more"),  # kernels read the last row for what lies past it
    ({**NO_ROTARY, "rotary_interleaved": False}, VALUE, "rotary_interleaved=False: without rotary"),
    ({"k": normal(12, 2, 16), "v": normal(12, 2, 16), "cache_seqlens": np.zeros(2, I32),
      "cu_seqlens_k_new": np.array([0, 11, 12], I32), "max_seqlen_k": 10}, VALUE,
     "the new tokens that cu_seqlens_k_new gives sequence 0: found 11, accepted are 0 to 10"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_ANGLES, ids=name_of)
def test_angles(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_with_kvcache, paged(**changes), error, message)


# ---- places of new tokens ------------------------------------------------------------------------

ROWS: dict[str, Any] = {**NO_ROTARY, "block_table": None}
SHARED: list[tuple[dict[str, Any], str]] = [
    ({**ROWS, "cache_batch_idx": np.array([1, 1], I32), "cache_seqlens": np.array([3, 5], I32)},
     "cache_batch_idx: sequence 0 would store a new token at place 3 of block 1, which sequence 1"),
    ({**NO_ROTARY, "block_table": np.array([[1, 2, 3], [4, 2, 0]], I32)},
     "block_table: sequence 0 would store a new token at place 1 of block 2, which sequence 1 cou"),
    ({**NO_ROTARY, "block_table": np.array([[1, 1, 3], [4, 5, 0]], I32)},
     "block_table: sequence 0 would store a new token at place 1 of block 1, which sequence 0 cou"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), SHARED, ids=["rows", "pages", "its own"])
def test_no_new_token_in_a_place_that_counts(changes: dict[str, Any], message: str) -> None:
    call = paged(**changes)
    caches = call["k_cache"].copy(), call["v_cache"].copy()
    refuses(rawattn.flash_attn_with_kvcache, call, VALUE, message)
    for name, before in zip(("k_cache", "v_cache"), caches, strict=True):
        np.testing.assert_array_equal(call[name], before)


def test_two_sequences_of_one_row_that_keep_out_of_each_others_way() -> None:
    """The first has places 0 to 3, the second 4 to 6."""
    rows = {"cache_batch_idx": np.array([1, 1], I32), "cache_leftpad": np.array([0, 4], I32)}
    call = paged(**ROWS, **rows, cache_seqlens=np.array([3, 6], I32))
    found = rawattn.flash_attn_with_kvcache(**call)
    for n, (begin, end) in enumerate(((0, 4), (4, 7))):
        k, v = (call[name][1:2, begin:end] for name in ("k_cache", "v_cache"))
        want = rawattn.flash_attn_func(call["q"][n : n + 1], k, v)
        np.testing.assert_allclose(found[n : n + 1], want, atol=1e-6)


def test_left_padding_of_no_sequence() -> None:
    q, cache, none = normal(0, 1, 4, 16), normal(0, 8, 2, 16), np.zeros(0, I32)
    out = rawattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=none, cache_leftpad=none)
    assert out.shape == q.shape


def test_new_tokens_of_no_sequence() -> None:
    """On a GPU the column of rows that stands for a table had lost its axis."""
    none = np.zeros(0, I32)
    q, cache, new = (
        np.zeros((0, *shape), np.float16) for shape in ((1, 4, 64), (8, 2, 64), (1, 2, 64))
    )
    with emulated() as ran:
        out = rawattn.flash_attn_with_kvcache(q, cache, cache, new, new, cache_seqlens=none)
    assert out.shape == q.shape and not ran


# ---- arguments without effect --------------------------------------------------------------------


def vllm(**changes: Any) -> dict[str, Any]:
    """A good call that has numbers, with changes."""
    numbers = {
        "query": normal(2, 4, 16),
        "key_cache": normal(6, 2, 4, 8, 4),
        "value_cache": normal(6, 2, 16, 8),
    }
    return refusals.vllm(**{**numbers, **changes})


WITHOUT_EFFECT: Bad = [
    ({"blocksparse_block_size": 16}, VALUE, "blocksparse_block_size=16: accepted is 64 with block"),
    ({"tp_rank": 3}, VALUE, "tp_rank=3: accepted is 0 with blocksparse_vert_stride=0, of which"),
    ({"tp_rank": 3, "blocksparse_vert_stride": 1}, VALUE, "accepted is 0 with blocksparse_vert_st"),
    ({"tp_rank": 3, "blocksparse_vert_stride": 2}, VALUE, "is 0 with blocksparse_head_sliding_ste"),
    ({"blocksparse_block_size": 0}, VALUE, "blocksparse_block_size=0: accepted are integers from "),
    ({"query": normal(2, 4, 32)[..., ::2]}, VALUE, "query of shape (2, 4, 16) has strides (512"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), WITHOUT_EFFECT, ids=name_of)
def test_block_sparse(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.paged_attention_v1, vllm(**changes), error, message)


def test_a_stride_of_one_shows_every_block() -> None:
    every = rawattn.paged_attention_v1(**vllm(blocksparse_vert_stride=1))
    np.testing.assert_array_equal(every, rawattn.paged_attention_v1(**vllm()))


@pytest.mark.parametrize("causal", [True, "bottom_right"])
def test_a_tree_mask_takes_the_place_of_causal(causal: bool | str) -> None:
    call = paged(**NO_ROTARY, queries=2, new=2, tree_mask=np.ones((2, 2, 2), bool), causal=causal)
    message = f"causal={causal!r}: with tree_mask, which says who sees whom on the right side"
    refuses(rawattn.flash_attn_with_kvcache, call, VALUE, message)
    whole = rawattn.flash_attn_with_kvcache(**{**call, "causal": False})
    plain = paged(**NO_ROTARY, queries=2, new=2, causal=False)
    np.testing.assert_array_equal(whole, rawattn.flash_attn_with_kvcache(**plain))


def test_an_empty_name_is_no_backend() -> None:
    for function, call in ((rawattn.flash_attn_with_kvcache, paged()),
                           (rawattn.paged_attention_v1, vllm())):  # fmt: skip
        refuses(function, {**call, "backend": ""}, VALUE, "backend='': accepted are ")


# ---- outputs of prepared calls -------------------------------------------------------------------

X, LSES = normal(2, 3, 4, 16), normal(2, 4, 3)
CASCADE = {
    "q": normal(2, 1, 4, 16),
    "k_cache": normal(6, 8, 2, 16, seed=1),
    "v_cache": normal(6, 8, 2, 16, seed=2),
    "cache_seqlens": np.array([20, 17], I32),
    "block_table": np.array([[1, 2, 3], [1, 4, 5]], I32),
    "common_prefix_len": 8,
}
PREPARED: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[int, ...]]] = {
    "dense": (rawattn.flash_attn_func, {"q": X, "k": X, "v": X}, X.shape),
    "paged": (rawattn.flash_attn_with_kvcache, paged(), (2, 1, 4, 16)),
    "vllm": (rawattn.paged_attention_v1, vllm(), (2, 4, 16)),
    "cascade": (rawattn.cascade_attention, CASCADE, (2, 1, 4, 16)),
    "merge": (rawattn.merge_states, {"outs": X, "lses": LSES}, X.shape[1:]),
}


@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_call_has_its_outputs_or_makes_them(name: str) -> None:
    function, call, shape = PREPARED[name]
    mine, other = np.empty(shape, F32), np.empty(shape, F32)
    without = rawattn.prepare(function, **call)
    message = "out: the plan was prepared for None, found float32 of shape"
    refuses(function, {**call, "out": mine, "plan": without}, VALUE, message)
    given = rawattn.prepare(function, **{**call, "out": mine})
    message = f"out: the plan was prepared for float32 of shape {shape}, "
    refuses(function, {**call, "out": None, "plan": given}, VALUE, message)
    assert function(**{**call, "out": other, "plan": given}) is other
    np.testing.assert_array_equal(other, function(**call, plan=without))


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
@pytest.mark.parametrize("name", PREPARED)
def test_a_prepared_call_stays_in_its_process(name: str, duplicate: Any) -> None:
    """It was pickled, with the addresses of arrays that another process does not have."""
    function, call, _ = PREPARED[name]
    plan = rawattn.prepare(function, **call)
    with pytest.raises(TypeError, match=r"pickled nor copied; accepted is rawattn\.prepare"):
        duplicate(plan)


# ---- cascades ------------------------------------------------------------------------------------


def test_only_the_first_row_has_the_pages_of_a_prefix() -> None:
    want = rawattn.flash_attn_with_kvcache(
        **{k: v for k, v in CASCADE.items() if k != "common_prefix_len"}, causal=True
    )
    for entry in (-1, 2147480000):
        table = np.array([[1, 2, 3], [entry, 4, 5]], I32)
        found = rawattn.cascade_attention(**{**CASCADE, "block_table": table})
        np.testing.assert_allclose(found, want, atol=1e-6)
    table = np.array([[1, 2, 3], [-1, -1, 5]], I32)
    bad = {**CASCADE, "block_table": table}
    refuses(rawattn.cascade_attention, bad, VALUE, "block_table[1, 1] is -1: accepted are 0 to 5")


BAD_CASCADES: Bad = [
    ({"cache_seqlens": np.array([20, 8], I32)}, VALUE, "cache_seqlens[1] is 8: accepted are 9 or mo"
     "re, the tokens of the prefix (common_prefix_len=8), and its 1 queries"),
    ({"cache_seqlens": np.array([7, 20], I32), "causal": False}, VALUE, "cache_seqlens[0] is 7: acc"
     "epted are 8 or more, the tokens of the prefix (common_prefix_len=8)"),
    ({"common_prefix_len": 32}, VALUE, "up to the 24 that a sequence has room for"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_CASCADES, ids=name_of)
def test_cascades(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.cascade_attention, {**CASCADE, **changes}, error, message)


def test_a_cascade_without_a_prefix_is_attention() -> None:
    """Also where a sequence has fewer keys than queries."""
    call = {**CASCADE, "q": normal(2, 3, 4, 16), "cache_seqlens": np.array([20, 1], I32)}
    want = rawattn.flash_attn_with_kvcache(
        **{k: v for k, v in call.items() if k != "common_prefix_len"}, causal=True
    )
    found = rawattn.cascade_attention(**{**call, "common_prefix_len": 0})
    np.testing.assert_array_equal(found, want)
    assert (found[1, :2] == 0).all()


# ---- numbers -------------------------------------------------------------------------------------


def overflow(q: np.ndarray, k: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Of good queries and keys, copies in which row 1 has scores that float32 does not hold."""
    q, k = q.copy(), k.copy()
    q[0, 1, 0] = 0
    q[0, 1, 0, 0] = 1e20
    k[0, ::2, 0, 0] = 1e20
    return q, k


def test_a_row_of_scores_past_float32_leaves_the_others_alone() -> None:
    shape, rest = (1, 5, 1, 16), [0, 2, 3, 4]
    q, k = (normal(*shape, seed=seed).astype(ml_dtypes.bfloat16) for seed in (0, 1))
    v = normal(*shape, seed=2).astype(ml_dtypes.bfloat16)
    q[0, rest, 0, 0] = 0
    bad_q, bad_k = overflow(q, k)
    out, lse = rawattn.flash_attn_func(bad_q, bad_k, v, return_lse=True)
    want, want_lse = rawattn.flash_attn_func(q, bad_k, v, return_lse=True)
    assert np.isnan(out[0, 1]).all() and np.isnan(lse[0, 0, 1])
    np.testing.assert_array_equal(out[0, rest], want[0, rest])
    np.testing.assert_array_equal(lse[..., rest], want_lse[..., rest])
    bad_q[0, 1, 0, 0] = -1e20  # its products are -inf
    bad_k[0, :, 0, 0] = 1e20
    out, lse = rawattn.flash_attn_func(bad_q, bad_k, v, return_lse=True)
    assert (out[0, 1] == 0).all() and lse[0, 0, 1] == -np.inf


@pytest.mark.emulator
@pytest.mark.parametrize("device", ["A100", "H200"])
def test_kernels_keep_rows_of_such_scores_to_themselves(device: str) -> None:
    """A row past float32, and one of scores of 1e19, which kernels lose, beside good ones."""
    shape, good = (1, 5, 1, 64), [0, 3, 4]
    q, k, v = (normal(*shape, seed=seed).astype(ml_dtypes.bfloat16) for seed in range(3))
    q[0, good, 0, 0] = 0
    bad_q, k = overflow(q, k)
    bad_q[0, 2] = 0
    bad_q[0, 2, 0, 0] = 1
    found, want = ((np.empty(shape, q.dtype), np.empty((1, 1, 5), F32)) for _ in range(2))
    for queries, (out, lse) in ((bad_q, found), (q, want)):
        attention(queries, k, v, out=out, lse=lse, device=device, seeds=1)
    np.testing.assert_array_equal(found[0][0, good], want[0][0, good])
    np.testing.assert_array_equal(found[1][..., good], want[1][..., good])
    empty = (found[0][0] == 0).all(axis=(1, 2)) & np.isneginf(found[1][0, 0])
    lost = np.isnan(found[0][0]).all(axis=(1, 2)) & np.isnan(found[1][0, 0])
    assert (empty | lost)[[1, 2]].all()


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-19, np.inf, np.nan])
def test_scales_that_are_no_scales_get_one_range(scale: float) -> None:
    cache = {"key_cache": np.zeros((6, 2, 1, 8, 16), np.uint8), "kv_cache_dtype": "fp8"}
    cache |= {"value_cache": np.zeros((6, 2, 16, 8), np.uint8)}
    message = f"k_scale={scale}: accepted are numbers from 1e-18 to 1e+18"
    refuses(rawattn.paged_attention_v1, vllm(**cache, k_scale=scale), VALUE, message)


def test_a_number_that_params_cannot_hold_is_refused() -> None:
    """2**32 heads would be none to a kernel that counts in 32 bits."""
    problem = MergeProblem(
        dtype="float16", out_dtype="float16", states=2, tokens=3, heads=4, head_dim=8
    )
    launch = merge.plan(problem, Device.named("H200")).launches[0]
    fields = dict(registry.params_struct(registry.KERNELS[launch.kernel].params)._fields_)
    specs = {name: None for name, kind in fields.items() if kind is ctypes.c_void_p}
    numbers = {name: 1 for name in fields if name not in specs}
    Params(launch, numbers, specs, None)
    with pytest.raises(rawattn.Unsupported, match="merge: heads=4294967296: takes integers of 32"):
        Params(launch, {**numbers, "heads": 2**32}, specs, None)


# ---- what is not given ---------------------------------------------------------------------------

NEW = normal(3, 2, 16)
MOVES: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "paged": (rawattn.flash_attn_with_kvcache, paged(), ("q", "k_cache", "v_cache")),
    "vllm": (rawattn.paged_attention_v1, vllm(),
             ("query", "key_cache", "value_cache", "block_tables", "seq_lens")),
    "cascade": (rawattn.cascade_attention, CASCADE,
                ("q", "k_cache", "v_cache", "cache_seqlens", "block_table")),
    "merge": (rawattn.merge_states, {"outs": X, "lses": LSES}, ("outs", "lses")),
    "merge two": (rawattn.merge_attn_states,
                  {"output": None, "prefix_output": X[0], "prefix_lse": LSES[0],
                   "suffix_output": X[1], "suffix_lse": LSES[1]},
                  ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")),
    "store": (rawattn.reshape_and_cache_flash,
              {"key": NEW, "value": NEW, "key_cache": normal(5, 8, 2, 16),
               "value_cache": normal(5, 8, 2, 16), "slot_mapping": np.array([17, -1, 0])},
              ("key", "value", "key_cache", "value_cache", "slot_mapping")),
    "copy": (rawattn.copy_blocks, {"key_caches": [], "value_caches": [], "block_mapping": None},
             ("block_mapping",)),
}  # fmt: skip


@pytest.mark.parametrize("name", MOVES)
def test_an_array_that_is_needed_may_not_be_none(name: str) -> None:
    function, call, needed = MOVES[name]
    for argument in needed:
        message = f"{argument} is None: accepted is an array"
        refuses(function, {**call, argument: None}, TypeError, message)


def test_what_is_no_function_and_no_name() -> None:
    with pytest.raises(TypeError, match=r"function=array.*: accepted are flash_attn_func, "):
        rawattn.prepare(X)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="device=5: accepted are names, as H200"):
        Device.named(5)  # type: ignore[arg-type]


def test_a_cache_without_blocks() -> None:
    message = "k has 1 tokens a sequence: accepted are up to 0, the room of the cache"
    empty = {name: np.zeros((0, 8, 2, 16), F32) for name in ("k_cache", "v_cache")}
    refuses(rawattn.flash_attn_with_kvcache, paged(**empty), VALUE, message)


def test_messages_do_not_hold_arrays() -> None:
    for argument in ("softmax_scale", "causal", "window_size", "dtype", "backend", "return_lse"):
        with pytest.raises((TypeError, ValueError)) as caught:
            rawattn.flash_attn_func(X, X, X, **{argument: X})
        assert str(caught.value).startswith(f"{argument}=array([[[")
        assert len(str(caught.value)) < 200 and "\n" not in str(caught.value)
