# SPDX-License-Identifier: Apache-2.0
"""One forward call, from arguments to launch: views -> specs -> Problem -> Plan -> run.

Checks and planning depend on specs and options alone; so they are done once for each kind of call,
in `resolve`, and looked up afterwards. A call then costs its views, its outputs and its launch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from rawattn import host, launch
from rawattn.arrays import Spec, SpecKey, View, check_writable, contiguous, empty, to_host, view
from rawattn.device import Device
from rawattn.params import row_strides
from rawattn.plan import BACKENDS, Plan, plan
from rawattn.problem import Problem, shown
from rawattn.reference import softmax_scale
from rawattn.request import (
    Arrays,
    Neighbours,
    Options,
    check_apart,
    check_lengths,
    check_same,
    check_scores,
    neighbours,
    plain,
    problem_of,
    result_shapes,
)
from rawattn.settings import Settings, forced_backend
from rawattn.softcap import LOG2_E, NONE, fold

Fields = tuple[Any, ...]  # of Arrays or Options


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A kind of call, checked and planned."""

    plan: Plan
    given: Arrays  # their specs
    new: tuple[tuple[int, Spec], ...]  # outputs that are not given: place in Arrays, and spec
    scale: float
    softcap: float
    template: launch.Template | None  # None: arrays of NumPy
    tables: bool  # whether each call checks what tables of lengths, slopes and sinks hold
    neighbours: tuple[Neighbours, ...]  # what each call checks to be apart

    def workspace(self) -> View | None:
        """New memory that the call works in, where it needs some."""
        size = self.plan.workspace_bytes
        return empty(contiguous((size,), "uint8", self.given.q.device)) if size else None

    def pack(self, views: Arrays, workspace: View | None) -> launch.Packed:
        """What is left to do once it is known which arrays; on a GPU."""
        assert self.template is not None
        return self.template.pack([*addresses(views), workspace.pointer if workspace else 0])

    def run(self, views: Arrays, workspace: View | None) -> None:
        """Fills out and lse."""
        if self.template is not None:
            self.pack(views, workspace)()
        elif not self.plan.problem.empty:
            arrays = Arrays(*(x and x.array for x in views))
            host.run(
                *arrays[:5],
                mask=self.plan.problem.mask,
                scale=self.scale,
                softcap=self.softcap,
                alibi_slopes=arrays.alibi_slopes,
                sink=arrays.sink,
                cu_seqlens_q=arrays.cu_seqlens_q,
                cu_seqlens_k=arrays.cu_seqlens_k,
                seqused_k=arrays.seqused_k,
            )


class Prepared:
    """A call made ready: what `prepare` returns and ``plan=`` takes.

    It keeps the arrays alive that it was prepared with, and takes options that equal its own. On
    the very same objects a call, or `run`, costs little more than its launch, and what another
    library has queued on them is not waited for; on other arrays with the same shapes, strides,
    dtypes and device it costs what it costs without a plan. It is of its process: pickling or
    copying it is a TypeError.
    """

    def __init__(self, arrays: Fields, options: Fields) -> None:
        self._arrays, self._options = arrays, options
        self._call, self._views = _bind(arrays, Options(*options))
        self._workspace = self._call.workspace()
        self._result = _result(arrays, Options(*options), self._views)
        self._packed: Callable[[], None] | None = None
        if not self._call.new and not self._call.tables:  # nothing is left but the launch
            on = self._views, self._workspace
            run = functools.partial(self._call.run, *on)
            self._packed = self._call.pack(*on) if self._call.template else run

    @property
    def plan(self) -> Plan:
        """What runs, and why."""
        return self._call.plan

    @property
    def plans(self) -> tuple[Plan, ...]:
        """The same of every step, where a call has several."""
        return (self.plan,)

    @property
    def workspace_size(self) -> int:
        """Bytes of device memory that the call needs beside its arguments."""
        return self.plan.workspace_bytes

    def run(self) -> Any:
        """The call on the arrays that it was prepared with, and the current stream."""
        return self.call(self._arrays, self._options)

    def call(self, arrays: Fields, options: Fields) -> Any:
        """The call, on the current stream. ValueError where it is not the one that was prepared."""
        packed = self._packed
        if packed and all(map(is_, arrays, self._arrays)) and options == self._options:
            packed()
            return self._result
        call, views = _bind(arrays, Options(*options))
        self.check(call, Options(*options))
        call.run(views, self._workspace)
        return _result(arrays, Options(*options), views)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """TypeError: what is packed are addresses, and a copy would not be the owner of what lies
        there.
        """
        raise TypeError(
            "a prepared call holds addresses of this process: it is neither pickled nor copied; "
            "accepted is rawattn.prepare where it is to run"
        )

    def check(self, call: Call, options: Options) -> None:
        """ValueError where a call is not the one that was prepared."""
        if call is not self._call:
            check_same(
                Arrays._fields + Options._fields,
                call.given + plain(options),
                self._call.given + plain(Options(*self._options)),
            )


