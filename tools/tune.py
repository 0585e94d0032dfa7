# SPDX-License-Identifier: Apache-2.0
"""Time other Configs of a kernel, interleaved with a peer, on cells of a bench suite. Needs a GPU.

    python tools/tune.py FILE.py --suite fwd_sm80 --case 'd128-*' --out DIR

FILE.py defines ``VARIANTS``, a list of (label, overrides). Overrides are Config fields, scalars of
the launch such as ``head_group``, and ``grid``; the planned Config supplies the rest. One that has
``head_dim``, ``value_dim`` or ``element`` is used for the cells of that kind alone. A whole Config
is taken too, also of another kernel, and `grid` makes products:

    from tools.tune import grid
    VARIANTS = [("planned", {}), *grid(head_dim=[128], block_m=[64, 128], warps=[4, 8])]

All Configs are compiled first, in parallel; what does not compile, or does not fit the GPU, is
printed and left out; each is compared with float64 before it is timed.
"""

from __future__ import annotations

import argparse
import itertools
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.candidates import launch_text, peer_candidates, variant_candidate
from bench.cases import SUITES, Case, Suite, random_tensors
from bench.measure import measure
from bench.report import geometric_mean
from bench.rows import Row, append, groups
from rawattn import compile, plan
from rawattn.cli.workers import each
from rawattn.device import Device
from rawattn.registry import KERNELS, Config

Overrides = dict[str, Any]
KIND = ("element", "head_dim", "value_dim")


def grid(**lists: Sequence[Any]) -> list[tuple[str, Overrides]]:
    """Every combination of field values, labelled by those that differ between combinations."""
    names = [n for n, values in lists.items() if len(values) > 1]
    combinations = [
        dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())
    ]
    return [(" ".join(f"{_initials(n)}{_short(c[n])}" for n in names), c) for c in combinations]


def _initials(name: str) -> str:
    return "".join(word[0] for word in name.split("_"))


def _short(value: Any) -> str:
    return str(int(value)) if isinstance(value, (bool, int)) else str(value)


def varied(planned: plan.Plan, overrides: Overrides | Config) -> plan.Plan | None:
    """A plan with other Config fields or scalars; None where the overrides are for another kind."""
    (launch,) = planned.launches
    kernel, config = launch.kernel, launch.config
    others: Overrides = {}
    if isinstance(overrides, dict):
        names = {field.name for field in fields(config)}  # type: ignore[arg-type]
        others = {name: value for name, value in overrides.items() if name not in names}
        config = replace(config, **{n: v for n, v in overrides.items() if n in names})
    else:
        config = overrides
        kernel = next(k.name for k in KERNELS.values() if k.config is type(config))
    if any(getattr(config, name) != getattr(launch.config, name) for name in KIND):
        return None
    made = plan.LAUNCHES[kernel](planned.problem, planned.device, config)
    scalars = dict(made.scalars)
    unknown = others.keys() - scalars.keys() - {"grid"}
    if unknown:
        raise TypeError(f"{kernel} has neither fields nor scalars {', '.join(sorted(unknown))}")
    grid = others.pop("grid", made.grid)
    made = replace(made, grid=grid, scalars=tuple((scalars | others).items()))
    return replace(planned, launches=(made,), workspace_bytes=made.workspace_bytes)


def _compiled(kernel: str, config: Config, device: Device) -> str:
    """One line on what ptxas made of a Config; "error: ..." where it does not compile or fit."""
    if config.smem_bytes > device.smem_per_block:
        return f"error: {config.smem_bytes} bytes of shared memory, has {device.smem_per_block}"
    try:
        r = compile.resources(KERNELS[kernel], config, device.arch)
    except compile.CompileError as error:
        reasons = [line for line in str(error).splitlines() if "error" in line]
        return f"error: {reasons[0] if reasons else error}"
    spills = f", {r.spill_stores + r.spill_loads} bytes of spills" if r.spill_stores else ""
    warnings = "".join(f", {line}" for line in r.warnings)
    return f"{r.registers} registers, {config.smem_bytes >> 10} KiB{spills}{warnings}"


