# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache: the ordered list of backends."""

from __future__ import annotations

import functools

from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import decode, fwd_sm90_paged, paged_v1, paged_v2
from rawattn.plan.base import REFERENCE, Backend, Plan, choose

PROMPTS = Backend(
    name="fwd_sm90_paged", refuses=fwd_sm90_paged.refuses, launches=fwd_sm90_paged.launches
)
BACKENDS = (
    Backend(name="decode_split", refuses=decode.refuses, launches=decode.launches),
    PROMPTS,
    Backend(name="paged_v2", refuses=paged_v2.refuses, launches=paged_v2.launches),
    Backend(name="paged_v1", refuses=paged_v1.refuses, launches=paged_v1.launches),
    REFERENCE,
)


@functools.lru_cache(maxsize=4096)
def plan(problem: PagedProblem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; `backend` forces one by name.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
    """
    prompts_first = fwd_sm90_paged.pays(problem, device)
    order = sorted(BACKENDS, key=lambda b: b is not PROMPTS) if prompts_first else BACKENDS
    return choose(order, problem, device, backend)
