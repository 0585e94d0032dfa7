# SPDX-License-Identifier: Apache-2.0
"""The arguments of a forward call: what is accepted, and the Problem that they state.

It reads specs and options, never addresses, and needs no GPU and no CuPy; `check_lengths` alone
looks at what arrays hold, and `check_apart` at where they are.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn.arrays import FLOATS, Spec, check_layout, dtype_name, share_memory
from rawattn.problem import (
    Mask,
    Problem,
    Rows,
    Scores,
    check_backend,
    check_causal,
    check_scalar,
    check_window,
    shown,
)
from rawattn.ragged import rows_of_one
from rawattn.reference import Array
from rawattn.softcap import extreme
from rawattn.tensor_map import describable


class Arrays(NamedTuple):
    """For each array argument the argument itself, its `View`, or its `Spec`; None where absent."""

    q: Any
    k: Any
    v: Any
    out: Any = None
    lse: Any = None
    cu_seqlens_q: Any = None
    cu_seqlens_k: Any = None
    seqused_k: Any = None
    alibi_slopes: Any = None
    sink: Any = None


class Options(NamedTuple):
    """The arguments that are no arrays."""

    softmax_scale: float | None = None
    causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    return_lse: bool = False
    dtype: Any = None
    backend: str | None = None
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None


ABSENT = type(None)
PLAIN = frozenset(  # the types of options that are plain, as nearly all are
    itertools.product(
        (ABSENT, float, int),  # softmax_scale
        (bool, str),  # causal
        (tuple,),  # window_size
        (float, int),  # softcap
        (bool,),  # return_lse
        (ABSENT,),  # dtype
        (ABSENT, str),  # backend
        (ABSENT, int),  # max_seqlen_q
        (ABSENT, int),  # max_seqlen_k
    )
)
INTEGERS = frozenset({int})


def plain(options: Options) -> Options:
    """The options in one type each, so that equal ones are accepted or refused alike.

    TypeError for other kinds of values; ValueError for numbers that are not accepted.
    """
    if (*map(type, options),) in PLAIN and INTEGERS.issuperset(map(type, options.window_size)):
        return options
    scale, dtype, backend = options.softmax_scale, options.dtype, check_backend(options.backend)
    return Options(
        softmax_scale=None if scale is None else check_scalar("softmax_scale", scale),
        causal=check_causal(python_bool(options.causal)),
        window_size=check_window(options.window_size),
        softcap=check_scalar("softcap", options.softcap, positive=True),
        return_lse=flag("return_lse", options.return_lse),
        dtype=None if dtype is None else dtype_name("dtype", dtype),
        backend=backend,
        max_seqlen_q=count("max_seqlen_q", options.max_seqlen_q),
        max_seqlen_k=count("max_seqlen_k", options.max_seqlen_k),
    )


def python_bool(value: Any) -> Any:
    """A bool of NumPy as Python's; anything else as it is."""
    return bool(value) if isinstance(value, np.bool_) else value


def flag(name: str, value: Any) -> bool:
    """False or True, also NumPy's; TypeError for anything else."""
    value = python_bool(value)
    if not isinstance(value, bool):
        raise TypeError(f"{name}={shown(value)}: accepted are False and True")
    return value


def count(name: str, value: Any) -> int | None:
    """An integer, also NumPy's, or None; TypeError for anything else."""
    if value is None or (isinstance(value, (int, np.integer)) and not isinstance(value, bool)):
        return None if value is None else int(value)
    raise TypeError(
        f"{name}={shown(value)}: accepted is an integer, found {type(value).__qualname__}"
    )


