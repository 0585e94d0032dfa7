# SPDX-License-Identifier: Apache-2.0
"""Attention over a paged KV cache: the public functions."""

from __future__ import annotations

from typing import Any

from rawattn.cache_request import array_or_number
from rawattn.calls import PlanArgument, call
from rawattn.paged_call import operation
from rawattn.paged_request import FIELDS, WORDS

PAGED_ATTENTION = operation(
    FIELDS._replace(
        q="query",
        k_cache="key_cache",
        v_cache="value_cache",
        block_table="block_tables",
        seqused_k="seq_lens",
    ),
    WORDS._replace(softmax_scale="scale", max_seqlen_k="max_seq_len"),
    one_query=True,
    table=True,
    stated=("softmax_scale", "num_kv_heads", "block_size", "max_seqlen_k"),
)


def paged_attention_v1(
    out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
    workspace: Any = None,
) -> Any:
    """PagedAttention of one query for each sequence, its last token, over an x-major cache [1]_.

    Names and order of the arguments are those of vLLM's operator. `x` is 16 bytes of elements: 8 of
    a 16-bit type, 16 of an 8-bit one. What is not described here is as in
    `flash_attn_with_kvcache`.

    Parameters
    ----------
    out : array, shape `(num_seqs, num_heads, value_size)`, or None
        Where to write, in the dtype of `query`; None makes a new one.
    query : array, shape `(num_seqs, num_heads, head_size)`
        One query a sequence, in float16, bfloat16 or, on a GPU without tensor cores, float32.
    key_cache : array, shape `(num_blocks, num_kv_heads, head_size / x, block_size, x)`
        Keys. Blocks and heads may have any strides; a block of a head is contiguous.
    value_cache : array, shape `(num_blocks, num_kv_heads, value_size, block_size)`
        Values.
    num_kv_heads : int
        As `key_cache` has it.
    scale : float
        Factor of the products of queries and keys, as `softmax_scale` in `flash_attn_func`.
    block_tables : array, shape `(num_seqs, max_num_blocks)`, int32
        The blocks of each sequence. Entries past its last block may hold anything.
    seq_lens : array, shape `(num_seqs,)`, int32
        How many keys each sequence has; 0 gives out 0.
    block_size : int
        Tokens a block, as `key_cache` has it. Any from 1.
    max_seq_len : int
        Bounds `seq_lens`: keys past it may not be seen.
    alibi_slopes : array, shape `(num_heads,)`, float32, optional
        ``slope * (seq_len - 1 - j)`` is subtracted from the score of key ``j``.
    kv_cache_dtype : {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"}
        What the caches hold: the dtype of `query`, or 8-bit values that `k_scale` and `v_scale`
        multiply. Caches of fp8 are arrays of uint8 or of ml_dtypes' type. "auto" takes it from
        the dtype of the caches, also an 8-bit one of ml_dtypes or int8; uint8 needs its word.
    k_scale, v_scale : float, or array of float32, shape `()`, `(1,)` or `(num_kv_heads,)`
        1.0 where the cache holds the dtype of `query`; else from 1e-18 to 1e18, which is looked at
        in arrays where lengths are: on a GPU only with ``RAWATTN_CHECK=1``. None is refused: 1.0
        scales nothing.
    tp_rank : int
        Which rank of a tensor-parallel group this is, where attention is block-sparse and heads
        slide: its offsets depend on it.
    blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size, \
blocksparse_head_sliding_step : int
        With a stride of 2 or more a head sees, in blocks of `blocksparse_block_size` keys (a
        multiple of `block_size`), the last `blocksparse_local_blocks` blocks, and block ``b`` where
        ``b + 1 + (tp_rank * num_heads + head) * step`` is a multiple of the stride; with a negative
        step the KV head and its number count instead. With a step of 0 `tp_rank` has to be 0. With
        a stride of 0 or 1 all keys are seen, and the other arguments have to be left at their
        defaults.
    dtype, stream, backend, plan, workspace
        As in `flash_attn_with_kvcache`.

    Returns
    -------
    out : array, shape `(num_seqs, num_heads, value_size)`

    References
    ----------
    .. [1] Kwon et al., Efficient Memory Management for Large Language Model Serving with
       PagedAttention, arXiv:2309.06180

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> query = np.ones((2, 4, 16), np.float32)
    >>> key_cache, value_cache = np.ones((9, 2, 4, 8, 4), np.float32), np.ones((9, 2, 16, 8), "f")
    >>> tables, lengths = np.array([[7, 2], [4, -1]], np.int32), np.array([11, 3], np.int32)
    >>> out = rawattn.paged_attention_v1(
    ...     None, query, key_cache, value_cache, 2, 0.25, tables, lengths, 8, 16
    ... )
    >>> out.shape, bool(np.allclose(out, 1))
    ((2, 4, 16), True)
    """
    return paged_attention_v2(
        out,
        None,
        None,
        None,
        query,
        key_cache,
        value_cache,
        num_kv_heads,
        scale,
        block_tables,
        seq_lens,
        block_size,
        max_seq_len,
        alibi_slopes,
        kv_cache_dtype,
        k_scale,
        v_scale,
        tp_rank,
        blocksparse_local_blocks,
        blocksparse_vert_stride,
        blocksparse_block_size,
        blocksparse_head_sliding_step,
        dtype=dtype,
        stream=stream,
        backend=backend,
        plan=plan,
        workspace=workspace,
    )


