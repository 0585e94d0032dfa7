# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/paged_v2.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rawattn.cache_configs import PagedV1
from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import paged_v1
from rawattn.plan.base import MAX_GRID, Launch

# Of a sequence, at most: more are blocks enough for paged_v1, which needs no workspace.
QUERIES = 16


def configs(arch: str) -> Iterator[PagedV1]:
    """Every Config that the first of the `launches` can have."""
    return paged_v1.configs(arch)


def reduce_configs(arch: str) -> Iterator[PagedV1]:
    """Every Config that the second of them can have."""
    return (config for config in configs(arch) if config == _reducing(config))


def _reducing(config: PagedV1) -> PagedV1:
    """What merges the partitions: all 8-bit caches alike, of which it reads nothing."""
    return replace(config, cache="e4m3") if config.cache in ("e5m2", "int8") else config


def _partitions(p: PagedProblem) -> int:
    return -(-p.max_k // paged_v1.config(p).partition)


def _rows(p: PagedProblem) -> int:
    return p.batch * p.max_q * p.q_heads


def refuses(p: PagedProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := paged_v1.refuses(p, device):
        return reason
    if p.max_q > QUERIES:
        return f"{p.max_q} queries a sequence: takes up to {QUERIES}"
    blocks = _rows(p) * _partitions(p) * paged_v1.column_blocks(p)
    if blocks > MAX_GRID:
        return f"a grid of {blocks} blocks: takes up to {MAX_GRID}; max_seq_len= may help"
    return None


def launches(p: PagedProblem, device: Device) -> tuple[Launch, ...]:
    """A block a partition of a (sequence, query, query head), then one for all of them; paged_v1
    alone where there is one partition.
    """
    partitions = _partitions(p)
    if partitions <= 1:
        return paged_v1.launches(p, device)
    config, rows = paged_v1.config(p), _rows(p)
    blocks = paged_v1.column_blocks(p)
    scalars = (("partitions", partitions), ("column_blocks", blocks), ("queries", p.max_q))
    return (
        Launch(
            kernel="paged_v2",
            config=config,
            grid=rows * partitions * blocks,
            scalars=scalars,
            workspace_bytes=4 * rows * partitions * (p.value_dim + 2),
        ),
        Launch(
            kernel="paged_v2_reduce", config=_reducing(config), grid=rows * blocks, scalars=scalars
        ),
    )
