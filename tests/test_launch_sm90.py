# SPDX-License-Identifier: Apache-2.0
"""What is between a plan and a kernel of sm_90: layout of Params, tensor maps, clusters, counters;
on NVRTC, on a driver of stubs, and on the emulator."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn import compile, counters, launch, registry
from rawattn.arrays import contiguous, view
from rawattn.device import Device
from rawattn.plan.base import RAGGED, Launch, Plan, TensorMap
from rawattn.tensor_map import UNBOUNDED, describe
from tests import relay
from tests.relay import Relay
from tools.emulator import EmulatorError
from tools.emulator.plans import run_launch, run_plan

COPIED = sum(relay.LENGTHS)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path) -> Iterator[Path]:
    with relay.registered(tmp_path) as made:
        yield made


# ---- the layout of Params ----


def test_params_have_the_layout_of_the_compiler(folder: Path) -> None:
    struct = registry.params_struct("RelaySm90Params")
    offsets = {name: getattr(struct, name).offset for name, _ in struct._fields_}
    named = {name: offset for name, offset in offsets.items() if name[0] != "_"}
    assert named == {
        "x": 0, "out": 8, "starts": 16, "sequences": 24, "heads": 28, "tiles": 32,
        "first": 40, "tile_counter": 48, "from_map": 64, "movers": 192, "to_map": 256, "last": 384,
    }  # fmt: skip
    assert ctypes.sizeof(struct) == 448
    compile.cubin(relay.KERNEL, Relay(), "sm_90a")  # asserts this size
    params = folder / "params.cuh"
    params.write_text(params.read_text().replace("float last;", "float last[17];"))
    with pytest.raises(compile.CompileError, match="ABI: RelaySm90Params"):
        compile.cubin(relay.KERNEL, Relay(), "sm_90a")


def test_a_struct_that_is_not_there() -> None:
    with pytest.raises(KeyError, match="no struct Relay"):
        registry.params_struct("Relay")


# ---- what reaches the driver ----


ARGUMENTS = (
    *("at", "dtype", "rank", "base", "sizes", "strides", "box", "steps"),
    *("interleave", "swizzle", "l2", "fill"),
)


class Driver:
    """Writes down what it is asked."""

    def __init__(self) -> None:
        self.encoded: list[dict[str, Any]] = []
        self.moved: list[int] = []
        self.answer = 0

    def function(self, name: str, *kinds: Any) -> Any:
        call = {"cuTensorMapEncodeTiled": self.encode, "cuTensorMapReplaceAddress": self.move}
        return call[name]

    def encode(self, *arguments: Any) -> int:
        asked = dict(zip(ARGUMENTS, arguments, strict=True))
        for name in ("sizes", "strides", "box", "steps"):
            asked[name] = tuple(asked[name])
        assert asked["at"] % 64 == 0
        self.encoded.append(asked)
        ctypes.memset(asked["at"], len(self.encoded), 128)
        return self.answer

    def move(self, at: int, address: int) -> int:
        assert at % 64 == 0
        self.moved.append(address)
        ctypes.c_uint64.from_address(at).value = address
        return self.answer


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    made = Driver()
    monkeypatch.setattr(launch, "_driver_function", made.function)
    launch.codec.cache_clear()
    yield made
    launch.codec.cache_clear()


def test_what_is_encoded(driver: Driver) -> None:
    wanted = TensorMap(field="m", array="x", box=(64, 128, 1), axes=(3, 1, 2), l2=128, ragged=True)
    described = describe(wanted, contiguous((50, 4, 96), "bfloat16", 0))
    assert launch.codec().encode(described) == b"\1" * 128
    (asked,) = driver.encoded
    assert (asked["dtype"], asked["rank"], asked["base"]) == (9, 5, 0)
    assert asked["sizes"] == (96, RAGGED, 4, UNBOUNDED, UNBOUNDED)
    assert asked["strides"] == (768, 192, 2**34 - 768, 768)
    assert (asked["box"], asked["steps"]) == ((64, 128, 1, 1, 1), (1,) * 5)
    assert (asked["interleave"], asked["swizzle"], asked["l2"], asked["fill"]) == (0, 3, 2, 0)
    driver.answer = 1
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled of Described"):
        launch.codec().encode(described)


class Gpu:
    """A GPU whose launches are written down, and whose memory is a number that grows."""

    def __init__(self) -> None:
        self.launches: list[Any] = []
        self.allocated: list[int] = []

    def launch(self, config: Any, function: Any, arguments: int, extra: int) -> tuple[int]:
        struct = registry.params_struct("RelaySm90Params")
        address = ctypes.c_void_p.from_address(arguments).value
        params = struct.from_buffer_copy(ctypes.string_at(address, ctypes.sizeof(struct)))
        self.launches.append((config, params))
        return (0,)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Iterator[Gpu]:
    pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")
    made = Gpu()

    def memory(size: int) -> Any:
        made.allocated.append(size)
        return types.SimpleNamespace(ptr=len(made.allocated) << 20, size=size)

    class Stream:
        def __init__(self, non_blocking: bool) -> None:
            self.ptr = 5

        def synchronize(self) -> None:
            pass

    stub = types.SimpleNamespace(
        Memory=memory,
        Stream=Stream,
        Device=lambda device: contextlib.nullcontext(),
        runtime=types.SimpleNamespace(memsetAsync=lambda *args: None),
    )
    monkeypatch.setattr(counters, "import_cupy", lambda: types.SimpleNamespace(cuda=stub))
    current = launch.Gpu(made.launch, lambda: 0, lambda device: types.SimpleNamespace(ptr=7))
    monkeypatch.setattr(launch, "_gpu", lambda: current)
    monkeypatch.setattr(launch, "load", lambda kernel, *_: launch.Function(kernel, None))
    counters.counters.cache_clear()
    yield made
    counters.counters.cache_clear()


def plan_of(*launches: Launch) -> Plan:
    return Plan(problem=None, device=Device.named("H200"), backend="relay", launches=launches)


SPECS = {
    name: view(name, x).spec._replace(device=0, offset=0) for name, x in relay.arrays().items()
}
ADDRESSES = [n << 30 for n in range(1, 5)]  # of x, out, starts, movers


def packed(*launches: Launch, addresses: list[int] = ADDRESSES) -> launch.Packed:
    template = launch.Template(plan_of(*launches), 0, relay.scalars(), SPECS)
    return template.pack(addresses)


def test_params_are_bound_wherever_they_stand(gpu: Gpu, driver: Driver) -> None:
    packed(relay.launch(Relay()))()
    assert len(driver.encoded) == 2 and driver.moved == ADDRESSES[:2]
    ((config, params),) = gpu.launches
    assert (params.x, params.out, params.starts, params.movers) == tuple(ADDRESSES)
    assert params.tile_counter == 1 << 20, "the first memory that was allocated"
    assert (params.sequences, params.heads, params.tiles) == (4, 3, 2)
    for n, address in enumerate(ADDRESSES[:2]):
        moved = address.to_bytes(8, "little") + bytes([n + 1]) * 120
        assert bytes((params.from_map, params.to_map)[n]) == moved
    assert (config.gridDimX, config.numAttrs) == (4, 0)


def test_the_same_addresses_are_packed_once(gpu: Gpu, driver: Driver) -> None:
    template = launch.Template(plan_of(relay.launch(Relay())), 0, relay.scalars(), SPECS)
    assert template.pack(ADDRESSES) is template.pack(list(ADDRESSES))
    assert driver.moved == ADDRESSES[:2]
    for n in range(launch.KEPT + 1):
        template.pack([ADDRESSES[0], (n + 9) << 30, *ADDRESSES[2:]])
    assert template._pack.cache_info().currsize == launch.KEPT


def test_an_address_that_no_map_can_have(gpu: Gpu, driver: Driver) -> None:
    template = launch.Template(plan_of(relay.launch(Relay())), 0, relay.scalars(), SPECS)
    driver.answer = 1
    with pytest.raises(RuntimeError, match="no tensor map of an array at 0x40000000"):
        template.pack(ADDRESSES)


def test_clusters_and_dependent_launches(gpu: Gpu) -> None:
    from cuda.bindings import driver

    packed(relay.launch(Relay(cluster=2, dependent=True)))()
    ((config, _),) = gpu.launches
    assert config.gridDimX == 8 and config.numAttrs == 2
    cluster, dependent = config.attrs
    ids = driver.CUlaunchAttributeID
    assert cluster.id == ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    size = cluster.value.clusterDim
    assert (size.x, size.y, size.z) == (2, 1, 1)
    assert dependent.id == ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    assert dependent.value.programmaticStreamSerializationAllowed == 1


def test_an_output_has_its_counters(gpu: Gpu) -> None:
    """One place for each output and launch, however often and with whatever inputs."""
    one = relay.launch(Relay())
    others = [ADDRESSES[0] + 64, *ADDRESSES[1:]], [ADDRESSES[0], ADDRESSES[1] + 64, *ADDRESSES[2:]]
    for addresses in (ADDRESSES, ADDRESSES, *others):
        packed(one, one, addresses=addresses)()
    found = [params.tile_counter for _, params in gpu.launches]
    assert found[0:2] == found[2:4] == found[4:6] and len(set(found)) == 4
    assert sorted(set(found)) == [(1 << 20) + 32 * n for n in range(4)]
    assert gpu.allocated == [counters.SLAB]


def test_memory_for_counters_is_there_before_the_first_launch(gpu: Gpu) -> None:
    template = launch.Template(plan_of(relay.launch(Relay())), 0, relay.scalars(), SPECS)
    assert gpu.allocated == [counters.SLAB]
    for n in range(counters.SLAB // 32):
        template.pack([ADDRESSES[0], n << 9, *ADDRESSES[2:]])
    assert gpu.allocated == [counters.SLAB]
    template.pack([ADDRESSES[0], 1 << 40, *ADDRESSES[2:]])
    assert gpu.allocated == [counters.SLAB] * 2


def test_fewer_counters_lie_among_those_that_are_there(gpu: Gpu) -> None:
    found = counters.counters(0)
    first, more, fewer = (found.address((1, 0), count) for count in (8, 100, 50))
    assert first != more == fewer


def test_more_counters_than_a_slab_holds(gpu: Gpu) -> None:
    found = counters.counters(0)
    first, second = (found.address((n, 0), counters.SLAB) for n in range(2))
    assert gpu.allocated == [4 * counters.SLAB] * 2 and first != second


@pytest.mark.parametrize(
    ("scalars", "specs", "changes"),
    [
        ({}, SPECS, {}),
        (relay.scalars(), {k: v for k, v in SPECS.items() if k != "starts"}, {}),
        (relay.scalars(), SPECS, {"scalars": (("tile", 3),)}),
        (relay.scalars(), SPECS, {"maps": (TensorMap(field="m", array="x", box=(64, 128, 1, 1)),)}),
    ],
)
def test_params_that_are_not_complete(
    gpu: Gpu, scalars: dict[str, float], specs: dict[str, Any], changes: dict[str, Any]
) -> None:
    made = dataclasses.replace(relay.launch(Relay()), **changes)
    with pytest.raises(AssertionError, match="RelaySm90Params: "):
        launch.Template(plan_of(made), 0, scalars, specs)


# ---- on the emulator ----


def copied(launched: Launch, folder: Path, seed: int, **options: Any) -> dict[str, Any]:
    """The arrays after a launch."""
    arrays = relay.arrays()
    run_launch(
        launched,
        arrays,
        relay.scalars(),
        seed,
        outputs=("out", "movers"),
        kernels=folder,
        **options,
    )
    return arrays


@pytest.mark.emulator
@pytest.mark.parametrize(
    "config", [Relay(), Relay(counted=True), Relay(cluster=2), Relay(cluster=4, rows=128)]
)
def test_the_emulator_runs_launches(config: Relay, folder: Path) -> None:
    for seed in range(3):
        found = copied(relay.launch(config), folder, seed)
        x, out, movers = found["x"], found["out"], found["movers"]
        assert np.array_equal(out[:COPIED], x[:COPIED])
        assert np.isnan(out[COPIED:]).all(), "rows behind the last sequence are not written"
        items = -(-max(relay.LENGTHS) // config.rows) * len(relay.LENGTHS) * relay.HEADS
        assert (movers[:items] >= 0).all() and (movers[items:] == -1).all()


@pytest.mark.emulator
def test_heads_that_are_one(folder: Path) -> None:
    """A stride of 0."""
    arrays = relay.arrays()
    arrays["x"] = np.broadcast_to(arrays["x"][:, :1], arrays["x"].shape)
    outputs = ("out", "movers")
    run_launch(relay.launch(Relay()), arrays, relay.scalars(), 0, outputs=outputs, kernels=folder)
    assert np.array_equal(arrays["out"][:COPIED], arrays["x"][:COPIED])


@pytest.mark.emulator
def test_a_launch_reads_what_the_one_before_it_wrote(folder: Path) -> None:
    arrays = {**relay.arrays(), "between": np.zeros_like(relay.arrays()["x"])}
    config = Relay(dependent=True)
    launches = (
        relay.launch(config, target="between"),
        relay.launch(config, source="between"),
    )
    outputs = ("out", "between", "movers")
    run_plan(plan_of(*launches), arrays, relay.scalars(), 0, outputs=outputs, kernels=folder)
    assert np.array_equal(arrays["out"][:COPIED], arrays["x"][:COPIED])


@pytest.mark.emulator
def test_counters_that_are_not_left_at_zero(folder: Path) -> None:
    source = folder / "relay.cu"
    source.write_text(source.read_text().replace("counters[0] = 0;", ""))
    with pytest.raises(EmulatorError, match="relay leaves its counters at"):
        copied(relay.launch(Relay(counted=True)), folder, 0)


@pytest.mark.emulator
def test_only_outputs_may_be_written(folder: Path) -> None:
    with pytest.raises(EmulatorError, match="into array 3, which is read-only"):
        run_launch(
            relay.launch(Relay()), relay.arrays(), relay.scalars(), 0, outputs=(), kernels=folder
        )
