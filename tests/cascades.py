# SPDX-License-Identifier: Apache-2.0
"""What cascades must obey, for the tests that run them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

import rawattn
from rawattn.testing.closeness import Record, assert_within, bounds
from rawattn.testing.ops import expected
from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_inputs import paged_tensors, spread


def cascade_is_the_whole(
    case: PagedCase, prefix_pages: int, on: Any, backend: str | None = None
) -> None:
    """Attention with a shared prefix is that to whole sequences, with one rounding more. The keys
    of a case come behind the prefix, and in front of those of its queries.
    """
    prefix = prefix_pages * case.page
    k_lens = tuple(n + q + prefix for n, q in zip(case.k_lens, case.q_lens, strict=True))
    t = paged_tensors(replace(case, k_lens=k_lens))
    for xs in (t.k, t.v):  # the first tokens of all are those of the first
        for x in xs[1:]:
            x[:prefix] = xs[0][:prefix]
    inputs = spread(t)
    a = dict(inputs.arguments)
    for row in a["block_table"][1:]:
        row[:prefix_pages] = a["block_table"][0, :prefix_pages]
    starts = a.get("cu_seqlens_q")
    if starts is not None:  # all rows belong to sequences
        first, end = int(starts[0]), int(starts[-1])
        a["q"], a["out"], a["lse"] = a["q"][first:end], a["out"][first:end], a["lse"][:, first:end]
        a["cu_seqlens_q"] = starts - first
    for name in ("alibi_slopes", "window_size"):
        del a[name]
    if not case.packed:
        a["out"] = a["lse"] = None  # with gaps between sequences they are refused
    with on():
        out, lse = rawattn.cascade_attention(
            **a, common_prefix_len=prefix, return_lse=True, backend=backend
        )
    packed = t.gathered()
    want = expected(packed)
    limits = tuple((8 if case.quantized else 4) * x for x in bounds(want, case.dtype))
    rows = want.out.shape[0]
    if not case.packed:
        out, lse = out.reshape(rows, *out.shape[2:]), lse.swapaxes(0, 1).reshape(case.q_heads, rows)
    got = out.astype(np.float64), lse.astype(np.float64)
    exact = want.out[..., : case.value_dim], want.lse
    assert_within(got, exact, limits, packed.case, Record())
