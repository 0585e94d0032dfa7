# SPDX-License-Identifier: Apache-2.0
"""Merging two states: their arrays, what they must give, and all that is timed on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import rawattn
from bench import bandwidth, decode
from bench.candidates import peer_candidates, plan_text
from bench.check import Expected
from bench.facets import CEILINGS
from bench.measure import Candidate
from bench.suite import Case, Suite
from rawattn.arrays import DTYPES
from rawattn.cache_problem import MergeProblem
from rawattn.roofline import work
from rawattn.testing.closeness import ulp

PEERS = "bench.peers_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeTensors:
    """Two states and the result, of NumPy or CuPy."""

    outs: tuple[Any, Any]  # (tokens, heads, D)
    lses: tuple[Any, Any]  # (heads, tokens) float32
    out: Any  # (tokens, heads, D)
    lse: Any  # (heads, tokens) float32

    always_clear = True

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (*self.outs, *self.lses, self.out, self.lse))

    def expected(self, problem: MergeProblem, xp: Any) -> Expected:
        """What `out` must hold, as a batch of one with a query for each token."""
        outs = [x.astype(np.float32).astype(np.float64) for x in self.outs]
        lses = [x.T[:, :, None].astype(np.float64) for x in self.lses]
        share = 1 / (1 + xp.exp(lses[1] - lses[0]))
        exact = (share * outs[0] + (1 - share) * outs[1]).transpose(1, 0, 2)
        stored = exact.astype(np.float32).astype(DTYPES[problem.out_dtype])
        rounded = stored.astype(np.float32).astype(np.float64)
        error, largest = (xp.abs(x).max(axis=-1, keepdims=True) for x in (rounded - exact, exact))
        return Expected(
            pairs=xp.arange(problem.heads),
            out=exact,
            bound=2 * error + 2 * ulp(largest, problem.out_dtype),
        )


def tensors(problem: MergeProblem, xp: Any) -> MergeTensors:
    """Random normal states, and an `out` that holds NaN."""
    p, rng = problem, np.random.default_rng(0)
    rows = (p.tokens, p.heads, p.head_dim)
    prefix, suffix = decode.numbers(p.dtype, (rows, rows), xp)
    lses = [xp.asarray(rng.standard_normal((p.heads, p.tokens), np.float32)) for _ in "ab"]
    nothing = xp.full((*rows, DTYPES[p.out_dtype].itemsize), 0xFF, np.uint8)
    return MergeTensors(
        outs=(prefix, suffix),
        lses=(lses[0], lses[1]),
        out=nothing.view(DTYPES[p.out_dtype])[..., 0],
        lse=xp.empty((p.heads, p.tokens), np.float32),
    )


def bind(suite: Suite, case: Case) -> tuple[MergeTensors, list[Candidate]]:
    """The arrays of a case, and what is timed on them: ours, vLLM's, and a copy and a sum that move
    as many bytes. The sum is the floor: it reads two thirds of them, as merging does.
    """
    import cupy

    t = tensors(case.problem, cupy)
    half, third = (
        cupy.arange(work(case.problem).bytes // (4 * parts), dtype=np.uint32) for parts in (2, 3)
    )
    peers = peer_candidates([n for n in suite.peers if n not in CEILINGS], case, t, PEERS)
    ceilings = bandwidth.copy_candidate(half), bandwidth.add_candidate(third, 3 * third)
    return t, [prepared_candidate(suite.backend, t), *peers, *ceilings]


def prepared_candidate(backend: str, t: MergeTensors) -> Candidate:
    """A backend through `merge_attn_states` with a prepared plan."""
    (prefix, suffix), (prefix_lse, suffix_lse) = t.outs, t.lses
    plan = rawattn.prepare(
        rawattn.merge_attn_states,
        t.out,
        prefix,
        prefix_lse,
        suffix,
        suffix_lse,
        t.lse,
        backend=backend,
    )

    def run() -> Any:
        plan.run()
        return t.out[None]

    return Candidate(backend=backend, run=run, config=plan_text(plan.plan))
