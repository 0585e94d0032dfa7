# SPDX-License-Identifier: Apache-2.0
"""A step of decoding: its arrays, what they must give, and all that is timed on them.

Keys and values of all cases are views of one pool of random numbers, 2^30 elements, which is made
once; the pages of a case are a random permutation of it. L2 is cleared before every launch,
however large the cache: between two steps of a model it has seen all the other layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

import rawattn
from bench import bandwidth, decode_check
from bench.candidates import peer_candidates, plan_text
from bench.check import SOFTCAP, Expected
from bench.facets import CEILINGS
from bench.measure import Candidate
from bench.suite import Case, Lengths, Suite
from rawattn import paged_problem
from rawattn.arrays import DTYPES
from rawattn.cache_problem import KvWriteProblem
from rawattn.paged_problem import PagedProblem, Scale
from rawattn.problem import CacheLayout, Scores, Unsupported

POOL = 2**30  # elements
PATTERN = 2**24 - 3  # that are drawn; a prime, so that no two pages are alike
PEERS = "bench.peers_decode"
READABLE = ("paged_v1", "paged_v2")  # the backends of an x-major cache that read like vLLM's


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTensors:
    """The arrays of one case, of NumPy or CuPy. An 8-bit cache is uint8."""

    problem: PagedProblem
    q: Any  # (B, Sq, Hq, D)
    k_cache: Any
    v_cache: Any
    table: Any  # (B, max_blocks) int32; -1 past the end of a sequence
    seqused: Any  # (B,) int32
    out: Any  # (B, Sq, Hq, Dv)
    keys: tuple[int, ...]  # of each sequence
    scale: float
    softcap: float = 0.0  # 0: none

    always_clear = True

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in (self.q, self.k_cache, self.v_cache, self.out))

    def expected(self, problem: PagedProblem, xp: Any) -> Expected:
        """What `out` must hold, computed in float64."""
        caches, steps = (self.k_cache, self.v_cache), (self.scale, self.softcap)
        return decode_check.expected(problem, caches, self.q, self.table, self.keys, *steps)


# ---- arrays --------------------------------------------------------------------------------------


def tensors(problem: PagedProblem, lengths: Lengths | None, xp: Any) -> DecodeTensors:
    """Random normal queries, keys and values on random pages, and an `out` that holds NaN."""
    p, rng = problem, np.random.default_rng(1)
    keys = (p.max_k,) * p.batch if lengths is None else tuple(n for _, n in lengths)
    counts = [-(-n // p.page) for n in keys]
    ids = rng.permutation(sum(counts)).astype(np.int32)
    table = np.full((p.batch, p.max_blocks), -1, np.int32)
    table[np.arange(p.max_blocks) < np.asarray(counts)[:, None]] = ids
    q = rng.standard_normal((p.batch, p.max_q, p.q_heads, p.head_dim), np.float32)
    out = np.full((p.batch, p.max_q, p.q_heads, p.value_dim), np.nan, np.float32)
    dtype = DTYPES[p.dtype]
    k_cache, v_cache = _caches(p, sum(counts), xp)
    return DecodeTensors(
        problem=p,
        q=xp.asarray(q.astype(dtype)),
        k_cache=k_cache,
        v_cache=v_cache,
        table=xp.asarray(table),
        seqused=xp.asarray(np.asarray(keys, np.int32)),
        out=xp.asarray(out.astype(dtype)),
        keys=keys,
        scale=p.head_dim**-0.5,
        softcap=SOFTCAP if p.scores.softcap else 0.0,
    )


def cache_shapes(
    p: PagedProblem | KvWriteProblem, page: int, blocks: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of k_cache and v_cache."""
    return paged_problem.cache_shapes(
        p.layout,
        p.cache_dtype,
        blocks=blocks,
        page=page,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
    )


def _caches(p: PagedProblem, blocks: int, xp: Any) -> tuple[Any, Any]:
    k_cache, v_cache = numbers(p.cache_dtype, cache_shapes(p, p.page, blocks), xp)
    return k_cache, v_cache


def numbers(dtype: str, shapes: Sequence[tuple[int, ...]], xp: Any) -> list[Any]:
    """Arrays of random normal numbers, one behind the other in the pool of their type."""
    start, found = 0, []
    for shape in shapes:
        stop = start + math.prod(shape)
        found.append(_pool(dtype, xp)[start:stop].reshape(shape))
        start = stop
    return found


@functools.cache
def drawn() -> np.ndarray:
    """PATTERN random normal numbers."""
    return np.random.default_rng(0).standard_normal(PATTERN, np.float32)


