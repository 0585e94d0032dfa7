# SPDX-License-Identifier: Apache-2.0
"""Flags -> the request that a call over such a cache would be."""

from __future__ import annotations

from argparse import Namespace

from rawattn.arrays import DTYPES, Spec, contiguous, dtype_name
from rawattn.cache_request import CACHE_DTYPES, cache_choice
from rawattn.cli.flags import k_len
from rawattn.paged_call import Request, accepted
from rawattn.paged_problem import cache_shapes
from rawattn.paged_request import FIELDS, WORDS, PagedArrays, PagedOptions, plain
from rawattn.problem import CacheLayout


def request(args: Namespace) -> Request:
    """The call with contiguous arrays; raises what `flash_attn_with_kvcache` raises."""
    return accepted(FIELDS, False, *arguments(args))


def arguments(args: Namespace) -> tuple[PagedArrays, PagedOptions]:
    """Of the call, with a `--prefix` of `cascade_attention`: its arrays and its options."""
    dtype, heads = dtype_name("dtype", args.dtype), _kv_heads(args)
    k_cache, v_cache = caches(args, room=max(1, args.batch * _blocks(args)))
    rows = (args.batch * args.q_len,) if args.varlen else (args.batch, args.q_len)
    per_head = contiguous((args.heads,), "float32", None)
    specs = PagedArrays(
        q=contiguous((*rows, args.heads, args.head_dim), dtype, None),
        k_cache=k_cache,
        v_cache=v_cache,
        cu_seqlens_q=contiguous((args.batch + 1,), "int32", None) if args.varlen else None,
        alibi_slopes=per_head if args.alibi else None,
        sink=per_head if args.sink else None,
        tree_mask=contiguous((*rows, args.q_len), "bool", None) if args.tree else None,
        **_table(args),
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
        common_prefix_len=args.prefix or 0,
    )
    return specs, plain(WORDS, options)


def caches(args: Namespace, room: int) -> tuple[Spec, Spec]:
    """Caches of keys and of values, with room for so many pages."""
    stored = CACHE_DTYPES.get(cache_choice(args.cache_dtype), dtype_name("dtype", args.dtype))
    x = 16 // DTYPES[stored].itemsize
    if args.cache == "x-major" and args.head_dim % x:
        raise ValueError(
            f"head_dim={args.head_dim}: accepted in x-major caches are multiples of {x}"
        )
    shapes = cache_shapes(
        CacheLayout(args.cache),
        stored,
        blocks=room,
        page=_page(args),
        kv_heads=_kv_heads(args),
        head_dim=args.head_dim,
        value_dim=_value_dim(args),
    )
    k_cache, v_cache = (contiguous(shape, stored, None) for shape in shapes)
    return k_cache, v_cache


def _kv_heads(args: Namespace) -> int:
    return int(args.heads if args.kv_heads is None else args.kv_heads)


def _value_dim(args: Namespace) -> int:
    return int(args.head_dim if args.value_dim is None else args.value_dim)


def _page(args: Namespace) -> int:
    """Tokens a page; of sequences with padding in front, which have no pages, their row."""
    return max(1, k_len(args)) if args.leftpad else int(args.page)


def _blocks(args: Namespace) -> int:
    """Pages of a sequence."""
    return 1 if args.leftpad else -(-k_len(args) // args.page)


def _table(args: Namespace) -> dict[str, Spec]:
    """What says where the keys of a sequence are."""

    def table(*shape: int) -> Spec:
        return contiguous(shape, "int32", None)

    if args.csr:
        return {
            "kv_indptr": table(args.batch + 1),
            "kv_indices": table(args.batch * _blocks(args)),
            "kv_last_page_len": table(args.batch),
        }
    where = "leftpad" if args.leftpad else "block_table"
    shape = (args.batch,) if args.leftpad else (args.batch, _blocks(args))
    return {"seqused_k": table(args.batch), where: table(*shape)}


def _new_tokens(
    args: Namespace, rows: tuple[int, ...], kv_heads: int, dtype: str
) -> dict[str, Spec]:
    """Arrays of the tokens that ``--append`` stores, one for each query, and rotary tables."""
    if not args.append:
        return {}
    sizes = args.head_dim, _value_dim(args)
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