def problem_of(specs: Arrays, options: Options) -> Problem:
    """The Problem of a call whose arguments are all accepted.

    Raises TypeError for dtypes and kinds of arrays, ValueError for everything else.
    """
    check_one_device(Arrays._fields, specs)
    q, v = specs.q, specs.v
    if q.dtype not in FLOATS:
        raise TypeError(f"q has dtype {q.dtype}: accepted are {', '.join(FLOATS)}")
    batch, max_q, q_rows = _queries(specs, options)
    max_k, k_rows = _keys(specs, options, batch)
    q_heads, head_dim = q.shape[-2:]
    kv_heads, value_dim = v.shape[-2:]
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(
            f"q has {q_heads} heads, k and v have {kv_heads}: accepted are multiples of the latter"
        )
    if head_dim == 0 or value_dim == 0:
        raise ValueError(
            f"head sizes are {head_dim} (q, k) and {value_dim} (v): accepted are sizes from 1"
        )
    shapes = result_shapes(q.shape, value_dim)
    expect("out", specs.out, shapes[0], q.dtype)
    expect("lse", specs.lse, shapes[1], "float32")
    expect("sink", specs.sink, (q_heads,), "float32")
    slopes = specs.alibi_slopes
    per_batch = slopes is not None and len(slopes.shape) == 2
    expect("alibi_slopes", slopes, (batch, q_heads) if per_batch else (q_heads,), "float32")
    for name, spec in zip(Arrays._fields, specs, strict=True):
        if spec is not None:
            check_layout(name, spec, output=name in ("out", "lse"))
    scale = options.softmax_scale
    return Problem(
        dtype=q.dtype,
        batch=batch,
        q_heads=q_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        max_q=max_q,
        max_k=max_k,
        q_rows=q_rows,
        k_rows=k_rows,
        mask=Mask.of(options.causal, options.window_size),
        scores=Scores(
            softcap=check_scalar("softcap", options.softcap, positive=True) > 0,
            alibi=slopes is not None,
            sink=specs.sink is not None,
            reversed=scale is not None and check_scalar("softmax_scale", scale) <= 0,
            extreme=extreme(scale, head_dim, options.softcap),
        ),
        copy_bytes=widest((16, 4, 2), *(x.grain() for x in (q, specs.k, v, specs.out) if x)),
        tma=_tma(specs, k_rows),
    )


def _tma(specs: Arrays, k_rows: Rows) -> bool:
    """Whether tensor maps can describe what has rows of columns."""
    if k_rows is Rows.PADDED and not rows_of_one(specs.v):
        return False
    return all(x is None or describable(x) for x in (specs.q, specs.k, specs.v, specs.out))


