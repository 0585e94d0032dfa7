# SPDX-License-Identifier: Apache-2.0
"""The suites around a paged cache, without a GPU: what they measure is what they say."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bench import (
    ahead,
    bandwidth,
    candidates,
    claims,
    decode,
    decode_claims,
    decode_report,
    host_time,
    kv_write,
    measure,
    merge,
)
from bench.cases import SUITES
from bench.decode_cases import DECODE, KV_WRITE, MERGE, PROMPTS
from bench.decode_cases import decode as decode_case
from bench.decode_cases import kv_write as kv_write_case
from bench.decode_cases import merge as merge_case
from bench.rows import Row
from bench.suite import Case
from rawattn import roofline
from rawattn.device import Device
from rawattn.problem import CacheLayout, Scores
from rawattn.roofline.counts import lengths_of

H200 = Device.named("H200")
SMALL: dict[str, Any] = {"heads": (4, 2), "size": 32, "page": 8}


@pytest.fixture(autouse=True)
def small_pool(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(decode, "POOL", 2**18)
    decode._pool.cache_clear()
    yield
    decode._pool.cache_clear()


# ---- cases ---------------------------------------------------------------------------------------


def test_the_suites_are_registered_and_their_ids_are_unique() -> None:
    for suite in (DECODE, PROMPTS, MERGE, KV_WRITE):
        assert SUITES[suite.name] is suite
        assert len({case.id for case in suite.cases}) == len(suite.cases)
        assert suite.select(None, True)


def test_the_decode_suite_has_the_grid_of_the_issue() -> None:
    plain = [c.problem for c in DECODE.cases if c.lengths is None and not c.problem.quantized]
    plain = [p for p in plain if p.layout is CacheLayout.NHD]
    usual = [p for p in plain if (p.q_heads, p.kv_heads, p.head_dim, p.max_q) == (32, 8, 128, 1)]
    cells = {(p.batch, p.max_k) for p in usual}
    assert cells == {
        *((1, 2**n) for n in (10, 13, 15, 17)),
        *((8, 2**n) for n in (10, 13, 15)),
        *((32, 2**n) for n in (10, 12, 14)),
        *((128, 2**n) for n in (10, 12)),
        (256, 2**11),
    }
    assert {(p.batch, p.max_k, p.page) for p in usual} == {
        (*cell, page) for cell in cells for page in (16, 64)
    }
    assert {(p.q_heads, p.kv_heads) for p in plain} == {(32, 8), (64, 8), (32, 32)}
    assert {p.head_dim for p in plain} == {64, 128, 256}
    assert {p.max_q for p in plain} == {1, 4, 8, 16}
    (skewed,) = [c for c in DECODE.cases if c.lengths is not None]
    assert sorted(k for _, k in skewed.lengths or ()) == [128] * 63 + [2**17]
    fp8 = [c.problem for c in DECODE.cases if c.problem.quantized]
    assert all(2 * kv_bytes(p) >= 2**30 for p in fp8)  # as bf16
    assert {p.layout for p in fp8} == {CacheLayout.NHD, CacheLayout.X_MAJOR}


def kv_bytes(p: Any) -> int:
    return p.batch * p.max_k * p.kv_heads * 2 * p.head_dim * (1 if p.quantized else 2)


def test_bytes_of_a_row_are_the_cache_and_the_queries() -> None:
    for case in DECODE.cases:
        p = case.problem
        keys = sum(k * count for _, k, count in lengths_of(p, case.lengths))
        cache = keys * p.kv_heads * (p.head_dim + p.value_dim) * (1 if p.quantized else 2)
        rows = p.batch * p.max_q * p.q_heads * (p.head_dim + p.value_dim) * 2
        assert roofline.work(p, case.lengths).bytes == cache + rows, case.id
        assert roofline.limit(p, H200, case.lengths).bound == "memory", case.id
        k, v = decode.cache_shapes(p, p.page, keys // p.page)
        elements = math.prod(k) + math.prod(v)
        assert elements == keys * p.kv_heads * (p.head_dim + p.value_dim) <= 2**30


def test_ours_takes_every_case_and_its_twins() -> None:
    for suite in (DECODE, PROMPTS, MERGE, KV_WRITE):
        for case in suite.cases:
            backends = [plan.backend for plan in ahead._plans(suite, case, H200)]
            others = decode.variants(suite.backend, case.problem) if suite.op == "decode" else []
            assert backends == [suite.backend, *(name for _, name in others)], case.id
    todo = ahead.kernels([(DECODE, c) for c in DECODE.cases], H200)
    decode_kernels = {"decode_split", "decode_sm90", "paged_v1", "paged_v2", "paged_v2_reduce"}
    assert {name for name, _ in todo} == decode_kernels
    assert len(set(todo)) == len(todo)


def test_what_a_case_is_compared_with_differs_in_one_thing() -> None:
    fp8 = decode_case(2, 64, fp8=True).problem
    (twin,) = decode.twins(fp8).values()
    assert twin == decode_case(2, 64).problem
    x_major = decode_case(2, 64, layout=CacheLayout.X_MAJOR).problem
    assert decode.twins(x_major) == {"nhd": decode_case(2, 64).problem}
    assert decode.twins(twin) == {}
    capped = decode_case(2, 64, queries=4, softcap=True).problem
    assert decode.twins(capped) == {"plain": decode_case(2, 64, queries=4).problem}
    assert decode.readable(x_major) == ("paged_v1", "paged_v2")
    assert decode.readable(twin) == ()


# ---- arrays and checks ---------------------------------------------------------------------------


def test_pages_are_a_permutation_and_no_two_are_alike() -> None:
    case = decode_case(3, (40, 8, 16), **SMALL)
    t = decode.tensors(case.problem, case.lengths, np)
    used = t.table[t.table >= 0]
    assert sorted(used) == list(range(8)) == list(range(len(t.k_cache)))
    assert (t.table >= 0).sum(axis=1).tolist() == [5, 1, 2]
    assert list(used) != sorted(used)
    pages = {page.tobytes() for cache in (t.k_cache, t.v_cache) for page in cache}
    assert len(pages) == 16


@pytest.mark.parametrize("layout", CacheLayout)
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("keys", [24, (5, 24, 24, 8)])
def test_a_step_states_its_case_and_is_checked(
    layout: CacheLayout, fp8: bool, queries: int, keys: int | tuple[int, ...]
) -> None:
    case = decode_case(4, keys, queries=queries, layout=layout, fp8=fp8, **SMALL)
    t = decode.tensors(case.problem, case.lengths, np)
    found = decode.prepared_candidate("reference", "x", t)
    assert found is not None
    expected = t.expected(case.problem, np)
    assert not expected.error_ratio(t.out) <= 1  # it starts as NaN
    assert found.run() is t.out
    assert expected.error_ratio(t.out) <= 1
    swapped = t.table.copy()
    swapped[0, 0], swapped[1, 0] = t.table[1, 0], t.table[0, 0]
    other = replace(t, table=swapped).expected(case.problem, np)
    assert other.error_ratio(t.out) > 1


def test_a_step_with_softcap_is_not_one_without() -> None:
    case = decode_case(4, 24, queries=3, softcap=True, **SMALL)
    t = replace(decode.tensors(case.problem, None, np), softcap=1.5)
    found = decode.prepared_candidate("reference", "x", t)
    assert found is not None
    assert t.expected(case.problem, np).error_ratio(found.run()) <= 1
    (twin,) = decode.twins(case.problem).values()
    plain = decode.tensors(twin, None, np)
    assert plain.expected(twin, np).error_ratio(t.out) > 1
    assert decode.tensors(case.problem, None, np).softcap == 50.0
    with pytest.raises(ValueError, match="the values that are there make"):
        plain.expected(case.problem, np)


def test_a_step_that_states_another_problem_is_an_error() -> None:
    case = decode_case(4, 24, **SMALL)
    t = decode.tensors(case.problem, None, np)
    with pytest.raises(ValueError, match="the call states"):
        decode.prepared_candidate("reference", "x", replace(t, problem=replace(t.problem, split=8)))
    capped = replace(t, problem=replace(t.problem, scores=Scores(softcap=True)))
    with pytest.raises(ValueError, match="the call states"):
        decode.prepared_candidate("reference", "x", capped)


def test_a_backend_that_refuses_is_a_gap(capsys: pytest.CaptureFixture[str]) -> None:
    t = decode.tensors(decode_case(4, 24, **SMALL).problem, None, np)
    assert decode.prepared_candidate("decode_split", "x", t) is None
    assert "gap: x cannot do" in capsys.readouterr().out


def test_merging_is_checked() -> None:
    p = replace(merge_case(16, "bfloat16").problem, heads=3, head_dim=8)
    t = merge.tensors(p, np)
    found = merge.prepared_candidate("reference", t)
    expected = t.expected(p, np)
    assert expected.error_ratio(found.run()) <= 1
    assert t.out.shape == (16, 3, 8)
    t.out[5, 2, 1] += 0.25
    assert expected.error_ratio(t.out[None]) > 1
    assert roofline.work(p).bytes == t.nbytes


@pytest.mark.parametrize("layout", [CacheLayout.NHD, CacheLayout.X_MAJOR])
@pytest.mark.parametrize("fp8", [False, True])
def test_storing_is_checked_to_the_bit(layout: CacheLayout, fp8: bool) -> None:
    p = replace(kv_write_case(5, layout, fp8=fp8).problem, kv_heads=2, head_dim=32, value_dim=16)
    t = kv_write.tensors(p, np)
    found = kv_write.prepared_candidate("reference", p, t)
    expected = t.expected(p, np)
    assert expected.error_ratio(t.out) == np.inf
    assert expected.error_ratio(found.run()) == 0
    t.out[0] ^= 1
    assert expected.error_ratio(t.out) == np.inf


def test_a_sum_of_words_is_modulo_2_to_the_32() -> None:
    words = np.array([2**32 - 1, 5, 7, 0], np.uint32)
    check = bandwidth.Exactly(bits=bandwidth.sum_words([words, words], np), reduce=np.sum)
    assert check.error_ratio(np.array([10, 12], np.uint64)) == 0
    assert check.error_ratio(np.array([10, 13], np.uint64)) == np.inf


def test_the_floor_moves_the_bytes_of_merging(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy writes half of them; a sum a third, and it adds every word."""
    launched = {}

    def kernel(text: str, name: str, options: tuple[str, ...]) -> Any:
        pieces = int(dict(option[2:].split("=") for option in options)["PIECES"])

        def launch(grid: Any, block: Any, arguments: Any) -> None:
            first, second, total, words = arguments
            total[:] = first + second
            launched.update(room=grid[0] * block[0] * pieces, words=int(words))

        return launch

    fake = types.ModuleType("cupy")
    stream = types.SimpleNamespace(get_current_stream=lambda: None)
    vars(fake).update(vars(np) | {"RawKernel": kernel, "cuda": stream})
    monkeypatch.setitem(sys.modules, "cupy", fake)
    p = replace(merge_case(16, "bfloat16").problem, heads=8, head_dim=8)
    bytes_moved = roofline.work(p).bytes
    suite = replace(MERGE, backend="reference", peers=("copy", "add"))
    _, found = merge.bind(suite, Case(id="x", problem=p))
    _, copy, add = found
    assert [c.backend for c in found] == ["reference", "copy", "add"]
    assert 2 * copy.expected.bits.nbytes == bytes_moved
    total = add.run()
    assert add.expected.error_ratio(total) == 0 and add.expected.error_ratio(0 * total) == np.inf
    assert 3 * total.nbytes == bytes_moved == 3 * 16 * launched["words"]
    assert 0 <= launched["room"] - launched["words"] < 1024


