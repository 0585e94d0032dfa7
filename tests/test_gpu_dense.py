# SPDX-License-Identifier: Apache-2.0
"""The public API on a GPU: results, plans, graphs, and what is refused. That the numbers are right
is what the laws show; here one call on CuPy arrays is the measure, and every other way to make it
has to give its bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import forward
from rawattn.dense import flash_attn_func, flash_attn_varlen_func
from rawattn.device import Device
from rawattn.prepared import prepare
from rawattn.registry import all_configs
from rawattn.testing import Case, law_matches_reference, public_op
from tests.gpu import DTYPES, Data, bits, data, same
from tools import ledger

pytestmark = pytest.mark.gpu


@pytest.fixture(params=DTYPES, ids=["fp16", "bf16"])
def case(cupy: Any, request: pytest.FixtureRequest) -> Data:
    return data(cupy, request.param)


# ---- results ----


def test_cupy_in_cupy_out(cupy: Any, case: Data) -> None:
    assert isinstance(case.out, cupy.ndarray) and case.out.dtype == case.q.dtype
    assert case.out.shape == (2, 70, 6, 64)
    assert case.lse.shape == (2, 6, 70) and case.lse.dtype == np.float32
    assert not cupy.isnan(case.lse).any()


def test_outputs_that_are_given(cupy: Any, case: Data) -> None:
    out, lse = cupy.zeros_like(case.out), cupy.zeros_like(case.lse)
    assert flash_attn_func(*case.inputs, causal=True, out=out, lse=lse) is out
    assert same(out, case.out) and same(lse, case.lse)
    answer = flash_attn_func(*case.inputs, causal=True, out=out, lse=lse, return_lse=True)
    assert answer[0] is out and answer[1] is lse


def test_strided_arrays_are_read_and_written_in_place(cupy: Any, case: Data) -> None:
    def spread(x: Any) -> Any:
        """The same values, heads before rows, with gaps between rows."""
        b, s, h, d = x.shape
        room = np.full((b, h, s + 3, d + 16), np.nan, x.dtype)
        room[:, :, 1 : s + 1, 8 : d + 8] = x.get().transpose(0, 2, 1, 3)
        room = cupy.asarray(room)
        return room, room[:, :, 1 : s + 1, 8 : d + 8].transpose(0, 2, 1, 3)

    room, out = spread(cupy.zeros_like(case.out))
    flash_attn_func(*(spread(x)[1] for x in case.inputs), causal=True, out=out)
    written = room.get()
    assert np.array_equal(written[:, :, 1:71, 8:72].transpose(0, 2, 1, 3), case.out.get())
    written[:, :, 1:71, 8:72] = np.nan
    assert np.isnan(written.astype(np.float32)).all(), "nothing else is written"


def test_bits_with_a_dtype(cupy: Any, case: Data) -> None:
    name = case.q.dtype.name
    arrays = [x.view(np.uint16) for x in case.inputs]
    got = flash_attn_func(*arrays, causal=True, dtype=name)
    assert got.dtype == case.q.dtype and same(got, case.out)
    out = cupy.empty(got.shape, np.uint16)
    assert flash_attn_func(*arrays, causal=True, dtype=name, out=out) is out
    assert same(out, case.out)


def test_rows_without_keys_are_written(cupy: Any, case: Data) -> None:
    q, k, v = case.q, case.k[:, :0], case.v[:, :0]
    out, lse = case.out.copy(), case.lse.copy()
    flash_attn_func(q, k, v, out=out, lse=lse)
    assert not bits(out).any() and bool((lse == -np.inf).all())


@pytest.mark.parametrize("cut", [np.s_[:0], np.s_[:, :0], np.s_[:, :, :0]], ids=["B", "Sq", "Hq"])
def test_nothing_to_write_launches_nothing(cupy: Any, case: Data, cut: Any) -> None:
    q = case.q[cut]
    k, v = (x[: len(q)] for x in (case.k, case.v))
    plan = prepare(flash_attn_func, q, k, v)
    assert plan.plan.launches == ()
    assert flash_attn_func(q, k, v, plan=plan).shape == q.shape


def test_varlen_is_a_loop_of_dense(cupy: Any, case: Data) -> None:
    q, k, v = (x[0] for x in case.inputs)
    starts_q, starts_k = (0, 20, 20, 61, 70), (0, 50, 60, 60, 130)
    tables = [cupy.array(s, np.int32) for s in (starts_q, starts_k)]
    out, lse = flash_attn_varlen_func(q, k, v, *tables, causal=True, return_lse=True)
    assert lse.shape == (6, 70)
    for i in range(4):
        rows, keys = slice(*starts_q[i : i + 2]), slice(*starts_k[i : i + 2])
        one = q[None, rows], k[None, keys], v[None, keys]
        alone, alone_lse = flash_attn_func(*one, causal=True, return_lse=True)
        assert same(out[rows], alone[0]) and same(lse[:, rows], alone_lse[0])


def test_padded_keys(cupy: Any, case: Data) -> None:
    table = cupy.array([0, 30, 70], np.int32)
    used = cupy.array([77, 0], np.int32)
    q = case.q[0]
    k, v = case.k.get(), case.v.get()
    for b, n in enumerate((77, 0)):
        k[b, n:] = v[b, n:] = np.nan
    k, v = cupy.asarray(k), cupy.asarray(v)
    out = flash_attn_varlen_func(q, k, v, table, seqused_k=used, max_seqlen_q=40)
    assert same(out[:30], flash_attn_func(q[None, :30], k[:1, :77], v[:1, :77])[0])
    assert not bits(out[30:]).any()


# ---- plans ----


@pytest.fixture
def no_allocation(cupy: Any) -> Any:
    def refuse(size: int) -> Any:
        raise AssertionError(f"{size} bytes are allocated")

    return lambda: cupy.cuda.using_allocator(refuse)


def test_a_plan_allocates_nothing(cupy: Any, case: Data, no_allocation: Any) -> None:
    out, lse = cupy.empty_like(case.out), cupy.empty_like(case.lse)
    call = {"causal": True, "out": out, "lse": lse, "return_lse": True}
    plan = prepare(flash_attn_func, *case.inputs, **call)
    with no_allocation():
        answer = flash_attn_func(*case.inputs, **call, plan=plan)
    assert answer[0] is out and answer[1] is lse
    assert same(out, case.out) and same(lse, case.lse)


def test_a_plan_takes_other_arrays(cupy: Any, case: Data, no_allocation: Any) -> None:
    plan = prepare(flash_attn_func, *case.inputs, causal=True)
    other = data(cupy, case.q.dtype, seed=1)
    assert same(flash_attn_func(*other.inputs, causal=True, plan=plan), other.out)
    assert same(flash_attn_func(*case.inputs, causal=True, plan=plan), case.out)
    first, out = cupy.empty_like(case.out), cupy.empty_like(case.out)
    plan = prepare(flash_attn_func, *case.inputs, causal=True, out=first)
    with no_allocation():
        flash_attn_func(*other.inputs, causal=True, out=out, plan=plan)
    assert same(out, other.out)


def test_a_plan_refuses_other_calls(cupy: Any, case: Data) -> None:
    q, k, v = case.inputs
    plan = prepare(flash_attn_func, q, k, v, causal=True)
    for name, arrays, options in (
        ("causal", (q, k, v), {}),
        ("softcap", (q, k, v), {"causal": True, "softcap": 2.0}),
        ("k", (q, k[:, 1:], v[:, 1:]), {"causal": True}),
        ("sink", (q, k, v), {"causal": True, "sink": cupy.zeros(6, np.float32)}),
    ):
        with pytest.raises(ValueError, match=f"^{name}: the plan was prepared for"):
            flash_attn_func(*arrays, **options, plan=plan)


def test_a_graph_replays_with_other_values(cupy: Any, case: Data) -> None:
    other = data(cupy, case.q.dtype, seed=1)
    inputs = [x.copy() for x in case.inputs]
    out, lse = cupy.zeros_like(case.out), cupy.zeros_like(case.lse)
    call = {"causal": True, "out": out, "lse": lse, "return_lse": True}
    plan = prepare(flash_attn_func, *inputs, **call)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        flash_attn_func(*inputs, **call, plan=plan)
        graph = stream.end_capture()
        assert not bits(out).any(), "capturing does not run"
        for want in (case, other):
            for x, value in zip(inputs, want.inputs, strict=True):
                x[...] = value
            graph.launch()
            assert same(out, want.out) and same(lse, want.lse)


def test_a_graph_of_few_queries_and_many_keys(cupy: Any, no_allocation: Any) -> None:
    """Which Hopper cuts over keys, in a workspace: the plan's, whatever else is called."""
    rng = np.random.default_rng(0)
    q, q2, k, v = (
        cupy.asarray(rng.standard_normal((1, rows, heads, 128), np.float32).astype(np.float16))
        for rows, heads in ((70, 6), (70, 6), (3000, 3), (3000, 3))
    )
    want = [flash_attn_func(x, k, v, causal=True) for x in (q, q2)]
    out, given = cupy.zeros_like(q), q.copy()
    plan = prepare(flash_attn_func, given, k, v, causal=True, out=out)
    assert (plan.workspace_size > 0) == (plan.plan.backend == "fwd_sm90")
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        with no_allocation():
            flash_attn_func(given, k, v, causal=True, out=out, plan=plan)
        graph = stream.end_capture()
        for x, expected in zip((q, q2), want, strict=True):
            given[...] = x
            flash_attn_func(x, k, v, causal=True)
            graph.launch()
            assert same(out, expected)
        stream.synchronize()


