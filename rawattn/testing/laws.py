# SPDX-License-Identifier: Apache-2.0
"""What every attention must obey, as functions of an op and a case. Point them at your own kernel:

op = Op(name="mine", call=my_attention, xp=cupy, limits=Limits(head_dims=(64,), sink=(False,)))

@given(problems(op.limits & law_matches_reference.limits))
def test_mine(case):
    law_matches_reference(op, case)
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rawattn import reference
from rawattn.problem import Mask
from rawattn.testing.cases import Case, Limits
from rawattn.testing.closeness import Record, assert_close, assert_same
from rawattn.testing.inputs import Inputs, Results, Tensors, place, tensors

Array = NDArray[Any]


class Attention(Protocol):
    """A kernel: the arguments of `flash_attn_varlen_func`. Without `cu_seqlens_q`, q is dense, (B, Sq, Hq, D)."""

    def __call__(
        self,
        q: Any,
        k: Any,
        v: Any,
        *,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        seqused_k: Any,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None,
        causal: bool | str,
        window_size: tuple[int, int],
        softcap: float,
        alibi_slopes: Any,
        sink: Any,
        out: Any,
        lse: Any,
    ) -> Any:
        """Fills `out` (as q, with value_dim columns) and `lse`, float32, (B, Hq, Sq) or (Hq, total_q)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A kernel under test. `bitwise` promises that a row's bits do not depend on what else is in the batch, nor on
    strides that leave rows on 16 bytes."""

    name: str  # an expression that builds this op, for repro lines
    call: Attention
    xp: Any = np  # where its arrays live: NumPy or CuPy
    limits: Limits = Limits(dtypes=("float16", "bfloat16"))
    bitwise: bool = True
    record: Record = field(default_factory=Record, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law, callable with (op, case), and the cases that it is about."""

    check: Callable[[Op, Case], None]
    limits: Limits

    @property
    def name(self) -> str:
        return self.check.__name__

    def __call__(self, op: Op, case: Case) -> None:
        op.record.examples += 1
        try:
            self.check(op, case)
        except AssertionError as error:
            repro = f'python -c "from rawattn.testing import *; {self.name}({op.name}, {case!r})"'
            raise AssertionError(f"{self.name} on {op.name}: {error}\n  {repro}") from error


def law(limits: Limits) -> Callable[[Callable[[Op, Case], None]], Law]:
    return lambda check: Law(check=check, limits=limits)


# ---- running an op and the reference ---------------------------------------------------------------------------------


def run(op: Op, t: Tensors) -> Results:
    """out and lse in float64. Fails where the op wrote outside its rows."""
    inputs: Inputs = place(t, op.xp)

    def move(x: Array | None) -> Any:
        return None if x is None else op.xp.asarray(x)

    op.call(
        inputs.q.view,
        inputs.k.view,
        inputs.v.view,
        cu_seqlens_q=move(t.cu_seqlens_q),
        cu_seqlens_k=move(t.cu_seqlens_k),
        seqused_k=move(t.seqused_k),
        max_seqlen_q=t.max_seqlen_q,
        max_seqlen_k=t.max_seqlen_k,
        softmax_scale=t.case.scale,
        causal=t.case.causal,
        window_size=t.case.window,
        softcap=t.case.softcap,
        alibi_slopes=move(t.alibi_slopes),
        sink=move(t.sink),
        out=inputs.out.view,
        lse=inputs.lse.view,
    )
    return inputs.results()


SAMPLES = 32  # of rounding errors, at least, that make a bound


