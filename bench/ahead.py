# SPDX-License-Identifier: Apache-2.0
"""Compiles what cases launch, on all cores, before the first is measured."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from bench import candidates, decode
from bench.suite import Case, Suite
from rawattn import plan
from rawattn.cli.compile import compile_all
from rawattn.device import Device
from rawattn.plan import Plan, kv_write, merge, paged
from rawattn.problem import Unsupported
from rawattn.registry import Config

PLANNERS: dict[str, Any] = {  # op: (problem, device, backend) -> Plan
    "forward": plan.plan,
    "decode": paged.plan,
    "merge": merge.plan,
    "kv_write": kv_write.plan,
}


def compile_ahead(cases: Sequence[tuple[Suite, Case]]) -> None:
    """Fills the cache for the current GPU. What does not compile is told when it is measured."""
    start, device = time.perf_counter(), Device.current()
    todo = kernels(cases, device)
    if todo:
        failed = sum(error is not None for error in compile_all(todo, device.arch))
        seconds = time.perf_counter() - start
        print(f"{len(todo)} kernels in {seconds:.1f} s, {failed} failed", file=sys.stderr)


def kernels(cases: Sequence[tuple[Suite, Case]], device: Device) -> list[tuple[str, Config]]:
    """The kernels of all our candidates of some cases."""
    found = {
        (launch.kernel, launch.config)
        for suite, case in cases
        for chosen in _plans(suite, case, device)
        for launch in chosen.launches
    }
    return sorted(found, key=repr)


def _plans(suite: Suite, case: Case, device: Device) -> Iterator[Plan]:
    wanted = [(case.problem, suite.backend)]
    if suite.op == "decode":
        wanted += decode.variants(suite.backend, case.problem)
    if suite.op == "forward":
        wanted += [(twin, suite.backend) for twin in candidates.twins(case.problem).values()]
    for problem, backend in wanted:
        try:
            yield PLANNERS[suite.op](problem, device, backend)
        except (Unsupported, ValueError):  # a gap, which the run prints
            continue
