# SPDX-License-Identifier: Apache-2.0
"""Bytes that algorithms move: formulas equal walks that count. And every figure of the text that
this project started from (FlashAttention from first principles), recomputed.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn import reference, roofline
from rawattn.device import DEVICES, Device
from rawattn.problem import Mask, Problem
from rawattn.roofline import MODELS, Traffic, decode, roofs, traffic, walk

ROOT = Path(__file__).resolve().parent.parent
KIB, MIB, GIB = 2**10, 2**20, 2**30
WALKS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "standard": (
        lambda q, k, v, m, n, mask: walk.standard(q, k, v, mask),
        lambda p, m, n: traffic.standard(p),
    ),
    "keys outside": (walk.keys_outside, traffic.keys_outside),
    "queries outside": (walk.queries_outside, traffic.queries_outside),
}
masks = st.builds(Mask, left=st.integers(-1, 9), right=st.integers(-1, 9), top_left=st.booleans())


def problem(length: int = 4096, **fields: Any) -> Problem:
    """One head of bf16 self-attention, head_dim 128, as the text has it."""
    defaults = Problem(
        dtype="bfloat16",
        batch=1,
        q_heads=1,
        kv_heads=1,
        head_dim=128,
        value_dim=128,
        max_q=length,
        max_k=length,
    )
    return replace(defaults, **fields)


# ---- formulas and walks --------------------------------------------------------------------------


@pytest.mark.parametrize("order", WALKS)
@given(
    lengths=st.tuples(st.integers(1, 13), st.integers(1, 13)),
    mask=masks,
    tiles=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    dtype=st.sampled_from(["float16", "float32"]),
    seed=st.integers(0, 9),
)
def test_formulas_are_what_walks_move_and_walks_compute_attention(
    order: str,
    lengths: tuple[int, int],
    mask: Mask,
    tiles: tuple[int, int],
    dtype: str,
    seed: int,
) -> None:
    (q_len, k_len), (run, formula) = lengths, WALKS[order]
    rng = np.random.default_rng(seed)
    shapes = (q_len, 4), (k_len, 4), (k_len, 3)
    q, k, v = (rng.standard_normal(shape).astype(dtype) for shape in shapes)
    out, moved = run(q, k, v, *tiles, mask)
    p = problem(max_q=q_len, max_k=k_len, head_dim=4, value_dim=3, dtype=dtype, mask=mask)
    assert moved == formula(p, *tiles)
    want, _ = reference.attention(*(x[None, :, None] for x in (q, k, v)), mask=mask)
    np.testing.assert_allclose(out, want[0, :, 0], atol=0.03 if dtype == "float16" else 1e-5)


@given(lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3), mask=masks)
def test_batches_and_heads_add_up(lengths: list[tuple[int, int]], mask: Mask) -> None:
    fields = {"head_dim": 4, "value_dim": 3, "mask": mask}
    p = problem(batch=len(lengths), q_heads=6, kv_heads=2, **fields)
    for formula in (traffic.keys_outside, traffic.queries_outside):
        one = sum(
            (formula(problem(max_q=q, max_k=k, **fields), 2, 3) for q, k in lengths), Traffic()
        )
        assert formula(p, 2, 3, lengths) == one.times(6)
    assert traffic.standard(p, lengths).s_read == 2 * 6 * sum(q * k for q, k in lengths)


@given(q_len=st.integers(0, 12), k_len=st.integers(0, 12), mask=masks, tiles=st.integers(1, 5))
def test_no_algorithm_moves_less_than_the_least(
    q_len: int, k_len: int, mask: Mask, tiles: int
) -> None:
    p = problem(max_q=q_len, max_k=k_len, mask=mask)
    least = roofline.work(p).bytes
    assert traffic.queries_outside(p, tiles, tiles).total >= least
    assert traffic.standard(p).total >= least


def test_a_kernel_more_between_the_products_costs_s_twice_more() -> None:
    more = traffic.standard(problem(), passes=2).total - traffic.standard(problem()).total
    assert more == 2 * 2 * 32 * MIB


def test_masks_leave_out_whole_tiles() -> None:
    """The text's drawings of 8 x 8 tiles: 36 under a causal mask, 21 in a window of 3 tiles."""
    size, tile = 8, 2 * 16 * 128  # bytes of K of one tile
    causal = problem(size * 16, mask=Mask.of(True))
    assert traffic.queries_outside(causal, 16, 16).k_read == 36 * tile
    assert traffic.keys_outside(causal, 16, 16).q_read == 36 * tile
    window = problem(size * 16, mask=Mask.of(True, (2 * 16, 0)))
    assert traffic.queries_outside(window, 16, 16).k_read == 21 * tile


