# SPDX-License-Identifier: Apache-2.0
"""Forward calls, dense and varlen: the ordered list of backends."""

from __future__ import annotations

import functools

from rawattn.device import Device
from rawattn.plan import fwd_sm80
from rawattn.plan.base import Backend, Plan, choose
from rawattn.problem import Problem


def _refuse_reference(p: Problem, device: Device) -> str | None:
    return None if device.arch == "host" else f"takes NumPy arrays, found arrays on {device.name}"


BACKENDS = (
    Backend(name="fwd_sm80", refuses=fwd_sm80.refuses, launches=fwd_sm80.launches),
    Backend(name="reference", refuses=_refuse_reference, launches=lambda p, device: ()),
)


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; `backend` forces one by name.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
    """
    return choose(BACKENDS, problem, device, backend)
