# SPDX-License-Identifier: Apache-2.0
"""What reaches the driver, on a GPU of stubs: addresses that nobody reads, and a launch that is
only written down."""

from __future__ import annotations

import ctypes
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from rawattn import arrays, forward, launch, registry
from rawattn.arrays import View, contiguous
from rawattn.dense import flash_attn_func, flash_attn_varlen_func
from rawattn.device import Device
from rawattn.prepared import prepare
from rawattn.problem import Unsupported
from rawattn.request import Arrays

cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")


def log2e(x: float) -> float:
    """What Params hold of a number in natural units."""
    return float(np.float32(x * np.log2(np.e)))


FwdParams = registry.params_struct("FwdParams")


def at(address: int, *shape: int, dtype: Any = np.float16, strides: Any = None) -> Any:
    """A CuPy array that is not there; strides in elements."""
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, 0)
    size = np.dtype(dtype).itemsize
    strides = strides and tuple(size * s for s in strides)
    return cupy.ndarray(shape, np.dtype(dtype), cupy.cuda.MemoryPointer(memory, 0), strides=strides)


Q, K, V, OUT, LSE = (n << 20 for n in range(1, 6))
INPUTS = at(Q, 2, 5, 4, 16), at(K, 2, 7, 2, 16), at(V, 2, 7, 2, 32)


@dataclass
class Gpu:
    """What the driver was asked."""

    launches: list[Any] = field(default_factory=list)
    stream: int = 7
    device: int = 0
    answers: list[int] = field(default_factory=list)

    def launch(self, config: Any, function: Any, arguments: int, extra: int) -> tuple[int]:
        address = ctypes.c_void_p.from_address(arguments).value
        params = FwdParams.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(FwdParams)))
        self.launches.append(
            types.SimpleNamespace(
                config=config, function=function, params=params, device=self.device
            )
        )
        return (self.answers.pop(0) if self.answers else 0,)

    @property
    def params(self) -> Any:
        """Of the one launch there was."""
        (only,) = self.launches
        return only.params


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    gpu = Gpu()
    current = launch.Gpu(
        gpu.launch, lambda: gpu.device, lambda device: types.SimpleNamespace(ptr=gpu.stream)
    )
    monkeypatch.setattr(launch, "_gpu", lambda: current)
    monkeypatch.setattr(launch, "load", lambda kernel, *_: launch.Function(kernel, None))
    codec = launch.Codec(lambda described: bytes(launch.MAP_BYTES), lambda at, address: 0)
    monkeypatch.setattr(launch, "codec", lambda: codec)
    counters = types.SimpleNamespace(reserve=lambda count: None, address=lambda owner, count: 0)
    monkeypatch.setattr(launch, "counters", lambda device: counters)
    monkeypatch.setattr(launch, "import_cupy", lambda: cupy)
    monkeypatch.setattr(Device, "current", lambda number: Device.named("H200"))
    monkeypatch.setattr(forward, "empty", lambda spec: View(at(OUT, *spec.shape), OUT, spec))
    forget = forward.resolve.cache_clear
    forget()
    yield gpu
    forget()


def strides(params: Any, name: str) -> list[int]:
    axes = ("batch", "head") if name == "lse" else ("batch", "row", "head")
    return [getattr(params, f"stride_{name}_{axis}") for axis in axes]


def pointers(params: Any) -> dict[str, int]:
    """The addresses that are given."""
    names = [name for name, kind, *_ in FwdParams._fields_ if kind is ctypes.c_void_p]
    return {name: getattr(params, name) for name in names if getattr(params, name)}