# ---- the figures of the text: prefill ------------------------------------------------------------

# The text rounds: 2.0 TB/s and 312 TFLOP/s; 3.35 TB/s and 989 TFLOP/s.
A100 = replace(Device.named("A100"), gb_per_s=2000.0, tflops=312.0)
H100 = Device.named("H100")


def test_the_ridge_of_a100_and_of_h100() -> None:
    assert roofline.ridge(A100) == pytest.approx(156)
    assert roofline.ridge(H100) == pytest.approx(295, abs=0.5)
    assert roofline.ridge(Device.named("A100")) == pytest.approx(156, rel=0.03)


def test_the_standard_algorithm_moves_132_mib() -> None:
    moved = traffic.standard(problem())
    assert moved.q_read == moved.k_read == moved.v_read == moved.o_written == MIB
    assert moved.s_written == moved.s_read == moved.p_written == moved.p_read == 32 * MIB
    assert 4096**2 == 16_777_216 == moved.s_written // 2
    assert moved.total == 132 * MIB
    single = traffic.standard(problem(dtype="float32"))
    assert single.s_written == 64 * MIB


def test_the_standard_algorithm_is_bound_by_memory_on_a100() -> None:
    flops = roofline.convention_flops(problem())
    assert flops == 4 * 4096**2 * 128 == pytest.approx(8.6e9, rel=0.002)
    needed = roofline.Work(flops=flops, bytes=traffic.standard(problem()).total)
    assert needed.bytes == pytest.approx(138e6, rel=0.004)
    assert needed.intensity == pytest.approx(62, abs=0.1)
    limit = roofline.limit_of(needed, A100)
    assert limit.bound == "memory"
    assert 1e6 * limit.memory_seconds == pytest.approx(69, abs=0.3)
    assert 1e6 * limit.compute_seconds == pytest.approx(28, abs=0.5)
    assert 1e6 * (limit.memory_seconds - limit.compute_seconds) == pytest.approx(40, abs=2)


def test_s_of_long_sequences_and_of_many_heads() -> None:
    assert traffic.standard(problem(32768)).s_written == 2 * GIB
    assert traffic.standard(problem(8192, q_heads=32, kv_heads=32)).s_written == 4 * GIB
    training = problem(batch=8, q_heads=32, kv_heads=32)
    assert traffic.standard(training).p_written == 8 * GIB  # kept for a standard backward pass


@pytest.mark.parametrize(("block_m", "passes", "total"), [(128, 32, 66), (256, 16, 34)])
def test_queries_outside_move_66_or_34_mib(block_m: int, passes: int, total: int) -> None:
    moved = traffic.queries_outside(problem(), block_m, 64)
    assert moved.k_read == moved.v_read == passes * MIB
    assert (moved.q_read, moved.o_written) == (MIB, MIB)
    assert moved.total == total * MIB
    assert moved == traffic.queries_outside(problem(), block_m, 128)  # block_n does not matter
    ratio = traffic.standard(problem()).total / moved.total
    assert ratio == pytest.approx({128: 2, 256: 4}[block_m], rel=0.03)


def test_twice_the_length_is_four_times_the_traffic_either_way() -> None:
    for moved in (traffic.standard, lambda p: traffic.queries_outside(p, 128, 64)):
        assert moved(problem(2**16)).total / moved(problem(2**15)).total == pytest.approx(4, 0.01)


def test_with_l2_it_is_4_mib_and_bound_by_computing() -> None:
    least = roofline.work(problem())
    assert least.bytes == 4 * MIB
    assert 2 * MIB < A100.l2_bytes == 40 * MIB  # K and V of the head stay there
    limit = roofline.limit(problem(), A100)
    assert limit.bound == "compute"
    assert 1e6 * limit.memory_seconds == pytest.approx(2, abs=0.1)
    assert 1e6 * limit.compute_seconds == pytest.approx(28, abs=0.5)
    assert least.intensity == pytest.approx(2000, rel=0.03)
    tiled = replace(least, bytes=traffic.queries_outside(problem(), 128, 64).total)
    assert tiled.bytes == pytest.approx(69e6, rel=0.004)
    assert tiled.intensity == pytest.approx(125, rel=0.01)


