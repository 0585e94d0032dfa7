# SPDX-License-Identifier: Apache-2.0
"""Host time: of one call with and without a plan beside a bare launch, of compiling, of importing.

    python bench/host_time.py [--out DIR]

Without a GPU only compiling, the disk cache and importing are measured, for sm_90a.
"""

from __future__ import annotations

import argparse
import os
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

from bench import decode
from bench.cases import random_tensors
from bench.decode_cases import decode as decode_case
from bench.rows import RESULTS, ROOT, append, commit, results_path, sources_digest
from rawattn.compile import CompileError, nvrtc_version
from rawattn.dense import flash_attn_func
from rawattn.device import Device
from rawattn.prepared import prepare
from rawattn.problem import Problem

CALLS, ROUNDS = 100, 51
PROCESSES = 3
DECODE = ", decode"  # ends the names of what is measured of a step of decoding
TINY_DECODE = decode_case(1, 64, heads=(8, 2))
COMPILED = tuple(f"{name} d{d}" for name in ("fwd_sm80", "fwd_sm90") for d in (64, 128, 256))
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

# Run by fresh processes, with the architecture and what is `COMPILED` as arguments. Each prints
# seconds, one line a measurement.
IMPORT = """
import time
start = time.perf_counter()
import rawattn
print(time.perf_counter() - start)
"""
LAUNCHES = """
import sys, time
from dataclasses import replace
from bench.cases import SUITES
from rawattn import compile, device, launch, plan, registry
arch, *names = sys.argv[1:]
gpu = replace(device.Device.named("H200"), arch=arch)
def launches():
    for backend, size in map(str.split, names):
        case, = SUITES[backend].select(f"{size}-full-s1024", False)
        yield plan.plan(case.problem, gpu, backend).launches[0]
def timed(function, *arguments):
    start = time.perf_counter()
    function(*arguments)
    print(time.perf_counter() - start)
"""
CUBIN = f"""{LAUNCHES}
import os
os.sched_setaffinity(0, {{min(os.sched_getaffinity(0))}})
for x in launches():
    timed(compile.cubin, registry.KERNELS[x.kernel], x.config, arch)
"""
LOAD = f"""{LAUNCHES}
device.import_cupy().zeros(1)
for x in launches():
    timed(launch.load, x.kernel, x.config, 0)
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
        env={**os.environ, "RAWATTN_CACHE_DIR": cache},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return [1e6 * float(line) for line in done.stdout.split()]


def measure_processes(arch: str, *, gpu: bool) -> dict[str, list[float]]:
    """Import, cold compile on one core, disk cache, loading: microseconds, in fresh processes."""
    stages = {"compile": CUBIN, "find in the disk cache": CUBIN}
    if gpu:
        stages["load from the disk cache"] = LOAD
    times: dict[str, list[float]] = {}
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as cache:
            times.setdefault("import rawattn", []).extend(fresh(IMPORT, cache=cache))
            for stage, script in stages.items():
                found = fresh(script, arch, *COMPILED, cache=cache)
                for name, us in zip(COMPILED, found, strict=True):
                    first = ", first of its process" if name == COMPILED[0] else ""
                    times.setdefault(f"{stage}: {name}{first}", []).append(us)
    return times


def measure_calls() -> dict[str, list[float]]:
    """A tiny call without a plan, with one, and the bare launch of what it launches."""
    import cupy
    from cuda.bindings import driver

    t = random_tensors(TINY)
    q, k, v, out = t.q, t.k, t.v, t.out
    plan = prepare(flash_attn_func, q, k, v, causal=True, out=out)
    flash_attn_func(q, k, v, causal=True, out=out, plan=plan)
    ((config, function, arguments, _),) = plan._packed.on(cupy.cuda.get_current_stream().ptr)
    bare = driver.cuLaunchKernelEx
    runs = {
        "bare cuLaunchKernelEx": lambda: bare(config, function, arguments, 0),
        "call with plan and out": lambda: flash_attn_func(q, k, v, causal=True, out=out, plan=plan),
        "call with out": lambda: flash_attn_func(q, k, v, causal=True, out=out),
        "call": lambda: flash_attn_func(q, k, v, causal=True),
    }
    return interleaved_host(runs, cupy.cuda.get_current_stream().synchronize)


def measure_decode_calls() -> dict[str, list[float]]:
    """A short step of decoding without a plan, with one, and the bare launches of its plan."""
    import cupy
    from cuda.bindings import driver

    tensors = decode.tensors(TINY_DECODE.problem, None, cupy)
    function, arguments = decode.call_of(tensors, "decode_split")
    plan = decode.prepared(tensors, "decode_split")
    plan.run()
    stream = cupy.cuda.get_current_stream()
    ready = [launch for packed in plan._launches for launch in packed.on(stream.ptr)]

    def bare() -> None:
        for config, kernel, packed, _ in ready:
            driver.cuLaunchKernelEx(config, kernel, packed, 0)

    runs = {
        "bare cuLaunchKernelEx": bare,
        "call of plan.run": plan.run,
        "call with plan and out": lambda: function(**arguments, plan=plan),
        "call with out": lambda: function(**arguments),
    }
    times = interleaved_host(runs, stream.synchronize)
    return {f"{what}{DECODE}": us for what, us in times.items()}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        nvrtc_version()
    except CompileError as error:
        print(f"bench/host_time.py: {error}", file=sys.stderr)
        return 1
    try:
        device = Device.current()
    except RuntimeError as error:
        print(f"calls are not measured: {error}")
        device = Device.host()
    gpu = "" if device.arch == "host" else device.name
    times = measure_calls() | measure_decode_calls() if gpu else {}
    times |= measure_processes(device.arch if gpu else "sm_90a", gpu=bool(gpu))
    rows = [host_row(what, us, gpu) for what, us in times.items()]
    append(results_path(args.out, gpu or "no-gpu", "host_time"), rows)
    bare = {r.what.endswith(DECODE): r.p50_us for r in rows if r.what.startswith("bare")}
    for row in rows:
        least = bare.get(row.what.endswith(DECODE))
        over = f"  {row.p50_us - least:+7.1f} us over bare" if least and "call" in row.what else ""
        print(f"{row.what:60s} {row.p50_us:12.1f} us{over}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
