# SPDX-License-Identifier: Apache-2.0
"""What every attention must obey, as functions of an op and a case.

docs/testing.md points all of them at a kernel. The cases are drawn by Hypothesis,
which the extra [test] brings.
"""

from __future__ import annotations

import itertools
import reprlib
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from rawattn import reference
from rawattn.testing.cases import NOTHING, Case, Limits
from rawattn.testing.closeness import assert_close, assert_same
from rawattn.testing.inputs import Array, Results, Tensors, tensors
from rawattn.testing.ops import Op, expected, run


def hold(check: Callable[[Any, Any], None], op: Any, case: Any) -> None:
    """Holds an op to a check on a case; a failure says how to repeat it."""
    op.record.examples += 1
    try:
        check(op, case)
    except AssertionError as error:
        repro = f"{check.__name__}({op.name}, {case!r})"
        if op.imports:
            repro = f'python -c "{op.imports}; {repro}"'
        raise AssertionError(f"{check.__name__} on {op.name}: {error}\n  {repro}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """A law, callable with (op, case), and the cases that it is about.

    `needs` is what it calls an op with whatever the case is: all of it must be in the op's limits.
    """

    check: Callable[[Op, Case], None]
    limits: Limits
    needs: Limits = NOTHING

    @property
    def name(self) -> str:
        return self.check.__name__

    def why_not(self, op: Op) -> str | None:
        """Why this law is not about an op, in a sentence; None where it is, and where
        `problems(op.limits & law.limits)` has cases.
        """
        for name in (f.name for f in fields(Limits)):
            mine, needed, takes = (getattr(x, name) for x in (self.limits, self.needs, op.limits))
            if getattr(self.needs & op.limits, name) != needed:
                what = f"needs {name}={reprlib.repr(needed)}"
            elif getattr(self.limits & op.limits, name) == ():
                what = f"is about {name}={reprlib.repr(mine)}"
            else:
                continue
            return f"{self.name} {what}, and {op.name} takes {name}={reprlib.repr(takes)}"
        return None

    def __call__(self, op: Op, case: Case) -> None:
        hold(self.check, op, case)


def law(limits: Limits, needs: Limits = NOTHING) -> Callable[[Callable[[Op, Case], None]], Law]:
    return lambda check: Law(check=check, limits=limits, needs=needs)


def agree(op: Op, got: Results, t: Tensors) -> None:
    """Holds results to the reference of `t`."""
    assert_close(got, expected(t), t.case, op.record)


def same(op: Op, got: Results, other: Results, t: Tensors) -> None:
    """Holds two results of an op to each other, bit for bit where it promises that; `t` gave one of
    them.
    """
    if op.bitwise:
        assert_same(got, other, t.case)
    else:
        agree(op, got, t)
        agree(op, other, t)


def repack(t: Tensors, sequences: list[tuple[Array, Array, Array]]) -> Tensors:
    """Packed tensors with other sequences, each (q, k, v), and the features of `t`; ALiBi is a
    slope a head.
    """
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


# ---- the laws ------------------------------------------------------------------------------------

EVERYTHING = Limits()
ALIGNED = tuple(range(8, 257, 8))  # head dimensions whose rows are multiples of 16 bytes
UNMASKED = Limits(causal=(False,), windows=False, alibi=("none",), sink=(False,))
PACKED = replace(NOTHING, layouts=("packed",))  # what `repack` needs


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


# Not padded: gaps between sequences that are no number of rows may take another kernel.
@law(
    Limits(
        head_dims=ALIGNED,
        layouts=("dense", "packed", "packed_used"),
        memories=("gaps", "transposed", "odd_ones"),
    ),
    needs=replace(NOTHING, memories=("contiguous",)),
)
def law_memory_is_invisible(op: Op, case: Case) -> None:
    """Strided arrays give the result of their contiguous copies."""
    t = tensors(case)
    plain = replace(t, case=replace(case, memory="contiguous"))
    same(op, run(op, t), run(op, plain), t)


@law(
    Limits(head_dims=ALIGNED, alibi=("none", "heads"), memories=("contiguous",)),
    needs=replace(NOTHING, layouts=("dense", "packed")),
)
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


@law(Limits(alibi=("none", "heads")), needs=PACKED)
def law_order_of_sequences(op: Op, case: Case) -> None:
    """Other neighbours in the batch leave a sequence's bits as they were."""
    t = tensors(case)
    parts = t.sequences()
    forward, backward = repack(t, parts), repack(t, parts[::-1])
    (out, lse), (out2, lse2) = run(op, forward), run(op, backward)
    first = np.cumsum([0, *backward.case.q_lens])
    order = [np.arange(a, b) for a, b in itertools.pairwise(first)][::-1]
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


@law(UNMASKED, needs=PACKED)
def law_order_of_keys(op: Op, case: Case) -> None:
    """Without a mask, permuting keys and values together leaves out and lse."""
    t = tensors(case)
    rng = np.random.default_rng(case.seed)
    parts = [(q, k, v, rng.permutation(len(k))) for q, k, v in t.sequences()]
    agree(
        op, run(op, repack(t, [(q, k[i], v[i]) for q, k, v, i in parts])), repack(t, t.sequences())
    )


@law(UNMASKED, needs=PACKED)
def law_split_and_merge(op: Op, case: Case) -> None:
    """Attention over two parts of the keys, merged by lse, is attention over all of them."""
    t = tensors(case)
    cuts = [(q, k, v, len(k) * (case.seed % 5) // 4) for q, k, v in t.sequences()]
    low = repack(t, [(q, k[:n], v[:n]) for q, k, v, n in cuts])
    high = repack(t, [(q, k[n:], v[n:]) for q, k, v, n in cuts])
    parts = [expected(low), expected(high)]
    twin_out, twin_lse = merged(*((x.twin_out, x.twin_lse) for x in parts))
    want = replace(expected(repack(t, t.sequences())), twin_out=twin_out, twin_lse=twin_lse)
    assert_close(merged(run(op, low), run(op, high)), want, case, op.record)


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
    exact = expected(ones)
    twin_out = exact.twin_out[..., : case.value_dim]
    assert_close((out, lse), replace(exact, out=want, twin_out=twin_out), case, op.record)


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
    x, y = expected(t), expected(other)
    want = replace(
        x,
        out=expected(total).out,
        twin_out=x.twin_out + y.twin_out,
        values=x.values + y.values,
        sum_of_values=x.sum_of_values + y.sum_of_values,
    )
    assert_close((a + b, lse), want, case, op.record)


@law(Limits(sink=(False,), softcap=False, data=("integers",)))
def law_shift_of_keys(op: Op, case: Case) -> None:
    """Adding one vector u to every key leaves out, and adds scale q.u to lse."""
    t = tensors(case)
    u = np.random.default_rng(case.seed).integers(-2, 3, case.head_dim)
    shifted = replace(t, k=t.k + u.astype(t.k.dtype))
    scale = reference.softmax_scale(case.scale, case.head_dim)

    added = scale * (t.q.astype(np.float64) @ u).swapaxes(-1, -2)[..., t.rows]
    out, lse = run(op, shifted)
    want, twin = expected(t), expected(shifted)
    want = replace(
        want,
        twin_out=twin.twin_out,
        twin_lse=twin.twin_lse - added,
        terms=twin.terms,
    )
    assert_close((out, lse - added), want, case, op.record)


@law(EVERYTHING)
def law_empty_rows(op: Op, case: Case) -> None:
    """A row without keys has out exactly 0, whatever the values hold, and lse -inf or the sink.

    A NaN inside a sequence may reach rows that see another key, as ``0 * NaN``; not these.
    """
    t = tensors(case)
    out, lse = run(op, t)
    empty = np.isneginf(expected(replace(t, sink=None)).lse)
    assert (out[empty.swapaxes(-1, -2)] == 0).all(), "out of a row without keys is not 0"
    out, _ = run(op, replace(t, v=np.full_like(t.v, np.nan)))
    assert (out[empty.swapaxes(-1, -2)] == 0).all(), (
        "a NaN value reached a row without keys: select 0 there, a product with weights of 0 is NaN"
    )
    if t.sink is None:
        assert np.array_equal(np.isneginf(lse), empty), (
            "lse is -inf elsewhere than in rows without keys"
        )
    else:
        assert np.isfinite(lse).all(), "lse with a sink is not finite"


@law(
    Limits(causal=(False,), windows=False),
    needs=replace(NOTHING, causal=(True,), windows=True),
)
def law_wide_window_is_no_window(op: Op, case: Case) -> None:
    """A window of at least S - 1 on both sides gives the bits of none; causal is a window of 0 to
    the right.
    """
    t = tensors(case)
    longest = max(0, max(case.q_lens + case.k_lens, default=0) - 1)
    wide = replace(t, case=replace(case, window=(longest, longest)))
    assert_same(run(op, wide), run(op, t), case)
    causal = replace(t, case=replace(case, causal=True))
    window = replace(t, case=replace(case, window=(longest, 0)))
    assert_same(run(op, window), run(op, causal), case)


LAWS: tuple[Law, ...] = tuple(x for x in list(globals().values()) if isinstance(x, Law))
