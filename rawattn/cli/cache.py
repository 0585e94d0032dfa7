# SPDX-License-Identifier: Apache-2.0
"""``cache``: lists, measures or clears the compiled kernels on this machine."""

from __future__ import annotations

import os
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from rawattn import cache

ENTRY = r"\w+-sm_\w+-[0-9a-f]{32}"  # what `compile.cubin` names its entries
FILES = {"kernel.cu", "kernel.cubin", "kernel.log", cache.SUMS}  # what it puts into them
SCRATCH = rf"\.{ENTRY}-[0-9a-f]{{32}}"  # what builds leave when they are interrupted
EMULATOR = "emulator"  # where tools/emulator keeps its objects: neither counted nor cleared


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of the cache folder; with "clear", how many kernels and bytes were removed from it.

    The code is 1 where the folder cannot be written. ValueError: "clear" of what an empty variable
    names.
    """
    kernels = cache.default()
    if args.action == "clear":
        if os.environ.get("RAWATTN_CACHE_DIR") == "":
            raise ValueError(
                f"RAWATTN_CACHE_DIR='': that is {kernels.folder}, as without it; to clear a cache, "
                "accepted are a folder and a variable that is not set"
            )
        _refuse_strangers(kernels.folder)
        size = sum(entry.size for entry in kernel_entries(kernels))
        removed = {"removed": kernels.clear(keep=(EMULATOR,)), "removed_bytes": size}
        facts = {**folder_facts(kernels), **removed}
    else:
        facts = folder_facts(kernels)
    if args.action == "list":
        facts["kernels"] = [
            {
                "key": entry.key,
                "size_bytes": entry.size,
                "intact": entry.intact and not _strangers(entry.path),
            }
            for entry in kernel_entries(kernels)
        ]
    return facts, int("unwritable" in facts)


def folder_facts(kernels: cache.Cache) -> dict[str, Any]:
    """Where the cache is, how much it holds, and why it cannot be written, where it cannot."""
    sizes = [entry.size for entry in kernel_entries(kernels)]
    facts = {"folder": str(kernels.folder), "entries": len(sizes), "size_bytes": sum(sizes)}
    why = kernels.unwritable()
    return facts if why is None else {**facts, "unwritable": f"{why}. Is RAWATTN_CACHE_DIR right?"}


def kernel_entries(kernels: cache.Cache) -> list[cache.Entry]:
    """The entries that are compiled kernels."""
    return [entry for entry in kernels.entries() if re.fullmatch(ENTRY, entry.key)]


def _refuse_strangers(folder: Path) -> None:
    """RuntimeError where a folder holds anything else: a mistyped variable costs nobody files."""
    for path in folder.glob("*"):
        if path.name == EMULATOR:
            continue
        known = re.fullmatch(f"{ENTRY}|{SCRATCH}", path.name)
        for stranger in _strangers(path) if known else [path.name]:
            raise RuntimeError(
                f"{folder} holds {stranger!r}, which is no kernel: cleared is a folder that "
                "holds nothing else. Is RAWATTN_CACHE_DIR right?"
            )


def _strangers(entry: Path) -> list[str]:
    """What an entry holds that no build has put there, as paths in the folder of the cache."""
    return [f"{entry.name}/{x.name}" for x in sorted(entry.glob("*")) if x.name not in FILES]
