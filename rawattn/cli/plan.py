# SPDX-License-Identifier: Apache-2.0
"""``plan``: which backend takes a problem, why others do not, and what it launches."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from rawattn.cli import flags, paged_flags
from rawattn.device import Device
from rawattn.paged_call import plans as paged_plans
from rawattn.plan import Launch, Plan, dense, paged
from rawattn.problem import Unsupported
from rawattn.settings import forced_backend


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of a plan, and 0; with 2 the reasons of all backends, where none takes the problem."""
    problem = paged_flags.request(args).problem if args.cache else flags.problem(args)
    device = flags.device(args)
    asked = {
        "problem": problem_facts(problem),
        "device": {"name": device.name, "arch": device.arch, "sms": device.sms},
    }
    try:
        steps = plans(args, device)
    except Unsupported:
        backends: Any = paged.BACKENDS if args.cache else dense.BACKENDS
        forced = forced_backend(args.backend, backends)
        reasons = {b.name: b.refuses(problem, device) for b in backends if forced in (None, b.name)}
        if None in reasons.values():  # what nobody takes is a step before attention
            raise
        passed_over = [f"{name}: {reason}" for name, reason in reasons.items()]
        return {**asked, "backend": None, "passed_over": passed_over}, 2
    attention = steps[-1]
    return {
        **asked,
        "backend": attention.backend,
        "passed_over": list(attention.why),
        "workspace_bytes": attention.workspace_bytes,
        "launches": [_launch_facts(launch) for step in steps for launch in step.launches],
    }, 0


def plans(args: Namespace, device: Device) -> list[Plan]:
    """Of all steps of the call that the flags describe, attention the last.

    Raises what the public functions raise, `Unsupported` among it.
    """
    if args.cache:
        return paged_plans(paged_flags.request(args), device)
    backend = forced_backend(args.backend, dense.BACKENDS)
    return [dense.plan(flags.problem(args), device, backend)]


def problem_facts(problem: Any) -> dict[str, Any]:
    """The fields of a Problem or a PagedProblem, those of its mask and its scores among them."""
    facts = asdict(problem)
    mask, scores = facts.pop("mask"), facts.pop("scores")
    words = [name for name, is_set in scores.items() if is_set]
    window = {"window_left": mask["left"], "window_right": mask["right"]}
    aligned = "top_left" if problem.mask.top_left else "bottom_right"
    plain = {n: x.value if isinstance(x, enum.Enum) else x for n, x in facts.items()}
    return {**plain, **window, "diagonal": aligned, "scores": " ".join(words) or None}


def _launch_facts(launch: Launch) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "threads": launch.config.threads,
        "smem_bytes": launch.config.smem_bytes,
        "config": asdict(launch.config),  # type: ignore[call-overload]
        "scalars": dict(launch.scalars),
    }
