# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/fwd_sm90.cu`` and ``cuda/fwd_sm90_self.cu``."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar, cast

from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan.base import ELEMENTS, Launch, TensorMap, refuses_device
from rawattn.plan.fwd_sm90_tiles import (
    CAPPED,
    D64,
    D64_PACKED,
    D96,
    D96_LONG,
    D128,
    D128_LONG,
    D192_128,
    D192_128_LONG,
    D256,
    D256_WIDE,
    SELF,
    SELF_SHORT,
    SPLIT,
    SPLIT_TILES,
    TILES,
)
from rawattn.problem import MAX_LENGTH, Mask, Problem, Rows
from rawattn.registry import FwdSm90, FwdSm90Self

STATIC, DYNAMIC = 0, 1  # TileOrder of cuda/schedule.cuh
Tile = TypeVar("Tile", bound=FwdSm90 | FwdSm90Self)
MAX_TILES = 2**30  # query tiles: kernels count beyond the last
MAX_AXIS = 2**29  # key tiles of those that are cut, likewise: up to a piece a block

# Figures are TFLOP/s of an H200 where they are not us; runs that are named are of
# tuning/fwd-sm90.csv, under bench/results/nvidia-h200.

# Keys and values of a sweep, of one KV head at least: L2 keeps them while all its query tiles pass.
# 256 causal 4k reads 205 MB of memory instead of 644 with 32 heads (run 3 of tuning/power.csv). At
# 256 twice as many: causal 4k 711 instead of 704, 8k 746 and 736, 16k 766 and 761 (qparts); at 128
# that is equal (sweeps).
SWEEP_BYTES, SWEEP_BYTES_256 = 16 << 20, 32 << 20
# Keys and values of a wide last sweep, from a length on: about what L2 holds, less where short
# tiles wait for memory. 128 causal 512 378 instead of 368 with 48 MB and 376 with none, 1k 512, 503
# and 499 (joins5); as wide at 4k 580 instead of 590 (tiles5).
WIDE_BYTES = ((2048, 48 << 20), (0, 32 << 20))
# Key tiles that cutting must save a block behind whole tiles, and where there are none. It costs to
# begin and end another tile, and to add parts. 256 full 2k, 6 saved, took longer; 128 full 2k, 7,
# equally long; 256 full 4k, 12, less, and so did 128 queries on 1024 keys, 6 (H200, 2026-11-30).
SAVED, SAVED_ALONE = 8, 6
# Key tiles of pieces that begin where those of other tiles do, of what they would have otherwise:
# blocks come to the same keys at the same time, and find them in L2. 1.03 and 1.10 times as many:
# 256, 512 queries on 32k keys, 241 -> 186 us, 384 201 -> 160; 128, 512 on 32k, 220 -> 197, 384 187
# -> 179; 1.11 and 1.37: 96, 128 on 8k, 40.5 -> 41.9, 512 59.2 -> 64.1 (tuning/chunks.csv, run 2).
ALIGNED = 1.1
# Where lengths may be smaller than their bounds, a tile has as many places on the axis of others.
PLACES = 64
# Under a causal mask, at least so many keys a query: tiles see about equally many then.
EVEN = 8


def _ragged(p: Problem) -> bool:
    return p.q_rows is not Rows.DENSE or p.k_rows is not Rows.DENSE


def _full(p: Problem) -> bool:
    """Whether every row sees every key: a window that is wide enough gets the same bits as none."""
    return _mask(p).trivial


def _mask(p: Problem) -> Mask:
    """The mask, without the sides of a window that hide no key."""
    return p.mask.within(max(p.max_q, p.max_k))


def first_that_holds(p: Problem | PagedProblem, tiles: Iterable[FwdSm90]) -> FwdSm90 | None:
    """The first of some prototypes whose columns the heads of a problem fit into."""
    fits = (t for t in tiles if p.head_dim <= t.head_dim and p.value_dim <= t.value_dim)
    return next(fits, None)


