# SPDX-License-Identifier: Apache-2.0
"""Arrays of NumPy for tests of the bench."""

from __future__ import annotations

from typing import Any

import numpy as np

from bench import cases
from rawattn.arrays import DTYPES
from rawattn.problem import Problem, Scores

SOFTCAP, ALIBI, BOTH = Scores(softcap=True), Scores(alibi=True), Scores(softcap=True, alibi=True)


def values_of(scores: Scores, heads: int) -> tuple[float, Any]:
    """A softcap that bends scores, and slopes; 0 and None where they are not asked for."""
    return 1.5 * scores.softcap, cases.alibi_slopes(heads) if scores.alibi else None


def random_tensors(p: Problem, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    shapes = (
        (p.batch, p.max_q, p.q_heads, p.head_dim),
        (p.batch, p.max_k, p.kv_heads, p.head_dim),
        (p.batch, p.max_k, p.kv_heads, p.value_dim),
    )
    q, k, v = (rng.standard_normal(s, dtype=np.float32).astype(DTYPES[p.dtype]) for s in shapes)
    return q, k, v
