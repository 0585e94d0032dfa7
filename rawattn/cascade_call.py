# SPDX-License-Identifier: Apache-2.0
"""One call of cascade attention, from specs to launches: the shared prefix under the queries of all
sequences, the rest of each sequence under its own, and both merged.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from rawattn import host
from rawattn.arrays import DTYPES, Spec, SpecKey, View, contiguous, to_device, to_host
from rawattn.calls import (
    ABSENT,
    Fields,
    Kind,
    Operation,
    Ref,
    Steps,
    Views,
    check_workspace,
)
from rawattn.device import Device
from rawattn.merge_call import MergeOptions, States, merge_problem, merge_scalars
from rawattn.paged_call import LSE, OUT, PARAMS, WORKSPACE, Request, accepted, paged_result
from rawattn.paged_call import operation as paged_operation
from rawattn.paged_host import scale
from rawattn.paged_problem import PagedProblem, Scale
from rawattn.paged_request import PagedArrays, PagedOptions
from rawattn.paged_steps import add_attention
from rawattn.paged_tables import check_tables
from rawattn.plan import Plan, merge
from rawattn.plan import paged as paged_plan
from rawattn.problem import Mask, Rows, Unsupported
from rawattn.reference import Array, merge_states
from rawattn.reference_paged import gather_cache
from rawattn.request import neighbours
from rawattn.settings import Settings, forced_backend


def operation(names: PagedArrays, words: Any) -> Operation:
    """The operation of a function that calls its arrays and its options so."""
    made = paged_operation(names, words, table=True, stated=("common_prefix_len",))
    return replace(made, resolve=functools.partial(resolve, names), result=_result)


def _result(arrays: Fields, views: Views, options: PagedOptions) -> Any:
    """As of other paged calls; a new lse of dense queries is packed, (q_heads, batch * q_len)."""
    found = paged_result(arrays, views, options)
    q = views[0]
    if not options.return_lse or arrays[LSE] is not None or q is None or len(q.spec.shape) == 3:
        return found
    batch, q_len, heads, _ = q.spec.shape
    return found[0], found[1].reshape(heads, batch, q_len).swapaxes(0, 1)


@functools.lru_cache(maxsize=4096)
def resolve(names: PagedArrays, keys: tuple[SpecKey | None, ...], options: PagedOptions) -> Kind:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    given = PagedArrays(*[key and Spec(*key) for key in keys])
    request, joined = shared(names, given, options)
    device = given.q.device
    target = Device.host() if device is None else Device.current(device)
    steps = plans(request, joined, target)
    made = None if device is None else _steps(request, joined, steps, device)
    check_workspace(given.workspace, made.workspace_bytes if made else 0)
    checked = device is None or Settings.read().check
    new = ((OUT, request.specs.out), (LSE, joined.lse))
    return Kind(
        plans=tuple(steps),
        given=given,
        new=tuple((n, x) for n, x in new if x and keys[n] is None),
        neighbours=neighbours(given, (OUT, LSE, WORKSPACE)),
        check=functools.partial(_check, request=request) if checked else None,
        host=functools.partial(_run, request=request),
        steps=tuple(made.steps) if made else None,
        constants=made.kept if made else (),
        parts=tuple(made.parts) if made else (),
        workspace_bytes=made.workspace_bytes if made else 0,
    )


def shared(names: PagedArrays, given: PagedArrays, options: PagedOptions) -> tuple[Request, Joined]:
    """Checks everything: the call as one without a prefix, its rows as those of one sequence."""
    request = accepted(names, False, given, options)
    problem, prefix = request.problem, options.common_prefix_len
    if prefix % problem.page or prefix > problem.max_k:
        raise ValueError(
            f"common_prefix_len={prefix}: accepted are multiples of the {problem.page} tokens of a "
            f"page, up to the {problem.max_k} that a sequence has room for"
        )
    for name in ("k_scale", "v_scale"):
        if getattr(problem, name) is Scale.BATCH_HEAD:
            kv_heads = problem.kv_heads
            raise ValueError(
                f"{getattr(names, name)} has shape {getattr(given, name).shape}: accepted are (), "
                f"(1,), ({kv_heads},), as sequences share the prefix"
            )
    return request, _joined(request, given)


def plans(request: Request, joined: Joined, device: Device) -> list[Plan]:
    """Of attention to the prefix, of attention to what follows it, and of merging both; raises
    `Unsupported` where nobody takes one of them.
    """
    backend = forced_backend(request.options.backend, paged_plan.BACKENDS)
    parts = _partial_problems(request, joined)
    merged = merge_problem(_states(joined), joined.out, request.problem.dtype)
    return [
        *(_plan(what, part, device, backend) for what, part in parts.items()),
        merge.plan(merged, device),
    ]


# ---- the rows of all sequences as those of one ---------------------------------------------------


class Joined(NamedTuple):
    """Specs of packed queries, or of dense ones as if they were packed."""

    q: Spec | None  # (rows, heads, size); None: they do not lie at equal distances
    out: Spec  # (rows, heads, size)
    lse: Spec | None  # (heads, rows)

    @property
    def rows(self) -> int:
        return self.out.shape[0]


def _joined(request: Request, given: PagedArrays) -> Joined:
    """ValueError where the rows of outputs do not lie at equal distances."""
    specs, names = request.specs, request.names
    if specs.cu_seqlens_q is not None:
        return Joined(specs.q, specs.out, specs.lse)
    out = _join(specs.out, 1)
    lse = specs.lse
    if given.lse is not None:
        lse = _join(lse, 2)
    elif lse is not None:
        batch, heads, q_len = lse.shape
        lse = contiguous((heads, batch * q_len), lse.dtype, lse.device)
    for name, spec, found in (("out", specs.out, out), ("lse", specs.lse, lse)):
        if spec is not None and found is None:
            raise ValueError(
                f"{getattr(names, name)} of shape {spec.shape} has strides {spec.byte_strides} "
                "bytes: accepted are rows of all sequences at equal distances"
            )
    return Joined(_join(specs.q, 1), out, lse)


def _join(spec: Spec, row: int) -> Any:
    """A spec whose batch, its first axis, has become part of its axis of rows; None: it cannot."""
    batch, rows = spec.shape[0], spec.shape[row]
    apart, step = spec.byte_strides[0], spec.byte_strides[row]
    if rows == 1:
        step = apart
    elif batch > 1 and rows and apart != rows * step:
        return None
    shape, strides = list(spec.shape), list(spec.byte_strides)
    shape[row], strides[row] = batch * rows, step
    return spec._replace(shape=tuple(shape[1:]), byte_strides=tuple(strides[1:]))


def _plan(what: str, part: PagedProblem, device: Device, backend: str | None) -> Plan:
    """The plan of a part; Unsupported, which says of what, as its sizes are not the caller's."""
    try:
        return paged_plan.plan(part, device, backend)
    except Unsupported as error:
        raise Unsupported(f"attention to {what}: {error}") from None


