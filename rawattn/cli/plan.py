# SPDX-License-Identifier: Apache-2.0
"""``plan``: which backend takes a problem, why others do not, and what it launches."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from rawattn.cli import flags, paged_flags
from rawattn.plan import Launch, dense, paged
from rawattn.problem import Unsupported
from rawattn.settings import forced_backend


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of a plan, and 0; with 2 the reasons of all backends, where none takes the problem."""
    problem = paged_flags.problem(args) if args.cache else flags.problem(args)
    planner: Any = paged if args.cache else dense
    device, forced = flags.device(args), forced_backend(args.backend, planner.BACKENDS)
    asked = {
        "problem": problem_facts(problem),
        "device": {"name": device.name, "arch": device.arch, "sms": device.sms},
    }
    try:
        made = planner.plan(problem, device, forced)
    except Unsupported:
        asked_of = [b for b in planner.BACKENDS if forced in (None, b.name)]
        reasons = [f"{b.name}: {b.refuses(problem, device)}" for b in asked_of]
        return {**asked, "backend": None, "passed_over": reasons}, 2
    return {
        **asked,
        "backend": made.backend,
        "passed_over": list(made.why),
        "workspace_bytes": made.workspace_bytes,
        "launches": [_launch_facts(launch) for launch in made.launches],
    }, 0


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
