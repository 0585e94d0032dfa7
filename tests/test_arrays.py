# SPDX-License-Identifier: Apache-2.0
"""Arrays of anyone become views, or errors that name the argument. CuPy arrays here point to memory
that is not there: nothing reads it."""

from __future__ import annotations

import ctypes
import re
import types
import weakref
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rawattn import arrays
from rawattn.arrays import DTYPES, Spec, check_layout, contiguous, view

BF16 = np.dtype(ml_dtypes.bfloat16)


class Producer:
    """Speaks DLPack for a NumPy array, and may lie about its device."""

    def __init__(self, x: np.ndarray, device: int = 1) -> None:
        self.x, self.device = x, device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **options: Any) -> Any:
        return self.x.__dlpack__(**options)


def test_dtypes() -> None:
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == {
        "float16": 2,
        "bfloat16": 2,
        "float32": 4,
        "float8_e4m3fn": 1,
        "float8_e5m2": 1,
        "int8": 1,
        "uint8": 1,
        "int32": 4,
        "int64": 8,
        "bool": 1,
    }
    assert arrays.dtype_name("dtype", ml_dtypes.bfloat16) == "bfloat16"
    assert arrays.dtype_name("dtype", "float16") == "float16"
    for wrong in ("float64", "int32", "f4,f4", object()):
        accepted = "accepted are float16, bfloat16, float32$"
        with pytest.raises(TypeError, match=rf"dtype={re.escape(repr(wrong))}: {accepted}"):
            arrays.dtype_name("dtype", wrong)


@pytest.mark.parametrize("dtype", DTYPES)
def test_numpy(dtype: str) -> None:
    x = np.zeros((3, 4, 8), DTYPES[dtype])[:, 1:]
    seen = view("q", x)
    assert seen.array is x
    assert seen.pointer == x.__array_interface__["data"][0]
    assert seen.spec == Spec((3, 3, 8), x.strides, dtype, None, seen.pointer % 16)
    assert seen.spec.strides == (32, 8, 1)
    assert hash(seen.spec) == hash(view("q", x).spec)


def test_other_dtypes_keep_their_names() -> None:
    assert view("q", np.zeros(3)).spec.dtype == "float64"
    assert view("q", np.zeros(3, np.int64)).spec.dtype == "int64"


def test_bits_with_a_dtype() -> None:
    bits = np.full((2, 4), 0x3F80, np.uint16)
    seen = view("q", bits, "bfloat16")
    assert seen.spec.dtype == "bfloat16" and seen.array.tolist() == [[1.0] * 4] * 2
    assert np.shares_memory(seen.array, bits)
    assert view("q", seen.array, "bfloat16").array is seen.array
    with pytest.raises(TypeError, match=r"q has dtype >u2: accepted is this machine's byte order"):
        view("q", bits.astype(">u2"), "bfloat16")
    for eight in (np.zeros(4, np.uint8), np.zeros(4, np.int8)):  # of a cache
        assert view("k_cache", eight, "bfloat16").array is eight
    for wrong in (np.zeros(4, np.uint32), np.zeros(4, np.float16), np.zeros(4, np.int16)):
        with pytest.raises(TypeError, match=f"q has dtype {wrong.dtype}.*bfloat16, and uint16"):
            view("q", wrong, "bfloat16")


@pytest.mark.parametrize("x", [[1.0, 2.0], 3.0, "array", object(), None, memoryview(b"12")])
def test_other_kinds_are_refused(x: Any) -> None:
    with pytest.raises(TypeError, match=rf"k is a .*{type(x).__name__}: accepted are arrays"):
        view("k", x)


def test_a_tracer_says_where_to_call() -> None:
    tracer = type("DynamicJaxprTracer", (), {})()
    with pytest.raises(TypeError, match=r"JAX's jit, grad and vmap trace, .*: call outside"):
        view("q", tracer)
    with pytest.raises(TypeError) as caught:
        view("q", [1.0])
    assert "JAX" not in str(caught.value)


