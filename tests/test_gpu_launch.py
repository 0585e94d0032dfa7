# SPDX-License-Identifier: Apache-2.0
"""What a launch of sm_90 may have, on a GPU: tensor maps, clusters, dependence, counters."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rawattn import launch
from rawattn.arrays import view
from rawattn.device import Device
from rawattn.plan import Launch, Plan
from tests import relay
from tests.relay import Relay

pytestmark = pytest.mark.gpu

COPIED = sum(relay.LENGTHS)
CONFIGS = [Relay(), Relay(counted=True), Relay(cluster=2), Relay(cluster=4, rows=128)]


@pytest.fixture(autouse=True)
def cupy(tmp_path: Path) -> Iterator[Any]:
    if Device.current().arch != "sm_90a":
        pytest.skip("needs a Hopper GPU")
    with relay.registered(tmp_path):
        yield importlib.import_module("cupy")


class Copy:
    """Launches on arrays of their own, of which `extra` have the shape of x. `shared`: the heads of
    x are one.
    """

    def __init__(
        self, cupy: Any, *launches: Launch, extra: tuple[str, ...] = (), shared: bool = False
    ) -> None:
        arrays = relay.arrays()
        self.arrays = {name: cupy.asarray(x) for name, x in arrays.items()}
        for name in ("x", "out", *extra):  # with their gaps
            whole = cupy.full((*arrays["x"].shape[:2], relay.COLUMNS + 8), np.nan, np.float16)
            self.arrays[name] = whole[:, :, : relay.COLUMNS]
        self.arrays["x"][:] = cupy.asarray(arrays["x"])
        if shared:
            x = self.arrays["x"]
            self.arrays["x"] = cupy.broadcast_to(x[:, :1], x.shape)
        plan = Plan(problem=None, device=Device.current(), backend="relay", launches=launches)
        specs = {name: view(name, x).spec for name, x in self.arrays.items()}
        self.template = launch.Template(plan, 0, relay.scalars(), specs)
        self.packed = self.template.pack([x.data.ptr for x in self.arrays.values()])

    def check(self, config: Relay) -> None:
        x, out, movers = (self.arrays[n].get() for n in ("x", "out", "movers"))
        assert np.array_equal(out[:COPIED], x[:COPIED])
        assert np.isnan(out[COPIED:]).all(), "rows behind the last sequence are not written"
        items = -(-max(relay.LENGTHS) // config.rows) * len(relay.LENGTHS) * relay.HEADS
        assert (movers[:items] >= 0).all() and (movers[items:] == -1).all()

    def reset(self) -> None:
        self.arrays["out"][:] = np.nan
        self.arrays["movers"][:] = -1


@pytest.mark.parametrize("config", CONFIGS)
def test_launches(cupy: Any, config: Relay) -> None:
    copy = Copy(cupy, relay.launch(config))
    for _ in range(3):  # the second finds what the first leaves
        copy.reset()
        copy.packed()
        copy.check(config)


def test_heads_that_are_one(cupy: Any) -> None:
    """A stride of 0."""
    copy = Copy(cupy, relay.launch(Relay()), shared=True)
    assert copy.arrays["x"].strides[1] == 0
    copy.packed()
    copy.check(Relay())


def test_dependent_launches(cupy: Any) -> None:
    """Each may begin while the one before it runs, and waits for it."""
    config = Relay(dependent=True)
    hops = [relay.launch(config, target="b"), relay.launch(config, source="b")]
    copy = Copy(cupy, *hops, extra=("b",))
    for n in range(20):
        copy.reset()
        copy.arrays["x"][:] += np.float16(n)
        copy.packed()
        copy.check(config)


def test_streams_side_by_side(cupy: Any) -> None:
    config = Relay(counted=True)
    copies = [Copy(cupy, relay.launch(config, blocks=8)) for _ in range(4)]
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in copies]
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(50):
        for copy, stream in zip(copies, streams, strict=True):
            with stream:
                copy.reset()
                copy.packed()
    cupy.cuda.runtime.deviceSynchronize()
    for copy in copies:
        copy.check(config)


def test_graphs_beside_launches(cupy: Any) -> None:
    """A captured launch shares its counters with nobody who writes another output."""
    config = Relay(counted=True)
    captured, plain = (Copy(cupy, relay.launch(config, blocks=8)) for _ in range(2))
    recording, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    with recording:
        recording.begin_capture()
        # packed anew, as a call without a plan does
        captured.template.pack([x.data.ptr for x in captured.arrays.values()])()
        graph = recording.end_capture()
    cupy.cuda.runtime.deviceSynchronize()
    for _ in range(50):
        with recording:
            captured.reset()
            graph.launch()
        with other:
            plain.reset()
            plain.packed()
    cupy.cuda.runtime.deviceSynchronize()
    for copy in (captured, plain):
        copy.check(config)