def _partial_problems(request: Request, joined: Joined) -> dict[str, PagedProblem]:
    """Attention to the prefix, and to what follows it."""
    problem, prefix = request.problem, request.options.common_prefix_len
    one_sequence: dict[str, Any] = {}
    if joined.q is not None:
        one_sequence = {"batch": 1, "max_q": joined.rows, "q_rows": Rows.DENSE}
    before = replace(
        problem,
        max_k=prefix,
        mask=Mask(),
        scores=replace(problem.scores, sink=False),
        **one_sequence,
    )
    after = replace(problem, max_k=problem.max_k - prefix)
    return {"the shared prefix": before, "what follows the shared prefix": after}


def _states(joined: Joined) -> States:
    """The two partial results, which lie in the workspace."""
    out = contiguous(joined.out.shape, joined.out.dtype, joined.out.device)
    lse = contiguous(joined.out.shape[1::-1], "float32", joined.out.device)
    return States(2, out, out, lse, lse)


# ---- on a GPU ------------------------------------------------------------------------------------


def _steps(request: Request, joined: Joined, plans: list[Plan], device: int) -> Steps:
    states = _states(joined)
    specs, prefix = request.specs, request.options.common_prefix_len
    batch = plans[0].problem.batch
    made = Steps(device, len(specs), [to_device([prefix] * batch, "int32", device, shared=True)])
    arrays = {name: Ref(x, n) for n, (name, x) in enumerate(specs._asdict().items()) if n < PARAMS}
    outs = made.temporary(states.first), made.temporary(states.others)
    lses = made.temporary(states.first_lse), made.temporary(states.others_lse)
    table, pages = specs.block_table, prefix // request.problem.page
    shared = table._replace(shape=(batch, pages), byte_strides=(0, 4))
    before = arrays | {
        "block_table": Ref(shared, arrays["block_table"].place),
        "seqused_k": made.constants[0],
        "sink": ABSENT,
    }
    rest = table._replace(shape=(table.shape[0], table.shape[1] - pages))
    after = arrays | {"block_table": Ref(rest, arrays["block_table"].place, 4 * pages)}
    if joined.q is not None:
        before |= {"q": Ref(_one(joined.q), 0), "cu_seqlens_q": ABSENT}
    for plan, step, out, lse, added in (
        (plans[0], before, outs[0], lses[0], 0),
        (plans[1], after, outs[1], lses[1], -prefix),
    ):
        step |= {
            "out": Ref(_as(out, step["q"]), out.place),
            "lse": Ref(_lse_as(lse, step["q"]), lse.place),
        }
        add_attention(made, plan, request, step, added)
    names = ("first", "others", "first_lse", "others_lse")
    merged = dict(zip(names, (*outs, *lses), strict=True))
    made.add(
        plans[2],
        merge_scalars(states, joined.out, joined.lse, MergeOptions()),
        merged
        | {
            "out_scale": ABSENT,
            "out": Ref(joined.out, OUT),
            "lse": ABSENT if joined.lse is None else Ref(joined.lse, LSE),
        },
    )
    return made


