# SPDX-License-Identifier: Apache-2.0
"""A KV cache in pages: sequences take them from one pool as they need them, in any order, and share
those that hold what all of them begin with.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from llama import Array, Step
from smollm2 import Config

import rawattn


class PagedKVCache:
    """Pages of `page` tokens in one of rawattn's three layouts, for sequences that grow up to
    `rooms` tokens and begin with the same `shared` ones.

    The shared tokens fill whole pages, which exist once; the rest of them is stored sequence by
    sequence. Pages are dealt out at random, as after hours of serving.
    """

    def __init__(
        self,
        config: Config,
        xp: Any,
        dtype: Any,
        rooms: Sequence[int],
        shared: int,
        layout: str = "NHD",
        page: int = 16,
        seed: int = 0,
    ):
        self.page, self.layout = page, layout
        self.prefix = shared // page * page
        counts = [-(-room // page) for room in rooms]
        own = [count - self.prefix // page for count in counts]
        pool = np.random.default_rng(seed).permutation(self.prefix // page + sum(own))
        common, *parts = np.split(pool, self.prefix // page + np.cumsum([0, *own[:-1]]))
        self.table = np.zeros((len(rooms), max(counts)), np.int32)
        for row, part in zip(self.table, parts, strict=True):
            row[: len(common) + len(part)] = [*common, *part]
        self.block_table = xp.asarray(self.table)
        heads, size = config.kv_heads, config.head_dim
        x = 16 // np.dtype(dtype).itemsize
        shapes = {
            "NHD": ((page, heads, size), (page, heads, size)),
            "HND": ((heads, page, size), (heads, page, size)),
            "x-major": ((heads, size // x, page, x), (heads, size, page)),
        }
        self.k, self.v = (
            xp.empty((config.layers, len(pool), *shape), dtype) for shape in shapes[layout]
        )

    def slots(self, sequence: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Block times page plus place in it; -1, which is not stored, for tokens of the shared
        pages but those of the first sequence.
        """
        slots = self.table[sequence, positions // self.page].astype(np.int64) * self.page
        known = (positions < self.prefix) & (sequence > 0)
        return np.where(known, -1, slots + positions % self.page)

    def write(self, layer: int, slots: Array, k: Array, v: Array) -> None:
        caches = self.k[layer], self.v[layer]
        if self.layout == "x-major":
            rawattn.reshape_and_cache(k, v, *caches, slots)
        else:
            rawattn.reshape_and_cache_flash(k, v, *caches, slots, layout=self.layout)

    def attend(self, layer: int, q: Array, step: Step) -> Array:
        """The shared pages are read once for all sequences."""
        return rawattn.cascade_attention(
            q,
            self.k[layer],
            self.v[layer],
            cu_seqlens_q=step.cu_seqlens,
            max_seqlen_q=step.max_new,
            cache_seqlens=step.seqused,
            block_table=self.block_table,
            common_prefix_len=self.prefix,
            layout=self.layout,
        )
