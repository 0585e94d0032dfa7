# SPDX-License-Identifier: Apache-2.0
"""Problems of kv_write, rotary and copy_blocks: inputs with gaps in their strides, caches of random
bytes, slots drawn at random, of which some are skipped and some do not exist.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rawattn.arrays import DTYPES
from rawattn.cache_problem import CopyBlocksProblem, KvWriteProblem, RotaryProblem
from rawattn.paged_problem import cache_shapes
from rawattn.plan import kv_write
from rawattn.problem import CacheLayout
from rawattn.reference_paged import rotated, write_cache
from tools.cases.base import H200, Array, Arrays, KernelCase, spaced, stored, strides, values

# ---- caches --------------------------------------------------------------------------------------


def _cache(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Array:
    """Random bytes, with gaps between the blocks."""
    blocks, *block = shape
    elements = int(np.prod(block))
    stride = elements + 16 // DTYPES[dtype].itemsize * int(rng.integers(2))
    wide = rng.integers(0, 256, (blocks, stride * DTYPES[dtype].itemsize), np.uint8)
    return wide.view(dtype)[:, :elements].reshape(blocks, *block)


def _cache_strides(name: str, cache: Array, layout: CacheLayout) -> dict[str, int]:
    """Scalars of Params: of block, head and slot, and of chunk (keys) or dim (values)."""
    key = name == "k_cache"
    block, *inner = (s // cache.itemsize for s in cache.strides)
    if layout is CacheLayout.X_MAJOR:
        head, part, slot = inner[:3]
    else:
        slot, head = inner[:2] if layout is CacheLayout.NHD else inner[1::-1]
        part = 16 // cache.itemsize if key else 1
    strides = {"block": block, "head": head, "slot": slot, "chunk" if key else "dim": part}
    return {f"stride_{name}_{axis}": stride for axis, stride in strides.items()}


# ---- kv_write ------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class _Tokens:
    """New tokens, and the slots they go to."""

    arrays: Arrays
    scalars: dict[str, int]
    slots: Array  # -1: skipped
    sequences: Array
    positions: Array
    dense: tuple[int, int] | None  # (batch, new_len), where k is dense


def _given_slots(rng: np.random.Generator, blocks: int, page: int) -> _Tokens:
    """slot_mapping: none twice, some negative, some past the end of the cache."""
    tokens = int(rng.integers(1, blocks * page))
    slots = rng.permutation(blocks * page + 5)[:tokens].astype(np.int64)
    slots[rng.random(tokens) < 0.2] *= -1
    kept = np.where((slots < 0) | (slots >= blocks * page), -1, slots)
    return _Tokens(
        arrays={"slot_mapping": slots},
        scalars={"batch": 1, "new_len": tokens, "max_blocks": 1, "stride_table_batch": 0},
        slots=kept,
        sequences=np.zeros(tokens, np.int64),
        positions=np.zeros(tokens, np.int64),
        dense=None,
    )


def _appended(rng: np.random.Generator, blocks: int, page: int) -> _Tokens:
    """Sequences that grow, a few of them past the end of their tables; packed, or of equal length.
    Each has its own blocks.
    """
    batch = int(rng.integers(1, min(4, blocks + 1)))
    columns = 1 if rng.random() < 0.3 else blocks // batch
    table = rng.permutation(blocks)[: batch * columns].reshape(batch, columns).astype(np.int32)
    own = columns == 1 and rng.random() < 0.5
    if own:  # the contiguous cache of flash_attn_with_kvcache
        table = np.arange(batch, dtype=np.int32)[:, None]
    else:
        table[rng.random(table.shape) < 0.1] = (-1, blocks)[int(rng.integers(2))]
    before = rng.integers(0, columns * page, batch, np.int32)
    packed = rng.random() < 0.5
    lens = rng.integers(0 if packed else 1, page + 3, batch if packed else 1)
    lens = lens if packed else np.repeat(lens, batch)
    if lens.sum() == 0:
        lens[0] = 1
    sequence = np.repeat(np.arange(batch), lens)
    index = np.concatenate([np.arange(n) for n in lens])
    position = before[sequence] + index
    column = position // page
    inside = column < columns
    block = np.where(inside, table[sequence, np.minimum(column, columns - 1)], -1)
    slots = np.where((block >= 0) & (block < blocks), block * page + position % page, -1)
    arrays = {"seqused_k": before} | ({} if own else {"block_table": table})
    if packed:
        arrays["cu_seqlens_new"] = np.cumsum([0, *lens]).astype(np.int32)
    return _Tokens(
        arrays=arrays,
        scalars={
            "batch": batch,
            "new_len": int(lens[0]),
            "max_blocks": columns,
            "stride_table_batch": columns,
        },
        slots=slots,
        sequences=sequence,
        positions=position,
        dense=None if packed else (batch, int(lens[0])),
    )


@dataclass(frozen=True, kw_only=True)
class _Shape:
    """What is drawn of a cache and its rows."""

    layout: CacheLayout
    blocks: int
    page: int
    heads: int
    head_dim: int
    value_dim: int
    rotary_dim: int
    aligned: bool
    unit: int  # elements that rows are a multiple of, where aligned

    def caches(self, dtype: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of keys and of values."""
        return cache_shapes(
            self.layout,
            dtype,
            blocks=self.blocks,
            page=self.page,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
        )

    @classmethod
    def draw(cls, rng: np.random.Generator, dtype: str, cache_dtype: str) -> _Shape:
        layout = list(CacheLayout)[int(rng.integers(3))]
        blocks, page, heads = (int(rng.integers(1, n)) for n in (7, 20, 4))
        unit = 16 // min(DTYPES[x].itemsize for x in (dtype, cache_dtype))
        aligned = rng.random() < 0.6
        if layout is CacheLayout.X_MAJOR and page * DTYPES[cache_dtype].itemsize % 16:
            aligned = False
        whole = unit * rng.integers(1, 4, 2)
        odd = rng.integers(8, 40, 2)
        head_dim = int((whole if aligned or layout is CacheLayout.X_MAJOR else odd)[0])
        return cls(
            layout=layout,
            blocks=blocks,
            page=page,
            heads=heads,
            head_dim=head_dim,
            value_dim=int((whole if aligned else odd)[1]),
            rotary_dim=2 * (head_dim // 2 // unit * unit if aligned else int(rng.integers(1, 5))),
            aligned=aligned,
            unit=unit if aligned else 1,
        )


def _turn(
    rng: np.random.Generator, shape: _Shape, k: Array, dtype: str, positions: Array
) -> tuple[Array, Arrays, dict[str, int]]:
    """k with its pairs turned, and the arrays and scalars that say how. Some tables are too short:
    then their last row is taken.
    """
    rows = max(1, int(positions.max()) + 1 - int(rng.integers(3)))
    positions = np.minimum(positions, rows - 1)
    angles = rng.uniform(-4, 4, (rows, shape.rotary_dim // 2))
    wide, interleaved = (bool(n) for n in rng.integers(0, 2, 2))
    cos, sin = (stored(f(angles), "float32" if wide else dtype) for f in (np.cos, np.sin))
    return (
        rotated(k, cos, sin, positions, interleaved=interleaved),
        {"cos": cos, "sin": sin},
        {
            "stride_cos_row": shape.rotary_dim // 2,
            "rotary_dim": shape.rotary_dim,
            "interleaved": int(interleaved),
            "float_angles": int(wide),
            "positions": len(angles),
        },
    )


NO_TURN = {
    "stride_cos_row": 0,
    "rotary_dim": 0,
    "interleaved": 0,
    "float_angles": 0,
    "positions": 0,
}


def _rows(rng: np.random.Generator, shape: _Shape, new: _Tokens, x: Array) -> Array:
    """Rows as they lie in memory: with gaps, and by sequence where they are dense."""
    x = spaced(rng, x, shape.unit)
    return x.reshape(*new.dense, *x.shape[1:]) if new.dense else x


def _scales(rng: np.random.Generator, count: int) -> Arrays:
    return {name: rng.uniform(0.1, 4, count).astype("float32") for name in ("k_scale", "v_scale")}


def kv_write_case(seed: int, dtype: str, cache_dtype: str, rotary: bool) -> KernelCase:
    """Slots given or found, in any layout; rotated where sequences grow."""
    rng = np.random.default_rng(seed)
    shape = _Shape.draw(rng, dtype, cache_dtype)
    given = not rotary and rng.random() < 0.7
    new = (_given_slots if given else _appended)(rng, shape.blocks, shape.page)
    sizes = shape.head_dim, shape.value_dim
    lead = len(new.slots), shape.heads
    k, v = (values(rng, (*lead, n), dtype, odd=cache_dtype != "int8") for n in sizes)
    k_cache, v_cache = (_cache(rng, s, cache_dtype) for s in shape.caches(cache_dtype))
    turned, tables, turn = k, {}, NO_TURN
    if rotary:
        turned, tables, turn = _turn(rng, shape, k, dtype, new.positions)
    per_head = int(rng.random() < 0.5)
    scales = _scales(rng, shape.heads if per_head else 1) if cache_dtype != dtype else {}
    want = {"k_cache": k_cache.copy(), "v_cache": v_cache.copy()}
    write_cache(turned, v, *want.values(), new.slots, shape.layout, **scales)

    rows = {"k": _rows(rng, shape, new, k), "v": _rows(rng, shape, new, v)}
    axes = "batch token head" if new.dense else "token head"
    problem = KvWriteProblem(
        dtype=dtype,
        cache_dtype=cache_dtype,
        tokens=len(new.slots),
        kv_heads=shape.heads,
        head_dim=shape.head_dim,
        value_dim=shape.value_dim,
        layout=shape.layout,
        rotary=rotary,
        aligned=shape.aligned,
    )
    return KernelCase(
        plan=kv_write.plan(problem, H200),
        arrays={**rows, "k_cache": k_cache, "v_cache": v_cache, **new.arrays, **scales, **tables},
        scalars={
            **{"stride_k_batch": 0, "stride_v_batch": 0, **turn, **new.scalars},
            **strides("k", axes, rows["k"]),
            **strides("v", axes, rows["v"]),
            **_cache_strides("k_cache", k_cache, shape.layout),
            **_cache_strides("v_cache", v_cache, shape.layout),
            **{"tokens": len(new.slots), "blocks": shape.blocks, "page": shape.page},
            **{"kv_heads": shape.heads, "head_dim": sizes[0], "value_dim": sizes[1]},
            **{"stride_k_scale": per_head, "stride_v_scale": per_head},
            **{"aligned": int(shape.aligned), "k_scale_number": 1.0, "v_scale_number": 1.0},
        },
        want=want,
    )


# ---- rotary --------------------------------------------------------------------------------------


def rotary_case(seed: int, dtype: str) -> KernelCase:
    """Queries of sequences, packed or of equal length."""
    rng = np.random.default_rng(seed)
    shape = _Shape.draw(rng, dtype, dtype)
    new = _appended(rng, shape.blocks, shape.page)
    same = int(rng.random() < 0.3)
    x = values(rng, (len(new.slots), shape.heads, shape.head_dim), dtype, odd=True)
    positions = new.arrays["seqused_k"][new.sequences] if same else new.positions
    turned, tables, turn = _turn(rng, shape, x, dtype, positions)
    rows = {name: _rows(rng, shape, new, a) for name, a in (("x", x), ("y", np.zeros_like(x)))}
    axes = "batch token head" if new.dense else "token head"
    problem = RotaryProblem(
        dtype=dtype,
        tokens=len(new.slots),
        heads=shape.heads,
        head_dim=shape.head_dim,
        aligned=shape.aligned,
    )
    return KernelCase(
        plan=kv_write.plan(problem, H200),
        arrays={
            **rows,
            **tables,
            **{k: v for k, v in new.arrays.items() if k != "block_table"},
        },
        scalars={
            **{"stride_x_batch": 0, "stride_y_batch": 0, **turn},
            **strides("x", axes, rows["x"]),
            **strides("y", axes, rows["y"]),
            **{name: new.scalars[name] for name in ("batch", "new_len")},
            "tokens": len(new.slots),
            "heads": shape.heads,
            "head_dim": shape.head_dim,
            "aligned": int(shape.aligned),
            "same_position": same,
        },
        want={"y": turned.reshape(rows["y"].shape)},
    )


# ---- copy_blocks ---------------------------------------------------------------------------------


def copy_blocks_case(seed: int, unit: int) -> KernelCase:
    """Blocks of several caches, of a multiple of `unit` bytes; a pair that does not exist."""
    rng = np.random.default_rng(seed)
    blocks = int(rng.integers(2, 12))
    block_bytes = unit * int(rng.choice([1, 7, 300, 5000]))
    stride = block_bytes + unit * int(rng.integers(3))
    names = [f"cache{i}" for i in range(int(rng.integers(1, 4)))]
    caches = {
        name: rng.integers(0, 256, (blocks, stride), np.uint8)[:, :block_bytes] for name in names
    }
    numbers = rng.permutation(blocks).astype(np.int64)
    pairs = numbers[: blocks // 2 * 2].reshape(-1, 2)
    used = np.ones(len(pairs), bool)
    if len(pairs) > 1:  # one that names no block
        pairs[0, int(rng.integers(2))] = (-1, blocks)[int(rng.integers(2))]
        used[0] = False
    want = {name: cache.copy() for name, cache in caches.items()}
    for cache in want.values():
        cache[pairs[used, 1]] = cache[pairs[used, 0]]
    problem = CopyBlocksProblem(
        caches=len(caches), pairs=len(pairs), block_bytes=block_bytes, copy_bytes=unit
    )
    return KernelCase(
        plan=kv_write.plan(problem, H200),
        arrays={**caches, "pairs": pairs},
        tables={"caches": tuple(names)},
        scalars={
            "block_bytes": block_bytes,
            "stride_block_bytes": stride,
            "blocks": blocks,
            "num_caches": len(caches),
        },
        want=want,
    )
