# SPDX-License-Identifier: Apache-2.0
"""The tensor maps of a cache: of ``cuda/decode_split.cu`` and ``cuda/decode_sm90.cu``, and of
``cuda/fwd_sm90_paged.cu`` where it is x-major.
"""

from __future__ import annotations

from rawattn.decode_configs import DecodeSm90
from rawattn.paged_problem import ITEMSIZES, PagedProblem
from rawattn.plan.base import Part, TensorMap
from rawattn.plan.decode_sm90 import BOX
from rawattn.problem import CacheLayout
from rawattn.registry import DecodeSplit


def _xmajor_keys(page: int, x: int) -> tuple[int | Part, ...]:
    """Axes of keys: x columns of each token, the groups of x columns, heads, blocks."""
    return Part(4, 1, page * x), 2, 1, 0, Part(3, page, 1)


def xmajor_tiles(
    page: int, head_dim: int, value_dim: int, arrays: tuple[str, str]
) -> tuple[TensorMap, TensorMap]:
    """Of the tiles of cuda/tile_xmajor_sm90.cuh, of 16-bit keys and values of these names."""
    x = 8
    keys = TensorMap(
        field="k_map",
        array=arrays[0],
        box=(BOX * x, head_dim // x, 1, 1, 1),
        axes=_xmajor_keys(page, x),
        swizzle=0,
        l2=128,
    )
    values = TensorMap(
        field="v_map", array=arrays[1], box=(BOX, value_dim, 1, 1), axes=(3, 2, 1, 0), swizzle=32
    )
    return keys, values


def maps(p: PagedProblem, config: DecodeSplit | DecodeSm90) -> tuple[TensorMap, ...]:
    """Keys and values, as DecodeSplitParams says."""
    x = 16 // ITEMSIZES[p.cache_dtype]
    axes: tuple[tuple[int | Part, ...], tuple[int | Part, ...]]
    boxes: tuple[tuple[int, ...], tuple[int, ...]]
    if p.layout is CacheLayout.X_MAJOR:
        if isinstance(config, DecodeSm90):
            return xmajor_tiles(p.page, config.head_dim, config.head_dim, ("k_cache", "v_cache"))
        # Dimensions of values in a row of the box: all that lie side by side, up to 256 bytes.
        dims = x if p.page == BOX else 1
        values = Part(3, 1, p.page * dims), Part(2, dims), 1, 0
        axes = _xmajor_keys(p.page, x), values
        boxes = (
            (BOX * x, config.head_dim // x, 1, 1, 1),
            (BOX * dims, config.head_dim // dims, 1, 1),
        )
        swizzle = 0
    else:
        part = 8 * x
        token, head = (1, 2) if p.layout is CacheLayout.NHD else (2, 1)
        parts = Part(3, 1, part), token, Part(3, part), head, 0
        axes = parts, parts
        # wgmma wants the keys of a unit side by side, part by part.
        together = 1 if isinstance(config, DecodeSm90) else config.head_dim // part
        boxes = ((part, BOX, together, config.heads, 1),) * 2
        swizzle = 128
    # An L2 promotion of 256 took 4 % longer (H200, 2026-11-30).
    return tuple(
        TensorMap(
            field=f"{name}_map",
            array=f"{name}_cache",
            box=boxes[i],
            axes=axes[i],
            swizzle=swizzle,
            l2=128,
        )
        for i, name in enumerate("kv")
    )