def _one(spec: Spec) -> Spec:
    """Packed rows as those of one dense sequence."""
    return spec._replace(shape=(1, *spec.shape), byte_strides=(0, *spec.byte_strides))


def _as(packed: Ref, q: Ref) -> Spec:
    """A packed out as the out of queries like `q`."""
    assert packed.spec is not None and q.spec is not None
    shape = (*q.spec.shape[:-1], packed.spec.shape[-1])
    return contiguous(shape, packed.spec.dtype, packed.spec.device)


def _lse_as(packed: Ref, q: Ref) -> Spec:
    """A packed lse, (heads, rows), as that of queries like `q`."""
    lse = packed.spec
    assert lse is not None and q.spec is not None
    if len(q.spec.shape) == 3:
        return lse
    batch, q_len, heads, _ = q.spec.shape
    row, head = lse.byte_strides[1], lse.byte_strides[0]
    return lse._replace(shape=(batch, heads, q_len), byte_strides=(q_len * row, head, row))


# ---- NumPy arrays --------------------------------------------------------------------------------


def _check(views: list[View | None], *, request: Request) -> None:
    """`check_tables`, and that every sequence has the prefix, and its queries behind it."""
    names, problem = request.names, request.problem
    pages = request.options.common_prefix_len // problem.page
    check_tables(views, names=names, problem=problem, cache=request.cache, new_k=0, shared=pages)
    of = PagedArrays(*views)
    used, prefix = to_host(of.seqused_k), request.options.common_prefix_len
    queries = np.full(len(used), problem.max_q)
    if of.cu_seqlens_q is not None:
        starts, rows = to_host(of.cu_seqlens_q), of.q.spec.shape[0]
        if (starts[0], starts[-1]) != (0, rows):
            raise ValueError(
                f"{names.cu_seqlens_q} goes from {starts[0]} to {starts[-1]}: accepted is 0 to "
                f"{rows}, all rows of {names.q}"
            )
        queries = np.diff(starts)
    behind = queries if prefix and problem.mask.right >= 0 else 0 * queries
    for n, (length, more) in enumerate(zip(used.tolist(), behind.tolist(), strict=True)):
        if length < prefix + more:
            also = f", and its {more} queries" if more else ""
            raise ValueError(
                f"{names.seqused_k}[{n}] is {length}: accepted are {prefix + more} or more, the "
                f"tokens of the prefix (common_prefix_len={prefix}){also}"
            )


def _run(arrays: list[Any], *, request: Request) -> None:
    """The call on NumPy arrays."""
    a, problem, options = PagedArrays(*arrays), request.problem, request.options
    if problem.empty:
        return
    dtype = DTYPES[request.cache.dtype]
    prefix = options.common_prefix_len
    pages = prefix // problem.page
    q = a.q.reshape(-1, *a.q.shape[-2:])
    outs = np.empty((2, *q.shape[:-1], problem.value_dim), a.q.dtype)
    lses = np.empty((2, q.shape[1], q.shape[0]), np.float32)

    def attend(state: int, rows: Array, table: Array, lengths: Any, **more: Any) -> None:
        k, v, starts = gather_cache(
            a.k_cache.view(dtype),
            a.v_cache.view(dtype),
            layout=problem.layout,
            block_table=table,
            seqused_k=lengths,
            k_scale=scale(a.k_scale, options.k_scale),
            v_scale=scale(a.v_scale, options.v_scale),
        )
        host.run(
            rows,
            k,
            v,
            outs[state].reshape(*rows.shape[:-1], problem.value_dim),
            _lse_of(lses[state], rows),
            scale=options.softmax_scale,
            softcap=options.softcap,
            cu_seqlens_k=starts,
            **more,
        )

    attend(0, q[None], a.block_table[:1, :pages], [prefix], mask=Mask())
    behind: Any = {"mask": problem.mask, "sink": a.sink, "cu_seqlens_q": a.cu_seqlens_q}
    attend(1, a.q, a.block_table[:, pages:], a.seqused_k - prefix, **behind)
    with np.errstate(all="ignore"):
        out, lse = merge_states(outs, lses.swapaxes(-1, -2))
    a.out[...] = out.reshape(a.out.shape)
    if a.lse is not None:
        into = a.lse if a.lse.ndim == 2 else a.lse.swapaxes(0, 1)
        into[...] = lse.T.reshape(into.shape)


def _lse_of(packed: Array, q: Array) -> Array:
    """A view of an lse (heads, rows), with the axes of the lse of queries like `q`."""
    if q.ndim == 3:
        return packed
    batch, q_len, heads, _ = q.shape
    return packed.reshape(heads, batch, q_len).swapaxes(0, 1)
