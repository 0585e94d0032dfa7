# SPDX-License-Identifier: Apache-2.0
"""What ptxas made of the wgmma of a kernel: how many, how often they are waited for, how much of
the softmax runs beside them. Needs nvdisasm, which is a wheel; no GPU.

ptxas may put a wait after every wgmma ("serialized"), move the wait for P V in front of the
exponentials that should run beside it, or, where it cannot see that all lanes agree, guard each
wgmma against divergence: moves to uniform registers and branches. All leave a kernel that is right
and slow.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Instructions of a kernel, as they stand in its text: a loop counts once."""

    wgmma: int = 0
    waits: int = 0  # for groups of wgmma
    ex2: int = 0
    ex2_under_pv: int = 0  # between the issue of a group of P V and its wait
    moves: int = 0  # to uniform registers, R2UR


@functools.cache
def nvdisasm() -> str:
    """The program: of NVIDIA's wheel, or of a CUDA toolkit. RuntimeError where there is none."""
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found else ():
        for path in sorted(Path(folder).glob("*/bin/nvdisasm"), reverse=True):
            return str(path)
    program = shutil.which("nvdisasm") or shutil.which("/usr/local/cuda/bin/nvdisasm")
    if program is None:
        raise RuntimeError("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return program


def overlap(cubin: Path) -> Overlap:
    """The counts of the kernel in a cubin."""
    command = [nvdisasm(), "-c", str(cubin)]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return count(done.stdout.splitlines())


def count(lines: Iterable[str]) -> Overlap:
    """The counts of a listing.

    A wgmma with ``gsb0`` ends a group; its B is transposed where it is V. ``DEPBAR.LE gsb0, n``
    waits until the last n groups are left.
    """
    wgmma = waits = ex2 = under_pv = moves = 0
    in_flight: list[bool] = []  # groups, oldest first: whether they are of P V
    for line in lines:
        if "HGMMA" in line:
            wgmma += 1
            if "gsb0" in line:
                in_flight.append("tnspB" in line)
        elif found := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\w+)", line):
            waits += 1
            left = int(found[1], 16)
            in_flight = in_flight[-left:] if left else []
        elif "MUFU.EX2" in line:
            ex2 += 1
            under_pv += any(in_flight)
        elif "R2UR" in line:
            moves += 1
    return Overlap(wgmma=wgmma, waits=waits, ex2=ex2, ex2_under_pv=under_pv, moves=moves)
