# SPDX-License-Identifier: Apache-2.0
"""The public functions of paged caches: what they mean, where the laws do not say it; plans; and
the same through plans, Params and kernels of a GPU, on the emulator."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rawattn
from rawattn.problem import CacheLayout
from rawattn.reference_paged import write_cache
from rawattn.testing.paged_cases import LAYOUTS, PagedCase, PagedLimits
from rawattn.testing.paged_inputs import paged_tensors, spread
from rawattn.testing.paged_strategies import paged_cases
from tests.cascades import cascade_is_the_whole
from tools.emulator.api import emulated

F16, I32 = np.float16, np.int32
Arrays = dict[str, Any]


@pytest.fixture(
    params=["reference", pytest.param("emulator", marks=pytest.mark.emulator)],
)
def on(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """What to run calls in: nothing, or the emulator."""
    return emulated if request.param == "emulator" else contextlib.nullcontext


def x_major(lengths: list[int], page: int = 8, seed: int = 0) -> Arrays:
    """The arguments of `paged_attention_v1`, for 4 heads over 2."""
    rng = np.random.default_rng(seed)
    counts = [-(-n // page) for n in lengths]
    blocks = sum(counts) + 1
    ids = rng.permutation(blocks).tolist()
    table = np.full((len(lengths), max(counts) + 1), -1, I32)
    for row, count in zip(table, counts, strict=True):
        row[:count] = [ids.pop() for _ in range(count)]

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32).astype(F16)

    return {
        "out": None,
        "query": normal(len(lengths), 4, 64),
        "key_cache": normal(blocks, 2, 8, page, 8),
        "value_cache": normal(blocks, 2, 64, page),
        "num_kv_heads": 2,
        "scale": 0.125,
        "block_tables": table,
        "seq_lens": np.array(lengths, I32),
        "block_size": page,
        "max_seq_len": max(lengths),
    }


# ---- PagedAttention ------------------------------------------------------------------------------


def test_v1_and_v2_are_attention_over_an_x_major_cache(on: Any) -> None:
    call = x_major([17, 0, 8, 40])
    with on():
        out = rawattn.paged_attention_v1(**call)
        again = rawattn.paged_attention_v2(**call, exp_sum=None, max_logits=None, tmp_out=None)
        want = rawattn.flash_attn_with_kvcache(
            call["query"][:, None],
            call["key_cache"],
            call["value_cache"],
            cache_seqlens=call["seq_lens"],
            block_table=call["block_tables"],
            softmax_scale=0.125,
            layout="x-major",
        )[:, 0]
    assert out.shape == (4, 4, 64) and out.dtype == F16
    assert np.array_equal(out, want) and np.array_equal(again, want)
    assert not out[1].any() and np.isfinite(out.astype(np.float32)).all()


@pytest.mark.parametrize("backend", ["paged_v1", "paged_v2", "decode_split"])
@pytest.mark.emulator
def test_every_backend(backend: str) -> None:
    """Out, and where there is one lse, of each kernel are those of NumPy within a few ulp."""
    call = x_major([600, 0, 30, 8]) | {"alibi_slopes": np.float32([0.1, 0.2, 0.3, 0.4])}
    want = rawattn.paged_attention_v1(**call).astype(np.float32)
    with emulated() as ran:
        got = rawattn.paged_attention_v1(**call, backend=backend).astype(np.float32)
    assert ran[0].startswith(backend)
    assert np.abs(got - want).max() <= 2 * 2.0**-11 * np.abs(want).max()


def seen_by_vllm(head: int, length: int, sparse: Arrays) -> list[bool]:
    """Whether a query head sees each key, as the loops of vLLM's kernel have it."""
    size, stride = sparse["blocksparse_block_size"], sparse["blocksparse_vert_stride"]
    step, rank = sparse["blocksparse_head_sliding_step"], sparse["tp_rank"]
    kv_head = head // 2
    offset = (rank * 4 + head) * step + 1 if step >= 0 else (rank * 2 + kv_head) * -step + 1
    last = (length - 1) // size
    return [
        (j // size + offset) % stride == 0 or j // size > last - sparse["blocksparse_local_blocks"]
        for j in range(length)
    ]


@pytest.mark.parametrize("step", [0, 1, -1, 3])
def test_block_sparse(on: Any, step: int) -> None:
    sparse = {
        "tp_rank": 1 if step else 0,  # refused without a step, as it says nothing
        "blocksparse_local_blocks": 1,
        "blocksparse_vert_stride": 3,
        "blocksparse_block_size": 16,
        "blocksparse_head_sliding_step": step,
    }
    lengths = [100, 5, 0, 64]
    call = x_major(lengths)
    with on():
        out = rawattn.paged_attention_v1(**call, **sparse)
    for b, length in enumerate(lengths):
        pages = call["block_tables"][b, : -(-length // 8)]
        k = call["key_cache"][pages].transpose(0, 3, 1, 2, 4).reshape(-1, 2, 64)[:length]
        v = call["value_cache"][pages].transpose(0, 3, 1, 2).reshape(-1, 2, 64)[:length]
        for head in range(4):
            keys = np.array(seen_by_vllm(head, length, sparse), bool)
            assert length == 0 or 0 < keys.sum() <= length
            scores = 0.125 * k[keys, head // 2].astype(float) @ call["query"][b, head].astype(float)
            weights = np.exp(scores - scores.max(initial=0))
            want = weights @ v[keys, head // 2].astype(float) / max(weights.sum(), 1e-300)
            assert np.abs(out[b, head] - want).max() <= 2 * 2.0**-11 * max(1, np.abs(want).max())


def test_a_cache_of_8_bits(on: Any) -> None:
    """Values come back times their scales, from bytes and from arrays of the type itself."""
    call = x_major([17, 40])
    exact = rawattn.paged_attention_v1(**call).astype(np.float32)
    bytes_of: Arrays = {}
    for name, x in (("key_cache", 16), ("value_cache", 1)):
        cache = call[name].astype(np.float32) / 0.25
        stored = cache.astype(ml_dtypes.float8_e4m3fn)
        if x == 16:  # chunks of 16 columns in place of 8
            blocks, heads, chunks, page, _ = stored.shape
            moved = stored.transpose(0, 1, 3, 2, 4).reshape(blocks, heads, page, chunks // 2, 16)
            stored = np.ascontiguousarray(moved.transpose(0, 1, 3, 2, 4))
        bytes_of[name] = stored.view(np.uint8)
    scales = {"kv_cache_dtype": "fp8", "k_scale": 0.25, "v_scale": np.float32([0.25])}
    with on():
        out = rawattn.paged_attention_v1(**call | bytes_of, **scales)
        typed = {name: x.view(ml_dtypes.float8_e4m3fn) for name, x in bytes_of.items()}
        if on is contextlib.nullcontext:
            same = rawattn.paged_attention_v1(**call | typed, **scales | {"kv_cache_dtype": "auto"})
            assert np.array_equal(out, same)
    assert 0 < np.abs(out - exact).max() < 0.1, "e4m3 has 3 bits"


# ---- cascades ------------------------------------------------------------------------------------

SHARED = PagedLimits(
    dtypes=("float16", "float32"),
    tables=("block_table",),
    pages=(1, 3, 8, 16),
    rotary=("none",),
    alibi=(False,),
    tree=(False,),
    by_sequence=(False,),
    windows=False,
    max_new=0,
    data=("normal", "dominant", "equal"),
)


@settings(max_examples=20)
@given(paged_cases(SHARED), st.integers(0, 4))
def test_a_cascade_is_the_whole(case: PagedCase, prefix_pages: int) -> None:
    if len(case.q_lens):
        cascade_is_the_whole(case, prefix_pages, contextlib.nullcontext)


@pytest.mark.emulator
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cascade_of_kernels(layout: str, packed: bool) -> None:
    lens = (1, 3, 2) if packed else (2, 2, 2)
    case = PagedCase(
        q_lens=lens,
        k_lens=(5, 0, 40),
        dtype="float16",
        q_heads=4,
        kv_heads=2,
        layout=layout,
        packed=packed,
        causal=True,
        sink=True,
    )
    cascade_is_the_whole(case, 2, emulated)


# ---- blocks, lengths -----------------------------------------------------------------------------


def test_blocks_are_copied(on: Any) -> None:
    rng = np.random.default_rng(0)
    keys = [rng.standard_normal((7, 2, 8, 16, 8), np.float32).astype(F16) for _ in range(3)]
    values = [rng.standard_normal((14, 2, 48, 16), np.float32).astype(F16)[::2] for _ in range(3)]
    mapping = np.array([[0, 5], [0, 6], [3, 1], [2, 2]])
    want = [x.copy() for x in (*keys, *values)]
    for x in want:
        x[[5, 6, 1]] = x[[0, 0, 3]]
    with on():
        assert rawattn.copy_blocks(keys, values, mapping) is None
    assert all(np.array_equal(x, y) for x, y in zip((*keys, *values), want, strict=True))
    with on():
        rawattn.copy_blocks([], [], mapping)
        rawattn.copy_blocks(keys, values, mapping[:0])


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"block_mapping": np.array([[0, 5]], I32)}, TypeError, "block_mapping has dtype int32: a"),
        ({"block_mapping": np.array([0, 5])}, ValueError, "block_mapping has shape (2,): accepted"),
        ({"block_mapping": np.array([[0, 7]])}, ValueError, "block_mapping[0, 1] is 7: accepted a"),
        ({"block_mapping": np.array([[0, 5], [5, 1]])}, ValueError, "block_mapping[0, 1] is 5: ac"),
        ({"key_caches": [np.zeros((7, 4), F16).T]}, ValueError, "key_caches[0] of shape (4, 7) ha"),
        ({"value_caches": [None]}, TypeError, "value_caches[0] is None: accepted is an array"),
        ({"key_caches": [np.zeros(7, F16)]}, ValueError, "key_caches[0] has shape (7,): accepted"),
    ],
)
def test_blocks_that_are_not_copied(changes: Arrays, error: Any, message: str) -> None:
    call = {"key_caches": [np.zeros((7, 4), F16)], "value_caches": [np.zeros((7, 4), F16)]}
    with pytest.raises(error) as caught:
        rawattn.copy_blocks(**{**call, "block_mapping": np.array([[0, 5]]), **changes})
    assert message in str(caught.value)


def test_one_length_for_all(on: Any) -> None:
    rng = np.random.default_rng(0)
    q, cache = (rng.standard_normal(s).astype(F16) for s in ((3, 2, 4, 64), (3, 50, 2, 64)))
    with on():
        for n in (0, 1, 37, 50):
            out = rawattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=n, causal=True)
            lengths = np.full(3, n, I32)
            want = rawattn.flash_attn_with_kvcache(
                q, cache, cache, cache_seqlens=lengths, causal=True
            )
            assert np.array_equal(out, want)
        full = rawattn.flash_attn_with_kvcache(q, cache, cache, causal=True)
    assert np.array_equal(full, out)


# ---- plans ---------------------------------------------------------------------------------------


def test_a_plan_follows_what_its_arrays_hold(on: Any) -> None:
    """Lengths grow, shrink and become 0 between runs, as between replays of a graph."""
    call = x_major([17, 0, 40, 3]) | {"out": np.zeros((4, 4, 64), F16)}
    with on():
        plan = rawattn.prepare(rawattn.paged_attention_v1, **call)
        for lengths in ([17, 0, 40, 3], [1, 0, 33, 2], [0, 0, 0, 0], [17, 0, 40, 3]):
            call["seq_lens"][:] = lengths
            assert plan.run() is call["out"]
            assert np.array_equal(call["out"], rawattn.paged_attention_v1(**{**call, "out": None}))
        assert rawattn.paged_attention_v1(**call, plan=plan) is call["out"]
        with pytest.raises(
            ValueError, match=r"^scale: the plan was prepared for 0\.125, found 0\.5"
        ):
            rawattn.paged_attention_v1(**{**call, "scale": 0.5}, plan=plan)
        with pytest.raises(ValueError, match=r"^plan was prepared for another function"):
            rawattn.merge_states(np.zeros((1, 2, 3, 4), F16), np.zeros((1, 3, 2), "f"), plan=plan)


@pytest.mark.emulator
@pytest.mark.parametrize("backend", ["decode_split", "paged_v2"])
def test_the_size_of_the_workspace_is_exact(backend: str) -> None:
    call = x_major([700, 3]) | {"backend": backend}
    with emulated():
        plan = rawattn.prepare(rawattn.paged_attention_v1, **call)
        size = plan.workspace_size
        assert size == sum(p.workspace_bytes for p in plan.plans) > 0
        memory = np.zeros(size + 16, np.uint8)
        memory = memory[-memory.ctypes.data % 16 :][:size]
        got = rawattn.paged_attention_v1(**call, workspace=memory)
        assert np.array_equal(got, rawattn.paged_attention_v1(**call)) and memory.any()
        with pytest.raises(ValueError, match=rf"workspace has shape \({size - 1},\): accepted is"):
            rawattn.paged_attention_v1(**call, workspace=memory[:-1])


@pytest.mark.emulator
def test_new_tokens_are_stored_turned_and_seen() -> None:
    """Every step of `flash_attn_with_kvcache` on the emulator gives what NumPy gives."""
    results = []
    for on in (contextlib.nullcontext, emulated):
        case = PagedCase(
            q_lens=(3, 3),
            k_lens=(40, 17),
            dtype="float16",
            q_heads=4,
            kv_heads=2,
            causal=True,
            new=3,
            rotary="halves",
        )
        inputs = spread(paged_tensors(case))
        with on() as ran:
            plan = rawattn.prepare(rawattn.flash_attn_with_kvcache, **inputs.arguments)
            plan.run()
        results.append(inputs.results())
    assert ran == ["kv_write", "rotary", "decode_split"]
    assert [p.backend for p in plan.plans] == ran
    assert np.abs(results[0][0] - results[1][0]).max() <= 2.0**-10 * 4


def test_layouts_of_the_reference() -> None:
    """`write_cache` and the calls agree on where tokens lie (their other tests share `slots`)."""
    rng = np.random.default_rng(0)
    k = rng.standard_normal((20, 2, 16), np.float32)
    slots = rng.permutation(24)[:20].astype(np.int64)
    shapes = {"NHD": (3, 8, 2, 16), "HND": (3, 2, 8, 16)}
    for layout, shape in shapes.items():
        mine, theirs = np.zeros((2, *shape), np.float32), np.zeros((2, *shape), np.float32)
        write_cache(k, k, *mine, slots, CacheLayout(layout))
        rawattn.reshape_and_cache_flash(k, k, *theirs, slots, layout=layout)
        assert np.array_equal(mine, theirs)
        at = tuple(np.divmod(slots[0], 8))
        place = (at[0], at[1], 1, 5) if layout == "NHD" else (at[0], 1, at[1], 5)
        assert mine[0][place] == k[0, 1, 5]