def _tile(p: Problem) -> FwdSm90 | FwdSm90Self | None:
    """The prototype for a problem; None where heads are too wide."""
    tile = first_that_holds(p, TILES)
    # Not by `_full`: lengths may be smaller than their bounds, and a window that is wide enough for
    # them gets the tile of none, and, where that is not cut over keys, its bits.
    causal, long = p.mask.right == 0, max(p.max_q, p.max_k)
    if tile is D64 and long <= 1024:
        return SELF_SHORT if causal else SELF
    if tile is D64 and _ragged(p):
        return D64_PACKED
    if tile is D96 and long >= 4096:
        return D96_LONG
    if tile is D128 and causal and long >= 4096:
        return D128_LONG
    if tile is D192_128 and long >= 2048:
        return D192_128_LONG
    if tile is D256 and long > (1024 if causal else 512):
        # With ALiBi 4k takes 941 us in tiles of 64 keys, 852 in those of 80 (run 9 of
        # tuning/scores.csv).
        return D256 if long >= 4096 and not (causal or _form(p).scores) else D256_WIDE
    return tile


def _head_group(p: Problem, config: FwdSm90 | FwdSm90Self) -> int:
    """(Batch, head) pairs that a sweep over the query tiles covers: under a causal mask as many as
    L2 holds keys and values of.
    """
    if _full(p) and isinstance(config, FwdSm90Self):
        return 16
    if _full(p) and config.head_dim == 128 and p.max_k >= 8192:
        return 4
    if _full(p):  # 256 16k 789 instead of 780, 8k equal (sweeps)
        return 2 if config.head_dim == 256 and p.max_k >= 16384 else 1
    if isinstance(config, FwdSm90Self) or not config.late_draw:
        return 32
    if p.max_k <= 1024:
        return 64 if p.max_k <= 512 else 32
    sides = p.mask.left, p.mask.right
    seen = p.max_k if min(sides) < 0 else min(p.max_k, sum(sides) + 1)
    room = SWEEP_BYTES_256 if config.head_dim == 256 else SWEEP_BYTES
    kv_heads = room // (2 * seen * (p.head_dim + p.value_dim))
    return min(32, max(1, kv_heads) * p.group)