def test_a_candidate_may_bring_what_its_own_output_must_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cupy", types.SimpleNamespace(from_dlpack=lambda x: x))
    t = types.SimpleNamespace(
        out=np.zeros(3), expected=lambda problem, xp: bandwidth.Exactly(bits=np.ones(3))
    )
    exactly = [bandwidth.Exactly(bits=np.arange(3), reduce=np.asarray), None]
    monkeypatch.setattr(bandwidth.Exactly, "error_ratio", _ratio)
    made = [
        measure.Candidate(backend=str(i), run=lambda: np.arange(3), expected=own)
        for i, own in enumerate(exactly)
    ]
    case = Case(id="x", problem=None)
    assert measure.error_ratios(case, made, t) == {"0": 0.0, "1": np.inf}  # type: ignore[arg-type]


def _ratio(check: bandwidth.Exactly, out: Any, xp: Any) -> float:
    return 0.0 if np.array_equal(out, check.bits) else np.inf


# ---- peers and tables ----------------------------------------------------------------------------


def test_peers_that_cannot_or_fail_are_gaps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(problem: Any, tensors: Any) -> None:
        raise KeyError("schema")

    home = types.ModuleType("some_peers")
    vars(home).update(
        PEERS={
            "a": lambda p, t: int,
            "b": lambda p, t: None,
            "c": fails,
            "d": lambda p, t: measure.Candidate(backend="", run=int, config="plan_ms=7"),
        },
        version=lambda n: f"{n} 1",
    )
    monkeypatch.setitem(sys.modules, "some_peers", home)
    case = DECODE.cases[0]
    found = candidates.peer_candidates(("a", "b", "c", "d"), case, None, "some_peers")
    assert [(c.backend, c.peer_version) for c in found] == [("a", "a 1"), ("d", "d 1")]
    assert [c.config for c in found] == ["", "plan_ms=7"]
    printed = capsys.readouterr().out
    assert f"gap: b cannot do {case.id}" in printed
    assert f"gap: c fails on {case.id}: KeyError" in printed
    assert candidates.peer_candidates(("a",), case, None, "no_such_peers") == []
    assert "no peers" in capsys.readouterr().out


