# SPDX-License-Identifier: Apache-2.0
"""The very launches that a plan makes for a GPU, on NumPy arrays."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rawattn import compile, registry
from rawattn.arrays import view
from rawattn.params import Codec, Params
from rawattn.plan import Launch, Plan
from tools.emulator.build import EmulatorError
from tools.emulator.driver import encode, move, run

Numbers = Mapping[str, float]
Arrays = Mapping[str, "np.ndarray | None"]


def run_launch(
    launch: Launch,
    arrays: Arrays,
    scalars: Numbers,
    seed: int,
    *,
    outputs: Sequence[str] = ("out", "lse"),
    kernels: Path | None = None,
    flags: Sequence[str] = (),
    resident: int = 0,
    in_order: bool = False,
) -> None:
    """Runs one launch of any kernel, with its tensor maps, clusters and counters.

    Parameters
    ----------
    arrays : mapping
        What the pointers of its Params and its tensor maps stand for, by name, `workspace` too;
        None where absent.
    scalars : mapping
        The other fields of its Params, but for those that the launch decides. More are no error:
        the launches of a plan share them.
    outputs : sequence
        Names of the arrays that may be written; `workspace` always may.
    kernels : Path
        The folder of the sources, where it is another than the package's.
    flags : sequence
        For g++.
    resident, in_order
        As for `driver.run`: for blocks that wait for one another.

    Raises
    ------
    EmulatorError
        The kernel does what a GPU forbids, or leaves a counter that is not 0.
    """
    kernel = registry.KERNELS[launch.kernel]
    given = {
        name: array if array is None or name in (*outputs, "workspace") else _read_only(array)
        for name, array in arrays.items()
    }
    specs = {name: None if x is None else view(name, x).spec for name, x in given.items()}
    params = Params(launch, scalars, specs, Codec(encode, move))
    counters = np.zeros(params.counters, np.int32)
    addresses = [0 if x is None else x.ctypes.data for x in given.values()]
    argument = params.bind(addresses, counters.ctypes.data)
    run(
        compile.unit(kernel, launch.config),
        compile.entry_name(kernel),
        ctypes.string_at(argument.address, argument.size),
        launch.grid,
        launch.config.threads,
        launch.config.smem_bytes,
        [*(x for x in given.values() if x is not None), counters],
        seed,
        cluster=launch.cluster,
        resident=resident,
        in_order=in_order,
        folders=(kernels or registry.cuda_folder(),),
        flags=flags,
    )
    if counters.any():
        raise EmulatorError(f"{kernel.name} leaves its counters at {counters}, not at 0")


def run_plan(plan: Plan, arrays: Arrays, scalars: Numbers, seed: int, **options: Any) -> None:
    """Runs the launches of a plan, one after the other; `options` are those of `run_launch`.

    Workspace is made here, poisoned, unless it is among the arrays.
    """
    size = plan.workspace_bytes
    arrays = {"workspace": np.full(size, 0xFF, np.uint8) if size else None, **arrays}
    for launch in plan.launches:
        run_launch(launch, arrays, scalars, seed, **options)


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.view()
    array.flags.writeable = False
    return array
