# SPDX-License-Identifier: Apache-2.0
"""Calls that store tokens in a cache, from specs to launches, and what they run on NumPy arrays."""

from __future__ import annotations

import functools
from typing import Any

from rawattn.arrays import DTYPES, Spec, SpecKey, View, to_host
from rawattn.cache_request import Cache, cache_strides
from rawattn.calls import ABSENT, Kind, Operation, Ref, Steps
from rawattn.device import Device
from rawattn.kv_write_request import Appended, WriteArrays, WriteOptions, plain, problem_of
from rawattn.paged_host import scale
from rawattn.paged_problem import PagedProblem
from rawattn.paged_request import PagedArrays, PagedOptions
from rawattn.paged_tables import check_scales
from rawattn.params import row_strides
from rawattn.plan import kv_write
from rawattn.reference_paged import write_cache
from rawattn.request import neighbours
from rawattn.settings import Settings, forced_backend

CACHES = frozenset({2, 3})  # places in WriteArrays


def operation(names: WriteArrays) -> Operation:
    """The operation of a function that calls its arrays so."""
    return Operation(
        names=names,
        required=frozenset(range(5)),
        words=WriteOptions._fields,
        options=WriteOptions,
        typed=frozenset({0, 1}) | CACHES,
        outputs=CACHES,
        plain=plain,
        dtype=lambda options: options.dtype,
        resolve=functools.partial(resolve, names),
        result=lambda arrays, views, options: None,
    )


@functools.lru_cache(maxsize=4096)
def resolve(names: WriteArrays, keys: tuple[SpecKey | None, ...], options: WriteOptions) -> Kind:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    specs = WriteArrays(*[key and Spec(*key) for key in keys])
    problem, cache = problem_of(names, specs, options)
    device = specs.k.device
    target = Device.host() if device is None else Device.current(device)
    backend = forced_backend(options.backend, kv_write.BACKENDS[type(problem)])
    chosen = kv_write.plan(problem, target, backend)
    made = None
    if device is not None:
        made = Steps(device, len(names))
        arrays = {name: Ref(x, n) for n, (name, x) in enumerate(specs._asdict().items())}
        absent = ("block_table", "seqused_k", "cu_seqlens_new", "cos", "sin")
        scalars = write_scalars(specs, cache, options, problem.tokens, problem.aligned)
        made.add(chosen, scalars, arrays | dict.fromkeys(absent, ABSENT))
    checked = device is None or Settings.read().check
    return Kind(
        plans=(chosen,),
        given=specs,
        new=(),
        neighbours=neighbours(specs, sorted(CACHES)),
        check=functools.partial(_check, names=names, cache=cache) if checked else None,
        host=functools.partial(_run, cache=cache, options=options),
        steps=tuple(made.steps) if made else None,
    )


def _check(views: list[View | None], *, names: WriteArrays, cache: Cache) -> None:
    """ValueError, with its index, for a slot past the end of the cache, one that is named twice,
    or a scale of 0.
    """
    of = WriteArrays(*views)
    slots, limit = to_host(of.slot_mapping), cache.blocks * cache.page
    named: set[int] = set()
    for index, slot in enumerate(slots.tolist()):
        if slot >= limit:
            raise ValueError(
                f"{names.slot_mapping}[{index}] is {slot}: accepted are slots below {limit}, and "
                "negative numbers, whose tokens are not stored"
            )
        if slot >= 0 and slot in named:
            raise ValueError(
                f"{names.slot_mapping}[{index}] is {slot}: accepted is a slot that no other token "
                "has"
            )
        named.add(slot)
    check_scales(names.k_scale, of.k_scale)
    check_scales(names.v_scale, of.v_scale)


def _run(arrays: list[Any], *, cache: Cache, options: WriteOptions) -> None:
    """Stores the tokens of NumPy arrays."""
    a = WriteArrays(*arrays)
    tokens = len(a.slot_mapping)
    write_cache(
        a.k[:tokens],
        a.v[:tokens],
        a.k_cache.view(DTYPES[cache.dtype]),
        a.v_cache.view(DTYPES[cache.dtype]),
        a.slot_mapping,
        cache.layout,
        k_scale=scale(a.k_scale, options.k_scale),
        v_scale=scale(a.v_scale, options.v_scale),
    )


