# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/paged_v1.cu``."""

from __future__ import annotations

from collections.abc import Iterator

from rawattn.cache_configs import PagedV1
from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan.base import FLOATS, MAX_GRID, TYPES, Launch, refuses_device
from rawattn.problem import MAX_LENGTH, Rows

HEAD_DIMS = (128, 256)


def config(p: PagedProblem) -> PagedV1:
    """The Config for a problem that `refuses` does not refuse."""
    size = max(p.head_dim, p.value_dim)
    head_dim = next((d for d in HEAD_DIMS if size <= d), HEAD_DIMS[-1])
    return PagedV1(cache=TYPES[p.cache_dtype], head_dim=head_dim)


def configs(arch: str) -> Iterator[PagedV1]:
    """Every Config that `launches` can choose."""
    for cache in TYPES.values():
        for head_dim in HEAD_DIMS:
            yield PagedV1(cache=cache, head_dim=head_dim)


def refuses(p: PagedProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("paged_v1", device):
        return reason
    if p.q_rows not in (Rows.DENSE, Rows.PACKED):
        return f"{p.q_rows.value} queries: takes dense and packed ones"
    if p.block_sparse and (p.max_q > 1 or p.q_rows is not Rows.DENSE or p.tree):
        return "block-sparse attention: takes one query a sequence, in a dense batch"
    if p.mask.top_left and not p.mask.trivial:
        return "a mask aligned to the top left: takes the bottom right"
    if p.dtype not in FLOATS or (p.quantized and p.dtype == "float32"):
        return f"{p.dtype} over a cache of {p.cache_dtype}: takes 8-bit ones with 16-bit queries"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    if p.batch * p.max_q * p.q_heads * column_blocks(p) > MAX_GRID:
        return f"{p.batch} x {p.max_q} x {p.q_heads} rows: takes up to {MAX_GRID}"
    return None


def column_blocks(p: PagedProblem) -> int:
    """Blocks that share the columns of a row of out."""
    return -(-p.value_dim // config(p).head_dim)


def launches(p: PagedProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a block a (sequence, query, query head), and block of columns."""
    blocks = column_blocks(p)
    return (
        Launch(
            kernel="paged_v1",
            config=config(p),
            grid=p.batch * p.max_q * p.q_heads * blocks,
            scalars=(("column_blocks", blocks), ("queries", p.max_q)),
        ),
    )