def row(case: Case, backend: str, p50: float) -> Row:
    state = measure.GpuState(driver="580.1", clock_mhz=1980, temperature_c=40)
    setting = measure.Setting(
        op="decode", case=case, device=H200, before=state, after=state, l2="cleared", timestamp="t"
    )
    made = measure.Candidate(backend=backend, run=lambda: None)
    return measure.make_row(setting, made, [p50], 0.5)


def test_rows_of_all_three_suites_have_one_schema() -> None:
    skewed = next(c for c in DECODE.cases if c.lengths)
    found = row(skewed, "decode_split", 100.0)
    assert (found.batch, found.max_k, found.page_size, found.layout) == (64, 131072, 16, "NHD")
    assert found.lengths == "128 to 131072, 139136 in all"
    moved = roofline.work(skewed.problem, skewed.lengths).bytes
    assert found.gb_per_s == pytest.approx(moved / 1e-4 / 1e9, abs=0.1)
    assert found.roofline_percent == pytest.approx(100 * found.gb_per_s / 4800, abs=0.1)
    fp8 = next(c for c in DECODE.cases if c.problem.quantized)
    assert row(fp8, "decode_split", 100.0).kv_dtype == "float8_e4m3fn"
    assert row(MERGE.cases[0], "merge", 10.0).q_heads == 32
    assert row(KV_WRITE.cases[0], "kv_write", 10.0).tflops == 0


