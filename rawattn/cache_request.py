# SPDX-License-Identifier: Apache-2.0
"""A paged cache as arguments state it: layouts, 8-bit types and their scales, strides.

It reads specs and options, never addresses, and needs no GPU.
"""

from __future__ import annotations

import numbers
from collections.abc import Sequence
from typing import Any, NamedTuple

from rawattn.arrays import DTYPES, Spec
from rawattn.paged_problem import Scale
from rawattn.problem import MAX_LENGTH, CacheLayout, check_scalar, shown
from rawattn.ragged import rows_of_one
from rawattn.reference_paged import BlockSparse
from rawattn.request import count, expect, widest
from rawattn.tensor_map import describable

CACHE_DTYPES = {  # kv_cache_dtype: dtype
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}


def choice(name: str, value: Any, accepted: Sequence[str]) -> str:
    """One of some words. TypeError for what is no string, ValueError for another one."""
    if isinstance(value, str) and value in accepted:
        return value
    error = ValueError if isinstance(value, str) else TypeError
    raise error(f"{name}={shown(value)}: accepted are {', '.join(accepted)}")


def cache_choice(value: Any) -> str:
    """`kv_cache_dtype`, one of the words that it may be."""
    return choice("kv_cache_dtype", value, ("auto", *CACHE_DTYPES))


def array_or_number(scale: Any, default: float | None = 1.0) -> tuple[Any, Any]:
    """A scale, as an array or None, and as a number, which beside an array has a default. None is
    neither, and refused where a number is checked.
    """
    if type(scale) is float or scale is None or isinstance(scale, numbers.Real):
        return None, scale
    return scale, default


def natural(name: str, value: Any) -> int | None:
    """A count from 0, or None."""
    found = count(name, value)
    if found is not None and found < 0:
        raise ValueError(f"{name}={found}: accepted are integers from 0")
    return found


def check_cache_scale(name: str, value: Any) -> float:
    """A scale of an 8-bit cache that is a number."""
    if value is None:
        raise TypeError(f"{name}=None: accepted are a number and an array, 1.0 scales nothing")
    return check_scalar(name, value, positive=True, zero=False)


def scale_of(
    name: str, spec: Spec | None, number: float, cache: Cache, batch: int | None = None
) -> Scale:
    """What kind of scale a cache has: `spec` is an array, `number` stands where there is none.

    ValueError for a scale of a cache that has none. `batch`: whether (batch, kv_heads) is accepted.
    """
    if not cache.quantized:
        if spec is not None or number != 1.0:
            found = number if spec is None else "an array"
            raise ValueError(
                f"{name} is {found}, and the cache holds {cache.dtype}: accepted is 1.0; others "
                "are for caches of 8-bit types"
            )
        return Scale.NONE
    if spec is None:
        return Scale.NUMBER
    heads = (cache.kv_heads,)
    shapes: dict[tuple[int, ...], Scale] = {(): Scale.TENSOR, (1,): Scale.TENSOR}
    shapes.setdefault(heads, Scale.HEAD)
    if batch is not None:
        shapes[batch, cache.kv_heads] = Scale.BATCH_HEAD
    if spec.shape not in shapes:
        accepted = ", ".join(map(str, shapes))
        raise ValueError(f"{name} has shape {spec.shape}: accepted are {accepted}")
    expect(name, spec, spec.shape, "float32")
    return shapes[spec.shape]


DENSE = BlockSparse(0, 0, 64, 0, 0)  # what callers leave as it is where heads see all keys


def check_block_sparse(sparse: tuple[Any, ...] | None) -> BlockSparse | None:
    """The arguments in one type each; None where they hide no key."""
    if sparse is None:
        return None
    least = BlockSparse(0, 0, 1, -MAX_LENGTH, 0)
    names = [name if name == "tp_rank" else f"blocksparse_{name}" for name in BlockSparse._fields]
    found = []
    for name, value, low in zip(names, sparse, least, strict=True):
        number = count(name, value)
        if number is None or not low <= number <= MAX_LENGTH:
            raise ValueError(
                f"{name}={shown(value)}: accepted are integers from {low} to {MAX_LENGTH}"
            )
        found.append(number)
    checked = BlockSparse(*found)
    if checked.vert_stride > 1:
        if checked.tp_rank and not checked.head_sliding_step:
            raise ValueError(
                f"tp_rank={checked.tp_rank}: accepted is 0 with blocksparse_head_sliding_step=0, "
                "with which all heads of all ranks see the same keys"
            )
        return checked
    stride = f"blocksparse_vert_stride={checked.vert_stride}"
    for name, number, default in zip(names, checked._replace(vert_stride=0), DENSE, strict=True):
        if number != default:
            raise ValueError(
                f"{name}={number}: accepted is {default} with {stride}, of which heads see all "
                "keys; 2 or more turns block-sparse attention on"
            )
    return None