@functools.cache
def _pool(dtype: str, xp: Any) -> Any:
    """POOL random normal numbers of a type, 8-bit ones as uint8."""
    stored = DTYPES[dtype]
    bits = np.dtype(f"u{stored.itemsize}")
    pattern = xp.asarray(drawn()[:POOL].astype(stored).view(bits))
    pool = xp.empty(POOL, bits)
    for start in range(0, POOL, len(pattern)):
        part = pool[start : start + len(pattern)]
        part[:] = pattern[: len(part)]
    return pool if bits.itemsize == 1 else pool.view(stored)


# ---- candidates ----------------------------------------------------------------------------------


def bind(suite: Suite, case: Case) -> tuple[DecodeTensors, list[Candidate]]:
    """The arrays of a case, and what is timed on them: ours, peers, and a plain read."""
    import cupy

    t = tensors(case.problem, case.lengths, cupy)
    found = [prepared_candidate(name, name, t) for name in (suite.backend, *readable(t.problem))]
    for label, twin in twins(case.problem).items():
        other = tensors(twin, case.lengths, cupy)
        expected = other.expected(twin, cupy)
        name = f"{suite.backend} ({label})"
        found.append(prepared_candidate(suite.backend, name, other, expected))
    peers = peer_candidates([n for n in suite.peers if n not in CEILINGS], case, t, PEERS)
    if "read" in suite.peers:
        peers.append(bandwidth.read_candidate(t.k_cache, t.v_cache))
    return t, [c for c in (*found, *peers) if c is not None]


def readable(p: PagedProblem) -> tuple[str, ...]:
    """Other backends of ours that are timed on a case."""
    return READABLE if one_query_x_major(p) else ()


def variants(backend: str, p: PagedProblem) -> list[tuple[PagedProblem, str]]:
    """What of ours is timed on a case beside `backend` itself, as problem and backend."""
    return [(p, name) for name in readable(p)] + [(twin, backend) for twin in twins(p).values()]


def one_query_x_major(p: PagedProblem) -> bool:
    """Whether `paged_attention_v1` takes the call."""
    return p.layout is CacheLayout.X_MAJOR and p.max_q == 1


def twins(p: PagedProblem) -> dict[str, PagedProblem]:
    """The same step in another form, which a case is compared with: an x-major cache as NHD, one of
    fp8 as bf16, scores without softcap.
    """
    if p.scores.softcap:
        return {"plain": replace(p, scores=Scores())}
    if p.quantized:
        return {"bf16": replace(p, cache_dtype=p.dtype, k_scale=Scale.NONE, v_scale=Scale.NONE)}
    if p.layout is CacheLayout.X_MAJOR:
        return {"nhd": replace(p, layout=CacheLayout.NHD)}
    return {}


def prepared_candidate(
    backend: str, label: str, t: DecodeTensors, expected: Expected | None = None
) -> Candidate | None:
    """A backend through the public function of a case; None, and a line, where it refuses."""
    try:
        plan = prepared(t, backend)
    except Unsupported as error:
        print(f"gap: {label} cannot do {t.problem}: {error}")
        return None
    if plan.plan.problem != t.problem:
        raise ValueError(f"the call states {plan.plan.problem}, not {t.problem}")

    def run() -> Any:
        plan.run()
        return t.out

    return Candidate(
        backend=label,
        run=run,
        config=plan_text(plan.plan),
        expected=expected,
        problem=t.problem,
    )


def prepared(t: DecodeTensors, backend: str) -> Any:
    """The call of a case, made ready: a plan with `run`. Unsupported where the backend refuses."""
    function, arguments = call_of(t, backend)
    return rawattn.prepare(function, **arguments)


def call_of(t: DecodeTensors, backend: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The public function of a case, and what it is called with."""
    p = t.problem
    stored = "fp8" if p.quantized else "auto"
    if one_query_x_major(p):
        return rawattn.paged_attention_v1, {
            "out": t.out[:, 0],
            "query": t.q[:, 0],
            "key_cache": t.k_cache,
            "value_cache": t.v_cache,
            "num_kv_heads": p.kv_heads,
            "scale": t.scale,
            "block_tables": t.table,
            "seq_lens": t.seqused,
            "block_size": p.page,
            "max_seq_len": p.max_k,
            "kv_cache_dtype": stored,
            "backend": backend,
        }
    return rawattn.flash_attn_with_kvcache, {
        "q": t.q,
        "k_cache": t.k_cache,
        "v_cache": t.v_cache,
        "cache_seqlens": t.seqused,
        "block_table": t.table,
        "softmax_scale": t.scale,
        "causal": p.mask.causal,
        "softcap": t.softcap,
        "layout": p.layout.value,
        "kv_cache_dtype": stored,
        "out": t.out,
        "backend": backend,
    }
