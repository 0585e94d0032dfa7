# SPDX-License-Identifier: Apache-2.0
"""Builds the kernels of FlashInfer that the decode suite times, ahead of it and side by side.

    python bench/build_flashinfer.py [--seconds 60] [--save DIR] [--load DIR]

FlashInfer compiles a kernel at its first use, with nvcc. What is not built after `--seconds` is
given up, and is a gap in the tables. `--save` copies what was built to DIR; `--load` puts it back
on another machine, where nothing is compiled then.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.decode_cases import decode
from bench.peers_decode import flashinfer_module

# (tensor cores, head size, fp8 cache), those that most cases need first.
VARIANTS = (
    (True, 128, False),
    (False, 128, False),
    (True, 64, False),
    (True, 256, False),
    (False, 64, False),
    (False, 256, False),
    (True, 128, True),
    (False, 128, True),
)


def module(variant: tuple[bool, int, bool]) -> Any:
    """What FlashInfer has to build of a variant."""
    tensor_cores, size, fp8 = variant
    problem = decode(1, 1024, size=size, fp8=fp8).problem
    return flashinfer_module(problem, tensor_cores=tensor_cores)


def label(variant: tuple[bool, int, bool]) -> str:
    """Its name in what is printed."""
    tensor_cores, size, fp8 = variant
    return f"{'tensor' if tensor_cores else 'CUDA'} cores, d{size}, {'fp8' if fp8 else 'bf16'}"


def build(seconds: float) -> list[Any]:
    """Builds all variants at once, in processes of their own; those that are done in time."""
    start, jobs = time.perf_counter(), {}
    for number, variant in enumerate(VARIANTS):
        first = ["nice", "-n", str(2 * number)]  # the first variants get the cores
        command = [*first, sys.executable, __file__, "--build-one", str(number)]
        jobs[variant] = subprocess.Popen(command, start_new_session=True)
    built = []
    for variant, job in jobs.items():
        left = max(0.0, seconds - (time.perf_counter() - start))
        try:
            job.wait(left)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        spec = module(variant)
        if job.returncode == 0 and spec.is_compiled:
            built.append(spec)
        print(f"{label(variant)}: {'built' if spec in built else 'GAP'}")
    print(f"{len(built)} of {len(VARIANTS)} in {time.perf_counter() - start:.0f} s")
    return built


def save(built: Sequence[Any], folder: Path) -> None:
    """Copies what was built: folder/NAME.so."""
    folder.mkdir(parents=True, exist_ok=True)
    for spec in built:
        shutil.copy(spec.get_library_path(), folder / f"{spec.name}.so")


def load(folder: Path) -> None:
    """Puts kernels where FlashInfer looks for those that come with it, and never compiles them."""
    for variant in VARIANTS:
        spec = module(variant)
        found = folder / f"{spec.name}.so"
        if found.is_file():
            spec.aot_path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(found, spec.aot_path)
        print(f"{label(variant)}: {'loaded' if found.is_file() else 'GAP'}")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--save", type=Path, metavar="DIR")
    parser.add_argument("--load", type=Path, metavar="DIR")
    parser.add_argument("--build-one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.build_one is not None:
        start, spec = time.perf_counter(), module(VARIANTS[args.build_one])
        spec.build(verbose=False)
        print(f"{label(VARIANTS[args.build_one])}: {time.perf_counter() - start:.1f} s")
        return 0
    if module(VARIANTS[0]) is None:
        print("bench/build_flashinfer.py: FlashInfer is not installed", file=sys.stderr)
        return 1
    if args.load is not None:
        load(args.load)
        return 0
    built = build(args.seconds)
    if args.save is not None:
        save(built, args.save)
    return 0 if built else 1


if __name__ == "__main__":
    sys.exit(main())