def test_dense(gpu: Gpu) -> None:
    out = flash_attn_func(*INPUTS, causal=True, window_size=(3, 9), softmax_scale=0.5)
    assert out.shape == (2, 5, 4, 32) and out.data.ptr == OUT
    p = gpu.params
    assert pointers(p) == {"q": Q, "k": K, "v": V, "out": OUT}
    assert strides(p, "q") == [320, 64, 16]
    assert strides(p, "k") == [224, 32, 16]
    assert strides(p, "v") == [448, 64, 32]
    assert strides(p, "out") == [640, 128, 32]
    assert (p.batch, p.q_heads, p.group, p.head_dim, p.value_dim) == (2, 4, 2, 16, 32)
    assert (p.q_len, p.k_len, p.window_left, p.window_right, p.top_left) == (5, 7, 3, 0, 0)
    assert (p.scale_log2, p.softcap_log2, p.m_blocks) == (log2e(0.5), 0.0, 1)
    (only,) = gpu.launches
    assert only.function == "fwd_sm90_self"
    assert (only.config.gridDimX, only.config.gridDimY, only.config.gridDimZ) == (8, 1, 1)
    assert int(only.config.hStream) == 7


def test_every_optional_array(gpu: Gpu) -> None:
    slopes, sink = at(8 << 20, 2, 4, dtype=np.float32), at(9 << 20, 4, dtype=np.float32)
    options = {"alibi_slopes": slopes, "sink": sink, "softcap": 3.0, "causal": "top_left"}
    out, lse = flash_attn_func(*INPUTS, **options, return_lse=True, lse=at(LSE, 2, 4, 5, dtype="f"))
    assert out.data.ptr == OUT and lse.data.ptr == LSE
    p = gpu.params
    assert pointers(p) == {
        "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE, "alibi_slopes": 8 << 20, "sink": 9 << 20,
    }  # fmt: skip
    assert strides(p, "lse") == [20, 5] and p.stride_alibi_batch == 4
    assert (p.softcap_log2, p.scale_log2) == (log2e(3.0), log2e(0.25))
    assert (p.top_left, p.window_right) == (1, 0)


def test_outputs_lie_apart(gpu: Gpu) -> None:
    q, k, v = INPUTS
    plan = prepare(flash_attn_func, q, k, v, out=at(OUT, 2, 5, 4, 32))
    for address in (Q, Q + 1278, Q - 2558):  # q has 1280 bytes, out 2560
        out = at(address, 2, 5, 4, 32)
        for prepared in (None, plan) if address == Q else (None,):
            with pytest.raises(ValueError, match=r"^out shares memory with q: accepted is"):
                flash_attn_func(q, k, v, out=out, plan=prepared)
    assert gpu.launches == []
    for address in (Q + 1280, Q - 2560):
        flash_attn_func(q, k, v, out=at(address, 2, 5, 4, 32))
    slots = [at(Q + 32 * n, 2, 5, 4, 16, strides=(1280, 256, 64, 1)) for n in range(4)]
    flash_attn_func(*slots[:3], out=slots[3])


def test_outputs_that_are_not_given() -> None:
    out, lse = flash_attn_func(*INPUTS, return_lse=True)
    assert (out.shape, lse.shape) == ((2, 5, 4, 32), (2, 4, 5))


def test_slopes_that_the_batch_shares(gpu: Gpu) -> None:
    flash_attn_func(*INPUTS, alibi_slopes=at(8 << 20, 4, dtype="f"))
    assert gpu.params.stride_alibi_batch == 0


def test_packed(gpu: Gpu) -> None:
    q, k = at(Q, 50, 4, 16, strides=(128, 32, 1)), at(K, 70, 2, 16)
    tables = at(6 << 20, 4, dtype=np.int32), at(7 << 20, 4, dtype=np.int32)
    used = at(8 << 20, 3, dtype=np.int32)
    lse = at(LSE, 4, 50, dtype="f", strides=(99, 1))
    flash_attn_varlen_func(q, k, k, *tables, seqused_k=used, max_seqlen_q=20, lse=lse)
    p = gpu.params
    assert (p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k) == (6 << 20, 7 << 20, 8 << 20)
    assert strides(p, "q") == [0, 128, 32] and strides(p, "k") == [0, 32, 16]
    assert strides(p, "lse") == [0, 99]
    assert (p.batch, p.q_len, p.k_len) == (3, 0, 0)


