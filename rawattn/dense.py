# SPDX-License-Identifier: Apache-2.0
"""Attention of dense and of packed sequences: the public functions."""

from __future__ import annotations

from typing import Any

from rawattn.forward import Prepared, forward


def flash_attn_func(
    q: Any,
    k: Any,
    v: Any,
    *,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: Prepared | None = None,
) -> Any:
    """Attention of sequences of one length: ``softmax(scale * q @ k.T) @ v`` for every head.

    Parameters
    ----------
    q : array, shape `(batch, q_len, q_heads, head_dim)`
        Queries in float16 or bfloat16, in host memory also in float32: of CuPy, NumPy, or anything
        with DLPack (JAX, PyTorch) or ``__cuda_array_interface__`` (Numba). The last axis is
        contiguous; other strides are free, and read in place.
    k : array, shape `(batch, k_len, kv_heads, head_dim)`
        Keys. `q_heads` is a multiple of `kv_heads`; query head ``h`` reads KV head
        ``h // (q_heads // kv_heads)`` [4]_.
    v : array, shape `(batch, k_len, kv_heads, value_dim)`
        Values.
    softmax_scale : float, optional
        Factor of ``q @ k.T``; ``1 / sqrt(head_dim)`` by default. 0, or of a size from 1e-18 to
        1e18; negative numbers are fine.
    causal : bool or {"bottom_right", "top_left"}
        Whether a row sees no key after its diagonal, which for row ``i`` lies at key
        ``i + k_len - q_len`` (True and "bottom_right"), or at key ``i`` ("top_left", which aligns
        `window_size` as well).
    window_size : (int, int)
        How many keys before and after its diagonal a row sees, besides the one on it; -1 is
        unbounded.
    softcap : float
        ``c > 0``, from 1e-18 to 1e18, turns a score ``s`` into ``c * tanh(s / c)`` [5]_. 0 is
        none.
    alibi_slopes : array, shape `(q_heads,)` or `(batch, q_heads)`, float32, optional
        ``slope * |i + k_len - q_len - j|`` is subtracted from the score of row ``i`` and key ``j``
        [3]_.
    sink : array, shape `(q_heads,)`, float32, optional
        A score that joins the softmax of every row of a head, and has no value [6]_.
    return_lse : bool
        Whether to return `lse` too.
    out : array, shape `(batch, q_len, q_heads, value_dim)`, optional
        Where to write, in the dtype of `q`. It shares no memory with an input or with `lse`.
    lse : array, shape `(batch, q_heads, q_len)`, float32, optional
        Where to write the log-sum-exp of every row.
    dtype : str or dtype, optional
        What the bits of q, k, v and out mean, where they are given as unsigned integers of that
        size: float16, bfloat16 or float32. A new `out` is an array of that type, one that is given
        comes back as it is. It converts nothing: an array of another float type is a TypeError.
    stream : stream, optional
        Where to queue the work: a CuPy stream, an object with ``__cuda_stream__``, or the handle of
        a stream as an integer. By default the current CuPy stream. Returns before the work is done.
    backend : str, optional
        Takes this backend, or fails with its reason. By default ``RAWATTN_BACKEND``, which a
        process reads once, at its first call; else the first that can.
    plan : Prepared, optional
        From `prepare`; the call must be the one that was prepared.

    Returns
    -------
    out : array, shape `(batch, q_len, q_heads, value_dim)`
        `out` where it was given; else a new array in the dtype of `q`, of NumPy for NumPy inputs,
        of CuPy for others.
    lse : array, shape `(batch, q_heads, q_len)`
        Only with `return_lse`: the natural logarithm of the sum of the exponentials of each row's
        scores, float32.

    Raises
    ------
    TypeError
        A kind of object or a dtype that is not accepted, or NumPy and GPU arrays in one call.
    ValueError
        Shapes, strides, devices or values that are not accepted, or an output that shares memory
        with another array.
    Unsupported
        No backend takes the problem; the message has the reasons of all.
    CompileError, RuntimeError
        The kernel does not compile, NVRTC is not there, or no GPU is.

    Notes
    -----
    A row that sees no key gets out 0 and lse -inf (the sink, where there is one): with
    ``k_len == 0`` that is all of them. Where `out` has no element nothing is launched. Scores and
    sums are float32 [1]_ [2]_; the weights are rounded to the dtype of `v` before they meet it.
    Equal calls give equal bits. The same row in another call, with other lengths, another batch or
    another number of queries or heads, may be summed in another order, and differ in its last bits.

    Scores are good up to about 1e8 in magnitude, where float32 has steps of 8. Beyond, and where
    ``q @ k.T`` itself exceeds 3.4e38, no error is raised: a row is then rounded coarsely, or comes
    out as one that sees no key (out 0, lse -inf), or as NaN. Other rows do not notice.

    Memory outside of the sequences is never read and may hold NaN. Values inside a sequence are
    finite: a NaN or an infinity in `v` may also reach rows that do not see its key, as ``0 * NaN``.

    ``RAWATTN_CHECK=1`` checks lengths that live on the GPU, at the price of waiting for it. A
    process reads it once, at its first call.

    Work that DLPack producers and ``__cuda_array_interface__`` streams have queued on the inputs is
    waited for on `stream`. Whoever uses `out` on another stream waits for this one.

    References
    ----------
    .. [1] Dao et al., FlashAttention, arXiv:2205.14135
    .. [2] Dao, FlashAttention-2, arXiv:2307.08691
    .. [3] Press et al., Train Short, Test Long (ALiBi), arXiv:2108.12409
    .. [4] Ainslie et al., GQA, arXiv:2305.13245
    .. [5] Gemma Team, Gemma 2, arXiv:2408.00118
    .. [6] OpenAI, gpt-oss-120b & gpt-oss-20b Model Card, arXiv:2508.10925

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> q = np.random.default_rng(0).normal(size=(1, 5, 4, 64)).astype(np.float32)
    >>> kv = np.ones((1, 7, 2, 64), np.float32)
    >>> out, lse = rawattn.flash_attn_func(q, kv, kv, causal=True, return_lse=True)
    >>> out.shape, lse.shape, bool(np.allclose(out, 1))
    ((1, 5, 4, 64), (1, 4, 5), True)
    """
    arrays = (q, k, v, out, lse, None, None, None, alibi_slopes, sink)
    options = (softmax_scale, causal, window_size, softcap, return_lse, dtype, backend)
    return forward(arrays, options, plan, stream)