# ---- caches --------------------------------------------------------------------------------------


class Cache(NamedTuple):
    """The shape of a pair of caches."""

    dtype: str  # what their bytes mean
    layout: CacheLayout
    blocks: int
    page: int  # tokens
    kv_heads: int
    head_dim: int
    value_dim: int

    @property
    def quantized(self) -> bool:
        return DTYPES[self.dtype].itemsize == 1


def cache_of(
    names: tuple[str, str], k: Spec, v: Spec, layout: CacheLayout, dtype: str, kv_cache_dtype: str
) -> Cache:
    """What two specs say of a cache for keys and values of `dtype`, or the error that they do not.

    `names` are those of the two arrays.
    """
    meaning = _cache_dtype(names[0], k, dtype, kv_cache_dtype)
    accepted = (meaning, "uint8") if meaning.startswith("float8") else (meaning,)
    x = 16 // DTYPES[meaning].itemsize
    k_shape: tuple[int | str, ...]
    match layout:
        case CacheLayout.NHD:
            k_shape = ("blocks", "page", "kv_heads", "head_dim")
        case CacheLayout.HND:
            k_shape = ("blocks", "kv_heads", "page", "head_dim")
        case CacheLayout.X_MAJOR:
            k_shape = ("blocks", "kv_heads", f"head_dim / {x}", "page", x)
    expect(names[0], k, k_shape, *accepted)
    if layout is CacheLayout.X_MAJOR:
        blocks, kv_heads, chunks, page, _ = k.shape
        expect(names[1], v, (blocks, kv_heads, "value_dim", page), k.dtype)
        cache = Cache(meaning, layout, blocks, page, kv_heads, chunks * x, v.shape[2])
        check_slab(names[0], k, first=2)
        check_slab(names[1], v, first=2)
    else:
        expect(names[1], v, (*k.shape[:3], "value_dim"), k.dtype)
        blocks, page, kv_heads = (k.shape[i] for i in _axes(layout))
        cache = Cache(meaning, layout, blocks, page, kv_heads, k.shape[3], v.shape[3])
    if 0 in (cache.page, cache.head_dim, cache.value_dim):
        raise ValueError(
            f"{names[0]} has shape {k.shape}, {names[1]} {v.shape}: accepted are pages and head "
            "sizes from 1"
        )
    return cache


def _axes(layout: CacheLayout) -> tuple[int, int, int]:
    """Of blocks, tokens and heads, in a cache that is not x-major."""
    return (0, 1, 2) if layout is CacheLayout.NHD else (0, 2, 1)


def as_rows(cache: Spec, layout: CacheLayout) -> Spec:
    """A cache as (blocks, page, kv_heads, head size), where it is x-major with groups of its
    columns, 16 bytes, for columns of keys.
    """
    order = (0, 3, 1, 2) if layout is CacheLayout.X_MAJOR else (*_axes(layout), 3)
    shape, strides = (tuple(x[axis] for axis in order) for x in (cache.shape, cache.byte_strides))
    return cache._replace(shape=shape, byte_strides=strides)


def strides_of(spec: Spec | None, axes: int) -> tuple[int, ...]:
    """The strides of an array that may be absent, or lack its first axes: 0 for those."""
    found = () if spec is None else spec.steps
    return (0,) * (axes - len(found)) + found


def scale_strides(name: str, spec: Spec | None) -> dict[str, int]:
    """Those of k_scale or v_scale, as Params name them."""
    batch, head = strides_of(spec, 2)
    return {f"stride_{name}_batch": batch, f"stride_{name}_head": head}


