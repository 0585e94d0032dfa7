# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/fwd_sm90.cu`` and ``cuda/fwd_sm90_self.cu``."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from rawattn.device import Device
from rawattn.plan.base import ELEMENTS, Launch, TensorMap, refuses_device
from rawattn.problem import MAX_LENGTH, Problem, Rows
from rawattn.registry import FwdSm90, FwdSm90Self

STATIC, DYNAMIC = 0, 1  # TileOrder of cuda/schedule.cuh
NO_OVERLAP, ALL_ROWS, FIRST_ROW = 0, 1, 2  # Overlap of cuda/fwd_sm90_warpgroup.cuh
MAX_TILES = 2**30  # query tiles: kernels count beyond the last


def _prototype(
    head_dim: int,
    value_dim: int,
    block_n: int,
    *,
    consumers: int = 2,
    stages: int = 2,
    q_buffers: int = 2,
    q_registers: bool = False,
    pingpong: bool = True,
    overlap: int = NO_OVERLAP,
) -> FwdSm90:
    return FwdSm90(
        element="bf16",
        head_dim=head_dim,
        value_dim=value_dim,
        block_n=block_n,
        consumers=consumers,
        stages=stages,
        q_buffers=q_buffers,
        q_registers=q_registers,
        pingpong=pingpong,
        overlap=overlap,
        scores=False,
    )


# Measured on an H200, TFLOP/s in one run (docs/kernels/fwd_sm90.md); the last of a pair is for long
# sequences, and at 256 for all but short ones without a mask. First row alone, 64: 16k full 531
# instead of 542.
D64 = _prototype(64, 64, 128, consumers=3, stages=4, overlap=ALL_ROWS)
D96 = _prototype(96, 96, 128, overlap=FIRST_ROW)
# Causal 16k 598, 128 x 128 547; 4k 550 and 561; more keys spill.
D96_LONG = _prototype(96, 96, 112, consumers=3)
# Q in registers: full 2k 663 instead of 649, causal 16k 656 instead of 647. 160 keys, which leave
# it no room, were best from 2k without: 639.
D128 = _prototype(128, 128, 128, q_registers=True)
# Full 16k: unpinned 716, first row 731, and without turns 759.
D192_128 = _prototype(192, 128, 128, q_buffers=1, overlap=FIRST_ROW)
D192_128_LONG = replace(D192_128, pingpong=False)
D192 = _prototype(192, 192, 112, q_buffers=1)
D256 = _prototype(256, 256, 80, q_buffers=1, overlap=ALL_ROWS)
D256_LONG = replace(D256, pingpong=False)
TILES = (D64, D96, D96_LONG, D128, D192_128, D192_128_LONG, D192, D256, D256_LONG)
SELF = FwdSm90Self(
    element="bf16",
    head_dim=64,
    value_dim=64,
    block_n=128,
    stages=2,
    overlap=NO_OVERLAP,
    scores=False,
    blocks_per_sm=3,
)
# Under a causal mask, tiles of 64 keys waste less of the diagonal, and leave registers for a fourth
# block: 512 286 instead of 258, 2k 424 instead of 427.
SELF_SHORT = replace(SELF, block_n=64, blocks_per_sm=4)
# Keys and values of a wide last sweep: about what L2 holds. 512 359 instead of 351, 2k
# 581 instead of 563; as wide at 4k 580 instead of 590.
WIDE_BYTES = 48 << 20
# Keys a tile, at most, where score steps, which take registers, are compiled in; by consumers.
SCORES_BLOCK_N = {2: 128, 3: 96}


def _ragged(p: Problem) -> bool:
    return p.q_rows is not Rows.DENSE or p.k_rows is not Rows.DENSE


def _full(p: Problem) -> bool:
    """Whether every row sees every key: a window that is wide enough gets the same bits as none."""
    widest = max(p.max_q, p.max_k) - 1
    return all(side < 0 or side >= widest for side in (p.mask.left, p.mask.right))


def _tile(p: Problem) -> FwdSm90 | FwdSm90Self | None:
    """The prototype for a problem; None where heads are too wide."""
    fits = (t for t in TILES if p.head_dim <= t.head_dim and p.value_dim <= t.value_dim)
    tile = next(fits, None)
    # Not by `_full`: lengths may be smaller than their bounds, and a window that is wide enough for
    # them gets the same bits as none, so the same tile.
    causal, long = p.mask.right == 0, max(p.max_q, p.max_k)
    if tile is D64 and causal and long <= 4096:
        return SELF if long > 1024 else SELF_SHORT
    if tile is D64 and (long < 512 or (long <= 1024 and _pads(p, tile))):
        return SELF
    if tile is D96 and long >= (8192 if causal else 4096):
        return D96_LONG
    if tile is D192_128 and long >= 8192:
        return D192_128_LONG
    if tile is D256 and (causal or long >= 2048):
        return D256_LONG
    return tile


def _head_group(p: Problem, config: FwdSm90 | FwdSm90Self) -> int:
    """(Batch, head) pairs that a sweep over the query tiles covers: many balance long and short
    tiles under a causal mask, few keep keys and values in L2.
    """
    if _full(p) and isinstance(config, FwdSm90Self):
        return 16
    if _full(p):
        return 4 if config.head_dim == 128 and p.max_k >= 8192 else 1
    return 64 if config.head_dim == 256 and p.max_k <= 512 else 32


