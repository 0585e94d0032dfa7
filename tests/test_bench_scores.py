# SPDX-License-Identifier: Apache-2.0
"""Cases with softcap or ALiBi: nothing is timed, or compared with, without them. No GPU."""

from __future__ import annotations

import sys
import types
from dataclasses import replace

import numpy as np
import pytest

from bench import ahead, candidates, cases, check, measure
from bench.cases import SUITES, Case, Tensors
from bench.forward_cases import FWD_SM90, SCORED, VARLEN
from rawattn import plan
from rawattn.device import Device
from rawattn.problem import Problem, Rows, Scores
from tests.bench_arrays import ALIBI, BOTH, SOFTCAP, random_tensors, values_of

H200 = Device.named("H200")
SUITE = SUITES["fwd_sm80"]


def scored_tensors(scores: Scores, packed: bool = False) -> tuple[Problem, Tensors]:
    """A small problem with steps of scores, and arrays of NumPy for it."""
    rows = Rows.PACKED if packed else Rows.DENSE
    p = replace(SUITE.cases[0].problem, batch=2, q_heads=2, kv_heads=2, max_q=5, max_k=5)
    p = replace(p, scores=scores, q_rows=rows, k_rows=rows)
    q, k, v = random_tensors(p, 0)
    softcap, slopes = values_of(scores, 2)
    t = Tensors(
        q=q,
        k=k,
        v=v,
        out=np.full_like(q, np.nan),
        lse=np.empty((2, 2, 5), np.float32),
        scale=0.125,
        softcap=softcap,
        slopes=slopes,
        starts=(5 * np.arange(3, dtype=np.int32),) * 2 if packed else None,
    )
    return p, t


@pytest.mark.parametrize("scores", [SOFTCAP, ALIBI, BOTH])
@pytest.mark.parametrize("packed", [False, True])
def test_steps_of_scores_reach_the_call(scores: Scores, packed: bool) -> None:
    p, t = scored_tensors(scores, packed)
    found = candidates.prepared_candidate("reference", Case(id="x", problem=p), t)
    assert t.expected(p, np).error_ratio(found.run()) <= 1
    assert candidates.call_arrays(t).alibi_slopes is t.slopes  # of a variant
    without = replace(t, softcap=0.0, slopes=None).expected(replace(p, scores=Scores()), np)
    assert without.error_ratio(t.out) > 1


@pytest.mark.parametrize("scores", [SOFTCAP, ALIBI])
def test_nothing_is_run_without_a_step_that_a_case_asks_for(scores: Scores) -> None:
    p, t = scored_tensors(scores)
    forgotten = replace(t, softcap=0.0, slopes=None)
    for tensors, problem in ((forgotten, p), (t, replace(p, scores=Scores()))):
        with pytest.raises(ValueError, match="x: the call states"):
            candidates.prepared_candidate("reference", Case(id="x", problem=problem), tensors)
        with pytest.raises(ValueError, match="the values that are there make"):
            tensors.expected(problem, np)
        with pytest.raises(ValueError, match="the values that are there make"):
            candidates.variant_candidate("x", plan.plan(problem, H200, "fwd_sm80"), tensors)


def test_peers_are_not_asked_for_steps_that_they_lack(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = types.ModuleType("some_peers")
    asked: list[str] = []
    names = (*FWD_SM90.peers, *SUITES["decode"].peers)
    peers = {name: lambda p, t, name=name: asked.append(name) or (lambda: t.out) for name in names}
    vars(home).update(PEERS=peers, version=lambda name: "1")
    monkeypatch.setitem(sys.modules, "some_peers", home)
    problems = {case.id: case.problem for s in SUITES.values() for case in s.cases}
    scored = {name: p for name, p in problems.items() if check.steps(p)}
    assert len(scored) == 13
    for name, problem in scored.items():
        case = Case(id=name, problem=problem)
        found = candidates.peer_candidates(names, case, None, "some_peers")
        assert {c.backend for c in found} == ({"fa3"} if problem.scores.softcap else set())
    assert set(asked) == {"fa3"}
    out = capsys.readouterr().out
    assert "gap: fa2 cannot do d128-full-s4096-softcap: no softcap" in out
    assert "gap: fa3 cannot do d64-causal-s4096-alibi: no alibi" in out


def test_steps_are_measured_beside_none() -> None:
    assert len(SCORED) == 12
    for case in SCORED:
        (twin,) = candidates.twins(case.problem).values()
        size = f"d{twin.head_dim}-{'causal' if twin.mask.causal else 'full'}-s4096"
        assert twin == {c.id: c.problem for c in FWD_SM90.cases}[size]
        (step,) = check.steps(case.problem)
        assert case.id == f"{size}-{step}"
        made = [measure.problem_columns(p, None)["scores"] for p in (case.problem, twin)]
        assert made == [step, ""]
        capped = ("fa3",) if case.problem.scores.softcap else ()
        assert FWD_SM90.peers_of(case) == case.twin_peers == capped
        todo = ahead.kernels([(FWD_SM90, case)], H200)
        assert sorted(config.scores or config.softcap for _, config in todo) == [False, True]


def test_tensors_have_the_values_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(cases, "_normal", cases._normal.__wrapped__)
    for case in (*SCORED, FWD_SM90.cases[0], VARLEN[0]):
        p = replace(case.problem, batch=2, q_heads=4, kv_heads=4, max_q=3, max_k=3)
        t = cases.random_tensors(p)
        assert (t.softcap, t.slopes is None) == (50.0 * p.scores.softcap, not p.scores.alibi)
        found = candidates.prepared_candidate("reference", Case(id="x", problem=p), t)
        assert t.expected(p, np).error_ratio(found.run()) <= 1
    for unknown in (Scores(sink=True), Scores(reversed=True)):
        with pytest.raises(ValueError, match="the values that are there make"):
            cases.random_tensors(replace(p, scores=unknown))


def test_slopes_are_those_of_the_paper() -> None:
    assert cases.alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert cases.alibi_slopes(12).tolist() == [
        *(2.0**-n for n in range(1, 9)),
        *(np.float32(2.0**-n) for n in (0.5, 1.5, 2.5, 3.5)),
    ]
    assert cases.alibi_slopes(32).dtype == np.float32 and len(cases.alibi_slopes(32)) == 32
