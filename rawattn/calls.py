# SPDX-License-Identifier: Apache-2.0
"""Calls that are made of steps: what paged attention, cache writes and merging have in common.

An `Operation` says how the arguments of a public function are read, and what kind of call they are.
All that depends on specs and options alone is done once for each kind, and looked up afterwards: a
call then costs its views, its outputs and its launches, and a prepared one its launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import is_
from typing import Any, NamedTuple

import numpy as np

from rawattn import launch
from rawattn.arrays import Spec, SpecKey, View, check_writable, contiguous, empty, view
from rawattn.forward import Prepared, Preparer, refused_plan, refused_stream
from rawattn.paged_problem import PagedProblem
from rawattn.plan import Plan
from rawattn.request import Neighbours, check_apart, check_same

Fields = tuple[Any, ...]
Views = list[View | None]
ALIGNMENT = 256  # bytes, of the parts of a workspace


class Step(NamedTuple):
    """The launches of one plan of a call."""

    template: launch.Template
    # Of each array of the template: its place in the addresses of the call, and how many bytes
    # behind that address it begins
    places: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of call, checked and planned."""

    plans: tuple[Plan, ...]  # what runs, in this order
    given: tuple[Spec | None, ...]  # of the arrays
    new: tuple[tuple[int, Spec], ...]  # outputs that are not given: place, and spec
    neighbours: tuple[Neighbours, ...]  # what each call checks to be apart
    check: Callable[[Views], None] | None  # of what tables hold, where that is looked at
    host: Callable[[list[Any]], None]  # runs on arrays of NumPy
    steps: tuple[Step, ...] | None = None  # None: arrays of NumPy
    constants: tuple[View, ...] = ()  # arrays that are the same in every call
    parts: tuple[int, ...] = ()  # where in the workspace its arrays begin, in bytes
    workspace_bytes: int = 0

    def launches(self, views: Views, workspace: View | None) -> list[Callable[[], None]]:
        """What is left to do once it is known which arrays."""
        if self.steps is None:
            return [functools.partial(self.host, [x and x.array for x in views])]
        start = workspace.pointer if workspace else 0
        addresses = [
            *(x.pointer if x else 0 for x in views),
            *(x.pointer for x in self.constants),
            *(start + part for part in self.parts),
            0,  # at -1: an array that is absent
        ]
        return [
            template.pack([addresses[place] + offset for place, offset in places])
            for template, places in self.steps
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """A family of calls.

    Arrays come as a tuple in the order of `names`, absent ones as None; options as another, in the
    order of `words`. Neither has names of its own: those would take a good part of the time of a
    prepared call, which does not need them.
    """

    names: tuple[str, ...]  # of the arrays, as the caller knows them
    required: frozenset[int]  # places of arrays that no call lacks
    words: tuple[str, ...]  # of the options, likewise
    typed: frozenset[int]  # places of arrays whose bits mean what `dtype` says
    outputs: frozenset[int]  # places of arrays that are written
    # Places of arrays that are written where another one is given, and the place of that
    grows: tuple[frozenset[int], int] | None = None
    options: Callable[..., Any]  # makes a NamedTuple of the options
    plain: Callable[[Any], Any]  # options in one type each, or the error of one that is refused
    dtype: Callable[[Any], str | None]  # of plain options
    resolve: Callable[[tuple[SpecKey | None, ...], Any], Kind]
    # What the caller gets, of its arrays, the views and the options
    result: Callable[[Fields, Views, Any], Any]
    workspace: int | None = None  # place of the array that the caller lends
    # More arrays that steps need and that depend on where the views are; behind the views
    derive: Callable[[Kind, Views], Views] | None = None

    def views(self, arrays: Fields, dtype: str | None) -> Views:
        views: Views = []
        for place, (name, x) in enumerate(zip(self.names, arrays, strict=True)):
            if x is None and place in self.required:
                raise TypeError(f"{name} is None: accepted is an array")
            views.append(
                None if x is None else view(name, x, dtype if place in self.typed else None)
            )
        written = self.outputs
        if self.grows is not None and arrays[self.grows[1]] is not None:
            written |= self.grows[0]
        for place in written:
            found = views[place]
            if found is not None:
                check_writable(self.names[place], arrays[place], found)
        return views


def results(arrays: Fields, views: Views, *places: int) -> Any:
    """What a call returns: the caller's own outputs, or those that were allocated; several as a
    tuple.
    """
    found = tuple(
        array if array is not None else view and view.array
        for array, view in ((arrays[place], views[place]) for place in places)
    )
    return found if len(found) > 1 else found[0]


class PreparedCall(Prepared):
    """A call made ready: what `rawattn.prepare` returns and ``plan=`` takes.

    It keeps the arrays alive that it was prepared with, and its workspace. `run` repeats the call
    on them, whatever they hold by then. With outputs given it neither allocates, nor waits, nor
    reads device memory, and so a CUDA graph can capture it.
    """

    def __init__(self, operation: Operation, arrays: Fields, options: Fields) -> None:
        self._operation, self._arrays, self._options = operation, arrays, options
        self._kind, self._bound = _bind(operation, arrays, options)
        self._workspace = _workspace(operation, self._kind, self._bound)
        self._result = operation.result(arrays, self._bound, operation.options(*options))
        self._launches = self._kind.launches(self._bound, self._workspace)
        # Outputs that were not given are new in every call, and tables are checked in every call.
        self._fixed = not self._kind.new and self._kind.check is None

    @property
    def plan(self) -> Plan:
        """What runs, and why: of several steps, the last that attends to keys."""
        attention = (p for p in reversed(self.plans) if isinstance(p.problem, PagedProblem))
        return next(attention, self.plans[-1])

    @property
    def plans(self) -> tuple[Plan, ...]:
        """All steps, in their order."""
        return self._kind.plans

    @property
    def workspace_size(self) -> int:
        """Bytes of device memory that the call needs beside its arguments; one less is refused."""
        return self._kind.workspace_bytes

    def call(self, arrays: Fields, options: Fields) -> Any:
        """The call on arrays of the same shapes, strides, dtypes and device; on the very same ones
        it costs little more than its launches. ValueError where it is not the one prepared.
        """
        if self._fixed and options == self._options and all(map(is_, arrays, self._arrays)):
            for ready in self._launches:
                ready()
            return self._result
        kind, views = _bind(self._operation, arrays, options)
        if kind is not self._kind:
            op = self._operation
            check_same(
                (*op.names, *op.words),
                (*kind.given, *op.plain(op.options(*options))),
                (*self._kind.given, *op.plain(op.options(*self._options))),
            )
        lent = _lent(self._operation, views) or self._workspace
        for ready in kind.launches(views, lent):
            ready()
        return self._operation.result(arrays, views, self._operation.options(*options))


PlanArgument = Prepared | Preparer | None  # of the public functions


def call(
    operation: Operation, arrays: Fields, options: Fields, plan: PlanArgument, stream: Any
) -> Any:
    """The call of a public function, and what it returns."""
    if stream is not None:
        if any(isinstance(x, np.ndarray) for x in arrays):
            raise refused_stream(stream)
        with launch.on_stream(stream):
            return call(operation, arrays, options, plan, None)
    if isinstance(plan, PreparedCall) and plan._operation is operation:
        return plan.call(arrays, options)
    if isinstance(plan, Preparer):
        return PreparedCall(operation, arrays, options)
    if plan is not None:
        raise refused_plan(plan)
    kind, views = _bind(operation, arrays, options)
    workspace = _workspace(operation, kind, views)  # lives until all is launched
    for ready in kind.launches(views, workspace):
        ready()
    return operation.result(arrays, views, operation.options(*options))


def _bind(operation: Operation, arrays: Fields, options: Fields) -> tuple[Kind, Views]:
    """The kind of a call, and its views, with outputs that were not given."""
    options = operation.plain(operation.options(*options))
    views = operation.views(arrays, operation.dtype(options))
    kind = operation.resolve(tuple([None if x is None else x.key for x in views]), options)
    if kind.neighbours:
        check_apart(views, kind.neighbours, operation.names)
    if kind.check is not None:
        kind.check(views)
    for place, spec in kind.new:
        views[place] = empty(spec)
    if operation.derive is not None:
        views += operation.derive(kind, views)
    return kind, views


def _workspace(operation: Operation, kind: Kind, views: Views) -> View | None:
    """The memory that a call works in: what the caller lends, or new."""
    if kind.workspace_bytes == 0:
        return None
    device = next(x.spec.device for x in views if x is not None)
    new = contiguous((kind.workspace_bytes,), "uint8", device)
    return _lent(operation, views) or empty(new)


def _lent(operation: Operation, views: Views) -> View | None:
    return None if operation.workspace is None else views[operation.workspace]


def check_workspace(spec: Spec | None, needed: int) -> None:
    """ValueError or TypeError for a workspace that is not a `needed` bytes or more of uint8."""
    if spec is None:
        return
    if spec.dtype != "uint8":
        raise TypeError(f"workspace has dtype {spec.dtype}: accepted is uint8")
    if len(spec.shape) != 1 or spec.shape[0] < needed:
        raise ValueError(f"workspace has shape {spec.shape}: accepted is ({needed},) or more")
    if needed and (spec.offset or spec.byte_strides != (1,)):
        raise ValueError(
            f"workspace has strides {spec.byte_strides}, address {spec.offset} modulo 16: accepted "
            "are contiguous bytes from a multiple of 16"
        )


class Ref(NamedTuple):
    """An array of a call: its spec, its place among the addresses, and what it skips there."""

    spec: Spec | None
    place: int
    offset: int = 0  # bytes


ABSENT = Ref(None, -1)


class Steps:
    """The steps of a call on a GPU, as they are put together: what `Kind` holds of them."""

    def __init__(self, device: int, arrays: int, constants: Sequence[View] = ()) -> None:
        self.device = device
        self.steps: list[Step] = []
        self.kept = tuple(constants)
        self.constants = [Ref(x.spec, arrays + n) for n, x in enumerate(constants)]
        self.parts: list[int] = []
        self.workspace_bytes = 0
        self._first = arrays + len(constants)

    def temporary(self, spec: Spec) -> Ref:
        """A contiguous array in the workspace."""
        start = -(-self.workspace_bytes // ALIGNMENT) * ALIGNMENT
        self.parts.append(start)
        self.workspace_bytes = start + spec.extent
        return Ref(spec, self._first + len(self.parts) - 1)

    def add(self, plan: Plan, scalars: Mapping[str, float], arrays: Mapping[str, Ref]) -> None:
        """The launches of a plan on arrays, by their names in Params."""
        if not plan.launches:
            return
        named = {**arrays, "workspace": ABSENT}
        scratch = max(each.workspace_bytes for each in plan.launches)
        if scratch:
            named["workspace"] = self.temporary(contiguous((scratch,), "uint8", self.device))
        specs = {name: ref.spec for name, ref in named.items()}
        template = launch.Template(plan, self.device, scalars, specs)
        self.steps.append(Step(template, tuple((ref.place, ref.offset) for ref in named.values())))
