# SPDX-License-Identifier: Apache-2.0
"""Problems that several tests start from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rawattn.paged_problem import PagedProblem
from rawattn.problem import CacheLayout


def decode_problem(**changes: Any) -> PagedProblem:
    """A step of Llama 3 8B, with changes: 32 sequences of 4096 keys, on NHD pages of 16."""
    step = PagedProblem(
        dtype="bfloat16",
        cache_dtype="bfloat16",
        batch=32,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        value_dim=128,
        max_q=1,
        max_k=4096,
        page=16,
        layout=CacheLayout.NHD,
    )
    return replace(step, **changes)
