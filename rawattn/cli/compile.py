# SPDX-License-Identifier: Apache-2.0
"""``compile``: fills the kernel cache, so that no first call has to."""

from __future__ import annotations

import itertools
import os
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from rawattn import cache, compile
from rawattn.cli import flags, workers
from rawattn.cli.cache import folder_facts
from rawattn.cli.calls import call_of
from rawattn.device import DEVICES, Device
from rawattn.registry import ARCHITECTURES, KERNELS, Config, all_configs


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of what is in the cache now; 1 where some kernel is not. ValueError: there is none."""
    device = _device(args)
    if args.all:
        todo = [(kernel.name, config) for kernel, config in all_configs(device.arch)]
    else:
        todo = of_calls(args, device)
    if not todo:
        raise ValueError(
            f"device={device.name!r}: there is nothing to compile for it; accepted are "
            f"{', '.join(DEVICES)}"
        )
    start = time.perf_counter()
    results = _progress(compile_all(todo, device.arch, args.jobs), len(todo))
    errors = [error for error in results if error is not None]
    return {
        "arch": device.arch,
        "ready": len(todo) - len(errors),
        "failed": len(errors),
        "errors": errors,
        "seconds": round(time.perf_counter() - start, 2),
        "cache": folder_facts(cache.default()),
    }, int(bool(errors))


def of_calls(args: Namespace, device: Device) -> list[tuple[str, Config]]:
    """What the calls of the flags launch, each kernel once: calls of all batches and lengths.

    Raises as `call_of` and its plans; ValueError for a call that launches nothing on any device.
    """
    found: dict[tuple[str, Config], None] = {}
    for batch, q_len, k_len in itertools.product(args.batch, args.q_len, args.k_len):
        call = Namespace(**{**vars(args), "batch": batch, "q_len": q_len, "k_len": k_len})
        steps = call_of(call).plans(device)
        if steps[-1].problem.empty:
            raise ValueError(
                f"batch={batch}, q_len={q_len}: accepted are problems with an output, "
                "others launch nothing"
            )
        found |= {(launch.kernel, launch.config): None for s in steps for launch in s.launches}
    return list(found)


def _device(args: Namespace) -> Device:
    """The device of the flags, or one of the architecture that they name."""
    if args.arch is None:
        return flags.device(args)
    if args.arch not in ARCHITECTURES:
        raise ValueError(f"arch={args.arch!r}: accepted are {', '.join(ARCHITECTURES)}")
    return next(device for device in DEVICES.values() if device.arch == args.arch)


def compile_all(
    todo: list[tuple[str, Config]], arch: str, jobs: int | None = None
) -> Iterator[str | None]:
    """What is wrong with each kernel, as they are done; None for those that are in the cache."""
    processes = min(len(todo), jobs or os.cpu_count() or 1)
    items = [(*kernel, arch) for kernel in todo]
    for _, error in workers.each(_compile_one, items, processes):
        yield error


def _compile_one(kernel: str, config: Config, arch: str) -> str | None:
    folder = cache.default().folder
    try:
        path = compile.cubin(KERNELS[kernel], config, arch)
    except compile.CompileError as error:
        return str(error)
    return None if path.is_relative_to(folder) else f"the cache folder {folder} cannot be written"


def _progress(results: Iterator[str | None], total: int) -> Iterator[str | None]:
    """The same results, under a bar on stderr where rich is installed, else with a line each."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for done, result in enumerate(results, 1):
            print(f"compiled {done} of {total}", file=sys.stderr, flush=True)
            yield result
    else:
        yield from track(results, "compiling", total=total, console=Console(stderr=True))