# ---- Params --------------------------------------------------------------------------------------


def write_scalars(
    specs: Any, cache: Cache, options: Any, tokens: int, aligned: bool
) -> dict[str, float]:
    """The fields of KvWriteParams that are neither addresses nor the plan's to decide, for tokens
    whose slots are given. `specs`: with k, v, the caches and their scales.
    """
    in_cache = cache_strides(cache, specs.k_cache, specs.v_cache)
    found: dict[str, float] = {
        "tokens": tokens,
        "blocks": cache.blocks,
        "stride_k_cache_block": in_cache["stride_k_block"],
        "stride_k_cache_head": in_cache["stride_k_head"],
        "stride_k_cache_slot": in_cache["stride_k_token"],
        "stride_k_cache_chunk": in_cache["stride_k_chunk"],
        "stride_v_cache_block": in_cache["stride_v_block"],
        "stride_v_cache_head": in_cache["stride_v_head"],
        "stride_v_cache_slot": in_cache["stride_v_token"],
        "stride_v_cache_dim": in_cache["stride_v_dim"],
        "stride_table_batch": 0,
        "stride_cos_row": 0,
        "batch": 0,
        "new_len": 1,
        "max_blocks": 1,
        "page": cache.page,
        "kv_heads": cache.kv_heads,
        "head_dim": cache.head_dim,
        "value_dim": cache.value_dim,
        "rotary_dim": 0,
        "positions": 0,
        "interleaved": 0,
        "float_angles": 0,
        "aligned": int(aligned),
    }
    for name in ("k", "v"):
        scale_spec = getattr(specs, f"{name}_scale")
        by_head = scale_spec is not None and scale_spec.shape not in ((), (1,))
        found |= row_strides(name, getattr(specs, name), "token")
        found[f"stride_{name}_scale"] = int(by_head)
        found[f"{name}_scale_number"] = getattr(options, f"{name}_scale")
    return found


def append_scalars(
    specs: PagedArrays, cache: Cache, options: PagedOptions, new: Appended, table: Spec | None
) -> dict[str, float]:
    """The same for tokens that are appended; `table` is the block table, None: a page each."""
    found = write_scalars(specs, cache, options, new.write.tokens, new.write.aligned)
    return found | {
        "stride_table_batch": 0 if table is None else table.steps[0],
        "batch": specs.seqused_k.shape[0],
        "new_len": new.tokens,
        "max_blocks": 1 if table is None else table.shape[1],
        **rotary_fields(specs, options, new),
    }


def rotary_fields(specs: PagedArrays, options: PagedOptions, new: Appended) -> dict[str, float]:
    """The fields that KvWriteParams and RotaryParams share."""
    return {
        "stride_cos_row": specs.rotary_cos.steps[0] if new.rotary_dim else 0,
        "rotary_dim": new.rotary_dim,
        "float_angles": int(new.rotary_dim > 0 and specs.rotary_cos.dtype == "float32"),
        "positions": specs.rotary_cos.shape[0] if new.rotary_dim else 0,
        "interleaved": int(options.rotary_interleaved),
    }


def rotary_scalars(
    specs: PagedArrays, turned: Spec, problem: PagedProblem, options: PagedOptions, new: Appended
) -> dict[str, float]:
    """The fields of RotaryParams, for queries that are written to an array like `turned`."""
    assert new.rotary is not None
    return {
        "tokens": new.rotary.tokens,
        "batch": problem.batch,
        "new_len": problem.max_q,
        "heads": problem.q_heads,
        "head_dim": problem.head_dim,
        "aligned": int(new.rotary.aligned),
        "same_position": int(not problem.own_positions),
        **rotary_fields(specs, options, new),
        **row_strides("x", specs.q, "token"),
        **row_strides("y", turned, "token"),
    }
