# SPDX-License-Identifier: Apache-2.0
"""The bench without a GPU."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bench
from bench import ahead, candidates, cases, check, host_time, measure, report, rows
from bench.cases import SUITES, Case, Tensors
from rawattn import plan, reference, registry
from rawattn.arrays import DTYPES
from rawattn.device import Device
from rawattn.problem import Mask, Problem, Rows, Scores
from rawattn.request import Arrays
from tests.bench_arrays import ALIBI, BOTH, SOFTCAP, random_tensors, values_of
from tools import tune

H200 = Device.named("H200")
SUITE = SUITES["fwd_sm80"]


# ---- cases ---------------------------------------------------------------------------------------


def test_the_forward_suite_is_the_field_s_grid() -> None:
    assert len(SUITE.cases) == 36 == len({c.id for c in SUITE.cases})
    for case in SUITE.cases:
        p = case.problem
        assert p.batch * p.max_q == 16384 == p.batch * p.max_k
        assert p.q_heads * p.head_dim == 2048 == p.kv_heads * p.value_dim
        assert case.id == f"d{p.head_dim}-{'causal' if p.mask.causal else 'full'}-s{p.max_q}"
        assert plan.plan(p, H200, SUITE.backend).backend == SUITE.backend


def test_select_takes_patterns_and_refuses_what_matches_nothing() -> None:
    assert len(SUITE.select("d128-*", False)) == 12
    assert {c.problem.max_q for c in SUITE.select(None, True)} == {1024, 8192}
    with pytest.raises(ValueError, match="case='d96-\\*'"):
        SUITE.select("d96-*", False)


# ---- check ---------------------------------------------------------------------------------------


problems = st.builds(
    lambda batch, group, q, k, mask, scores, dtype: Problem(
        dtype=dtype,
        batch=batch,
        q_heads=2 * group,
        kv_heads=2,
        head_dim=8,
        value_dim=4,
        max_q=q,
        max_k=k,
        mask=mask,
        scores=scores,
    ),
    st.integers(1, 2),
    st.integers(1, 2),
    st.integers(1, 9),
    st.integers(1, 9),
    st.builds(Mask, left=st.integers(-1, 9), right=st.integers(-1, 9), top_left=st.booleans()),
    st.builds(Scores, softcap=st.booleans(), alibi=st.booleans()),
    st.sampled_from(["float16", "bfloat16"]),
)


@settings(max_examples=30)
@given(p=problems, seed=st.integers(0, 99), chunk=st.sampled_from([1, 10, 30, 1000]))
def test_the_big_check_means_what_the_reference_means(p: Problem, seed: int, chunk: int) -> None:
    q, k, v = random_tensors(p, seed)
    softcap, slopes = values_of(p.scores, p.q_heads)
    same = {"mask": p.mask, "softcap": softcap, "alibi_slopes": slopes}
    want, _ = reference.attention(q, k, v, **same)
    twin, _ = reference.attention(q, k, v, **same, rounding=p.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(check, "CHUNK", chunk)
        values = {"scale": p.head_dim**-0.5, "softcap": softcap, "slopes": slopes}
        found = check.expected(p, q, k, v, **values)
    assert found.error_ratio(want) < 1e-3
    np.testing.assert_allclose(found.out, check._pairs_first(want, np), atol=1e-6)
    assert found.error_ratio(twin) <= 1
    wrong = np.array(twin)
    wrong[-1, -1, -1, -1] += 0.1
    assert found.error_ratio(wrong) > 1
    wrong[-1, -1, -1, -1] = np.nan
    assert not found.error_ratio(wrong) <= 1


def test_a_problem_too_big_to_check_whole_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "SCORES", 3 * 64)
    p = replace(SUITE.cases[0].problem, batch=5, q_heads=4, kv_heads=4, max_q=8, max_k=8)
    pairs = check._chosen_pairs(p)
    assert len(pairs) == 3
    assert (pairs[0], pairs[-1]) == (0, 19)


# ---- rows ----------------------------------------------------------------------------------------


def row(case: Case, backend: str, p50: float, timestamp: str = "2026-01-01T00:00:00Z") -> rows.Row:
    state = measure.GpuState(driver="580.1", clock_mhz=1980, temperature_c=40)
    setting = measure.Setting(
        op="forward",
        case=case,
        device=H200,
        before=state,
        after=state,
        l2="exceeded",
        timestamp=timestamp,
    )
    candidate = measure.Candidate(backend=backend, run=lambda: None)
    return measure.make_row(setting, candidate, [p50 - 1, p50, p50 + 1], 0.5)


def test_a_row_holds_what_its_times_and_problem_say() -> None:
    case = next(c for c in SUITE.cases if c.id == "d128-full-s4096")
    found = row(case, "fwd_sm80", 2000.0)
    assert (found.p20_us, found.p50_us, found.p80_us, found.n) == (1999.4, 2000.0, 2000.6, 3)
    assert found.tflops == pytest.approx(4 * 4 * 16 * 4096**2 * 128 / 2e-3 / 1e12, abs=0.05)
    assert found.roofline_percent == pytest.approx(100 * found.tflops / H200.tflops, abs=0.01)
    assert found.gb_per_s == pytest.approx(4 * 16384 * 2048 * 2 / 2e-3 / 1e9, abs=0.05)
    assert (found.bound, found.gpu, found.case) == ("compute", "NVIDIA H200", case.id)


def test_rows_survive_their_file_and_resume(tmp_path: Path) -> None:
    path = tmp_path / "gpu" / "x.csv"
    a, b = SUITE.cases[0], SUITE.cases[1]
    assert rows.load(path) == []
    first = [row(a, "fwd_sm80", 10.0), row(a, "fa2", 20.0)]
    rows.append(path, first)
    rows.append(path, [row(b, "fa2", 5.0)])
    assert rows.load(path)[:2] == first
    sources = rows.sources_digest()
    assert rows.measured(rows.load(path), "fwd_sm80", sources) == {a.id}
    assert rows.measured(rows.load(path), "fwd_sm80", "other sources") == set()
    with path.open("a") as file:
        file.write("\n")
    path.write_text(path.read_text().replace("op,case", "op,cell", 1))
    with pytest.raises(ValueError, match="has columns"):
        rows.append(path, first)


def test_ratios_are_taken_inside_one_measurement_only() -> None:
    case = SUITE.cases[0]
    old = [row(case, "fwd_sm80", 10.0, "t1"), row(case, "fa2", 20.0, "t1")]
    new = [row(case, "fwd_sm80", 30.0, "t2")]
    assert set(rows.groups(old)[case.id]) == {"fwd_sm80", "fa2"}
    assert set(rows.groups(old + new)[case.id]) == {"fwd_sm80"}


def test_the_digest_of_the_sources_sees_kernels_and_python(tmp_path: Path) -> None:
    for folder in ("cuda", "rawattn/plan"):
        (tmp_path / folder).mkdir(parents=True)
    digests = set()
    for name in ("cuda/a.cu", "cuda/a.cuh", "rawattn/launch.py", "rawattn/plan/a.py", "README.md"):
        (tmp_path / name).write_text("x")
        digests.add(rows.sources_digest.__wrapped__(tmp_path))
    assert len(digests) == 4


def test_host_times_become_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_time, "ROUNDS", 4)
    order: list[str] = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    times = host_time.interleaved_host(runs, lambda: order.append("|"))
    once = ["a" * 100, "b" * 100]
    assert "".join(order).split("|")[:-1] == [*once, *once[::-1]] * 2
    assert {len(x) for x in times.values()} == {4}
    rows.append(tmp_path / "x.csv", [host_time.host_row("call", [1.0, 3.0, 2.0], "")])
    assert (tmp_path / "x.csv").read_text().splitlines()[1].startswith("call,3,1.4,2.0,2.6,")


# ---- tables --------------------------------------------------------------------------------------


def test_the_table_shows_gaps_flags_and_means() -> None:
    a, b = SUITE.cases[0], SUITE.cases[1]
    found = [
        row(a, "fwd_sm80", 10.0, "t1"),
        row(a, "fa2", 20.0, "t1"),
        row(a, "cudnn", 5.0, "t1"),
        row(b, "fwd_sm80", 40.0, "t2"),
        row(b, "fa2", 20.0, "t2"),
    ]
    lines = report.table(found, ["fwd_sm80"], ["fa2", "cudnn"], bar="fa2").splitlines()
    assert lines[0].split()[:5] == ["case", "fwd_sm80", "fa2", "cudnn", "/fa2"]
    assert "2.000" in lines[1] and "0.500" in lines[1] and "< fa2" not in lines[1]
    assert lines[2].split()[3] == "-" and lines[2].endswith("< fa2: fwd_sm80")
    assert lines[3].split() == ["geometric", "mean", "1.000", "0.500"]


# ---- variants ------------------------------------------------------------------------------------


def test_a_variant_changes_config_grid_and_scalars() -> None:
    p = SUITE.cases[0].problem  # head_dim 64, 32 sequences of 512
    planned = plan.plan(p, H200, "fwd_sm80")
    made = tune.varied(planned, {"block_m": 64, "warps": 4, "head_group": 3})
    assert made is not None
    (launch,) = made.launches
    assert launch.config == replace(planned.launches[0].config, block_m=64, warps=4)
    assert launch.grid == 8 * 32 * 32
    assert dict(launch.scalars) == {"m_blocks": 8, "head_group": 3}
    assert tune.varied(planned, {}) == planned
    assert tune.varied(planned, planned.launches[0].config) == planned
    assert tune.varied(planned, {"head_dim": 128, "block_m": 64}) is None
    with pytest.raises(TypeError, match="block_q"):
        tune.varied(planned, {"block_q": 64})


def test_a_variant_of_a_kernel_with_tensor_maps() -> None:
    """Its boxes follow its Config; a whole Config may be another kernel's."""
    p = {c.id: c.problem for c in SUITES["fwd_sm90"].cases}["d64-full-s4096"]
    launches = plan.fwd_sm90.launches(p, H200)
    planned = plan.Plan(problem=p, device=H200, backend="fwd_sm90", launches=launches)
    made = tune.varied(planned, {"block_n": 64, "grid": 99, "head_group": 5})
    assert made is not None
    (launch,) = made.launches
    assert launch.grid == 99 and dict(launch.scalars)["head_group"] == 5
    assert {m.field: m.box[1] for m in launch.maps}["k_map"] == 64
    short = plan.fwd_sm90.launches(replace(p, batch=64, max_q=256, max_k=256), H200)[0].config
    made = tune.varied(planned, short)
    assert made is not None and made.launches[0].kernel == "fwd_sm90_self"
    with pytest.raises(TypeError, match="fwd_sm90 has neither fields nor scalars block_q"):
        tune.varied(planned, {"block_q": 64})


