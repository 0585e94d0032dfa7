# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call is said before anything runs: argument, value, what is accepted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rawattn
from rawattn import forward, host
from rawattn.device import Device
from rawattn.plan import BACKENDS
from tests.refusals import F16, F32, TYPE, VALUE, Bad, name_of, refuses, zeros

SWAPPED = np.dtype(F32).newbyteorder()


def dense(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call, with changes."""
    q, k = np.zeros((2, 5, 4, 16), F32), np.zeros((2, 7, 2, 16), F32)
    return {"q": q, "k": k, "v": k, **changes}


def varlen(**changes: Any) -> dict[str, Any]:
    q, k, starts = np.zeros((5, 4, 16), F32), np.zeros((7, 2, 16), F32), np.int32([0, 2, 5])
    tables = {"cu_seqlens_q": starts, "cu_seqlens_k": np.int32([0, 3, 7])}
    return {"q": q, "k": k, "v": k, **tables, **changes}


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call that is refused has run")

    monkeypatch.setattr(host, "run", run)


def overlapping(*shape: int) -> np.ndarray:
    return np.lib.stride_tricks.as_strided(zeros(999), shape, (256, 256, 64, 4))


def read_only(*shape: int) -> np.ndarray:
    x = zeros(*shape)
    x.flags.writeable = False
    return x


SIGNED = "accepted are 0 and numbers of either sign from 1e-18 to 1e+18"
BAD_DENSE: Bad = [
    # kinds and dtypes
    ({"q": np.ma.zeros((2, 5, 4, 16), F32)}, TYPE, "q is a masked array: accepted are arrays"),
    ({"out": np.ma.zeros((2, 5, 4, 16), F32)}, TYPE, "out is a masked array: accepted are arrays"),
    ({"k": zeros(2, 7, 2, 16, dtype=SWAPPED)}, TYPE, "k has dtype >f4: accepted is this machine's"),
    ({"sink": zeros(4, dtype=SWAPPED)}, TYPE, "sink has dtype >f4: accepted is this machine's"),
    ({"dtype": "int32"}, TYPE, "dtype='int32': accepted are float16, bfloat16, float32"),
    ({"q": [[1.0]]}, TYPE, "q is a builtins.list: accepted are arrays of CuPy or NumPy"),
    ({"k": None}, TYPE, "k is a builtins.NoneType: accepted"),
    ({"q": zeros(2, 5, 4, 16, dtype=float)}, TYPE, "q has dtype float64: accepted are float16"),
    ({"q": zeros(2, 5, 4, 16, dtype=np.int32)}, TYPE, "q has dtype int32: accepted"),
    ({"k": zeros(2, 7, 2, 16, dtype=F16)}, TYPE, "k has dtype float16: accepted is float32"),
    ({"v": zeros(2, 7, 2, 16, dtype=F16)}, TYPE, "v has dtype float16: accepted is float32"),
    ({"dtype": "float64"}, TYPE, "dtype='float64': accepted are float16, bfloat16, float32"),
    ({"dtype": "bfloat16"}, TYPE, "q has dtype float32: with dtype='bfloat16' accepted are"),
    # shapes
    ({"q": zeros(5, 4, 16)}, VALUE, "q has shape (5, 4, 16): accepted is (batch, q_len, q_heads,"),
    ({"k": zeros(7, 2, 16)}, VALUE, "k has shape (7, 2, 16): accepted is (2, k_len, kv_heads, 16)"),
    ({"k": zeros(3, 7, 2, 16)}, VALUE, "k has shape (3, 7, 2, 16): accepted is (2, k_len,"),
    ({"k": zeros(2, 7, 2, 24)}, VALUE, "k has shape (2, 7, 2, 24): accepted is (2, k_len,"),
    ({"v": zeros(2, 8, 2, 16)}, VALUE, "v has shape (2, 8, 2, 16): accepted is (2, 7, 2,"),
    ({"v": zeros(2, 7, 1, 16)}, VALUE, "v has shape (2, 7, 1, 16): accepted is (2, 7, 2,"),
    ({"q": zeros(2, 5, 3, 16)}, VALUE, "q has 3 heads, k and v have 2: accepted are multiples"),
    ({"k": zeros(2, 7, 0, 16), "v": zeros(2, 7, 0, 16)}, VALUE, "k and v have 0: accepted are"),
    ({"v": zeros(2, 7, 2, 0)}, VALUE, "head sizes are 16 (q, k) and 0 (v): accepted are sizes"),
    # layouts
    ({"q": zeros(2, 5, 4, 32)[..., ::2]}, VALUE, "q of shape (2, 5, 4, 16) has strides (2560,"),
    ({"k": zeros(2, 7, 2, 16)[:, ::-1]}, VALUE, "bytes: accepted are strides from 0"),
    ({"v": zeros(2, 2, 16, 7).transpose(0, 3, 1, 2)}, VALUE, "v of shape (2, 7, 2, 16)"),
    # numbers
    ({"softmax_scale": float("nan")}, VALUE, f"softmax_scale=nan: {SIGNED}"),
    ({"softmax_scale": np.float32("inf")}, VALUE, f"softmax_scale=inf: {SIGNED}"),
    ({"softmax_scale": 1e-46}, VALUE, f"softmax_scale=1e-46: {SIGNED}"),
    ({"softmax_scale": -3e38}, VALUE, f"softmax_scale=-3e+38: {SIGNED}"),
    ({"softmax_scale": 10**400}, VALUE, f"softmax_scale=inf: {SIGNED}"),
    ({"softmax_scale": "0.5"}, TYPE, "softmax_scale='0.5': accepted is a number, found str"),
    ({"softmax_scale": True}, TYPE, "softmax_scale=True: accepted is a number, found bool"),
    ({"softmax_scale": np.zeros(2)}, TYPE, "softmax_scale=array([0., 0.]): accepted is a number"),
    ({"softcap": -1.0}, VALUE, "softcap=-1.0: accepted are 0 and numbers from 1e-18 to 1e+18"),
    ({"softcap": float("nan")}, VALUE, "softcap=nan: accepted are 0 and numbers from"),
    ({"softcap": 1e-39}, VALUE, "softcap=1e-39: accepted are 0 and numbers from"),
    ({"softcap": None}, TYPE, "softcap=None: accepted is a number, found NoneType"),
    ({"causal": "middle"}, VALUE, "causal='middle': accepted are False, True, 'bottom_right' and"),
    ({"causal": 2}, TYPE, "causal=2: accepted are"),
    ({"causal": None}, TYPE, "causal=None: accepted are"),
    ({"causal": []}, TYPE, "causal=[]: accepted are"),
    ({"window_size": (-2, 0)}, VALUE, "window_size=(-2, 0): accepted are -1 (unbounded) and"),
    ({"window_size": [3, -5]}, VALUE, "window_size=(3, -5): accepted are -1"),
    ({"window_size": (1, 2, 3)}, VALUE, "window_size=(1, 2, 3): accepted is a pair"),
    ({"window_size": 4}, TYPE, "window_size=4: accepted is a pair"),
    ({"window_size": None}, TYPE, "window_size=None: accepted is a pair"),
    ({"window_size": "12"}, TYPE, "window_size='12': accepted is a pair of integers"),
    ({"window_size": (1.0, 2)}, TYPE, "window_size=(1.0, 2): accepted is a pair of integers"),
    ({"window_size": (True, 2)}, TYPE, "window_size=(True, 2): accepted is a pair of integers"),
    ({"window_size": (-(10**30), 2)}, VALUE, "00, 2): accepted are -1 (unbounded) and"),
    ({"return_lse": 1}, TYPE, "return_lse=1: accepted are False and True"),
    ({"return_lse": None}, TYPE, "return_lse=None: accepted are False and True"),
    # more arrays
    ({"sink": zeros(2)}, VALUE, "sink has shape (2,): accepted is (4,)"),
    ({"sink": zeros(4, dtype=np.float64)}, TYPE, "sink has dtype float64: accepted is float32"),
    ({"alibi_slopes": zeros(2)}, VALUE, "alibi_slopes has shape (2,): accepted is (4,)"),
    ({"alibi_slopes": zeros(3, 4)}, VALUE, "alibi_slopes has shape (3, 4): accepted is (2, 4)"),
    ({"alibi_slopes": zeros(4, dtype=F16)}, TYPE, "alibi_slopes has dtype float16: accepted is"),
    ({"alibi_slopes": 0.5}, TYPE, "alibi_slopes is a builtins.float: accepted are arrays"),
    ({"out": zeros(2, 5, 2, 16)}, VALUE, "out has shape (2, 5, 2, 16): accepted is (2, 5, 4, 16)"),
    ({"out": zeros(2, 5, 4, 16, dtype=F16)}, TYPE, "out has dtype float16: accepted is float32"),
    ({"out": np.broadcast_to(zeros(1, 5, 4, 16), (2, 5, 4, 16)).view()}, VALUE, "out is read-only"),
    ({"out": overlapping(2, 5, 4, 16)}, VALUE, "accepted is an output that does not overlap"),
    ({"lse": zeros(2, 5, 4)}, VALUE, "lse has shape (2, 5, 4): accepted is (2, 4, 5)"),
    ({"lse": zeros(2, 4, 5, dtype=np.float64)}, TYPE, "lse has dtype float64: accepted is float32"),
    ({"lse": read_only(2, 4, 5)}, VALUE, "lse is read-only: accepted is an array that can be"),
    # the rest
    ({"backend": "fast"}, VALUE, "backend='fast': accepted are "),
    ({"backend": ""}, VALUE, "backend='': accepted are "),
    ({"backend": 1}, TYPE, "backend=1: accepted are None and the name of a backend"),
    ({"backend": "fwd_sm80"}, rawattn.Unsupported, "fwd_sm80: needs CUDA arrays, found NumPy"),
    ({"backend": "fwd_sm80"}, rawattn.Unsupported, "for float32, batch 2, heads 4 over 2, head"),
    ({"stream": 0}, VALUE, "stream=0: with NumPy arrays accepted is None"),
    ({"stream": "x"}, TYPE, "stream='x': with NumPy arrays accepted is None"),
    ({"plan": "fast"}, TYPE, "plan='fast': accepted is what rawattn.prepare returns"),
]

BAD_VARLEN: Bad = [
    ({"cu_seqlens_q": None}, TYPE, "cu_seqlens_q is None: accepted is an int32 array"),
    ({"cu_seqlens_q": [0, 2, 5]}, TYPE, "cu_seqlens_q is a builtins.list: accepted are arrays"),
    ({"cu_seqlens_q": np.int64([0, 2, 5])}, TYPE, "cu_seqlens_q has dtype int64: accepted is"),
    ({"cu_seqlens_k": np.int64([0, 2, 5])}, TYPE, "cu_seqlens_k has dtype int64: accepted is"),
    ({"seqused_k": np.int64([0, 2])}, TYPE, "seqused_k has dtype int64: accepted is int32"),
    ({"cu_seqlens_q": np.int32([[0, 2, 5]])}, VALUE, "cu_seqlens_q has shape (1, 3): accepted is"),
    ({"cu_seqlens_q": np.int32([])}, VALUE, "cu_seqlens_q has shape (0,): accepted is (batch +"),
    ({"cu_seqlens_q": np.int32([0, 1, 2, 3, 4])[::2]}, VALUE, "cu_seqlens_q of shape (3,) has"),
    ({"cu_seqlens_k": np.int32([0, 7])}, VALUE, "cu_seqlens_k has shape (2,): accepted is (3,)"),
    ({"cu_seqlens_k": None}, VALUE, "k has shape (7, 2, 16) and cu_seqlens_k is None: accepted"),
    ({"k": zeros(2, 7, 2, 16)}, VALUE, "k has shape (2, 7, 2, 16): accepted is (total_k,"),
    ({"seqused_k": np.int32([0, 2, 3])}, VALUE, "seqused_k has shape (3,): accepted is (2,)"),
    ({"q": zeros(1, 5, 4, 16)}, VALUE, "q has shape (1, 5, 4, 16): accepted is (total_q,"),
    ({"max_seqlen_q": -1}, VALUE, "max_seqlen_q=-1: accepted are integers from 0"),
    ({"max_seqlen_k": 2.0}, TYPE, "max_seqlen_k=2.0: accepted is an integer, found float"),
    ({"max_seqlen_q": 3.0}, TYPE, "max_seqlen_q=3.0: accepted is an integer, found float"),
    ({"max_seqlen_q": np.int32([3])}, TYPE, "max_seqlen_q=array([3], dtype=int32): accepted is"),
    ({"lse": zeros(5, 4)}, VALUE, "lse has shape (5, 4): accepted is (4, 5)"),
    ({"alibi_slopes": zeros(1, 4)}, VALUE, "alibi_slopes has shape (1, 4): accepted is (2, 4)"),
]


@pytest.mark.parametrize(("changes", "error", "message"), BAD_DENSE, ids=name_of)
def test_dense(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_func, dense(**changes), error, message)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_VARLEN, ids=name_of)
def test_varlen(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_varlen_func, varlen(**changes), error, message)


def test_good_calls_run() -> None:
    for function, call in (
        (rawattn.flash_attn_func, dense()),
        (rawattn.flash_attn_varlen_func, varlen()),
    ):
        with pytest.raises(AssertionError, match="has run"):
            function(**call)


@pytest.mark.parametrize(
    ("good", "bad"),
    [
        ({"causal": True}, {"causal": 1}),
        ({"causal": True}, {"causal": 1.0}),
        ({"causal": np.True_}, {"causal": np.int64(1)}),
        ({"window_size": (1, 0)}, {"window_size": (1.0, False)}),
        ({"return_lse": False}, {"return_lse": 0}),
        ({"softmax_scale": 1.0}, {"softmax_scale": True}),
        ({"max_seqlen_q": 3}, {"max_seqlen_q": 3.0}),
    ],
    ids=str,
)
def test_equal_calls_before_do_not_matter(good: dict[str, Any], bad: dict[str, Any]) -> None:
    for _ in range(2):
        with pytest.raises(AssertionError, match="has run"):
            rawattn.flash_attn_varlen_func(**varlen(**good))
        (name,) = bad
        refuses(rawattn.flash_attn_varlen_func, varlen(**bad), TypeError, f"{name}={bad[name]!r}: ")


def slots() -> list[np.ndarray]:
    """Four arrays (2, 5, 4, 16), interleaved in memory."""
    memory = zeros(2, 5, 4, 4, 16)
    return [memory[:, :, n] for n in range(4)]


def test_outputs_lie_apart() -> None:
    call = dense()
    for changes, names in (
        ({"out": call["q"]}, "out shares memory with q"),
        ({"out": call["q"], "q": call["q"].copy(), "k": call["q"]}, "out shares memory with k"),
        ({"lse": call["q"].reshape(-1)[:40].reshape(2, 4, 5)}, "lse shares memory with q"),
        ({"out": (x := zeros(2, 5, 4, 16)), "lse": x[:, :4, 0, :5]}, "out shares memory with lse"),
    ):
        given = {**call, "v": call["k"], **changes}
        if "k" in changes:
            given |= {"k": changes["k"], "v": zeros(2, 5, 4, 16)}
        message = f"{names}: accepted is an output of its own"
        refuses(rawattn.flash_attn_func, given, ValueError, message)
    q, k, v, out = slots()
    with pytest.raises(AssertionError, match="has run"):
        rawattn.flash_attn_func(q, k, v, out=out)


@pytest.mark.parametrize("function", [np.sum, None, "flash_attn_func"])
def test_prepare_takes_our_functions(function: Any) -> None:
    message = "accepted are flash_attn_func, flash_attn_varlen_func, "
    refuses(rawattn.prepare, {"function": function, **dense()}, TypeError, message)


def test_prepare_makes_the_plan() -> None:
    call = {"function": rawattn.flash_attn_func, **dense(plan=None)}
    refuses(rawattn.prepare, call, TypeError, "plan=None: accepted is a call without plan=")


def test_arguments_are_keywords() -> None:
    call = dense()
    with pytest.raises(TypeError, match="takes 3 positional arguments"):
        rawattn.flash_attn_func(call["q"], call["k"], call["v"], 0.125)


# ---- CUDA arrays, at addresses that nobody reads ----


def on_gpu(cupy: Any, *shape: int, dtype: Any = np.float16, number: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(1 << 20, 1 << 20, None, number)
    return cupy.ndarray(shape, np.dtype(dtype), cupy.cuda.MemoryPointer(memory, 0))


def test_arrays_of_two_devices(cupy: Any) -> None:
    q, k = on_gpu(cupy, 2, 5, 4, 16), on_gpu(cupy, 2, 7, 2, 16, number=1)
    call = {"q": q, "k": k, "v": k}
    message = "q is on CUDA device 0, k on 1: accepted is one device"
    refuses(rawattn.flash_attn_func, call, ValueError, message)
    call = {"q": q, "k": q, "v": q, "out": on_gpu(cupy, 2, 5, 4, 16, number=2)}
    message = "q is on CUDA device 0, out on 2: accepted is one device"
    refuses(rawattn.flash_attn_func, call, ValueError, message)


def test_arrays_of_two_kinds(cupy: Any) -> None:
    q = on_gpu(cupy, 2, 5, 4, 16)
    call = {"q": q, "k": q, "v": zeros(2, 5, 4, 16, dtype=np.float16)}
    message = "q is a CUDA array, v is a NumPy array: accepted are arrays of one kind"
    refuses(rawattn.flash_attn_func, call, TypeError, message)
    call = dense(sink=on_gpu(cupy, 4, dtype=F32))
    message = "q is a NumPy array, sink is a CUDA array"
    refuses(rawattn.flash_attn_func, call, TypeError, message)


def test_no_backend_gives_all_reasons(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "current", lambda number: Device.named("H200"))
    forward.resolve.cache_clear()
    q = on_gpu(cupy, 1, 5, 4, 300)
    with pytest.raises(rawattn.Unsupported) as caught:
        rawattn.flash_attn_func(q, q, q)
    assert all(f"{backend.name}: " in str(caught.value) for backend in BACKENDS)
    assert "fwd_sm80: head_dim=300" in str(caught.value)


# ---- RAWATTN_CHECK and RAWATTN_BACKEND ----


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    forward.Settings.read.cache_clear()
    forward.resolve.cache_clear()
    yield monkeypatch
    forward.Settings.read.cache_clear()
    forward.resolve.cache_clear()


BAD_LENGTHS: list[tuple[dict[str, Any], str]] = [
    ({"cu_seqlens_q": np.int32([-1, 2, 5])}, "cu_seqlens_q[0] is -1: accepted are 0 to 5"),
    ({"cu_seqlens_q": np.int32([0, 3, 2])}, "cu_seqlens_q[2] is 2: accepted are 3 to 5"),
    ({"cu_seqlens_q": np.int32([0, 2, 6])}, "cu_seqlens_q[2] is 6: accepted are 2 to 5"),
    ({"cu_seqlens_k": np.int32([0, 8, 9])}, "cu_seqlens_k[1] is 8: accepted are 0 to 7"),
    ({"max_seqlen_q": 2}, "the rows that cu_seqlens_q gives sequence 1: found 3, accepted are 0"),
    ({"max_seqlen_k": 3}, "which max_seqlen_k bounds, of sequence 1: found 4, accepted are 0 to 3"),
    ({"seqused_k": np.int32([4, 1])}, "seqused_k of sequence 0: found 4, accepted are 0 to 3"),
    ({"seqused_k": np.int32([1, -1])}, "seqused_k of sequence 1: found -1, accepted are 0 to 4"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_LENGTHS, ids=name_of)
def test_lengths_are_checked(changes: dict[str, Any], message: str) -> None:
    refuses(rawattn.flash_attn_varlen_func, varlen(**changes), ValueError, message)


def test_good_lengths_pass() -> None:
    padded = zeros(2, 7, 2, 16)
    for changes in (
        {},
        {"max_seqlen_q": 3, "max_seqlen_k": 4},
        {"seqused_k": np.int32([3, 0]), "max_seqlen_k": 3},
        {"k": padded, "v": padded, "cu_seqlens_k": None, "seqused_k": np.int32([7, 0])},
        {"cu_seqlens_q": np.int32([1, 1, 4])},
    ):
        with pytest.raises(AssertionError, match="has run"):
            rawattn.flash_attn_varlen_func(**varlen(**changes))


def test_the_environment_names_a_backend(environment: pytest.MonkeyPatch) -> None:
    environment.setenv("RAWATTN_BACKEND", "fwd_sm80")
    message = "fwd_sm80: needs CUDA arrays"
    refuses(rawattn.flash_attn_func, dense(), rawattn.Unsupported, message)
    with pytest.raises(AssertionError, match="has run"):
        rawattn.flash_attn_func(**dense(backend="reference"))


# ---- plans ----


def test_a_plan_refuses_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    call = dense(causal=True, sink=zeros(4), window_size=(3, 0))
    plan = rawattn.prepare(rawattn.flash_attn_func, **call)
    monkeypatch.setattr(host, "run", lambda *args, **kwargs: None)
    half = zeros(2, 5, 4, 16, dtype=ml_dtypes.bfloat16)
    for changes, name in (
        ({"causal": False}, "causal"),
        ({"causal": "top_left"}, "causal"),
        (
            {"q": zeros(2, 6, 4, 16)},
            "q: the plan was prepared for float32 of shape (2, 5, 4, 16), ",
        ),
        ({"window_size": (4, 0)}, "window_size"),
        ({"softmax_scale": 0.5}, "softmax_scale"),
        ({"softcap": 1.0}, "softcap"),
        ({"sink": None}, "sink"),
        ({"alibi_slopes": zeros(4)}, "alibi_slopes"),
        ({"return_lse": True}, "lse"),
        ({"backend": "reference"}, "backend"),
        ({"q": zeros(2, 6, 4, 16)}, "q"),
        ({"q": zeros(2, 5, 4, 32)[..., :16]}, "q"),
        ({"q": half, "k": half, "v": half}, "q"),
        ({"v": zeros(2, 7, 2, 8)}, "v"),
    ):
        message = name if ":" in name else f"{name}: the plan was prepared for "
        refuses(rawattn.flash_attn_func, {**call, **changes, "plan": plan}, ValueError, message)
    assert rawattn.flash_attn_func(**{**call, "window_size": [3, 0]}, plan=plan).shape == (
        2,
        5,
        4,
        16,
    )


def test_a_plan_of_the_other_function() -> None:
    plan = rawattn.prepare(rawattn.flash_attn_func, **dense())
    call = varlen(plan=plan)
    refuses(rawattn.flash_attn_varlen_func, call, ValueError, "q: the plan was prepared for ")
