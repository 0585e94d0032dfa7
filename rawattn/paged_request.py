# SPDX-License-Identifier: Apache-2.0
"""The arguments of attention over a paged cache: what is accepted, and the PagedProblem they state.

As in `request`: it reads specs and options, never addresses; `check_tables` alone looks at what
arrays hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from rawattn.arrays import DTYPES, FLOATS, Spec, check_layout, dtype_name
from rawattn.cache_request import (
    Cache,
    cache_choice,
    cache_of,
    check_block_sparse,
    check_cache_scale,
    choice,
    copy_width,
    natural,
    scale_of,
    tensor_maps,
)
from rawattn.paged_problem import PARTITION, PagedProblem, PageTable
from rawattn.problem import (
    MAX_LENGTH,
    CacheLayout,
    Mask,
    Rows,
    Scores,
    check_backend,
    check_causal,
    check_scalar,
    check_window,
)
from rawattn.request import bound, check_one_device, expect, flag, python_bool, result_shapes
from rawattn.softcap import extreme


class PagedArrays(NamedTuple):
    """For each array argument the argument itself, its `View`, or its `Spec`; None where absent.

    The names are those of `PagedParams`; `names` of an operation are those that callers know.
    """

    q: Any
    k_cache: Any
    v_cache: Any
    out: Any = None
    lse: Any = None
    block_table: Any = None
    seqused_k: Any = None
    kv_indptr: Any = None
    kv_indices: Any = None
    kv_last_page_len: Any = None
    cu_seqlens_q: Any = None
    alibi_slopes: Any = None
    sink: Any = None
    k_scale: Any = None
    v_scale: Any = None
    tree_mask: Any = None
    exp_sum: Any = None  # what paged_attention_v2 works in
    max_logits: Any = None
    tmp_out: Any = None
    k: Any = None  # new tokens, which join the cache first
    v: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_batch_idx: Any = None
    workspace: Any = None
    cu_seqlens_new: Any = None  # of packed new tokens
    leftpad: Any = None


FIELDS = PagedArrays(*PagedArrays._fields)


class PagedOptions(NamedTuple):
    """The arguments that are no arrays."""

    softmax_scale: float | None = None
    causal: bool | str = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    return_lse: bool = False
    dtype: Any = None
    backend: str | None = None
    layout: str = "NHD"
    kv_cache_dtype: str = "auto"
    k_scale: float = 1.0  # where it is no array
    v_scale: float = 1.0
    max_seqlen_q: int | None = None
    max_seqlen_k: int | None = None
    split_tokens: int = 0
    num_splits: int = 0
    rotary_interleaved: bool = True
    block_sparse: Any = None  # the fields of a BlockSparse
    num_kv_heads: int | None = None  # what the caller says of the cache
    block_size: int | None = None
    common_prefix_len: int = 0  # of cascade_attention


# The options as a caller knows them.
WORDS: Any = PagedOptions._make(PagedOptions._fields)


def plain(words: Any, o: PagedOptions, *, stated: Sequence[str] = ()) -> PagedOptions:
    """The options in one type each, so that equal ones are accepted or refused alike.

    `words` are the names that the caller knows, `stated` the numbers that no call leaves to us.
    TypeError for other kinds of values; ValueError for numbers that are not accepted.
    """
    for name in stated:
        if getattr(o, name) is None:
            raise TypeError(f"{getattr(words, name)} is None: accepted is a number")
    scale = o.softmax_scale
    return PagedOptions(
        softmax_scale=None if scale is None else check_scalar(words.softmax_scale, scale),
        causal=_check_causal(o.causal),
        window_size=check_window(o.window_size),
        softcap=check_scalar("softcap", o.softcap, positive=True),
        return_lse=flag(words.return_lse, o.return_lse),
        dtype=None if o.dtype is None else dtype_name("dtype", o.dtype),
        backend=check_backend(o.backend),
        layout=choice("layout", o.layout, [layout.value for layout in CacheLayout]),
        kv_cache_dtype=cache_choice(o.kv_cache_dtype),
        k_scale=check_cache_scale(words.k_scale, o.k_scale),
        v_scale=check_cache_scale(words.v_scale, o.v_scale),
        max_seqlen_q=natural("max_seqlen_q", o.max_seqlen_q),
        max_seqlen_k=natural(words.max_seqlen_k, o.max_seqlen_k),
        split_tokens=natural("split_tokens", o.split_tokens) or 0,
        num_splits=natural("num_splits", o.num_splits) or 0,
        rotary_interleaved=flag("rotary_interleaved", o.rotary_interleaved),
        block_sparse=check_block_sparse(o.block_sparse),
        num_kv_heads=natural("num_kv_heads", o.num_kv_heads),
        block_size=natural("block_size", o.block_size),
        common_prefix_len=natural("common_prefix_len", o.common_prefix_len) or 0,
    )


def _check_causal(causal: Any) -> bool | str:
    """As in dense attention, but for the diagonal that starts at the first key."""
    found = check_causal(python_bool(causal))
    if found == "top_left":
        raise ValueError(
            "causal='top_left': the queries are the last tokens of their sequences; accepted are "
            "False, True and 'bottom_right'"
        )
    return found


# ---- the problem ---------------------------------------------------------------------------------


def problem_of(
    names: PagedArrays, specs: PagedArrays, options: PagedOptions
) -> tuple[PagedProblem, Cache]:
    """The problem of a call whose arguments are all accepted, and its cache.

    Raises TypeError for dtypes and kinds of arrays, ValueError for everything else.
    """
    check_one_device(names, specs)
    q, cache = specs.q, _cache(names, specs, options)
    _check_stated(names, specs, options, cache)
    batch, max_q, q_rows = _queries(names, specs, options, cache)
    table, max_k = _table(names, specs, options, batch, cache)
    q_heads = q.shape[-2]
    _check_scores(names, specs, batch, q_heads)
    shapes = result_shapes(q.shape, cache.value_dim)
    expect(names.out, specs.out, shapes[0], q.dtype)
    expect(names.lse, specs.lse, shapes[1], "float32")
    scales = [
        scale_of(getattr(names, name), getattr(specs, name), getattr(options, name), cache, batch)
        for name in ("k_scale", "v_scale")
    ]
    _check_layouts(names, specs)
    mask = Mask.of(options.causal, options.window_size)
    problem = PagedProblem(
        dtype=q.dtype,
        cache_dtype=cache.dtype,
        batch=batch,
        q_heads=q_heads,
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        value_dim=cache.value_dim,
        max_q=max_q,
        max_k=max_k,
        page=cache.page,
        layout=cache.layout,
        table=table,
        q_rows=q_rows,
        mask=mask.within(max(max_q, max_k)),
        scores=_scores(specs, options),
        tree=specs.tree_mask is not None,
        leftpad=specs.leftpad is not None,
        block_sparse=options.block_sparse is not None,
        k_scale=scales[0],
        v_scale=scales[1],
        split=_split(options, max_k),
        copy_bytes=copy_width(
            cache,
            (specs.k_cache, specs.v_cache),
            (q, specs.out or _row_like(q, cache.value_dim)),
        ),
        packed_q=q.shape[0] if q_rows is Rows.PACKED else 0,
        tma=tensor_maps(cache, (q, specs.out), (specs.k_cache, specs.v_cache)),
        own_positions=specs.rotary_cos is not None
        and not (mask.trivial and specs.tree_mask is None),
    )
    _check_scratch(names, specs, problem)
    return problem, cache


def _split(options: PagedOptions, max_k: int) -> int:
    """Tokens of a part: as many parts as `num_splits` says, or fewer."""
    if options.num_splits and options.split_tokens:
        raise ValueError(
            f"num_splits={options.num_splits} and split_tokens={options.split_tokens}: accepted is "
            "one of them"
        )
    return -(-max_k // options.num_splits) if options.num_splits else options.split_tokens


def _cache(names: PagedArrays, specs: PagedArrays, options: PagedOptions) -> Cache:
    q, layout = specs.q, CacheLayout(options.layout)
    if q.dtype not in FLOATS:
        raise TypeError(f"{names.q} has dtype {q.dtype}: accepted are {', '.join(FLOATS)}")
    pair = names.k_cache, names.v_cache
    return cache_of(pair, specs.k_cache, specs.v_cache, layout, q.dtype, options.kv_cache_dtype)


def _scores(specs: PagedArrays, options: PagedOptions) -> Scores:
    scale = options.softmax_scale
    return Scores(
        softcap=options.softcap > 0,
        alibi=specs.alibi_slopes is not None,
        sink=specs.sink is not None,
        reversed=scale is not None and scale <= 0,
        extreme=extreme(scale, specs.q.shape[-1], options.softcap),
    )


def _check_layouts(names: PagedArrays, specs: PagedArrays) -> None:
    outputs = {names.out, names.lse, names.exp_sum, names.max_logits, names.tmp_out}
    for name, spec in zip(names, specs, strict=True):
        if spec is not None and spec.dtype in DTYPES:  # others are refused where one is expected
            check_layout(name, spec, output=name in outputs)


def _row_like(q: Spec, value_dim: int) -> Spec:
    """A row of an output that is new."""
    size = DTYPES[q.dtype].itemsize
    return Spec((1, value_dim), (value_dim * size, size), q.dtype, q.device)


def _check_stated(
    names: PagedArrays, specs: PagedArrays, options: PagedOptions, cache: Cache
) -> None:
    """ValueError where the caller says other sizes than the cache has."""
    for stated, size in (("num_kv_heads", cache.kv_heads), ("block_size", cache.page)):
        value = getattr(options, stated)
        if value not in (None, size):
            raise ValueError(
                f"{stated}={value}, and {names.k_cache} has shape {specs.k_cache.shape}: accepted "
                f"is {size}"
            )
    sparse = options.block_sparse
    if sparse and sparse.block_size % cache.page:
        raise ValueError(
            f"blocksparse_block_size={sparse.block_size}: accepted are multiples of the "
            f"{cache.page} tokens of a page"
        )


def _queries(
    names: PagedArrays, specs: PagedArrays, options: PagedOptions, cache: Cache
) -> tuple[int, int, Rows]:
    """Batch, longest query and row layout."""
    q, table, head_dim = specs.q, specs.cu_seqlens_q, cache.head_dim
    if table is None:
        dense = "batch", "q_len", "q_heads", head_dim
        expect(names.q, q, dense, q.dtype, packed=names.cu_seqlens_q)
        batch, max_q, rows = q.shape[0], q.shape[1], Rows.DENSE
        _check_bound("max_seqlen_q", options.max_seqlen_q, max_q, f"rows of {names.q}")
    else:
        expect(names.q, q, ("total_q", "q_heads", head_dim), q.dtype)
        expect(names.cu_seqlens_q, table, ("batch + 1",), "int32")
        if table.shape == (0,):
            raise ValueError(f"{names.cu_seqlens_q} has shape (0,): accepted is (batch + 1,)")
        batch, rows = table.shape[0] - 1, Rows.PACKED
        max_q = bound("max_seqlen_q", options.max_seqlen_q, q.shape[0])
    q_heads, kv_heads = q.shape[-2], cache.kv_heads
    if q_heads % kv_heads if kv_heads else q_heads:
        raise ValueError(
            f"{names.q} has {q_heads} heads, the cache has {kv_heads}: accepted are multiples of "
            "the latter"
        )
    tree = specs.tree_mask
    if tree is not None:
        for given, accepted, wrong in (
            (f"causal={options.causal!r}", "False", options.causal),
            (f"window_size={options.window_size}", "(left, -1)", options.window_size[1] >= 0),
        ):
            if wrong:
                raise ValueError(
                    f"{given}: with {names.tree_mask}, which says who sees whom on the right side, "
                    f"accepted is {accepted}"
                )
        shape = (batch, max_q, max_q) if table is None else ("total_q", "max_q")
        expect(names.tree_mask, tree, shape, "bool", "uint8")
        if table is not None and (tree.shape[0] != q.shape[0] or tree.shape[1] < max_q):
            raise ValueError(
                f"{names.tree_mask} has shape {tree.shape}: accepted is ({q.shape[0]}, {max_q}) "
                "or wider"
            )
    return batch, max_q, rows


def _check_bound(name: str, value: int | None, length: int, what: str) -> None:
    """ValueError for a bound below a length that every sequence has."""
    if value is not None and value < length:
        raise ValueError(f"{name}={value}: accepted are {length}, the {what}, or more")


def _table(
    names: PagedArrays, specs: PagedArrays, options: PagedOptions, batch: int, cache: Cache
) -> tuple[PageTable, int]:
    """How pages are found, and the most keys of a sequence."""
    csr = (specs.kv_indptr, specs.kv_indices, specs.kv_last_page_len)
    if any(csr):
        others = ("block_table", "seqused_k", "cache_batch_idx")
        if not all(csr) or any(getattr(specs, name) for name in others):
            known = (*others, "kv_indptr", "kv_indices", "kv_last_page_len")
            given = [getattr(names, name) for name in known if getattr(specs, name)]
            raise ValueError(
                f"found {', '.join(given)}: accepted are kv_indptr, kv_indices and "
                f"kv_last_page_len together, or {names.block_table} and {names.seqused_k}"
            )
        expect(names.kv_indptr, specs.kv_indptr, (batch + 1,), "int32")
        expect(names.kv_indices, specs.kv_indices, ("pages",), "int32")
        expect(names.kv_last_page_len, specs.kv_last_page_len, (batch,), "int32")
        table, blocks = PageTable.CSR, specs.kv_indices.shape[0]
    else:
        expect(names.block_table, specs.block_table, (batch, "max_blocks"), "int32")
        expect(names.seqused_k, specs.seqused_k, (batch,), "int32")
        expect(names.cache_batch_idx, specs.cache_batch_idx, (batch,), "int32")
        expect(names.leftpad, specs.leftpad, (batch,), "int32")
        table, blocks = PageTable.DENSE, 1
        if specs.block_table is None:
            _check_contiguous(names, specs, batch, cache)
            if specs.seqused_k is None:
                what = f"rows of {names.k_cache}, which without {names.seqused_k} is full"
                _check_bound("max_seqlen_k", options.max_seqlen_k, cache.page, what)
        elif specs.seqused_k is None:
            raise ValueError(
                f"{names.seqused_k} is None: with {names.block_table} accepted is an "
                "int32 array of shape (batch,)"
            )
        elif specs.cache_batch_idx is not None:
            raise ValueError(f"{names.cache_batch_idx}: with {names.block_table} accepted is None")
        else:  # a cache of no blocks has no keys: kernels read ahead where there may be some
            blocks = specs.block_table.shape[1] if cache.blocks else 0
    max_k = bound("max_seqlen_k", options.max_seqlen_k, blocks * cache.page)
    # Where there is room for more than a sequence may have, a caller who asks for it is refused.
    return table, max_k if options.max_seqlen_k is not None else min(max_k, MAX_LENGTH)


def _check_contiguous(names: PagedArrays, specs: PagedArrays, batch: int, cache: Cache) -> None:
    """A cache without a table has a row for each sequence, or `cache_batch_idx` names them."""
    if specs.cache_batch_idx is None and cache.blocks != batch:
        raise ValueError(
            f"{names.k_cache} has shape {specs.k_cache.shape} and {names.q} a batch of {batch}: "
            f"without {names.block_table} and {names.cache_batch_idx} accepted are as many rows"
        )


def _check_scores(names: PagedArrays, specs: PagedArrays, batch: int, q_heads: int) -> None:
    slopes = specs.alibi_slopes
    per_batch = slopes is not None and len(slopes.shape) == 2
    expect(names.alibi_slopes, slopes, (batch, q_heads) if per_batch else (q_heads,), "float32")
    expect(names.sink, specs.sink, (q_heads,), "float32")


def _check_scratch(names: PagedArrays, specs: PagedArrays, problem: PagedProblem) -> None:
    """What PagedAttention v2 works in: room for each part of a sequence."""
    parts = -(-problem.max_k // PARTITION)
    for name, tail, dtype in (
        ("exp_sum", (), "float32"),
        ("max_logits", (), "float32"),
        ("tmp_out", (problem.value_dim,), problem.dtype),
    ):
        spec, argument = getattr(specs, name), getattr(names, name)
        expect(argument, spec, (problem.batch, problem.q_heads, "parts", *tail), dtype)
        if spec is not None and spec.shape[2] < parts:
            raise ValueError(
                f"{argument} has shape {spec.shape}: accepted are {parts} parts or more, of "
                f"{PARTITION} tokens each"
            )
