# SPDX-License-Identifier: Apache-2.0
"""What storing tokens in a cache and merging partial results must obey, and the cases of both."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from rawattn.paged_problem import cache_shapes
from rawattn.problem import CacheLayout
from rawattn.reference import merge_states
from rawattn.reference_paged import quantized, slots
from rawattn.testing.cases import short_repr
from rawattn.testing.closeness import ulp
from rawattn.testing.inputs import CANARY, POISON, Array, Placed, to_host
from rawattn.testing.paged_cases import CACHE_WORDS

Call = Callable[..., Any]


# ---- storing tokens ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class WriteCase:
    """One call of `reshape_and_cache` (x-major) or `reshape_and_cache_flash`."""

    tokens: int
    kv_heads: int = 1
    head_dim: int = 64
    value_dim: int = 64
    layout: str = "NHD"
    page: int = 16
    dtype: str = "bfloat16"
    cache_dtype: str = "same"
    by_head: bool = False  # scales of 8-bit caches
    memory: str = "contiguous"  # of k and v
    seed: int = 0

    def __repr__(self) -> str:
        return short_repr(self)


@st.composite
def write_cases(draw: DrawFn, dtypes: tuple[str, ...]) -> WriteCase:
    """One case, odd sizes among them."""
    layout = draw(st.sampled_from([layout.value for layout in CacheLayout]))
    cache_dtype = draw(st.sampled_from(("same", "same", *CACHE_WORDS)))
    dtype = draw(st.sampled_from(dtypes))
    x = 16 // (1 if cache_dtype != "same" else np.dtype(dtype).itemsize)
    dims = st.sampled_from((64, 128, 80)) | st.integers(1, 20)
    head_dim = draw(dims)
    return WriteCase(
        tokens=draw(st.integers(0, 70)),
        kv_heads=draw(st.integers(1, 5)),
        head_dim=-(-head_dim // x) * x if layout == "x-major" else head_dim,
        value_dim=draw(dims),
        layout=layout,
        page=draw(st.sampled_from((1, 3, 8, 16, 19, 64))),
        dtype=dtype,
        cache_dtype=cache_dtype,
        by_head=draw(st.booleans()),
        memory=draw(st.sampled_from(("contiguous", "gaps", "transposed", "unaligned"))),
        seed=draw(st.integers(0, 2**16)),
    )


def law_written_is_read(calls: tuple[Call, Call], xp: Any, case: WriteCase) -> None:
    """A token's slot holds its bits (or their one rounding), negative slots are skipped, and no
    other byte of the caches has changed.

    `calls` are `reshape_and_cache` and `reshape_and_cache_flash`; a failure says the case.
    """
    c, rng = case, np.random.default_rng(case.seed)
    stored = np.dtype(c.dtype if c.cache_dtype == "same" else c.cache_dtype)
    blocks = -(-c.tokens // c.page) + 2
    k, v = (
        rng.standard_normal((c.tokens, c.kv_heads, size), np.float32).astype(c.dtype)
        for size in (c.head_dim, c.value_dim)
    )
    scales = rng.uniform(0.01, 0.2, (2, c.kv_heads if c.by_head else 1)).astype(np.float32)
    where = rng.permutation(blocks * c.page)[: c.tokens].astype(np.int64)
    where[rng.random(c.tokens) < 0.2] = -1
    shapes = cache_shapes(
        layout := CacheLayout(c.layout),
        stored.name,
        blocks=blocks,
        page=c.page,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        value_dim=c.value_dim,
    )
    before = [rng.integers(0, 256, (*s, stored.itemsize), np.uint8) for s in shapes]
    want = [cache.copy() for cache in before]
    kept = where >= 0
    for cache, tokens, scale in zip(want, (k, v), scales, strict=True):
        in_slots = slots(cache.view(stored)[..., 0], layout)
        rows = quantized(tokens[kept], scale, stored)
        at = where[kept] // c.page, where[kept] % c.page
        in_slots[at] = rows.reshape(len(rows), *in_slots.shape[2:])
    caches = [xp.asarray(_as_cache(cache, stored)) for cache in before]
    placed = [Placed.of(tokens, c.memory, 3, xp, outside=POISON) for tokens in (k, v)]
    quantization: tuple[Any, ...] = ()
    if c.cache_dtype != "same":
        given = [xp.asarray(s) if c.by_head else float(s[0]) for s in scales]
        quantization = CACHE_WORDS[c.cache_dtype], *given
    arguments = (*(x.view for x in placed), *caches, xp.asarray(where), *quantization)
    if layout is CacheLayout.X_MAJOR:
        calls[0](*arguments)
    else:
        calls[1](*arguments, layout=c.layout)
    for name, place in zip(("key", "value"), placed, strict=True):
        place.check_kept(name, c)
    for name, cache, expected in zip(("k", "v"), caches, want, strict=True):
        got = to_host(cache)
        differ = np.ascontiguousarray(got).view(np.uint8).reshape(expected.shape) != expected
        if differ.any():
            first = tuple(int(i) for i in np.argwhere(differ)[0])
            raise AssertionError(
                f"{name}: {differ.sum()} bytes differ, the first at {first}; {c!r}"
            )


def _as_cache(cache: Array, dtype: np.dtype[Any]) -> Array:
    """Bytes as an array of a dtype, fp8 as uint8, which CuPy has no type for."""
    return cache[..., 0] if dtype.name.startswith("float8") else cache.view(dtype)[..., 0]


# ---- merging -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class MergeCase:
    """One call of `merge_states`, and with two states of `merge_attn_states`."""

    states: int
    tokens: int
    heads: int = 1
    head_dim: int = 64
    dtype: str = "bfloat16"
    empty: float = 0.0  # share of states without keys, half of which say so by +inf
    apart: float = 1.0  # how far lse lie apart
    memory: str = "contiguous"
    first_tokens: int | None = None  # of merge_attn_states: tokens with a first state
    seed: int = 0

    def __repr__(self) -> str:
        return short_repr(self)


@st.composite
def merge_cases(draw: DrawFn, dtypes: tuple[str, ...]) -> MergeCase:
    """One case; empty states are common, and lse that lie far apart."""
    states = draw(st.sampled_from((1, 2, 2, 2, 3, 5, 8, 17)))
    tokens = draw(st.integers(0, 40))
    return MergeCase(
        states=states,
        tokens=tokens,
        heads=draw(st.integers(1, 6)),
        head_dim=draw(st.sampled_from((64, 128, 256)) | st.integers(1, 100)),
        dtype=draw(st.sampled_from(dtypes)),
        empty=draw(st.sampled_from((0.0, 0.1, 0.6, 1.0))),
        apart=draw(st.sampled_from((0.0, 1.0, 30.0, 1e4, 1e30))),
        memory=draw(st.sampled_from(("contiguous", "gaps", "unaligned"))),
        first_tokens=draw(st.none() | st.integers(0, tokens)) if states == 2 else None,
        seed=draw(st.integers(0, 2**16)),
    )


def law_merged_is_the_union(calls: tuple[Call, Call], xp: Any, case: MergeCase) -> None:
    """Merged results are those of float64, bit for bit where one state alone has keys; 0 and -inf
    where none has. `calls` are `merge_states` and `merge_attn_states`; a failure says the case.
    """
    c, rng = case, np.random.default_rng(case.seed)
    outs = rng.standard_normal((c.states, c.tokens, c.heads, c.head_dim), np.float32)
    outs = outs.astype(c.dtype)
    outs[rng.random(outs.shape) < 0.05] = -0.0
    lses = (c.apart * rng.standard_normal((c.states, c.heads, c.tokens))).astype(np.float32)
    empty = rng.random(lses.shape) < c.empty
    lses[empty] = np.where(rng.random(lses.shape) < 0.5, np.inf, -np.inf)[empty]
    outs[empty.swapaxes(-1, -2)] = np.nan  # what is not used may hold anything
    known = lses.copy()
    if c.first_tokens is not None:
        known[0, :, c.first_tokens :] = -math.inf
    want, want_lse = merge_states(outs, known.swapaxes(-1, -2))
    got = _merged(calls[0], xp, c, outs, lses) if c.first_tokens is None else None
    pair = _merged_pair(calls[1], xp, c, outs, lses) if c.states == 2 else None
    alone = np.isfinite(known).sum(axis=0).T <= 1
    limits = _limits(outs, known, want_lse, c.dtype)
    for found in (got, pair):
        if found is None:
            continue
        out, lse = found
        for name, x, y, limit in (
            ("out", out, want, limits[0]),
            ("lse", lse.T, want_lse, limits[1]),
        ):
            exact = alone[..., None] if name == "out" else alone
            with np.errstate(invalid="ignore"):
                same = (x == y) & (np.signbit(x) == np.signbit(y))
                fine = same | (~exact & (np.abs(x - y) <= limit))
            if not fine.all():
                at = tuple(int(i) for i in np.argwhere(~fine)[0])
                raise AssertionError(f"{name}{list(at)} = {x[at]!r}, want {y[at]!r}; {c!r}")


def _limits(outs: Array, lses: Array, lse: Array, dtype: str) -> tuple[Array, Array]:
    """How far out (tokens, heads, size) and lse (tokens, heads) may be off: an ulp of each, and for
    out what an ulp of the exponents, of the number of states and of the largest lse, does to it.
    """
    has_keys = np.isfinite(lses)
    used = np.where(has_keys.swapaxes(-1, -2)[..., None], np.abs(outs.astype(np.float64)), 0.0)
    largest = used.max(axis=(0, -1), keepdims=True)[0]
    size = np.where(has_keys, np.abs(lses), 0.0).max(axis=0).T
    # Differences above 100 leave no weight; a sum of weights is at most the number of states.
    weights = 8 * ulp(np.maximum(np.minimum(size, 100.0), len(outs)), "float32")
    top = np.maximum(size, np.abs(np.where(np.isfinite(lse), lse, 1.0)))
    out = ulp(largest, dtype) + weights[..., None] * largest
    return out, 2 * ulp(top, "float32") + weights


def _outputs(xp: Any, c: MergeCase) -> tuple[Placed, Placed]:
    out = np.full((c.tokens, c.heads, c.head_dim), np.nan, c.dtype)
    lse = np.full((c.heads, c.tokens), np.nan, np.float32)
    return (
        Placed.of(out, c.memory, 4, xp, outside=CANARY),
        Placed.of(lse, "contiguous", 5, xp, outside=CANARY),
    )


def _merged(call: Call, xp: Any, c: MergeCase, outs: Array, lses: Array) -> tuple[Array, Array]:
    out, lse = _outputs(xp, c)
    states = Placed.of(outs, c.memory, 1, xp, outside=POISON)
    weights = Placed.of(lses, c.memory, 2, xp, outside=POISON)
    call(states.view, weights.view, out=out.view, lse=lse.view)
    states.check_kept("outs", c)
    weights.check_kept("lses", c)
    return out.read("out", ..., c), lse.read("lse", ..., c)


def _merged_pair(
    call: Call, xp: Any, c: MergeCase, outs: Array, lses: Array
) -> tuple[Array, Array]:
    out, lse = _outputs(xp, c)
    parts = {
        name: Placed.of(x, c.memory, salt, xp, outside=POISON)
        for name, x, salt in (
            ("prefix_output", outs[0], 1),
            ("prefix_lse", lses[0], 3),
            ("suffix_output", outs[1], 2),
            ("suffix_lse", lses[1], 4),
        )
    }
    call(out.view, *(x.view for x in parts.values()), lse.view, c.first_tokens)
    for name, x in parts.items():
        x.check_kept(name, c)
    return out.read("out", ..., c), lse.read("lse", ..., c)
