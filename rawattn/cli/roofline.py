# SPDX-License-Identifier: Apache-2.0
"""``roofline``: FLOPs, bytes, and the least time of a problem on a device."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rawattn import roofline
from rawattn.cli import flags
from rawattn.cli.plan import problem_facts


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of `rawattn.roofline.limit`. ValueError where the peaks are not known."""
    problem, device = flags.problem(args), flags.device(args)
    limit = roofline.limit(problem, device)
    assert device.tflops is not None and device.gb_per_s is not None  # else `limit` has refused
    work = limit.work
    return {
        "problem": problem_facts(problem),
        "device": {"name": device.name, "tflops": device.tflops, "gb_per_s": device.gb_per_s},
        "flops": work.flops,
        "flops_by_convention": roofline.convention_flops(problem),
        "least_bytes": work.bytes,
        "flops_per_byte": work.flops / work.bytes if work.bytes else None,
        "ridge": 1e3 * device.tflops / device.gb_per_s,
        "bound": limit.bound,
        "compute_us": 1e6 * limit.compute_seconds,
        "memory_us": 1e6 * limit.memory_seconds,
        "limit_us": 1e6 * limit.seconds,
    }, 0
