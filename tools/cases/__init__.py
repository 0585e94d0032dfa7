# SPDX-License-Identifier: Apache-2.0
"""Small problems of the kernels around attention, each a seed away. The emulator's tests run them,
`tools.gpu_outputs` records what a GPU gives for them, and compute-sanitizer watches them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from tools.cases.base import KernelCase
from tools.cases.merge import merge_case
from tools.cases.write import copy_blocks_case, kv_write_case, rotary_case

__all__ = ["CASES", "KernelCase"]

_WRITES = (
    ("float16", "float16", False),
    ("bfloat16", "bfloat16", True),
    ("float32", "float32", False),
    ("bfloat16", "float8_e4m3fn", False),
    ("float16", "float8_e5m2", False),
    ("bfloat16", "int8", False),
    ("float16", "float8_e4m3fn", True),
    ("float32", "int8", True),
)
_MERGES = (
    ("bfloat16", "bfloat16", 2),
    ("bfloat16", "bfloat16", 5),
    ("float32", "float32", 2),
    ("float32", "float16", 3),
    ("float16", "float8_e4m3fn", 2),
)

# One Config of a kernel each: g++ takes a second for it. name: seed -> problem
CASES: dict[str, Callable[[int], KernelCase]] = {
    **{
        f"kv_write {dtype} to {cache}{' rotary' * rotary}": functools.partial(
            kv_write_case, dtype=dtype, cache_dtype=cache, rotary=rotary
        )
        for dtype, cache, rotary in _WRITES
    },
    "rotary float16": functools.partial(rotary_case, dtype="float16"),
    **{
        f"copy_blocks by {unit}": functools.partial(copy_blocks_case, unit=unit)
        for unit in (16, 4, 1)
    },
    **{
        f"merge {states} {dtype} to {out}": functools.partial(
            merge_case, dtype=dtype, out_dtype=out, states=states
        )
        for dtype, out, states in _MERGES
    },
}
