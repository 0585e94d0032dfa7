# SPDX-License-Identifier: Apache-2.0
"""Problems of merge: states without keys, some of whose outs are NaN; strides of every kind."""

from __future__ import annotations

import numpy as np

from rawattn.arrays import DTYPES
from rawattn.cache_problem import MergeProblem
from rawattn.plan import merge
from rawattn.reference import merge_states
from tools.cases.base import H200, Array, KernelCase, spaced, stored, strides


def _states(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> tuple[Array, Array]:
    """Outs (states, tokens, heads, head_dim) and lses; NaN where a state has no keys."""
    outs = stored(rng.standard_normal(shape), dtype)
    outs[rng.random(shape) < 0.05] = -0.0
    lses = rng.choice([1, 30], shape[:-1]) * rng.standard_normal(shape[:-1])
    lses[rng.random(lses.shape) < 0.3] = -np.inf
    lses[rng.random(lses.shape) < 0.1] = np.inf
    outs[np.isinf(lses)] = np.nan
    return outs, lses.astype(np.float32)


def merge_case(seed: int, dtype: str, out_dtype: str, states: int) -> KernelCase:
    """Some rows without keys in any state, or in all but one."""
    rng = np.random.default_rng(seed)
    aligned = rng.random() < 0.6
    tokens, heads = int(rng.integers(1, 60)), int(rng.integers(1, 5))
    unit = 16 // min(DTYPES[x].itemsize for x in (dtype, out_dtype)) if aligned else 1
    head_dim = unit * int(rng.integers(1, 9)) if aligned else int(rng.integers(1, 40))
    outs, lses = _states(rng, (states, tokens, heads, head_dim), dtype)
    first_tokens = tokens if rng.random() < 0.6 else int(rng.integers(0, tokens + 1))
    scale = rng.uniform(0.3, 2, 1).astype(np.float32)
    seen = lses.copy()
    seen[0, first_tokens:] = -np.inf
    want_out, want_lse = merge_states(outs, seen)
    outs = spaced(rng, outs, unit)
    out = spaced(rng, np.zeros((tokens, heads, head_dim), out_dtype), unit)
    if rng.random() < 0.5:  # (heads, tokens) in memory, as vLLM has it
        lses = np.ascontiguousarray(lses.swapaxes(1, 2)).swapaxes(1, 2)
    problem = MergeProblem(
        dtype=dtype,
        out_dtype=out_dtype,
        states=states,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        aligned=aligned,
    )
    return KernelCase(
        plan=merge.plan(problem, H200),
        arrays={
            **{"first": outs[0], "others": outs[1:], "first_lse": lses[0], "others_lse": lses[1:]},
            **{"out_scale": scale, "out": out, "lse": np.zeros((tokens, heads), np.float32)},
        },
        scalars={
            **strides("first", "token head", outs[0]),
            **strides("others", "state token head", outs),
            **strides("first_lse", "token head", lses[0]),
            **strides("others_lse", "state token head", lses),
            **strides("out", "token head", out),
            **{"stride_lse_token": heads, "stride_lse_head": 1},
            "first_tokens": first_tokens,
            "states": states,
            **{"tokens": tokens, "heads": heads},
            "head_dim": head_dim,
            "aligned": int(aligned),
            "out_scale_number": 1.0,
        },
        want={
            "out": want_out / (scale if DTYPES[out_dtype].itemsize == 1 else 1),
            "lse": want_lse,
        },
        exact=False,
    )
