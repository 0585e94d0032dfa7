# SPDX-License-Identifier: Apache-2.0
"""A call over a paged cache as ``fwd_sm90_paged`` takes it: that of a dense one, with a page of the
cache where a sequence would be.
"""

from __future__ import annotations

from collections.abc import Mapping

from rawattn.cache_request import as_rows, scale_strides
from rawattn.calls import ABSENT, Ref
from rawattn.forward import kernel_scalars
from rawattn.paged_problem import PagedProblem, PageTable
from rawattn.plan.fwd_sm90_paged import twin
from rawattn.problem import CacheLayout
from rawattn.ragged import rows_apart
from rawattn.request import Arrays


def arrays_of(problem: PagedProblem, arrays: Mapping[str, Ref]) -> dict[str, Ref]:
    """The pointers of FwdSm90PagedParams, from those of PagedParams."""
    names = (*Arrays._fields, "kv_indptr", "kv_last_page_len", "k_scale", "v_scale")
    found = {name: arrays[name] for name in names if name in arrays}
    found["page_ids"] = arrays["kv_indices" if problem.table is PageTable.CSR else "block_table"]
    for x in "kv":
        cache = arrays[f"{x}_cache"]
        assert cache.spec is not None
        if problem.layout is CacheLayout.X_MAJOR:  # which its tensor maps take as it is
            found[x] = cache
        else:
            found[x] = cache._replace(spec=as_rows(cache.spec, problem.layout))
    return {**found, "cu_seqlens_k": ABSENT}


def scalars_of(
    problem: PagedProblem,
    arrays: Mapping[str, Ref],
    *,
    scale: float,
    softcap: float,
    new_k: int,
    numbers: tuple[float, float],
) -> dict[str, float]:
    """The fields that neither hold an address nor are the plan's to decide; of `arrays_of`.
    `numbers` multiply all keys and values.
    """
    specs = Arrays(**{name: arrays[name].spec for name in Arrays._fields})
    ids = arrays["page_ids"].spec
    assert ids is not None
    xmajor = problem.layout is CacheLayout.X_MAJOR
    if xmajor:
        specs = specs._replace(
            k=as_rows(specs.k, problem.layout), v=as_rows(specs.v, problem.layout)
        )
    return {
        **kernel_scalars(specs, twin(problem), scale, softcap),
        "k_len": problem.max_k,
        "stride_table": 0 if problem.table is PageTable.CSR else ids.steps[0],
        "page": problem.page,
        "page_rows": 0 if xmajor else rows_apart(specs.v),
        **scale_strides("k_scale", arrays["k_scale"].spec),
        **scale_strides("v_scale", arrays["v_scale"].spec),
        "q_bf16": int(problem.dtype == "bfloat16"),
        "k_scale_number": numbers[0],
        "v_scale_number": numbers[1],
        "new_k": new_k,
    }