def _last_sweep(p: Problem, head_group: int) -> int:
    """The sequence from which on sweeps cover up to 32: those left when L2 holds their keys and
    values, where that is more than a head group has; their number, where tiles are equal.
    """
    narrow = max(1, min(32, head_group // p.q_heads))
    room = next(room for least, room in WIDE_BYTES if p.max_k >= least)
    wide = room // (2 * p.max_k * (p.head_dim + p.value_dim) * p.kv_heads)
    if _full(p) or wide <= narrow:
        return p.batch
    return max(0, p.batch - wide) // narrow * narrow


class Cut(NamedTuple):
    """How query tiles are cut over their keys: cuda/fwd_sm90_parts.cuh, and Params as named."""

    whole: int  # query tiles in front of those that are cut
    places: int
    axis: int
    span: int

    @property
    def pieces(self) -> int:
        return -(-self.axis // self.span)

    @property
    def slots(self) -> int:
        """Of the workspace: a part has that of its piece plus its tile, both counted from 0."""
        return max(0, self.pieces + self.axis // self.places - 1)


def cut_of(p: Problem, device: Device, config: FwdSm90) -> Cut:
    """The tiles of the last round, which does not fill the GPU, each in as many equal pieces; or in
    as many as it has SMs, where those have fewer key tiles by more than ALIGNED. In fewer, where
    adding parts, one after the other, would take longer than what each has of keys: 128 queries of
    one head on 128k keys took little more than half as long in 32 pieces as in 128 (H200,
    2026-11-30).
    """
    tiles = _m_blocks(p, config) * p.batch * p.q_heads
    left = tiles % device.sms
    k_tiles, each = _k_tiles(p, config), device.sms // max(left, 1)
    least = max(1, math.isqrt(k_tiles))  # key tiles of a piece
    even = max(least, -(-left * k_tiles // device.sms))
    aligned = max(least, -(-k_tiles // each))
    if aligned <= ALIGNED * even:
        places = max(1, min(each, k_tiles // least))
        return Cut(tiles - left, places, left * places, 1)
    places = min(k_tiles, PLACES) if _ragged(p) else k_tiles
    return Cut(tiles - left, places, left * places, -(-even * places // k_tiles))


def _k_tiles(p: Problem, config: FwdSm90) -> int:
    return -(-p.max_k // config.block_n)


def _split_tile(p: Problem, device: Device) -> FwdSm90 | None:
    """The prototype that cuts the query tiles of a problem over their keys, where that pays."""
    chosen = _tile(p)
    tile = SPLIT.get(chosen) if isinstance(chosen, FwdSm90) else None
    return tile if tile is not None and cut_pays(p, device, tile) else None


def cut_pays(p: Problem, device: Device, tile: FwdSm90) -> bool:
    """Whether a block has enough fewer key tiles where those of a prototype are cut."""
    cut, k_tiles = cut_of(p, device, tile), _k_tiles(p, tile)
    if cut.whole and _ragged(p):  # tiles in front are counted as if all sequences were the longest
        return False
    saved = k_tiles - -(-k_tiles // cut.places) * cut.span
    # Pieces are dealt out as if all tiles saw equally many keys; others fill the last round better.
    even = _full(p) or (EVEN * p.max_q <= p.max_k and not p.mask.top_left)
    return (
        plain(_form(p))
        and saved >= (SAVED if cut.whole else SAVED_ALONE)
        and 0 < cut.axis < MAX_AXIS
        and (even or not cut.whole)
    )


class Form(NamedTuple):
    """The fields of a Config that are of the problem, not of the tile."""

    element: str
    window: bool
    softcap: bool
    scores: bool


def plain(form: Form | FwdSm90) -> bool:
    """Whether there are neither steps of scores nor windows to the left."""
    return not (form.window or form.softcap or form.scores)


FORMS = tuple(
    Form(element, window, *steps)
    for element in ELEMENTS.values()
    for window in (False, True)
    for steps in ((False, False), (True, False), (False, True))
)


def _form(p: Problem) -> Form:
    """The softmax takes in a softcap that is alone; else all steps are made score by score."""
    scores = p.scores.alibi or p.scores.reversed or p.scores.extreme
    return Form(
        element=ELEMENTS[p.dtype],
        window=_mask(p).left >= 0,
        softcap=p.scores.softcap and not scores,
        scores=scores,
    )


def _in_form(tile: Tile, form: Form) -> Tile:
    base = cast(Tile, CAPPED.get(tile, tile)) if form.softcap else tile
    return replace(base, **form._asdict())


def config_of(p: Problem, tile: Tile) -> Tile:
    """The Config for a problem, from a prototype."""
    return _in_form(tile, _form(p))


def forms(tile: Tile) -> Iterator[Tile]:
    """All that `config_of` makes of a prototype."""
    return (_in_form(tile, form) for form in FORMS)


def configs(arch: str) -> Iterator[FwdSm90]:
    """Every Config of fwd_sm90 that `launches` can choose on `arch`."""
    yield from dict.fromkeys(config for tile in TILES for config in forms(tile))
    for tile in SPLIT_TILES:
        yield from (_in_form(tile, form) for form in FORMS if plain(form))


def self_configs(arch: str) -> Iterator[FwdSm90Self]:
    """Every Config of fwd_sm90_self that `launches` can choose on `arch`."""
    yield from dict.fromkeys(config for tile in (SELF, SELF_SHORT) for config in forms(tile))


def refuses(p: Problem, device: Device) -> str | None:
    """Why the kernels do not take a problem; None: one does."""
    if reason := refuses_device("fwd_sm90", device):
        return reason
    if p.dtype not in ELEMENTS:
        return f"dtype {p.dtype}: takes {' and '.join(ELEMENTS)}"
    return refuses_shape(p, _tile(p))


def refuses_shape(p: Problem | PagedProblem, tile: FwdSm90 | FwdSm90Self | None) -> str | None:
    """Why heads, strides or lengths are not for a tile, that of the problem, if there is one."""
    if tile is None:
        return f"head_dim={p.head_dim}, value_dim={p.value_dim}: takes up to 256"
    if p.copy_bytes < 16 or not p.tma:
        return "strides: takes rows that are 16-byte aligned and that a tensor map can describe"
    if max(p.max_q, p.max_k) > MAX_LENGTH:
        return f"sequences of {p.max_q} queries and {p.max_k} keys: takes up to {MAX_LENGTH}"
    if p.max_k == 0:
        return "no keys: takes at least one"
    tiles = _m_blocks(p, tile) * p.batch * p.q_heads
    return f"{tiles} query tiles: takes up to {MAX_TILES}" if tiles > MAX_TILES else None


def _m_blocks(p: Problem | PagedProblem, config: FwdSm90 | FwdSm90Self) -> int:
    return -(-p.max_q // config.block_m)


def launches(p: Problem, device: Device) -> tuple[Launch, ...]:
    """One launch, of the kernel and Config for the problem."""
    tile = _split_tile(p, device) or _tile(p)
    assert tile is not None
    return (launch(p, device, config_of(p, tile)),)


def launch(p: Problem, device: Device, config: FwdSm90 | FwdSm90Self) -> Launch:
    """The launch of any Config: persistent blocks, one an SM, or where they load for themselves one
    a tile.
    """
    m_blocks, pairs = _m_blocks(p, config), p.batch * p.q_heads
    head_group = min(_head_group(p, config), pairs)
    persistent = isinstance(config, FwdSm90)
    # Blocks take turns where tiles are equal; else, and at head_dim 256, whoever is done takes one.
    equal = _full(p) and not _ragged(p) and config.head_dim < 256
    grid = min(device.sms, m_blocks * pairs) if persistent else m_blocks * pairs
    cut, counters, workspace_bytes = Cut(m_blocks * pairs, 1, 0, 1), 2, 0
    if isinstance(config, FwdSm90) and config.split:
        cut = cut_of(p, device, config)
        grid = device.sms if cut.whole else cut.pieces
        counters += 4 * config.consumers * cut.slots
        workspace_bytes = config.slot_bytes * cut.slots
    return Launch(
        kernel="fwd_sm90" if persistent else "fwd_sm90_self",
        config=config,
        grid=grid,
        scalars=(
            ("m_blocks", m_blocks),
            ("head_group", head_group),
            ("last_sweep", _last_sweep(p, head_group) if persistent else p.batch),
            ("schedule", STATIC if equal else DYNAMIC),
            *cut._asdict().items(),
        ),
        maps=_maps(p, config),
        counters=counters,
        workspace_bytes=workspace_bytes,
    )


def _maps(p: Problem, config: FwdSm90 | FwdSm90Self) -> tuple[TensorMap, ...]:
    q_cols = max(config.head_dim, config.value_dim)
    return (
        chunks("q", q_cols, 64),
        chunks("k", config.head_dim, config.block_n),
        chunks("v", config.value_dim, config.block_n, ragged=p.k_rows is not Rows.DENSE),
        chunks("out", q_cols, 64, ragged=p.q_rows is not Rows.DENSE),
    )


def chunks(name: str, columns: int, rows: int, *, ragged: bool = False) -> TensorMap:
    """The map of an array that is copied to a SwizzledTile, cuda/tile_sm90.cuh, by its chunks."""
    chunk = 64 if columns % 64 == 0 else 32  # columns of one
    return TensorMap(
        field=f"{name}_map",
        array=name,
        box=(chunk, rows, 1) if ragged else (chunk, rows, 1, 1),
        axes=(3, 1, 2) if ragged else (3, 1, 2, 0),
        swizzle=2 * chunk,
        ragged=ragged,
    )
