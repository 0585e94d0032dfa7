# SPDX-License-Identifier: Apache-2.0
"""What a GPU gave, bit for bit, where no approximate instruction has a part in it: digests, which
`tools.gpu_outputs` keeps in its file.

Two families: `tools.cases.CASES`, and attention whose out is a value of the cache (`GATHERS`).
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from rawattn.testing.paged_inputs import paged_tensors
from rawattn.testing.paged_laws import PagedOp, run_paged
from tools.cases import CASES
from tools.cases.base import Array
from tools.cases.executors import Executor
from tools.cases.gather import PAGES, gather_case, last_values

EACH = 12  # problems of each kind

# name: backend, layout, dtype of the cache, page sizes
GATHERS = {
    f"gather {backend} {layout} {cache}": (backend, layout, cache, pages)
    for backend, layout, cache, pages in (
        ("paged_v1", "x-major", "same", PAGES),
        ("paged_v1", "x-major", "float8_e4m3fn", PAGES),
        ("paged_v2", "x-major", "same", PAGES),
        ("paged_v2", "x-major", "int8", PAGES),
        ("decode_split", "NHD", "same", (16,)),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bits:
    """The digests of the outputs of a problem."""

    name: str
    seed: int
    inputs: int  # a checksum
    outputs: tuple[str, ...]


def problems() -> Iterator[tuple[str, int]]:
    """Name and seed of each."""
    for name in (*CASES, *GATHERS):
        for seed in range(EACH):
            yield name, seed


def bits_of(name: str, seed: int, execute: Executor, op: Callable[[str], PagedOp]) -> Bits:
    """What `execute` gives for a case, or, for a gather, the op of its backend."""
    if name in CASES:
        case = CASES[name](seed)
        inputs = _checksum(case.arrays[x] for x in sorted(case.arrays))
        results = execute(case)
        outputs = [results[x] for x in case.want]
    else:
        backend, *kind = GATHERS[name]
        t = paged_tensors(gather_case(seed, *kind))
        inputs = _checksum((*t.q, *t.k, *t.v))
        out = run_paged(op(backend), t)[0].astype(t.case.dtype)
        assert np.array_equal(out, last_values(t)), f"{name}, seed {seed}: not the last values"
        outputs = [out]
    return Bits(name=name, seed=seed, inputs=inputs, outputs=tuple(map(_digest, outputs)))


def record(execute: Executor, op: Callable[[str], PagedOp]) -> tuple[Bits, ...]:
    """Those of all problems."""
    return tuple(bits_of(name, seed, execute, op) for name, seed in problems())


def hold(recorded: Bits, execute: Executor, op: Callable[[str], PagedOp]) -> None:
    """AssertionError where an executor does not give the bits that were recorded."""
    mine = bits_of(recorded.name, recorded.seed, execute, op)
    what = f"{recorded.name}, seed {recorded.seed}"
    if mine.inputs != recorded.inputs:
        raise AssertionError(f"the GPU had other inputs, since NumPy draws others: {what}")
    if mine.outputs != recorded.outputs:
        raise AssertionError(f"other bits than the GPU's: {what}")


def _digest(x: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(x).tobytes()).hexdigest()[:16]


def _checksum(arrays: Iterator[Array] | tuple[Array, ...]) -> int:
    return functools.reduce(
        lambda value, x: zlib.crc32(np.ascontiguousarray(x).tobytes(), value), arrays, 0
    )
