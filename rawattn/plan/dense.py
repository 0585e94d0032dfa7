# SPDX-License-Identifier: Apache-2.0
"""Forward calls, dense and varlen: the ordered list of backends."""

from __future__ import annotations

import functools

from rawattn.device import Device
from rawattn.plan import fwd_sm80, fwd_sm90
from rawattn.plan.base import REFERENCE, Backend, Plan, choose
from rawattn.problem import Problem

BACKENDS = (
    Backend(name="fwd_sm90", refuses=fwd_sm90.refuses, launches=fwd_sm90.launches),
    Backend(name="fwd_sm80", refuses=fwd_sm80.refuses, launches=fwd_sm80.launches),
    REFERENCE,
)


@functools.lru_cache(maxsize=4096)
def plan(problem: Problem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; `backend` forces one by name.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
    """
    return choose(BACKENDS, problem, device, backend)
