# SPDX-License-Identifier: Apache-2.0
"""Storing new tokens in a cache: arrays, what it must hold, and all that is timed on them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

import rawattn
from bench import bandwidth
from bench.bandwidth import Exactly
from bench.candidates import peer_candidates, plan_text
from bench.decode import cache_shapes, drawn
from bench.facets import CEILINGS
from bench.measure import Candidate
from bench.suite import Case, Suite
from rawattn.arrays import DTYPES
from rawattn.cache_problem import KvWriteProblem
from rawattn.problem import CacheLayout
from rawattn.reference_paged import write_cache
from rawattn.roofline import work

PAGE = 16
ROOM = 2  # times as many slots as tokens
DECODING = 256  # tokens, of as many sequences; more are of prompts, and fill pages in order
PEERS = "bench.peers_decode"


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteTensors:
    """New tokens and the cache, of NumPy or CuPy. An 8-bit cache is uint8."""

    k: Any  # (tokens, Hkv, D)
    v: Any  # (tokens, Hkv, Dv)
    out: Any  # bytes of both caches
    k_cache: Any
    v_cache: Any
    slots: Any  # (tokens,) int64
    bits: Any  # what `out` must hold afterwards

    always_clear = True

    @property
    def nbytes(self) -> int:
        return int(self.k.nbytes + self.v.nbytes + self.out.nbytes)

    def expected(self, problem: KvWriteProblem, xp: Any) -> Exactly:
        """All bytes of the caches; slots without a new token hold what they held."""
        return Exactly(bits=self.bits)


def tensors(problem: KvWriteProblem, xp: Any) -> WriteTensors:
    """Random normal tokens, for random slots or pages, and caches all of whose bits are 1."""
    p, rng = problem, np.random.default_rng(0)
    k, v = (
        np.resize(x, (p.tokens, p.kv_heads, size)).astype(DTYPES[p.dtype])
        for x, size in ((drawn(), p.head_dim), (drawn()[::-1], p.value_dim))
    )
    blocks = -(-ROOM * p.tokens // PAGE)
    slots = rng.permutation(blocks * PAGE)
    if p.tokens > DECODING:
        slots = (rng.permutation(blocks)[:, None] * PAGE + np.arange(PAGE)).reshape(-1)
    slots = slots[: p.tokens].astype(np.int64)
    stored = np.full(blocks * PAGE * p.kv_heads * (p.head_dim + p.value_dim), 0xFF, np.uint8)
    stored = np.repeat(stored, DTYPES[p.cache_dtype].itemsize)
    out = xp.array(stored)
    write_cache(k, v, *_caches(p, stored, DTYPES[p.cache_dtype]), slots, p.layout)
    held = np.uint8 if p.cache_dtype != p.dtype else DTYPES[p.dtype]
    k_cache, v_cache = _caches(p, out, held)
    return WriteTensors(
        k=xp.asarray(k),
        v=xp.asarray(v),
        out=out,
        k_cache=k_cache,
        v_cache=v_cache,
        slots=xp.asarray(slots),
        bits=xp.asarray(stored),
    )


def _caches(p: KvWriteProblem, memory: Any, dtype: Any) -> tuple[Any, Any]:
    """k_cache and v_cache one behind the other in bytes of memory."""
    values = memory.view(dtype)
    blocks = len(values) // (PAGE * p.kv_heads * (p.head_dim + p.value_dim))
    k_shape, v_shape = cache_shapes(p, PAGE, blocks)
    middle = blocks * PAGE * p.kv_heads * p.head_dim
    return values[:middle].reshape(k_shape), values[middle:].reshape(v_shape)


def bind(suite: Suite, case: Case) -> tuple[WriteTensors, list[Candidate]]:
    """The arrays of a case, and what is timed on them: ours, vLLM's, and a copy that moves as many
    bytes.
    """
    import cupy

    t = tensors(case.problem, cupy)
    half = cupy.arange(work(case.problem).bytes // 8, dtype=np.uint32)  # read, and written
    peers = peer_candidates([n for n in suite.peers if n not in CEILINGS], case, t, PEERS)
    ours = prepared_candidate(suite.backend, case.problem, t)
    return t, [ours, *peers, bandwidth.copy_candidate(half)]


def prepared_candidate(backend: str, p: KvWriteProblem, t: WriteTensors) -> Candidate:
    """A backend through `reshape_and_cache` or `reshape_and_cache_flash` with a prepared plan."""
    x_major = p.layout is CacheLayout.X_MAJOR
    plan = rawattn.prepare(
        rawattn.reshape_and_cache if x_major else rawattn.reshape_and_cache_flash,
        t.k,
        t.v,
        t.k_cache,
        t.v_cache,
        t.slots,
        kv_cache_dtype="auto" if p.cache_dtype == p.dtype else "fp8",
        backend=backend,
    )
    if plan.plan.problem != p:
        raise ValueError(f"the call states {plan.plan.problem}, not {p}")

    def run() -> Any:
        plan.run()
        return t.out

    return Candidate(backend=backend, run=run, config=plan_text(plan.plan))