class Preparer:
    """Takes the place of a plan where the call shall become one."""


def forward(arrays: Fields, options: Fields, plan: Prepared | Preparer | None, stream: Any) -> Any:
    """The call of a public function; returns out, or out and lse.

    `arrays` and `options` are the fields of Arrays and Options, in their order. They come without
    names, which would take a good part of the time of a prepared call, and which it does not need.
    """
    if stream is not None:
        if isinstance(arrays[0], np.ndarray):
            raise refused_stream(stream)
        with launch.on_stream(stream):
            return forward(arrays, options, plan, None)
    if type(plan) is Prepared:
        return plan.call(arrays, options)
    if isinstance(plan, Preparer):
        return Prepared(arrays, options)
    if plan is not None:
        raise refused_plan(plan)
    call, views = _bind(arrays, Options(*options))
    call.run(views, call.workspace())
    return _result(arrays, Options(*options), views)


def refused_stream(stream: Any) -> Exception:
    """The error for a stream beside NumPy arrays."""
    known = any(hasattr(stream, name) for name in ("__cuda_stream__", "ptr", "__index__"))
    error = ValueError if known else TypeError
    return error(f"stream={shown(stream)}: with NumPy arrays accepted is None")


def refused_plan(plan: Any) -> Exception:
    """The error for a plan that is none, or none of the function that is called."""
    if isinstance(plan, Prepared):
        return ValueError("plan was prepared for another function")
    return TypeError(f"plan={shown(plan)}: accepted is what rawattn.prepare returns")


@functools.lru_cache(maxsize=4096)
def resolve(keys: tuple[SpecKey | None, ...], options: Options) -> Call:
    """Checks and plans a kind of call; compiles and loads what it launches.

    `keys` are those of the views of Arrays.
    """
    given = Arrays(*[key and Spec(*key) for key in keys])
    problem = problem_of(given, options)
    scale = softmax_scale(options.softmax_scale, problem.head_dim)
    device = given.q.device
    out_shape, lse_shape = result_shapes(given.q.shape, problem.value_dim)
    specs = given._replace(
        out=given.out or contiguous(out_shape, problem.dtype, device),
        lse=given.lse or (contiguous(lse_shape, "float32", device) if options.return_lse else None),
    )
    new = [(n, spec) for n, spec in enumerate(specs) if spec is not None and keys[n] is None]
    target = Device.host() if device is None else Device.current(device)
    chosen = plan(problem, target, forced_backend(options.backend, BACKENDS))
    softcap = float(options.softcap)
    template = None
    if device is not None:
        scalars = kernel_scalars(specs, problem, scale, softcap)
        size = chosen.workspace_bytes
        workspace = contiguous((size,), "uint8", device) if size else None
        template = launch.Template(
            chosen, device, scalars, {**specs._asdict(), "workspace": workspace}
        )
    return Call(
        plan=chosen,
        given=given,
        new=tuple(new),
        scale=scale,
        softcap=softcap,
        template=template,
        tables=any(given[5:]) and (device is None or Settings.read().check),
        neighbours=neighbours(given),
    )