def test_keys_outside_read_and_write_o_once_a_block_of_keys() -> None:
    first, second = (
        f(problem(), 128, 128) for f in (traffic.keys_outside, traffic.queries_outside)
    )
    assert first.k_read == first.v_read == MIB
    assert first.q_read == first.o_read == first.o_written == 32 * MIB
    assert (second.o_read, second.stats_read, second.stats_written) == (0, 0, 0)
    assert first.total > second.total


def test_traffic_falls_with_the_size_of_the_chip_s_memory() -> None:
    """8 N^2 d^2 / M elements of K and V, where M elements fit on the chip."""
    n, d, m = 4096, 128, 4 * 128 * 64
    assert roofline.paper_tiles(102400, d) == (128, 200)
    block_m, block_n = roofline.paper_tiles(m, d)
    assert block_m == block_n == m // (4 * d)
    moved = traffic.queries_outside(problem(n), block_m, block_n)
    assert (moved.k_read + moved.v_read) // 2 == 8 * n * n * d * d // m
    assert moved.k_read / moved.q_read == 4 * n * d / m  # times that K is read


def test_tiling_adds_few_flops() -> None:
    extra = roofline.rescale_flops(problem(), 128, 64)
    assert extra == 64 * 4096 * 128 + 4096 * 128  # O of each of 64 tiles, and O / l
    assert extra / roofline.convention_flops(problem()) == pytest.approx(1 / 256, rel=0.02)


def test_exponentials_beside_products() -> None:
    assert 256 / A100.fma_per_clock == 0.25  # cycles of the products of a score
    assert pytest.approx(0.06, abs=0.003) == 1 / roofs.EXP_PER_CLOCK  # and of its exponential
    assert roofline.exp_share(A100, 128) == 1 / 4
    assert roofline.exp_share(H100, 128) == 1 / 2
    assert roofline.exp_share(Device.named("B200"), 128) == 1
    assert roofline.exp_tera_per_second(H100) == pytest.approx(3.9, abs=0.05)
    assert roofline.exp_share(H100, 192, 64) == roofline.exp_share(H100, 128)


def test_rates_of_all_devices_are_those_of_their_tflops() -> None:
    """TFLOP/s over SMs and multiply-adds is a clock that a GPU may have."""
    for device in DEVICES.values():
        clock = 1e12 * device.tflops / (2 * device.sms * device.fma_per_clock)
        assert 1.3e9 < clock < 2.6e9, device.name
    with pytest.raises(ValueError, match="Some GPU'"):
        roofline.exp_share(replace(H100, name="Some GPU", fma_per_clock=None), 128)


def test_fp8_doubles_the_roof_where_there_is_one() -> None:
    assert roofline.peaks(H100, "float8_e4m3fn") == (pytest.approx(1979, abs=1), 3350.0)
    with pytest.raises(ValueError, match="has no tensor cores for it"):
        roofline.peaks(A100, "float8_e4m3fn")


def test_enough_blocks_for_108_multiprocessors() -> None:
    from rawattn.plan import plan

    p = problem(q_heads=32, kv_heads=32)
    (launch,) = plan(p, Device.named("A100"), "fwd_sm80").launches
    assert launch.config.block_m == 128 and launch.grid == 1024 == 32 * 4096 // 128


def test_a_causal_layer_on_a100() -> None:
    flops = roofline.convention_flops(problem(q_heads=32, kv_heads=8, mask=Mask.of(True)))
    assert flops == pytest.approx(137e9, rel=0.004)
    milliseconds = 1e3 * flops / (1e12 * A100.tflops)
    assert milliseconds == pytest.approx(0.44, abs=0.005)
    assert milliseconds / 0.7 == pytest.approx(0.6, abs=0.05)
    assert milliseconds / 0.5 == pytest.approx(0.9, abs=0.05)


def test_the_backward_pass_has_two_and_a_half_times_the_flops() -> None:
    p = problem()
    assert roofline.backward_flops(p) == 2.5 * roofline.work(p).flops
    recomputed = 2 * 4096**2 * 128
    assert recomputed / roofline.work(p).flops == 0.5


# ---- the figures of the text: decoding -----------------------------------------------------------

LLAMA = MODELS["llama-3-8b"]


def test_a_token_of_llama_3_8b_is_128_kib() -> None:
    assert LLAMA.kv_bytes_per_token() == 2 * 32 * 8 * 128 * 2 == 128 * KIB
    assert 4096 * LLAMA.kv_bytes_per_token() == 512 * MIB
    assert 8192 * LLAMA.kv_bytes_per_token() == GIB
    assert LLAMA.kv_bytes_per_token(itemsize=1) == 64 * KIB
    assert LLAMA.group == 4


