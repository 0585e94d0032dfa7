# SPDX-License-Identifier: Apache-2.0
"""Problems whose answer is a value of a cache: each query sees its own key alone, and so out is
that key's value, through whatever pages, layout and type. Its weight is 1, and no sum is rounded.
"""

from __future__ import annotations

import numpy as np

from rawattn.testing.inputs import Array
from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_inputs import PagedTensors

PAGES = (1, 5, 16, 32)


def gather_case(seed: int, layout: str, cache_dtype: str, pages: tuple[int, ...]) -> PagedCase:
    """One query for each of a few sequences."""
    rng = np.random.default_rng(seed)
    batch, kv_heads, group = (int(rng.integers(1, n)) for n in (5, 3, 3))
    return PagedCase(
        q_lens=(1,) * batch,
        k_lens=tuple(int(n) for n in rng.integers(1, 700, batch)),
        cache_dtype=cache_dtype,
        q_heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=128,
        value_dim=128,
        layout=layout,
        page=int(rng.choice(pages)),
        window=(0, 0),
        scales="heads",
        seed=seed,
    )


def last_values(t: PagedTensors) -> Array:
    """What out must be, (batch, q_heads, value_dim): of an 8-bit cache once rounded."""
    group = t.case.q_heads // t.case.kv_heads
    v = t.gathered().v
    ends = np.cumsum(t.case.k_lens) - 1
    return np.repeat(v[ends], group, axis=1).astype(t.case.dtype)