def test_a_grid_of_variants_labels_what_differs() -> None:
    found = tune.grid(head_dim=[64], block_m=[64, 128], q_in_registers=[True, False])
    assert [label for label, _ in found] == ["bm64 qir1", "bm64 qir0", "bm128 qir1", "bm128 qir0"]
    assert found[1][1] == {"head_dim": 64, "block_m": 64, "q_in_registers": False}


def test_a_variant_is_launched_with_all_that_a_kernel_reads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: dict[str, object] = {}

    class Template:
        def __init__(self, made: plan.Plan, device: int, scalars: dict, specs: dict) -> None:
            assert specs["q"].shape == q.shape and specs["sink"] is None
            seen.update(scalars, **dict(made.launches[0].scalars))

        def pack(self, pointers: list[int]) -> Callable[[], None]:
            seen.update(zip((*Arrays._fields, "workspace"), pointers, strict=True))
            return lambda: seen.update(launched=True)

    monkeypatch.setattr(candidates, "Template", Template)
    p = replace(SUITE.cases[0].problem, batch=2, max_q=3, max_k=3)
    q, k, v = random_tensors(p, 0)
    lse = np.zeros((2, 32, 3), np.float32)
    t = Tensors(q=q, k=k, v=v, out=q.copy(), lse=lse, scale=0.5)
    found = candidates.variant_candidate("x", plan.plan(p, H200, "fwd_sm80"), t)
    fields = {name for name, _ in registry.params_struct("FwdParams")._fields_ if name[0] != "_"}
    assert fields | {"new_k", "workspace"} == seen.keys()  # of fwd_sm90
    assert (seen["out"], seen["lse"], seen["sink"]) == (t.out.ctypes.data, lse.ctypes.data, 0)
    assert (seen["stride_k_row"], seen["stride_lse_batch"]) == (2048, 96)
    assert found.run() is t.out and seen["launched"]
    assert (seen["softcap_log2"], seen["alibi_slopes"]) == (0.0, 0)
    slopes = cases.alibi_slopes(p.q_heads)
    p, t = replace(p, scores=BOTH), replace(t, softcap=2.0, slopes=slopes)
    candidates.variant_candidate("x", plan.plan(p, H200, "fwd_sm80"), t)
    assert seen["softcap_log2"] == pytest.approx(2.0 / np.log(2))
    assert seen["alibi_slopes"] == slopes.ctypes.data