def test_padded_keys(gpu: Gpu) -> None:
    tables = {
        "cu_seqlens_q": at(6 << 20, 3, dtype=np.int32),
        "seqused_k": at(7 << 20, 2, dtype="i"),
    }
    flash_attn_varlen_func(at(Q, 50, 4, 16), *INPUTS[1:], **tables)
    p = gpu.params
    assert (p.cu_seqlens_q, p.cu_seqlens_k, p.seqused_k) == (6 << 20, None, 7 << 20)
    assert strides(p, "k") == [224, 32, 16] and (p.q_len, p.k_len) == (0, 7)


def test_longest_query_bounds_the_grid(gpu: Gpu) -> None:
    q, k = at(Q, 1000, 4, 16), at(K, 70, 4, 16)
    tables = at(6 << 20, 4, dtype=np.int32), at(7 << 20, 4, dtype=np.int32)
    for bound, blocks in ((None, 8), (2000, 8), (128, 1), (129, 2)):
        flash_attn_varlen_func(q, k, k, *tables, max_seqlen_q=bound, backend="fwd_sm80")
        assert gpu.launches[-1].params.m_blocks == blocks


@pytest.mark.parametrize(
    ("address", "q_strides", "head_dim", "width"),
    [
        (Q, (320, 64, 16, 1), 16, 16),
        (Q + 4, (320, 64, 16, 1), 16, 4),
        (Q + 2, (320, 64, 16, 1), 16, 2),
        (Q, (320, 66, 16, 1), 16, 4),
        (Q, (321, 64, 16, 1), 16, 2),
        (Q, (0, 64, 16, 1), 16, 16),
        (Q, (320, 64, 18, 1), 18, 4),
        (Q, (320, 64, 16, 1), 15, 2),
    ],
)
def test_copies_are_as_wide_as_all_rows_allow(
    address: int, q_strides: tuple[int, ...], head_dim: int, width: int
) -> None:
    q = at(address, 2, 5, 4, head_dim, strides=q_strides)
    k = at(K, 2, 7, 2, head_dim, strides=(512, 64, 32, 1))
    plan = prepare(flash_attn_func, q, k, INPUTS[2], backend="fwd_sm80")
    assert plan.plan.problem.copy_bytes == width
    assert plan.plan.launches[0].config.narrow == (width < 16)  # type: ignore[attr-defined]


def test_rows_of_a_new_output_are_as_wide_as_values() -> None:
    k, v = at(K, 2, 0, 2, 16), at(V, 2, 0, 2, 15)
    assert prepare(flash_attn_func, INPUTS[0], k, v).plan.problem.copy_bytes == 2


@pytest.mark.parametrize(
    ("name", "strides", "padded", "tma"),
    [
        ("k", (224, 32, 16, 1), False, True),
        ("k", (0, 32, 16, 1), False, True),  # the batch shares its keys
        ("k", (228, 32, 16, 1), False, False),
        ("k", (224, 0, 16, 1), True, True),
        ("k", (232, 32, 16, 1), True, True),
        ("v", (232, 32, 16, 1), False, True),
        ("v", (256, 32, 16, 1), True, True),
        ("v", (224, 0, 16, 1), True, False),  # sequences are no rows apart
        ("v", (232, 32, 16, 1), True, False),  # nor here
        ("v", (32 << 29, 32, 16, 1), True, True),
        ("v", (64 << 29, 32, 16, 1), True, False),  # more rows than a ragged map has
        ("v", (64 << 29, 32, 16, 1), False, True),
    ],
)
def test_what_tensor_maps_can_describe(name: str, strides: Any, padded: bool, tma: bool) -> None:
    """Where sequences end before their rows do, values are those of one array, rows after rows."""
    q = at(Q, 2, 5, 4, 16)
    given = {"k": at(K, 2, 7, 2, 16), "v": at(V, 2, 7, 2, 16)}
    given[name] = at({"k": K, "v": V}[name], 2, 7, 2, 16, strides=strides)
    if not padded:
        assert prepare(flash_attn_func, q, **given).plan.problem.tma == tma
        return
    tables = {"cu_seqlens_q": at(6 << 20, 3, dtype="i"), "seqused_k": at(7 << 20, 2, dtype="i")}
    prepared = prepare(flash_attn_varlen_func, at(Q, 50, 4, 16), **given, **tables)
    assert prepared.plan.problem.tma == tma


