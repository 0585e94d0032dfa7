# SPDX-License-Identifier: Apache-2.0
"""Arrays of anyone -> views: a CuPy or NumPy array, its address, a hashable description. No copies.

Taken are CuPy and NumPy arrays, whatever speaks DLPack (JAX, PyTorch, cuda.core) and whatever has a
``__cuda_array_interface__`` (Numba). Work that another library has queued on them is waited for on
the current CuPy stream, never on the host.
"""

from __future__ import annotations

import ctypes
import math
import sys
import types
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.ma import MaskedArray

from rawattn.device import import_cupy
from rawattn.problem import shown

DTYPES: dict[str, np.dtype[Any]] = {
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
    "float8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "int8": np.dtype(np.int8),
    "uint8": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
    "bool": np.dtype(np.bool_),
}
FLOATS = ("float16", "bfloat16", "float32")  # of q, k, v and out
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_DLPACK_CPU, _DLPACK_CUDA, _DLPACK_CUDA_MANAGED = 1, 2, 13
_DLPACK_UINT = 1
_BY_BITS = {  # types that NumPy, or CuPy, does not exchange, by DLPack's code and bits
    (4, 16): "bfloat16",
    (10, 8): "float8_e4m3fn",
    (12, 8): "float8_e5m2",
}
_UNREADABLE = (BufferError, TypeError, ValueError, RuntimeError)  # what an exchange fails with


