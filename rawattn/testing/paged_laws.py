# SPDX-License-Identifier: Apache-2.0
"""What attention over a paged cache must obey, as functions of an op and a case."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from rawattn import reference
from rawattn.testing.closeness import Record, assert_same, assert_within, bounds
from rawattn.testing.inputs import Results
from rawattn.testing.laws import hold
from rawattn.testing.ops import expected
from rawattn.testing.paged_cases import LAYOUTS, PagedCase, PagedLimits
from rawattn.testing.paged_inputs import NOWHERE, PagedTensors, paged_tensors, spread

OTHER_POISON = 0x3C  # a finite number in every type, when all bytes are this
FP8_BOUND = 2  # times the bound of 16-bit caches: weights are rounded to float16 before they meet V


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedOp:
    """Attention over a paged cache, under test.

    `call` takes the arguments of `flash_attn_with_kvcache` by name, those that a case has.
    `bitwise` promises that layouts and page sizes leave a row's bits as they are, `invariant` that
    with a fixed `split` neighbours in the batch do. That the same call gives the same bits, with
    whatever pages and whatever lies in slots of nobody, all ops must obey.
    """

    name: str  # an expression that builds this op, for repro lines
    imports: str = ""
    call: Callable[..., Any]
    xp: Any = np  # where its arrays live: NumPy or CuPy
    limits: PagedLimits = PagedLimits()  # noqa: RUF009  frozen
    bitwise: bool = True
    invariant: bool = True
    record: Record = field(default_factory=Record, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedLaw:
    """A law, callable with (op, case), and the cases that it is about."""

    check: Callable[[PagedOp, PagedCase], None]
    limits: PagedLimits

    @property
    def name(self) -> str:
        return self.check.__name__

    def why_not(self, op: PagedOp) -> str | None:
        """Why this law is not about an op, in a sentence; None where it is, and where
        `paged_cases(op.limits & law.limits)` has cases.
        """
        for name in (f.name for f in fields(PagedLimits)):
            if getattr(self.limits & op.limits, name) == ():
                mine, takes = getattr(self.limits, name), getattr(op.limits, name)
                return f"{self.name} is about {name}={mine}, and {op.name} takes {name}={takes}"
        return None

    def __call__(self, op: PagedOp, case: PagedCase) -> None:
        hold(self.check, op, case)


def law(limits: PagedLimits = PagedLimits()) -> Callable[..., PagedLaw]:  # noqa: B008  frozen
    return lambda check: PagedLaw(check=check, limits=limits)


def run_paged(op: PagedOp, t: PagedTensors, **how: Any) -> Results:
    """out and lse of all rows in float64; `how` are arguments of `spread`."""
    inputs = spread(t, op.xp, **how)
    op.call(**inputs.arguments)
    return inputs.results()


def agree(op: PagedOp, got: Results, t: PagedTensors, *, roundings: int = 1) -> None:
    """Holds results to the float64 reference; `roundings` times as far off they may be."""
    packed = t.gathered()
    want = expected(packed)
    factor = roundings * (FP8_BOUND if t.case.quantized else 1)
    of_out, of_lse = bounds(want, t.case.dtype)
    limits = factor * of_out, factor * of_lse
    exact = want.out[..., : t.case.value_dim], want.lse
    assert_within(got, exact, limits, packed.case, op.record)


def same(op: PagedOp, got: Results, other: Results, t: PagedTensors) -> None:
    """Holds two results to each other, bit for bit where the op promises that."""
    if op.bitwise:
        assert_same(got, other, t.packed_case())
    else:
        agree(op, got, t)
        agree(op, other, t)


def as_case(t: PagedTensors, **changes: Any) -> PagedTensors:
    """The same sequences in a case that lays them out otherwise."""
    return replace(t, case=replace(t.case, **changes))


def one_of(t: PagedTensors, b: int) -> PagedTensors:
    """A sequence alone."""
    cut = slice(b, b + 1)
    c = replace(t.case, q_lens=t.case.q_lens[cut], k_lens=t.case.k_lens[cut])
    names = ("q", "k", "v", "new_k", "new_v", "pads", "tree", "k_scale", "v_scale")
    parts = {name: getattr(t, name)[cut] for name in names}
    if t.alibi_slopes is not None and c.by_sequence:
        parts["alibi_slopes"] = t.alibi_slopes[cut]
    return replace(t, case=c, **parts)


# ---- the laws ------------------------------------------------------------------------------------


@law()
def law_paged_matches_reference(op: PagedOp, case: PagedCase) -> None:
    """out and lse are those of the float64 reference over the gathered keys; new tokens lie in the
    cache bit for bit, and no other slot has changed.
    """
    t = paged_tensors(case)
    agree(op, run_paged(op, t), t)


@law()
def law_paged_reruns_are_equal(op: PagedOp, case: PagedCase) -> None:
    """The same inputs give the same bits."""
    t = paged_tensors(case)
    assert_same(run_paged(op, t), run_paged(op, t), t.packed_case())


@law()
def law_pages_are_invisible(op: PagedOp, case: PagedCase) -> None:
    """Other pages, in another order, other garbage where nobody's tokens lie: the same bits."""
    t = paged_tensors(case)
    other = run_paged(op, t, order=1, poison=OTHER_POISON, tail=NOWHERE[1])
    assert_same(other, run_paged(op, t, tail=NOWHERE[0]), t.packed_case())


