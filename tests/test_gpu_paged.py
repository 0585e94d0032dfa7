# SPDX-License-Identifier: Apache-2.0
"""Paged caches on a GPU: sizes that only it has, plans that allocate nothing, graphs that follow
lengths. That the numbers are right is what the laws show (`test_paged_laws.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import forward, paged_call
from rawattn.testing.closeness import ulp
from rawattn.testing.paged_cases import LAYOUTS, PagedCase
from rawattn.testing.paged_inputs import paged_tensors, spread
from rawattn.testing.paged_laws import law_paged_matches_reference, paged_op
from tests.gpu import same

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
BACKENDS = ("decode_split", "paged_v2", "paged_v1")


@pytest.fixture
def no_allocation(cupy: Any) -> Callable[[], Any]:
    def refuse(size: int) -> Any:
        raise AssertionError(f"{size} bytes are allocated")

    return lambda: cupy.cuda.using_allocator(refuse)


def arguments(cupy: Any, **changes: Any) -> dict[str, Any]:
    """Of `flash_attn_with_kvcache`, for three sequences."""
    given = {
        "q_lens": (1, 1, 1),
        "k_lens": (700, 40, 3),
        "q_heads": 8,
        "kv_heads": 2,
        "head_dim": 128,
        "value_dim": 128,
    }
    call = spread(paged_tensors(PagedCase(**{**given, **changes})), cupy).arguments
    return {**call, "return_softmax_lse": True}


@pytest.mark.parametrize(
    ("head_dim", "layout", "table", "cache"),
    [
        (64, "NHD", "block_table", "same"),
        (96, "NHD", "block_table", "same"),
        (128, "HND", "block_table", "same"),
        (256, "NHD", "csr", "same"),
        (64, "x-major", "block_table", "same"),
        (128, "x-major", "csr", "same"),
        (256, "x-major", "block_table", "same"),
        (64, "NHD", "csr", "float8_e4m3fn"),
        (128, "HND", "block_table", "float8_e4m3fn"),
        (64, "x-major", "block_table", "float8_e4m3fn"),
        (128, "x-major", "block_table", "float8_e4m3fn"),
    ],
)
def test_few_queries_and_many_keys(
    cupy: Any, head_dim: int, layout: str, table: str, cache: str
) -> None:
    """Which Hopper cuts over keys, in sequences of other lengths too."""
    case = PagedCase(
        q_lens=(130, 5, 0),
        k_lens=(6000, 300, 9),
        packed=True,
        q_heads=4,
        kv_heads=2,
        head_dim=head_dim,
        value_dim=head_dim,
        layout=layout,
        table=table,
        cache_dtype=cache,
        scales="number" if cache == "same" else "heads",
        causal=True,
        sink=True,
    )
    law_paged_matches_reference(paged_op("cupy"), case)


# ---- sizes ---------------------------------------------------------------------------------------


def big_caches(cupy: Any, layout: str) -> tuple[Any, Any, int]:
    """K and V of more than 2^31 elements each, all NaN, and their blocks of 16 x 8 x 128."""
    blocks = 2**31 // (16 * 8 * 128) + 3
    shapes = {
        "NHD": ((16, 8, 128), (16, 8, 128)),
        "HND": ((8, 16, 128), (8, 16, 128)),
        "x-major": ((8, 16, 16, 8), (8, 128, 16)),
    }
    k, v = (cupy.empty((blocks, *shape), BF16) for shape in shapes[layout])
    for cache in (k, v):
        cache.data.memset(0xFF, cache.nbytes)
    return k, v, blocks


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_past_2_to_the_31(cupy: Any, layout: str, backend: str) -> None:
    """The highest pages of a big cache are written and read."""
    if backend != "decode_split" and layout != "x-major":
        pytest.skip("PagedAttention's kernels take x-major caches")
    k_cache, v_cache, blocks = big_caches(cupy, layout)
    rng = np.random.default_rng(0)
    k, v = (cupy.asarray(rng.standard_normal((48, 8, 128), np.float32).astype(BF16)) for _ in "kv")
    pages = np.array([blocks - 1, 0, blocks - 2], np.int32)
    slots = cupy.asarray((pages[:, None].astype(np.int64) * 16 + np.arange(16)).ravel())
    if layout == "x-major":
        rawattn.reshape_and_cache(k, v, k_cache, v_cache, slots)
    else:
        rawattn.reshape_and_cache_flash(k, v, k_cache, v_cache, slots, layout=layout)
    q = cupy.asarray(rng.standard_normal((1, 1, 32, 128), np.float32).astype(BF16))
    out = rawattn.flash_attn_with_kvcache(
        q,
        k_cache,
        v_cache,
        cache_seqlens=cupy.array([48], np.int32),
        block_table=cupy.asarray(pages[None]),
        layout=layout,
        backend=backend,
    )
    want = rawattn.flash_attn_func(q, k[None], v[None])
    got, exact = (x.get().astype(np.float64) for x in (out, want))
    assert np.abs(got - exact).max() <= 2 * ulp(np.abs(exact).max(), "bfloat16")
    rawattn.copy_blocks([k_cache], [v_cache], cupy.array([[blocks - 1, blocks - 3]]))
    assert same(k_cache[blocks - 3], k_cache[blocks - 1])


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_sequences_than_a_grid_is_high(cupy: Any, backend: str) -> None:
    """70000 sequences of one token: attention is its value, bit for bit; of none: 0."""
    batch, rng = 70_000, np.random.default_rng(0)
    shape = (batch, 1, 8, 8, 8), (batch, 1, 64, 8)
    k, v = (cupy.asarray(rng.standard_normal(s, np.float32).astype(np.float16)) for s in shape)
    order = cupy.asarray(rng.permutation(batch).astype(np.int32))
    lengths = cupy.ones(batch, np.int32)
    lengths[7] = lengths[69_999] = 0
    q = cupy.ones((batch, 2, 64), np.float16)
    out = rawattn.paged_attention_v1(
        None, q, k, v, 1, 0.125, order[:, None], lengths, 8, 8, backend=backend
    )
    want = cupy.where(lengths[:, None] == 0, np.float16(0), v[order][:, 0, :, 0])
    assert same(out[:, 0], want) and same(out[:, 1], want)


@pytest.mark.parametrize("split", [0, 4096])
def test_a_sequence_of_a_million_tokens(cupy: Any, split: int) -> None:
    length, page = 1 << 20, 64
    rng = cupy.random.default_rng(0)
    cache = [rng.standard_normal((length // page, page, 1, 64), np.float32) for _ in "kv"]
    k, v = (x.astype(np.float16) for x in cache)
    q = (8 * rng.standard_normal((1, 1, 4, 64), np.float32)).astype(np.float16)
    table = cupy.random.permutation(length // page).astype(np.int32)
    out, lse = rawattn.flash_attn_with_kvcache(
        q,
        k,
        v,
        cache_seqlens=cupy.array([length], np.int32),
        block_table=table[None],
        split_tokens=split,
        return_softmax_lse=True,
    )
    keys, values = (x[table].reshape(length, 64).astype(np.float64) for x in (k, v))
    scores = q[0, 0].astype(np.float64) @ keys.T / 8
    top = scores.max(axis=-1, keepdims=True)
    weights = cupy.exp(scores - top)
    total = weights.sum(axis=-1, keepdims=True)
    want, twin = weights @ values / total, weights.astype(np.float16) @ values / total
    exact = (top + cupy.log(total))[:, 0]
    sizes = (cupy.abs(q[0, 0].astype(np.float64)) @ cupy.abs(keys).T / 8).max(axis=-1)
    noise = 2 * ulp((sizes + cupy.abs(exact)).get(), "float32")  # of scores, and so of weights
    limit = 2 * float(cupy.abs(twin - want).max()) + 2 * ulp(cupy.abs(want).max().get(), "float16")
    limit += 2 * noise.max() * float(cupy.abs(values).max())
    assert float(cupy.abs(out[0, 0] - want).max()) <= limit
    assert (np.abs(lse[0, :, 0].get() - exact.get()) <= noise).all()


# ---- plans and graphs ----------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_graph_follows_lengths(cupy: Any, no_allocation: Any, layout: str) -> None:
    """Captured once, replayed with lengths that shrink, become 0 and grow."""
    call = arguments(cupy, layout=layout)
    plan = rawattn.prepare(rawattn.flash_attn_with_kvcache, **call)
    lengths = call["cache_seqlens"]
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with no_allocation():
            plan.run()
        graph = stream.end_capture()
        for each in ((700, 40, 3), (1, 0, 2), (0, 0, 0), (699, 17, 1), (700, 40, 3)):
            lengths[...] = cupy.array(each, np.int32)
            graph.launch()
            want = rawattn.flash_attn_with_kvcache(**{**call, "out": None, "lse": None})
            assert same(call["out"], want[0]) and same(call["lse"], want[1])


@pytest.mark.parametrize("measured", [False, True], ids=["new", "packed and padded"])
def test_a_graph_of_growing_sequences(cupy: Any, no_allocation: Any, measured: bool) -> None:
    """Tokens are appended, turned and attended to in a graph; lengths move between replays."""
    more = {"new_packed": True, "leftpad": True, "table": "rows", "seed": 5} if measured else {}
    new = 3 if measured else 1
    call = arguments(cupy, causal=True, new=new, rotary="interleaved", k_lens=(300, 40, 30), **more)
    lengths = call["cache_seqlens"]
    plan = rawattn.prepare(rawattn.flash_attn_with_kvcache, **call)
    steps = ["kv_write", "rotary", *(["sequences"] if measured else []), "decode_split"]
    assert [p.backend for p in plan.plans] == steps
    assert plan.workspace_size > 0
    caches = call["k_cache"].copy(), call["v_cache"].copy()
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with no_allocation():
            plan.run()
        graph = stream.end_capture()
        for _ in range(3):
            graph.launch()
            other = {**call, "k_cache": caches[0], "v_cache": caches[1], "out": None, "lse": None}
            want = rawattn.flash_attn_with_kvcache(**other)
            assert same(call["out"], want[0]) and same(call["lse"], want[1])
            assert same(call["k_cache"], caches[0]) and same(call["v_cache"], caches[1])
            lengths -= 1


def test_a_graph_of_a_cascade(cupy: Any, no_allocation: Any) -> None:
    call = arguments(cupy, k_lens=(700, 400, 300), causal=True)
    call["block_table"][1:, :16] = call["block_table"][0, :16]
    for name in ("alibi_slopes", "window_size", "return_softmax_lse"):
        del call[name]
    call |= {"common_prefix_len": 256, "return_lse": True}
    plan = rawattn.prepare(rawattn.cascade_attention, **call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with no_allocation():
            plan.run()
        graph = stream.end_capture()
        for each in ((700, 400, 300), (257, 258, 300), (600, 300, 257)):
            call["cache_seqlens"][...] = cupy.array(each, np.int32)
            graph.launch()
            want = rawattn.cascade_attention(**{**call, "out": None, "lse": None})
            assert same(call["out"], want[0]) and same(call["lse"], want[1])


def test_plans_of_caches_and_merging(cupy: Any, no_allocation: Any) -> None:
    rng = cupy.random.default_rng(0)
    k = rng.standard_normal((40, 2, 64), np.float32)
    caches = [cupy.zeros((5, 2, 16, 16, 4), np.float32), cupy.zeros((5, 2, 64, 16), np.float32)]
    slots = cupy.arange(39, -1, -1)
    plans = [rawattn.prepare(rawattn.reshape_and_cache, k, k, *caches, slots)]
    outs, lses = (
        rng.standard_normal((3, 7, 2, 64), np.float32),
        rng.standard_normal((3, 2, 7), np.float32),
    )
    out = cupy.empty_like(outs[0])
    plans.append(rawattn.prepare(rawattn.merge_states, outs, lses, out=out))
    mapping = cupy.array([[0, 4]])
    plans.append(rawattn.prepare(rawattn.copy_blocks, caches[:1], caches[1:], mapping))
    with no_allocation():
        for plan in plans:
            plan.run()
        rawattn.copy_blocks(caches[:1], caches[1:], mapping, plan=plans[-1])
    assert same(caches[0][4], caches[0][0]) and bool(caches[0][0].any())
    assert same(out, rawattn.merge_states(outs, lses))


def test_a_workspace_that_is_lent(cupy: Any, no_allocation: Any) -> None:
    call = arguments(cupy, split=64)
    plan = rawattn.prepare(rawattn.flash_attn_with_kvcache, **call)
    size = plan.workspace_size
    assert size > 0
    memory = cupy.empty(size, np.uint8)
    want = [x.copy() for x in plan.run()]
    lent = rawattn.prepare(rawattn.flash_attn_with_kvcache, **call, workspace=memory)
    with no_allocation():
        got = lent.run()
    assert all(same(x, y) for x, y in zip(got, want, strict=True))
    with pytest.raises(ValueError, match=rf"workspace has shape \({size - 1},\): accepted is"):
        rawattn.flash_attn_with_kvcache(**call, workspace=memory[:-1])


def test_on_another_stream(cupy: Any) -> None:
    call = arguments(cupy)
    want = [x.copy() for x in rawattn.flash_attn_with_kvcache(**call)]
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    got = rawattn.flash_attn_with_kvcache(**call, stream=stream)
    stream.synchronize()
    assert all(same(x, y) for x, y in zip(got, want, strict=True))


# ---- bad input -----------------------------------------------------------------------------------


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAWATTN_CHECK", "1")
    for cached in (forward.Settings.read, paged_call.resolve):
        cached.cache_clear()
    yield
    monkeypatch.undo()
    for cached in (forward.Settings.read, paged_call.resolve):
        cached.cache_clear()


@pytest.mark.usefixtures("checking")
def test_tables_on_the_gpu_are_checked(cupy: Any) -> None:
    call = arguments(cupy)
    rawattn.flash_attn_with_kvcache(**call)
    call["block_table"][1, 0] = 10**6
    with pytest.raises(ValueError, match=r"block_table\[1, 0\] is 1000000: accepted are 0 to"):
        rawattn.flash_attn_with_kvcache(**call)


def test_no_token_is_stored_past_the_room_of_its_sequence(cupy: Any) -> None:
    call = arguments(cupy, new=3, k_lens=(300, 40, 3))
    call["cache_seqlens"][...] = cupy.array([319, 2**31 - 8, 320], np.int32)
    table = call["block_table"]
    cupy.maximum(table, 0, out=table)
    before = [call[name].get() for name in ("k_cache", "v_cache")]
    rawattn.flash_attn_with_kvcache(**call)
    for name, old in zip(("k_cache", "v_cache"), before, strict=True):
        changed = (call[name].get().view(np.uint16) != old.view(np.uint16)).any(axis=(2, 3))
        assert np.argwhere(changed).tolist() == [[int(table[0, 319 // 16]), 15]]


def test_mixed_arrays_are_refused(cupy: Any) -> None:
    call = arguments(cupy)
    with pytest.raises(TypeError, match="q is a CUDA array, k_cache is a NumPy array"):
        rawattn.flash_attn_with_kvcache(**{**call, "k_cache": call["k_cache"].get()})
    slots = cupy.zeros(1, np.int32)
    cache = cupy.zeros((2, 4, 1, 8), np.float16)
    with pytest.raises(TypeError, match="slot_mapping has dtype int32: accepted is int64"):
        rawattn.reshape_and_cache_flash(cache[:1, 0], cache[:1, 0], cache, cache.copy(), slots)
