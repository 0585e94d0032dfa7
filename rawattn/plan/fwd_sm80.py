# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/fwd_sm80.cu``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rawattn.device import Device
from rawattn.plan.base import ELEMENTS, MAX_GRID, Launch, refuses_device
from rawattn.problem import MAX_LENGTH, Problem
from rawattn.registry import FwdSm80

# (Batch, head) pairs that a sweep over the query blocks covers. Under a causal mask many pairs
# balance long and short blocks (32 instead of one: up to 10 % on an H200); else few keep keys and
# values in L2.
HEAD_GROUP = 16
HEAD_GROUP_CAUSAL = 64


def _prototype(
    head_dim: int,
    value_dim: int,
    block_m: int,
    block_n: int,
    *,
    column_warps: int = 1,
    stages: int = 1,
    q_in_registers: bool = False,
    fragments_ahead: int = 2,
    copy_spread: int = 4,
    vote_rescale: bool = False,
) -> FwdSm80:
    return FwdSm80(
        element="bf16",
        head_dim=head_dim,
        value_dim=value_dim,
        block_m=block_m,
        block_n=block_n,
        warps=4,
        column_warps=column_warps,
        stages=stages,
        q_in_registers=q_in_registers,
        fragments_ahead=fragments_ahead,
        copy_spread=copy_spread,
        vote_rescale=vote_rescale,
        scores=False,
        narrow=False,
        blocks_per_sm=2,
    )


# Head sizes are rounded up to the first tile that holds both. 163 KB of shared memory a block and
# more: A100, H100, B100 and their kin. Measured on an H200 (tools/tune.py).
TILES = (
    _prototype(32, 32, 128, 64, stages=2, q_in_registers=True),
    _prototype(64, 64, 128, 64, stages=2, q_in_registers=True, fragments_ahead=3, copy_spread=3),
    _prototype(96, 96, 128, 64),
    _prototype(128, 128, 128, 64, vote_rescale=True, fragments_ahead=1),
    _prototype(160, 160, 64, 64, column_warps=2),
    _prototype(192, 128, 64, 64, column_warps=2),
    _prototype(192, 192, 64, 32, column_warps=2),
    _prototype(256, 256, 64, 64, column_warps=2),
)
# What changes where score steps are compiled in, which take registers; by value_dim.
SCORES = {128: {"block_n": 32}, 256: {"block_n": 32}}
# What changes on GPUs other than Hopper, where ptxas would spill, and where consumer cards have
# 99 KB of shared memory a block. Not measured: we have none.
ELSEWHERE = {96: {"block_n": 32}, 128: {"block_n": 32}, 256: {"block_n": 32}}


def _config(tile: FwdSm80, arch: str, *, element: str, scores: bool, narrow: bool) -> FwdSm80:
    changes: dict[str, int] = {}
    if scores:
        changes |= SCORES.get(tile.value_dim, {})
    if arch != "sm_90a":
        changes |= ELSEWHERE.get(tile.value_dim, {})
    config = replace(tile, element=element, scores=scores, narrow=narrow)
    return replace(config, **changes)  # type: ignore[arg-type]


def _tile(p: Problem) -> FwdSm80 | None:
    fits = (t for t in TILES if p.head_dim <= t.head_dim and p.value_dim <= t.value_dim)
    return next(fits, None)


def configs(arch: str) -> Iterator[FwdSm80]:
    """Every Config that `launches` can choose on `arch`."""
    for element in ELEMENTS.values():
        for tile in TILES:
            for scores, narrow in ((False, False), (True, False), (True, True)):
                yield _config(tile, arch, element=element, scores=scores, narrow=narrow)


def refuses(p: Problem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("fwd_sm80", device):
        return reason
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    if _tile(p) is None:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to 256"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    (chosen,) = launches(p, device)
    if chosen.grid > MAX_GRID:
        return (
            f"a grid of {chosen.grid} blocks: takes up to {MAX_GRID}; a smaller batch or "
            "max_seqlen_q= may help"
        )
    return None


def launches(p: Problem, device: Device) -> tuple[Launch, ...]:
    """One launch, of the tile that fits."""
    tile = _tile(p)
    assert tile is not None
    config = _config(
        tile,
        device.arch,
        element=ELEMENTS[p.dtype],
        # Narrow copies are slow anyhow: one form of them serves all scores.
        scores=p.scores.softcap or p.scores.alibi or p.scores.reversed or p.copy_bytes < 16,
        narrow=p.copy_bytes < 16,
    )
    return (launch(p, device, config),)


def launch(p: Problem, device: Device, config: FwdSm80) -> Launch:
    """The launch of a Config: a block a query tile of a (batch, head) pair."""
    m_blocks = -(-p.max_q // config.block_m)
    pairs = p.batch * p.q_heads
    return Launch(
        kernel="fwd_sm80",
        config=config,
        grid=m_blocks * pairs,
        scalars=(
            ("m_blocks", m_blocks),
            ("head_group", min(HEAD_GROUP_CAUSAL if p.mask.causal else HEAD_GROUP, pairs)),
        ),
    )