def test_axes_of_one_element_have_any_stride() -> None:
    q = at(Q, 1, 1, 4, 16, strides=(3, 5, 16, 1))
    k = at(K, 1, 7, 1, 16, strides=(7, 16, 9, 1))
    assert prepare(flash_attn_func, q, k, k).plan.problem.copy_bytes == 16


@pytest.mark.parametrize(
    ("q", "k", "launches"),
    [
        ((0, 5, 4, 16), (0, 7, 2, 16), 0),
        ((2, 0, 4, 16), (2, 7, 2, 16), 0),
        ((2, 5, 0, 16), (2, 7, 2, 16), 0),
        ((2, 5, 0, 16), (2, 7, 0, 16), 0),
        ((2, 5, 4, 16), (2, 0, 2, 16), 1),  # rows without keys are written
    ],
)
def test_nothing_to_write_launches_nothing(
    gpu: Gpu, q: tuple[int, ...], k: tuple[int, ...], launches: int
) -> None:
    assert flash_attn_func(at(Q, *q), at(K, *k), at(V, *k)).shape == q
    assert len(gpu.launches) == launches


def test_a_grid_that_is_too_large() -> None:
    q, k = at(Q, 70_000, 64, 32, 16), at(K, 70_000, 64, 32, 16)
    assert prepare(flash_attn_func, q, k, k).plan.launches[0].grid == 70_000 * 32
    q, starts = at(Q, 2**30, 64, 16), at(6 << 20, 5, dtype=np.int32)
    with pytest.raises(Unsupported, match=r"a grid of 2147483648 blocks: .*max_seqlen_q= may help"):
        flash_attn_varlen_func(q, q, q, starts, starts)


# ---- plans ----