def compile_all(launches: set[plan.Launch], device: Device) -> set[plan.Launch]:
    """Compile on every core, into the disk cache; the launches that compiled and fit the device."""
    good, todo = set(), {(x.kernel, x.config): x for x in launches}
    keys = list(todo)
    items = [(*key, device) for key in keys]
    for place, said in each(_compiled, items, os.cpu_count() or 1):
        print(f"{said}: {launch_text(todo[keys[place]])}", flush=True)
        if not said.startswith("error"):
            good.add(keys[place])
    return {x for x in launches if (x.kernel, x.config) in good}


def time_configs(
    suite: Suite,
    cells: Sequence[Case],
    variants: Sequence[tuple[str, Overrides | Config]],
    *,
    peers: Sequence[str] = ("fa2",),
    rounds: int = 13,
    path: Path | None = None,
) -> list[Row]:
    """Rows of every variant, its label as `backend`, and of the peers, cell by cell.

    Each cell's rows are appended to the file `path` at once.
    """
    device = Device.current()
    plans = {
        cell.id: {
            label: made
            for label, overrides in variants
            if (made := varied(plan.plan(cell.problem, device, suite.backend), overrides))
        }
        for cell in cells
    }
    good = compile_all(
        {x for made in plans.values() for p in made.values() for x in p.launches}, device
    )
    rows = []
    for cell in cells:
        tensors = random_tensors(cell.problem)
        candidates = peer_candidates(peers, cell, tensors)
        for label, made in plans[cell.id].items():
            if good.issuperset(made.launches):
                candidates.append(variant_candidate(label, made, tensors))
        found = measure(suite.op, cell, candidates, tensors, rounds=rounds)
        rows += found
        if path is not None:
            append(path, found)
        print(report(rows, cell, peers), flush=True)
    return rows


def report(rows: Sequence[Row], cell: Case, peers: Sequence[str]) -> str:
    """The candidates of one cell, fastest first, each with its speed relative to the first peer."""
    group = groups(rows).get(cell.id, {})
    bar = next((group[p] for p in peers if p in group), None)
    lines = [cell.id]
    for row in sorted(group.values(), key=lambda r: r.p50_us):
        ratio = f"{bar.p50_us / row.p50_us:6.3f} x {bar.backend}" if bar else ""
        lines.append(f"  {row.p50_us:9.1f} us {row.tflops:6.0f} TFLOP/s {ratio}  {row.backend}")
    return "\n".join(lines)


def summary(rows: Sequence[Row], peers: Sequence[str]) -> str:
    """The best variant of each cell; mean and worst speed of each variant over the first peer's."""
    lines, ratios = [], {}
    for case, group in groups(rows).items():
        bar = group.get(peers[0])
        ours = {label: row for label, row in group.items() if label not in peers}
        if bar is None or not ours:
            continue
        best = min(ours.values(), key=lambda r: r.p50_us)
        lines.append(
            f"{case:20s} best {bar.p50_us / best.p50_us:6.3f} x {peers[0]}  {best.backend}"
        )
        for label, row in ours.items():
            ratios.setdefault((row.head_dim, label), []).append(bar.p50_us / row.p50_us)
    for (head_dim, label), found in sorted(ratios.items(), key=lambda x: -geometric_mean(x[1])):
        mean = f"mean {geometric_mean(found):.3f} worst {min(found):.3f} of {len(found)}"
        lines.append(f"d{head_dim:<4d} {mean}  {label}")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("variants", metavar="FILE.py", type=Path)
    parser.add_argument("--suite", choices=SUITES, default="fwd_sm80")
    parser.add_argument("--case", help="shell pattern of case ids")
    parser.add_argument("--quick", action="store_true", help="the suite's quick cells")
    parser.add_argument("--peers", default="fa2", help="comma-separated; ratios are to the first")
    parser.add_argument("--rounds", type=int, default=13)
    parser.add_argument("--out", type=Path, help="folder for tune.csv")
    args = parser.parse_args(argv)
    suite, peers = SUITES[args.suite], args.peers.split(",")
    variants = runpy.run_path(str(args.variants))["VARIANTS"]
    cells = suite.select(args.case, args.quick)
    path = args.out and args.out / "tune.csv"
    rows = time_configs(suite, cells, variants, peers=peers, rounds=args.rounds, path=path)
    print(summary(rows, peers))


if __name__ == "__main__":
    main()