def tensor_maps(cache: Cache, rows: Sequence[Spec | None], caches: Sequence[Spec]) -> bool:
    """Whether tensor maps can describe q and out, and keys and values that are not x-major: tokens
    of values also as those of one sequence, of all blocks.
    """
    if cache.layout is not CacheLayout.X_MAJOR:
        k, v = (as_rows(x, cache.layout) for x in caches)
        if not (describable(k) and rows_of_one(v)):
            return False
    return all(x is None or describable(x) for x in rows)


def _cache_dtype(name: str, spec: Spec, dtype: str, kv_cache_dtype: str) -> str:
    if kv_cache_dtype != "auto":
        return CACHE_DTYPES[kv_cache_dtype]
    if spec.dtype in CACHE_DTYPES.values():
        return spec.dtype
    if spec.dtype != dtype:
        hint = "; with kv_cache_dtype= also 8-bit caches" if spec.dtype == "uint8" else ""
        raise TypeError(f"{name} has dtype {spec.dtype}: accepted is {dtype}{hint}")
    return dtype


def check_slab(name: str, spec: Spec, first: int) -> None:
    """ValueError unless the axes of an array from one on lie side by side."""
    if 0 in spec.shape:
        return
    size = DTYPES[spec.dtype].itemsize
    for axis in reversed(range(first, len(spec.shape))):
        if spec.shape[axis] > 1 and spec.byte_strides[axis] != size:
            raise ValueError(
                f"{name} of shape {spec.shape} has strides {spec.byte_strides} bytes: accepted are "
                f"contiguous axes from {first} on"
            )
        size *= spec.shape[axis]


def cache_strides(cache: Cache, k: Spec, v: Spec) -> dict[str, int]:
    """Of block, token, head and part of a row, in elements, as `PagedParams` names them; of axes
    with one element 0.
    """
    if cache.layout is CacheLayout.X_MAJOR:
        k_block, k_head, k_chunk, k_token, _ = k.steps
        v_block, v_head, v_dim, v_token = v.steps
    else:
        (k_block, k_token, k_head), (v_block, v_token, v_head) = (
            [x.steps[axis] for axis in _axes(cache.layout)] for x in (k, v)
        )
        k_chunk, v_dim = 16 // DTYPES[cache.dtype].itemsize, 1
    return {
        "stride_k_block": k_block,
        "stride_k_token": k_token,
        "stride_k_head": k_head,
        "stride_k_chunk": k_chunk,
        "stride_v_block": v_block,
        "stride_v_token": v_token,
        "stride_v_head": v_head,
        "stride_v_dim": v_dim,
    }


def row_tokens(names: Any, specs: Any, cache: Cache) -> int:
    """Tokens from a row of a contiguous cache to the next, if `leftpad` can say where in its row a
    sequence begins; else the ValueError that it cannot. `names` and `specs` are PagedArrays.
    """
    if specs.block_table is not None or specs.kv_indptr is not None:
        raise ValueError(
            f"{names.leftpad}: with a table of pages accepted is None; it says where in its row "
            "of a contiguous cache a sequence begins"
        )
    if cache.layout is CacheLayout.X_MAJOR:
        raise ValueError(f"{names.leftpad}: accepted with layout NHD and HND, not x-major")
    if cache.blocks <= 1 or cache.page == 1:
        return cache.page
    found = []
    for name in ("k_cache", "v_cache"):
        row, token, _ = (getattr(specs, name).byte_strides[axis] for axis in _axes(cache.layout))
        found.append(row // token if token and row % token == 0 else 0)
    if found[0] != found[1] or not 0 < cache.blocks * found[0] < 2**31:
        strides = specs.k_cache.byte_strides, specs.v_cache.byte_strides
        raise ValueError(
            f"{names.leftpad}: {names.k_cache} and {names.v_cache} have strides {strides[0]} and "
            f"{strides[1]} bytes: accepted are rows that are as many tokens apart, a whole number, "
            "in both, and less than 2**31 in all"
        )
    return found[0]


def copy_width(cache: Cache, caches: Sequence[Spec], rows: Sequence[Spec]) -> int:
    """The widest copy, in bytes, that every row, and every token of the caches (of x-major ones
    every page), starts on and is a multiple of.
    """
    inner = 2 if cache.layout is CacheLayout.X_MAJOR else 3
    return widest((16, 8, 4, 2, 1), *(x.grain() for x in rows), *(x.grain(inner) for x in caches))