@pytest.mark.parametrize(
    "mask", [Mask(), Mask(right=0), Mask(left=2, right=0, top_left=True), Mask(left=1, right=3)]
)
def test_a_prepared_call_states_the_problem_of_its_case(mask: Mask) -> None:
    p = replace(SUITE.cases[0].problem, batch=2, q_heads=2, kv_heads=1, max_q=5, max_k=6, mask=mask)
    q, k, v = random_tensors(p, 0)
    out, lse = np.empty_like(q), np.empty((2, 2, 5), np.float32)
    t = Tensors(q=q, k=k, v=v, out=out, lse=lse, scale=0.125)
    found = candidates.prepared_candidate("reference", Case(id="x", problem=p), t)
    assert found.run() is out
    assert check.expected(p, q, k, v, scale=0.125).error_ratio(out) <= 1
    other = Case(id="x", problem=replace(p, max_k=7))
    with pytest.raises(ValueError, match="x: the call states"):
        candidates.prepared_candidate("reference", other, t)


def test_a_config_in_a_row_can_be_read() -> None:
    text = candidates.plan_text(plan.plan(SUITE.cases[0].problem, H200, "fwd_sm80"))
    assert "block_m=128" in text and "q_in_registers=1" in text and "m_blocks=4" in text


def test_packed_rows_lie_in_the_same_memory() -> None:
    """A call on them, and a plan of ours, give what the dense call gives."""
    p = replace(SUITE.cases[0].problem, batch=3, q_heads=2, kv_heads=2, max_q=5, max_k=5)
    q, k, v = random_tensors(p, 0)
    out, lse = np.full_like(q, np.nan), np.empty((3, 2, 5), np.float32)
    starts = (5 * np.arange(4, dtype=np.int32),) * 2
    t = Tensors(q=q, k=k, v=v, out=out, lse=lse, scale=0.125, starts=starts)
    p = replace(p, q_rows=Rows.PACKED, k_rows=Rows.PACKED)
    assert candidates.prepared_candidate("reference", Case(id="x", problem=p), t).run() is out
    assert t.expected(p, np).error_ratio(out) <= 1


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"q_rows": Rows.PACKED, "k_rows": Rows.PACKED}, "dense"),
        ({"dtype": "float16"}, "bf16"),
        ({"kv_heads": 1}, "mha"),
        ({"scores": SOFTCAP}, "plain"),
        ({"scores": ALIBI}, "plain"),
    ],
)
def test_twins_do_the_same_work(changes: dict[str, Any], name: str) -> None:
    p = replace(SUITE.cases[0].problem, batch=2, q_heads=2, kv_heads=2, max_q=5, max_k=5)
    p = replace(p, **changes)
    q, k, v = random_tensors(p, 0)
    starts = (np.arange(3, dtype=np.int32) * 5,) * 2 if p.q_rows is Rows.PACKED else None
    lse = np.empty((2, 2, 5), np.float32)
    softcap, slopes = values_of(p.scores, 2)
    t = Tensors(q=q, k=k, v=v, out=np.full_like(q, np.nan), lse=lse, scale=0.125, starts=starts)
    t = replace(t, softcap=softcap, slopes=slopes)
    suite = replace(SUITE, backend="reference")
    (twin,) = candidates.twin_candidates(suite, Case(id="x", problem=p), t)
    assert twin.backend == f"reference ({name})"
    expected = twin.expected or t.expected(p, np)
    assert expected.error_ratio(twin.run()) <= 1
    if p.scores != Scores():
        assert twin.problem.scores == Scores()
        assert t.expected(p, np).error_ratio(twin.run()) > 1


