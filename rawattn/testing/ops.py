# SPDX-License-Identifier: Apache-2.0
"""An `Op` is a kernel under test; `run` gives what it computes, `expected` what it should."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from rawattn import reference
from rawattn.testing.cases import Limits
from rawattn.testing.closeness import Expected, Record, sum_of_values, with_samples
from rawattn.testing.inputs import (
    Array,
    Inputs,
    Results,
    Tensors,
    check_kept,
    place,
    to_host,
)


class Attention(Protocol):
    """A kernel: the arguments of `flash_attn_varlen_func`. Without `cu_seqlens_q`, q is dense, (B,
    Sq, Hq, D).

    Every keyword below is passed in every call; what a case has not is None (for `causal` False,
    for `window_size` (-1, -1), for `softcap` 0), and so a kernel may leave to `**others` what its
    `Limits` exclude. `causal="top_left"` starts the diagonal at the first key, where True ends it
    at the last. `softmax_scale=None` is 1 / sqrt(D).
    """

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
        """Fills `out` (as q, with value_dim columns) and `lse`, float32, (B, Hq, Sq) or (Hq,
        total_q).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """A kernel under test.

    `bitwise`, which is the default, promises that a row's bits do not depend on what else is in the
    batch, nor on strides that leave rows on 16 bytes (and padded sequences whole rows apart). An op
    with `bitwise=False` need only be as close to the reference there as anywhere. That the same
    call gives the same bits again, and leaves its inputs as they are, all ops must obey.

    `imports` are the statements that a new process needs before `name` and the laws mean something,
    such as "from rawattn.testing import *; from test_mine import op". With them a failed law prints
    a command that repeats it, without them the call alone.
    """

    name: str  # an expression that builds this op, for repro lines
    imports: str = ""
    call: Attention
    xp: Any = np  # where its arrays live: NumPy or CuPy
    limits: Limits = Limits()  # noqa: RUF009  frozen
    bitwise: bool = True
    record: Record = field(default_factory=Record, compare=False)


# ---- running an op and the reference -------------------------------------------------------------

SMALL = (
    "cu_seqlens_q",
    "cu_seqlens_k",
    "seqused_k",
    "alibi_slopes",
    "sink",
)  # inputs, as `Tensors`


def run(op: Op, t: Tensors) -> Results:
    """out and lse in float64. Fails where the op wrote outside its rows, or to an input."""
    inputs: Inputs = place(t, op.xp)
    small = {name: x for name in SMALL if (x := getattr(t, name)) is not None}
    moved = {name: op.xp.array(x, order="C") for name, x in small.items()}
    op.call(
        inputs.q.view,
        inputs.k.view,
        inputs.v.view,
        max_seqlen_q=t.max_seqlen_q,
        max_seqlen_k=t.max_seqlen_k,
        softmax_scale=t.case.scale,
        causal=t.case.causal,
        window_size=t.case.window,
        softcap=t.case.softcap,
        out=inputs.out.view,
        lse=inputs.lse.view,
        **{name: moved.get(name) for name in SMALL},
    )
    for name, x in small.items():
        check_kept(name, to_host(moved[name]), x, t.case)
    return inputs.results()


# Roundings of a capped score beside those of others, each as one more term: the 2e-6 of it that the
# contract allows.
CAPPED = 16


def expected(t: Tensors) -> Expected:
    """What an op should give, and what its bounds are made of."""
    v = with_samples(t.v, t.case.seed)
    out, lse = _reference(t, t.q, t.k, np.concatenate([v, np.abs(t.v)], axis=-1), np.float64)
    twin_out, twin_lse = _reference(t, t.q, t.k, v, np.float32, rounding=t.case.dtype)
    scale = None if t.case.scale is None else abs(t.case.scale)
    plain = replace(t, alibi_slopes=None, sink=None, case=replace(t.case, softcap=0.0, scale=scale))
    terms = _sizes(plain) + np.where(np.isfinite(lse), abs(lse), 0.0)
    if t.case.softcap:  # a score may be larger than lse, which holds the log of their number too
        capped = replace(plain, case=replace(plain.case, softcap=t.case.softcap))
        terms = terms + CAPPED * _sizes(capped)
    return Expected(
        out=out[..., : v.shape[-1]],
        lse=lse,
        twin_out=twin_out,
        twin_lse=twin_lse,
        values=out[..., v.shape[-1] :].max(axis=-1, keepdims=True),
        terms=terms,
        sum_of_values=sum_of_values(t.v),
    )


def _sizes(t: Tensors) -> Array:
    """No less than the score of any key that a row sees, as if all products were positive; 0
    without keys.
    """
    sizes = _reference(t, np.abs(t.q), np.abs(t.k), t.v[..., :1], np.float64)[1]
    return np.where(np.isfinite(sizes), sizes, 0.0)


def _reference(
    t: Tensors, q: Array, k: Array, v: Array, compute: type, rounding: str | None = None
) -> Results:
    out, lse = reference.attention(
        *(x.astype(compute) for x in (q, k, v)),
        mask=t.case.mask,
        scale=t.case.scale,
        softcap=t.case.softcap,
        alibi_slopes=t.alibi_slopes,
        sink=t.sink,
        cu_seqlens_q=t.cu_seqlens_q,
        cu_seqlens_k=t.cu_seqlens_k,
        seqused_k=t.seqused_k,
        seen=t.seen,
        rounding=rounding,
    )
    return out[t.rows], lse[..., t.rows]


# ---- the public API as an op ---------------------------------------------------------------------


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
        name=f"public_op({module!r}{'' if backend is None else f', {backend!r}'})",
        imports="from rawattn.testing import *",
        call=functools.partial(_public, backend=backend),
        xp=importlib.import_module(module),
        limits=Limits() if on_host else Limits(dtypes=("float16", "bfloat16")),
        bitwise=not on_host,
    )
