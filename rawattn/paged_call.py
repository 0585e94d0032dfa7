# SPDX-License-Identifier: Apache-2.0
"""One call of attention over a paged cache, from specs to launches: new tokens are stored, queries
turned, and then there is attention.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np

from rawattn import paged_host
from rawattn.arrays import (
    DTYPES,
    Spec,
    SpecKey,
    View,
    check_layout,
    contiguous,
    to_device,
    view,
)
from rawattn.cache_problem import SequencesProblem
from rawattn.cache_request import Cache, row_tokens
from rawattn.calls import (
    ABSENT,
    Fields,
    Kind,
    Operation,
    Ref,
    Steps,
    Views,
    check_workspace,
    results,
)
from rawattn.device import Device
from rawattn.kv_write_call import append_scalars, rotary_scalars
from rawattn.kv_write_request import Appended, appended
from rawattn.paged_problem import PagedProblem, PageTable
from rawattn.paged_request import WORDS, PagedArrays, PagedOptions, plain, problem_of
from rawattn.paged_steps import add_attention
from rawattn.paged_tables import check_tables
from rawattn.plan import Plan, kv_write
from rawattn.plan import paged as paged_plan
from rawattn.problem import MAX_LENGTH
from rawattn.request import expect, neighbours, result_shapes
from rawattn.settings import Settings, forced_backend

OUT, LSE = (PagedArrays._fields.index(name) for name in ("out", "lse"))
SCRATCH = [PagedArrays._fields.index(name) for name in ("exp_sum", "max_logits", "tmp_out")]
WORKSPACE = PagedArrays._fields.index("workspace")
CACHES = frozenset(PagedArrays._fields.index(name) for name in ("k_cache", "v_cache"))
NEW = PagedArrays._fields.index("k")
PARAMS = 16  # the first fields of PagedArrays are the pointers of PagedParams


def operation(
    names: PagedArrays,
    words: Any = WORDS,
    *,
    one_query: bool = False,
    table: bool = False,
    stated: tuple[str, ...] = (),
) -> Operation:
    """The operation of a function that calls its arrays and its options so.

    `one_query`: q and out are (batch, q_heads, head size), one query each. `table`: no call lacks a
    block table, and lengths. `stated`: options that no call lacks.
    """
    required = ("q", "k_cache", "v_cache", *(("block_table", "seqused_k") if table else ()))
    typed = {"q", "tmp_out", "k_cache", "v_cache", "out", "k", "v"}
    return Operation(
        names=names,
        required=frozenset(PagedArrays._fields.index(name) for name in required),
        words=words,
        options=PagedOptions,
        typed=frozenset(n for n, name in enumerate(PagedArrays._fields) if name in typed),
        outputs=frozenset({OUT, LSE, *SCRATCH, WORKSPACE}),
        grows=(CACHES, NEW),
        plain=functools.partial(plain, words, stated=stated),
        dtype=lambda options: options.dtype,
        resolve=functools.partial(resolve, names, one_query),
        result=paged_result,
        workspace=WORKSPACE,
    )


def paged_result(arrays: Fields, views: Views, options: PagedOptions) -> Any:
    """The caller's own outputs, or those that were allocated."""
    return results(arrays, views, OUT, *((LSE,) if options.return_lse else ()))


