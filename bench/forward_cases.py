# SPDX-License-Identifier: Apache-2.0
"""The suites of the forward kernels.

Ids read: head size (or that of queries and of values), mask, rows of a sequence, and what else
differs: ``-fp16``, ``-varlen`` (packed rows of equal lengths), ``-softcap``, ``-alibi``, ``llama``
(32 query heads over 8). Of chunks: head size, heads where they are not 2048 columns, queries, keys.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench.suite import Case, Suite
from rawattn.problem import Mask, Problem, Rows, Scores

TOKENS = 16384
HIDDEN = 2048
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
SIZES = (64, 128, 256)
MASKS = (False, True)  # causal


def dense(
    head_dim: int,
    causal: bool,
    length: int,
    *,
    value_dim: int | None = None,
    heads: int | None = None,
) -> Case:
    """Self-attention over 16 k tokens of hidden size 2048, as the field publishes it."""
    heads = heads or HIDDEN // head_dim
    sizes = f"d{head_dim}" if value_dim is None else f"d{head_dim}x{value_dim}"
    return Case(
        id=f"{sizes}-{'causal' if causal else 'full'}-s{length}",
        problem=Problem(
            dtype="bfloat16",
            batch=TOKENS // length,
            q_heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            value_dim=value_dim or head_dim,
            max_q=length,
            max_k=length,
            mask=Mask.of(causal=causal),
        ),
        quick=length in (1024, 8192),
        all_peers=length in (1024, 8192),
    )


def fp16(head_dim: int, causal: bool, length: int) -> Case:
    """The same in fp16. At 4 k beside every peer, two of them in bf16 too, so that their ratio of
    the types is of the same run as ours.

    Among these peers FlashAttention-2 draws little power. Without it all share the low clock that
    the average of them leaves, and what fp16 draws more is not in its own time (rows:
    results/nvidia-h200/tuning/fp16-company.csv).
    """
    case, every = dense(head_dim, causal, length), length == 4096
    return Case(
        id=f"{case.id}-fp16",
        problem=replace(case.problem, dtype="float16"),
        all_peers=every,
        peers=None if every else ("fa3", "cudnn", "fa2"),
        twin_peers=("fa3", "cudnn") if every else (),
    )


def varlen(head_dim: int, causal: bool, length: int) -> Case:
    """The same rows, packed, with tables of where sequences start."""
    case = dense(head_dim, causal, length)
    problem = replace(case.problem, q_rows=Rows.PACKED, k_rows=Rows.PACKED)
    return Case(id=f"{case.id}-varlen", problem=problem)


def scored(head_dim: int, causal: bool, **step: bool) -> Case:
    """Sequences of 4 k with one step between q.k and the softmax, beside the same without.
    FlashAttention-3 caps scores too; no peer has ALiBi.
    """
    case, (name,) = dense(head_dim, causal, 4096), step
    peers = ("fa3",) if name == "softcap" else ()
    return Case(
        id=f"{case.id}-{name}",
        problem=replace(case.problem, scores=Scores(**step)),
        peers=peers,
        twin_peers=peers,
    )


def llama(length: int, window: int | None = None) -> Case:
    """One causal sequence of 32 query heads over 8, that see `window` keys or all before them."""
    problem = replace(
        dense(128, True, length, heads=32).problem,
        batch=1,
        kv_heads=8,
        mask=Mask.of(causal=True, window_size=(-1 if window is None else window - 1, 0)),
    )
    name = "causal" if window is None else f"window{window}"
    quick = length == 4096
    return Case(id=f"llama-{name}-s{length}", problem=problem, quick=quick, all_peers=quick)


TABLE = tuple(dense(d, causal, s) for d in SIZES for causal in MASKS for s in LENGTHS)
OTHER_SIZES = tuple(
    dense(d, causal, s, value_dim=dv, heads=16)
    for d, dv in ((96, None), (192, 128))
    for causal in MASKS
    for s in (1024, 4096, 16384)
)


def chunk(head_dim: int, queries: int, keys: int, *, heads: tuple[int, int] | None = None) -> Case:
    """The last queries of a sequence over all its keys, causal: a chunk of a prompt, its cache."""
    q_heads, kv_heads = heads or (HIDDEN // head_dim,) * 2
    name = f"d{head_dim}" if heads is None else f"d{head_dim}-h{q_heads}-{kv_heads}"
    return Case(
        id=f"{name}-q{queries}-k{keys}",
        problem=Problem(
            dtype="bfloat16",
            batch=1,
            q_heads=q_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            value_dim=head_dim,
            max_q=queries,
            max_k=keys,
            mask=Mask.of(causal=True),
        ),
        quick=(queries, keys) == (512, 32768),
    )


def _chunks() -> Iterator[Case]:
    for queries, keys in ((128, 8192), (512, 8192), (512, 32768), (1024, 32768), (256, 131072)):
        yield chunk(128, queries, keys, heads=(32, 8))
    for queries, keys in ((128, 8192), (512, 8192), (384, 32768), (512, 32768), (256, 131072)):
        yield chunk(256, queries, keys)
    for size in (64, 128):
        for queries, keys in ((128, 8192), (512, 8192), (512, 32768)):
            yield chunk(size, queries, keys)


LLAMA = (*map(llama, (1024, 4096, 16384, 65536)), llama(65536, window=4096))
FP16 = tuple(fp16(d, causal, s) for d in SIZES for causal in MASKS for s in LENGTHS)
SCORED = tuple(
    scored(d, causal, **step)
    for step in ({"softcap": True}, {"alibi": True})
    for d in SIZES
    for causal in MASKS
)
VARLEN = tuple(varlen(d, causal, s) for d in SIZES for causal in MASKS for s in (1024, 4096))

FWD_SM80 = Suite(
    name="fwd_sm80",
    op="forward",
    backend="fwd_sm80",
    peers=("fa2", "cudnn", "fa3"),
    cases=TABLE,
    seldom=("cudnn", "fa3"),  # which have Hopper's instructions
)
FWD_SM90 = Suite(
    name="fwd_sm90",
    op="forward",
    backend="fwd_sm90",
    peers=("fa3", "cudnn", "fa2", "cudnn_fe", "cudnn_fp8", "jax", "triton"),
    cases=(*TABLE, *OTHER_SIZES, *LLAMA, *FP16, *VARLEN, *SCORED),
    seldom=("cudnn_fe", "cudnn_fp8", "triton"),
)
CHUNKS = Suite(
    name="chunks",
    op="forward",
    backend="fwd_sm90",
    peers=("fa3", "cudnn_fe"),
    cases=tuple(_chunks()),
)
