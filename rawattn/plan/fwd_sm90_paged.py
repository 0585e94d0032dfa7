# SPDX-License-Identifier: Apache-2.0
"""Plans of ``cuda/fwd_sm90_paged.cu``: many queries a sequence over a paged cache; prompts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from rawattn.device import Device
from rawattn.paged_problem import PagedProblem
from rawattn.plan import decode, fwd_sm90
from rawattn.plan.base import ELEMENTS, Launch, TensorMap, refuses_device
from rawattn.plan.decode_maps import xmajor_maps
from rawattn.plan.decode_sm90 import BOX, in_boxes
from rawattn.plan.fwd_sm90 import Cut
from rawattn.plan.fwd_sm90_tiles import D64, D96, D128, D192, D192_128_LONG, D256, D256_WIDE
from rawattn.problem import CacheLayout, Problem, Rows
from rawattn.registry import FwdSm90

TILES = (D64, D96, D128, D192_128_LONG, D192, D256_WIDE)
# Of x-major caches: tiles whose halves are products of wgmma (cuda/tile_xmajor_sm90.cuh).
XMAJOR_TILES = (D64, D128, D256)
# Of caches of e4m3: bytes take the place of a second buffer for q, and more threads its registers.
E4M3 = "float8_e4m3fn"
E4M3_TILES = tuple(
    replace(tile, element="fp16", consumers=2, q_registers=False, q_buffers=1, e4m3=True)
    for tile in (D64, D128)
)
# What so many rows of a KV head take a block of decode_sm90, which has 64, or of decode_split, as a
# multiple of what a query tile takes one. H200, us, decoding / this, 32 / 8 heads, 4 k keys, by
# batch x queries (tuning/prompts.csv, under bench/results/nvidia-h200):
# 64 rows, heads of 128: 1 x 256 47 / 54, 1 x 512 95 / 56, 4 x 64 50 / 60, 4 x 128 88 / 59, 16 x 64
# 172 / 204, 16 x 128 348 / 216; 32, of 96: 32 x 16 256 / 390, 32 x 32 496 / 390; 16, of 256: 32 x 8
# 348 / 664, 32 x 16 679 / 671; 8, of 256 and x-major: 32 x 8 657 / 779, 32 x 16 1289 / 783.
DECODE_COST = {64: 0.92, 32: 1.35, 16: 1.05, 8: 0.85}
# The same of e4m3: 32, heads of 128: 32 x 16 224 / 504, 32 x 64 864 / 502, 4 x 512 864 / 248; 8, of
# 64: 4 x 512 1055 / 165.
E4M3_COST = {32: 0.86, 8: 0.4}
# What tiles take that are cut over their keys, of their share of whole ones. One sequence, us,
# decoding / this (tuning/chunks.csv, run 4): 32 / 8 heads of 128, 64 queries on 8k keys 35 / 39,
# 128 on 8k 52 / 40, on 32k 168 / 117; 16 / 4 of 256, 32 on 4k 46 / 37, 128 on 32k 618 / 114,
# x-major 16 on 4k 37 / 36; 8 / 1 of 128, 128 on 8k 28 / 29.
CUT_COST = 1.6


def twin(p: PagedProblem) -> Problem:
    """The same over rows: a sequence has as many keys as its table says."""
    return Problem(
        dtype=p.dtype,
        batch=p.batch,
        q_heads=p.q_heads,
        kv_heads=p.kv_heads,
        head_dim=p.head_dim,
        value_dim=p.value_dim,
        max_q=p.max_q,
        max_k=p.max_k,
        q_rows=p.q_rows,
        k_rows=Rows.PADDED,
        mask=p.mask,
        scores=p.scores,
        copy_bytes=p.copy_bytes,
        tma=p.tma,
    )


def _tile(p: PagedProblem) -> FwdSm90 | None:
    tiles = E4M3_TILES if p.quantized else XMAJOR_TILES if _xmajor(p) else TILES
    return fwd_sm90.first_that_holds(p, tiles)


def _xmajor(p: PagedProblem) -> bool:
    return p.layout is CacheLayout.X_MAJOR


def _config(p: PagedProblem, tile: FwdSm90) -> FwdSm90:
    return _of_pages(tile, fwd_sm90.config_of(twin(p), tile), _xmajor(p))


def _of_pages(tile: FwdSm90, rows: FwdSm90, xmajor: bool) -> FwdSm90:
    """A tile in its form over rows. There are few for other caches: a softcap is a step of scores;
    of e4m3, whose products are of halves, all steps and windows are compiled in, or none.
    """
    scores = rows.scores or rows.softcap
    if tile.e4m3:
        features = rows.window or scores
        return replace(tile, window=features, scores=features, xmajor=xmajor)
    if xmajor:
        return replace(tile, element=rows.element, window=rows.window, scores=scores, xmajor=True)
    return rows


def configs(arch: str) -> Iterator[FwdSm90]:
    """Every Config that `launches` can choose on `arch`."""
    kinds = (TILES, False), (XMAJOR_TILES, True), (E4M3_TILES, False), (E4M3_TILES, True)
    for tiles, xmajor in kinds:
        for tile in tiles:
            forms = fwd_sm90.forms(tile)
            found = dict.fromkeys(_of_pages(tile, rows, xmajor) for rows in forms)
            yield from found
            if _may_be_cut(tile, xmajor):
                yield from (replace(c, split=True) for c in found if fwd_sm90.plain(c))


def _may_be_cut(tile: FwdSm90, xmajor: bool) -> bool:
    """Whether there is a form of a tile that is cut over its keys: two would spill."""
    return tile is not D192 and not (xmajor and tile.e4m3 and tile.head_dim == 128)


def _cut(p: PagedProblem, device: Device, tile: FwdSm90) -> Cut | None:
    """How query tiles are cut over their keys, where they are."""
    cut = _may_be_cut(tile, _xmajor(p)) and fwd_sm90.cut_pays(twin(p), device, tile)
    return fwd_sm90.cut_of(twin(p), device, tile) if cut else None


def refuses(p: PagedProblem, device: Device) -> str | None:
    """Why the kernel does not take a problem; None: it does."""
    if reason := refuses_device("fwd_sm90_paged", device):
        return reason
    if p.dtype not in ELEMENTS or p.cache_dtype not in (p.dtype, E4M3):
        return f"{p.dtype} over a cache of {p.cache_dtype}: takes its own type, or {E4M3}"
    if not in_boxes(p) and (_xmajor(p) or p.max_k > p.page):
        return f"pages of {p.page} tokens: takes multiples of {BOX}, x-major ones of some 10^8"
    if p.leftpad or p.tree or p.block_sparse or p.split:
        return "takes no left padding, trees of drafts, block-sparse attention or fixed split"
    if p.mask.top_left and not p.mask.trivial:
        return "a mask aligned to the top left: takes the bottom right"
    return fwd_sm90.refuses_shape(p, _tile(p))


def pays(p: PagedProblem, device: Device) -> bool:
    """Whether it takes a problem, and in less time than decoding, whose blocks of rows each read
    all keys, but share the GPU evenly, whatever the lengths are.
    """
    tile = _tile(p)
    if tile is None or refuses(p, device) is not None:
        return False
    rows = decode.config_of(p, device).rows
    # Tiles are at most so many, blocks at least: single tokens beside a prompt take a tile each.
    longest = p.batch * -(-p.max_q // tile.block_m)
    tiles = p.q_heads * min(longest, p.batch + max(0, p.queries - p.batch) // tile.block_m)
    blocks = p.kv_heads * max(p.batch, -(-p.queries * p.group // rows))
    cost = (E4M3_COST if p.quantized else DECODE_COST)[rows]
    if _cut(p, device, tile):
        return CUT_COST * tiles <= cost * blocks
    return -(-tiles // device.sms) * device.sms <= cost * blocks


def launches(p: PagedProblem, device: Device) -> tuple[Launch, ...]:
    """One launch, of persistent blocks."""
    tile = _tile(p)
    assert tile is not None
    config = replace(_config(p, tile), split=_cut(p, device, tile) is not None)
    launch = fwd_sm90.launch(twin(p), device, config)
    kept = tuple(m for m in launch.maps if m.field not in ("k_map", "v_map"))
    maps = _maps(p, tile)
    return (replace(launch, kernel="fwd_sm90_paged", maps=(*kept, *maps)),)


def _maps(p: PagedProblem, tile: FwdSm90) -> tuple[TensorMap, ...]:
    """Of keys and values: boxes of few tokens, which cross no page; values of rows end where a
    sequence does.
    """
    if _xmajor(p):
        dims = tile.head_dim, tile.value_dim
        return xmajor_maps(p, dims, ("k", "v"), wgmma=not tile.e4m3)
    keys = fwd_sm90.chunks("k", tile.head_dim, BOX)
    values = fwd_sm90.chunks("v", tile.value_dim, BOX, ragged=True)
    if tile.e4m3:  # rows as they lie
        keys = replace(keys, box=(tile.head_dim, *keys.box[1:]), swizzle=0)
        values = replace(values, box=(tile.value_dim, *values.box[1:]), swizzle=0)
    return keys, values
