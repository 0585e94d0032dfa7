# SPDX-License-Identifier: Apache-2.0
"""Partial results: merging them, and attention that shares a prefix and merges."""

from __future__ import annotations

from typing import Any

from rawattn import cascade_call, merge_call
from rawattn.cache_request import array_or_number
from rawattn.calls import PlanArgument, call
from rawattn.merge_call import MergeArrays, MergeOptions
from rawattn.paged_request import FIELDS, WORDS, PagedArrays, PagedOptions

MERGE_ATTN_STATES = merge_call.operation(
    MergeArrays(
        first="prefix_output",
        others="suffix_output",
        first_lse="prefix_lse",
        others_lse="suffix_lse",
        out="output",
        lse="output_lse",
        out_scale="output_scale",
    ),
    pair=True,
)
MERGE_STATES = merge_call.operation(
    MergeArrays(*MergeArrays._fields)._replace(first="outs", first_lse="lses"), pair=False
)
CASCADE = cascade_call.operation(
    FIELDS._replace(seqused_k="cache_seqlens", k_scale="k_descale", v_scale="v_descale"),
    WORDS._replace(k_scale="k_descale", v_scale="v_descale"),
)


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
    *,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
) -> Any:
    """Attention over two disjoint sets of keys, from the results over each [1]_.

    Names and order of the arguments are those of vLLM's operator.

    Parameters
    ----------
    output : array, shape `(tokens, heads, head_dim)`, or None
        Where to write, in the dtype of `prefix_output`; None makes a new one. With `output_scale`
        an array of float8_e4m3fn, or of its bytes as uint8.
    prefix_output, suffix_output : array, shape `(tokens, heads, head_dim)`
        Results over the two sets, in float16, bfloat16 or float32.
    prefix_lse, suffix_lse : array, shape `(heads, tokens)`, float32
        Their log-sum-exp, natural logarithms. -inf means no keys, and so does +inf, which older
        kernels write: the result of that side is then not used and may be NaN.
    output_lse : array, shape `(heads, tokens)`, float32, optional
        Where to write the log-sum-exp over both.
    prefill_tokens_with_context : int, optional
        Tokens from this one on have no prefix: theirs is not used. By default all have.
    output_scale : float, or array of float32, shape `()` or `(1,)`, optional
        What results are divided by before they are rounded to float8_e4m3fn, saturated.
    dtype, stream, backend, plan
        As in `flash_attn_func`.

    Returns
    -------
    output : array, shape `(tokens, heads, head_dim)`

    Notes
    -----
    Where one side alone has keys its bits are the result; where none has, 0 and -inf.

    References
    ----------
    .. [1] Ye et al., FlashInfer, arXiv:2501.01005, section 2.2

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> q, k, v = np.random.default_rng(0).standard_normal((3, 1, 8, 2, 64), dtype=np.float32)
    >>> parts = [slice(0, 5), slice(5, 8)]
    >>> (a, x), (b, y) = (
    ...     rawattn.flash_attn_func(q, k[:, p], v[:, p], return_lse=True) for p in parts
    ... )
    >>> merged = rawattn.merge_attn_states(None, a[0], x[0], b[0], y[0])
    >>> bool(np.allclose(merged, rawattn.flash_attn_func(q, k, v)[0], atol=1e-6))
    True
    """
    scale, number = array_or_number(output_scale, None)
    arrays = (prefix_output, suffix_output, prefix_lse, suffix_lse, output, output_lse, scale)
    options = MergeOptions(False, prefill_tokens_with_context, number, dtype, backend)
    return call(MERGE_ATTN_STATES, arrays, options, plan, stream)


