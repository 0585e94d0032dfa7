# SPDX-License-Identifier: Apache-2.0
"""One case: check every candidate against float64, time those that pass in turn, make rows."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

import numpy as np

from bench import check, timer
from bench.cases import Case, Tensors, poison
from bench.rows import Row, commit, sources_digest
from rawattn import roofline
from rawattn.device import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Something that computes a case: one of our backends, a variant of one, or a peer."""

    backend: str
    run: Callable[[], Any]  # launches, and returns the output (B, Sq, Hq, Dv), anything with DLPack
    config: str = ""
    peer_version: str = ""


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
    exceeded = tensors.nbytes > 2 * device.l2_bytes
    runs = {c.backend: c.run for c in right}
    timer.warm_up(runs, stream)
    before = GpuState.now()
    clear = None if exceeded else timer.clear_l2(2 * device.l2_bytes)
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
    expected = check.expected(case.problem, t.q, t.k, t.v, scale=t.scale, xp=cupy)
    ratios = {}
    for c in candidates:
        poison(t.out)
        ratios[c.backend] = expected.error_ratio(cupy.from_dlpack(c.run()), cupy)
    return ratios


def make_row(setting: Setting, candidate: Candidate, times: Sequence[float], ratio: float) -> Row:
    """The row of one candidate from its launch times in microseconds."""
    p, s = setting.case.problem, setting
    p20, p50, p80 = (float(x) for x in np.quantile(times, (0.2, 0.5, 0.8)))
    limit = roofline.limit(p, s.device)
    return Row(
        op=s.op,
        case=s.case.id,
        dtype=p.dtype,
        batch=p.batch,
        q_heads=p.q_heads,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        max_q=p.max_q,
        max_k=p.max_k,
        window_left=p.mask.left,
        window_right=p.mask.right,
        top_left=p.mask.top_left,
        backend=candidate.backend,
        config=candidate.config,
        n=len(times),
        p20_us=round(p20, 2),
        p50_us=round(p50, 2),
        p80_us=round(p80, 2),
        tflops=round(roofline.convention_flops(p) / p50 / 1e6, 1),
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
