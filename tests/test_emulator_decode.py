# SPDX-License-Identifier: Apache-2.0
"""cuda/decode_split.cu and cuda/decode_sm90.cu on the emulator, against the reference."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from rawattn.paged_problem import Scale
from rawattn.plan import decode
from rawattn.problem import Mask
from tests.decode import HND, X_MAJOR, Call, Case, check
from tools import emulator

pytestmark = pytest.mark.skipif(emulator.available() is not None, reason=emulator.available() or "")

RAGGED = (0, 1, 15, 16, 17, 100, 33, 300)
# Every warp has several units, with tails between them: stages are filled again.
MANY = (0, 1, 15, 17, 300, 33, 250, 2, 100, 0, 90, 65, 64, 63, 31, 200)
DRAFTS = (4, 2, 4, 1, 4, 3, 0, 4)  # queries of each
# Each warp works alone, on parts of its own: it has several segments, and shares some.
SHORT = tuple(37 * i % 257 for i in range(24))
CROWD = tuple(13 * i % 41 for i in range(140))  # five sequences a lane
CASES = {
    # TMA
    "pages of 16": Case(k_lens=MANY, sms=2),
    "pages of 64, HND, CSR": Case(k_lens=RAGGED, page=64, layout=HND, csr=True),
    "one long sequence": Case(k_lens=(900,), kv_heads=4, sms=7),
    "group of 1": Case(k_lens=RAGGED, group=1, kv_heads=3),
    "group of 7, heads over few SMs": Case(k_lens=(70, 3, 200), group=7, kv_heads=5, sms=4),
    "more rows than a block has": Case(k_lens=(40, 90), group=12, kv_heads=1, q_lens=(6, 6)),
    "draft tokens": Case(k_lens=RAGGED, q_lens=DRAFTS, packed=True),
    "16 draft tokens": Case(k_lens=(5, 16, 100), q_lens=(16, 16, 16), page=64),
    "tree": Case(k_lens=(16, 40, 100), q_lens=(8, 8, 8), tree=True),
    "head size 64": Case(k_lens=RAGGED, head_dim=64, dtype="float16"),
    "head size 256": Case(k_lens=RAGGED, head_dim=256, sink=True),
    "cluster": Case(k_lens=(700, 0), sms=132, csr=True, sink=True),
    "cluster of 4": Case(k_lens=(300, 17), sms=22),
    "cluster of 2": Case(k_lens=(2600, 0, 70), group=8, kv_heads=1, sms=6, page=32),
    "more sequences than lanes": Case(k_lens=CROWD, sms=3, kv_heads=1),
    "more sequences than lanes, CSR": Case(k_lens=CROWD, sms=3, kv_heads=1, csr=True),
    "short sequences": Case(k_lens=SHORT, sms=2),
    "short sequences, group of 7, HND": Case(
        k_lens=SHORT, sms=1, group=7, kv_heads=1, layout=HND, sink=True
    ),
    "short sequences of e4m3": Case(
        k_lens=SHORT, sms=2, cache_dtype="float8_e4m3fn", scale=Scale.HEAD
    ),
    "short sequences, x-major": Case(k_lens=SHORT, sms=2, layout=X_MAJOR),
    "e4m3 cluster": Case(k_lens=(700,), sms=132, cache_dtype="float8_e4m3fn"),
    "e4m3": Case(k_lens=RAGGED, cache_dtype="float8_e4m3fn", scale=Scale.HEAD),
    # two tiles of rows, where there are many segments
    "drafts of many sequences": Case(
        k_lens=tuple(97 * i % 71 for i in range(64)),
        q_lens=(4, 2, 3, 1) * 16,
        packed=True,
        kv_heads=4,
    ),
    "draft trees of many sequences": Case(
        k_lens=tuple(97 * i % 71 + 3 for i in range(64)),
        q_lens=(3,) * 64,
        tree=True,
        alibi=True,
        kv_heads=4,
    ),
    # wgmma: more than 8 rows
    "draft tokens, all scores": Case(
        k_lens=RAGGED,
        q_lens=DRAFTS,
        packed=True,
        layout=HND,
        csr=True,
        mask=Mask(left=40, right=2),
        softcap=3.0,
        alibi=True,
        sink=True,
    ),
    "draft tree, few SMs": Case(
        k_lens=(300, 40, 5, 200), q_lens=(9, 3, 4, 6), packed=True, tree=True, sms=2
    ),
    "drafts, many parts": Case(k_lens=(1500,), q_lens=(6,), sms=14),
    "draft cluster": Case(k_lens=(700, 0), q_lens=(5, 5), sms=132, csr=True, sink=True),
    "drafts, turned scores": Case(k_lens=RAGGED, q_lens=(3,) * 8, times=-1.0, page=16),
    "drafts, head size 64": Case(k_lens=MANY, q_lens=(3,) * 16, head_dim=64, dtype="float16"),
    "x-major drafts, all scores": Case(
        k_lens=RAGGED,
        q_lens=DRAFTS,
        packed=True,
        layout=X_MAJOR,
        csr=True,
        mask=Mask(left=40, right=2),
        softcap=3.0,
        alibi=True,
        sink=True,
    ),
    "x-major draft tree": Case(
        k_lens=(300, 40, 5, 200),
        q_lens=(9, 3, 4, 6),
        packed=True,
        tree=True,
        sms=2,
        layout=X_MAJOR,
        page=48,
    ),
    "x-major draft cluster": Case(k_lens=(701, 0), q_lens=(5, 5), sms=132, layout=X_MAJOR),
    "x-major drafts, head size 64": Case(
        k_lens=MANY, q_lens=(3,) * 16, head_dim=64, dtype="float16", layout=X_MAJOR, page=32
    ),
    "x-major, fixed split": Case(k_lens=RAGGED, split=64, layout=X_MAJOR),
    # e4m3: tiles of rows
    "e4m3, draft tokens": Case(
        k_lens=RAGGED, q_lens=DRAFTS, packed=True, cache_dtype="float8_e4m3fn", scale=Scale.HEAD
    ),
    "e4m3, 33 rows, HND, all scores": Case(
        k_lens=RAGGED,
        q_lens=(11,) * 8,
        group=3,
        layout=HND,
        page=64,
        csr=True,
        cache_dtype="float8_e4m3fn",
        mask=Mask(left=40, right=2),
        softcap=3.0,
        alibi=True,
        sink=True,
    ),
    "e4m3, 5 rows, turned scores": Case(
        k_lens=MANY, q_lens=(5,) * 16, group=1, sms=2, cache_dtype="float8_e4m3fn", times=-1.0
    ),
    "e4m3, group of 9, fp16": Case(
        k_lens=MANY, group=9, kv_heads=1, sms=2, cache_dtype="float8_e4m3fn", dtype="float16"
    ),
    "e4m3, draft tree": Case(
        k_lens=(16, 40, 100),
        q_lens=(8, 3, 6),
        packed=True,
        tree=True,
        cache_dtype="float8_e4m3fn",
        scale=Scale.TENSOR,
    ),
    "e4m3, drafts, fixed split": Case(
        k_lens=RAGGED,
        q_lens=DRAFTS,
        packed=True,
        split=64,
        tma=False,
        cache_dtype="float8_e4m3fn",
    ),
    "x-major": Case(k_lens=RAGGED, layout=X_MAJOR),
    "x-major, pages of 48": Case(k_lens=RAGGED, layout=X_MAJOR, page=48),
    "x-major cluster": Case(k_lens=(300,), kv_heads=1, group=8, sms=132, layout=X_MAJOR),
    "x-major cluster, entries below 0": Case(
        k_lens=(0, 1, 300), kv_heads=1, sms=132, layout=X_MAJOR, tail=-1
    ),
    "x-major cluster of 2, CSR": Case(
        k_lens=(2600, 0, 70), kv_heads=1, sms=6, layout=X_MAJOR, csr=True
    ),
    "e4m3, x-major cluster, lowest entries": Case(
        k_lens=(1, 0, 300),
        kv_heads=1,
        sms=132,
        layout=X_MAJOR,
        cache_dtype="float8_e4m3fn",
        tail=-(2**31),
    ),
    "x-major cluster, pages of 32": Case(
        k_lens=(300, 3), kv_heads=1, sms=132, layout=X_MAJOR, page=32
    ),
    # cp.async
    "pages of 5": Case(
        k_lens=MANY, sms=2, page=5, tma=False, mask=Mask(left=150, right=0), sink=True
    ),
    "pages of 1, A100": Case(
        k_lens=RAGGED, page=1, tma=False, arch="sm_80", softcap=2.0, alibi=True
    ),
    "head size 80": Case(k_lens=RAGGED, head_dim=80, tma=False, sink=True, alibi=True),
    "draft tokens, window": Case(
        k_lens=RAGGED,
        q_lens=DRAFTS,
        packed=True,
        page=3,
        tma=False,
        mask=Mask(left=20, right=2),
        softcap=3.0,
        alibi=True,
        sink=True,
    ),
    "packed tree": Case(
        k_lens=(16, 40, 100), q_lens=(8, 3, 6), packed=True, tree=True, page=3, tma=False
    ),
    "x-major, pages of 8": Case(
        k_lens=RAGGED, layout=X_MAJOR, page=8, tma=False, q_lens=DRAFTS, packed=True
    ),
    "int8, x-major": Case(
        k_lens=RAGGED,
        layout=X_MAJOR,
        page=16,
        head_dim=96,
        tma=False,
        cache_dtype="int8",
        dtype="float16",
        scale=Scale.TENSOR,
    ),
    "e5m2, pages of 8": Case(
        k_lens=RAGGED, page=8, tma=False, cache_dtype="float8_e5m2", scale=Scale.HEAD
    ),
    "turned scores": Case(k_lens=RAGGED, times=-1.0),
    # element by element
    "head size 1": Case(k_lens=RAGGED, head_dim=1, page=1, group=1, tma=False),
    "head sizes 65 and 7, window": Case(
        k_lens=RAGGED,
        head_dim=65,
        value_dim=7,
        page=5,
        layout=HND,
        q_lens=DRAFTS,
        packed=True,
        mask=Mask(left=20, right=2),
        sink=True,
        tma=False,
    ),
    "head size 100, many, CSR": Case(
        k_lens=MANY, head_dim=100, page=3, sms=2, csr=True, dtype="float16", tma=False
    ),
    "head sizes 8 and 251": Case(k_lens=(70, 3), head_dim=8, value_dim=251, tma=False),
    "x-major, pages of 5": Case(k_lens=MANY, layout=X_MAJOR, page=5, sms=2, tma=False, group=12),
    "x-major, pages of 1, head sizes 256 and 3": Case(
        k_lens=RAGGED, layout=X_MAJOR, page=1, head_dim=256, value_dim=3, tma=False
    ),
    "e4m3, x-major, pages of 8, head sizes 48 and 20": Case(
        k_lens=RAGGED,
        layout=X_MAJOR,
        page=8,
        head_dim=48,
        value_dim=20,
        cache_dtype="float8_e4m3fn",
        scale=Scale.HEAD,
        tma=False,
    ),
    "int8, head sizes 133 and 29": Case(
        k_lens=RAGGED,
        head_dim=133,
        value_dim=29,
        cache_dtype="int8",
        scale=Scale.TENSOR,
        dtype="float16",
        split=64,
        tma=False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_kernel_gives_what_the_reference_gives(name: str) -> None:
    check(CASES[name])


# Units of two KV heads, which the plan chooses where much more is read than here.
SHARED = {
    "e4m3": Case(k_lens=MANY, sms=4, cache_dtype="float8_e4m3fn", scale=Scale.HEAD, sink=True),
    "int8, group of 3, CSR": Case(
        k_lens=RAGGED, kv_heads=4, group=3, cache_dtype="int8", scale=Scale.TENSOR, csr=True
    ),
    "head size 64, pages of 48": Case(k_lens=MANY, head_dim=64, page=48, kv_heads=6, sms=13),
    "short sequences, group of 1": Case(
        k_lens=SHORT, sms=2, group=1, head_dim=64, dtype="float16", packed=True
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_units_of_two_heads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "HEADS_BATCH", 1)
    monkeypatch.setattr(decode, "HEADS_TOKENS", 1)
    assert Call(SHARED[name]).launch().config.heads == 2
    check(SHARED[name])


def test_what_is_no_number_stays_in_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "HEADS_BATCH", 1)
    monkeypatch.setattr(decode, "HEADS_TOKENS", 1)
    case = Case(k_lens=(70, 20), cache_dtype="float8_e4m3fn")
    clean, call = Call(case), Call(case)
    call.k_cache[:, 3, 0, 5] = call.v_cache[..., 1, 7] = np.nan
    launch = call.launch()
    assert launch.config.heads == 2
    out, _ = call.run(launch, seed=0)
    expected, _ = clean.run(launch, seed=0)
    first, second = slice(0, case.group), slice(case.group, None)  # query heads of a KV head
    assert np.isnan(out[:, first].astype(np.float32)).all()
    numbers = out[:, second].astype(np.float32)
    assert np.isnan(numbers[..., 7]).all()
    others = np.arange(case.head_dim) != 7
    assert (out[:, second, others] == expected[:, second, others]).all()


def test_parts_are_whole_when_the_last_block_adds_them() -> None:
    # What a block hands over before it arrives at the counter shows under few schedules.
    check(Case(k_lens=(900, 300, 200, 100, 900, 300, 200, 100), sms=15, kv_heads=1), seeds=20)
    # decode_sm90: each warp of rows has a counter of its own.
    check(Case(k_lens=(900, 40, 300), q_lens=(13, 5, 9), packed=True, sms=9, kv_heads=1), seeds=12)


def test_a_cluster_is_what_the_plan_chose() -> None:
    clusters = {name: Call(case).launch().config.cluster for name, case in CASES.items()}
    assert {name: size for name, size in clusters.items() if size > 1} == {
        "cluster": 8,
        "cluster of 4": 4,
        "cluster of 2": 2,
        "e4m3 cluster": 8,
        "x-major cluster": 8,
        "x-major cluster, entries below 0": 8,
        "x-major cluster of 2, CSR": 2,
        "e4m3, x-major cluster, lowest entries": 8,
        "x-major cluster, pages of 32": 8,
        "draft cluster": 8,
        "x-major draft cluster": 8,
    }


def test_many_rows_are_for_wgmma() -> None:
    kernels = {name: Call(case).launch().kernel for name, case in CASES.items()}
    for name, case in CASES.items():
        sixteen = not case.problem.quantized
        wide = case.tma and sixteen and (case.problem.rows > 8 or case.problem.split > 0)
        segments = len(case.k_lens) * case.kv_heads
        narrow = case.problem.rows <= 16 and case.layout is not X_MAJOR
        pairs = narrow and segments >= decode.PAIR_SEGMENTS
        assert kernels[name] == ("decode_sm90" if wide and not pairs else "decode_split"), name


def test_fixed_split_bits_do_not_depend_on_the_batch() -> None:
    batch = Case(k_lens=(300, 17, 0, 90), split=64, sms=5)
    call = Call(batch)
    check(batch)
    out, lse = call.run(call.launch(), seed=1)
    for b, length in enumerate(batch.k_lens):
        alone = Call(dataclasses.replace(batch, k_lens=(length,), sms=3))
        # The same keys, elsewhere, and the same query.
        alone.k_cache, alone.v_cache, alone.q = call.k_cache, call.v_cache, call.q[b : b + 1]
        alone.table = {name: array[b : b + 1] for name, array in call.table.items()}
        launch = alone.launch()
        got_out, got_lse = alone.run(launch, seed=2)
        assert got_out.tobytes() == out[b : b + 1].tobytes(), b
        assert got_lse.tobytes() == lse[:, b : b + 1].tobytes(), b
