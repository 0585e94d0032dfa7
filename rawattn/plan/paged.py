# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged cache: the ordered list of backends, and when one passes another."""

from __future__ import annotations

import functools
from dataclasses import replace

from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import decode, fwd_sm90_paged, paged_v1, paged_v2
from rawattn.plan.base import REFERENCE, Backend, Plan, choose

PROMPTS = Backend(
    name="fwd_sm90_paged", refuses=fwd_sm90_paged.refuses, launches=fwd_sm90_paged.launches
)
# Why PROMPTS passes the backend in front of it, which takes all that PROMPTS takes.
LONGER = "decode_split: takes longer than fwd_sm90_paged, as that estimates it"
BACKENDS = (
    Backend(name="decode_split", refuses=decode.refuses, launches=decode.launches),
    PROMPTS,
    Backend(name="paged_v2", refuses=paged_v2.refuses, launches=paged_v2.launches),
    Backend(name="paged_v1", refuses=paged_v1.refuses, launches=paged_v1.launches),
    REFERENCE,
)


@functools.lru_cache(maxsize=4096)
def plan(problem: PagedProblem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; `backend` forces one by name. Where none does, prompts
    are for fwd_sm90_paged as soon as that pays, whatever stands in front of it.

    Raises `Unsupported` with the reasons of all backends that refused, ValueError for an unknown
    backend name.
    """
    if backend is None and fwd_sm90_paged.pays(problem, device):
        made = choose(BACKENDS, problem, device, PROMPTS.name)
        return replace(made, why=(LONGER,))
    return choose(BACKENDS, problem, device, backend)
