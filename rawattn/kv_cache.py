# SPDX-License-Identifier: Apache-2.0
"""KV caches: storing tokens in them, copying their blocks, attending to them while they grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rawattn import copy_call
from rawattn.cache_request import array_or_number
from rawattn.calls import PlanArgument, call
from rawattn.kv_write_call import operation as write_operation
from rawattn.kv_write_request import WriteArrays, WriteOptions
from rawattn.paged_call import equal_lengths, operation
from rawattn.paged_request import FIELDS, WORDS

WITH_KVCACHE = operation(
    FIELDS._replace(
        seqused_k="cache_seqlens",
        k_scale="k_descale",
        v_scale="v_descale",
        cu_seqlens_new="cu_seqlens_k_new",
        leftpad="cache_leftpad",
    ),
    WORDS._replace(return_lse="return_softmax_lse", k_scale="k_descale", v_scale="v_descale"),
)
RESHAPE_AND_CACHE = write_operation(
    WriteArrays(
        k="key",
        v="value",
        k_cache="key_cache",
        v_cache="value_cache",
        slot_mapping="slot_mapping",
        k_scale="k_scale",
        v_scale="v_scale",
    )
)


def flash_attn_with_kvcache(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any = None,
    v: Any = None,
    *,
    rotary_cos: Any = None,
    rotary_sin: Any = None,
    cache_seqlens: Any = None,
    cache_batch_idx: Any = None,
    cache_leftpad: Any = None,
    block_table: Any = None,
    kv_indptr: Any = None,
    kv_indices: Any = None,
    kv_last_page_len: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_k_new: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Any = None,
    sink: Any = None,
    tree_mask: Any = None,
    layout: str = "NHD",
    kv_cache_dtype: str = "auto",
    k_descale: Any = 1.0,
    v_descale: Any = 1.0,
    split_tokens: int = 0,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
    workspace: Any = None,
) -> Any:
    """Attention of the last tokens of sequences over a KV cache, paged or contiguous; new tokens
    may join the cache first.

    With `k` and `v` the new tokens are stored behind the `cache_seqlens` tokens of their sequences,
    which then count them; nothing is stored past the room of a sequence. Arguments and errors that
    are not described here are those of `flash_attn_func`.

    Parameters
    ----------
    q : array, shape `(batch, q_len, q_heads, head_dim)`
        Queries: the last tokens of their sequences, whose keys the cache holds (those of `k`, where
        it is given). With `cu_seqlens_q` packed, `(total_q, q_heads, head_dim)`. In float16,
        bfloat16 or, on a GPU without tensor cores, float32.
    k_cache, v_cache : array
        Pages, by `layout`, with `value_dim` in place of `head_dim` for `v_cache`:

        - "NHD": `(blocks, page, kv_heads, head_dim)`
        - "HND": `(blocks, kv_heads, page, head_dim)`
        - "x-major": `(blocks, kv_heads, head_dim / x, page, x)`, where x is 16 bytes of elements,
          and `(blocks, kv_heads, value_dim, page)`

        Any page size from 1; outer strides are free, x-major ones of blocks and heads. Without a
        table every sequence has one page, its row of a contiguous cache. On a GPU it takes longer
        where rows, or x-major pages, are not multiples of 16 bytes or do not start on them.
    k, v : array, shape `(batch, new_len, kv_heads, head_dim)`, optional
        New tokens, in the dtype of `q`. With `cu_seqlens_k_new` packed, `(total_k, kv_heads,
        head_dim)`. None may go to a place of another, or to one that a sequence counts already, as
        happens where sequences share a page, or a row by `cache_batch_idx`.
    rotary_cos, rotary_sin : array, shape `(positions, rotary_dim / 2)`, optional
        Turn the first `rotary_dim` columns of `k`, by its position in the sequence, and of `q`: row
        ``i`` by position ``cache_seqlens + i``, or all rows by `cache_seqlens` where there is
        neither a mask, causal or of a tree, nor a window. In the dtype of `q` or in float32, a row
        for each token that a sequence has room for (`max_seqlen_k`). A query past these rows is a
        ValueError where lengths are looked at, and turned by the last row elsewhere.
    cache_seqlens : array, shape `(batch,)`, int32, or int, optional
        Tokens of each sequence, before new ones; required with `block_table` and with `k`. Without
        it a contiguous cache is full. An int makes a new array in every call.
    cache_batch_idx : array, shape `(batch,)`, int32, optional
        Which row of a contiguous cache each sequence has; without it, its own.
    cache_leftpad : array, shape `(batch,)`, int32, optional
        Tokens in front of each sequence in its row of a contiguous cache, NHD or HND, that nobody
        sees. `cache_seqlens`, and positions of rotary tables, count them. Rows of `k_cache` and of
        `v_cache` are then as many tokens apart, a whole number.
    block_table : array, shape `(batch, max_blocks)`, int32, optional
        The pages of each sequence. Entries past its last page may hold anything.
    kv_indptr, kv_indices, kv_last_page_len : array, int32, optional
        In place of `block_table` and `cache_seqlens`: the pages of sequence ``b`` are ``kv_indices[
        kv_indptr[b]:kv_indptr[b + 1]]``, all full but the last, which holds ``kv_last_page_len[b]``
        tokens. They count tokens that are new, which `reshape_and_cache_flash` stores before the
        call: `k` and `v` are not accepted. Give `max_seqlen_k`: without it a sequence may have as
        many keys as all of `kv_indices` together, and the kernel is chosen by that.
    cu_seqlens_q : array, shape `(batch + 1,)`, int32, optional
        First row of each sequence in packed queries, and the end of the last.
    cu_seqlens_k_new : array, shape `(batch + 1,)`, int32, optional
        The same of packed new tokens, of which a sequence then has any number.
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds of the lengths. By default as many as there is room for.
    causal : bool or "bottom_right"
        As in `flash_attn_func`, but "top_left" is refused: the queries are the last tokens.
    rotary_interleaved : bool
        Whether a pair is columns 2 i and 2 i + 1, else i and rotary_dim / 2 + i. False is for calls
        with `rotary_cos`.
    tree_mask : array, bool or uint8, optional
        Which of the last tokens of a sequence see each other, in place of `causal` and of a right
        side of `window_size`, which are refused: shape `(batch, q_len, q_len)`, or for packed
        queries `(total_q, max_seqlen_q)`; row ``i`` sees the ``j``-th of the last `q_len` keys
        where it is not 0, and all keys before them.
    kv_cache_dtype : {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"}
        What the caches hold: the dtype of `q`, or 8-bit values. "auto" takes it from the dtype of
        the caches, also an 8-bit one of ml_dtypes or int8; uint8 needs its word.
    k_descale, v_descale : float, or array of float32
        What multiplies the values of an 8-bit cache, and divides new tokens: an array has the shape
        `()`, `(1,)`, `(kv_heads,)`, or without new tokens `(batch, kv_heads)`. 1.0 for other
        caches; else from 1e-18 to 1e18, which is not looked at in arrays on a GPU (see Notes).
    split_tokens : int
        Cuts sequences in parts of this many tokens, rounded up to a multiple of 64, whatever else
        is in the batch: a row's bits then do not depend on it. 0 balances the batch, but for
        PagedAttention's kernels, whose parts are always the same.
    num_splits : int
        The same said by the number of parts: `split_tokens` such that the longest sequence that
        there is room for (`max_seqlen_k`) has as many, or fewer; 1 leaves all sequences whole.
    return_softmax_lse : bool
        Whether to return `lse` too.
    workspace : array of uint8, optional
        Memory to work in, for whoever allocates all of it: contiguous, from a multiple of 16,
        ``plan.workspace_size`` bytes or more.

    Returns
    -------
    out : array, as `q` with `value_dim` columns
    lse : array, shape `(batch, q_heads, q_len)` or `(q_heads, total_q)`
        Only with `return_softmax_lse`.

    Notes
    -----
    Slots past the length of a sequence never count and may hold NaN. Lengths, pages,
    places of new tokens, slopes, sinks and scales are looked at where they lie in NumPy arrays, and
    a ValueError names the index at fault; on a GPU only with ``RAWATTN_CHECK=1``.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> k_cache, v_cache = np.zeros((2, 5, 16, 2, 64), np.float32)  # 5 pages of 16 tokens
    >>> table, lengths = np.array([[3, 1]], np.int32), np.array([15], np.int32)
    >>> q, k, v = np.ones((1, 2, 4, 64), "f"), *np.ones((2, 1, 2, 2, 64), np.float32)
    >>> out = rawattn.flash_attn_with_kvcache(
    ...     q, k_cache, v_cache, k, v, cache_seqlens=lengths, block_table=table, causal=True
    ... )
    >>> out.shape, bool((k_cache[3, 15] == 1).all()), bool((k_cache[1, 0] == 1).all())
    ((1, 2, 4, 64), True, True)
    """
    k_scale, k_number = array_or_number(k_descale)
    v_scale, v_number = array_or_number(v_descale)
    if isinstance(cache_seqlens, (int, np.integer)) and not isinstance(cache_seqlens, bool):
        cache_seqlens = equal_lengths(q, cu_seqlens_q, int(cache_seqlens))
    # fmt: off
    arrays = (  # as PagedArrays has them
        q, k_cache, v_cache, out, lse, block_table, cache_seqlens,
        kv_indptr, kv_indices, kv_last_page_len, cu_seqlens_q, alibi_slopes, sink,
        k_scale, v_scale, tree_mask, None, None, None,
        k, v, rotary_cos, rotary_sin, cache_batch_idx, workspace, cu_seqlens_k_new, cache_leftpad,
    )
    options = (  # as PagedOptions has them
        softmax_scale, causal, window_size, softcap, return_softmax_lse, dtype, backend, layout,
        kv_cache_dtype, k_number, v_number, max_seqlen_q, max_seqlen_k, split_tokens,
        num_splits, rotary_interleaved,
    )
    # fmt: on
    return call(WITH_KVCACHE, arrays, options, plan, stream)


def reshape_and_cache(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    *,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
) -> None:
    """Stores tokens in the slots of an x-major cache, as vLLM's operator of that name.

    Parameters
    ----------
    key : array, shape `(tokens, kv_heads, head_dim)`
        New keys, in float16, bfloat16 or float32.
    value : array, shape `(tokens, kv_heads, value_dim)`
        New values.
    key_cache : array, shape `(blocks, kv_heads, head_dim / x, page, x)`
        Where keys go; x is 16 bytes of elements.
    value_cache : array, shape `(blocks, kv_heads, value_dim, page)`
        Where values go.
    slot_mapping : array, shape `(tokens,)` or fewer, int64
        Token ``t`` goes to place ``slot % page`` of block ``slot // page``. Tokens with a negative
        slot, and those past the end of the mapping, are not stored. A slot past the end of the
        cache is a ValueError in NumPy arrays, and its token not stored on a GPU. No slot may be
        named twice, which is checked where lengths are.
    kv_cache_dtype : {"auto", "fp8", "fp8_e4m3", "fp8_e5m2", "int8"}
        What the caches hold: the dtype of `key`, or 8-bit values, ``x / scale`` rounded to nearest
        and saturated; int8, which has no NaN, holds -128 for it. "auto" takes it from the dtype of
        the caches, also an 8-bit one of ml_dtypes or int8; uint8 needs its word.
    k_scale, v_scale : float, or array of float32, shape `()`, `(1,)` or `(kv_heads,)`
        1.0 where the cache holds the dtype of `key`; else from 1e-18 to 1e18, which is looked at in
        arrays where lengths are: on a GPU only with ``RAWATTN_CHECK=1``.
    dtype, stream, backend, plan
        As in `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> key, value = np.ones((3, 2, 16), np.float32), np.ones((3, 2, 16), np.float32)
    >>> key_cache, value_cache = np.zeros((5, 2, 4, 8, 4), np.float32), np.zeros((5, 2, 16, 8), "f")
    >>> rawattn.reshape_and_cache(key, value, key_cache, value_cache, np.array([17, -1, 0]))
    >>> value_cache.sum(axis=(1, 2)).nonzero()  # slots 0 and 2 * 8 + 1
    (array([0, 2]), array([0, 1]))
    """
    return _reshape_and_cache(
        (key, value, key_cache, value_cache, slot_mapping),
        ("x-major", kv_cache_dtype, k_scale, v_scale, dtype, backend),
        plan,
        stream,
    )


def reshape_and_cache_flash(
    key: Any,
    value: Any,
    key_cache: Any,
    value_cache: Any,
    slot_mapping: Any,
    kv_cache_dtype: str = "auto",
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    *,
    layout: str = "NHD",
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
) -> None:
    """Stores tokens in the slots of a cache whose rows are whole, as vLLM's operator of that name.

    Arguments and errors that are not described here are those of `reshape_and_cache`.

    Parameters
    ----------
    key_cache, value_cache : array
        Where keys and values go, by `layout`.
    layout : {"NHD", "HND", "x-major"}
        `(blocks, page, kv_heads, head_dim)`, `(blocks, kv_heads, page, head_dim)`, or as in
        `reshape_and_cache`.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> key, value = np.ones((3, 2, 16), np.float32), np.ones((3, 2, 16), np.float32)
    >>> key_cache, value_cache = np.zeros((2, 5, 8, 2, 16), np.float32)
    >>> rawattn.reshape_and_cache_flash(key, value, key_cache, value_cache, np.array([17, -1, 0]))
    >>> key_cache.sum(axis=(2, 3)).nonzero()  # slots 0 and 2 * 8 + 1
    (array([0, 2]), array([0, 1]))
    """
    return _reshape_and_cache(
        (key, value, key_cache, value_cache, slot_mapping),
        (layout, kv_cache_dtype, k_scale, v_scale, dtype, backend),
        plan,
        stream,
    )


def _reshape_and_cache(
    arrays: tuple[Any, Any, Any, Any, Any],
    options: tuple[Any, ...],
    plan: PlanArgument,
    stream: Any,
) -> None:
    layout, kv_cache_dtype, k_scale, v_scale, dtype, backend = options
    k_array, k_number = array_or_number(k_scale)
    v_array, v_number = array_or_number(v_scale)
    given = WriteArrays(*arrays, k_scale=k_array, v_scale=v_array)
    chosen = WriteOptions(layout, kv_cache_dtype, k_number, v_number, dtype, backend)
    return call(RESHAPE_AND_CACHE, given, chosen, plan, stream)


def copy_blocks(
    key_caches: Sequence[Any],
    value_caches: Sequence[Any],
    block_mapping: Any,
    *,
    stream: Any = None,
    backend: str | None = None,
    plan: PlanArgument = None,
) -> None:
    """Copies blocks to other blocks, in the caches of every layer.

    Parameters
    ----------
    key_caches, value_caches : sequences of arrays, one a layer
        Caches of any layout, dtype and number of blocks, which may differ from one to another; all
        are NumPy arrays, or all lie on one GPU. Blocks are their first axis, and contiguous.
    block_mapping : array, shape `(pairs, 2)`, int64
        Source and destination of each copy. No destination may be another pair's source or
        destination. In NumPy arrays every cache has to have these blocks; on a GPU a cache skips
        pairs with blocks that it lacks.
    stream, backend, plan
        As in `flash_attn_func`.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> cache = np.arange(5.0, dtype=np.float32)[:, None, None, None] * np.ones((5, 2, 2, 4), "f")
    >>> rawattn.copy_blocks([cache], [], np.array([[4, 0]]))
    >>> cache[:, 0, 0, 0].tolist()
    [4.0, 1.0, 2.0, 3.0, 4.0]
    """
    given = {"key_caches": key_caches, "value_caches": value_caches}
    for name, found in given.items():
        if not isinstance(found, Sequence):
            kind = type(found).__qualname__
            raise TypeError(f"{name} is a {kind}: accepted are lists and tuples of arrays")
    caches = (*key_caches, *value_caches)
    names = tuple(f"{name}[{n}]" for name, found in given.items() for n in range(len(found)))
    options = copy_call.CopyOptions(backend)
    return call(copy_call.operation(names), (block_mapping, *caches), options, plan, stream)