def _bind(arrays: Fields, options: Options) -> tuple[Call, Arrays]:
    """The kind of a call, and its views, with outputs that were not given."""
    options = plain(options)
    views = views_of(arrays, options.dtype)
    call = resolve(tuple([x and x.key for x in views]), options)
    if call.neighbours:
        check_apart(views, call.neighbours)
    if call.tables:
        _check_tables(call, Arrays(*views))
    for place, spec in call.new:
        views[place] = empty(spec)
    return call, Arrays(*views)


def views_of(arrays: Fields, dtype: str | None) -> list[View | None]:
    """The views of the fields of Arrays."""
    q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink = arrays
    views = [
        view("q", q, dtype),
        view("k", k, dtype),
        view("v", v, dtype),
        None if out is None else view("out", out, dtype),
        None if lse is None else view("lse", lse),
        None if cu_seqlens_q is None else view("cu_seqlens_q", cu_seqlens_q),
        None if cu_seqlens_k is None else view("cu_seqlens_k", cu_seqlens_k),
        None if seqused_k is None else view("seqused_k", seqused_k),
        None if alibi_slopes is None else view("alibi_slopes", alibi_slopes),
        None if sink is None else view("sink", sink),
    ]
    for name, given, found in (("out", out, views[3]), ("lse", lse, views[4])):
        if found is not None:
            check_writable(name, given, found)
    return views


def _check_tables(call: Call, views: Arrays) -> None:
    """Checks what tables of lengths, slopes and sinks hold; waits for a GPU that holds them."""
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
    given = {name: getattr(views, name) for name in names}
    tables = {name: to_host(x).tolist() for name, x in given.items() if x is not None}
    check_lengths(call.given, call.plan.problem, tables)
    check_scores(*(x and to_host(x) for x in (views.alibi_slopes, views.sink)))


def addresses(views: Arrays) -> list[int]:
    """Of all arrays, in their order; 0 is an absent one."""
    return [0 if x is None else x.pointer for x in views]


def _result(arrays: Fields, options: Options, views: Arrays) -> Any:
    """The caller's own outputs, or those that were allocated."""
    out, lse = arrays[3:5]
    out = views.out.array if out is None else out
    if not options.return_lse:
        return out
    return out, views.lse.array if lse is None else lse


def kernel_scalars(
    specs: Arrays, problem: Problem, scale: float, softcap: float
) -> dict[str, float]:
    """The fields of FwdParams that neither hold an address nor are the plan's to decide."""
    packed_q, packed_k = len(specs.q.shape) == 3, len(specs.k.shape) == 3
    strides: dict[str, float] = {}
    for name in ("q", "k", "v", "out"):
        strides |= row_strides(name, getattr(specs, name))
    *lse_batch, lse_head = specs.lse.steps[:-1] if specs.lse else (0, 0)
    slopes = specs.alibi_slopes
    return {
        **strides,
        "stride_lse_batch": lse_batch[0] if lse_batch else 0,
        "stride_lse_head": lse_head,
        "stride_alibi_batch": slopes.steps[0] if slopes and len(slopes.shape) == 2 else 0,
        "batch": problem.batch,
        "q_heads": problem.q_heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "q_len": 0 if packed_q else specs.q.shape[1],
        "k_len": 0 if packed_k else specs.k.shape[1],
        "new_k": 0,
        "copy_bytes": problem.copy_bytes,
        "window_left": problem.mask.left,
        "window_right": problem.mask.right,
        "top_left": int(problem.mask.top_left),
        "scale_log2": scale * LOG2_E,
        "softcap_log2": softcap * LOG2_E,
        **(NONE if slopes else fold(scale, softcap)),
    }
