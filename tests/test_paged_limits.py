# SPDX-License-Identifier: Apache-2.0
"""flash-attn's arguments of growing caches, and values that no call may have."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import paged_call
from rawattn.arrays import contiguous
from rawattn.device import Device
from rawattn.paged_request import FIELDS, PagedArrays, PagedOptions
from rawattn.plan.paged import plan
from tests.refusals import F32, I32, TYPE, VALUE, Bad, name_of, paged, refuses, zeros

ROWS = {"block_table": None, "k_cache": zeros(2, 24, 2, 16), "v_cache": zeros(2, 24, 2, 16)}
PACKED = {"k": zeros(4, 2, 16), "v": zeros(4, 2, 16)}
STARTS = np.array([0, 3, 4], I32)


def rows(**changes: Any) -> dict[str, Any]:
    """A contiguous cache of two rows."""
    return paged(**{**ROWS, **changes})


def drawn(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(F32)


BAD: Bad = [
    (paged(cache_leftpad=zeros(2, dtype=I32)), VALUE, "cache_leftpad: with a table of pages accep"),
    (rows(cache_leftpad=np.array([0, 2])), TYPE, "cache_leftpad has dtype int64: accepted is int3"),
    (rows(cache_leftpad=zeros(3, dtype=I32)), VALUE, "cache_leftpad has shape (3,): accepted is ("),
    (rows(cache_leftpad=np.array([0, 21], I32)), VALUE, "cache_leftpad of sequence 1: found 21, a"),
    (rows(cache_leftpad=np.array([-1, 2], I32)), VALUE, "cache_leftpad of sequence 0: found -1, a"),
    (
        rows(cache_leftpad=zeros(2, dtype=I32), v_cache=zeros(4, 24, 2, 16)[::2]),
        VALUE,
        "cache_leftpad: k_cache and v_cache have strides (3072, 128, 64, 4) and (6144, 128, 64, 4)",
    ),
    (
        rows(**PACKED),
        VALUE,
        "k has shape (4, 2, 16): accepted is (2, new_len, 2, 16), or with cu_seqlens_k_new (total, "
        "2, 16)",
    ),
    (
        paged(q=zeros(4, 4, 16)),
        VALUE,
        "q has shape (4, 4, 16): accepted is (batch, q_len, q_heads, 16), or with cu_seqlens_q (tot"
        "al, q_heads, 16)",
    ),
    (rows(cu_seqlens_k_new=STARTS), VALUE, "cu_seqlens_k_new: without k accepted is None"),
    (rows(**PACKED, cu_seqlens_k_new=STARTS[:2]), VALUE, "cu_seqlens_k_new has shape (2,): accept"),
    (rows(**PACKED, cu_seqlens_k_new=STARTS * 2), VALUE, "cu_seqlens_k_new[1] is 6: accepted are "),
    (
        rows(**PACKED, cu_seqlens_k_new=STARTS, cache_seqlens=np.array([9, 24], I32)),
        VALUE,
        "cache_seqlens of sequence 1: found 24, accepted are 0 to 23",
    ),
    (paged(num_splits=-1), VALUE, "num_splits=-1: accepted are integers from 0"),
    (paged(num_splits=1.0), TYPE, "num_splits=1.0: accepted is an integer"),
    (paged(num_splits=2, split_tokens=64), VALUE, "num_splits=2 and split_tokens=64: accepted is "),
    (
        paged(tree_mask=np.ones((2, 3, 3), bool), window_size=(4, 0)),
        VALUE,
        "window_size=(4, 0): with tree_mask, which says who sees whom on the right side, accepted",
    ),
    (paged(alibi_slopes=np.array([1, np.nan, 1, 1], F32)), VALUE, "alibi_slopes[1] is nan: accept"),
    (paged(alibi_slopes=np.full((2, 4), np.inf, F32)), VALUE, "alibi_slopes[0, 0] is inf: accepte"),
    (paged(sink=np.array([0, 1, np.nan, 0], F32)), VALUE, "sink[2] is nan: accepted are finite nu"),
    (paged(sink=np.array([0, 1, 2, np.inf], F32)), VALUE, "sink[3] is inf: accepted are finite nu"),
    (paged(k_cache=zeros(6, 8, 2, 16)[:, ::-1]), VALUE, "k_cache of shape (6, 8, 2, 16) has strid"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=name_of)
def test_what_is_refused(call: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_with_kvcache, call, error, message)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"block_table": np.array([[1, 2, 3], [4, 5, 2]], I32)},
            "block_table: sequences 0 and 1 would both store a new token at place 2 of block 2",
        ),
        (
            {**ROWS, "cache_batch_idx": np.array([1, 1], I32)},
            "cache_batch_idx: sequences 0 and 1 would both store a new token at place 10 of block ",
        ),
    ],
)
def test_two_new_tokens_of_one_place(changes: dict[str, Any], message: str) -> None:
    new = {"k": zeros(2, 3, 2, 16), "v": zeros(2, 3, 2, 16), **changes}
    call = paged(cache_seqlens=np.array([8, 18], I32), **new)
    if "cache_batch_idx" in changes:
        call["cache_seqlens"] = np.array([8, 10], I32)
    refuses(rawattn.flash_attn_with_kvcache, call, VALUE, message)
    assert not call["k_cache"].any()


def test_pages_may_be_shared_where_nothing_is_stored() -> None:
    table = np.array([[1, 2, 3], [1, 2, 0]], I32)
    new = {"k": zeros(2, 3, 2, 16), "v": zeros(2, 3, 2, 16)}
    call = paged(block_table=table, cache_seqlens=np.array([16, 16], I32))
    rawattn.flash_attn_with_kvcache(**call, **new)


def test_dense_slopes_and_sinks() -> None:
    x = zeros(1, 2, 4, 8)
    for name, value, found in (
        ("alibi_slopes", [0, 0, np.nan, 0], "alibi_slopes[2] is nan: accepted are finite numbers"),
        ("sink", [np.inf, 0, 0, 0], "sink[0] is inf: accepted are finite numbers and -inf, which"),
    ):
        with pytest.raises(ValueError) as caught:
            rawattn.flash_attn_func(x, x, x, **{name: np.array(value, F32)})
        assert found in str(caught.value)
    none = np.full(4, -np.inf, F32)
    with_none = rawattn.flash_attn_func(x + 1, x, x + 2, sink=none)
    assert (with_none == rawattn.flash_attn_func(x + 1, x, x + 2)).all()


# ---- what they mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_padding_in_front_is_as_if_it_were_cut_off(layout: str) -> None:
    k, v, q = drawn(2, 24, 2, 16), drawn(2, 24, 2, 17), drawn(2, 3, 4, 16)
    pads, used = np.array([5, 20], I32), np.array([9, 20], I32)
    k[0, :5] = v[0, :5] = np.nan
    caches = (k, v) if layout == "NHD" else (k.swapaxes(1, 2).copy(), v.swapaxes(1, 2).copy())
    more: dict[str, Any] = {"causal": True, "window_size": (2, 0), "return_softmax_lse": True}
    out, lse = rawattn.flash_attn_with_kvcache(
        q, *caches, cache_seqlens=used, cache_leftpad=pads, layout=layout, **more
    )
    for b in range(2):
        cut = slice(pads[b], used[b])
        want = (
            rawattn.flash_attn_with_kvcache(
                q[b : b + 1], k[b : b + 1, cut].copy(), v[b : b + 1, cut].copy(), **more
            )
            if b == 0
            else (zeros(1, 3, 4, 17), np.full((1, 4, 3), -np.inf))
        )  # nothing is left
        assert np.allclose(out[b], want[0], atol=1e-6) and np.allclose(lse[b], want[1])


def test_packed_new_tokens_are_those_of_each_sequence_alone() -> None:
    caches = drawn(6, 8, 2, 16), drawn(6, 8, 2, 17)
    q, k, v = drawn(2, 3, 4, 16), drawn(4, 2, 16), drawn(4, 2, 17)
    angles = {"rotary_cos": drawn(24, 4), "rotary_sin": drawn(24, 5)[:, :4].copy()}
    call = paged(q=q, causal=True, **angles)
    alone = [x.copy() for x in caches]
    together = [x.copy() for x in caches]
    call |= dict(zip(("k_cache", "v_cache"), together, strict=True))
    out = rawattn.flash_attn_with_kvcache(**call, k=k, v=v, cu_seqlens_k_new=STARTS)
    for b in range(2):
        one, new = slice(b, b + 1), slice(STARTS[b], STARTS[b + 1])
        single = call | dict(zip(("k_cache", "v_cache"), alone, strict=True))
        single |= {name: call[name][one] for name in ("q", "cache_seqlens", "block_table")}
        longer = {name: np.concatenate([x, x]) for name, x in angles.items()}
        want = rawattn.flash_attn_with_kvcache(**single | longer, k=k[None, new], v=v[None, new])
        assert np.allclose(out[one], want, atol=1e-6)
    assert all((a == b).all() for a, b in zip(alone, together, strict=True))


def test_room_for_more_keys_than_a_sequence_may_have() -> None:
    """A table may have it, a caller may not ask for it: what was above 2^30 was cut off."""
    pages = 2**30 // 8 + 1
    specs = PagedArrays(
        q=contiguous((1, 1, 4, 64), "float16", None),
        k_cache=contiguous((9, 8, 2, 64), "float16", None),
        v_cache=contiguous((9, 8, 2, 64), "float16", None),
        block_table=contiguous((1, pages), "int32", None),
        seqused_k=contiguous((1,), "int32", None),
    )

    def planned(max_seqlen_k: int | None) -> Any:
        options = PagedOptions(max_seqlen_k=max_seqlen_k)
        request = paged_call.accepted(FIELDS, False, specs, options)
        return paged_call.plans(request, Device.named("H200"))[-1].problem.max_k

    assert planned(None) == planned(2**30) == 2**30
    with pytest.raises(rawattn.Unsupported, match="1073741825 keys: takes up to 1073741824"):
        planned(2**30 + 1)


def test_as_many_parts_as_are_asked_for() -> None:
    lengths, table = np.array([100, 3000], I32), np.zeros((2, 375), I32)
    for splits, tokens in ((0, 0), (1, 3000), (3, 1000), (7, 429), (5000, 1)):
        call = paged(cache_seqlens=lengths, block_table=table, num_splits=splits)
        problem = rawattn.prepare(rawattn.flash_attn_with_kvcache, **call).plan.problem
        assert problem.split == tokens

    bf16 = replace(problem, dtype="bfloat16", cache_dtype="bfloat16", split=429)
    (launch,) = plan(bf16, Device.named("H200")).launches
    span = dict(launch.scalars)["span"] * launch.config.unit
    assert -(-3000 // span) <= 7


def test_a_cache_without_blocks_has_room_for_no_keys() -> None:
    call = paged(k_cache=zeros(0, 4, 2, 16), v_cache=zeros(0, 4, 2, 16))
    call["cache_seqlens"] = np.zeros_like(call["cache_seqlens"])
    call["block_table"] = np.zeros_like(call["block_table"])
    assert rawattn.prepare(rawattn.flash_attn_with_kvcache, **call).plan.problem.max_k == 0
