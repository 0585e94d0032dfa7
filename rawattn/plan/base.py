# SPDX-License-Identifier: Apache-2.0
"""What every planner shares: what a plan is, and the ordered choice among backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rawattn.device import Device
from rawattn.problem import Unsupported
from rawattn.registry import KERNELS, Config

# Storage types: dtype -> C++ type of cuda/types.cuh.
ELEMENTS = {"float16": "fp16", "bfloat16": "bf16"}  # what tensor cores take
FLOATS = {**ELEMENTS, "float32": "float"}
EIGHT_BIT = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2", "int8": "int8"}  # of caches
TYPES = {**FLOATS, **EIGHT_BIT}
MAX_GRID = 2**31 - 1  # blocks that CUDA launches
RAGGED = 2**30  # of `TensorMap.ragged`: more rows than a sequence may have


class Part(NamedTuple):
    """A dimension of a tensor map along a part of an axis: `size` elements that are `step` apart;
    0: as many as the axis has, which `step` must divide.

    ``(Part(2, 1, group), Part(2, group))`` splits heads in those of a group, and groups.
    """

    axis: int
    step: int
    size: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMap:
    """A field of Params that describes an array to the tensor copies (TMA) of Hopper.

    Axes count as in a dense array (batch, row, head, column); a packed one has a batch of 1. An
    axis may be left out where it has one element.
    """

    field: str  # ptx::TensorMap of Params
    array: str  # argument of the call
    box: tuple[int, ...]  # elements of each dimension that one copy moves, innermost first
    axes: tuple[int | Part, ...] = (3, 1, 2, 0)  # dimensions, innermost first
    swizzle: int = 128  # bytes: 0, 32, 64 or 128; a row of the box has no more
    l2: int = 256  # bytes that L2 fetches at least: 0, 64, 128 or 256
    # Whether copies end where a sequence does: what lies behind is neither read nor written. Axes
    # are (3, 1, 2), and two dimensions follow. Row i of a sequence of `length` rows from `first` on
    # is at (column, RAGGED - length + i, head, RAGGED, first + length): clipped in the second one,
    # at an address from which 2**64 drops out. The sequences of a dense array are taken as rows of
    # a packed one, a whole number of rows apart.
    ragged: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch. `scalars` are the Params fields that the plan decides."""

    kernel: str
    config: Config
    grid: int  # blocks
    scalars: tuple[tuple[str, int], ...] = ()
    maps: tuple[TensorMap, ...] = ()
    cluster: int = 1  # blocks of a cluster; divides the grid
    # Whether it may start before the launch in front of it on the stream has ended: the kernel
    # executes griddepcontrol.wait before it touches what that one wrote or reads, counters included
    dependent: bool = False
    # int32 in device memory that Params::tile_counter points to, where there is such a field: 0
    # when the kernel starts, and it leaves them 0
    counters: int = 8
    # that Params::workspace points to, where there is such a field: 16-byte aligned, they hold
    # anything at first. The launches of a plan share them.
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `why` names the backends passed over, each with the reason: what it refuses,
    or that it takes longer. Where a backend was forced it is empty.
    """

    problem: Any  # what the call asks, as one of the problem classes of `problem.py`
    device: Device
    backend: str
    launches: tuple[Launch, ...] = ()
    workspace_bytes: int = 0
    why: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    name: str
    refuses: Callable[[Any, Device], str | None]  # of a problem; None: it takes it
    launches: Callable[[Any, Device], tuple[Launch, ...]]


def refuses_device(kernel: str, device: Device) -> str | None:
    """Why a kernel does not run on a device; None: it does."""
    accepted = KERNELS[kernel].architectures
    if device.arch == "host":
        return "needs CUDA arrays, found NumPy arrays"
    if device.arch not in accepted:
        one_of = "one of " if len(accepted) > 1 else ""
        return f"needs {one_of}{', '.join(accepted)}, found {device.arch}"
    return None


def _refuse_reference(p: Any, device: Device) -> str | None:
    return None if device.arch == "host" else f"takes NumPy arrays, found arrays on {device.name}"


# NumPy: what the caller computes where a plan has no launches.
REFERENCE = Backend(name="reference", refuses=_refuse_reference, launches=lambda p, device: ())


def choose(backends: Sequence[Backend], problem: Any, device: Device, forced: str | None) -> Plan:
    """The plan of the first backend that does not refuse, or of the one that is forced by name.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
    """
    names = [b.name for b in backends]
    if forced is not None and forced not in names:
        raise ValueError(f"backend={forced!r}: accepted are {', '.join(names)}")
    passed_over: list[str] = []
    for candidate in backends:
        if forced is not None and candidate.name != forced:
            continue
        reason = candidate.refuses(problem, device)
        if reason is None:
            launches = () if problem.empty else candidate.launches(problem, device)
            return Plan(
                problem=problem,
                device=device,
                backend=candidate.name,
                launches=launches,
                workspace_bytes=max((launch.workspace_bytes for launch in launches), default=0),
                why=tuple(passed_over),
            )
        passed_over.append(f"{candidate.name}: {reason}")
    raise Unsupported(f"no backend for {problem}: " + "; ".join(passed_over))
