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


def xmajor_maps(
    p: PagedProblem, dims: tuple[int, int], arrays: tuple[str, str], *, wgmma: bool = False
) -> tuple[TensorMap, TensorMap]:
    """Of keys and values of these names, in boxes of 16 tokens and all columns of tiles that have
    `dims`. `wgmma`: for cuda/tile_xmajor_sm90.cuh, a column of values a row, swizzled; else all
    columns that lie side by side, up to 256 bytes.
    """
    page, x = p.page, 16 // ITEMSIZES[p.cache_dtype]
    columns = x if page == BOX and p.value_dim % x == 0 and not wgmma else 1
    keys = TensorMap(
        field="k_map",
        array=arrays[0],
        box=(BOX * x, dims[0] // x, 1, 1, 1),
        axes=(Part(4, 1, page * x), 2, 1, 0, Part(3, page, 1)),
        swizzle=0,
        l2=128,
    )
    values = TensorMap(
        field="v_map",
        array=arrays[1],
        box=(BOX * columns, dims[1] // columns, 1, 1),
        axes=(Part(3, 1, page * columns), Part(2, columns), 1, 0),
        swizzle=32 if wgmma else 0,
        l2=128,
    )
    return keys, values


def maps(p: PagedProblem, config: DecodeSplit | DecodeSm90) -> tuple[TensorMap, ...]:
    """Keys and values, as DecodeSplitParams says."""
    arrays, sm90 = ("k_cache", "v_cache"), isinstance(config, DecodeSm90)
    if p.layout is CacheLayout.X_MAJOR:
        return xmajor_maps(p, (config.head_dim, config.head_dim), arrays, wgmma=sm90)
    part = 128 // ITEMSIZES[p.cache_dtype]
    token, head = (1, 2) if p.layout is CacheLayout.NHD else (2, 1)
    # wgmma wants the keys of a unit side by side, part by part.
    together = 1 if sm90 else config.head_dim // part
    # An L2 promotion of 256 took 4 % longer (H200, 2026-11-30).
    return tuple(
        TensorMap(
            field=f"{name[0]}_map",
            array=name,
            box=(part, BOX, together, config.heads, 1),
            axes=(Part(3, 1, part), token, Part(3, part), head, 0),
            swizzle=128,
            l2=128,
        )
        for name in arrays
    )
