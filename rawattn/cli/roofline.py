# SPDX-License-Identifier: Apache-2.0
"""``roofline``: FLOPs and bytes of a problem, of the algorithms for it, and the least time of each
on a device; with ``--model``, of a step of decoding.
"""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

from rawattn import roofline
from rawattn.cli import flags
from rawattn.cli.plan import problem_facts
from rawattn.device import DEVICES, Device
from rawattn.problem import Problem
from rawattn.roofline.decode import intensity
from rawattn.roofline.draw import draw, points


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of `rawattn.roofline`. ValueError where the peaks of the device are not known."""
    devices = list(DEVICES.values()) if args.device == "all" else [flags.device(args, "all")]
    if args.model is not None:
        asked, facts = _model_facts(args), [_step_facts(args, d) for d in devices]
    else:
        problem = flags.problem(args)
        asked = _problem_facts(problem, args.tiles)
        facts = [_limit_facts(problem, d) for d in devices]
    if args.plot is not None:
        asked |= _plot(args, devices)
    # One device: its facts stand beside the others. Several: a list of them.
    return asked | (facts[0] if args.device != "all" else {"devices": facts}), 0


def _problem_facts(problem: Problem, tiles: tuple[int, int]) -> dict[str, Any]:
    """What holds on every device."""
    work = roofline.work(problem)
    return {
        "problem": problem_facts(problem),
        "flops": work.flops,
        "flops_by_convention": roofline.convention_flops(problem),
        "least_bytes": work.bytes,
        "flops_per_byte": work.intensity,
        "tiles": {"queries": tiles[0], "keys": tiles[1]},
        "algorithms": [
            {
                "moves": name,
                "bytes": moved,
                "of_least": round(moved / work.bytes, 2) if work.bytes else None,
                "flops_per_byte": work.flops / moved if moved else None,
            }
            for name, moved in _algorithms(problem, tiles).items()
        ],
    }


def _algorithms(problem: Problem, tiles: tuple[int, int]) -> dict[str, int]:
    """Bytes of each algorithm where no cache helps; the least is what a perfect cache leaves."""
    return {
        "S and P (standard)": roofline.standard(problem).total,
        "O, per key block (FlashAttention-1)": roofline.keys_outside(problem, *tiles).total,
        "K and V, per query block (FlashAttention-2)": roofline.queries_outside(
            problem, *tiles
        ).total,
        "each tensor once (least)": roofline.work(problem).bytes,
    }


def _limit_facts(problem: Problem, device: Device) -> dict[str, Any]:
    limit = roofline.limit(problem, device)
    tflops, gb_per_s = roofline.peaks(device, problem.dtype)
    standard = replace(limit.work, bytes=roofline.standard(problem).total)
    return {
        "device": device.name,
        "tflops": tflops,
        "gb_per_s": gb_per_s,
        "ridge": roofline.ridge(device, problem.dtype),
        "bound": limit.bound,
        "compute_us": 1e6 * limit.compute_seconds,
        "memory_us": 1e6 * limit.memory_seconds,
        "limit_us": 1e6 * limit.seconds,
        "standard_us": 1e6 * roofline.limit_of(standard, device, problem.dtype).seconds,
        "exp_over_matmul": roofline.exp_share(device, problem.head_dim, problem.value_dim),
    }


def _model_facts(args: Namespace) -> dict[str, Any]:
    model, itemsize = _model(args), args.kv_bits // 8
    return {
        "model": model.name,
        "batch": args.batch,
        "context": flags.k_len(args),
        "kv_bytes_per_token": model.kv_bytes_per_token(itemsize),
        "weight_bytes": model.weight_bytes,
        "kv_leads_at_tokens": model.kv_outweighs_at(itemsize),
        "flops_per_byte": intensity(model.group, itemsize),
    }


def _step_facts(args: Namespace, device: Device) -> dict[str, Any]:
    model, itemsize = _model(args), args.kv_bits // 8
    step = roofline.step(model, args.batch, flags.k_len(args), device, itemsize=itemsize)
    return {
        "device": device.name,
        "gb_per_s": device.gb_per_s,
        "ridge": roofline.ridge(device),
        "kv_bytes": step.kv_bytes,
        "kv_share": step.kv_share,
        "step_ms": 1e3 * step.seconds,
        "tokens_per_second": args.batch / step.seconds,
    }


def _model(args: Namespace) -> roofline.Model:
    """The model of the flags, its weights scaled to their bits. ValueError: it is not known."""
    if args.model.lower() not in roofline.MODELS:
        known = ", ".join(roofline.MODELS)
        raise ValueError(f"model={args.model!r}: accepted are {known}")
    model = roofline.MODELS[args.model.lower()]
    return replace(model, weight_bytes=model.weight_bytes * args.weight_bits // 16)


def _plot(args: Namespace, devices: list[Device]) -> dict[str, Any]:
    """Draws the roofs, and the rows of the bench that are theirs."""
    if len(devices) != 1:
        raise ValueError("plot: accepted is one device, found --device all")
    if Path(args.plot).suffix != ".png":
        raise ValueError(f"plot={args.plot!r}: accepted are names of PNG files, as roofs.png")
    found = points(Path(args.rows), devices[0]) if args.rows is not None else []
    draw(devices[0], found, Path(args.plot))
    return {"plot": args.plot, "points": len(found)}