def test_a_graph_replays_with_other_lengths(cupy: Any, case: Data) -> None:
    q, k, v = (x[0] for x in case.inputs)
    table_q, table_k = cupy.array([0, 70, 70], np.int32), cupy.array([0, 130, 130], np.int32)
    out = cupy.empty_like(q)
    arguments = (q, k, v, table_q, table_k)
    plan = prepare(flash_attn_varlen_func, *arguments, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        flash_attn_varlen_func(*arguments, out=out, plan=plan)
        graph = stream.end_capture()
        for first_q, first_k in ((70, 130), (13, 99), (0, 0)):
            table_q[1], table_k[1] = first_q, first_k
            graph.launch()
            want = flash_attn_varlen_func(*arguments)
            assert same(out, want)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("layout", ["dense", "packed", "padded", "packed_used"])
def test_few_queries_and_many_keys(cupy: Any, layout: str, head_dim: int) -> None:
    """Which Hopper cuts over keys, in sequences of other lengths too."""
    lengths = {"q_lens": (130, 5, 0), "k_lens": (6000, 300, 9)}
    if layout == "dense":
        lengths = {"q_lens": (130,), "k_lens": (6000,)}
    for causal in (False, True):
        case = Case(
            **lengths,
            layout=layout,
            q_heads=4,
            kv_heads=2,
            head_dim=head_dim,
            value_dim=head_dim,
            causal=causal,
            sink=True,
        )
        law_matches_reference(public_op("cupy"), case)


def test_a_graph_replays_with_other_lengths_of_many_keys(cupy: Any) -> None:
    """Each length is cut in as many pieces as there is room for."""
    rng = np.random.default_rng(0)
    q, k, v = (
        cupy.asarray(rng.standard_normal((rows, 3, 128), np.float32).astype(np.float16))
        for rows in (140, 7000, 7000)
    )
    table_q, table_k = cupy.array([0, 130, 140], np.int32), cupy.array([0, 6000, 7000], np.int32)
    out, arguments = cupy.empty_like(q), (q, k, v, table_q, table_k)
    bounds = {"max_seqlen_q": 140, "max_seqlen_k": 7000, "causal": True}
    plan = prepare(flash_attn_varlen_func, *arguments, **bounds, out=out)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        flash_attn_varlen_func(*arguments, **bounds, out=out, plan=plan)
        graph = stream.end_capture()
        for first_q, first_k in ((130, 6000), (13, 40), (140, 7000), (0, 0), (70, 1000)):
            table_q[1], table_k[1] = first_q, first_k
            graph.launch()
            want = flash_attn_varlen_func(*arguments, **bounds, backend="fwd_sm80")
            stream.synchronize()
            difference = cupy.abs(out.astype(np.float32) - want.astype(np.float32)).max()
            assert difference < 2e-3, (first_q, first_k)


# ---- bad input ----


@pytest.fixture
def checking(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("RAWATTN_CHECK", "1")
    forward.Settings.read.cache_clear()
    yield
    monkeypatch.undo()
    forward.Settings.read.cache_clear()


@pytest.mark.usefixtures("checking")
def test_lengths_on_the_gpu_are_checked(cupy: Any, case: Data) -> None:
    q, k, v = (x[0] for x in case.inputs)
    table_q, table_k = cupy.array([0, 70], np.int32), cupy.array([0, 131], np.int32)
    with pytest.raises(ValueError, match=r"cu_seqlens_k\[1\] is 131: accepted are 0 to 130"):
        flash_attn_varlen_func(q, k, v, table_q, table_k)


def test_mixed_arrays_are_refused(cupy: Any, case: Data) -> None:
    q, k, v = case.inputs
    with pytest.raises(TypeError, match="q is a CUDA array, k is a NumPy array"):
        flash_attn_func(q, k.get(), v)
    with pytest.raises(TypeError, match="out has dtype float32"):
        flash_attn_func(q, k, v, out=cupy.empty(q.shape, np.float32))
    tables = cupy.array([0, 70]), cupy.array([0, 130])
    with pytest.raises(TypeError, match="cu_seqlens_q has dtype int64: accepted is int32"):
        flash_attn_varlen_func(q[0], k[0], v[0], *tables)


def test_what_no_backend_takes(cupy: Any) -> None:
    q = cupy.zeros((1, 4, 2, 64), np.float32)
    with pytest.raises(rawattn.Unsupported, match=r"fwd_sm80: dtype float32.*takes NumPy arrays"):
        flash_attn_func(q, q, q)


def test_the_compiler_of_this_machine_spills_nothing() -> None:
    """The ledger says so of one NVRTC; others, and even the same one elsewhere, have differed."""
    arch = Device.current().arch
    rows = [ledger.compiled(kernel, config, arch) for kernel, config in all_configs(arch)]
    assert not [row for row in rows if row.spills or row.warnings]