def test_dlpack_in_host_memory() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    seen = view("v", Producer(x))
    assert seen.pointer == x.__array_interface__["data"][0]
    assert seen.spec == view("v", x).spec


class Typed(Producer):
    """Gives a NumPy array out as one of a type that NumPy does not have, by its code in DLPack."""

    def __init__(self, x: np.ndarray, code: int, versioned: bool) -> None:
        super().__init__(x)
        self.code, self.versioned = code, versioned

    def __dlpack__(self, max_version: Any = None, **options: Any) -> Any:
        if self.versioned and max_version is not None:
            options["max_version"] = max_version
        capsule = self.x.__dlpack__(**options)
        label = arrays._capsule_name(capsule)
        assert label == (b"dltensor_versioned" if "max_version" in options else b"dltensor")
        start = arrays._capsule_pointer(capsule, label) + (20 if label == b"dltensor" else 52)
        ctypes.c_uint8.from_address(start).value = self.code
        return capsule


@pytest.mark.parametrize("versioned", [False, True])
@pytest.mark.parametrize(
    ("code", "dtype"), [(4, "bfloat16"), (10, "float8_e4m3fn"), (12, "float8_e5m2")]
)
def test_dlpack_of_types_that_numpy_does_not_exchange(
    code: int, dtype: str, versioned: bool
) -> None:
    """bfloat16 of JAX and PyTorch in host memory had to be given as its bits."""
    x = np.arange(1, 13).astype(DTYPES[dtype]).reshape(2, 6)[:, ::2]
    bits = x.view(f"u{x.itemsize}")
    for _ in range(2):  # what is given out is not changed for the next one
        seen = view("v", Typed(bits, code, versioned))
        assert seen.spec == view("v", x).spec and seen.pointer == x.ctypes.data
        np.testing.assert_array_equal(seen.array, x)
    assert bits.dtype == f"u{x.itemsize}"
    for other in (9, 13):  # fnuz
        with pytest.raises(TypeError, match=r"v \(Typed\) cannot be exchanged"):
            view("v", Typed(bits, other, versioned))


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Unsupported dtype in DLTensor.")


def test_dlpack_that_cannot_be_exchanged() -> None:
    with pytest.raises(TypeError, match=r"v \(Producer\) cannot be exchanged.*dtype="):
        view("v", Producer(np.zeros(3, BF16)))
    unknown = Producer(np.zeros(3))
    unknown.__class__ = type("Unknown", (Producer,), {"__dlpack__": _refuse})  # as NumPy: bfloat16
    with pytest.raises(TypeError, match=r"v \(Unknown\) cannot be exchanged: Unsupported dtype"):
        view("v", unknown)
    with pytest.raises(TypeError, match="v is on DLPack device type 10: accepted are 1"):
        view("v", Producer(np.zeros(3), device=10))
    nowhere = Producer(np.zeros(3))
    nowhere.__class__ = type("Nowhere", (Producer,), {"__dlpack_device__": _refuse})
    with pytest.raises(
        TypeError, match=r"v \(Nowhere\) does not say where it is: __dlpack_device__"
    ):
        view("v", nowhere)


def test_gpu_arrays_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Any:
        raise RuntimeError("no CUDA GPU here")

    monkeypatch.setattr(arrays, "import_cupy", missing)
    foreign = types.SimpleNamespace(__cuda_array_interface__={"typestr": "<f4", "shape": (3,)})
    for x in (Producer(np.zeros(3), device=2), foreign):
        with pytest.raises(RuntimeError, match="no CUDA GPU here"):
            view("q", x)


@pytest.mark.parametrize(
    ("a", "b", "shared"),
    [
        (slice(0, 5), slice(5, 10), False),
        (slice(0, 6), slice(5, 10), True),
        (slice(0, 10, 2), slice(1, 10, 2), False),
        (slice(0, 10, 2), slice(1, 10, 3), True),
        (slice(0, 0), slice(0, 10), False),
    ],
)
def test_shared_memory(a: slice, b: slice, shared: bool) -> None:
    rows = np.zeros((10, 4), np.float32)
    assert arrays.share_memory(view("q", rows[a]), view("out", rows[b])) == shared


