# SPDX-License-Identifier: Apache-2.0
"""Rows for tests of what reads rows."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from bench.rows import BLANK, Row

ROW = Row(**{field.name: BLANK[str(field.type)] for field in fields(Row)})


def row(backend: str, us: float, **values: Any) -> Row:
    """A row with a median of `us` and quantiles 1 % around it; 10 us are 100 TFLOP/s."""
    known = {
        "case": "c",
        "dtype": "bfloat16",
        "head_dim": 64,
        "value_dim": 64,
        "window_left": -1,
        "window_right": -1,
        "gpu": "NVIDIA H200",
        "bound": "compute",
        "peer_version": "" if backend.startswith("fwd") else "1.0",
    }
    times = {"p20_us": 0.99 * us, "p50_us": us, "p80_us": 1.01 * us}
    speed = {"tflops": 1000 / us, "gb_per_s": 500 / us}
    return replace(ROW, **known | speed | {"backend": backend} | times | values)