def merge_states(
    outs: Any,
    lses: Any,
    *,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
) -> Any:
    """`merge_attn_states` of any number of disjoint sets of keys.

    Parameters
    ----------
    outs : array, shape `(states, tokens, heads, head_dim)`
        Results over each set, of one set or more.
    lses : array, shape `(states, heads, tokens)`, float32
        Their log-sum-exp.
    return_lse : bool
        Whether to return `lse` too.
    out : array, shape `(tokens, heads, head_dim)`, optional
        Where to write, in the dtype of `outs`.
    lse : array, shape `(heads, tokens)`, float32, optional
        Where to write the log-sum-exp over all sets.
    dtype, stream, backend, plan
        As in `flash_attn_func`.

    Returns
    -------
    out : array, shape `(tokens, heads, head_dim)`
    lse : array, shape `(heads, tokens)`
        Only with `return_lse`.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> outs = np.array([[[[1.0]]], [[[4.0]]]], np.float32)  # two states of one number
    >>> lses = np.log(np.array([[[2.0]], [[1.0]]], np.float32))  # the first weighs twice as much
    >>> rawattn.merge_states(outs, lses).round(3).ravel()
    array([2.], dtype=float32)
    """
    arrays = (outs, None, lses, None, out, lse, None)
    options = MergeOptions(return_lse, None, None, dtype, backend)
    return call(MERGE_STATES, arrays, options, plan, stream)


def cascade_attention(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    *,
    cache_seqlens: Any,
    block_table: Any,
    common_prefix_len: int,
    cu_seqlens_q: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool | str = True,
    softcap: float = 0.0,
    sink: Any = None,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
    k_descale: Any = 1.0,
    v_descale: Any = 1.0,
    split_tokens: int = 0,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
    workspace: Any = None,
) -> Any:
    """`flash_attn_with_kvcache` where all sequences begin with the same pages.

    The prefix is read once for the queries of all sequences, the rest of each sequence by its own;
    the two results, rounded to the dtype of `q`, are merged [1]_. Arguments and errors that are not
    described here are those of `flash_attn_with_kvcache`.

    Parameters
    ----------
    q : array, shape `(batch, q_len, q_heads, head_dim)`, or packed with `cu_seqlens_q`
        Queries, all of which see the whole prefix: sequences are that much longer than it, if
        attention is causal. Packed rows all belong to sequences: others of `out` may be written.
    cache_seqlens : array, shape `(batch,)`, int32
        Tokens of each sequence, those of the prefix among them: `common_prefix_len` or more.
    block_table : array, shape `(batch, max_blocks)`, int32
        The pages of each sequence. Those of the prefix are read from the first row.
    common_prefix_len : int
        Tokens of the prefix, whole pages. 0 is none.
    causal : bool or "bottom_right"
        As in `flash_attn_with_kvcache`; True here by default.

    Returns
    -------
    out : array, as `q` with `value_dim` columns
    lse : array, shape `(batch, q_heads, q_len)` or `(q_heads, total_q)`
        Only with `return_lse`.

    Notes
    -----
    There are no windows, no ALiBi slopes and no scales of a sequence, `(batch, kv_heads)`: what
    they do to the prefix differs from sequence to sequence. Prefix pages that are wrong in other
    rows of `block_table` go unnoticed.

    References
    ----------
    .. [1] Juravsky et al., Hydragen, arXiv:2402.05099

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> k_cache, v_cache = np.random.default_rng(0).standard_normal((2, 5, 16, 2, 64)).astype("f")
    >>> table = np.array([[3, 1], [3, 4]], np.int32)  # page 3 is shared
    >>> lengths, q = np.array([20, 17], np.int32), np.ones((2, 1, 4, 64), np.float32)
    >>> cache = {"cache_seqlens": lengths, "block_table": table, "causal": True}
    >>> out = rawattn.cascade_attention(q, k_cache, v_cache, common_prefix_len=16, **cache)
    >>> whole = rawattn.flash_attn_with_kvcache(q, k_cache, v_cache, **cache)
    >>> bool(np.allclose(out, whole, atol=1e-6))
    True
    """
    k_scale, k_number = array_or_number(k_descale)
    v_scale, v_number = array_or_number(v_descale)
    given = PagedArrays(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        out=out,
        lse=lse,
        block_table=block_table,
        seqused_k=cache_seqlens,
        cu_seqlens_q=cu_seqlens_q,
        sink=sink,
        k_scale=k_scale,
        v_scale=v_scale,
        workspace=workspace,
    )
    options = PagedOptions(
        softmax_scale=softmax_scale,
        causal=causal,
        softcap=softcap,
        return_lse=return_lse,
        dtype=dtype,
        backend=backend,
        layout=layout,
        kv_cache_dtype=kv_cache_dtype,
        k_scale=k_number,
        v_scale=v_number,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        split_tokens=split_tokens,
        common_prefix_len=common_prefix_len,
    )
    return call(CASCADE, given, options, plan, stream)