def test_the_prepared_call_only_launches(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    out, lse = at(OUT, 2, 5, 4, 32), at(LSE, 2, 4, 5, dtype="f")
    call = {"causal": True, "out": out, "lse": lse, "return_lse": True}
    plan = prepare(flash_attn_func, *INPUTS, **call)
    assert gpu.launches == [], "preparing does not launch"
    for name in ("view", "resolve", "empty"):
        monkeypatch.setattr(forward, name, None)
    monkeypatch.setattr(launch.Template, "pack", None)
    for stream in (7, 8):
        gpu.stream = stream
        answer = flash_attn_func(*INPUTS, **call, plan=plan)
        assert answer[0] is out and answer[1] is lse
        assert int(gpu.launches[-1].config.hStream) == stream
        assert pointers(gpu.launches[-1].params) == {
            "q": Q, "k": K, "v": V, "out": OUT, "lse": LSE,
        }  # fmt: skip


def test_options_that_differ_are_refused(gpu: Gpu) -> None:
    call = {"causal": True, "out": at(OUT, 2, 5, 4, 32)}
    plan = prepare(flash_attn_func, *INPUTS, **call)
    for changes, name in (({"causal": False}, "causal"), ({"softcap": 1.0}, "softcap")):
        with pytest.raises(ValueError, match=f"^{name}: the plan was prepared for"):
            flash_attn_func(*INPUTS, **{**call, **changes}, plan=plan)
    assert gpu.launches == []


def test_a_plan_on_other_arrays(gpu: Gpu) -> None:
    q, k, v = INPUTS
    plan = prepare(flash_attn_func, q, k, v, out=at(OUT, 2, 5, 4, 32))
    other, out = at(Q + 4096, 2, 5, 4, 16), at(OUT + 4096, 2, 5, 4, 32)
    assert flash_attn_func(other, k, v, out=out, plan=plan) is out
    assert pointers(gpu.params) == {"q": Q + 4096, "k": K, "v": V, "out": OUT + 4096}
    with pytest.raises(ValueError, match="q: the plan was prepared for"):
        flash_attn_func(at(Q + 8, 2, 5, 4, 16), k, v, out=out, plan=plan)


def test_a_plan_without_outputs_makes_new_ones(gpu: Gpu) -> None:
    plan = prepare(flash_attn_func, *INPUTS)
    first, second = (flash_attn_func(*INPUTS, plan=plan) for _ in range(2))
    assert first is not second and len(gpu.launches) == 2


def test_a_prepared_call_is_checked_where_all_are(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    starts = [0, 50]
    checking = forward.Settings(backend=None, check=True)
    monkeypatch.setattr(forward.Settings, "read", lambda: checking)
    monkeypatch.setattr(forward, "to_host", lambda table: np.array(starts))
    q, table = at(Q, 50, 4, 16), at(6 << 20, 2, dtype=np.int32)
    out = at(OUT, 50, 4, 16)
    plan = prepare(flash_attn_varlen_func, q, q, q, table, table, out=out)
    starts[1] = 51
    with pytest.raises(ValueError, match=r"cu_seqlens_q\[1\] is 51"):
        flash_attn_varlen_func(q, q, q, table, table, out=out, plan=plan)
    assert gpu.launches == []


# ---- launches ----


def test_a_thread_without_a_context(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made_current: list[int] = []
    runtime = types.SimpleNamespace(setDevice=made_current.append)
    stub = types.SimpleNamespace(cuda=types.SimpleNamespace(runtime=runtime))
    monkeypatch.setattr(launch, "import_cupy", lambda: stub)
    gpu.answers = [launch.INVALID_CONTEXT, 0]
    flash_attn_func(*INPUTS)
    assert made_current == [0] and len(gpu.launches) == 2


def test_a_launch_that_fails(gpu: Gpu) -> None:
    gpu.answers = [1]
    with pytest.raises(RuntimeError, match=r"a launch of Shape\(grid=8, .*\) on device 0: 1"):
        flash_attn_func(*INPUTS)


def test_another_device_is_current(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    class Use:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            gpu.device = self.device

        def __exit__(self, *args: object) -> None:
            gpu.device = 1

    gpu.device = 1
    monkeypatch.setattr(launch, "on_device", Use)
    flash_attn_func(*INPUTS)
    assert [launched.device for launched in gpu.launches] == [0] and gpu.device == 1


@pytest.mark.parametrize("stream", ["default", 1.0, True, object()])
def test_kinds_of_streams(stream: Any) -> None:
    with pytest.raises(TypeError, match=r"stream=.*: accepted are CuPy streams"):
        flash_attn_func(*INPUTS, stream=stream)


def test_params_begin_with_the_arrays_of_a_call() -> None:
    first = FwdParams._fields_[: len(Arrays._fields)]
    assert first == [(name, ctypes.c_void_p) for name in Arrays._fields]


def test_params_are_filled_completely() -> None:
    plan = prepare(flash_attn_func, *INPUTS).plan
    with pytest.raises(AssertionError, match=r"FwdSm90Params: .*scale"):
        launch.Template(plan, 0, {"batch": 2}, dict.fromkeys(Arrays._fields))


def test_new_outputs_are_described_as_they_are() -> None:
    assert contiguous((2, 5, 4, 32), "float16", 0) == arrays.view("out", at(OUT, 2, 5, 4, 32)).spec
