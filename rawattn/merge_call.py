# SPDX-License-Identifier: Apache-2.0
"""Calls that merge partial results, from arguments to launches; what they do to NumPy arrays."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from rawattn.arrays import DTYPES, FLOATS, Spec, SpecKey, check_layout, contiguous, dtype_name
from rawattn.cache_problem import MergeProblem
from rawattn.cache_request import check_cache_scale, natural
from rawattn.calls import ABSENT, Fields, Kind, Operation, Ref, Steps, Views, results
from rawattn.device import Device
from rawattn.paged_tables import check_scales
from rawattn.plan import merge
from rawattn.problem import check_backend
from rawattn.reference import merge_states
from rawattn.reference_paged import quantized
from rawattn.request import check_one_device, expect, flag, neighbours
from rawattn.settings import Settings, forced_backend

FP8 = "float8_e4m3fn"


class MergeArrays(NamedTuple):
    """For each array argument the argument itself, its `View`, or its `Spec`; None where absent.

    `first` and `others` are states: outs with and without a leading axis. With `others` absent,
    `first` holds all of them, (states, tokens, heads, head_dim).
    """

    first: Any
    others: Any
    first_lse: Any
    others_lse: Any
    out: Any
    lse: Any
    out_scale: Any = None


class MergeOptions(NamedTuple):
    """The arguments that are no arrays."""

    return_lse: bool = False
    first_tokens: int | None = None  # those from here on have no first state
    out_scale: float | None = None  # where it is no array
    dtype: Any = None
    backend: str | None = None


OUT, LSE, OUT_SCALE = 4, 5, 6  # places in MergeArrays


def plain(o: MergeOptions) -> MergeOptions:
    """The options in one type each; TypeError or ValueError for what is not accepted."""
    scale = o.out_scale
    return MergeOptions(
        return_lse=flag("return_lse", o.return_lse),
        first_tokens=natural("prefill_tokens_with_context", o.first_tokens),
        out_scale=None if scale is None else check_cache_scale("output_scale", scale),
        dtype=None if o.dtype is None else dtype_name("dtype", o.dtype),
        backend=check_backend(o.backend),
    )


def operation(names: MergeArrays, *, pair: bool) -> Operation:
    """The operation of a function that calls its arrays so, of a `pair` of states or of a stack."""
    return Operation(
        names=names,
        required=frozenset({0, 1, 2, 3} if pair else {0, 2}),
        words=MergeOptions._fields,
        options=MergeOptions,
        typed=frozenset({0, 1}),
        outputs=frozenset({OUT, LSE}),
        plain=plain,
        dtype=lambda options: options.dtype,
        resolve=functools.partial(resolve, names),
        result=_result,
    )


def _result(arrays: Fields, views: Views, options: MergeOptions) -> Any:
    return results(arrays, views, OUT, *((LSE,) if options.return_lse else ()))


class States(NamedTuple):
    """The specs of what is merged; the first ones are (tokens, heads, size) and (heads, tokens)."""

    number: int
    first: Spec
    others: Spec
    first_lse: Spec
    others_lse: Spec


def states_of(names: MergeArrays, specs: MergeArrays) -> States:
    """What the arrays say, or the error that they do not."""
    first, others, lse = specs.first, specs.others, specs.first_lse
    if first.dtype not in FLOATS:
        raise TypeError(f"{names.first} has dtype {first.dtype}: accepted are {', '.join(FLOATS)}")
    if others is not None:
        expect(names.first, first, ("tokens", "heads", "head_dim"), first.dtype)
        expect(names.others, others, first.shape, first.dtype)
        for name in ("first_lse", "others_lse"):
            expect(getattr(names, name), getattr(specs, name), first.shape[1::-1], "float32")
        return States(2, first, others, lse, specs.others_lse)
    expect(names.first, first, ("states", "tokens", "heads", "head_dim"), first.dtype)
    count, tokens, heads, _ = first.shape
    if count == 0:
        raise ValueError(f"{names.first} has shape {first.shape}: accepted is one state or more")
    expect(names.first_lse, lse, (count, heads, tokens), "float32")
    return States(count, _inner(first), first, _inner(lse), lse)


def _inner(spec: Spec) -> Spec:
    """One of a stack."""
    return spec._replace(shape=spec.shape[1:], byte_strides=spec.byte_strides[1:])


@functools.lru_cache(maxsize=4096)
def resolve(names: MergeArrays, keys: tuple[SpecKey | None, ...], options: MergeOptions) -> Kind:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    given = MergeArrays(*[key and Spec(*key) for key in keys])
    check_one_device(names, given)
    states = states_of(names, given)
    device = states.first.device
    out_dtype = _out_dtype(names, given, options)
    tokens, heads, _ = states.first.shape
    out = given.out or contiguous(states.first.shape, out_dtype, device)
    lse = given.lse
    if lse is None and options.return_lse:
        lse = contiguous((heads, tokens), "float32", device)
    expect(names.lse, lse, (heads, tokens), "float32")
    for name, spec in zip(names, given, strict=True):
        if spec is not None:
            check_layout(name, spec, output=name in (names.out, names.lse))
    problem = merge_problem(states, out, out_dtype)
    target = Device.host() if device is None else Device.current(device)
    chosen = merge.plan(problem, target, forced_backend(options.backend, merge.BACKENDS))
    specs = given._replace(out=out, lse=lse)
    made = None if device is None else _steps(device, chosen, states, specs, options)
    return Kind(
        plans=(chosen,),
        given=given,
        new=tuple((n, x) for n, x in ((OUT, out), (LSE, lse)) if x and keys[n] is None),
        neighbours=neighbours(given, (OUT, LSE)),
        check=_check(names, given),
        host=functools.partial(_run, options=options, out_dtype=out_dtype),
        steps=tuple(made.steps) if made else None,
    )


def _check(names: MergeArrays, given: MergeArrays) -> Any:
    """What looks at the value of a scale that is an array, where that is done."""
    if given.out_scale is None or (given.first.device is not None and not Settings.read().check):
        return None
    return lambda views: check_scales(names.out_scale, views[OUT_SCALE])


def _out_dtype(names: MergeArrays, given: MergeArrays, options: MergeOptions) -> str:
    """What `out` holds: the dtype of the states, or with a scale float8_e4m3fn."""
    dtype: str = given.first.dtype
    scaled = given.out_scale is not None or options.out_scale is not None
    if given.out_scale is not None:
        expect(names.out_scale, given.out_scale, (1,) * len(given.out_scale.shape), "float32")
    if given.out is None:
        if scaled:
            raise ValueError(f"{names.out} is None: with {names.out_scale} accepted is an array")
        return dtype
    shape = given.first.shape if given.others is not None else given.first.shape[1:]
    if scaled:
        expect(names.out, given.out, shape, FP8, "uint8")
        return FP8
    expect(names.out, given.out, shape, dtype)
    return dtype


def merge_problem(states: States, out: Spec, out_dtype: str) -> MergeProblem:
    """The problem of states and an out that fit each other."""
    tokens, heads, head_dim = states.first.shape
    rows = (states.first, out, *([states.others] if states.number > 1 else []))
    return MergeProblem(
        dtype=states.first.dtype,
        out_dtype=out_dtype,
        states=states.number,
        tokens=tokens,
        heads=heads,
        head_dim=head_dim,
        aligned=all(spec.grain() % 16 == 0 for spec in rows),
    )


def _steps(
    device: int, plan: Any, states: States, specs: MergeArrays, options: MergeOptions
) -> Steps:
    made = Steps(device, len(specs))
    others, others_lse = Ref(states.others, 1), Ref(states.others_lse, 3)
    if specs.others is None:  # behind the first
        others = Ref(states.others, 0, states.others.byte_strides[0])
        others_lse = Ref(states.others_lse, 2, states.others_lse.byte_strides[0])
    made.add(
        plan,
        merge_scalars(states, specs.out, specs.lse, options),
        {
            "first": Ref(states.first, 0),
            "others": others,
            "first_lse": Ref(states.first_lse, 2),
            "others_lse": others_lse,
            "out_scale": ABSENT if specs.out_scale is None else Ref(specs.out_scale, OUT_SCALE),
            "out": Ref(specs.out, OUT),
            "lse": ABSENT if specs.lse is None else Ref(specs.lse, LSE),
        },
    )
    return made


def merge_scalars(
    states: States, out: Spec, lse: Spec | None, options: MergeOptions
) -> dict[str, float]:
    """The fields of MergeParams that are neither addresses nor the plan's to decide."""
    tokens, heads, head_dim = states.first.shape
    found: dict[str, float] = {
        "tokens": tokens,
        "first_tokens": tokens if options.first_tokens is None else options.first_tokens,
        "states": states.number,
        "heads": heads,
        "head_dim": head_dim,
        "aligned": int(merge_problem(states, out, states.first.dtype).aligned),
        "out_scale_number": 1.0 if options.out_scale is None else options.out_scale,
    }
    for name, spec in (("first", states.first), ("others", states.others), ("out", out)):
        *state, token, head, _ = spec.steps
        found[f"stride_{name}_token"], found[f"stride_{name}_head"] = token, head
        if name == "others":
            found["stride_others_state"] = state[0] if state else 0
    lses = (("first_lse", states.first_lse), ("others_lse", states.others_lse), ("lse", lse))
    for name, each in lses:
        *state, head, token = each.steps if each else (0, 0)
        found[f"stride_{name}_token"], found[f"stride_{name}_head"] = token, head
        if name == "others_lse":
            found["stride_others_lse_state"] = state[0] if state else 0
    return found


def _run(arrays: list[Any], *, options: MergeOptions, out_dtype: str) -> None:
    """Merges NumPy arrays."""
    a = MergeArrays(*arrays)
    if a.others is None:
        outs, lses = a.first, a.first_lse
    else:
        outs, lses = np.stack([a.first, a.others]), np.stack([a.first_lse, a.others_lse])
    if options.first_tokens is not None:
        lses = lses.copy()
        lses[0, :, options.first_tokens :] = -math.inf
    with np.errstate(all="ignore"):
        out, lse = merge_states(outs, lses.swapaxes(-1, -2))
        if out_dtype == FP8:
            scale: Any = options.out_scale if a.out_scale is None else a.out_scale.reshape(())
            a.out.view(DTYPES[FP8])[...] = quantized(out, scale, DTYPES[FP8])
        else:
            a.out[...] = out
        if a.lse is not None:
            a.lse[...] = lse.swapaxes(-1, -2)
