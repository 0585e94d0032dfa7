# SPDX-License-Identifier: Apache-2.0
"""One forward call, from arguments to launch: views -> specs -> Problem -> Plan -> run.

Checks and planning depend on specs and options alone; so they are done once for each kind of call,
in `resolve`, and looked up afterwards. A call then costs its views, its outputs and its launch.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from operator import is_
from typing import Any

import numpy as np

from rawattn import host, launch
from rawattn.arrays import Spec, View, contiguous, empty, to_host, view
from rawattn.device import Device
from rawattn.plan import Plan, plan
from rawattn.problem import Problem, check_scalar
from rawattn.request import (
    Arrays,
    Options,
    check_lengths,
    check_same,
    plain,
    problem_of,
    result_shapes,
)

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says; it is read once."""

    backend: str | None  # RAWATTN_BACKEND
    check: bool  # RAWATTN_CHECK

    @staticmethod
    @functools.cache
    def read() -> Settings:
        return Settings(
            backend=os.environ.get("RAWATTN_BACKEND") or None,
            check=os.environ.get("RAWATTN_CHECK", "0") not in ("", "0"),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A kind of call, checked and planned."""

    plan: Plan
    specs: Arrays  # outputs among them, given or not
    scale: float
    softcap: float
    template: launch.Template | None  # None: arrays of NumPy

    def run(self, views: Arrays) -> None:
        """Fills out and lse."""
        if self.template is not None:
            self.template.pack(_pointers(views))()
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

    It keeps the arrays alive that it was prepared with. On the very same objects a call costs
    little more than its launch, and what another library has queued on them is not waited for; on
    other arrays with the same shapes, strides, dtypes and device it costs what it costs without a
    plan.
    """

    def __init__(self, arrays: Arrays, options: Options) -> None:
        self._arrays, self._options = arrays, options
        self._call, self._views = _bind(arrays, options)
        self._result = _result(arrays, options, self._views)
        self._packed: Callable[[], None] | None = None
        if arrays.out is not None and (arrays.lse is not None or not options.return_lse):
            call, views = self._call, self._views
            pack = call.template and call.template.pack(_pointers(views))
            self._packed = pack or functools.partial(call.run, views)

    @property
    def plan(self) -> Plan:
        """What runs, and why."""
        return self._call.plan

    def run(self, arrays: Arrays, options: Options) -> Any:
        """The call, on the current stream. ValueError where it is not the one that was prepared."""
        same = all(map(is_, arrays, self._arrays)) and options == self._options
        if same and self._packed is not None and not Settings.read().check:
            self._packed()
            return self._result
        call, views = _bind(arrays, options)
        if call is not self._call:
            found, prepared = (call.specs, plain(options)), (self._call.specs, plain(self._options))
            check_same(found, prepared)
        call.run(views)
        return _result(arrays, options, views)


class Preparer:
    """Takes the place of a plan, and makes one of the call."""

    def run(self, arrays: Arrays, options: Options) -> Prepared:
        return Prepared(arrays, options)


def forward(arrays: Arrays, options: Options, plan: Prepared | Preparer | None, stream: Any) -> Any:
    """The call of a public function; returns out, or out and lse."""
    if stream is not None:
        if isinstance(arrays.q, np.ndarray):
            raise ValueError(f"stream={stream!r}: with NumPy arrays accepted is None")
        with launch.on_stream(stream):
            return forward(arrays, options, plan, None)
    if plan is not None:
        if not isinstance(plan, (Prepared, Preparer)):
            raise TypeError(f"plan={plan!r}: accepted is what rawattn.prepare returns")
        return plan.run(arrays, options)
    call, views = _bind(arrays, options)
    call.run(views)
    return _result(arrays, options, views)


@functools.lru_cache(maxsize=4096)
def resolve(specs: Arrays, options: Options) -> Call:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    problem = problem_of(specs, options)
    scale = options.softmax_scale
    scale = problem.head_dim**-0.5 if scale is None else check_scalar("softmax_scale", scale)
    device = specs.q.device
    out_shape, lse_shape = result_shapes(specs.q.shape, problem.value_dim)
    specs = specs._replace(
        out=specs.out or contiguous(out_shape, problem.dtype, device),
        lse=specs.lse or (contiguous(lse_shape, "float32", device) if options.return_lse else None),
    )
    target = Device.host() if device is None else Device.current(device)
    chosen = plan(problem, target, options.backend or Settings.read().backend)
    softcap = float(options.softcap)
    template = None
    if device is not None:
        template = launch.Template(chosen, device, _scalars(specs, problem, scale, softcap))
    return Call(plan=chosen, specs=specs, scale=scale, softcap=softcap, template=template)


def _bind(arrays: Arrays, options: Options) -> tuple[Call, Arrays]:
    """The kind of a call, and its views, with outputs that were not given."""
    options = plain(options)
    views = _views(arrays, options.dtype)
    call = resolve(Arrays(*[x and x.spec for x in views]), options)
    if Settings.read().check:
        names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_k")
        given = {name: getattr(views, name) for name in names}
        tables = {name: to_host(x).tolist() for name, x in given.items() if x is not None}
        check_lengths(call.specs, call.plan.problem, tables)
    if views.out is None:
        views = views._replace(out=empty(call.specs.out))
    if views.lse is None and call.specs.lse is not None:
        views = views._replace(lse=empty(call.specs.lse))
    return call, views


def _views(arrays: Arrays, dtype: str | None) -> Arrays:
    q, k, v, out, *others = arrays
    found: list[View | None] = [view("q", q, dtype), view("k", k, dtype), view("v", v, dtype)]
    found.append(None if out is None else view("out", out, dtype))
    for name, x in zip(Arrays._fields[4:], others, strict=True):
        found.append(None if x is None else view(name, x))
    views = Arrays(*found)
    for name, x in (("out", views.out), ("lse", views.lse)):
        if x is not None and x.spec.device is None and not x.array.flags.writeable:
            raise ValueError(f"{name} is read-only: accepted is an array that can be written")
    return views


def _pointers(views: Arrays) -> dict[str, int | None]:
    return {name: x and x.pointer for name, x in zip(Arrays._fields, views, strict=True)}


def _result(arrays: Arrays, options: Options, views: Arrays) -> Any:
    """The caller's own outputs, or those that were allocated."""
    out = views.out.array if arrays.out is None else arrays.out
    if not options.return_lse:
        return out
    return out, views.lse.array if arrays.lse is None else arrays.lse


def _steps(spec: Spec) -> tuple[int, ...]:
    """Strides, with 0 for axes of size 1: what stands there is no promise, and may be unaligned."""
    return tuple(s if n > 1 else 0 for n, s in zip(spec.shape, spec.strides, strict=True))


def _scalars(specs: Arrays, problem: Problem, scale: float, softcap: float) -> dict[str, float]:
    """The fields of FwdParams that neither hold an address nor are the plan's to decide."""
    packed_q, packed_k = len(specs.q.shape) == 3, len(specs.k.shape) == 3
    strides: dict[str, float] = {}
    for name in ("q", "k", "v", "out"):
        *batch, row, head = _steps(getattr(specs, name))[:-1]
        strides[f"stride_{name}_batch"] = batch[0] if batch else 0
        strides[f"stride_{name}_row"] = row
        strides[f"stride_{name}_head"] = head
    *lse_batch, lse_head = _steps(specs.lse)[:-1] if specs.lse else (0, 0)
    slopes = specs.alibi_slopes
    return {
        **strides,
        "stride_lse_batch": lse_batch[0] if lse_batch else 0,
        "stride_lse_head": lse_head,
        "stride_alibi_batch": _steps(slopes)[0] if slopes and len(slopes.shape) == 2 else 0,
        "batch": problem.batch,
        "q_heads": problem.q_heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "q_len": 0 if packed_q else specs.q.shape[1],
        "k_len": 0 if packed_k else specs.k.shape[1],
        "copy_bytes": problem.copy_bytes,
        "window_left": problem.mask.left,
        "window_right": problem.mask.right,
        "top_left": int(problem.mask.top_left),
        "scale_log2": scale * LOG2_E,
        "softcap_log2": softcap * LOG2_E,
    }
