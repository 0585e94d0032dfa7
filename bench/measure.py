# SPDX-License-Identifier: Apache-2.0
"""One case: check every candidate against float64, time those that pass in turn, make rows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from bench import timer
from bench.cases import Case, Tensors, poison
from bench.check import steps
from bench.rows import Row, commit, sources_digest
from rawattn import roofline
from rawattn.device import Device
from rawattn.problem import Mask
from rawattn.roofline.counts import Lengths

CLEAR = 8  # times the size of L2 that is read to clear it


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that computes a case: one of our backends, a variant of one, or a peer."""

    backend: str
    run: Callable[[], Any]  # launches, and returns the output (B, Sq, Hq, Dv), anything with DLPack
    config: str = ""
    peer_version: str = ""
    expected: Any = None  # of its output, where that is another than the case's
    problem: Any = None  # likewise: what it computes


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuState:
    """What nvidia-smi says at one moment."""

    driver: str
    clock_mhz: int
    temperature_c: int

    @staticmethod
    def now() -> GpuState:
        import cupy

        command = [
            "nvidia-smi",
            f"--id={cupy.cuda.Device().pci_bus_id}",
            "--query-gpu=driver_version,clocks.sm,temperature.gpu",
            "--format=csv,noheader,nounits",
        ]
        found = subprocess.run(command, check=True, capture_output=True, text=True)
        driver, clock, temperature = found.stdout.strip().split(", ")
        return GpuState(driver=driver, clock_mhz=int(clock), temperature_c=int(temperature))


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all candidates of one measurement share."""

    op: str
    case: Case
    device: Device
    before: GpuState
    after: GpuState
    l2: str
    timestamp: str


def measure(
    op: str, case: Case, candidates: Sequence[Candidate], tensors: Tensors, *, rounds: int
) -> list[Row]:
    """A row for every candidate whose output is right; the others are printed and not timed."""
    ratios = error_ratios(case, candidates, tensors)
    right = [c for c in candidates if ratios[c.backend] <= 1]
    for c in candidates:
        if c not in right:
            print(f"WRONG {case.id} {c.backend} {c.config}: error ratio {ratios[c.backend]:.3g}")
    if not right:
        return []
    device, stream = Device.current(), timer.CupyStream()
    exceeded = tensors.nbytes > 2 * device.l2_bytes and not tensors.always_clear
    runs = {c.backend: c.run for c in right}
    before = GpuState.now()  # takes a while, in which the GPU cools: so the warm-up comes after it
    timer.warm_up(runs, stream)
    clear = None if exceeded else timer.clear_l2(CLEAR * device.l2_bytes)
    times = timer.interleave(runs, stream, rounds=rounds, before=clear)
    setting = Setting(
        op=op,
        case=case,
        device=device,
        before=before,
        after=GpuState.now(),
        l2="exceeded" if exceeded else "cleared",
        timestamp=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )
    return [make_row(setting, c, times[c.backend], ratios[c.backend]) for c in right]


def error_ratios(case: Case, candidates: Sequence[Candidate], tensors: Tensors) -> dict[str, float]:
    """Backend -> largest error of its output over the bound; `tensors.out` starts as NaN."""
    import cupy

    t = tensors
    expected = t.expected(case.problem, cupy)
    ratios = {}
    for c in candidates:
        poison(t.out)
        own = expected if c.expected is None else c.expected
        ratios[c.backend] = own.error_ratio(cupy.from_dlpack(c.run()), cupy)
    return ratios


def problem_columns(p: Any, lengths: Lengths | None) -> dict[str, Any]:
    """What a row says of a problem of any class; 0 and "" for what it does not have."""
    mask, layout = getattr(p, "mask", Mask()), getattr(p, "layout", None)
    rows = getattr(p, "q_rows", None)
    keys = sorted(keys for _, keys in lengths or ())
    return {
        "dtype": getattr(p, "dtype", ""),
        "batch": getattr(p, "batch", 0),
        "q_heads": getattr(p, "q_heads", getattr(p, "heads", 0)),
        "kv_heads": getattr(p, "kv_heads", 0),
        "head_dim": getattr(p, "head_dim", 0),
        "value_dim": getattr(p, "value_dim", 0),
        "max_q": getattr(p, "max_q", getattr(p, "tokens", 0)),
        "max_k": getattr(p, "max_k", 0),
        "window_left": mask.left,
        "window_right": mask.right,
        "top_left": mask.top_left,
        "rows": rows.value if rows is not None else "",
        "scores": " ".join(sorted(steps(p))),
        "kv_dtype": getattr(p, "cache_dtype", ""),
        "page_size": getattr(p, "page", 0),
        "layout": layout.value if layout is not None else "",
        "lengths": f"{keys[0]} to {keys[-1]}, {sum(keys)} in all" if keys else "",
    }


def make_row(setting: Setting, candidate: Candidate, times: Sequence[float], ratio: float) -> Row:
    """The row of one candidate from its launch times in microseconds."""
    s, p = setting, candidate.problem or setting.case.problem
    p20, p50, p80 = (float(x) for x in np.quantile(times, (0.2, 0.5, 0.8)))
    lengths = getattr(s.case, "lengths", None)
    limit = roofline.limit(p, s.device, lengths)
    exact = lengths is not None or getattr(p, "mask", Mask()).left >= 0
    flops = limit.work.flops if exact else roofline.convention_flops(p)
    return Row(
        op=s.op,
        case=s.case.id,
        **problem_columns(p, lengths),
        backend=candidate.backend,
        config=candidate.config,
        n=len(times),
        p20_us=round(p20, 2),
        p50_us=round(p50, 2),
        p80_us=round(p80, 2),
        tflops=round(flops / p50 / 1e6, 1),
        gb_per_s=round(limit.work.bytes / p50 / 1e3, 1),
        roofline_percent=round(100 * limit.efficiency(p50 / 1e6), 2),
        bound=limit.bound,
        error_ratio=round(ratio, 3),
        l2=s.l2,
        gpu=s.device.name,
        driver=s.before.driver,
        clock_before_mhz=s.before.clock_mhz,
        clock_after_mhz=s.after.clock_mhz,
        temperature_before_c=s.before.temperature_c,
        temperature_after_c=s.after.temperature_c,
        commit=commit(),
        sources=sources_digest(),
        peer_version=candidate.peer_version,
        timestamp=s.timestamp,
    )