def result_shapes(q: tuple[int, ...], value_dim: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of out and lse for a q of a shape."""
    *batch, rows, heads, _ = q
    return (*batch, rows, heads, value_dim), (*batch, heads, rows)


def _queries(specs: Arrays, options: Options) -> tuple[int, int, Rows]:
    """Batch, longest query and row layout."""
    q, table = specs.q, specs.cu_seqlens_q
    if table is None:
        expect("q", q, ("batch", "q_len", "q_heads", "head_dim"), q.dtype)
        return q.shape[0], q.shape[1], Rows.DENSE
    expect("q", q, ("total_q", "q_heads", "head_dim"), q.dtype)
    expect("cu_seqlens_q", table, ("batch + 1",), "int32")
    if table.shape == (0,):
        raise ValueError("cu_seqlens_q has shape (0,): accepted is (batch + 1,)")
    return table.shape[0] - 1, bound("max_seqlen_q", options.max_seqlen_q, q.shape[0]), Rows.PACKED


def _keys(specs: Arrays, options: Options, batch: int) -> tuple[int, Rows]:
    """Most keys of a sequence, and row layout."""
    k, used, dtype = specs.k, specs.seqused_k is not None, specs.q.dtype
    head_dim = specs.q.shape[-1]
    if specs.cu_seqlens_q is not None and specs.cu_seqlens_k is None and len(k.shape) == 3:
        raise ValueError(
            f"k has shape {k.shape} and cu_seqlens_k is None: accepted are packed keys with "
            "cu_seqlens_k, and padded ones (batch, k_len, kv_heads, head_dim) without"
        )
    lead: tuple[int | str, ...]
    if specs.cu_seqlens_k is None:
        lead, rows = (batch, "k_len"), Rows.PADDED if used else Rows.DENSE
    else:
        lead, rows = ("total_k",), Rows.PACKED_USED if used else Rows.PACKED
    expect("k", k, (*lead, "kv_heads", head_dim), dtype)
    expect("v", specs.v, (*k.shape[:-1], "value_dim"), dtype)
    expect("cu_seqlens_k", specs.cu_seqlens_k, (batch + 1,), "int32")
    expect("seqused_k", specs.seqused_k, (batch,), "int32")
    return bound("max_seqlen_k", options.max_seqlen_k, k.shape[-3]), rows


def expect(
    name: str, spec: Spec | None, shape: tuple[int | str, ...], *dtypes: str, packed: str = ""
) -> None:
    """TypeError or ValueError for an array of another dtype or shape; words are any size. `packed`:
    the argument with which rows of (batch, rows, heads, size) would be packed.
    """
    if spec is None:
        return
    if len(spec.shape) != len(shape) or any(
        isinstance(want, int) and size != want for size, want in zip(spec.shape, shape, strict=True)
    ):
        accepted = ", ".join(map(str, shape)) + ("," if len(shape) == 1 else "")
        other = ""
        if packed and len(spec.shape) == 3:
            other = f", or with {packed} (total, {', '.join(map(str, shape[2:]))})"
        raise ValueError(f"{name} has shape {spec.shape}: accepted is ({accepted}){other}")
    if spec.dtype not in dtypes:
        verb = "is" if len(dtypes) == 1 else "are"
        raise TypeError(f"{name} has dtype {spec.dtype}: accepted {verb} {', '.join(dtypes)}")


def bound(name: str, value: int | None, rows: int) -> int:
    """A longest length: what the caller says, or as many rows as there are."""
    if value is None:
        return rows
    if value < 0:
        raise ValueError(f"{name}={value}: accepted are integers from 0")
    return min(value, rows)


def check_one_device(names: Sequence[str], specs: Sequence[Spec | None]) -> None:
    """TypeError for arrays of NumPy among those of a GPU, ValueError for arrays of two GPUs."""
    given = [(name, spec) for name, spec in zip(names, specs, strict=True) if spec is not None]
    first, like = given[0]
    for name, spec in given:
        if spec.device == like.device:
            continue
        if spec.device is None or like.device is None:
            kinds = [f"{n} is a {_place(s.device)} array" for n, s in ((first, like), (name, spec))]
            raise TypeError(f"{', '.join(kinds)}: accepted are arrays of one kind")
        raise ValueError(
            f"{first} is on CUDA device {like.device}, {name} on {spec.device}: accepted is one "
            "device"
        )


def _place(device: int | None) -> str:
    return "NumPy" if device is None else "CUDA"


def widest(widths: Sequence[int], *grains: int) -> int:
    """The first of some widths of a copy, in bytes, that all grains are multiples of."""
    return next(width for width in widths if all(grain % width == 0 for grain in grains))


# ---- plans ----


def check_same(names: Sequence[str], found: Sequence[Any], prepared: Sequence[Any]) -> None:
    """ValueError that names the first argument, spec or option, in which two calls differ."""
    for name, here, there in zip(names, found, prepared, strict=True):
        if here != there:
            raise ValueError(
                f"{name}: the plan was prepared for {_words(there)}, found {_words(here)}"
            )


def _words(x: Any) -> str:
    return str(x) if isinstance(x, Spec) else repr(x)


# ---- what each call has anew: places in memory, and what tables hold ----


class Neighbours(NamedTuple):
    """An output that was given, and the arrays that it may not share memory with."""

    output: int  # place in Arrays
    before: int  # minus its bytes
    others: tuple[tuple[int, int], ...]  # place in Arrays, bytes


OUTPUTS = tuple(Arrays._fields.index(name) for name in ("out", "lse"))


def neighbours(
    given: Sequence[Spec | None], outputs: Sequence[int] = OUTPUTS
) -> tuple[Neighbours, ...]:
    """For `check_apart`. Outputs that are not given are new, and apart from everything."""
    extents = {place: spec.extent for place, spec in enumerate(given) if spec is not None}
    found = []
    for place in outputs:
        size = extents.pop(place, None)  # and so lse is not compared with out once more
        if size is not None:
            found.append(Neighbours(place, -size, tuple(extents.items())))
    return tuple(found)


def check_apart(
    views: Sequence[Any],
    outputs: tuple[Neighbours, ...],
    fields: Sequence[str] = Arrays._fields,
) -> None:
    """ValueError where an output shares memory with another array of the call."""
    for output, before, others in outputs:
        start = views[output].pointer
        for other, size in others:
            if before < start - views[other].pointer < size and share_memory(
                views[output], views[other]
            ):
                names = fields[output], fields[other]
                raise ValueError(
                    f"{names[0]} shares memory with {names[1]}: accepted is an output of its own"
                )


def check_lengths(specs: Arrays, problem: Problem, tables: Mapping[str, Sequence[int]]) -> None:
    """ValueError, with the index at fault, unless the values in tables of lengths are in bounds.

    `tables` holds those that were given of cu_seqlens_q, cu_seqlens_k and seqused_k.
    """
    if "cu_seqlens_q" in tables:
        lengths = row_lengths("cu_seqlens_q", tables["cu_seqlens_q"], specs.q.shape[0])
        check_each(
            "the rows that cu_seqlens_q gives sequence", lengths, [problem.max_q] * len(lengths)
        )
    lengths = [specs.k.shape[-3]] * problem.batch
    if "cu_seqlens_k" in tables:
        lengths = row_lengths("cu_seqlens_k", tables["cu_seqlens_k"], specs.k.shape[0])
    if "seqused_k" in tables:
        check_each("seqused_k of sequence", tables["seqused_k"], lengths)
        lengths = list(tables["seqused_k"])
    what = "the keys, which max_seqlen_k bounds, of sequence"
    check_each(what, lengths, [problem.max_k] * len(lengths))


def row_lengths(name: str, table: Sequence[int], rows: int) -> list[int]:
    """The lengths of the sequences that a table of first rows describes."""
    floor = 0
    for index, first in enumerate(table):
        if not floor <= first <= rows:
            raise ValueError(f"{name}[{index}] is {first}: accepted are {floor} to {rows}")
        floor = first
    return [after - first for first, after in itertools.pairwise(table)]


def check_scores(slopes: Array | None, sink: Array | None) -> None:
    """ValueError, with its index, for an ALiBi slope or a sink that makes whole rows NaN."""
    if slopes is not None:
        check_values("alibi_slopes", slopes, np.isfinite(slopes), "finite numbers")
    if sink is not None:
        check_values("sink", sink, sink < np.inf, "finite numbers and -inf, which is none")


def check_values(name: str, values: Array, good: Array, accepted: str) -> None:
    """ValueError, with its index, for a value that is not good."""
    if not good.all():
        index = tuple(int(i) for i in np.argwhere(~good)[0])
        at = f"[{', '.join(map(str, index))}]" if index else ""
        raise ValueError(f"{name}{at} is {values[index]}: accepted are {accepted}")


def check_each(what: str, values: Sequence[int], limits: Sequence[int]) -> None:
    """ValueError, with the index at fault, for a value that is not from 0 to its limit."""
    for index, (value, limit) in enumerate(zip(values, limits, strict=True)):
        if not 0 <= value <= limit:
            raise ValueError(f"{what} {index}: found {value}, accepted are 0 to {limit}")