def equal_lengths(q: Any, cu_seqlens_q: Any, length: int) -> Any:
    """A table that gives each sequence this length, where `q` is. ValueError for one below 0."""
    if not 0 <= length <= MAX_LENGTH:
        raise ValueError(f"cache_seqlens={length}: accepted are 0 to {MAX_LENGTH}")
    table = view("q", q) if cu_seqlens_q is None else view("cu_seqlens_q", cu_seqlens_q)
    shape, _, _, device, _ = table.key
    batch = (shape or (0,))[0] - (cu_seqlens_q is not None)
    lengths = np.full(max(0, batch), length, np.int32)
    return lengths if device is None else to_device(lengths, "int32", device).array


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A paged call that is accepted."""

    names: PagedArrays
    specs: PagedArrays  # outputs among them, given or not; q and out with an axis of queries
    options: PagedOptions
    problem: PagedProblem
    cache: Cache
    new: Appended | None
    row_tokens: int  # where sequences begin anywhere in their row, from a row to the next

    @property
    def new_k(self) -> int:
        return self.new.tokens if self.new else 0

    @property
    def measured(self) -> bool:
        """Whether the keys of sequences are worked out by a step of their own."""
        return self.problem.leftpad or self.specs.cu_seqlens_new is not None


@functools.lru_cache(maxsize=4096)
def resolve(
    names: PagedArrays,
    one_query: bool,
    keys: tuple[SpecKey | None, ...],
    options: PagedOptions,
) -> Kind:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    given = PagedArrays(*[key and Spec(*key) for key in keys])
    request = accepted(names, one_query, given, options)
    device = given.q.device
    target = Device.host() if device is None else Device.current(device)
    steps = plans(request, target)
    made = None if device is None else _steps(request, steps, device)
    check_workspace(given.workspace, made.workspace_bytes if made else 0)
    new = [(OUT, request.specs.out), (LSE, request.specs.lse)]
    written = [OUT, LSE, *SCRATCH, WORKSPACE, *(CACHES if request.new else ())]
    return Kind(
        plans=tuple(steps),
        given=given,
        new=tuple((n, _without_axis(x, one_query)) for n, x in new if x and keys[n] is None),
        neighbours=neighbours(given, written),
        check=_check(request, device),
        host=functools.partial(_run, request=request, one_query=one_query),
        steps=tuple(made.steps) if made else None,
        constants=made.kept if made else (),
        parts=tuple(made.parts) if made else (),
        workspace_bytes=made.workspace_bytes if made else 0,
    )


def accepted(
    names: PagedArrays, one_query: bool, given: PagedArrays, options: PagedOptions
) -> Request:
    """Checks everything, and adds the outputs that are not given."""
    if one_query:
        k, v = given.k_cache.shape, given.v_cache.shape  # x-major
        sizes = k[2] * k[4] if len(k) == 5 else "head_dim", v[2] if len(v) == 4 else "value_dim"
        expect(names.q, given.q, ("batch", "q_heads", sizes[0]), given.q.dtype)
        expect(names.out, given.out, (*given.q.shape[:2], sizes[1]), given.q.dtype)
        for name, spec in ((names.q, given.q), (names.out, given.out)):
            if spec is not None and spec.dtype in DTYPES:  # before their shapes are other ones
                check_layout(name, spec, output=name == names.out)
        given = given._replace(q=_with_axis(given.q), out=given.out and _with_axis(given.out))
    problem, cache = problem_of(names, given, options)
    new = appended(names, given, problem, cache, interleaved=options.rotary_interleaved)
    device = given.q.device
    out_shape, lse_shape = result_shapes(given.q.shape, cache.value_dim)
    out = given.out or contiguous(out_shape, problem.dtype, device)
    lse = given.lse or (contiguous(lse_shape, "float32", device) if options.return_lse else None)
    specs = given._replace(out=out, lse=lse)
    return Request(
        names=names,
        specs=specs,
        options=options,
        problem=problem,
        cache=cache,
        new=new,
        row_tokens=row_tokens(names, specs, cache) if problem.leftpad else 0,
    )


def plans(request: Request, device: Device) -> list[Plan]:
    """Of all steps, attention the last; raises `Unsupported` where nobody takes one of them."""
    new = request.new
    first: list[Any] = [new.write, new.rotary] if new else []
    if request.measured:
        first.append(SequencesProblem(batch=request.problem.batch))
    backend = forced_backend(request.options.backend, paged_plan.BACKENDS)
    return [
        *(kv_write.plan(problem, device) for problem in first if problem is not None),
        paged_plan.plan(request.problem, device, backend),
    ]


def _with_axis(x: Spec) -> Spec:
    """(batch, heads, size) as one query a sequence."""
    return x._replace(
        shape=(x.shape[0], 1, *x.shape[1:]),
        byte_strides=(x.byte_strides[0], 0, *x.byte_strides[1:]),
    )


def _without_axis(x: Spec, one_query: bool) -> Spec:
    if not one_query or len(x.shape) != 4:
        return x
    return contiguous((x.shape[0], *x.shape[2:]), x.dtype, x.device)


def _check(request: Request, device: int | None) -> Any:
    """What looks at the values of tables, where that is done."""
    if device is not None and not Settings.read().check:
        return None
    return functools.partial(
        check_tables,
        names=request.names,
        problem=request.problem,
        cache=request.cache,
        new_k=request.new_k,
    )


def _run(arrays: list[Any], *, request: Request, one_query: bool) -> None:
    """The call on NumPy arrays."""
    if one_query:
        arrays = list(arrays)
        for place in (0, OUT):
            arrays[place] = arrays[place][:, None]
    paged_host.run(arrays, problem=request.problem, cache=request.cache, options=request.options)


# ---- on a GPU ------------------------------------------------------------------------------------


def _steps(request: Request, plans: list[Plan], device: int) -> Steps:
    specs, new = request.specs, request.new
    constants = _constants(request, device)
    made = Steps(device, len(specs), list(constants.values()))
    arrays = {name: Ref(x, n) for n, (name, x) in enumerate(specs._asdict().items())}
    arrays |= dict(zip(constants, made.constants, strict=True))
    if specs.cache_batch_idx is not None:
        idx = specs.cache_batch_idx
        column = idx._replace(shape=(*idx.shape, 1), byte_strides=(*idx.byte_strides, 4))
        arrays["block_table"] = Ref(column, arrays["cache_batch_idx"].place)
    if new is not None:
        _add_new(made, request, plans, arrays)
    new_k = request.new_k
    if request.measured:
        _add_sequences(made, request, plans[-2], arrays)
        new_k = 0
    params = {name: arrays[name] for name in PagedArrays._fields[:PARAMS]}
    add_attention(made, plans[-1], request, params, new_k)
    return made


def _constants(request: Request, device: int) -> dict[str, View]:
    """The tables of a cache that has none: a page for each sequence, full where nothing is said."""
    specs, problem, found = request.specs, request.problem, {}
    if problem.table is PageTable.DENSE and specs.block_table is None:
        if specs.cache_batch_idx is None:
            rows = np.arange(problem.batch)[:, None]  # a column, also of no sequence
            found["block_table"] = to_device(rows, "int32", device, shared=True)
        if specs.seqused_k is None:
            full = [problem.max_k] * problem.batch
            found["seqused_k"] = to_device(full, "int32", device, shared=True)
    return found


def _add_new(made: Steps, request: Request, plans: list[Plan], arrays: dict[str, Ref]) -> None:
    """The steps that store new tokens and turn queries, which then are those of `arrays`."""
    specs, new = request.specs, request.new
    assert new is not None
    tables = {"cos": arrays["rotary_cos"], "sin": arrays["rotary_sin"]}
    tables["seqused_k"] = arrays["seqused_k"]
    names = ("k", "v", "k_cache", "v_cache", "k_scale", "v_scale", "block_table")
    made.add(
        plans[0],
        append_scalars(specs, request.cache, request.options, new, arrays["block_table"].spec),
        {
            **{name: arrays[name] for name in names},
            **tables,
            "slot_mapping": ABSENT,
            "cu_seqlens_new": arrays["cu_seqlens_new"],
        },
    )
    if new.rotary is not None:
        turned = contiguous(specs.q.shape, specs.q.dtype, made.device)
        y = made.temporary(turned)
        made.add(
            plans[1],
            rotary_scalars(specs, turned, request.problem, request.options, new),
            {"x": arrays["q"], "y": y, "cu_seqlens_new": arrays["cu_seqlens_q"], **tables},
        )
        arrays["q"] = y


def _add_sequences(made: Steps, request: Request, plan: Plan, arrays: dict[str, Ref]) -> None:
    """The step that works out the keys of sequences, which then are those of `arrays`."""
    batch = request.problem.batch
    one_each = contiguous((batch,), "int32", made.device)
    found = {"lengths": made.temporary(one_each), "first_tokens": ABSENT}
    if request.problem.leftpad:
        found["first_tokens"] = made.temporary(contiguous((batch, 1), "int32", made.device))
    numbers = {
        "batch": batch,
        "new_k": request.new_k,
        "max_k": request.problem.max_k,
        "row_tokens": request.row_tokens,
    }
    names = ("seqused_k", "cu_seqlens_new", "leftpad", "cache_batch_idx")
    made.add(plan, numbers, {**{name: arrays[name] for name in names}, **found})
    arrays["seqused_k"] = found["lengths"]
    if request.problem.leftpad:
        arrays["block_table"] = found["first_tokens"]