# ---- layouts ----


def spec(shape: tuple[int, ...], byte_strides: tuple[int, ...], offset: int = 0) -> Spec:
    return Spec(shape, byte_strides, "float16", 0, offset)


@pytest.mark.parametrize(
    "accepted",
    [
        spec((2, 3, 4), (24, 8, 2)),
        spec((2, 3, 4), (100, 8, 2), offset=2),
        spec((2, 3, 4), (0, 8, 2)),  # repeats
        spec((1, 3, 4), (-7, 8, 2)),  # axes of one element have any stride
        spec((2, 3, 1), (24, 8, 77)),
        spec((2, 0, 4), (-1, -1, -1)),  # no element, no address
        spec((3,), (2,)),
    ],
)
def test_layouts(accepted: Spec) -> None:
    check_layout("q", accepted)


@pytest.mark.parametrize(
    ("refused", "why"),
    [
        (spec((2, 3, 4), (24, 8, 4)), "contiguous last axis, stride 2"),
        (spec((2, 4, 3), (24, 2, 8)), "contiguous last axis"),
        (spec((2, 3, 4), (24, 8, -2)), "contiguous last axis"),
        (spec((2, 3, 4), (24, 8, 0)), "contiguous last axis"),
        (spec((2, 3, 4), (24, -8, 2)), "strides from 0"),
        (spec((2, 3, 4), (25, 8, 2)), "multiples of 2"),
        (spec((2, 3, 4), (24, 8, 2), offset=3), "address 3 modulo 16: accepted are multiples of 2"),
    ],
)
def test_refused_layouts(refused: Spec, why: str) -> None:
    with pytest.raises(ValueError, match=f"q of shape .* has strides .*{why}"):
        check_layout("q", refused)


@pytest.mark.parametrize(
    ("one", "extent"),
    [
        (spec((2, 3, 4), (24, 8, 2)), 48),
        (spec((2, 3, 4), (0, 100, 2)), 208),
        (spec((2, 0, 4), (24, 8, 2)), 0),
        (spec((1, 1, 1), (999, 99, 9)), 2),
    ],
)
def test_extents(one: Spec, extent: int) -> None:
    assert one.extent == extent


def test_outputs_do_not_overlap_themselves() -> None:
    check_layout("out", spec((2, 3, 4), (24, 8, 2)), output=True)
    check_layout("out", spec((2, 3, 4), (8, 100, 2)), output=True)
    check_layout("out", spec((1, 3, 4), (0, 8, 2)), output=True)
    for strides in ((0, 8, 2), (22, 8, 2), (24, 6, 2)):
        with pytest.raises(ValueError, match=r"out of shape .* does not overlap itself"):
            check_layout("out", spec((2, 3, 4), strides), output=True)


def test_an_array_without_elements_is_given() -> None:
    """CuPy has it at address 0, which to kernels is no array: they took an empty block table for
    CSR, and read that at 0 too.
    """
    x = np.empty((2, 0), np.int32)
    assert arrays.View(x, 0, view("block_table", x).key).pointer == arrays.NO_ELEMENTS


def test_new_arrays_are_contiguous() -> None:
    for shape in ((2, 3, 4), (5,), ()):
        spec = contiguous(shape, "bfloat16", None)
        made = arrays.empty(spec)
        assert made.array.flags.c_contiguous and made.spec[:4] == spec[:4]


# ---- CuPy arrays, at addresses that nobody reads ----


