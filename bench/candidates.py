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

from bench.cases import Case, Suite, Tensors
from bench.check import check_steps, steps
from bench.measure import Candidate
from rawattn import forward
from rawattn.arrays import DTYPES, View, contiguous, empty, view
from rawattn.dense import flash_attn_func, flash_attn_varlen_func
from rawattn.launch import Template
from rawattn.plan import Launch, Plan
from rawattn.prepared import prepare
from rawattn.problem import Problem, Rows, Scores
from rawattn.request import Arrays

# Steps between q.k and the softmax, fields of Scores, that a peer computes; the others, none.
STEPS = {"fa3": frozenset({"softcap"})}


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
        return Arrays(t.q, t.k, t.v, t.out, t.lse, alibi_slopes=t.slopes)
    rows = [x.reshape(-1, *x.shape[2:]) for x in (t.q, t.k, t.v, t.out)]
    return Arrays(*rows, t.lse.reshape(t.lse.shape[1], -1), *t.starts, alibi_slopes=t.slopes)


def prepared_candidate(backend: str, case: Case, tensors: Tensors) -> Candidate:
    """A backend through the public API with a prepared plan."""
    p, mask, arrays = case.problem, case.problem.mask, call_arrays(tensors)
    call: dict[str, Any] = {
        "softmax_scale": tensors.scale,
        "causal": ("top_left" if mask.top_left else True) if mask.causal else False,
        "window_size": (mask.left, mask.right),
        "softcap": tensors.softcap,
        "alibi_slopes": tensors.slopes,
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


def twins(p: Problem) -> dict[str, Problem]:
    """The same work in another form, which a case is measured beside: packed rows as dense ones,
    fp16 as bf16, grouped queries with as many KV heads, scores without softcap or ALiBi.
    """
    found = {}
    if p.q_rows is Rows.PACKED:
        found["dense"] = replace(p, q_rows=Rows.DENSE, k_rows=Rows.DENSE)
    if p.dtype == "float16":
        found["bf16"] = replace(p, dtype="bfloat16")
    if p.group > 1:
        found["mha"] = replace(p, kv_heads=p.q_heads)
    if p.scores != Scores():
        found["plain"] = replace(p, scores=Scores())
    return found


def twin_candidates(suite: Suite, case: Case, tensors: Tensors) -> list[Candidate]:
    """Ours on the twins of a case, and its `twin_peers`, each named like "fwd_sm90 (bf16)"."""
    found = []
    for label, problem in twins(case.problem).items():
        twin, t = replace(case, problem=problem), _twin_tensors(problem, case.problem, tensors)
        expected = None
        if (problem.dtype, problem.scores) != (case.problem.dtype, case.problem.scores):
            numpy = isinstance(t.q, np.ndarray)
            expected = t.expected(problem, np if numpy else importlib.import_module("cupy"))
        names = [name for name in case.twin_peers if name in suite.peers]
        made = [prepared_candidate(suite.backend, twin, t), *peer_candidates(names, twin, t)]
        found += [
            replace(c, backend=f"{c.backend} ({label})", problem=problem, expected=expected)
            for c in made
        ]
    return found


def _twin_tensors(twin: Problem, p: Problem, tensors: Tensors) -> Tensors:
    """The tensors of a problem for its twin: the same memory, or as few copies as it takes."""
    t = tensors
    if twin.q_rows is not p.q_rows:
        return replace(t, starts=None)
    if twin.dtype != p.dtype:
        q, k, v, out = (x.astype(DTYPES[twin.dtype]) for x in (t.q, t.k, t.v, t.out))
        return replace(t, q=q, k=k, v=v, out=out)
    if twin.scores != p.scores:
        return replace(t, softcap=0.0, slopes=None)
    k, v = (x.repeat(p.group, axis=2) for x in (t.k, t.v))
    return replace(t, k=k, v=v)


def variant_candidate(label: str, plan: Plan, tensors: Tensors) -> Candidate:
    """Any plan for the problem of the tensors. ValueError where they have not its score steps."""
    check_steps(plan.problem.scores, tensors.scale, tensors.softcap, tensors.slopes)
    arrays = call_arrays(tensors)._asdict().items()
    views = Arrays(*(None if x is None else view(name, x) for name, x in arrays))
    specs = Arrays(*(x and x.spec for x in views))
    scalars = forward.kernel_scalars(specs, plan.problem, tensors.scale, tensors.softcap)
    size, device = plan.workspace_bytes, specs.q.device
    workspace = empty(contiguous((size,), "uint8", device)) if size else None
    given = {**specs._asdict(), "workspace": workspace and workspace.spec}
    packed = Template(plan, device, scalars, given).pack(
        [*forward.addresses(views), workspace.pointer if workspace else 0]
    )

    def run(workspace: View | None = workspace) -> Any:  # which lives as long as this
        packed()
        return tensors.out

    return Candidate(backend=label, run=run, config=plan_text(plan))


def peer_candidates(
    names: Sequence[str], case: Case, tensors: Any, home: str = "bench.peers"
) -> list[Candidate]:
    """The peers in a module that can do a case; the others are printed. None is asked for steps of
    scores that it does not compute: it would leave them out without a word.
    """
    try:
        peers = importlib.import_module(home)
    except ImportError as error:
        print(f"no peers: {error}")
        return []
    found = []
    for name in names:
        if missing := steps(case.problem) - STEPS.get(name, frozenset()):
            print(f"gap: {name} cannot do {case.id}: no {', '.join(sorted(missing))}")
            continue
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