class Spec(NamedTuple):
    """Everything about an array but where it is."""

    shape: tuple[int, ...]
    byte_strides: tuple[int, ...]
    dtype: str  # a name of DTYPES, or what NumPy calls it
    device: int | None  # number of the CUDA device; None: host memory
    offset: int = 0  # address modulo 16

    @property
    def strides(self) -> tuple[int, ...]:
        """In elements."""
        size = DTYPES[self.dtype].itemsize
        return tuple(stride // size for stride in self.byte_strides)

    @property
    def steps(self) -> tuple[int, ...]:
        """The strides, 0 for axes of size 1: what stands there is no promise, and may be odd."""
        return tuple(s if n > 1 else 0 for n, s in zip(self.shape, self.strides, strict=True))

    def grain(self, axis: int = -1) -> int:
        """How wide copies of rows may be, in bytes: the greatest divisor of their size and of every
        address that one begins at, modulo 16. A row is what lies from `axis` on.
        """
        rows = math.prod(self.shape[axis:]) * DTYPES[self.dtype].itemsize
        if 0 in self.shape:
            return rows
        outer = zip(self.byte_strides[:axis], self.shape[:axis], strict=True)
        return math.gcd(rows, self.offset, *(stride for stride, n in outer if n > 1))

    @property
    def extent(self) -> int:
        """Bytes from the first element to the end of the last one."""
        if 0 in self.shape:
            return 0
        reach = zip(self.shape, self.byte_strides, strict=True)
        return DTYPES[self.dtype].itemsize + sum((n - 1) * stride for n, stride in reach)

    def __str__(self) -> str:
        where = "NumPy" if self.device is None else f"CUDA device {self.device}"
        return (
            f"{self.dtype} of shape {self.shape}, strides {self.byte_strides} bytes, "
            f"address {self.offset} modulo 16, {where}"
        )


SpecKey = tuple[tuple[int, ...], tuple[int, ...], str, "int | None", int]  # the fields of a Spec


# The address of an array that has none, since it has no elements: a block table without columns,
# say. To kernels an array at 0 is not given.
NO_ELEMENTS = 16


class View:
    """An array that a kernel can read or write. It keeps the memory alive."""

    __slots__ = ("array", "key", "pointer")

    def __init__(self, array: Any, pointer: int, key: SpecKey) -> None:
        self.array = array  # cupy.ndarray or numpy.ndarray
        self.pointer = pointer or NO_ELEMENTS
        self.key = key  # equal to `spec`, and cheaper to make: every call looks its kind up by keys

    @property
    def spec(self) -> Spec:
        return Spec(*self.key)


def view(name: str, x: Any, dtype: str | None = None) -> View:
    """The view of an array; `dtype` says what its bits mean where they are unsigned integers.

    Raises TypeError, which names the argument, for a kind of object that is not accepted.
    """
    cupy = sys.modules.get("cupy")
    if (cupy is not None and isinstance(x, cupy.ndarray)) or isinstance(x, np.ndarray):
        array = x
    else:
        array = _exchanged(name, x)
    if dtype is not None:
        array = _reinterpret(name, array, dtype)
    found = array.dtype
    kind = _NAMES.get(found) or _other_dtype(name, found)
    if isinstance(array, np.ndarray):
        if isinstance(array, MaskedArray):
            raise TypeError(f"{name} is a masked array: accepted are arrays without a mask")
        address, device = array.ctypes.data, None
    else:
        memory = array.data
        address, device = memory.ptr, memory.device_id
    return View(array, address, (array.shape, array.strides, kind, device, address % 16))


def contiguous(shape: tuple[int, ...], dtype: str, device: int | None) -> Spec:
    """The spec of a new array in C order."""
    return Spec(shape, _c_strides(shape, DTYPES[dtype].itemsize), dtype, device)


def empty(spec: Spec) -> View:
    """A new array of a contiguous spec, for use on the current stream of its device."""
    if spec.device is None:
        return view("", np.empty(spec.shape, DTYPES[spec.dtype]))
    cupy = sys.modules["cupy"]
    if spec.device != cupy.cuda.runtime.getDevice():
        with cupy.cuda.Device(spec.device):
            return empty(spec)
    array = cupy.ndarray(spec.shape, DTYPES[spec.dtype])  # cupy.empty does this, and no more
    return View(array, array.data.ptr, spec)


def to_device(values: Any, dtype: str, device: int, *, shared: bool = False) -> View:
    """A new array on a GPU that holds these values, for use on the current stream of the device;
    waits for it where the array is `shared` with other streams.
    """
    cupy = import_cupy()
    with cupy.cuda.Device(device):
        array = cupy.asarray(np.asarray(values, DTYPES[dtype]))
        if shared:
            cupy.cuda.get_current_stream(device).synchronize()
    return view("", array)


def to_host(x: View) -> np.ndarray[Any, Any]:
    """A copy in host memory; it waits for the device."""
    return x.array if isinstance(x.array, np.ndarray) else x.array.get()


def dtype_name(name: str, dtype: Any) -> str:
    """The name, one of FLOATS, of whatever NumPy takes for a dtype."""
    try:
        found = _NAMES.get(np.dtype(dtype))
    except (TypeError, ValueError):
        found = None
    if found not in FLOATS:
        raise TypeError(f"{name}={shown(dtype)}: accepted are {', '.join(FLOATS)}")
    return found


def share_memory(a: View, b: View) -> bool:
    """Whether an element of one array lies in another's; True where that is hard to find out."""
    effort: Any = 1 << 12  # the stubs of NumPy know only its two constants
    return np.may_share_memory(_places(a), _places(b), max_work=effort)


def check_writable(name: str, given: Any, found: View) -> None:
    """ValueError for an output that may not be written: `given` as it came, and its view."""
    if isinstance(found.array, np.ndarray):
        writable = found.array.flags.writeable
    else:  # CuPy's arrays do not say; those of JAX never change
        writable = not type(given).__module__.startswith("jax")
    if not writable:
        raise ValueError(f"{name} is read-only: accepted is an array that can be written")


def check_layout(name: str, spec: Spec, *, output: bool = False) -> None:
    """ValueError unless the array is aligned, its last axis contiguous, and no stride below 0.

    Inputs may repeat themselves with stride 0; outputs may not overlap themselves.
    """
    size = DTYPES[spec.dtype].itemsize
    axes = [(stride, n) for stride, n in zip(spec.byte_strides, spec.shape, strict=True) if n != 1]
    if 0 in spec.shape:
        return
    where = f"{name} of shape {spec.shape} has strides {spec.byte_strides} bytes"
    if spec.offset % size or any(stride % size for stride, _ in axes):
        raise ValueError(
            f"{where}, address {spec.offset} modulo 16: accepted are multiples of {size}"
        )
    if spec.shape and spec.shape[-1] != 1 and spec.byte_strides[-1] != size:
        raise ValueError(f"{where}: accepted is a contiguous last axis, stride {size}")
    if any(stride < 0 for stride, _ in axes):
        raise ValueError(f"{where}: accepted are strides from 0")
    if output:
        end = size
        for stride, n in sorted(axes):
            if stride < end:
                raise ValueError(f"{where}: accepted is an output that does not overlap itself")
            end += stride * (n - 1)


def _places(x: View) -> np.ndarray[Any, Any]:
    """An array with the addresses of another, which may be a GPU's: not to be read."""
    array = x.array
    interface = {
        "version": 3,
        "data": (x.pointer, True),
        "shape": array.shape,
        "strides": array.strides,
        "typestr": f"|V{array.dtype.itemsize}",
    }
    return np.asarray(types.SimpleNamespace(__array_interface__=interface))


def _other_dtype(name: str, dtype: np.dtype[Any]) -> str:
    """What NumPy calls a dtype that is none of DTYPES, to be refused where it is used."""
    _check_native(name, dtype)
    return dtype.name


def _check_native(name: str, dtype: np.dtype[Any]) -> None:
    if not dtype.isnative:
        raise TypeError(f"{name} has dtype {dtype.str}: accepted is this machine's byte order")


def _exchanged(name: str, x: Any) -> Any:
    """A CuPy or NumPy array of what is neither, in the same memory."""
    if hasattr(x, "__dlpack__") and hasattr(x, "__dlpack_device__"):
        return _from_dlpack(name, x)
    if hasattr(x, "__cuda_array_interface__"):
        return _from_cuda_array_interface(name, x)
    hint = ""
    if type(x).__name__.endswith("Tracer"):
        hint = "; JAX's jit, grad and vmap trace, before there are arrays: call outside of them"
    raise TypeError(
        f"{name} is a {type(x).__module__}.{type(x).__qualname__}: accepted are arrays of CuPy "
        f"or NumPy, and objects with __dlpack__ or __cuda_array_interface__{hint}"
    )


def _reinterpret(name: str, array: Any, dtype: str) -> Any:
    wanted = DTYPES[dtype]
    _check_native(name, array.dtype)
    if array.dtype == wanted or array.dtype.itemsize == 1:  # 8-bit caches say what they hold
        return array
    if array.dtype.kind in "uV" and array.dtype.itemsize == wanted.itemsize:
        return array.view(wanted)
    accepted = f"{dtype}, and uint{8 * wanted.itemsize} that holds its bits"
    raise TypeError(f"{name} has dtype {array.dtype}: with dtype={dtype!r} accepted are {accepted}")


def _from_dlpack(name: str, x: Any) -> Any:
    """A NumPy array, or a CuPy array that the producer has made ready for the current stream."""
    try:
        kind = int(x.__dlpack_device__()[0])
    except _UNREADABLE as error:
        raise TypeError(
            f"{name} ({type(x).__qualname__}) does not say where it is: __dlpack_device__: {error}"
        ) from error
    of_gpu = kind in (_DLPACK_CUDA, _DLPACK_CUDA_MANAGED)
    module = import_cupy() if of_gpu else np
    try:
        if of_gpu or kind == _DLPACK_CPU:
            return module.from_dlpack(x)
    except _UNREADABLE as error:
        found = _by_bits(module, x)
        if found is not None:
            return found
        hint = "a view as unsigned integers together with dtype= passes any type"
        raise TypeError(
            f"{name} ({type(x).__qualname__}) cannot be exchanged: {error}; {hint}"
        ) from error
    raise TypeError(f"{name} is on DLPack device type {kind}: accepted are 1 (CPU) and 2 (CUDA)")


def _by_bits(module: Any, x: Any) -> Any:
    """The array of an object over DLPack, of one of the types of _BY_BITS; None: of another."""
    bits = _Bits(x)
    try:
        array = module.from_dlpack(bits)
    except _UNREADABLE:
        return None
    return None if bits.dtype is None else array.view(DTYPES[bits.dtype])


class _Bits:
    """An array over DLPack, whose elements go by as unsigned integers."""

    def __init__(self, x: Any) -> None:
        self.x = x
        self.dtype: str | None = None  # what they are, once they have been taken

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()

    def __dlpack__(self, **how: Any) -> Any:
        capsule = self.x.__dlpack__(**how)
        label = _capsule_name(capsule)
        # DLTensor: a pointer, device and axes in 4 bytes each, then the type in 1 + 1 + 2. In front
        # of it there may be a version, two pointers and flags, 8 bytes each.
        start = 20 + (32 if label == b"dltensor_versioned" else 0)
        kind = (ctypes.c_uint8 * 2).from_address(_capsule_pointer(capsule, label) + start)
        self.dtype = _BY_BITS.get((kind[0], kind[1]))
        if self.dtype is not None:
            kind[0] = _DLPACK_UINT
        return capsule


_capsule_name = ctypes.PYFUNCTYPE(ctypes.c_char_p, ctypes.py_object)(
    ("PyCapsule_GetName", ctypes.pythonapi)
)
_capsule_pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def _from_cuda_array_interface(name: str, x: Any) -> Any:
    """A CuPy array; the current stream waits for the stream that the interface names."""
    cupy = import_cupy()
    interface = x.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise TypeError(f"{name} has a mask: accepted are arrays without one")
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    address = interface["data"][0] or 0
    runtime = cupy.cuda.runtime
    device = runtime.pointerGetAttributes(address).device if address else runtime.getDevice()
    strides = interface.get("strides")
    if strides is None:
        strides = _c_strides(shape, dtype.itemsize)
    extent = dtype.itemsize + sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True))
    memory = cupy.cuda.UnownedMemory(address, extent, x, device)
    pointer = cupy.cuda.MemoryPointer(memory, 0)
    stream = interface.get("stream")
    if stream is not None:
        _wait_for(cupy, stream, device)
    return cupy.ndarray(shape, dtype, pointer, strides=strides)


def _c_strides(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Byte strides of an array in C order."""
    return tuple(itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


def _wait_for(cupy: Any, producer: int, device: int) -> None:
    """Lets the current stream of a device wait for what another, a handle, has queued so far."""
    consumer = cupy.cuda.get_current_stream(device).ptr
    if producer != consumer:
        with cupy.cuda.Device(device):
            event = cupy.cuda.Event(disable_timing=True)
            cupy.cuda.runtime.eventRecord(event.ptr, producer)
            cupy.cuda.runtime.streamWaitEvent(consumer, event.ptr)
