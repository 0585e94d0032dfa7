# SPDX-License-Identifier: Apache-2.0
"""Host time: of one call with and without a plan beside a bare launch, of compiling, of importing.

    python bench/host_time.py [--out DIR]

Without a GPU only compiling, the disk cache and importing are measured, for sm_90a.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from bench.cases import random_tensors
from bench.rows import ROOT, append, commit, results_path, sources_digest
from rawattn.device import Device
from rawattn.problem import Problem

CALLS, ROUNDS = 100, 51
TINY = Problem(
    dtype="bfloat16",
    batch=1,
    q_heads=1,
    kv_heads=1,
    head_dim=64,
    value_dim=64,
    max_q=16,
    max_k=16,
)

# Run by fresh processes. Each prints seconds, one line a measurement.
IMPORT = """
import time
start = time.perf_counter()
import rawattn
print(time.perf_counter() - start)
"""
CUBIN = """
import os, sys, time
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from dataclasses import replace
from bench.cases import SUITES
from rawattn import compile, plan, registry
from rawattn.device import Device
arch, *sizes = sys.argv[1:]
device = replace(Device.named("H200"), arch=arch)
for size in sizes:
    case, = SUITES["fwd_sm80"].select(f"d{size}-full-s1024", False)
    launch, = plan.plan(case.problem, device, "fwd_sm80").launches
    start = time.perf_counter()
    compile.cubin(registry.KERNELS[launch.kernel], launch.config, arch)
    print(time.perf_counter() - start)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRow:
    """Host time of one thing."""

    what: str
    n: int
    p20_us: float
    p50_us: float
    p80_us: float
    cpu: str
    gpu: str  # empty where none was used
    python: str
    commit: str
    sources: str
    timestamp: str


def host_row(what: str, times_us: Sequence[float], gpu: str) -> HostRow:
    p20, p50, p80 = (round(float(x), 3) for x in np.quantile(times_us, (0.2, 0.5, 0.8)))
    return HostRow(
        what=what,
        n=len(times_us),
        p20_us=p20,
        p50_us=p50,
        p80_us=p80,
        cpu=cpu_name(),
        gpu=gpu,
        python=platform.python_version(),
        commit=commit(),
        sources=sources_digest(),
        timestamp=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return found[0] if found else platform.machine()


def interleaved_host(
    runs: dict[str, Callable[[], Any]], synchronize: Callable[[], Any]
) -> dict[str, list[float]]:
    """Microseconds of a call, means of `CALLS` calls, `ROUNDS` of each run in rotating order."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    order = list(runs)
    for _ in range(ROUNDS):
        for name in order:
            run = runs[name]
            start = time.perf_counter()
            for _ in range(CALLS):
                run()
            times[name].append(1e6 * (time.perf_counter() - start) / CALLS)
            synchronize()
        order = order[1:] + order[:1]
    return times


def fresh(script: str, *arguments: str, cache: str) -> list[float]:
    """What a script prints in a process of its own, whose disk cache is the folder `cache`."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={"RAWATTN_CACHE_DIR": cache, **_environment()},
        check=True,
        capture_output=True,
        text=True,
    )
    return [float(line) for line in done.stdout.split()]
