# SPDX-License-Identifier: Apache-2.0
"""Flags -> the call that they describe: of attention, dense or over a cache, of a cascade, of
merging, or of copying blocks.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rawattn import cascade_call, copy_call, merge_call, paged_call
from rawattn.arrays import contiguous, dtype_name
from rawattn.cache_problem import CopyBlocksProblem
from rawattn.cli import flags, paged_flags
from rawattn.device import Device
from rawattn.merge_call import MergeArrays
from rawattn.paged_request import FIELDS
from rawattn.plan import Backend, Plan, dense, kv_write, merge, paged
from rawattn.settings import forced_backend


class Call(NamedTuple):
    """A call of a public function on contiguous arrays."""

    problem: Any  # what is asked for; of several steps, of the one that the call is named after
    backends: Sequence[Backend]  # of that problem
    plans: Callable[[Device], list[Plan]]  # of all steps, in order; raises `Unsupported`


def call_of(args: Namespace) -> Call:
    """The call; raises what the public function raises."""
    if args.merge is not None:
        return _merge(args)
    if args.copy_blocks is not None:
        return _copy_blocks(args)
    if args.cache is None:
        problem = flags.problem(args)
        return _one_step(args, problem, dense.BACKENDS, dense.plan)
    if args.prefix is not None:
        arguments = paged_flags.arguments(args)
        request, joined = cascade_call.shared(FIELDS, *arguments)
        return Call(
            request.problem,
            paged.BACKENDS,
            lambda device: cascade_call.plans(request, joined, device),
        )
    request = paged_flags.request(args)
    return Call(request.problem, paged.BACKENDS, lambda device: paged_call.plans(request, device))


def _one_step(
    args: Namespace,
    problem: Any,
    backends: Sequence[Backend],
    plan: Callable[[Any, Device, str | None], Plan],
) -> Call:
    backend = forced_backend(args.backend, backends)
    return Call(problem, backends, lambda device: [plan(problem, device, backend)])


def _merge(args: Namespace) -> Call:
    """`merge_states`, of two states also `merge_attn_states`: they launch the same.

    ValueError for an output scale, which the latter alone has, of another number.
    """
    if args.output_scale and args.merge != 2:
        raise ValueError(f"merge={args.merge}: with --output-scale accepted is 2")
    dtype, rows = dtype_name("dtype", args.dtype), (args.batch * args.q_len, args.heads)
    names = MergeArrays(*MergeArrays._fields)
    specs = names._replace(
        first=contiguous((args.merge, *rows, args.head_dim), dtype, None),
        others=None,
        first_lse=contiguous((args.merge, *rows[::-1]), "float32", None),
    )
    out = contiguous((*rows, args.head_dim), merge_call.FP8 if args.output_scale else dtype, None)
    problem = merge_call.merge_problem(merge_call.states_of(names, specs), out, out.dtype)
    return _one_step(args, problem, merge.BACKENDS, merge.plan)


def _copy_blocks(args: Namespace) -> Call:
    """`copy_blocks`, in the caches of one layer."""
    pairs = contiguous((args.copy_blocks, 2), "int64", None)
    specs = pairs, *paged_flags.caches(args, room=2)
    backends = kv_write.BACKENDS[CopyBlocksProblem]
    (problem, *_) = copy_call.problems(specs)
    return Call(problem, backends, lambda device: copy_call.plans(specs, device, args.backend))
