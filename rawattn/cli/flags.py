# SPDX-License-Identifier: Apache-2.0
"""Flags -> the Problem and the Device that a call with such arrays would have."""

from __future__ import annotations

from argparse import Namespace

from rawattn.arrays import Spec, contiguous, dtype_name
from rawattn.device import DEVICES, Device
from rawattn.problem import Problem
from rawattn.request import Arrays, Options, problem_of


def problem(args: Namespace) -> Problem:
    """The problem of contiguous arrays; raises what the public functions raise."""
    dtype = dtype_name("dtype", args.dtype)
    keys = k_len(args)
    kv_heads = args.heads if args.kv_heads is None else args.kv_heads
    value_dim = args.head_dim if args.value_dim is None else args.value_dim

    def array(length: int, heads: int, dim: int) -> Spec:
        rows = (args.batch * length,) if args.varlen else (args.batch, length)
        return contiguous((*rows, heads, dim), dtype, None)

    starts = contiguous((args.batch + 1,), "int32", None) if args.varlen else None
    per_head = contiguous((args.heads,), "float32", None)
    specs = Arrays(
        q=array(args.q_len, args.heads, args.head_dim),
        k=array(keys, kv_heads, args.head_dim),
        v=array(keys, kv_heads, value_dim),
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        alibi_slopes=per_head if args.alibi else None,
        sink=per_head if args.sink else None,
    )
    options = Options(
        causal=args.causal,
        window_size=tuple(args.window),
        softcap=args.softcap,
        max_seqlen_q=args.q_len,
        max_seqlen_k=keys,
    )
    return problem_of(specs, options)


def k_len(args: Namespace) -> int:
    """Keys of a sequence: ``--k-len``, by default as many as ``--q-len``."""
    return int(args.q_len if args.k_len is None else args.k_len)


def device(args: Namespace, *others: str) -> Device:
    """The device that ``--device`` names.

    ValueError: it is not known. RuntimeError: it is "current", and there is none; the message names
    the GPUs and what the command takes in their place, `others`.
    """
    if args.device != "current":
        return Device.named(args.device)
    try:
        return Device.current()
    except RuntimeError as error:
        known = ", ".join((*others, *DEVICES))
        raise RuntimeError(f"{error}. --device takes another: {known}") from None