def at(cupy: Any, address: int, shape: tuple[int, ...], dtype: Any, device: int = 0) -> Any:
    memory = cupy.cuda.UnownedMemory(address, 1 << 20, None, device)
    return cupy.ndarray(shape, np.dtype(dtype), cupy.cuda.MemoryPointer(memory, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_cupy(cupy: Any, dtype: str) -> None:
    x = at(cupy, 4096 + 4, (2, 3, 8), DTYPES[dtype], device=3)
    seen = view("q", x)
    assert seen.array is x and seen.pointer == 4100
    size = DTYPES[dtype].itemsize
    assert seen.spec == Spec((2, 3, 8), (24 * size, 8 * size, size), dtype, 3, 4)


def test_cupy_bits_with_a_dtype(cupy: Any) -> None:
    seen = view("q", at(cupy, 4096, (2, 8), np.uint16), "bfloat16")
    assert (seen.pointer, seen.spec.dtype, seen.array.dtype) == (4096, "bfloat16", BF16)


class Interface:
    """Has a CUDA array interface."""

    def __init__(self, **changes: Any) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "typestr": "<f4",
            "shape": (2, 3),
            "data": (4096, False),
            "stream": 1,
            **changes,
        }


@pytest.fixture
def queued(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """A CUDA of stubs, whose current stream is 77; what is asked of it."""
    calls: list[tuple[str, int, int]] = []

    class Nothing:
        ptr = 5

        def __init__(self, *args: Any, **kwargs: Any) -> None: ...
        def __enter__(self) -> None: ...
        def __exit__(self, *args: Any) -> None: ...

    runtime = types.SimpleNamespace(
        getDevice=lambda: 0,
        pointerGetAttributes=lambda address: types.SimpleNamespace(device=2),
        eventRecord=lambda event, stream: calls.append(("record", event, stream)),
        streamWaitEvent=lambda stream, event: calls.append(("wait", stream, event)),
    )
    cuda = types.SimpleNamespace(
        runtime=runtime,
        UnownedMemory=cupy.cuda.UnownedMemory,
        MemoryPointer=cupy.cuda.MemoryPointer,
        Device=Nothing,
        Event=Nothing,
        get_current_stream=lambda device: types.SimpleNamespace(ptr=77),
    )
    stub = types.SimpleNamespace(cuda=cuda, ndarray=cupy.ndarray)
    monkeypatch.setattr(arrays, "import_cupy", lambda: stub)
    return calls


def test_interface_and_its_stream(queued: list[tuple[str, int, int]]) -> None:
    owner = Interface()
    seen = view("q", owner)
    assert seen.spec == Spec((2, 3), (12, 4), "float32", 2, 0) and seen.pointer == 4096
    assert queued == [("record", 5, 1), ("wait", 77, 5)], "our stream waits, the host does not"
    alive = weakref.ref(owner)
    del owner
    assert alive() is not None, "a view keeps the memory alive"


@pytest.mark.usefixtures("queued")
def test_arrays_of_jax_are_no_outputs() -> None:
    """CuPy's arrays do not say that what they are views of never changes."""
    kept, jax = Interface(), type("ArrayImpl", (Interface,), {"__module__": "jaxlib._jax"})()
    arrays.check_writable("out", kept, view("out", kept))
    with pytest.raises(ValueError, match="out is read-only: accepted is an array that can be wri"):
        arrays.check_writable("out", jax, view("out", jax))


@pytest.mark.parametrize("stream", [None, 77])
def test_interface_with_nothing_to_wait_for(
    queued: list[tuple[str, int, int]], stream: int | None
) -> None:
    view("q", Interface(stream=stream))
    assert queued == []


@pytest.mark.usefixtures("queued")
def test_interface_layouts() -> None:
    strided = view("q", Interface(strides=(64, 4), shape=(2, 3), data=(4100, True)))
    assert strided.spec == Spec((2, 3), (64, 4), "float32", 2, 4)
    nothing = view("q", Interface(shape=(0, 3), data=(0, False)))
    assert nothing.spec.shape == (0, 3) and nothing.pointer == arrays.NO_ELEMENTS
    raw = view("q", Interface(typestr="|V2"), "bfloat16")
    assert raw.spec.dtype == "bfloat16"
    with pytest.raises(TypeError, match="q has a mask"):
        view("q", Interface(mask=object()))