def test_the_table_shows_times_ratios_gaps_and_who_is_faster() -> None:
    a, b = DECODE.cases[0], DECODE.cases[1]
    found = [
        row(a, "decode_split", 10.0),
        row(a, "fa3", 15.0),
        row(a, "read", 8.0),
        row(b, "decode_split", 20.0),
        row(b, "fa3", 19.0),
        row(b, "vllm_v1", 100.0),
        row(b, "decode_split (nhd)", 22.0),
    ]
    lines = decode_report.times(found, DECODE).splitlines()
    assert lines[0].split()[:5] == ["case", "decode_split", "TB/s", "fa3", "flashinfer"]
    assert lines[0].endswith("decode_split (nhd)")
    assert lines[1].split()[:2] == [a.id, "10.00"] and "15.00 x 1.500" in lines[1]
    assert "8.00 x 0.800" in lines[1] and "<" not in lines[1]  # a read is no peer
    assert "100.00 x 5.000" in lines[2] and "22.00 x 1.100" in lines[2]
    assert lines[2].endswith("  < fa3") and " - " in lines[2]
    assert lines[3].startswith("geometric mean") and "x 1.194" in lines[3]


def test_claims_are_held_to_rows() -> None:
    ids = {case.id: case for case in DECODE.cases}
    small, large = ids["32x8-d128-p16-b1-k1024"], ids["32x8-d128-p16-b128-k4096"]
    x_major, fp8 = ids["32x8-d128-p16-b32-k4096-x"], ids["32x8-d128-p16-b128-k4096-fp8"]
    found = [
        row(small, "decode_split", 7.0),
        row(small, "fa3", 15.6),
        row(small, "read", 5.0),
        row(large, "decode_split", 480.0),
        row(large, "fa3", 470.0),
        row(large, "read", 470.0),
        row(x_major, "decode_split", 120.0),
        row(x_major, "decode_split (nhd)", 100.0),
        row(x_major, "vllm_v1", 500.0),
        row(x_major, "vllm_v2", 370.0),
        row(fp8, "decode_split", 270.0),
        row(fp8, "decode_split (bf16)", 480.0),
    ]
    lines = claims.verdicts(decode_claims.DECODE_CLAIMS, "decode_split", found)
    assert [good for good, _ in lines] == [False, False, True, True, True, False, True]
    assert "2 of 3 cells" in lines[0][1]
    assert lines[0][1].endswith("worst 0.979 at 32x8-d128-p16-b128-k4096")
    assert "1 of 1 cells" in lines[2][1]  # a small cache is not held to the bandwidth
    assert lines[3][1].startswith("open") and "worst 0.857 at 32x8-d128-p16-b1-k1024" in lines[3][1]
    assert "worst 3.083" in lines[4][1] and "worst 0.833" in lines[5][1]
    nothing = claims.verdicts(decode_claims.MERGE_CLAIMS, "merge", [])
    assert [good for good, _ in nothing] == [False, False]


def test_the_host_time_of_a_planned_call_is_a_claim() -> None:
    times = {"bare cuLaunchKernelEx": 4.0, "call of plan.run": 6.5, "call with out": 30.0}
    rows = [
        host_time.host_row(f"{what}{host_time.DECODE}", [us], "x") for what, us in times.items()
    ]
    assert decode_claims.host_verdict(rows) == (
        True,
        "ok   host time of a planned call: +2.50 us over bare launches, at most 3",
    )
    slower = [replace(r, p50_us=7.5) if "plan.run" in r.what else r for r in rows]
    assert not decode_claims.host_verdict(slower)[0]
    assert not decode_claims.host_verdict(rows[:1])[0]


def test_claims_name_cells_that_exist() -> None:
    ids = {case.id for case in DECODE.cases}
    assert decode_claims.GOALS.keys() | decode_claims.POSSIBLE.keys() <= ids
    assert set(decode_claims.RIVALS) < set(DECODE.peers)
