# SPDX-License-Identifier: Apache-2.0
"""Size and time of an installation, and of the first output after it, beside other stacks.

    python bench/install_size.py [--stack 'rawattn*'] [--out DIR]

Each stack is installed by pip into an empty environment of its own, nothing cached, then asked for
one small attention on the CPU, in fresh processes. No GPU is needed or used. A stack that cannot
be installed here gets a row that says why.
"""

from __future__ import annotations

import argparse
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.host_time import cpu_name
from bench.rows import RESULTS, ROOT, append, commit

STARTS = 5  # fresh processes that compute a first output; the second-fastest counts
TIMEOUT = 1800  # seconds for one pip

NUMPY = """
import numpy as np, rawattn
q, k, v = np.random.default_rng(0).standard_normal((3, 1, 256, 8, 64), dtype=np.float32)
assert rawattn.flash_attn_func(q, k, v, causal=True).shape == q.shape
"""
TORCH = """
import torch
q, k, v = torch.randn((3, 1, 8, 256, 64))
f = torch.nn.functional.scaled_dot_product_attention
assert f(q, k, v, is_causal=True).shape == q.shape
"""
JAX = """
import jax
q, k, v = jax.random.normal(jax.random.key(0), (3, 1, 256, 8, 64))
f = jax.nn.dot_product_attention
assert f(q, k, v, is_causal=True).block_until_ready().shape == q.shape
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """What is installed, in one pip call after another, and a program that computes attention."""

    name: str
    installs: tuple[tuple[str, ...], ...]
    first: str | None = None  # None: it has no attention that runs without a GPU


def stacks(wheel: Path) -> tuple[Stack, ...]:
    """The stacks that are compared; `wheel` is ours."""
    no_isolation = ("--no-build-isolation", "flash-attn")
    return (
        Stack(name="rawattn", installs=((str(wheel),),), first=NUMPY),
        Stack(name="rawattn[cuda12]", installs=((f"{wheel}[cuda12]",),), first=NUMPY),
        Stack(name="rawattn[cuda13]", installs=((f"{wheel}[cuda13]",),), first=NUMPY),
        Stack(name="torch", installs=(("torch", "numpy"),), first=TORCH),
        Stack(name="torch + xformers", installs=(("torch", "xformers"),)),
        Stack(name="torch + flashinfer", installs=(("torch", "flashinfer-python"),)),
        Stack(
            name="torch + flash-attn",
            installs=(("torch", "numpy", "setuptools", "wheel", "ninja", "psutil"), no_isolation),
        ),
        Stack(name="jax[cuda12]", installs=(("jax[cuda12]",),), first=JAX),
        Stack(name="vllm", installs=(("vllm",),)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallRow:
    """One stack, or why it could not be installed. NaN: not measured."""

    stack: str
    versions: str  # of the packages that were asked for
    packages: int  # all that were installed, without pip and setuptools
    size_mb: float  # of their files, 10^6 bytes
    install_seconds: float  # all of pip, download included
    first_output_seconds: float  # of a process, on the CPU, from its start to its end
    result: str  # "ok", or why not
    cpu: str
    python: str
    commit: str
    timestamp: str


def folder_size(folder: Path) -> int:
    """Bytes of all files below a folder, links not followed."""
    return sum(f.lstat().st_size for f in folder.rglob("*") if not f.is_dir())


def environment(folder: Path) -> tuple[Path, Path]:
    """Python and site-packages of a new, empty environment."""
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    return folder / "bin" / "python", site


def pip(python: Path, arguments: Sequence[str]) -> str | None:
    """Why an installation failed; None where it did not."""
    command = [str(python), "-m", "pip", "install", "--no-cache-dir", "--quiet", *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        return f"failed: not done after {TIMEOUT} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    errors = [x for x in lines if "Error:" in x or "was not found" in x] or lines[-1:]
    return f"failed: {errors[-1] if errors else 'pip says nothing'}"[:200]


def freeze(python: Path) -> dict[str, str]:
    """Installed packages and their versions, without pip and setuptools."""
    code = "import importlib.metadata as m\nfor d in m.distributions(): print(d.name, d.version)"
    done = subprocess.run(
        [str(python), "-c", code], capture_output=True, text=True, check=True, cwd=python.parent
    )
    found = dict(line.rsplit(" ", 1) for line in done.stdout.splitlines())
    return {k: v for k, v in found.items() if k not in ("pip", "setuptools")}


def first_output(python: Path, program: str | None) -> float:
    """Seconds of a fresh process that computes attention; NaN where there is none for CPUs."""
    if program is None:
        return math.nan
    seconds = []
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    for _ in range(STARTS):
        start = time.perf_counter()
        subprocess.run([str(python), "-c", program], check=True, cwd=python.parent, env=env)
        seconds.append(time.perf_counter() - start)
    return sorted(seconds)[1]


def measure(stack: Stack) -> InstallRow:
    """Install a stack into an empty environment, which is removed afterwards."""
    with tempfile.TemporaryDirectory() as folder:
        python, site = environment(Path(folder) / "env")
        before, start, result = folder_size(site), time.perf_counter(), None
        for arguments in stack.installs:
            result = result or pip(python, arguments)
        seconds = time.perf_counter() - start
        installed, size = freeze(python), folder_size(site) - before
        asked = ("rawattn", "torch", "xformers", "flashinfer-python", "flash_attn", "jax", "vllm")
        first = math.nan if result else first_output(python, stack.first)
    return InstallRow(
        stack=stack.name,
        versions=" ".join(f"{k} {installed[k]}" for k in asked if k in installed),
        packages=len(installed),
        size_mb=round(size / 1e6, 1),
        install_seconds=round(seconds, 1),
        first_output_seconds=round(first, 2),
        result=result or "ok",
        cpu=cpu_name(),
        python=platform.python_version(),
        commit=commit(),
        timestamp=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--stack", default="*", help="shell pattern of stacks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as dist:
        build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", dist]
        subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
        (wheel,) = Path(dist).glob("*.whl")
        for stack in stacks(wheel):
            if not fnmatch(stack.name, args.stack.replace("[", "[[]")):
                continue
            row = measure(stack)
            append(args.out / "install" / "install_size.csv", [row])
            print(
                f"{row.stack:20s} {row.size_mb:8.1f} MB {row.install_seconds:7.1f} s "
                f"first {row.first_output_seconds:5.2f} s  {row.result}",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
