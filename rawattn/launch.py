# SPDX-License-Identifier: Apache-2.0
"""Plan -> launches: loads cubins once a device, packs Params, launches on the current CuPy stream.

What a launch hands to the driver never changes once it is made, so threads share all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rawattn import compile, registry
from rawattn.device import INSTALL_GPU, Device, import_cupy
from rawattn.plan import MAX_GRID, Launch, Plan
from rawattn.registry import Config

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT

Shape = tuple[int, int, int]  # blocks, threads a block, bytes of dynamic shared memory a block
Argument = ctypes.c_char_p  # where the one argument of a kernel is, its Params
Ready = tuple[Any, Any, int, Shape]  # CUlaunchConfig, CUfunction, address of Argument


class Template:
    """The launches of a plan on one device, packed but for the addresses of arrays.

    `scalars` and the scalars of each launch are the fields of its Params that are no pointers.
    """

    __slots__ = ("_device", "_launches")

    def __init__(self, plan: Plan, device: int, scalars: Mapping[str, float]) -> None:
        self._device = device
        self._launches = []
        for launch in plan.launches:
            assert 0 < launch.grid <= MAX_GRID, launch  # a plan has no other
            shape = (launch.grid, launch.config.threads, launch.config.smem_bytes)
            function = load(launch.kernel, launch.config, device)
            self._launches.append((function, shape, Params(launch, scalars)))

    def pack(self, pointers: Sequence[int]) -> Packed:
        """Ready to launch on these addresses, in the order of Params; 0 is an absent array."""
        return Packed(
            self._device,
            [(f, shape, Argument(params.bind(pointers))) for f, shape, params in self._launches],
        )


class Params:
    """The Params of a launch, packed but for the pointers that they begin with."""

    __slots__ = ("_pointers", "_scalars")

    def __init__(self, launch: Launch, scalars: Mapping[str, float]) -> None:
        structure = registry.params_struct(registry.KERNELS[launch.kernel].params)
        kinds = [kind for _, kind, *_ in structure._fields_]
        count = kinds.count(ctypes.c_void_p)
        assert set(kinds[:count]) == {ctypes.c_void_p}, f"{structure.__name__}: pointers are first"
        values = {**scalars, **dict(launch.scalars)}
        fields = {name for name, *_ in structure._fields_[count:]}
        assert fields == values.keys(), f"{structure.__name__}: {fields ^ values.keys()}"
        self._pointers = struct.Struct(f"{count}P")
        self._scalars = bytes(structure(**values))[self._pointers.size :]

    def bind(self, pointers: Sequence[int]) -> bytes:
        """The struct as the kernel reads it."""
        return self._pointers.pack(*pointers) + self._scalars


class Packed:
    """Launches that need only a stream. The caller keeps the arrays alive until they have run."""

    __slots__ = ("_device", "_gpu", "_launches", "_ready")

    def __init__(self, device: int, launches: list[tuple[Function, Shape, Argument]]) -> None:
        self._device = device
        self._gpu = _gpu()
        self._launches = launches
        self._ready: tuple[int | None, list[Ready]] = (None, [])  # on the stream of the last call

    def __call__(self) -> None:
        """Launches on the current stream of the device."""
        launch, current_device, current_stream = self._gpu
        if current_device() != self._device:
            with on_device(self._device):
                return self()
        stream = current_stream(self._device).ptr
        last, ready = self._ready
        if stream != last:
            ready = self.on(stream)
            self._ready = stream, ready  # at once, for other threads
        for config, function, arguments, shape in ready:
            (status,) = launch(config, function, arguments, 0)
            if status == INVALID_CONTEXT:  # this thread has not used the device yet
                import_cupy().cuda.runtime.setDevice(self._device)
                (status,) = launch(config, function, arguments, 0)
            if status != 0:
                raise RuntimeError(f"a launch of {shape} on device {self._device}: {status!r}")
        return None

    def on(self, stream: int) -> list[Ready]:
        """The launches on a stream; they are good as long as this object lives."""
        return [
            (_launch_config(*shape, stream), function.handle, ctypes.addressof(argument), shape)
            for function, shape, argument in self._launches
        ]


class Function(NamedTuple):
    """A loaded kernel."""

    handle: Any  # CUfunction
    owner: Any  # CuPy's kernel: its module stays loaded as long as this lives


class Gpu(NamedTuple):
    """What a launch calls."""

    launch: Callable[..., tuple[int]]
    current_device: Callable[[], int]
    current_stream: Callable[[int], Any]


def on_device(device: int) -> contextlib.AbstractContextManager[Any]:
    """Makes a CUDA device current."""
    context: contextlib.AbstractContextManager[Any] = import_cupy().cuda.Device(device)
    return context


@contextlib.contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """Makes a stream, and its device, current.

    Accepted are streams of CuPy, objects with ``__cuda_stream__``, and handles as integers.
    """
    cupy = import_cupy()
    if not isinstance(stream, (cupy.cuda.Stream, cupy.cuda.ExternalStream)):
        if isinstance(stream, int) and not isinstance(stream, bool):
            stream = _Handle(stream)
        elif not hasattr(stream, "__cuda_stream__"):
            raise TypeError(
                f"stream={stream!r}: accepted are CuPy streams, objects with __cuda_stream__, and "
                "handles as integers"
            )
        stream = cupy.cuda.Stream.from_external(stream)
    device = stream.device_id if stream.device_id >= 0 else cupy.cuda.runtime.getDevice()
    with on_device(device), stream:
        yield


class _Handle:
    """A stream of which only the handle is known."""

    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@functools.cache
def _driver() -> Any:
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise RuntimeError(f"launching needs cuda-bindings: {INSTALL_GPU} ({error})") from None
    return driver


@functools.cache
def _gpu() -> Gpu:
    cuda = import_cupy().cuda
    return Gpu(_driver().cuLaunchKernelEx, cuda.runtime.getDevice, cuda.get_current_stream)


@functools.cache
def load(kernel: str, config: Config, device: int) -> Function:
    """A kernel, compiled where it has to be, loaded once a device."""
    entry = registry.KERNELS[kernel]
    path = compile.cubin(entry, config, Device.current(device).arch)
    with on_device(device):
        owner = import_cupy().RawModule(path=str(path)).get_function(compile.entry_name(entry))
        owner.max_dynamic_shared_size_bytes = config.smem_bytes
        return Function(_driver().CUfunction(int(owner.kernel.ptr)), owner)


@functools.lru_cache(maxsize=4096)
def _launch_config(blocks: int, threads: int, smem_bytes: int, stream: int) -> Any:
    config = _driver().CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
    config.sharedMemBytes = smem_bytes
    config.hStream = stream
    config.attrs = []
    config.numAttrs = 0
    return config
