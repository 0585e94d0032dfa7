# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/merge.cu``."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from rawattn.cache_configs import Merge
from rawattn.cache_problem import MergeProblem
from rawattn.device import Device
from rawattn.paged_problem import ITEMSIZES
from rawattn.plan.base import (
    MAX_GRID,
    REFERENCE,
    TYPES,
    Backend,
    Launch,
    Plan,
    choose,
    refuses_device,
)

# dtype of the states: those of out
OUTS = {
    "float16": ("float16", "float8_e4m3fn"),
    "bfloat16": ("bfloat16", "float8_e4m3fn"),
    "float32": ("float32", "float16", "bfloat16", "float8_e4m3fn"),
}
MAX_HEAD_DIM = 1024  # a block holds a row
STRIP = 8  # tokens whose rows of one head follow one another: kStrip of merge.cu


def configs(arch: str) -> Iterator[Merge]:
    """Every Config that `launches` can choose."""
    for dtype, outs in OUTS.items():
        for out in outs:
            for pair in (False, True):
                yield Merge(element=TYPES[dtype], out=TYPES[out], pair=pair, parts=_parts(out))


def refuses(p: MergeProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("merge", device):
        return reason
    if p.out_dtype not in OUTS.get(p.dtype, ()):
        takes = "; ".join(f"{x} to {', '.join(outs)}" for x, outs in OUTS.items())
        return f"states of {p.dtype} to {p.out_dtype}: takes {takes}"
    if p.states < 1:
        return f"{p.states} states: takes one and more"
    if p.head_dim > MAX_HEAD_DIM:
        return f"head_dim={p.head_dim}: takes up to {MAX_HEAD_DIM}"
    if _rows(p) > MAX_GRID:
        return f"{p.tokens} x {p.heads} rows: takes up to {MAX_GRID}, tokens in whole {STRIP}s"
    return None


def _rows(p: MergeProblem) -> int:
    """Rows of whole strips."""
    return -(-p.tokens // STRIP) * STRIP * p.heads


def _row_threads(p: MergeProblem) -> int:
    """Threads a row; one where it has no columns, for its lse."""
    return max(1, -(-p.head_dim // (_parts(p.out_dtype) * 16 // ITEMSIZES[p.out_dtype])))


def _parts(out_dtype: str) -> int:
    """Pieces a thread: what they share, finding the row and weighing its states, is most of the
    work where a piece is small."""
    return 1 if ITEMSIZES[out_dtype] == 1 else 2


def launches(p: MergeProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a block for a few rows."""
    config = Merge(
        element=TYPES[p.dtype],
        out=TYPES[p.out_dtype],
        pair=p.states == 2,
        parts=_parts(p.out_dtype),
    )
    row_threads = _row_threads(p)
    return (
        Launch(
            kernel="merge",
            config=config,
            grid=-(-_rows(p) // (config.threads // row_threads)),
            scalars=(("row_magic", -(-(1 << 16) // row_threads)),),
        ),
    )


BACKENDS = (Backend(name="merge", refuses=refuses, launches=launches), REFERENCE)


@functools.lru_cache(maxsize=4096)
def plan(problem: MergeProblem, device: Device, backend: str | None = None) -> Plan:
    """The plan for a problem on a device; as `plan.dense.plan` otherwise."""
    return choose(BACKENDS, problem, device, backend)
