# SPDX-License-Identifier: Apache-2.0
"""The arguments of what stores tokens in a cache: what is accepted, and the problems they state.

Tokens are stored where `slot_mapping` says, or appended to their sequences by an attention call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rawattn.arrays import DTYPES, FLOATS, Spec, check_layout, dtype_name
from rawattn.cache_problem import KvWriteProblem, RotaryProblem
from rawattn.cache_request import (
    Cache,
    cache_choice,
    cache_of,
    check_cache_scale,
    choice,
    copy_width,
    scale_of,
)
from rawattn.paged_problem import PagedProblem, PageTable, Scale
from rawattn.paged_request import PagedArrays
from rawattn.problem import CacheLayout, check_backend
from rawattn.request import check_one_device, expect


class WriteArrays(NamedTuple):
    """For each array argument the argument itself, its `View`, or its `Spec`; None where absent."""

    k: Any
    v: Any
    k_cache: Any
    v_cache: Any
    slot_mapping: Any
    k_scale: Any = None
    v_scale: Any = None


class WriteOptions(NamedTuple):
    """The arguments that are no arrays."""

    layout: str = "NHD"
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0  # where it is no array
    v_scale: float = 1.0
    dtype: Any = None
    backend: str | None = None


def plain(o: WriteOptions) -> WriteOptions:
    """The options in one type each; TypeError or ValueError for what is not accepted."""
    return WriteOptions(
        layout=choice("layout", o.layout, [layout.value for layout in CacheLayout]),
        kv_cache_dtype=cache_choice(o.kv_cache_dtype),
        k_scale=check_cache_scale("k_scale", o.k_scale),
        v_scale=check_cache_scale("v_scale", o.v_scale),
        dtype=None if o.dtype is None else dtype_name("dtype", o.dtype),
        backend=check_backend(o.backend),
    )


def problem_of(
    names: WriteArrays, specs: WriteArrays, options: WriteOptions
) -> tuple[KvWriteProblem, Cache]:
    """The problem of a call whose arguments are all accepted, and its cache."""
    check_one_device(names, specs)
    k, slots = specs.k, specs.slot_mapping
    if k.dtype not in FLOATS:
        raise TypeError(f"{names.k} has dtype {k.dtype}: accepted are {', '.join(FLOATS)}")
    cache = cache_of(
        (names.k_cache, names.v_cache),
        specs.k_cache,
        specs.v_cache,
        CacheLayout(options.layout),
        k.dtype,
        options.kv_cache_dtype,
    )
    expect(names.k, k, ("tokens", cache.kv_heads, cache.head_dim), k.dtype)
    expect(names.v, specs.v, (k.shape[0], cache.kv_heads, cache.value_dim), k.dtype)
    expect(names.slot_mapping, slots, ("tokens",), "int64")
    if slots.shape[0] > k.shape[0]:
        raise ValueError(
            f"{names.slot_mapping} has shape {slots.shape}: accepted are up to {k.shape[0]} "
            f"entries, one for each token of {names.k}"
        )
    for name in ("k_scale", "v_scale"):
        scale_of(getattr(names, name), getattr(specs, name), getattr(options, name), cache)
    for name, spec in zip(names, specs, strict=True):
        if spec is not None:
            check_layout(name, spec, output=name in (names.k_cache, names.v_cache))
    problem = KvWriteProblem(
        dtype=k.dtype,
        cache_dtype=cache.dtype,
        tokens=slots.shape[0],
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        value_dim=cache.value_dim,
        layout=cache.layout,
        aligned=_aligned(cache, (specs.k_cache, specs.v_cache), (k, specs.v)),
    )
    return problem, cache


# ---- tokens that an attention call appends -------------------------------------------------------


class Appended(NamedTuple):
    """New tokens of an attention call, all that each sequence gets."""

    tokens: int  # of each sequence; 0 where they are packed, and a table says
    rotary_dim: int  # columns that are turned; 0: none
    write: KvWriteProblem
    rotary: RotaryProblem | None  # of the queries


def appended(
    names: PagedArrays,
    specs: PagedArrays,
    problem: PagedProblem,
    cache: Cache,
    *,
    interleaved: bool,
) -> Appended | None:
    """What a paged call appends; None: nothing. Raises as `paged_request.problem_of`."""
    k, v = specs.k, specs.v
    if specs.rotary_cos is None and not interleaved:
        raise ValueError(f"rotary_interleaved=False: without {names.rotary_cos} accepted is True")
    if k is None:
        for name in ("v", "rotary_cos", "rotary_sin", "cu_seqlens_new"):
            if getattr(specs, name) is not None:
                raise ValueError(f"{getattr(names, name)}: without {names.k} accepted is None")
        return None
    if v is None:
        raise ValueError(f"{names.v} is None: with {names.k} accepted is an array")
    packed = specs.cu_seqlens_new is not None
    if packed:
        expect(names.k, k, ("total_k", cache.kv_heads, cache.head_dim), problem.dtype)
    else:
        dense = problem.batch, "new_len", cache.kv_heads, cache.head_dim
        expect(names.k, k, dense, problem.dtype, packed=names.cu_seqlens_new)
    expect(names.v, v, (*k.shape[:-2], cache.kv_heads, cache.value_dim), problem.dtype)
    expect(names.cu_seqlens_new, specs.cu_seqlens_new, (problem.batch + 1,), "int32")
    if problem.table is PageTable.CSR:
        raise ValueError(f"{names.k}: with {names.kv_indptr} accepted is None; store them before")
    if specs.seqused_k is None:
        raise ValueError(
            f"{names.k}: accepted with {names.seqused_k}, the lengths before the new tokens"
        )
    if Scale.BATCH_HEAD in (problem.k_scale, problem.v_scale):
        raise ValueError(
            f"{names.k}: new tokens are stored with one scale, or one for each head; accepted are "
            f"{names.k_scale} and {names.v_scale} of shape () and ({cache.kv_heads},)"
        )
    new_len = 0 if packed else k.shape[1]
    if new_len > problem.max_k:
        raise ValueError(
            f"{names.k} has {new_len} tokens a sequence: accepted are up to {problem.max_k}, "
            "the room of the cache"
        )
    for name in ("k_cache", "v_cache"):
        check_layout(getattr(names, name), getattr(specs, name), output=True)
    turned = _rotary_dim(names, specs, problem)
    return _appended(specs, problem, cache, new_len, turned)


def _appended(
    specs: PagedArrays, problem: PagedProblem, cache: Cache, new_len: int, turned: int
) -> Appended:
    """What arguments that are accepted append; `turned` columns are turned."""
    k, v = specs.k, specs.v
    tables = [] if turned == 0 else [specs.rotary_cos, specs.rotary_sin]
    half = turned // 2 * DTYPES[problem.dtype].itemsize  # bytes between the columns of a pair
    write = KvWriteProblem(
        dtype=problem.dtype,
        cache_dtype=cache.dtype,
        tokens=k.shape[0] if specs.cu_seqlens_new else problem.batch * new_len,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        value_dim=cache.value_dim,
        layout=cache.layout,
        rotary=turned > 0,
        aligned=half % 16 == 0 and _aligned(cache, (specs.k_cache, specs.v_cache), (k, v, *tables)),
    )
    rotary = None
    if turned:
        rotary = RotaryProblem(
            dtype=problem.dtype,
            tokens=specs.q.shape[0] * (specs.q.shape[1] if len(specs.q.shape) == 4 else 1),
            heads=problem.q_heads,
            head_dim=problem.head_dim,
            aligned=half % 16 == 0 and _aligned(cache, (), (specs.q, *tables)),
        )
    return Appended(new_len, turned, write, rotary)


def _rotary_dim(names: PagedArrays, specs: PagedArrays, problem: PagedProblem) -> int:
    """How many columns are turned. That no query lies past the room is for `check_tables`."""
    cos, sin = specs.rotary_cos, specs.rotary_sin
    if cos is None and sin is None:
        return 0
    if cos is None or sin is None:
        raise ValueError(f"accepted are {names.rotary_cos} and {names.rotary_sin} together")
    dtypes = dict.fromkeys((problem.dtype, "float32"))
    expect(names.rotary_cos, cos, ("positions", "rotary_dim / 2"), *dtypes)
    expect(names.rotary_sin, sin, cos.shape, cos.dtype)
    if cos.byte_strides[0] != sin.byte_strides[0] and cos.shape[0] > 1:
        raise ValueError(
            f"{names.rotary_cos} and {names.rotary_sin} have rows {cos.byte_strides[0]} and "
            f"{sin.byte_strides[0]} bytes apart: accepted are equal strides"
        )
    width = 2 * cos.shape[1]
    if not 0 < width <= problem.head_dim:
        raise ValueError(
            f"{names.rotary_cos} has shape {cos.shape}: accepted are 1 to "
            f"{problem.head_dim // 2} columns"
        )
    if cos.shape[0] < max(1, problem.max_k):  # kernels read the last row for positions past it
        raise ValueError(
            f"{names.rotary_cos} has shape {cos.shape}: accepted are {max(1, problem.max_k)} rows "
            "or more, one for each token that a sequence has room for; max_seqlen_k= says of fewer"
        )
    return width


def _aligned(cache: Cache, caches: Sequence[Spec], rows: Sequence[Spec]) -> bool:
    """Whether threads move whole pieces, 16 bytes of a cache: more than 16 of a wider row."""
    size = DTYPES[cache.dtype].itemsize
    whole = all(size * columns % 16 == 0 for columns in (cache.head_dim, cache.value_dim))
    return (whole or not caches) and copy_width(cache, caches, rows) == 16
