# SPDX-License-Identifier: Apache-2.0
"""From a new process to its first output on the GPU: with an empty cache, with the kernel in it,
and of PyTorch, where it is installed.

    python bench/first_output.py [--out DIR]

Whole programs, timed from outside: an interpreter starts, imports, compiles where it must, and
computes. Needs a GPU; takes half a minute. Rows join those of host_time.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.host_time import host_row
from bench.rows import RESULTS, ROOT, append, results_path
from rawattn.device import Device

PROCESSES = 3
FIRST_OUTPUT = "first output: "  # begins the names of these rows
OURS = """
import cupy, numpy, rawattn
q = cupy.asarray(numpy.ones((1, 1024, 8, 64), numpy.float16))  # CuPy has no kernel to compile
assert float(rawattn.flash_attn_func(q, q, q, causal=True)[0, 0, 0, 0]) == 1
"""
TORCH = """
import torch
q = torch.ones((1, 8, 1024, 64), dtype=torch.float16, device="cuda")
f = torch.nn.functional.scaled_dot_product_attention
assert float(f(q, q, q, is_causal=True)[0, 0, 0, 0]) == 1
"""


def programs() -> dict[str, str]:
    """What is started, in order: the second finds what the first has compiled."""
    found = {"rawattn, empty cache": OURS, "rawattn, kernel in the cache": OURS}
    return found | ({"torch": TORCH} if importlib.util.find_spec("torch") else {})


def microseconds(program: str, cache: str) -> float:
    """Of a whole process, whose kernel cache is the folder `cache`."""
    env = {**os.environ, "RAWATTN_CACHE_DIR": cache, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], env=env, check=True)
    return 1e6 * (time.perf_counter() - start)


def measure() -> dict[str, list[float]]:
    """Microseconds of each program, in `PROCESSES` rounds with a cache each."""
    times: dict[str, list[float]] = {}
    for _ in range(PROCESSES):
        with tempfile.TemporaryDirectory() as cache:
            for what, program in programs().items():
                found = microseconds(program, cache)
                times.setdefault(f"{FIRST_OUTPUT}{what}", []).append(found)
    return times


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    try:
        gpu = Device.current().name
    except RuntimeError as error:
        print(f"bench/first_output.py: {error}", file=sys.stderr)
        return 1
    rows = [host_row(what, us, gpu) for what, us in measure().items()]
    append(results_path(args.out, gpu, "host_time"), rows)
    for row in rows:
        print(f"{row.what:44s} {row.p50_us / 1e6:6.2f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
