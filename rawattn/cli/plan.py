# SPDX-License-Identifier: Apache-2.0
"""``plan``: which backend takes a problem, why others do not, and what it launches."""

from __future__ import annotations

import enum
from argparse import Namespace
from dataclasses import asdict
from typing import Any

from rawattn.cli import flags
from rawattn.cli.calls import Call, call_of
from rawattn.device import Device
from rawattn.plan import Launch
from rawattn.plan.fwd_sm90 import DYNAMIC, STATIC
from rawattn.problem import Unsupported
from rawattn.settings import forced_backend

ORDERS = {STATIC: "static", DYNAMIC: "dynamic"}  # of query tiles, TileOrder of cuda/schedule.cuh


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of a plan, and 0; with 2 the reasons of all backends, where none takes the problem."""
    call, device = call_of(args), flags.device(args, "host")
    asked = {
        "problem": problem_facts(call.problem),
        "device": {"name": device.name, "arch": device.arch, "sms": device.sms},
    }
    try:
        steps = call.plans(device)
    except Unsupported:
        passed_over = _reasons(call, args.backend, device)
        if passed_over is None:
            raise
        return {**asked, "backend": None, "passed_over": passed_over}, 2
    of_problem = [step for step in steps if type(step.problem) is type(call.problem)]
    return {
        **asked,
        "backend": of_problem[-1].backend,
        "passed_over": list(dict.fromkeys(why for step in of_problem for why in step.why)),
        "workspace_bytes": max(step.workspace_bytes for step in of_problem),
        "launches": [_launch_facts(launch) for step in steps for launch in step.launches],
    }, 0


def _reasons(call: Call, backend: str | None, device: Device) -> list[str] | None:
    """Why each backend refuses the problem; None where one does not, and nobody takes a step beside
    it, or a part of it.
    """
    forced = forced_backend(backend, call.backends)
    reasons = {
        b.name: b.refuses(call.problem, device) for b in call.backends if forced in (None, b.name)
    }
    if None in reasons.values():
        return None
    return [f"{name}: {reason}" for name, reason in reasons.items()]


def problem_facts(problem: Any) -> dict[str, Any]:
    """The fields of a problem, and of attention those of its mask and its scores among them."""
    facts = asdict(problem)
    mask, scores = facts.pop("mask", None), facts.pop("scores", None)
    plain = {n: x.value if isinstance(x, enum.Enum) else x for n, x in facts.items()}
    if mask is None:
        return plain
    words = [name for name, is_set in scores.items() if is_set]
    window = {"window_left": mask["left"], "window_right": mask["right"]}
    aligned = "top_left" if problem.mask.top_left else "bottom_right"
    return {**plain, **window, "diagonal": aligned, "scores": " ".join(words) or None}


def _launch_facts(launch: Launch) -> dict[str, Any]:
    return {
        "kernel": launch.kernel,
        "grid": launch.grid,
        "threads": launch.config.threads,
        "smem_bytes": launch.config.smem_bytes,
        "config": asdict(launch.config),  # type: ignore[call-overload]
        "scalars": dict(_scalar(*pair) for pair in launch.scalars if not _divides(pair[0])),
    }


def _scalar(name: str, value: int) -> tuple[str, int | str]:
    """A scalar as it is shown: the order of query tiles by its name."""
    return name, ORDERS[value] if name == "schedule" else value


def _divides(name: str) -> bool:
    """Whether a scalar only says how a kernel divides by a number that the plan shows anyway."""
    return name.endswith(("_magic", "_shift"))
