# SPDX-License-Identifier: Apache-2.0
"""What is timed on a case: a prepared call of the public API, other plans for the same call, peers.

Ours write lse too, as the peers do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from bench.cases import Case, Tensors
from bench.measure import Candidate
from rawattn import forward
from rawattn.arrays import view
from rawattn.dense import flash_attn_func, prepare
from rawattn.launch import Template
from rawattn.plan import Launch, Plan
from rawattn.request import Arrays


def launch_text(launch: Launch) -> str:
    """The Config values and scalars of a launch, ``name=value`` with spaces between."""
    pairs = [(f.name, getattr(launch.config, f.name)) for f in fields(launch.config)]  # type: ignore[arg-type]
    pairs += launch.scalars
    return " ".join(f"{name}={int(x) if isinstance(x, bool) else x}" for name, x in pairs)


def plan_text(plan: Plan) -> str:
    """The launches of a plan, with ``;`` between."""
    return "; ".join(map(launch_text, plan.launches))


def prepared_candidate(backend: str, case: Case, tensors: Tensors) -> Candidate:
    """A backend through `flash_attn_func` with a prepared plan."""
    t, mask = tensors, case.problem.mask
    call: dict[str, Any] = {
        "softmax_scale": t.scale,
        "causal": ("top_left" if mask.top_left else True) if mask.causal else False,
        "window_size": (mask.left, mask.right),
        "return_lse": True,
        "out": t.out,
        "lse": t.lse,
        "backend": backend,
    }
    plan = prepare(flash_attn_func, t.q, t.k, t.v, **call)
    if plan.plan.problem != case.problem:
        raise ValueError(f"{case.id}: the call states {plan.plan.problem}, not {case.problem}")

    def run() -> Any:
        return flash_attn_func(t.q, t.k, t.v, **call, plan=plan)[0]

    return Candidate(backend=backend, run=run, config=plan_text(plan.plan))


def variant_candidate(label: str, plan: Plan, tensors: Tensors) -> Candidate:
    """Any plan for the problem of the tensors."""
    t = tensors
    views = Arrays(*(view(n, getattr(t, n)) for n in ("q", "k", "v", "out", "lse")))
    specs = Arrays(*(x and x.spec for x in views))
    scalars = forward.kernel_scalars(specs, plan.problem, t.scale, 0.0)
    template = Template(plan, specs.q.device, scalars)
    packed = template.pack(forward.addresses(views))

    def run() -> Any:
        packed()
        return t.out

    return Candidate(backend=label, run=run, config=plan_text(plan))


def peer_candidates(names: Sequence[str], case: Case, tensors: Tensors) -> list[Candidate]:
    """The peers that can do a case; the others are printed."""
    try:
        from bench import peers
    except ImportError as error:
        print(f"no peers: {error}")
        return []
    found = []
    for name in names:
        run = peers.PEERS[name](case.problem, tensors)
        if run is None:
            print(f"gap: {name} cannot do {case.id}")
            continue
        found.append(Candidate(backend=name, run=run, peer_version=peers.version(name)))
    return found
