# SPDX-License-Identifier: Apache-2.0
"""Carries the record of the GPU tests over to sources that are the recorded ones to a GPU.

    python -m tools.gpu_carry COMMIT     the commit whose sources were recorded

Comments, names and code for other architectures change the digest of the sources, not what the
recorded GPU ran. This compiles every Config of its architecture at COMMIT and here, with the NVRTC
that is installed, and compares the machine code of all functions; planning and launching must be
the same text. Then tests/gpu_record.json and tests/gpu_outputs.npz are written with the digests of
the sources that are here, and the record says what was compared. Exits with 1, and writes nothing,
where something differs.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rawattn import compile, registry
from rawattn.device import Device

Codes = dict[str, str]
# In the tree at COMMIT, whose `tools` may lack this module: the digests that the files hold.
DIGESTS = """
from tools.gpu_outputs import CODE, KERNELS
from tools.gpu_tests import sources_digest as digest
print(digest(), digest(CODE, KERNELS), digest(kernels=()))
"""


def machine_code(cubin: Path) -> str:
    """A digest of the machine code of a cubin: of its functions' names and instructions."""
    from elftools.elf.elffile import ELFFile  # not on every machine that collects the tests

    digest = hashlib.sha256()
    with cubin.open("rb") as file:
        for section in ELFFile(file).iter_sections():
            if section.name.startswith(".text."):
                digest.update(section.name.encode() + b"\0" + section.data())
    return digest.hexdigest()[:16]


def codes(arch: str) -> Codes:
    """The machine code of every Config of an architecture, by its kernel and text."""

    def one(item: tuple[registry.Kernel, Any]) -> tuple[str, str]:
        kernel, config = item
        return f"{kernel.name} {config}", machine_code(compile.cubin(kernel, config, arch))

    with ThreadPoolExecutor(os.cpu_count()) as pool:  # NVRTC lets go of the interpreter
        return dict(pool.map(one, registry.all_configs(arch)))


def differences(before: Codes, now: Codes) -> list[str]:
    """The kernels whose code is not the same, or that are in one of both only."""
    return sorted(k for k in before.keys() | now.keys() if before.get(k) != now.get(k))


def carried(record: dict[str, Any], commit: str, kernels: int, sources: str) -> dict[str, Any]:
    """The record, as one of other sources with the same machine code."""
    step = {
        "from": record["sources"],
        "commit": commit,
        "same_code_of": kernels,
        "nvrtc": compile.nvrtc_version(),
    }
    return record | {"sources": sources, "carried": [*record.get("carried", ()), step]}


def carry(commit: str) -> list[str]:
    """What keeps the record from being carried over; nothing: it has been."""
    from tools import gpu_outputs, gpu_tests

    record, outputs = gpu_tests.load(), gpu_outputs.load()
    arch = Device.named(record["gpu"]).arch
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        git = ("git", "-C", str(gpu_tests.ROOT), "worktree")
        subprocess.run([*git, "add", "-q", "--detach", str(tree), commit], check=True)
        try:
            text = _there(tree, "-c", DIGESTS).split()
            before = json.loads(_there(tree, __file__, "--codes", arch))
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)
    now = gpu_tests.sources_digest(kernels=())
    if text != [record["sources"], outputs.sources, now]:
        return [f"digests: {commit} has {text}, recorded and here {record['sources']} {now}"]
    found = codes(arch)
    if different := differences(before, found):
        return [f"{len(different)} of {len(found)} kernels differ", *different[:10]]
    gpu_tests.save(carried(record, commit, len(found), gpu_tests.sources_digest()))
    new_outputs = gpu_tests.sources_digest(gpu_outputs.CODE, gpu_outputs.KERNELS)
    gpu_outputs.save(dataclasses.replace(outputs, sources=new_outputs))
    return []


def _there(tree: Path, *arguments: str) -> str:
    """What Python prints in another tree, of its modules."""
    command = [sys.executable, *arguments]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    return subprocess.run(
        command, cwd=tree, env=environment, check=True, capture_output=True, text=True
    ).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", help="whose sources were recorded")
    parser.add_argument("--codes", metavar="ARCH", help="print machine code's digests as JSON")
    arguments = parser.parse_args()
    if arguments.codes:
        print(json.dumps(codes(arguments.codes)))
        return 0
    if arguments.commit is None:
        parser.error("a commit is missing: accepted is the one whose sources were recorded")
    wrong = carry(arguments.commit)
    for line in wrong:
        print(line, file=sys.stderr)
    if not wrong:
        print("carried over: same machine code, same planning and launching")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
