# SPDX-License-Identifier: Apache-2.0
"""The reference means what semantics say: loops over elements, differences for gradients, and laws.

The laws of `rawattn.testing` hold its rounded twin in test_testing.py, and its tiled backend in
test_host_backend.py and test_laws.py. Here float64 is compared with float64.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.problem import Mask
from rawattn.reference import attention, attention_backward, merge_states, visible
from rawattn.testing import Case, Limits, Tensors, tensors
from rawattn.testing.strategies import problems

Array = np.ndarray[Any, Any]
TINY = Limits(max_len=6, max_heads=4, max_batch=3, head_dims=(1, 2, 5))
NORMAL = Limits(data=("normal",), scales=(None, 0.3))


def arguments(t: Tensors) -> dict[str, Any]:
    """The keyword arguments of the reference."""
    return {
        "mask": t.case.mask,
        "scale": t.case.scale,
        "softcap": t.case.softcap,
        "alibi_slopes": t.alibi_slopes,
        "sink": t.sink,
        "cu_seqlens_q": t.cu_seqlens_q,
        "cu_seqlens_k": t.cu_seqlens_k,
        "seqused_k": t.seqused_k,
    }


def exact(case: Case) -> Tensors:
    """The arrays of a case in float64."""
    t = tensors(case)
    return replace(t, **{name: getattr(t, name).astype(np.float64) for name in ("q", "k", "v")})


def assert_near(got: Array, want: Array, size: float = 1.0) -> None:
    """Equal within float64 rounding: 2^12 ulp of `size` or of the largest value."""
    __tracebackhide__ = True
    odd = ~np.isfinite(want)
    assert np.array_equal(got[odd], want[odd], equal_nan=True)
    largest = np.abs(want[~odd]).max(initial=size)
    assert np.abs(got[~odd] - want[~odd]).max(initial=0) <= 2.0**12 * np.finfo(float).eps * largest


# ---- an oracle of loops --------------------------------------------------------------------------


def sees(mask: Mask, i: int, j: int, q_len: int, k_len: int) -> bool:
    diagonal = i if mask.top_left else i + k_len - q_len
    before, after = diagonal - j, j - diagonal
    return (mask.left == -1 or before <= mask.left) and (mask.right == -1 or after <= mask.right)


def loop_row(
    t: Tensors, b: int, i: int, h: int, q: Array, k: Array, v: Array
) -> tuple[list[float], float]:
    """out and lse of row i of head h of sequence b, whose q, k and v are given."""
    case, (q_len, k_len) = t.case, (len(q), len(k))
    scale = 1 / math.sqrt(q.shape[-1]) if case.scale is None else case.scale
    kv_head = h // case.group
    slopes = [[0.0] * case.q_heads] * case.batch if t.alibi_slopes is None else t.alibi_slopes
    slope = float(slopes[b][h] if np.ndim(slopes) == 2 else slopes[h])
    scores: dict[int, float] = {}
    for j in range(k_len):
        if sees(case.mask, i, j, q_len, k_len):
            s = scale * math.fsum(x * y for x, y in zip(q[i, h], k[j, kv_head], strict=True))
            if case.softcap:
                s = case.softcap * math.tanh(s / case.softcap)
            scores[j] = s - slope * abs(i + k_len - q_len - j)
    terms = [*scores.values(), *([] if t.sink is None else [float(t.sink[h])])]
    if not terms:
        return [0.0] * v.shape[-1], -math.inf
    top = max(terms)
    lse = top + math.log(math.fsum(math.exp(s - top) for s in terms))
    return [
        math.fsum(math.exp(s - lse) * v[j, kv_head, d] for j, s in scores.items())
        for d in range(v.shape[-1])
    ], lse


@given(problems(TINY & Limits(data=("normal", "tiny", "dominant", "equal", "negative_zero"))))
def test_attention_is_its_loops(case: Case) -> None:
    t = exact(case)
    q, k, v = t.q, t.k, t.v
    out, lse = attention(q, k, v, **arguments(t))
    outs, lses = out[t.rows], lse[..., t.rows].swapaxes(-1, -2)
    if t.cu_seqlens_q is None:
        outs, lses = outs.reshape(-1, *outs.shape[2:]), lses.reshape(-1, case.q_heads)
    rows = [
        [loop_row(t, b, i, h, *sequence) for h in range(case.q_heads)]
        for b, sequence in enumerate(t.sequences())
        for i in range(len(sequence[0]))
    ]
    for row, want in enumerate(rows):
        for h, (out_of_head, lse_of_head) in enumerate(want):
            assert_near(outs[row, h], np.array(out_of_head))
            assert_near(lses[row, h], np.array(lse_of_head))
    assert len(rows) == len(outs)


def test_masks_drawn_by_hand() -> None:
    def drawn(mask: Mask, q_len: int, k_len: int) -> list[str]:
        seen = visible(mask, np.arange(q_len), np.arange(k_len), q_len, k_len)
        return ["".join(".x"[int(x)] for x in row) for row in seen]

    assert drawn(Mask.of(True), 2, 4) == ["xxx.", "xxxx"]
    assert drawn(Mask.of("top_left"), 2, 4) == ["x...", "xx.."]
    assert drawn(Mask.of(True), 4, 2) == ["..", "..", "x.", "xx"]
    assert drawn(Mask.of("top_left"), 4, 2) == ["x.", "xx", "xx", "xx"]
    assert drawn(Mask.of(False, (1, 0)), 3, 3) == ["x..", "xx.", ".xx"]
    assert drawn(Mask.of(False, (0, 1)), 2, 4) == ["..xx", "...x"]
    assert drawn(Mask.of(True, (0, 3)), 3, 3) == ["x..", ".x.", "..x"]


# ---- what is written and what is read ------------------------------------------------------------


@given(problems(TINY & Limits(layouts=("packed", "padded", "packed_used"))))
def test_rows_outside_of_the_sequences_are_nan(case: Case) -> None:
    t = exact(case)
    out, lse = attention(t.q, t.k, t.v, **arguments(t))
    outside = np.ones(len(out), bool)
    outside[t.rows] = False
    assert np.isnan(out[outside]).all() and np.isnan(lse[:, outside]).all()
    # The slots that do not count hold NaN, and none of it comes through.
    assert not np.isnan(out[~outside]).any() and not np.isnan(lse[:, ~outside]).any()


@given(problems(TINY & NORMAL), st.sampled_from(["float16", "bfloat16", "float32"]))
def test_the_twin_is_rounded_to_storage_and_near(case: Case, rounding: str) -> None:
    t = exact(case)
    options = arguments(t)
    dout = np.random.default_rng(case.seed).standard_normal((*t.q.shape[:-1], case.value_dim))
    out, lse = attention(t.q, t.k, t.v, **options)
    twin, twin_lse = attention(t.q, t.k, t.v, **options, rounding=rounding)
    gradients = attention_backward(dout, t.q, t.k, t.v, **options)
    twins = attention_backward(dout, t.q, t.k, t.v, **options, rounding=rounding)
    assert np.array_equal(np.isneginf(lse), np.isneginf(twin_lse))
    eps = float(ml_dtypes.finfo(rounding).eps)
    for x, y in zip((out, *gradients[:3]), (twin, *twins[:3]), strict=True):
        assert np.array_equal(y.astype(rounding).astype(float), y, equal_nan=True)
        sizes = (np.abs(a[np.isfinite(a)]).max(initial=1) for a in (t.q, t.k, t.v, dout))
        error = np.abs(x - y)[~np.isnan(x)].max(initial=0)
        assert error <= 2**6 * eps * math.prod(sizes)


@pytest.mark.parametrize("rounding", ["float16", "bfloat16"])
def test_the_twin_rounds_the_weights_under_the_maximum(rounding: str) -> None:
    """As a flash kernel holds them: weights of at most 1, divided by their own unrounded sum."""
    scores = np.linspace(-3, 2, 200, dtype=np.float32)
    values = np.eye(200)
    q, k, v = np.ones((1, 1, 1, 1)), scores.reshape(1, -1, 1, 1), values.reshape(1, 200, 1, 200)
    weights = np.exp(scores - scores.max())
    rounded = weights.astype(rounding).astype(np.float32)
    want = (rounded / weights.sum()).astype(rounding).astype(float)
    assert (want != (weights / weights.sum()).astype(rounding).astype(float)).any()
    out, _ = attention(q, k, v, mask=Mask(), rounding=rounding)
    # The sum may be taken in another order, which can move a result by one last digit at most.
    assert (out.ravel() == want).mean() > 0.95


# ---- laws ----------------------------------------------------------------------------------------


@given(problems(TINY & Limits(layouts=("dense",), causal=(False, True), alibi=("none",))))
def test_split_and_merge_is_the_whole(case: Case) -> None:
    """Also under a causal mask or a window to the right, which the first part sees shifted."""
    right = case.mask.right
    t = exact(replace(case, causal=False, window=(-1, right)))
    q, k, v = t.q, t.k, t.v
    options = arguments(t)
    want_out, want_lse = attention(q, k, v, **options)
    cut = case.seed % (k.shape[1] + 1)
    first = {**options, "mask": Mask(right=right if right < 0 else right + k.shape[1] - cut)}
    last = {**options, "sink": None}
    outs, lses = zip(
        attention(q, k[:, :cut], v[:, :cut], **first),
        attention(q, k[:, cut:], v[:, cut:], **last),
        strict=True,
    )
    out, lse = merge_states(outs, [x.swapaxes(1, 2) for x in lses])
    assert_near(out, want_out, np.abs(v).max(initial=1))
    assert_near(lse.swapaxes(1, 2), want_lse)


@given(problems(TINY))
def test_values_of_one_and_linearity_in_values(case: Case) -> None:
    t = exact(replace(case, sink=False, data="normal"))
    q, k, v = t.q, t.k, t.v
    ones, lse = attention(q, k, np.where(np.isnan(v), v, 1.0), **arguments(t))
    has_keys = np.where(np.isnan(lse), lse, np.isfinite(lse)).swapaxes(-1, -2)
    assert_near(ones, np.broadcast_to(has_keys[..., None], ones.shape))
    one, two = (attention(q, k, x, **arguments(t))[0] for x in (v, v[..., ::-1]))
    assert_near(attention(q, k, v - 3 * v[..., ::-1], **arguments(t))[0], one - 3 * two)


@given(problems(TINY & Limits(windows=False, causal=(False,))))
def test_a_wide_window_is_none_bit_for_bit(case: Case) -> None:
    t = exact(case)
    options = arguments(t)
    want = attention(t.q, t.k, t.v, **options)
    wide = max(0, *case.q_lens, *case.k_lens, 1) - 1
    for mask in (Mask(left=wide, right=wide), Mask(left=wide, right=wide, top_left=True)):
        got = attention(t.q, t.k, t.v, **{**options, "mask": mask})
        for x, y in zip(got, want, strict=True):
            assert np.array_equal(x, y, equal_nan=True)


# ---- gradients -----------------------------------------------------------------------------------


@given(problems(TINY & NORMAL))
def test_backward_is_the_slope_of_forward(case: Case) -> None:
    """Along a random direction, in all inputs at once; the sink too, where there is one."""
    t = exact(case)
    options = arguments(t)
    used_sink = options.pop("sink")
    points = [t.q, t.k, t.v, *([] if used_sink is None else [used_sink])]
    rng = np.random.default_rng(case.seed)
    steps = [rng.standard_normal(x.shape) for x in points]
    dout = rng.standard_normal((*t.q.shape[:-1], case.value_dim))

    def loss(step: float) -> float:
        q, k, v, *sink = (x + step * d for x, d in zip(points, steps, strict=True))
        out, _ = attention(q, k, v, sink=sink[0] if sink else None, **options)
        return float((dout[t.rows] * out[t.rows]).sum())

    gradients = attention_backward(dout, *points[:3], sink=used_sink, **options)
    slope = sum(float(np.nansum(g * d)) for g, d in zip(gradients, steps, strict=True))
    width = 2.0**-10
    coarse, fine = ((loss(w) - loss(-w)) / (2 * w) for w in (width, width / 2))
    noise = np.finfo(float).eps * 2**10 * (1 + np.abs(dout).sum()) / width
    # The error of a central difference is of second order: of `fine`, a third of how far it moved.
    assert abs(slope - fine) <= abs(coarse - fine) + noise


@given(problems(TINY & NORMAL & Limits(layouts=("packed_used", "padded"))))
def test_keys_and_rows_that_take_no_part_have_no_gradient(case: Case) -> None:
    t = exact(case)
    options = arguments(t)
    _, lse = attention(t.q, t.k, t.v, **{**options, "sink": None})
    dout = np.ones((*t.q.shape[:-1], case.value_dim))
    dq, dk, dv, *_ = attention_backward(dout, t.q, t.k, t.v, **options)
    assert np.array_equal(np.isnan(dq[..., 0]), np.isnan(lse.T))
    assert (dq[np.isneginf(lse.T)] == 0).all()
    unused = np.isnan(t.k[..., 0])
    inside = np.ones(len(t.k), bool)
    if t.cu_seqlens_k is not None:
        inside[:] = False
        inside[t.cu_seqlens_k[0] : t.cu_seqlens_k[-1]] = True
    for gradient in (dk, dv):
        assert np.isnan(gradient[~inside]).all() and not np.isnan(gradient[inside]).any()
        assert (gradient[inside][unused[inside]] == 0).all()


# ---- merging -------------------------------------------------------------------------------------


@pytest.mark.parametrize("empty", [-math.inf, math.inf])
def test_merging_with_an_empty_set_returns_the_other_bits(empty: float) -> None:
    out = np.array([[-0.0, 1.5, math.nan], [math.inf, -2.0, 0.1]])
    lse = np.array([0.3, -700.1])
    for garbage in (math.nan, math.inf, 7.0):
        for order in (1, -1):
            outs = [out, np.full_like(out, garbage)][::order]
            lses = [lse, np.full_like(lse, empty)][::order]
            got_out, got_lse = merge_states(outs, lses)
            assert got_out.tobytes() == out.tobytes() and got_lse.tobytes() == lse.tobytes()


def test_merging_nothing() -> None:
    nothing = np.full((3, 2, 4), math.nan), np.array([[-math.inf, math.inf]] * 3)
    for outs, lses in (nothing, (nothing[0][:0], nothing[1][:0])):
        out, lse = merge_states(outs, lses)
        assert (out == np.zeros((2, 4))).all() and (lse == -math.inf).all()


@pytest.mark.parametrize("size", [0.0, 1e17, 1e308, -1e308])
def test_merging_equal_sets_is_their_mean_at_every_size(size: float) -> None:
    out, lse = merge_states([[1.0, 2.0], [3.0, 4.0]], [size, size])
    assert out.tolist() == [2.0, 3.0] and lse == size + math.log(2)


def test_merging_the_largest_with_the_least_is_the_largest() -> None:
    out, lse = merge_states([[1.0, 2.0], [3.0, 4.0]], [1e308, -1e308])
    assert out.tolist() == [1.0, 2.0] and lse == 1e308


def test_merging_is_the_formula_and_associative() -> None:
    rng = np.random.default_rng(0)
    outs, lses = rng.standard_normal((3, 50, 4)), rng.normal(0, 300, (3, 50))
    lses[0, :10] = -math.inf
    out, lse = merge_states(outs[:2], lses[:2])
    want = np.logaddexp(lses[0], lses[1])
    assert_near(lse, want)
    weights = np.exp(lses[:2] - want)[..., None]
    assert_near(out, outs[0] * weights[0] + outs[1] * weights[1])
    stepwise = merge_states([out, outs[2]], [lse, lses[2]])
    for got, expected in zip(stepwise, merge_states(outs, lses), strict=True):
        assert_near(got, expected, 1000)
    assert np.isnan(merge_states(outs, np.where(lses == lses.max(), math.nan, lses))[1]).sum() == 1
