# SPDX-License-Identifier: Apache-2.0
"""The step of attention over a paged cache: what its kernel is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rawattn import paged_prompt
from rawattn.cache_request import cache_strides, scale_strides, strides_of
from rawattn.calls import Ref, Steps
from rawattn.paged_problem import PagedProblem, Scale
from rawattn.params import row_strides
from rawattn.plan import Plan
from rawattn.plan import paged as paged_plan
from rawattn.reference import softmax_scale
from rawattn.reference_paged import BlockSparse
from rawattn.softcap import LOG2_E

if TYPE_CHECKING:
    from rawattn.paged_call import Request


def add_attention(
    made: Steps, plan: Plan, request: Request, arrays: Mapping[str, Ref], new_k: int
) -> None:
    """The step of a plan for all of the request or a part of it, on `arrays`, the pointers of
    PagedParams. Sequences have `new_k` keys more than is said.
    """
    problem, options = plan.problem, request.options
    if plan.backend == paged_plan.PROMPTS.name:
        named = paged_prompt.arrays_of(problem, arrays)
        scale = softmax_scale(options.softmax_scale, problem.head_dim)
        found = paged_prompt.scalars_of(
            problem,
            named,
            scale=scale,
            softcap=options.softcap,
            new_k=new_k,
            numbers=_numbers(request, problem),
        )
        made.add(plan, found, named)
        return
    found = scalars(request, problem, arrays, new_k)
    if problem.leftpad and request.cache.page > 1:  # every token begins a page
        found |= {f"stride_{x}_block": found[f"stride_{x}_token"] for x in "kv"}
    made.add(plan, found, arrays)


def scalars(
    request: Request, problem: PagedProblem, arrays: Mapping[str, Ref], new_k: int
) -> dict[str, float]:
    """The fields of PagedParams that neither hold an address nor are the plan's to decide.

    `arrays` are those of a step of the request, which solves `problem`.
    """
    options, specs = request.options, {name: ref.spec for name, ref in arrays.items()}
    scale = softmax_scale(options.softmax_scale, problem.head_dim)
    q, out = specs["q"], specs["out"]
    assert q is not None and out is not None
    lse_batch, lse_head, _ = strides_of(specs["lse"], 3)
    tree_batch, tree_row, _ = strides_of(specs["tree_mask"], 3)
    slopes = specs["alibi_slopes"]
    of_keys, of_values = _numbers(request, problem)
    return {
        **row_strides("q", q),
        **row_strides("out", out),
        "stride_lse_batch": lse_batch,
        "stride_lse_head": lse_head,
        **cache_strides(request.cache, request.specs.k_cache, request.specs.v_cache),
        "stride_tree_batch": tree_batch,
        "stride_tree_row": tree_row,
        "stride_table": strides_of(specs["block_table"], 2)[0],
        "stride_alibi_batch": strides_of(slopes, 2)[0],
        **scale_strides("k_scale", specs["k_scale"]),
        **scale_strides("v_scale", specs["v_scale"]),
        "batch": problem.batch,
        "q_heads": problem.q_heads,
        "kv_heads": problem.kv_heads,
        "group": problem.group,
        "head_dim": problem.head_dim,
        "value_dim": problem.value_dim,
        "q_len": 0 if specs["cu_seqlens_q"] else problem.max_q,
        "max_k": problem.max_k,
        "new_k": new_k,
        "page": problem.page,
        "window_left": problem.mask.left,
        "window_right": problem.mask.right,
        "copy_bytes": problem.copy_bytes,
        "q_bf16": int(problem.dtype == "bfloat16"),
        "scale_log2": scale * LOG2_E * of_keys,
        "softcap_log2": options.softcap * LOG2_E,
        "out_scale": of_values,
        **(options.block_sparse or BlockSparse(0, 0, 0, 0, 0))._asdict(),
    }


def _numbers(request: Request, problem: PagedProblem) -> tuple[float, float]:
    """What keys and values are multiplied by, where that is a number."""
    options = request.options
    return (
        options.k_scale if problem.k_scale is Scale.NUMBER else 1.0,
        options.v_scale if problem.v_scale is Scale.NUMBER else 1.0,
    )
