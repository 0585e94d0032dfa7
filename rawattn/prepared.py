# SPDX-License-Identifier: Apache-2.0
"""Calls made ready before they are needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rawattn.dense import flash_attn_func, flash_attn_varlen_func
from rawattn.forward import Prepared, Preparer
from rawattn.kv_cache import (
    copy_blocks,
    flash_attn_with_kvcache,
    reshape_and_cache,
    reshape_and_cache_flash,
)
from rawattn.merge import cascade_attention, merge_attn_states, merge_states
from rawattn.paged import paged_attention_v1, paged_attention_v2
from rawattn.problem import shown

FUNCTIONS: tuple[Callable[..., Any], ...] = (
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
    paged_attention_v1,
    paged_attention_v2,
    cascade_attention,
    merge_attn_states,
    merge_states,
    reshape_and_cache,
    reshape_and_cache_flash,
    copy_blocks,
)


def prepare(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Prepared:
    """All of ``function(*args, **kwargs)`` but its launch: checks, plan, compilation, packing.

    Parameters
    ----------
    function : callable
        One of this package that has an argument `plan`.
    *args, **kwargs
        Its arguments. With `out` (and `lse`, where it is returned) given, the prepared call neither
        allocates nor synchronises nor reads device memory, so that it can be captured in a CUDA
        graph, and replayed with other values in the arrays, lengths among them.

    Returns
    -------
    plan : Prepared
        ``plan.run()`` repeats the call. Or pass it as ``plan=`` with the same arguments: arrays may
        be others with the same shapes, strides, dtypes and device; anything else that differs is a
        ValueError. That goes for outputs too: an `out` or `lse` that was given here is given again,
        and where none was, each call makes a new one, and takes none. ``plan.workspace_size`` says
        how many bytes it works in; where the function has an argument `workspace` they may be lent,
        else they are allocated here, and calls with this plan must not run at the same time.

    Raises
    ------
    TypeError
        Another function, or an argument `plan`. Else the errors are those of the function.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> q = k = v = np.ones((1, 3, 2, 16), np.float32)
    >>> out = np.empty_like(q)
    >>> plan = rawattn.prepare(rawattn.flash_attn_func, q, k, v, causal=True, out=out)
    >>> rawattn.flash_attn_func(q, k, v, causal=True, out=out, plan=plan) is out
    True
    >>> plan.run() is out
    True
    """
    if not any(function is each for each in FUNCTIONS):  # not `in`: what is an array has its own ==
        accepted = ", ".join(each.__name__ for each in FUNCTIONS)
        raise TypeError(f"function={shown(function)}: accepted are {accepted}")
    if "plan" in kwargs:
        raise TypeError(f"plan={shown(kwargs['plan'])}: accepted is a call without plan=")
    prepared = function(*args, **kwargs, plan=Preparer())
    assert isinstance(prepared, Prepared)
    return prepared