def test_a_peer_may_be_measured_in_both_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    p = replace(SUITE.cases[0].problem, dtype="float16", batch=1, q_heads=1, kv_heads=1, max_q=5)
    p = replace(p, max_k=5)
    q, k, v = random_tensors(p, 0)
    lse = np.empty((1, 1, 5), np.float32)
    t = Tensors(q=q, k=k, v=v, out=np.full_like(q, np.nan), lse=lse, scale=0.125)
    asked = []
    peer = types.ModuleType("bench.peers")
    vars(peer).update(
        PEERS={"fa2": lambda p, t: asked.append((p.dtype, t.q.dtype)) or (lambda: t.out)},
        version=lambda name: "2",
    )
    monkeypatch.setitem(sys.modules, "bench.peers", peer)
    suite = replace(SUITE, backend="reference")
    case = Case(id="x", problem=p, twin_peers=("fa2", "fa3"))
    monkeypatch.setattr(bench, "peers", peer, raising=False)
    ours, theirs = candidates.twin_candidates(replace(suite, peers=("fa2",)), case, t)
    assert (ours.backend, theirs.backend) == ("reference (bf16)", "fa2 (bf16)")
    assert asked == [("bfloat16", DTYPES["bfloat16"])]
    assert theirs.problem.dtype == "bfloat16" and theirs.expected is ours.expected is not None
    assert np.isnan(theirs.run().astype(np.float32)).all(), "an output of its own"


def test_kernels_of_twins_are_compiled_ahead() -> None:
    (case,) = SUITES["fwd_sm90"].select("d64-full-s512-fp16", False)
    found = ahead.kernels([(SUITES["fwd_sm90"], case)], H200)
    assert sorted(config.element for _, config in found) == ["bf16", "fp16"]


def test_the_cells_of_the_hopper_suite() -> None:
    cases = {case.id: case.problem for case in SUITES["fwd_sm90"].cases}
    assert len(cases) == 113
    assert {p.batch * p.max_q for name, p in cases.items() if name[0] == "d"} == {16384}
    window = cases["llama-window4096-s65536"]
    assert (window.mask.left, window.mask.right, window.group) == (4095, 0, 4)
    assert cases["d192x128-causal-s4096"].value_dim == 128
    assert cases["d64-full-s1024-varlen"].k_rows is Rows.PACKED