def widened(t: Tensors) -> Tensors:
    """`t` and, behind its heads and value columns, copies of them with random signs.

    They round alike, so that the bound of a small case is not one of chance: a row of out has `SAMPLES` columns, lse
    has as many rows.
    """
    rng = np.random.default_rng(t.case.seed)
    heads = -(-SAMPLES // max(1, t.q.size // t.case.head_dim))
    columns = -(-SAMPLES // t.case.value_dim)

    def signed(x: Array, copies: int, axis: int) -> Array:
        parts = [
            x,
            *(x * rng.choice(np.array([-1, 1], x.dtype), x.shape) for _ in range(copies - 1)),
        ]
        return np.concatenate(parts, axis=axis)

    def tiled(x: Array | None) -> Array | None:
        return None if x is None else np.concatenate([x] * heads, axis=-1)

    return replace(
        t,
        q=signed(t.q, heads, -2),
        k=np.concatenate([t.k] * heads, axis=-2),
        v=np.concatenate([signed(t.v, columns, -1)] * heads, axis=-2),
        alibi_slopes=tiled(t.alibi_slopes),
        sink=tiled(t.sink),
    )


def expected(t: Tensors, rounding: str | None = None) -> Results:
    """out and lse of the float64 reference, or of its rounded twin, `widened`."""
    wide = widened(t)
    exact: type = np.float64 if rounding is None else np.float32
    out, lse = reference.attention(
        *(x.astype(exact) for x in (wide.q, wide.k, wide.v)),
        mask=t.case.mask,
        scale=t.case.scale,
        softcap=t.case.softcap,
        alibi_slopes=wide.alibi_slopes,
        sink=wide.sink,
        cu_seqlens_q=t.cu_seqlens_q,
        cu_seqlens_k=t.cu_seqlens_k,
        seqused_k=t.seqused_k,
        rounding=rounding,
    )
    return out[t.rows], lse[..., t.rows]


def narrowed(results: Results, case: Case) -> Results:
    """Expected results without the widening."""
    out, lse = results
    return out[..., : case.q_heads, : case.value_dim], lse[..., : case.q_heads, :]


def agree(op: Op, got: Results, t: Tensors) -> None:
    """Holds results to the reference of `t`."""
    assert_close(got, expected(t), expected(t, t.case.dtype), t.case, op.record)


def same(op: Op, got: Results, other: Results, t: Tensors) -> None:
    """Holds two results of an op to each other, bit for bit where it promises that; `t` gave one of them."""
    if op.bitwise:
        assert_same(got, other, t.case)
    else:
        agree(op, got, t)
        agree(op, other, t)


def repack(t: Tensors, sequences: list[tuple[Array, Array, Array]]) -> Tensors:
    """Packed tensors with other sequences, each (q, k, v), and the features of `t`; ALiBi is a slope a head."""
    q_lens, k_lens = tuple(len(q) for q, _, _ in sequences), tuple(len(k) for _, k, _ in sequences)

    def join(index: int, like: Array) -> Array:
        parts = [s[index] for s in sequences]
        return np.concatenate([np.empty((0, *like.shape[-2:]), like.dtype), *parts])

    return replace(
        t,
        case=replace(t.case, layout="packed", q_lens=q_lens, k_lens=k_lens),
        q=join(0, t.q),
        k=join(1, t.k),
        v=join(2, t.v),
        cu_seqlens_q=np.cumsum([0, *q_lens], dtype=np.int32),
        cu_seqlens_k=np.cumsum([0, *k_lens], dtype=np.int32),
        seqused_k=None,
        max_seqlen_q=max(q_lens, default=0),
        max_seqlen_k=max(k_lens, default=0),
    )


# ---- the laws --------------------------------------------------------------------------------------------------------

EVERYTHING = Limits()
ALIGNED = tuple(range(8, 257, 8))  # head dimensions whose rows are multiples of 16 bytes
UNMASKED = Limits(causal=(False,), windows=False, alibi=("none",), sink=(False,))


@law(EVERYTHING)
def law_matches_reference(op: Op, case: Case) -> None:
    """out and lse are those of the float64 reference, within the rounding of the storage type."""
    t = tensors(case)
    agree(op, run(op, t), t)


@law(EVERYTHING)
def law_reruns_are_equal(op: Op, case: Case) -> None:
    """The same inputs give the same bits."""
    t = tensors(case)
    assert_same(run(op, t), run(op, t), case)


@law(
    Limits(
        layouts=("packed", "padded", "packed_used"), memories=("contiguous", "gaps", "transposed")
    )
)
def law_unused_slots_are_never_read(op: Op, case: Case) -> None:
    """NaN and numbers in the slots that do not count give the same bits."""
    t = tensors(case)

    def filled(x: Array) -> Array:
        return np.where(np.isnan(x), np.array(3, x.dtype), x)

    other = replace(t, q=filled(t.q), k=filled(t.k), v=filled(t.v))
    assert_same(run(op, other), run(op, t), case)


@law(Limits(head_dims=ALIGNED, memories=("gaps", "transposed", "odd_ones")))
def law_memory_is_invisible(op: Op, case: Case) -> None:
    """Strided arrays give the result of their contiguous copies."""
    t = tensors(case)
    plain = replace(t, case=replace(case, memory="contiguous"))
    same(op, run(op, t), run(op, plain), t)


@law(Limits(head_dims=ALIGNED, alibi=("none", "heads"), memories=("contiguous",)))
def law_packed_is_a_loop_of_dense(op: Op, case: Case) -> None:
    """A batch gives what its sequences give one by one, as dense calls."""
    t = repack(tensors(case), tensors(case).sequences())
    outs, lses = [], []
    for q, k, v in t.sequences():
        alone = replace(
            t,
            case=replace(t.case, layout="dense", q_lens=(len(q),), k_lens=(len(k),)),
            q=q[None],
            k=k[None],
            v=v[None],
            cu_seqlens_q=None,
            cu_seqlens_k=None,
            max_seqlen_q=len(q),
            max_seqlen_k=len(k),
        )
        out, lse = run(op, alone)
        outs.append(out[0])
        lses.append(lse[0])
    whole = run(op, t)
    if outs:
        same(op, whole, (np.concatenate(outs), np.concatenate(lses, axis=-1)), t)


@law(Limits(alibi=("none", "heads")))
def law_order_of_sequences(op: Op, case: Case) -> None:
    """Other neighbours in the batch leave a sequence's bits as they were."""
    t = tensors(case)
    parts = t.sequences()
    forward, backward = repack(t, parts), repack(t, parts[::-1])
    (out, lse), (out2, lse2) = run(op, forward), run(op, backward)
    first = backward.cu_seqlens_q
    order = [np.arange(a, b) for a, b in zip(first[:-1], first[1:], strict=True)][::-1]
    rows = np.concatenate([np.empty(0, np.int64), *order]).astype(np.int64)
    same(op, (out2[rows], lse2[..., rows]), (out, lse), forward)


@law(EVERYTHING)
def law_order_of_heads(op: Op, case: Case) -> None:
    """Permuting KV heads, and query heads with them, permutes the outputs."""
    t = tensors(case)
    kv = np.random.default_rng(case.seed).permutation(case.kv_heads)
    q = (kv[:, None] * case.group + np.arange(case.group)).ravel()
    permuted = replace(
        t,
        q=t.q[..., q, :],
        k=t.k[..., kv, :],
        v=t.v[..., kv, :],
        alibi_slopes=None if t.alibi_slopes is None else t.alibi_slopes[..., q],
        sink=None if t.sink is None else t.sink[q],
    )
    out, lse = run(op, t)
    same(op, run(op, permuted), (out[..., q, :], lse[..., q, :]), permuted)


@law(UNMASKED)
def law_order_of_keys(op: Op, case: Case) -> None:
    """Without a mask, permuting keys and values together leaves out and lse."""
    t = tensors(case)
    rng = np.random.default_rng(case.seed)
    parts = [(q, k, v, rng.permutation(len(k))) for q, k, v in t.sequences()]
    agree(
        op, run(op, repack(t, [(q, k[i], v[i]) for q, k, v, i in parts])), repack(t, t.sequences())
    )


@law(UNMASKED)
def law_split_and_merge(op: Op, case: Case) -> None:
    """Attention over two parts of the keys, merged by lse, is attention over all of them."""
    t = tensors(case)
    cuts = [(q, k, v, len(k) * (case.seed % 5) // 4) for q, k, v in t.sequences()]
    low = repack(t, [(q, k[:n], v[:n]) for q, k, v, n in cuts])
    high = repack(t, [(q, k[n:], v[n:]) for q, k, v, n in cuts])
    whole = expected(repack(t, t.sequences()))
    twin = merged(expected(low, case.dtype), expected(high, case.dtype))
    assert_close(merged(run(op, low), run(op, high)), whole, twin, case, op.record)


def merged(*parts: Results) -> Results:
    """The results over all keys, from those over parts of them."""
    outs, lses = zip(*parts, strict=True)
    out, lse = reference.merge_states(outs, [x.swapaxes(-1, -2) for x in lses])
    return out, lse.swapaxes(-1, -2)


@law(Limits(sink=(False,), data=("normal", "dominant", "equal")))
def law_values_of_one(op: Op, case: Case) -> None:
    """Weights sum to 1: values of one give out one, or zero in a row without keys."""
    t = tensors(case)
    ones = replace(t, v=np.where(np.isnan(t.v), t.v, np.array(1, t.v.dtype)))
    out, lse = run(op, ones)
    want = (~np.isneginf(lse)).swapaxes(-1, -2)[..., None] * np.ones_like(out)
    exact = narrowed(expected(ones), case)
    twin = narrowed(expected(ones, case.dtype), case)
    assert_close((out, lse), (want, exact[1]), twin, case, op.record)


@law(EVERYTHING)
def law_odd_in_values(op: Op, case: Case) -> None:
    """Values of the other sign give out of the other sign, bit for bit, and the same lse."""
    t = tensors(case)
    out, lse = run(op, t)
    negated = run(op, replace(t, v=-t.v))
    assert_same((np.abs(negated[0]), negated[1]), (np.abs(out), lse), case)
    assert ((negated[0] == -out) | np.isnan(out)).all(), "out(-v) is not -out(v)"


@law(Limits(data=("integers",)))
def law_additive_in_values(op: Op, case: Case) -> None:
    """out(v) + out(w) is out(v + w)."""
    t = tensors(case)
    other = replace(t, v=t.v[..., ::-1])
    total = replace(t, v=t.v + other.v)
    (a, lse), (b, _) = run(op, t), run(op, other)
    (twin_a, twin_lse), (twin_b, _) = expected(t, case.dtype), expected(other, case.dtype)
    assert_close((a + b, lse), expected(total), (twin_a + twin_b, twin_lse), case, op.record)


@law(Limits(sink=(False,), softcap=False, data=("integers",)))
def law_shift_of_keys(op: Op, case: Case) -> None:
    """Adding one vector u to every key leaves out, and adds scale q.u to lse."""
    t = tensors(case)
    u = np.random.default_rng(case.seed).integers(-2, 3, case.head_dim)
    shifted = replace(t, k=t.k + u.astype(t.k.dtype))
    scale = case.head_dim**-0.5 if case.scale is None else case.scale

    def unshifted(results: Results, q: Array) -> Results:
        added = scale * (q.astype(np.float64) @ u).swapaxes(-1, -2)
        return results[0], results[1] - added[..., t.rows]

    twin = unshifted(expected(shifted, case.dtype), widened(t).q)
    assert_close(unshifted(run(op, shifted), t.q), expected(t), twin, case, op.record)


@law(EVERYTHING)
def law_empty_rows(op: Op, case: Case) -> None:
    """A row without keys has out exactly 0, and lse -inf or the sink."""
    t = tensors(case)
    out, lse = run(op, t)
    empty = np.isneginf(narrowed(expected(replace(t, sink=None)), case)[1])
    assert (out[empty.swapaxes(-1, -2)] == 0).all(), "out of a row without keys is not 0"
    if t.sink is None:
        assert np.array_equal(np.isneginf(lse), empty), (
            "lse is -inf elsewhere than in rows without keys"
        )
    else:
        assert np.isfinite(lse).all(), "lse with a sink is not finite"


@law(Limits(causal=(False,), windows=False))
def law_wide_window_is_no_window(op: Op, case: Case) -> None:
    """A window of at least S - 1 on both sides gives the bits of none; causal is a window of 0 to the right."""
    t = tensors(case)
    longest = max(0, max(case.q_lens + case.k_lens, default=0) - 1)
    wide = replace(t, case=replace(case, window=(longest, longest)))
    assert_same(run(op, wide), run(op, t), case)
    causal = replace(t, case=replace(case, causal=True))
    window = replace(t, case=replace(case, window=(longest, 0)))
    assert_same(run(op, window), run(op, causal), case)


LAWS: tuple[Law, ...] = tuple(x for x in list(globals().values()) if isinstance(x, Law))


# ---- the public API as an op -----------------------------------------------------------------------------------------


def _public(q: Any, k: Any, v: Any, *, cu_seqlens_q: Any = None, **arguments: Any) -> Any:
    from rawattn import dense

    arguments["return_lse"] = True
    if cu_seqlens_q is not None:
        return dense.flash_attn_varlen_func(q, k, v, cu_seqlens_q, **arguments)
    for name in ("cu_seqlens_k", "seqused_k", "max_seqlen_q", "max_seqlen_k"):
        del arguments[name]
    return dense.flash_attn_func(q, k, v, **arguments)


@functools.cache
def public_op(module: str, backend: str | None = None) -> Op:
    """`rawattn.flash_attn_func` and `flash_attn_varlen_func` on arrays of "numpy" or "cupy"."""
    on_host = module == "numpy"
    return Op(
        name=f"public_op({module!r})",
        call=functools.partial(_public, backend=backend),
        xp=importlib.import_module(module),
        limits=Limits() if on_host else Limits(dtypes=("float16", "bfloat16")),
        bitwise=not on_host,
    )