def test_decoding_computes_as_many_flops_a_byte_as_heads_share() -> None:
    assert decode.intensity(4) == 4 and decode.intensity(4, itemsize=1) == 8
    layer = problem(max_q=1, q_heads=32, kv_heads=8)
    assert roofline.work(layer).intensity == pytest.approx(4, rel=0.01)
    limit = roofline.limit(layer, A100)
    assert limit.bound == "memory"
    assert roofline.ridge(A100) / decode.intensity(4) > 10**1.5


@pytest.mark.parametrize(
    ("tokens", "gigabytes", "share"),
    [(4096, 0.5, 0.03), (32768, 4, 0.2), (131072, 16, 0.5), (262144, 32, 0.67)],
)
def test_the_cache_outweighs_the_weights_at_131_k_tokens(
    tokens: int, gigabytes: float, share: float
) -> None:
    """The text takes 16 GB and 16 GiB for one; these are 16 GiB, and 16 x 10^9 at the end."""
    model = replace(LLAMA, weight_bytes=16 * GIB)
    step = roofline.step(model, 1, tokens, A100)
    assert step.kv_bytes == gigabytes * GIB
    assert step.kv_share == pytest.approx(share, abs=0.02)
    assert model.kv_outweighs_at() == 131072 == 32 * 4096
    assert model.kv_outweighs_at(itemsize=1) == 2 * 131072
    assert LLAMA.kv_outweighs_at() == pytest.approx(122e3, rel=0.01)


def test_the_weights_take_8_ms_on_a100() -> None:
    assert 1e3 * roofline.step(LLAMA, 1, 0, A100).seconds == pytest.approx(8)
    assert roofline.step(LLAMA, 1, 0, A100).kv_share == 0


def test_a_batch_of_32_at_8_k_takes_15_ms_on_h100() -> None:
    step = roofline.step(LLAMA, 32, 8192, H100)
    assert step.kv_bytes == 32 * GIB == pytest.approx(34e9, rel=0.02)
    assert step.kv_bytes / step.weight_bytes == pytest.approx(2, rel=0.08)
    assert 1e3 * step.seconds == pytest.approx(15, abs=0.1)


def test_pages_of_16_tokens_are_4_kib() -> None:
    assert decode.page_bytes(16, 128) == 4 * KIB == 32 * 128
    assert decode.page_bytes(16, 8) == 256 == 2 * 128  # an x-major row of 16 tokens: two lines


def test_a_batch_of_8_without_splits_leaves_a100_idle() -> None:
    blocks = 8 * 32
    assert decode.resident_share(blocks, 128, 108) == pytest.approx(0.15, abs=0.003)
    assert decode.resident_share(blocks * 16, 128, 108) == 1.0


def test_rows_of_a_chunked_prefill_see_what_came_before() -> None:
    causal = Mask.of(True)
    pairs = [roofline.visible_pairs(q, q + past, causal) for q, past in ((4, 8), (1, 11), (1, 5))]
    assert pairs == [9 + 10 + 11 + 12, 12, 6]


def test_unknown_bandwidth_is_an_error() -> None:
    with pytest.raises(ValueError, match="peaks are not known"):
        roofline.step(LLAMA, 1, 1, Device.host())


# ---- the page ------------------------------------------------------------------------------------


def test_the_tables_of_the_roofline_page_are_computed() -> None:
    page = (ROOT / "docs/roofline.md").read_text()
    flops, a100 = roofline.work(problem()).flops, Device.named("A100")
    moved = {
        "standard": traffic.standard(problem()).total,
        "queries outside, blocks of 128": traffic.queries_outside(problem(), 128, 64).total,
        "the same, blocks of 256": traffic.queries_outside(problem(), 256, 64).total,
        "each tensor once": roofline.work(problem()).bytes,
    }
    for name, size in moved.items():
        limit = roofline.limit_of(roofline.Work(flops=flops, bytes=size), a100)
        least = f"{1e6 * limit.seconds:.0f} us"
        cells = f"{size // MIB} MiB | {flops / size:.0f} | {limit.bound} | {least} |"
        assert re.search(rf"^\| {name}.* \| {re.escape(cells)}$", page, re.M), cells
    heads, _, shares = page[page.index("| A10, L40S") :].splitlines()[:3]
    for names, share in zip(heads.split("|")[1:-1], shares.split("|")[1:-1], strict=True):
        for name in names.split(","):
            want = 1 / roofline.exp_share(Device.named(name.strip()), 128)
            assert share.strip() == f"1 : {want:.0f}"
