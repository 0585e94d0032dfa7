# SPDX-License-Identifier: Apache-2.0
"""What is timed on a case: a prepared call of the public API, other plans for the same call, peers.

Ours write lse too, as the peers do.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from bench.cases import Case, Tensors
from bench.measure import Candidate
from rawattn import forward
from rawattn.arrays import DTYPES, view
from rawattn.dense import flash_attn_func, flash_attn_varlen_func
from rawattn.launch import Template
from rawattn.plan import Launch, Plan
from rawattn.prepared import prepare
from rawattn.problem import Rows
from rawattn.request import Arrays


def launch_text(launch: Launch) -> str:
    """The Config values and scalars of a launch, ``name=value`` with spaces between."""
    pairs = [(f.name, getattr(launch.config, f.name)) for f in fields(launch.config)]  # type: ignore[arg-type]
    pairs += launch.scalars
    return " ".join(f"{name}={int(x) if isinstance(x, bool) else x}" for name, x in pairs)


def plan_text(plan: Plan) -> str:
    """The launches of a plan, with ``;`` between."""
    return "; ".join(map(launch_text, plan.launches))


def call_arrays(tensors: Tensors) -> Arrays:
    """What a call takes, dense or packed."""
    t = tensors
    if t.starts is None:
        return Arrays(t.q, t.k, t.v, t.out, t.lse)
    rows = [x.reshape(-1, *x.shape[2:]) for x in (t.q, t.k, t.v, t.out)]
    return Arrays(*rows, t.lse.reshape(t.lse.shape[1], -1), *t.starts)


def prepared_candidate(backend: str, case: Case, tensors: Tensors) -> Candidate:
    """A backend through the public API with a prepared plan."""
    p, mask, arrays = case.problem, case.problem.mask, call_arrays(tensors)
    call: dict[str, Any] = {
        "softmax_scale": tensors.scale,
        "causal": ("top_left" if mask.top_left else True) if mask.causal else False,
        "window_size": (mask.left, mask.right),
        "return_lse": True,
        "out": arrays.out,
        "lse": arrays.lse,
        "backend": backend,
    }
    inputs, function = arrays[:3], flash_attn_func
    if tensors.starts is not None:
        inputs, function = (*inputs, *tensors.starts), flash_attn_varlen_func
        call |= {"max_seqlen_q": p.max_q, "max_seqlen_k": p.max_k}
    plan = prepare(function, *inputs, **call)
    if plan.plan.problem != p:
        raise ValueError(f"{case.id}: the call states {plan.plan.problem}, not {p}")

    def run() -> Any:
        function(*inputs, **call, plan=plan)
        return tensors.out

    return Candidate(backend=backend, run=run, config=plan_text(plan.plan))


def twin_candidates(backend: str, case: Case, tensors: Tensors) -> list[Candidate]:
    """The same work in another form, which a case is measured beside: packed rows as dense ones,
    fp16 as bf16, grouped queries with as many KV heads. Its name follows that of the backend.
    """
    p, t, found = case.problem, tensors, []

    def add(form: str, tensors: Tensors, **changes: Any) -> None:
        twin = replace(case, problem=replace(p, **changes))
        made = prepared_candidate(backend, twin, tensors)
        named = replace(made, backend=f"{backend} ({form})", problem=twin.problem)
        found.append(named)

    if t.starts is not None:
        add("dense", replace(t, starts=None), q_rows=Rows.DENSE, k_rows=Rows.DENSE)
    if p.dtype == "float16":
        q, k, v, out = (x.astype(DTYPES["bfloat16"]) for x in (t.q, t.k, t.v, t.out))
        converted = replace(t, q=q, k=k, v=v, out=out)
        add("bf16", converted, dtype="bfloat16")
        xp = np if isinstance(q, np.ndarray) else importlib.import_module("cupy")
        expected = converted.expected(replace(p, dtype="bfloat16"), xp)
        found[-1] = replace(found[-1], expected=expected)
    if p.group > 1:
        k, v = (x.repeat(p.group, axis=2) for x in (t.k, t.v))
        add("mha", replace(t, k=k, v=v), kv_heads=p.q_heads)
    return found


def variant_candidate(label: str, plan: Plan, tensors: Tensors) -> Candidate:
    """Any plan for the problem of the tensors."""
    arrays = call_arrays(tensors)._asdict().items()
    views = Arrays(*(None if x is None else view(name, x) for name, x in arrays))
    specs = Arrays(*(x and x.spec for x in views))
    scalars = forward.kernel_scalars(specs, plan.problem, tensors.scale, 0.0)
    template = Template(plan, specs.q.device, scalars, specs._asdict())
    packed = template.pack(forward.addresses(views))

    def run() -> Any:
        packed()
        return tensors.out

    return Candidate(backend=label, run=run, config=plan_text(plan))


def peer_candidates(
    names: Sequence[str], case: Case, tensors: Any, home: str = "bench.peers"
) -> list[Candidate]:
    """The peers in a module that can do a case; the others are printed."""
    try:
        peers = importlib.import_module(home)
    except ImportError as error:
        print(f"no peers: {error}")
        return []
    found = []
    for name in names:
        try:
            made = peers.PEERS[name](case.problem, tensors)
        except Exception as error:  # others' code: a gap, whatever it raises
            print(f"gap: {name} fails on {case.id}: {type(error).__name__}: {error}")
            continue
        if made is None:
            print(f"gap: {name} cannot do {case.id}")
            continue
        if not isinstance(made, Candidate):
            made = Candidate(backend=name, run=made)
        found.append(replace(made, backend=name, peer_version=peers.version(name)))
    return found
