# SPDX-License-Identifier: Apache-2.0
"""Plan -> launches: loads cubins once a device, packs Params, launches on the current CuPy stream.

What a launch hands to the driver never changes once it is made, so threads share all of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rawattn import compile, registry
from rawattn.arrays import Spec
from rawattn.counters import counters
from rawattn.device import INSTALL_GPU, Device, import_cupy
from rawattn.params import MAP_BYTES, Argument, Codec, Params
from rawattn.plan import MAX_GRID, Plan
from rawattn.registry import Config
from rawattn.tensor_map import ENCODED_DTYPES, L2, SWIZZLES, Described

INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
MAX_PORTABLE_CLUSTER = 8
KEPT = 64  # sets of addresses of one kind of call, for which it is ready to launch

POINTER = ctypes.c_void_p


class Shape(NamedTuple):
    """What a launch is beside its function and its Params."""

    grid: int  # blocks
    threads: int  # a block
    smem_bytes: int  # dynamic, a block
    cluster: int  # blocks
    dependent: bool  # as Launch.dependent


Ready = tuple[Any, Any, int, Shape]  # CUlaunchConfig, CUfunction, Argument.pointer_address


class Template:
    """The launches of a plan on one device, packed but for what depends on addresses.

    `scalars`, and those of each launch, are the fields of its Params that are neither pointers nor
    tensor maps. `specs` are the arrays of the call by their names in Params, None where absent.
    """

    __slots__ = ("_device", "_launches", "_out", "_pack")

    def __init__(
        self,
        plan: Plan,
        device: int,
        scalars: Mapping[str, float],
        specs: Mapping[str, Spec | None],
    ) -> None:
        self._device = device
        self._pack = functools.lru_cache(maxsize=KEPT)(self._pack_anew)
        self._out = [*specs, "out"].index("out")  # looked at where there are counters
        self._launches = []
        for launch in plan.launches:
            assert 0 < launch.grid <= MAX_GRID, launch  # a plan has no other
            assert launch.grid % launch.cluster == 0, launch
            params = Params(launch, scalars, specs, codec() if launch.maps else None)
            if params.counters:
                counters(device).reserve(params.counters)
            function = load(launch.kernel, launch.config, device)
            if launch.cluster > MAX_PORTABLE_CLUSTER:
                _allow_large_clusters(function)
            config = launch.config
            blocks = launch.grid, config.threads, config.smem_bytes
            self._launches.append(
                (function, Shape(*blocks, launch.cluster, launch.dependent), params)
            )

    def pack(self, addresses: Sequence[int]) -> Packed:
        """Ready to launch on these addresses, in the order of `specs`; 0 is an absent array.

        It is kept for the next call: a program has its arrays in few places, and addresses are all
        that is left of them here.
        """
        return self._pack(tuple(addresses))

    def _pack_anew(self, addresses: tuple[int, ...]) -> Packed:
        packed = []
        for number, (function, shape, params) in enumerate(self._launches):
            counter = 0
            if params.counters:
                owner = addresses[self._out], number
                counter = counters(self._device).address(owner, params.counters)
            packed.append((function, shape, params.bind(addresses, counter)))
        return Packed(self._device, packed)


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
            (
                _launch_config(shape, stream),
                function.handle,
                argument.pointer_address,
                shape,
            )
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


def _allow_large_clusters(function: Function) -> None:
    """Lets a kernel have clusters of more than 8 blocks, which not every GPU has room for."""
    driver = _driver()
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    (status,) = driver.cuFuncSetAttribute(function.handle, attribute, 1)
    if status != 0:
        raise RuntimeError(f"clusters of more than {MAX_PORTABLE_CLUSTER} blocks: {status!r}")


@functools.lru_cache(maxsize=4096)
def _launch_config(shape: Shape, stream: int) -> Any:
    driver = _driver()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.threads, 1, 1
    config.sharedMemBytes = shape.smem_bytes
    config.hStream = stream
    attributes = []
    if shape.cluster > 1:
        value = driver.CUlaunchAttributeValue()
        value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = shape.cluster, 1, 1
        attributes.append(("CLUSTER_DIMENSION", value))
    if shape.dependent:
        value = driver.CUlaunchAttributeValue()
        value.programmaticStreamSerializationAllowed = 1
        attributes.append(("PROGRAMMATIC_STREAM_SERIALIZATION", value))
    config.attrs = [_attribute(name, value) for name, value in attributes]
    config.numAttrs = len(attributes)
    return config


def _attribute(name: str, value: Any) -> Any:
    driver = _driver()
    attribute = driver.CUlaunchAttribute()
    attribute.id = getattr(driver.CUlaunchAttributeID, f"CU_LAUNCH_ATTRIBUTE_{name}")
    attribute.value = value
    return attribute


@functools.cache
def codec() -> Codec:
    """The driver's: a map is encoded once and costs a call 1 us, its encoding 4 us (H200)."""
    return Codec(_encode, _driver_function("cuTensorMapReplaceAddress", POINTER, ctypes.c_uint64))


def _driver_function(name: str, *kinds: Any) -> Any:
    """A function of the driver through ctypes: the bindings would make objects of all numbers."""
    status, address, _ = _driver().cuGetProcAddress(name.encode(), 12000, 0)
    if status != 0:
        raise RuntimeError(f"the driver has no {name}: {status!r}")
    return ctypes.PYFUNCTYPE(ctypes.c_int, *kinds)(address)


def _encode(described: Described) -> bytes:
    """A CUtensorMap of an array at address 0."""
    number, rank = ctypes.c_uint32, len(described.sizes)
    # map, dtype, rank, address, sizes, strides, box, steps, interleave, swizzle, l2, fill
    kinds = (POINTER, number, number, ctypes.c_uint64, *[POINTER] * 4, *[number] * 4)
    call = _driver_function("cuTensorMapEncodeTiled", *kinds)
    target = Argument(bytes(MAP_BYTES))
    status = call(
        target.address,
        ENCODED_DTYPES[described.dtype],
        rank,
        0,
        (ctypes.c_uint64 * rank)(*described.sizes),
        (ctypes.c_uint64 * (rank - 1))(*described.strides),
        (number * rank)(*described.box),
        (number * rank)(*[1] * rank),
        0,
        SWIZZLES.index(described.swizzle),
        L2.index(described.l2),
        0,
    )
    if status != 0:
        raise RuntimeError(f"cuTensorMapEncodeTiled of {described}: {status}")
    return ctypes.string_at(target.address, MAP_BYTES)