def paged_attention_v2(
    out: Any,
    exp_sum: Any,
    max_logits: Any,
    tmp_out: Any,
    query: Any,
    key_cache: Any,
    value_cache: Any,
    num_kv_heads: int,
    scale: float,
    block_tables: Any,
    seq_lens: Any,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: Any = None,
    kv_cache_dtype: str = "auto",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
    *,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
    workspace: Any = None,
) -> Any:
    """`paged_attention_v1` with the arrays that PagedAttention v2 merges parts of sequences in.

    The same backends take both functions, and none is held to these arrays: what they hold
    afterwards is not defined, and a call without them works in a workspace. Arguments and errors
    that are not described here are those of `paged_attention_v1`.

    Parameters
    ----------
    exp_sum, max_logits : array, shape `(num_seqs, num_heads, parts)`, float32, or None
        Room for the parts of each sequence, of 512 tokens each: ``ceil(max_seq_len / 512)`` or
        more.
    tmp_out : array, shape `(num_seqs, num_heads, parts, value_size)`, or None
        Room for their results, in the dtype of `query`.

    Returns
    -------
    out : array, shape `(num_seqs, num_heads, value_size)`

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> query, out = np.ones((1, 4, 16), np.float32), np.empty((1, 4, 16), np.float32)
    >>> key_cache, value_cache = np.ones((9, 2, 4, 8, 4), np.float32), np.ones((9, 2, 16, 8), "f")
    >>> (exp_sum, max_logits), tmp_out = np.empty((2, 1, 4, 1), "f"), np.empty((1, 4, 1, 16), "f")
    >>> tables, lengths = np.array([[7, 2]], np.int32), np.array([11], np.int32)
    >>> same = rawattn.paged_attention_v2(
    ...     *(out, exp_sum, max_logits, tmp_out, query, key_cache, value_cache),
    ...     *(2, 0.25, tables, lengths, 8, 16),
    ... )
    >>> same is out, bool(np.allclose(out, 1))
    (True, True)
    """
    k_array, k_number = array_or_number(k_scale)
    v_array, v_number = array_or_number(v_scale)
    # fmt: off
    arrays = (  # as PagedArrays has them
        query, key_cache, value_cache, out, None, block_tables, seq_lens, None, None, None, None,
        alibi_slopes, None, k_array, v_array, None, exp_sum, max_logits, tmp_out,
        None, None, None, None, None, workspace, None, None,
    )
    sparse = (
        blocksparse_local_blocks, blocksparse_vert_stride, blocksparse_block_size,
        blocksparse_head_sliding_step, tp_rank,
    )
    options = (  # as PagedOptions has them
        scale, False, (-1, -1), 0.0, False, dtype, backend, "x-major", kv_cache_dtype,
        k_number, v_number, None, max_seq_len, 0, 0, True, sparse, num_kv_heads, block_size,
    )
    # fmt: on
    return call(PAGED_ATTENTION, arrays, options, plan, stream)
