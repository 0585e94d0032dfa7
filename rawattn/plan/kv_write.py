# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/kv_write.cu``: storing tokens, turning queries, measuring sequences, copying
blocks.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from rawattn.cache_configs import CopyBlocks, KvWrite, Rotary, Sequences
from rawattn.cache_problem import (
    CopyBlocksProblem,
    KvWriteProblem,
    RotaryProblem,
    SequencesProblem,
)
from rawattn.device import Device
from rawattn.paged_problem import ITEMSIZES
from rawattn.plan.base import (
    EIGHT_BIT,
    FLOATS,
    MAX_GRID,
    REFERENCE,
    Backend,
    Launch,
    Plan,
    choose,
    refuses_device,
)
from rawattn.problem import CacheLayout

UNITS = {16: "uint4", 4: "unsigned", 1: "unsigned char"}
ITEMS = 256  # pieces of rows a block: one a thread
# Tokens side by side: neighbours in a page of values fill the 32 bytes that memory moves.
X_MAJOR_TOKENS = 16
TURNS = 8  # tokens a thread, at most: with 4 it takes up to 10 % longer (cache-kernels.csv)
BLOCKS_PER_SM = 4  # at least, where there are as many tokens
COPY_BYTES = 1 << 16  # of a block of the cache, which one thread block copies


# ---- kv_write ------------------------------------------------------------------------------------


def configs(arch: str) -> Iterator[KvWrite]:
    """Every Config that `launches` can choose."""
    for element in FLOATS.values():
        for cache in (element, *EIGHT_BIT.values()):
            for rotary in (False, True):
                yield KvWrite(element=element, cache=cache, rotary=rotary)


def refuses(p: KvWriteProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("kv_write", device):
        return reason
    if p.dtype not in FLOATS:
        return f"dtype {p.dtype}: takes {', '.join(FLOATS)}"
    if p.cache_dtype not in (p.dtype, *EIGHT_BIT):
        return f"a cache of {p.cache_dtype}: takes {', '.join((p.dtype, *EIGHT_BIT))}"
    return None if p.empty else _refuses_grid(launches(p, device))


def launches(p: KvWriteProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a block for a few tokens, and, where one does not hold them, part of a row."""
    element = FLOATS[p.dtype]
    config = KvWrite(element=element, cache=EIGHT_BIT.get(p.cache_dtype, element), rotary=p.rotary)
    chunk = 16 // ITEMSIZES[p.cache_dtype]
    shares = p.kv_heads * (-(-p.head_dim // chunk) - (-p.value_dim // chunk))
    x_major = p.layout is CacheLayout.X_MAJOR
    lanes = X_MAJOR_TOKENS if x_major else max(1, config.threads // shares)
    lanes = min(lanes, p.tokens, config.max_tokens)
    share_blocks = -(-shares // (config.threads // lanes))
    # As many tokens as are under way at once, but no fewer blocks than fill the device.
    turns = p.tokens * share_blocks // (lanes * BLOCKS_PER_SM * max(1, device.sms))
    tokens = lanes * max(1, min(turns, TURNS, config.max_tokens // lanes))
    return (
        Launch(
            kernel="kv_write",
            config=config,
            grid=-(-p.tokens // tokens) * share_blocks,
            scalars=(
                ("block_tokens", tokens),
                ("share_blocks", share_blocks),
                ("token_lanes", lanes),
                ("tokens_first", int(x_major)),
            ),
        ),
    )


# ---- rotary --------------------------------------------------------------------------------------


def rotary_configs(arch: str) -> Iterator[Rotary]:
    """Every Config that `rotary_launches` can choose."""
    for element in FLOATS.values():
        yield Rotary(element=element)


def refuses_rotary(p: RotaryProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("rotary", device):
        return reason
    if p.dtype not in FLOATS:
        return f"dtype {p.dtype}: takes {', '.join(FLOATS)}"
    return None if p.empty else _refuses_grid(rotary_launches(p, device))


def rotary_launches(p: RotaryProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a block for each few tokens."""
    pieces = -(-p.head_dim // (16 // ITEMSIZES[p.dtype]))
    tokens = max(1, ITEMS // (p.heads * pieces))
    return (
        Launch(
            kernel="rotary",
            config=Rotary(element=FLOATS[p.dtype]),
            grid=-(-p.tokens // tokens),
            scalars=(("block_tokens", tokens),),
        ),
    )


# ---- sequences -----------------------------------------------------------------------------------


def sequences_configs(arch: str) -> Iterator[Sequences]:
    """The only Config."""
    yield Sequences()


def refuses_sequences(p: SequencesProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    return refuses_device("sequences", device)


def sequences_launches(p: SequencesProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a thread a sequence."""
    config = Sequences()
    return (Launch(kernel="sequences", config=config, grid=-(-p.batch // config.threads)),)


# ---- copy_blocks ---------------------------------------------------------------------------------


def copy_configs(arch: str) -> Iterator[CopyBlocks]:
    """Every Config that `copy_launches` can choose."""
    for unit in UNITS.values():
        yield CopyBlocks(unit=unit)


def refuses_copy(p: CopyBlocksProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("copy_blocks", device):
        return reason
    return None if p.empty else _refuses_grid(copy_launches(p, device))


def copy_launches(p: CopyBlocksProblem, device: Device) -> tuple[Launch, ...]:
    """One launch: a thread block, or several, for each pair in each cache."""
    chunks = -(-p.block_bytes // COPY_BYTES)
    return (
        Launch(
            kernel="copy_blocks",
            config=CopyBlocks(unit=UNITS[p.copy_bytes]),
            grid=p.pairs * p.caches * chunks,
            scalars=(("chunks", chunks),),
        ),
    )


# ---- all of them ---------------------------------------------------------------------------------


def _refuses_grid(found: tuple[Launch, ...]) -> str | None:
    (launch,) = found
    if launch.grid > MAX_GRID:
        return f"a grid of {launch.grid} blocks: takes up to {MAX_GRID}"
    return None


BACKENDS: dict[type, tuple[Backend, ...]] = {
    KvWriteProblem: (
        Backend(name="kv_write", refuses=refuses, launches=launches),
        REFERENCE,
    ),
    RotaryProblem: (
        Backend(name="rotary", refuses=refuses_rotary, launches=rotary_launches),
        REFERENCE,
    ),
    SequencesProblem: (
        Backend(name="sequences", refuses=refuses_sequences, launches=sequences_launches),
        REFERENCE,
    ),
    CopyBlocksProblem: (
        Backend(name="copy_blocks", refuses=refuses_copy, launches=copy_launches),
        REFERENCE,
    ),
}


@functools.lru_cache(maxsize=4096)
def plan(problem: Any, device: Device, backend: str | None = None) -> Plan:
    """The plan for one of the problems of this module; as `plan.dense.plan` otherwise."""
    return choose(BACKENDS[type(problem)], problem, device, backend)
