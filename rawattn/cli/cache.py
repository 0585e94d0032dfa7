# SPDX-License-Identifier: Apache-2.0
"""``cache``: lists, measures or clears the compiled kernels on this machine."""

from __future__ import annotations

import re
from argparse import Namespace
from pathlib import Path
from typing import Any

from rawattn import cache

ENTRY = r"\w+-sm_\w+-[0-9a-f]{32}"  # what `compile.cubin` names its entries
# What builds leave when they are interrupted, and the objects of tools/emulator.
OURS = rf"{ENTRY}|\.{ENTRY}-[0-9a-f]{{32}}|emulator"


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of the cache folder; with "clear", how many kernels were removed."""
    kernels = cache.default()
    if args.action == "clear":
        _refuse_strangers(kernels.folder)
        removed = len(kernel_entries(kernels))
        kernels.clear()
        return {"folder": str(kernels.folder), "removed": removed}, 0
    facts = folder_facts(kernels)
    if args.action == "list":
        facts["kernels"] = [
            {"key": entry.key, "size_bytes": entry.size, "intact": entry.intact}
            for entry in kernel_entries(kernels)
        ]
    return facts, 0


def folder_facts(kernels: cache.Cache) -> dict[str, Any]:
    """Where the cache is, and how much it holds."""
    sizes = [entry.size for entry in kernel_entries(kernels)]
    return {"folder": str(kernels.folder), "entries": len(sizes), "size_bytes": sum(sizes)}


def kernel_entries(kernels: cache.Cache) -> list[cache.Entry]:
    """The entries that are compiled kernels."""
    return [entry for entry in kernels.entries() if re.fullmatch(ENTRY, entry.key)]


def _refuse_strangers(folder: Path) -> None:
    """RuntimeError where a folder holds anything else: a mistyped variable costs nobody files."""
    for path in folder.glob("*"):
        if not re.fullmatch(OURS, path.name):
            raise RuntimeError(
                f"{folder} holds {path.name!r}, which is no kernel: cleared is a folder that "
                "holds nothing else. Is RAWATTN_CACHE_DIR right?"
            )