def _last_sweep(p: Problem, head_group: int) -> int:
    """The sequence from which on sweeps cover up to 32: those left when L2 holds their keys and
    values, where that is more than a head group has; their number, where tiles are equal.
    """
    narrow = max(1, min(32, head_group // p.q_heads))
    wide = WIDE_BYTES // (2 * p.max_k * (p.head_dim + p.value_dim) * p.kv_heads)
    if _full(p) or wide <= narrow:
        return p.batch
    return max(0, p.batch - wide) // narrow * narrow


def config_of(tile: FwdSm90 | FwdSm90Self, element: str, scores: bool) -> FwdSm90 | FwdSm90Self:
    """A prototype for a storage type, with or without score steps."""
    config = replace(tile, element=element, scores=scores)
    if scores and isinstance(config, FwdSm90):
        block_n = min(config.block_n, SCORES_BLOCK_N[config.consumers])
        return replace(config, block_n=block_n, q_registers=False)
    return config


def configs(arch: str) -> Iterator[FwdSm90]:
    """Every Config of fwd_sm90 that `launches` can choose on `arch`."""
    forms = itertools.product(TILES, ELEMENTS.values(), (False, True))
    yield from dict.fromkeys(itertools.starmap(config_of, forms))  # type: ignore[misc]


def self_configs(arch: str) -> Iterator[FwdSm90Self]:
    """Every Config of fwd_sm90_self that `launches` can choose on `arch`."""
    for form in itertools.product((SELF, SELF_SHORT), ELEMENTS.values(), (False, True)):
        yield config_of(*form)  # type: ignore[misc]


def refuses(p: Problem, device: Device) -> str | None:
    """Why the kernels do not take a problem; None: one does."""
    if reason := refuses_device("fwd_sm90", device):
        return reason
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    tile = _tile(p)
    if tile is None:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to 256"
    if p.copy_bytes < 16 or not p.tma:
        return "strides: takes rows that are 16-byte aligned and that a tensor map can describe"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    if p.max_k == 0:
        return "no keys: takes at least one"
    tiles = _m_blocks(p, tile) * p.batch * p.q_heads
    if tiles > MAX_TILES:
        return f"{tiles} query tiles: takes up to {MAX_TILES}"
    return None


def _pads(p: Problem, tile: FwdSm90) -> bool:
    """Whether query tiles have more than an eighth too many rows."""
    return _m_blocks(p, tile) * tile.block_m > p.max_q * 9 // 8


def _m_blocks(p: Problem, config: FwdSm90 | FwdSm90Self) -> int:
    return -(-p.max_q // config.block_m)


def launches(p: Problem, device: Device) -> tuple[Launch, ...]:
    """One launch, of the kernel and Config for the problem."""
    tile = _tile(p)
    assert tile is not None
    scores = p.scores.softcap or p.scores.alibi or p.scores.reversed
    return (launch(p, device, config_of(tile, ELEMENTS[p.dtype], scores)),)


def launch(p: Problem, device: Device, config: FwdSm90 | FwdSm90Self) -> Launch:
    """The launch of any Config: persistent blocks, one an SM, or where they load for themselves one
    a tile.
    """
    m_blocks, pairs = _m_blocks(p, config), p.batch * p.q_heads
    head_group = min(_head_group(p, config), pairs)
    persistent = isinstance(config, FwdSm90)
    # Blocks take turns where tiles are equal; else, and at head_dim 256, whoever is done takes one.
    equal = _full(p) and not _ragged(p) and config.head_dim < 256
    return Launch(
        kernel="fwd_sm90" if persistent else "fwd_sm90_self",
        config=config,
        grid=min(device.sms, m_blocks * pairs) if persistent else m_blocks * pairs,
        scalars=(
            ("m_blocks", m_blocks),
            ("head_group", head_group),
            ("last_sweep", _last_sweep(p, head_group) if persistent else p.batch),
            ("schedule", STATIC if equal else DYNAMIC),
        ),
        maps=_maps(p, config),
    )


def _maps(p: Problem, config: FwdSm90 | FwdSm90Self) -> tuple[TensorMap, ...]:
    """Boxes are chunks of a SwizzledTile, cuda/tile_sm90.cuh."""

    def one(name: str, cols: int, rows: int, *, ragged: bool = False) -> TensorMap:
        chunk = 64 if cols % 64 == 0 else 32
        return TensorMap(
            field=f"{name}_map",
            array=name,
            box=(chunk, rows, 1) if ragged else (chunk, rows, 1, 1),
            axes=(3, 1, 2) if ragged else (3, 1, 2, 0),
            swizzle=2 * chunk,
            ragged=ragged,
        )

    q_cols = max(config.head_dim, config.value_dim)
    return (
        one("q", q_cols, 64),
        one("k", config.head_dim, config.block_n),
        one("v", config.value_dim, config.block_n, ragged=p.k_rows is not Rows.DENSE),
        one("out", q_cols, 64, ragged=p.q_rows is not Rows.DENSE),
    )
