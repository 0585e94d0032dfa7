# SPDX-License-Identifier: Apache-2.0
"""FLOPs and bytes in closed form equal what counting one pair at a time finds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import roofline
from rawattn.cache_problem import (
    CopyBlocksProblem,
    KvWriteProblem,
    MergeProblem,
    RotaryProblem,
)
from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.problem import CacheLayout, Mask, Problem
from tests.problems import decode_problem

masks = st.builds(Mask, left=st.integers(-1, 12), right=st.integers(-1, 12), top_left=st.booleans())
lengths = st.tuples(st.integers(0, 12), st.integers(0, 12))


def problem(**fields: object) -> Problem:
    defaults = Problem(
        dtype="bfloat16",
        batch=2,
        q_heads=4,
        kv_heads=2,
        head_dim=64,
        value_dim=32,
        max_q=5,
        max_k=7,
    )
    return replace(defaults, **fields)


def seen(q_len: int, k_len: int, mask: Mask) -> list[tuple[int, int]]:
    """Every pair that the mask lets through, by its definition in `Mask`."""
    pairs = []
    for i in range(q_len):
        diagonal = i if mask.top_left else i + k_len - q_len
        for j in range(k_len):
            if (mask.left < 0 or j >= diagonal - mask.left) and (
                mask.right < 0 or j <= diagonal + mask.right
            ):
                pairs.append((i, j))
    return pairs


@given(lengths, masks)
def test_pairs_and_rows_are_those_that_counting_finds(length: tuple[int, int], mask: Mask) -> None:
    pairs = seen(*length, mask)
    assert roofline.visible_pairs(*length, mask) == len(pairs)
    rows = len({i for i, _ in pairs}), len({j for _, j in pairs})
    assert roofline.visible_rows(*length, mask) == rows


@given(st.lists(lengths, min_size=1, max_size=4), masks)
def test_work_is_the_sum_over_sequences(sequences: list[tuple[int, int]], mask: Mask) -> None:
    p = problem(batch=len(sequences), mask=mask)
    pairs = [seen(q_len, k_len, mask) for q_len, k_len in sequences]
    queries = sum(len({i for i, _ in x}) for x in pairs)
    keys = sum(len({j for _, j in x}) for x in pairs)
    out_rows = sum(q_len for q_len, _ in sequences)
    found = roofline.work(p, sequences)
    assert found.flops == sum(map(len, pairs)) * 4 * (2 * 64 + 2 * 32)
    assert found.bytes == 2 * (queries * 4 * 64 + keys * 2 * (64 + 32) + out_rows * 4 * 32)
    assert roofline.work(p, sequences, lse=True).bytes == found.bytes + 4 * 4 * out_rows


def test_without_lengths_every_sequence_is_the_longest() -> None:
    p = problem(mask=Mask.of(causal=True))
    assert roofline.work(p) == roofline.work(p, [(5, 7)] * 2)
    with pytest.raises(ValueError, match="a pair for each of 2 sequences"):
        roofline.work(p, [(5, 7)])


def test_the_convention_of_published_figures() -> None:
    square = problem(batch=1, q_heads=16, kv_heads=16, head_dim=128, value_dim=128)
    square = replace(square, max_q=4096, max_k=4096)
    assert roofline.convention_flops(square) == 4 * 16 * 4096 * 4096 * 128
    assert roofline.convention_flops(square) == roofline.work(square).flops
    causal = replace(square, mask=Mask.of(causal=True))
    assert roofline.convention_flops(causal) == 2 * 16 * 4096 * 4096 * 128
    assert roofline.work(causal).flops * 4096 == roofline.convention_flops(causal) * 4097


def paged(**fields: object) -> PagedProblem:
    small = {"batch": 3, "q_heads": 8, "kv_heads": 2, "head_dim": 64, "value_dim": 32}
    small |= {"max_q": 2, "max_k": 100, "mask": Mask.of(causal=True)}
    return decode_problem(**{**small, "cache_dtype": "float8_e4m3fn", **fields})


def test_a_paged_cache_counts_in_its_own_type() -> None:
    seen = [(2, 7), (1, 0), (1, 100)]
    found = roofline.work(paged(), seen)
    assert found.flops == 2 * 8 * 96 * (6 + 7 + 0 + 100)
    keys, queries, rows = 107, 3, 4
    assert found.bytes == keys * 2 * 96 * 1 + (queries * 8 * 64 + rows * 8 * 32) * 2
    wide = roofline.work(paged(cache_dtype="bfloat16"), seen)
    assert wide.bytes - found.bytes == keys * 2 * 96
    h200 = Device.named("H200")
    assert roofline.limit(paged(), h200).compute_seconds == pytest.approx(
        roofline.work(paged()).flops / 989.4e12  # q is bf16, and so are the products
    )


def test_causal_queries_at_the_end_of_a_long_cache_see_nearly_all_of_it() -> None:
    one = paged(max_q=1)
    assert roofline.convention_flops(one) == 3 * 8 * 1 * 199 * 96
    exact = roofline.work(replace(one, max_k=100)).flops
    assert roofline.convention_flops(one) == pytest.approx(exact, rel=0.01)


def test_moving_has_bytes_alone() -> None:
    write = KvWriteProblem(
        dtype="bfloat16",
        cache_dtype="float8_e5m2",
        tokens=10,
        kv_heads=2,
        head_dim=64,
        value_dim=32,
        layout=CacheLayout.HND,
    )
    assert roofline.work(write) == roofline.Work(flops=0, bytes=10 * 2 * 96 * 3)
    merge = MergeProblem(
        dtype="float32", out_dtype="float16", states=3, tokens=5, heads=4, head_dim=8
    )
    assert roofline.work(merge).bytes == 20 * (3 * (32 + 4) + 16 + 4)
    copy = CopyBlocksProblem(caches=2, pairs=3, block_bytes=100)
    assert roofline.work(copy).bytes == 2 * 2 * 3 * 100
    turn = RotaryProblem(dtype="float32", tokens=2, heads=3, head_dim=8)
    assert roofline.work(turn).bytes == 2 * 2 * 3 * 8 * 4
    limit = roofline.limit(merge, Device.named("A100"))
    assert (limit.bound, roofline.convention_flops(merge)) == ("memory", 0)


def test_the_limit_names_what_binds() -> None:
    h200 = Device.named("H200")
    prefill = problem(batch=1, q_heads=16, kv_heads=16, head_dim=128, value_dim=128)
    prefill = replace(prefill, max_q=4096, max_k=4096)
    found = roofline.limit(prefill, h200)
    assert found.bound == "compute"
    assert found.seconds == pytest.approx(4 * 16 * 4096**2 * 128 / 989.4e12)
    assert found.efficiency(2 * found.seconds) == pytest.approx(0.5)
    decode = replace(prefill, max_q=1)
    found = roofline.limit(decode, h200)
    assert found.bound == "memory"
    assert found.seconds == pytest.approx(2 * 16 * 128 * (2 * 4096 + 2) / 4800e9)


def test_unknown_peaks_are_errors() -> None:
    unknown = replace(Device.named("H200"), name="Some GPU", tflops=None)
    with pytest.raises(ValueError, match="Some GPU"):
        roofline.limit(problem(), unknown)
    with pytest.raises(ValueError, match="dtype='float32'"):
        roofline.limit(problem(dtype="float32"), Device.named("H200"))