def flash_attn_varlen_func(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any = None,
    *,
    seqused_k: Any = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    softmax_scale: float | None = None,
    causal: bool | str = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    sink: Any = None,
    return_lse: bool = False,
    out: Any = None,
    lse: Any = None,
    dtype: Any = None,
    stream: Any = None,
    backend: str | None = None,
    plan: Prepared | None = None,
) -> Any:
    """Attention of sequences of different lengths, packed one behind the other.

    Parameters and errors that are not described here are those of `flash_attn_func`.

    Parameters
    ----------
    q : array, shape `(total_q, q_heads, head_dim)`
        Queries. Sequence ``b`` has rows ``cu_seqlens_q[b]`` to ``cu_seqlens_q[b + 1]``.
    k : array, shape `(total_k, kv_heads, head_dim)` or `(batch, k_len, kv_heads, head_dim)`
        Keys, packed with `cu_seqlens_k`, or padded without.
    v : array, shape `(total_k, kv_heads, value_dim)` or `(batch, k_len, kv_heads, value_dim)`
        Values.
    cu_seqlens_q : array, shape `(batch + 1,)`, int32
        First row of each sequence, and the end of the last. Never decreases; lengths of 0 are fine.
    cu_seqlens_k : array, shape `(batch + 1,)`, int32, optional
        The same for packed keys.
    seqused_k : array, shape `(batch,)`, int32, optional
        How many keys of each sequence count, from its first. What lies behind them is never read.
    max_seqlen_q, max_seqlen_k : int, optional
        Bounds of the lengths: rows past them may not be written. By default as many rows as there
        are, which is always right, and launches blocks that find nothing to do.
    alibi_slopes : array, shape `(q_heads,)` or `(batch, q_heads)`, float32, optional
        As in `flash_attn_func`, with the lengths of each sequence.
    out : array, shape `(total_q, q_heads, value_dim)`, optional
        Where to write. Rows outside of ``[cu_seqlens_q[0], cu_seqlens_q[-1])`` are left as they
        are.
    lse : array, shape `(q_heads, total_q)`, float32, optional
        Where to write the log-sum-exp of every row.

    Returns
    -------
    out : array, shape `(total_q, q_heads, value_dim)`
        New arrays hold anything in rows outside of ``[cu_seqlens_q[0], cu_seqlens_q[-1])``.
    lse : array, shape `(q_heads, total_q)`
        Only with `return_lse`. The same holds.

    Notes
    -----
    Tables of int64 are refused, never misread. Values of NumPy tables are checked, and a ValueError
    names the index at fault; those of tables on the GPU are not looked at, unless
    ``RAWATTN_CHECK=1`` was set at the first call of the process.

    Examples
    --------
    >>> import numpy as np
    >>> import rawattn
    >>> q = k = v = np.ones((5, 2, 16), np.float32)
    >>> starts = np.array([0, 2, 5], np.int32)
    >>> out, lse = rawattn.flash_attn_varlen_func(
    ...     q, k, v, starts, starts, causal=True, return_lse=True
    ... )
    >>> np.exp(lse[0] - lse[0, 0]).round(3).tolist()  # how many keys each row sees
    [1.0, 2.0, 1.0, 2.0, 3.0]
    """
    if cu_seqlens_q is None:
        raise TypeError("cu_seqlens_q is None: accepted is an int32 array of shape (batch + 1,)")
    arrays = (q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    options = (
        softmax_scale,
        causal,
        window_size,
        softcap,
        return_lse,
        dtype,
        backend,
        max_seqlen_q,
        max_seqlen_k,
    )
    return forward(arrays, options, plan, stream)
