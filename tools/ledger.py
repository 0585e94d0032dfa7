# SPDX-License-Identifier: Apache-2.0
"""The resource ledger: registers, spills, stack, shared memory and overlap of every kernel that a
plan can choose.

    python -m tools.ledger            compare tests/ledger.csv with what the compiler says now
    python -m tools.ledger --write    rewrite it

Needs NVRTC, and nvdisasm for kernels with wgmma; no GPU. Cubins come from the kernel cache; a cold
run compiles every Config for every architecture.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, astuple, dataclass, fields, replace
from pathlib import Path

from rawattn import compile, registry
from rawattn.cli.workers import each, program
from tools import sass

LEDGER = Path(__file__).resolve().parent.parent / "tests" / "ledger.csv"
WGMMA = "ptx_sm90_wgmma.cuh"  # what kernels with wgmma include
OTHER_MOVES = 96  # apart from products; where fwd_sm90 was guarded it had 140 to 270 more

Job = Callable[[registry.Kernel, registry.Config, str], "Row"]


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Row:
    """One kernel for one architecture."""

    kernel: str
    arch: str
    nvrtc: str  # the compiler that was asked
    config: str
    registers: int  # a thread
    spills: int  # bytes a thread, stores and loads
    stack: int  # bytes a thread
    smem: int  # dynamic shared memory, bytes a block
    warnings: str
    # what became of the wgmma of a kernel that has them, see tools/sass.py
    wgmma: int = 0
    waits: int = 0
    ex2: int = 0
    ex2_under_pv: int = 0
    moves: int = 0

    @property
    def faults(self) -> tuple[str, ...]:
        """What no kernel may have."""
        found = [f"{self.spills} bytes of spills"] if self.spills else []
        if self.warnings:
            found.append(self.warnings)
        if self.wgmma and 2 * self.waits > self.wgmma:
            found.append(f"{self.waits} waits for {self.wgmma} wgmma: serialized")
        if self.wgmma and self.moves > self.wgmma + OTHER_MOVES:
            found.append(f"{self.moves} moves for {self.wgmma} wgmma: guarded against divergence")
        return tuple(found)


def label(config: registry.Config) -> str:
    """A Config in one line: the names of its true flags, its strings as they are, numbers by
    name.
    """
    words = []
    for field in fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if value is True:
            words.append(field.name)
        elif value is not False:
            words.append(value if isinstance(value, str) else f"{field.name}={value}")
    return " ".join(words)


def compiled(kernel: registry.Kernel, config: registry.Config, arch: str) -> Row:
    """What ptxas says of one kernel; from the kernel cache, or compiled."""
    found = compile.resources(kernel, config, arch)
    return Row(
        kernel=kernel.name,
        arch=arch,
        nvrtc=compile.nvrtc_version(),
        config=label(config),
        registers=found.registers,
        spills=found.spill_stores + found.spill_loads,
        stack=found.stack,
        smem=found.smem + config.smem_bytes,
        warnings=" | ".join(found.warnings),
    )


def measure(kernel: registry.Kernel, config: registry.Config, arch: str) -> Row:
    """What ptxas says of one kernel, and what it made of its wgmma."""
    row = compiled(kernel, config, arch)
    if all(name != WGMMA for name, _ in compile.sources(kernel).texts):
        return row
    return replace(row, **asdict(sass.overlap(compile.cubin(kernel, config, arch))))


def measure_all(arches: Iterable[str], workers: int, job: Job = measure) -> Iterator[Row]:
    """Every registered Config for each architecture, in no order."""
    jobs = [(k, c, arch) for arch in arches for k, c in registry.all_configs(arch)]
    for done, (_, row) in enumerate(each(job, jobs, workers), 1):
        if sys.stderr.isatty() or done % 50 == 0 or done == len(jobs):
            end = "\r" if sys.stderr.isatty() and done < len(jobs) else "\n"
            print(f"compiled {done} of {len(jobs)}", end=end, file=sys.stderr, flush=True)
        yield row


def read() -> set[Row]:
    """The committed ledger; empty where there is none."""
    if not LEDGER.is_file():
        return set()
    numbers = {f.name for f in fields(Row) if f.type == "int"}
    with LEDGER.open(newline="") as file:
        return {
            Row(**{k: int(v) if k in numbers else v for k, v in row.items()})
            for row in csv.DictReader(file)
        }


def write(rows: Iterable[Row]) -> None:
    with LEDGER.open("w", newline="") as file:
        out = csv.writer(file, lineterminator="\n")
        out.writerow(f.name for f in fields(Row))
        out.writerows(astuple(row) for row in sorted(rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite tests/ledger.csv")
    parser.add_argument("--arch", nargs="*", default=registry.ARCHITECTURES, help="default: all")
    parser.add_argument("--workers", type=int, default=min(16, os.cpu_count() or 1))
    options = parser.parse_args()
    found = set(measure_all(options.arch, options.workers))
    bad = [row for row in found if row.faults]
    for row in sorted(bad):
        print(f"{row.arch} {row.kernel} {row.config}: {'; '.join(row.faults)}")
    if options.write:
        write(found | {row for row in read() if row.arch not in options.arch})
        print(f"wrote {LEDGER}")
        return bool(bad)
    committed = {row for row in read() if row.arch in options.arch}
    for sign, rows in (("-", committed - found), ("+", found - committed)):
        for row in sorted(rows):
            print(sign, *astuple(row), sep=",")
    return bool(bad or committed != found)


if __name__ == "__main__":
    sys.exit(program("tools.ledger", main))
