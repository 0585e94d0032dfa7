# SPDX-License-Identifier: Apache-2.0
"""Problem x Device -> Plan: which backend, which Config, which grid, and why. Pure Python; no GPU,
no CuPy.

A backend is a name and a function that says why it refuses a problem (None: it takes it). The first
of a list of backends that does not refuse wins, but for prompts over pages, which may be quicker in
the second one (`paged.plan`); `backend=` or ``RAWATTN_BACKEND`` forces one. One file here plans one
kernel: its tile sizes live there and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from rawattn.device import Device
from rawattn.plan import (
    decode,
    decode_sm90,
    fwd_sm80,
    fwd_sm90,
    fwd_sm90_paged,
    kv_write,
    merge,
    paged,
    paged_v1,
    paged_v2,
)
from rawattn.plan.base import MAX_GRID, Backend, Launch, Plan
from rawattn.plan.dense import BACKENDS, plan
from rawattn.registry import Config

__all__ = [
    "BACKENDS",
    "LAUNCHES",
    "MAX_GRID",
    "NAMES",
    "Backend",
    "Launch",
    "Plan",
    "configs",
    "plan",
]

# Of the backends of all operations.
NAMES = tuple(
    dict.fromkeys(
        backend.name
        for backends in (BACKENDS, paged.BACKENDS, merge.BACKENDS, *kv_write.BACKENDS.values())
        for backend in backends
    )
)

CONFIGS: dict[str, Callable[[str], Iterator[Config]]] = {
    "fwd_sm80": fwd_sm80.configs,
    "fwd_sm90": fwd_sm90.configs,
    "fwd_sm90_self": fwd_sm90.self_configs,
    "fwd_sm90_paged": fwd_sm90_paged.configs,
    "kv_write": kv_write.configs,
    "rotary": kv_write.rotary_configs,
    "sequences": kv_write.sequences_configs,
    "copy_blocks": kv_write.copy_configs,
    "merge": merge.configs,
    "paged_v1": paged_v1.configs,
    "paged_v2": paged_v2.configs,
    "paged_v2_reduce": paged_v2.reduce_configs,
    "decode_split": decode.configs,
    "decode_sm90": decode_sm90.configs,
}
# What makes the launch of any Config, for variants of a plan.
LAUNCHES: dict[str, Callable[[Any, Device, Any], Launch]] = {
    "fwd_sm80": fwd_sm80.launch,
    "fwd_sm90": fwd_sm90.launch,
    "fwd_sm90_self": fwd_sm90.launch,
}


def configs(kernel: str, arch: str) -> Iterator[Config]:
    """Every Config of a kernel that a plan can choose on `arch`."""
    yield from CONFIGS[kernel](arch)
