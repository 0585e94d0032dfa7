# SPDX-License-Identifier: Apache-2.0
"""Problem x Device -> Plan: which backend, which Config, which grid, and why. Pure Python; no GPU,
no CuPy.

A backend is a name and a function that says why it refuses a problem (None: it takes it). The first
of a list of backends that does not refuse wins; `backend=` or ``RAWATTN_BACKEND`` forces one. One
file here plans one kernel: its tile sizes live there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Iterator

from rawattn.plan import fwd_sm80
from rawattn.plan.base import MAX_GRID, Backend, Launch, Plan
from rawattn.plan.dense import BACKENDS, plan
from rawattn.registry import Config

__all__ = ["BACKENDS", "MAX_GRID", "Backend", "Launch", "Plan", "configs", "plan"]

CONFIGS = {"fwd_sm80": fwd_sm80.configs}


def configs(kernel: str, arch: str) -> Iterator[Config]:
    """Every Config of a kernel that a plan can choose on `arch`."""
    yield from CONFIGS[kernel](arch)