@law(PagedLimits(layouts=LAYOUTS[:1]))
def law_layouts_are_equal(op: PagedOp, case: PagedCase) -> None:
    """The same tokens in another layout give the same result."""
    t = paged_tensors(case)
    got = run_paged(op, t)
    x_major = case.head_dim * np.dtype(case.stored).itemsize % 16 == 0 and not case.leftpad
    for layout in op.limits.layouts if x_major else op.limits.layouts[:2]:
        same(op, run_paged(op, as_case(t, layout=layout)), got, t)


@law(PagedLimits(tables=("block_table",)))
def law_page_sizes_are_equal(op: PagedOp, case: PagedCase) -> None:
    """The same tokens in pages of another size give the same result."""
    t = paged_tensors(case)
    got = run_paged(op, t)
    sizes = op.limits.pages
    other = sizes[(sizes.index(case.page) + 1 + case.seed % (len(sizes) - 1)) % len(sizes)]
    same(op, run_paged(op, as_case(t, page=other)), got, t)


@law(PagedLimits(tables=("block_table",), max_new=0, rotary=("none",)))
def law_tables_are_equal(op: PagedOp, case: PagedCase) -> None:
    """A block table, CSR, and a contiguous cache say the same."""
    t = paged_tensors(case)
    got = run_paged(op, t)
    for table in op.limits.tables:
        same(op, run_paged(op, as_case(t, table=table)), got, t)


@law(PagedLimits(splits=(0,)))
def law_splits_are_invisible(op: PagedOp, case: PagedCase) -> None:
    """Sequences cut in parts of any size give the result of the whole, within rounding."""
    t = paged_tensors(case)
    for split in op.limits.splits:
        agree(op, run_paged(op, as_case(t, split=split)), t)


@law(PagedLimits(splits=(16, 32, 64, 96, 256)))
def law_neighbours_are_invisible(op: PagedOp, case: PagedCase) -> None:
    """With a fixed split a sequence alone gives the bits that it gives in a batch, whose longest
    query and longest sequence may be others.
    """
    t = paged_tensors(case)
    out, lse = run_paged(op, t)
    first = 0
    for b, q_len in enumerate(case.q_lens):
        rows = slice(first, first + q_len)
        alone = one_of(t, b)
        got, want = run_paged(op, alone), (out[rows], lse[:, rows])
        if op.invariant:
            assert_same(got, want, alone.packed_case())
        agree(op, got, alone)
        first += q_len


@law(PagedLimits(rotary=("none",), tables=("block_table", "rows")))
def law_appending_is_storing_before(op: PagedOp, case: PagedCase) -> None:
    """Tokens that a call appends give the bits of tokens that the cache held before."""
    t = paged_tensors(case)
    stored = [t.keys(b) for b in range(len(case.k_lens))]
    before = replace(
        t,
        case=replace(case, new=0),
        k=[k for k, _ in stored],
        v=[v for _, v in stored],
        new_k=[x[:0] for x in t.new_k],
        new_v=[x[:0] for x in t.new_v],
    )
    assert_same(run_paged(op, t), run_paged(op, before), t.packed_case())


@law(
    PagedLimits(
        packed=(True,), causal=(False,), windows=False, alibi=(False,), sink=(False,),
        tree=(False,), max_new=0, rotary=("none",),
    )
)  # fmt: skip
def law_merged_parts_are_the_whole(op: PagedOp, case: PagedCase) -> None:
    """Attention to the first keys of each sequence and to the others, merged, is that to all."""
    t = paged_tensors(case)
    cuts = [case.seed % (n + 1) for n in case.k_lens]
    parts = []
    for first in (True, False):
        ranges = [slice(0, cut) if first else slice(cut, None) for cut in cuts]
        k, v = ([x[r] for x, r in zip(xs, ranges, strict=True)] for xs in (t.k, t.v))
        k_lens = tuple(map(len, k))
        parts.append(run_paged(op, replace(t, case=replace(case, k_lens=k_lens), k=k, v=v)))
    outs, lses = (np.stack(x) for x in zip(*parts, strict=True))
    out, lse = reference.merge_states(outs, lses.swapaxes(-1, -2))
    agree(op, (out, lse.swapaxes(-1, -2)), t, roundings=2)  # that of the parts, and their own


PAGED_LAWS: tuple[PagedLaw, ...] = tuple(
    x for x in list(globals().values()) if isinstance(x, PagedLaw)
)


# ---- the public functions as ops -----------------------------------------------------------------


def with_kvcache(backend: str | None, arguments: dict[str, Any]) -> Any:
    """`flash_attn_with_kvcache` with lse."""
    from rawattn.kv_cache import flash_attn_with_kvcache

    return flash_attn_with_kvcache(**arguments, return_softmax_lse=True, backend=backend)


@functools.cache
def paged_op(module: str, backend: str | None = None) -> PagedOp:
    """`rawattn.flash_attn_with_kvcache` on arrays of "numpy" or "cupy"."""
    on_host = module == "numpy"
    return PagedOp(
        name=f"paged_op({module!r}, {backend!r})",
        imports="from rawattn.testing.paged_laws import *",
        call=lambda **arguments: with_kvcache(backend, arguments),
        xp=importlib.import_module(module),
        limits=PagedLimits() if on_host else PagedLimits(dtypes=("float16", "bfloat16")),
        bitwise=on_host,
    )
