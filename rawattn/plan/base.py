# SPDX-License-Identifier: Apache-2.0
"""What every planner shares: what a plan is, and the ordered choice among backends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rawattn.device import Device
from rawattn.problem import Unsupported
from rawattn.registry import Config

ELEMENTS = {"float16": "fp16", "bfloat16": "bf16"}
MAX_GRID = 2**31 - 1  # blocks that CUDA launches


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One kernel launch. `scalars` are the Params fields that the plan decides."""

    kernel: str
    config: Config
    grid: int
    scalars: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What will run. `why` names the backends passed over, and the reasons for what was chosen."""

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
            return Plan(
                problem=problem,
                device=device,
                backend=candidate.name,
                launches=() if problem.empty else candidate.launches(problem, device),
                why=tuple(passed_over),
            )
        passed_over.append(f"{candidate.name}: {reason}")
    raise Unsupported(f"no backend for {problem}: " + "; ".join(passed_over))
