# SPDX-License-Identifier: Apache-2.0
"""Deliberate defects of the kernels around attention, for tests/emulator/defects.py."""

from __future__ import annotations

import functools
from pathlib import Path

from tools.cases import CASES
from tools.cases.checks import check
from tools.cases.executors import on_emulator


def probe(name: str, folder: Path, seed: int) -> None:
    """Another problem of a kernel for each schedule."""
    case = CASES[name](seed)
    check(case, on_emulator(case, seed, kernels=folder))


slots = functools.partial(probe, "kv_write float16 to float16")
append = functools.partial(probe, "kv_write bfloat16 to bfloat16 rotary")
turn = functools.partial(probe, "rotary float16")
copy = functools.partial(probe, "copy_blocks by 4")
pair = functools.partial(probe, "merge 2 bfloat16 to bfloat16")
many = functools.partial(probe, "merge 5 bfloat16 to bfloat16")

KV, MERGE = "kv_write.cu", "merge.cu"
TABLES = {
    slots: [
        ("negative slots stored", KV, r"    if \(at < 0\) return slot;\n", ""),
        ("slots past the cache stored", KV, r"  if \(slot.block < 0 \|\|.*\n", ""),
        ("slots not waited for", KV, r"  __syncthreads\(\);\n", ""),
        ("tokens past the last one", KV, r"  if \(token >= p.tokens\) return slot;\n", ""),
        ("column bound of a piece", "piece.cuh", r"i < count\) (words|to)", r"i <= count) \1"),
    ],
    append: [("table read past its end", KV, r"    if \(column >= p.max_blocks\).*\n", "")],
    turn: [("second of a pair", KV, r"p.interleaved \? d % 2 : d >= half;", "d >= half;")],
    copy: [
        ("blocks that are not there", KV, r"  if \(min\(from, to\) < 0.*\n", ""),
        ("end of a block", KV, r"j \* step < units\) dst", "j * step <= units) dst"),
    ],
    pair: [
        ("+inf is a number", MERGE, r"x == -kEmptyMax \? kEmptyMax : x;", "x;"),
        ("sums from +0", MERGE, r"return -0.f; \}", "return 0.f; }"),
        ("NaN of a state without keys", MERGE, r"if \(lses\[k\] != kEmptyMax\) all", "all"),
        ("rows of no token", MERGE, r"token >= p.tokens \|\| ", ""),
        ("a prefix that is not there", MERGE, r"state == 0 \? token < p.first_tokens : ", ""),
    ],
    many: [("not rescaled", MERGE, r"all.raise_top\(top\);", "all.top = top;")],
}
