# SPDX-License-Identifier: Apache-2.0
"""Flags -> the request that a call over such a cache would be."""

from __future__ import annotations

from argparse import Namespace

from rawattn.arrays import DTYPES, Spec, contiguous, dtype_name
from rawattn.cache_request import CACHE_DTYPES, cache_choice
from rawattn.cli.flags import k_len
from rawattn.paged_call import Request, accepted
from rawattn.paged_request import FIELDS, WORDS, PagedArrays, PagedOptions, plain


def request(args: Namespace) -> Request:
    """The call with contiguous arrays; raises what `flash_attn_with_kvcache` raises."""
    dtype = dtype_name("dtype", args.dtype)
    stored = CACHE_DTYPES.get(cache_choice(args.cache_dtype), dtype)
    heads = args.heads if args.kv_heads is None else args.kv_heads
    sizes = args.head_dim, args.head_dim if args.value_dim is None else args.value_dim
    x = 16 // DTYPES[stored].itemsize
    if args.cache == "x-major" and sizes[0] % x:
        raise ValueError(f"head_dim={sizes[0]}: accepted in x-major caches are multiples of {x}")
    blocks, page = -(-k_len(args) // args.page), args.page
    room = max(1, args.batch * blocks)
    k_shape, v_shape = {
        "NHD": [(room, page, heads, size) for size in sizes],
        "HND": [(room, heads, page, size) for size in sizes],
        "x-major": [(room, heads, sizes[0] // x, page, x), (room, heads, sizes[1], page)],
    }[args.cache]
    rows = (args.batch * args.q_len,) if args.varlen else (args.batch, args.q_len)
    per_head = contiguous((args.heads,), "float32", None)
    starts = contiguous((args.batch + 1,), "int32", None)
    specs = PagedArrays(
        q=contiguous((*rows, args.heads, args.head_dim), dtype, None),
        k_cache=contiguous(k_shape, stored, None),
        v_cache=contiguous(v_shape, stored, None),
        block_table=contiguous((args.batch, blocks), "int32", None),
        seqused_k=contiguous((args.batch,), "int32", None),
        cu_seqlens_q=starts if args.varlen else None,
        alibi_slopes=per_head if args.alibi else None,
        sink=per_head if args.sink else None,
        **_new_tokens(args, rows, heads, dtype),
    )
    options = PagedOptions(
        causal=args.causal,
        window_size=tuple(args.window),
        softcap=args.softcap,
        layout=args.cache,
        kv_cache_dtype=args.cache_dtype,
        max_seqlen_q=args.q_len,
        max_seqlen_k=k_len(args),
        split_tokens=args.split,
        backend=args.backend,
    )
    return accepted(FIELDS, False, specs, plain(WORDS, options))


def _new_tokens(
    args: Namespace, rows: tuple[int, ...], kv_heads: int, dtype: str
) -> dict[str, Spec]:
    """Arrays of the tokens that ``--append`` stores, one for each query, and rotary tables."""
    if not args.append:
        return {}
    sizes = args.head_dim, args.head_dim if args.value_dim is None else args.value_dim
    found = {
        n: contiguous((*rows, kv_heads, s), dtype, None) for n, s in zip("kv", sizes, strict=True)
    }
    if args.varlen:
        found["cu_seqlens_new"] = contiguous((args.batch + 1,), "int32", None)
    if args.rotary is not None:
        if args.rotary % 2 or args.rotary > args.head_dim:
            raise ValueError(
                f"rotary={args.rotary}: accepted are even numbers up to head_dim={args.head_dim}"
            )
        table = contiguous((max(1, k_len(args)), args.rotary // 2), dtype, None)
        found |= {"rotary_cos": table, "rotary_sin": table}
    return found
