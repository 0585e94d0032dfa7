# SPDX-License-Identifier: Apache-2.0
"""Calls that copy blocks of caches, from arguments to launches; what they do to NumPy arrays."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rawattn.arrays import DTYPES, Spec, SpecKey, View, check_layout, to_device, to_host
from rawattn.cache_problem import CopyBlocksProblem
from rawattn.cache_request import check_slab
from rawattn.calls import Kind, Operation, Ref, Steps, Views
from rawattn.device import Device
from rawattn.paged_tables import check_entries
from rawattn.plan import Plan, kv_write
from rawattn.problem import check_backend
from rawattn.request import check_one_device, expect, neighbours, widest
from rawattn.settings import Settings, forced_backend

NOTHING = CopyBlocksProblem(caches=0, pairs=0, block_bytes=0)


class CopyOptions(NamedTuple):
    """The arguments that are no arrays."""

    backend: str | None = None


@functools.cache
def operation(caches: tuple[str, ...]) -> Operation:
    """The operation on caches of these names; the pairs of blocks come first."""
    names = ("block_mapping", *caches)
    return Operation(
        names=names,
        required=frozenset(range(len(names))),
        words=CopyOptions._fields,
        options=CopyOptions,
        typed=frozenset(),
        outputs=frozenset(range(1, len(names))),
        plain=lambda options: CopyOptions(check_backend(options.backend)),
        dtype=lambda options: None,
        resolve=functools.partial(resolve, names),
        result=lambda arrays, views, options: None,
        derive=_addresses,
    )


def _groups(specs: Sequence[Spec]) -> list[list[int]]:
    """Places of the caches whose blocks have the same size, number and distance."""
    found: dict[tuple[int, ...], list[int]] = {}
    for place, spec in enumerate(specs[1:], 1):
        found.setdefault(_shape(spec), []).append(place)
    return list(found.values())


def _shape(spec: Spec) -> tuple[int, int, int]:
    """Blocks, bytes of one, and bytes from one to the next."""
    size = DTYPES[spec.dtype].itemsize
    for n in spec.shape[1:]:
        size *= n
    return spec.shape[0], size, spec.byte_strides[0] if spec.shape[0] > 1 else size


def _addresses(kind: Kind, views: Views) -> Views:
    """For each group of caches an array on the GPU with their addresses."""
    if kind.steps is None:
        return []
    given = [x for x in views if x is not None]  # all of them
    device = given[0].spec.device
    assert device is not None
    return [
        to_device([given[place].pointer for place in group], "int64", device)
        for group in _groups([x.spec for x in given])
    ]


@functools.lru_cache(maxsize=1024)
def resolve(names: tuple[str, ...], keys: tuple[SpecKey | None, ...], options: CopyOptions) -> Kind:
    """Checks and plans a kind of call; compiles and loads what it launches."""
    specs = [Spec(*key) for key in keys if key is not None]  # all of them
    check_one_device(names, specs)
    pairs, *caches = specs
    expect(names[0], pairs, ("pairs", 2), "int64")
    check_slab(names[0], pairs, first=0)
    for name, spec in zip(names[1:], caches, strict=True):
        _check_cache(name, spec)
    device = pairs.device
    target = Device.host() if device is None else Device.current(device)
    groups, steps = _groups(specs), plans(specs, target, options.backend)
    made = None if device is None else Steps(device, len(names) + len(groups))
    for n, (group, plan) in enumerate(zip(groups, steps, strict=False)):  # no group: no launch
        if made is not None:
            addresses = Ref(pairs, len(names) + n)
            made.add(
                plan,
                _scalars(specs[group[0]], len(group)),
                {"caches": addresses, "pairs": Ref(pairs, 0)},
            )
    checked = device is None or Settings.read().check
    return Kind(
        plans=tuple(steps),
        given=tuple(specs),
        new=(),
        neighbours=neighbours(specs, range(1, len(names))),
        check=functools.partial(_check, name=names[0]) if checked else None,
        host=_run,
        steps=tuple(made.steps) if made else None,
    )


def problems(specs: Sequence[Spec]) -> list[CopyBlocksProblem]:
    """Of each group of the caches, which come behind the pairs."""
    groups = _groups(specs)
    return [_problem([specs[place] for place in group], specs[0]) for group in groups] or [NOTHING]


def plans(specs: Sequence[Spec], device: Device, backend: str | None) -> list[Plan]:
    """Of each of these problems; raises `Unsupported`."""
    forced = forced_backend(backend, kv_write.BACKENDS[CopyBlocksProblem])
    return [kv_write.plan(problem, device, forced) for problem in problems(specs)]


def _check_cache(name: str, spec: Spec) -> None:
    if spec.dtype not in DTYPES:
        raise TypeError(f"{name} has dtype {spec.dtype}: accepted are {', '.join(DTYPES)}")
    if len(spec.shape) < 2:
        raise ValueError(f"{name} has shape {spec.shape}: accepted is (blocks, ...)")
    check_slab(name, spec, first=1)
    check_layout(name, spec, output=True)


def _problem(caches: list[Spec], pairs: Spec) -> CopyBlocksProblem:
    return CopyBlocksProblem(
        caches=len(caches),
        pairs=pairs.shape[0],
        block_bytes=_shape(caches[0])[1],
        copy_bytes=widest((16, 4, 1), *(spec.grain(1) for spec in caches)),
    )


def _scalars(cache: Spec, caches: int) -> dict[str, float]:
    """The fields of CopyBlocksParams that are neither addresses nor the plan's to decide."""
    blocks, size, stride = _shape(cache)
    return {
        "block_bytes": size,
        "stride_block_bytes": stride,
        "blocks": blocks,
        "num_caches": caches,
    }


def _check(views: list[View | None], *, name: str) -> None:
    """ValueError, with its index, for a block that does not exist, or that is copied to while
    another pair reads or writes it.
    """
    assert views[0] is not None
    pairs = to_host(views[0])
    limit = min((x.spec.shape[0] for x in views[1:] if x is not None), default=0)
    if len(views) > 1:
        check_entries(name, pairs, np.ones(pairs.shape, bool), limit)
    named = Counter(pairs[pairs[:, 0] != pairs[:, 1]].ravel().tolist())
    for n, (source, target) in enumerate(pairs.tolist()):
        if source != target and named[target] > 1:
            raise ValueError(
                f"{name}[{n}, 1] is {target}: accepted is a block that no other pair names"
            )


def _run(arrays: list[Any]) -> None:
    """Copies the blocks of NumPy arrays."""
    pairs, *caches = arrays
    for cache in caches:
        cache[pairs[:, 1]] = cache[pairs[:, 0]]
