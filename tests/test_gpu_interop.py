# SPDX-License-Identifier: Apache-2.0
"""Arrays of other libraries, streams, threads and devices give the bits that CuPy arrays give."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rawattn.dense import flash_attn_func
from rawattn.prepared import prepare
from tests.gpu import DTYPES, Data, Foreign, data, hold, same

pytestmark = pytest.mark.gpu


@pytest.fixture(params=DTYPES, ids=["fp16", "bf16"])
def case(cupy: Any, request: pytest.FixtureRequest) -> Data:
    return data(cupy, request.param)


# ---- arrays of others ----


def torch_arrays(inputs: tuple[Any, ...]) -> list[Any]:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch sees no GPU")
    return [torch.from_dlpack(x).clone() for x in inputs]


def jax_arrays(inputs: tuple[Any, ...]) -> list[Any]:
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    return [jax.device_put(x.get()) for x in inputs]


def numba_arrays(inputs: tuple[Any, ...]) -> list[Any]:
    cuda = pytest.importorskip("numba.cuda")
    if not cuda.is_available():
        pytest.skip("Numba sees no GPU")
    return [cuda.to_device(x.get().view(np.uint16)) for x in inputs]


@pytest.fixture(autouse=True)
def jax_leaves_memory_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@pytest.mark.parametrize("arrays_of", [torch_arrays, jax_arrays, numba_arrays])
def test_other_libraries(cupy: Any, case: Data, arrays_of: Callable[..., list[Any]]) -> None:
    inputs = arrays_of(case.inputs)
    dtype = case.q.dtype.name if arrays_of is numba_arrays else None
    out, lse = flash_attn_func(*inputs, causal=True, return_lse=True, dtype=dtype)
    assert isinstance(out, cupy.ndarray)
    assert same(out, case.out) and same(lse, case.lse)


@pytest.mark.parametrize("arrays_of", [torch_arrays, numba_arrays])
def test_outputs_of_other_libraries(
    cupy: Any, case: Data, arrays_of: Callable[..., list[Any]]
) -> None:
    *inputs, out = arrays_of((*case.inputs, cupy.zeros_like(case.out)))
    dtype = case.q.dtype.name if arrays_of is numba_arrays else None
    assert flash_attn_func(*inputs, causal=True, out=out, dtype=dtype) is out
    assert same(out, case.out)


def test_a_tensor_with_a_gradient_is_refused(case: Data) -> None:
    q, k, v = torch_arrays(case.inputs)
    with pytest.raises(TypeError, match="q "):
        flash_attn_func(q.requires_grad_(), k, v)


def test_work_of_torch_is_waited_for(cupy: Any, case: Data) -> None:
    q, k, v = torch_arrays(case.inputs)
    torch = importlib.import_module("torch")
    source, side = q.clone(), torch.cuda.Stream()
    q.zero_()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        q.copy_(source)
        out = flash_attn_func(q, k, v, causal=True, stream=cupy.cuda.Stream(non_blocking=True))
        assert not side.query(), "the host has not waited"
    torch.cuda.synchronize()
    assert same(out, case.out)


def test_streams_of_interfaces_are_waited_for(cupy: Any) -> None:
    case = data(cupy, np.float16)
    q, producer = cupy.zeros_like(case.q), cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with producer:
        hold(producer)
        q[...] = case.q
    with cupy.cuda.Stream(non_blocking=True):
        out = flash_attn_func(Foreign(q, producer), case.k, case.v, causal=True)
        assert not producer.done, "the host has not waited"
        assert same(out, case.out)


# ---- streams ----


class Handle:
    """A stream of another library."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.ptr


def by_handle(stream: Any) -> int:
    return stream.ptr


def as_it_is(stream: Any) -> Any:
    return stream


@pytest.mark.parametrize("kind", [as_it_is, Handle, by_handle])
def test_stream(cupy: Any, case: Data, kind: Callable[[Any], Any]) -> None:
    stream = cupy.cuda.Stream(non_blocking=True)
    before = cupy.cuda.get_current_stream()
    hold(stream)
    out = flash_attn_func(*case.inputs, causal=True, stream=kind(stream))
    assert not stream.done, "nothing has waited"
    assert cupy.cuda.get_current_stream() == before
    stream.synchronize()
    assert same(out, case.out)


def test_other_streams_are_refused(case: Data) -> None:
    for stream in ("default", 1.0, True):
        with pytest.raises(TypeError, match="stream="):
            flash_attn_func(*case.inputs, stream=stream)


def test_a_thread_that_has_not_used_the_gpu(cupy: Any, case: Data) -> None:
    out = cupy.empty_like(case.out)
    plan = prepare(flash_attn_func, *case.inputs, causal=True, out=out)
    answers: list[Any] = []

    def work() -> None:
        answers.append(flash_attn_func(*case.inputs, causal=True, out=out, plan=plan))
        answers.append(flash_attn_func(*case.inputs, causal=True))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert len(answers) == 2 and all(same(out, case.out) for out in answers)


def test_threads_on_streams_of_their_own(cupy: Any) -> None:
    cases = [data(cupy, np.float16, seed) for seed in range(4)]
    wrong: list[int] = []

    def work(seed: int) -> None:
        with cupy.cuda.Stream(non_blocking=True):
            for _ in range(50):
                if not same(flash_attn_func(*cases[seed].inputs, causal=True), cases[seed].out):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_second_gpu(cupy: Any, case: Data) -> None:
    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU here")
    with cupy.cuda.Device(1):
        inputs = [cupy.array(x) for x in case.inputs]
    out = flash_attn_func(*inputs, causal=True)
    assert out.device.id == 1 and cupy.cuda.runtime.getDevice() == 0
    assert same(out, case.out)
    with pytest.raises(ValueError, match="q is on CUDA device 0, k on 1"):
        flash_attn_func(case.q, *inputs[1:])
