# SPDX-License-Identifier: Apache-2.0
"""From a `PagedCase` to arrays: `paged_tensors(case)` gives the sequences, in NumPy;
`spread(tensors, xp)` puts them in a cache as the case says, in NumPy or CuPy, with poison in all
slots and table entries of nobody.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  makes np.dtype("float8_e4m3fn") known
import numpy as np

from rawattn.paged_problem import cache_shapes
from rawattn.problem import CacheLayout
from rawattn.reference_paged import dequantized, quantized, rotated, slots, tree_seen
from rawattn.testing.cases import Case
from rawattn.testing.inputs import (
    CANARY,
    POISON,
    Array,
    Placed,
    Results,
    Tensors,
    check_kept,
    drawn,
    to_host,
)
from rawattn.testing.paged_cases import CACHE_WORDS, PagedCase

NOWHERE = (-1, 2_147_480_000)  # what table entries of nobody may hold


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedTensors:
    """The sequences of a case. Keys and values are as the cache holds them; the new ones, the last
    of each, are in the dtype of q, not turned and not divided.
    """

    case: PagedCase
    q: list[Array]  # (Sq, Hq, D)
    k: list[Array]  # (Sk - new, Hkv, D)
    v: list[Array]
    new_k: list[Array]  # (new, Hkv, D)
    new_v: list[Array]
    pads: list[int]  # tokens in front of it, in its row of the cache
    k_scale: Array  # float32, (B, Hkv): all equal unless scales are of heads
    v_scale: Array
    tree: list[Array]  # (Sq, Sq) bool
    alibi_slopes: Array | None
    sink: Array | None
    cos: Array  # (positions, R)
    sin: Array

    def keys(self, b: int) -> tuple[Array, Array]:
        """All keys and values of a sequence as the cache holds them after the call."""
        dtype, old = np.dtype(self.case.stored), self.pads[b] + len(self.k[b])
        k = self.turned(self.new_k[b], old + np.arange(len(self.new_k[b])))
        new_k, new_v = (
            quantized(k, self.k_scale[b], dtype),
            quantized(self.new_v[b], self.v_scale[b], dtype),
        )
        return np.concatenate([self.k[b], new_k]), np.concatenate([self.v[b], new_v])

    def turned(self, x: Array, positions: Array) -> Array:
        if self.case.rotary == "none":
            return x
        interleaved = self.case.rotary == "interleaved"
        return rotated(x, self.cos, self.sin, positions, interleaved=interleaved)

    def queries(self, b: int) -> Array:
        """Those of a sequence, turned."""
        c = self.case
        apart = c.causal or c.window != (-1, -1) or c.tree
        steps = np.arange(len(self.q[b])) if apart else np.zeros(len(self.q[b]), int)
        return self.turned(self.q[b], self.pads[b] + len(self.k[b]) + steps)

    def gathered(self) -> Tensors:
        """The same call on packed keys, which the float64 reference takes."""
        c = self.case
        batch = range(len(c.q_lens))
        parts = [self.keys(b) for b in batch]

        def join(xs: list[Array], heads: int, size: int, dtype: str) -> Array:
            return np.concatenate([np.empty((0, heads, size), dtype), *xs])

        kind = "float32" if c.quantized else c.dtype
        ks = [dequantized(k, scale) for (k, _), scale in zip(parts, self.k_scale, strict=True)]
        vs = [dequantized(v, scale) for (_, v), scale in zip(parts, self.v_scale, strict=True)]
        k = join(ks, c.kv_heads, c.head_dim, kind)
        v = join(vs, c.kv_heads, c.value_dim, kind)
        lens = zip(self.tree, c.q_lens, c.k_lens, strict=True)
        return Tensors(
            case=self.packed_case(),
            q=join([self.queries(b) for b in batch], c.q_heads, c.head_dim, c.dtype),
            k=k,
            v=v,
            cu_seqlens_q=np.cumsum([0, *c.q_lens], dtype=np.int32),
            cu_seqlens_k=np.cumsum([0, *c.k_lens], dtype=np.int32),
            alibi_slopes=self.alibi_slopes,
            sink=self.sink,
            seen=[tree_seen(t, q_len, k_len) for t, q_len, k_len in lens] if c.tree else None,
            max_seqlen_q=max(c.q_lens, default=0),
            max_seqlen_k=max(c.k_lens, default=0),
        )

    def packed_case(self) -> Case:
        c = self.case
        return Case(
            q_lens=c.q_lens,
            k_lens=c.k_lens,
            dtype=c.dtype,
            q_heads=c.q_heads,
            kv_heads=c.kv_heads,
            head_dim=c.head_dim,
            value_dim=c.value_dim,
            layout="packed",
            causal=c.causal,
            window=(c.window[0], -1) if c.tree else c.window,
            scale=c.scale,
            softcap=c.softcap,
            alibi=("batch" if c.by_sequence else "heads") if c.alibi else "none",
            sink=c.sink,
            data=c.data,
            seed=c.seed,
        )


def paged_tensors(case: PagedCase) -> PagedTensors:
    """The sequences of a case; the same case gives the same bits."""
    c, rng = case, np.random.default_rng(case.seed)
    parts = [
        drawn(
            c,
            rng,
            [
                (q_len, c.q_heads, c.head_dim),
                (k_len, c.kv_heads, c.head_dim),
                (k_len, c.kv_heads, c.value_dim),
            ],
        )
        for q_len, k_len in zip(c.q_lens, c.k_lens, strict=True)
    ]
    batch = len(c.k_lens)
    of_heads = (batch if c.by_sequence else 1, c.kv_heads) if c.scales == "heads" else (1, 1)
    scales = rng.uniform(0.02, 0.2, (2, *of_heads))
    scales = np.broadcast_to(scales if c.quantized else 1.0, (2, batch, c.kv_heads))
    k_scale, v_scale = scales.astype(np.float32)
    dtype, stored = np.dtype(c.dtype), np.dtype(c.stored)
    new = rng.integers(0, c.new + 1, batch) if c.new_packed else np.full(batch, c.new)
    pads = rng.integers(0, 20, batch).tolist() if c.leftpad else [0] * batch
    old = [max(0, k_len - n) for k_len, n in zip(c.k_lens, new.tolist(), strict=True)]
    width = c.head_dim // 4 if c.seed % 2 else c.head_dim // 2
    longest = max(c.k_lens, default=0) + max(c.q_lens, default=0) + max(pads, default=0)
    angles = rng.uniform(0, 2 * np.pi, (longest, width))
    return PagedTensors(
        case=case,
        q=[q.astype(dtype) for q, _, _ in parts],
        k=[
            quantized(k[:n], scale, stored)
            for (_, k, _), n, scale in zip(parts, old, k_scale, strict=True)
        ],
        v=[
            quantized(v[:n], scale, stored)
            for (_, _, v), n, scale in zip(parts, old, v_scale, strict=True)
        ],
        new_k=[k[n:].astype(dtype) for (_, k, _), n in zip(parts, old, strict=True)],
        new_v=[v[n:].astype(dtype) for (_, _, v), n in zip(parts, old, strict=True)],
        pads=pads,
        k_scale=k_scale,
        v_scale=v_scale,
        tree=[np.tril(rng.random((n, n)) < 0.6) | np.eye(n, dtype=bool) for n in c.q_lens],
        alibi_slopes=_slopes(c, rng),
        sink=rng.normal(0, 2, c.q_heads).astype(np.float32) if c.sink else None,
        cos=np.cos(angles).astype(dtype),
        sin=np.sin(angles).astype(dtype),
    )


def _slopes(c: PagedCase, rng: np.random.Generator) -> Array | None:
    if not c.alibi:
        return None
    shape = (len(c.q_lens), c.q_heads) if c.by_sequence else (c.q_heads,)
    return rng.uniform(0.01, 0.5, shape).astype(np.float32)


# ---- memory --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedInputs:
    """What an op is given, and what it may write."""

    tensors: PagedTensors
    arguments: dict[str, Any]  # of flash_attn_with_kvcache, on the device of the op
    kept: dict[str, Array]  # those that are read only, as they were
    q: Placed
    out: Placed
    lse: Placed
    caches: tuple[Array, Array]  # as they must be after the call
    rows: Any  # of q and out that belong to sequences

    def results(self) -> Results:
        """out (rows, Hq, Dv) and lse (Hq, rows) in float64. Fails where anything else was written:
        around the outputs, in slots of the cache that no new token has, or to an input.
        """
        c = self.tensors.case
        self.q.check_kept("q", c)
        for name, x in self.kept.items():
            check_kept(name, to_host(self.arguments[name]), x, c)
        for name, want in zip(("k_cache", "v_cache"), self.caches, strict=True):
            got = to_host(self.arguments[name])
            differ = got.view(np.uint8) != np.ascontiguousarray(want).view(np.uint8)
            if differ.any():
                raise AssertionError(
                    f"{name}: {differ.sum()} bytes are not as they should be, the first at "
                    f"{tuple(int(i) for i in np.argwhere(differ)[0])}; {c!r}"
                )
        out = self.out.read("out", self.rows, c)
        lse = self.lse.read("lse", (..., self.rows) if c.packed else ..., c)
        if c.packed:
            return out, lse
        batch, q_len, heads, size = out.shape
        rows = batch * q_len
        return out.reshape(rows, heads, size), lse.swapaxes(0, 1).reshape(heads, rows)


def spread(
    t: PagedTensors, xp: Any = np, *, order: int = 0, poison: int = POISON, tail: int = -1
) -> PagedInputs:
    """The sequences of a case in memory, on the device of `xp` (NumPy or CuPy).

    `order` is the seed of the pages that they have; bytes of `poison` fill the slots of nobody, and
    `tail` the table entries.
    """
    c, rng = t.case, np.random.default_rng((t.case.seed, order))
    layout = CacheLayout(c.layout)
    room = max(c.k_lens, default=0) + max(t.pads, default=0)
    page = (max(1, room) if c.tight else room + 3) if c.table == "rows" else c.page
    counts = [1 if c.table == "rows" else -(-n // page) for n in c.k_lens]
    blocks = sum(counts) + (0 if c.tight else 2)
    free = rng.permutation(blocks).tolist()
    ids = [[free.pop() for _ in range(n)] for n in counts]
    before = _empty_caches(t, layout, blocks, page, poison)
    after = tuple(x.copy() for x in before)
    for b, pages in enumerate(ids):
        for n, caches in ((len(t.k[b]), before), (c.k_lens[b], after)):
            for x, cache in zip(t.keys(b), caches, strict=True):
                in_slots = slots(cache, layout)
                at = t.pads[b] + np.arange(n)
                block = np.array(pages, int)[at // page]
                in_slots[block, at % page] = x[:n].reshape(n, *in_slots.shape[2:])
    arguments = _tables(t, ids, page, tail) | _scores(t)
    arguments["layout"] = c.layout
    lead = c.seed % 3 if c.packed else 0
    if c.packed:
        arguments["cu_seqlens_q"] = np.cumsum([lead, *c.q_lens], dtype=np.int32)
        arguments["max_seqlen_q"] = max(c.q_lens, default=0)
        rows: Any = slice(lead, lead + sum(c.q_lens))
    else:
        rows = slice(None)
    kept = {name: x for name, x in arguments.items() if isinstance(x, np.ndarray)}
    moved = arguments | {name: xp.array(x, order="C") for name, x in kept.items()}
    moved |= dict(zip(("k_cache", "v_cache"), (_move_cache(x, c, xp) for x in before), strict=True))
    q = _queries(t, lead)
    out = np.full((*q.shape[:-1], c.value_dim), np.nan, q.dtype)
    lse = np.full((*q.shape[:-3], q.shape[-2], q.shape[-3]), np.nan, np.float32)
    placed = Placed.of(q, c.memory, 1, xp, outside=POISON)
    out_at = Placed.of(out, c.memory, 2, xp, outside=CANARY, rows=rows)
    lse_rows = (..., rows) if c.packed else ...
    lse_at = Placed.of(lse, "contiguous", 3, xp, outside=CANARY, rows=lse_rows)
    moved |= {"q": placed.view, "out": out_at.view, "lse": lse_at.view}
    return PagedInputs(
        tensors=t, arguments=moved, kept=kept, q=placed, out=out_at, lse=lse_at, caches=after,
        rows=rows,
    )  # fmt: skip


def _empty_caches(
    t: PagedTensors, layout: CacheLayout, blocks: int, page: int, poison: int
) -> tuple[Array, Array]:
    """Caches full of poison."""
    c, dtype = t.case, np.dtype(t.case.stored)
    shapes = cache_shapes(
        layout,
        c.stored,
        blocks=blocks,
        page=page,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        value_dim=c.value_dim,
    )
    k, v = (
        np.full((*shape, dtype.itemsize), poison, np.uint8).view(dtype)[..., 0] for shape in shapes
    )
    return k, v


def _tables(t: PagedTensors, ids: list[list[int]], page: int, tail: int) -> dict[str, Any]:
    """How the pages of sequences are found, and how many tokens they have before the call."""
    c = t.case
    pads = np.array(t.pads, np.int32)
    old = pads + np.array([len(k) for k in t.k], np.int32)
    if c.table == "rows":
        rows = np.array([pages[0] for pages in ids], np.int32)
        found = {"cache_batch_idx": rows, "cache_seqlens": old}
        return found | ({"cache_leftpad": pads} if c.leftpad else {})
    if c.table == "csr":
        last = [(n - 1) % page + 1 if n else tail % page for n in c.k_lens]
        indices = [*(i for pages in ids for i in pages), *([] if c.tight else [tail])]
        return {
            "kv_indptr": np.cumsum([0, *map(len, ids)], dtype=np.int32),
            "kv_indices": np.array(indices, np.int32),
            "kv_last_page_len": np.array(last, np.int32),
        }
    columns = max([0, *map(len, ids)]) + (0 if c.tight else 1)
    table = np.full((len(ids), columns), tail, np.int32)
    for row, pages in zip(table, ids, strict=True):
        row[: len(pages)] = pages
    return {"block_table": table, "cache_seqlens": old}


def _scores(t: PagedTensors) -> dict[str, Any]:
    """The other arguments of the call."""
    c = t.case
    found: dict[str, Any] = {
        "softmax_scale": c.scale,
        "causal": c.causal,
        "window_size": c.window,
        "softcap": c.softcap,
        "alibi_slopes": t.alibi_slopes,
        "sink": t.sink,
        "split_tokens": c.split,
    }
    if c.quantized:
        found["kv_cache_dtype"] = CACHE_WORDS[c.stored]
        for name, scale in (("k_descale", t.k_scale), ("v_descale", t.v_scale)):
            found[name] = _given_scale(scale, c)
    if c.tree:
        found["tree_mask"] = _tree_mask(t)
    if c.new:
        join = np.concatenate if c.new_packed else np.stack
        found["k"], found["v"] = join(t.new_k), join(t.new_v)
        if c.new_packed:
            found["cu_seqlens_k_new"] = np.cumsum([0, *map(len, t.new_k)], dtype=np.int32)
        if c.rotary != "none":
            found |= {"rotary_cos": t.cos, "rotary_sin": t.sin}
            found["rotary_interleaved"] = c.rotary == "interleaved"
            found["max_seqlen_k"] = max(n + pad for n, pad in zip(c.k_lens, t.pads, strict=True))
    return found


def _given_scale(scale: Array, c: PagedCase) -> Any:
    """The argument of a call that means a scale (B, Hkv)."""
    if c.scales == "heads" and c.by_sequence:
        return scale
    of_heads = scale[0] if len(scale) else np.ones(c.kv_heads, np.float32)
    return {"number": float(of_heads[0]), "tensor": of_heads[:1], "heads": of_heads}[c.scales]


def _tree_mask(t: PagedTensors) -> Array:
    """The masks of all sequences as one array, garbage where none is."""
    c, longest = t.case, max(t.case.q_lens, default=1)
    if not c.packed:
        return np.concatenate([np.zeros((0, longest, longest), bool), *(m[None] for m in t.tree)])
    lead = c.seed % 3
    mask = np.ones((lead + sum(c.q_lens), longest), bool)
    first = lead
    for tree in t.tree:
        mask[first : first + len(tree), : len(tree)] = tree
        first += len(tree)
    return mask


def _queries(t: PagedTensors, lead: int) -> Array:
    c, size = t.case, (t.case.q_heads, t.case.head_dim)
    if c.packed:
        before = np.full((lead, *size), np.nan, c.dtype)
        return np.concatenate([before, *t.q])
    longest = max(c.q_lens, default=1)
    return np.concatenate([np.empty((0, longest, *size), c.dtype), *(q[None] for q in t.q)])


def _move_cache(x: Array, c: PagedCase, xp: Any) -> Any:
    """A cache on the device of `xp`, with gaps every second block of a larger one; fp8 as bytes,
    which CuPy has no type for.
    """
    if c.stored.startswith("float8"):
        x = x.view(np.uint8)
    if c.memory != "gaps":
        return xp.asarray(np.ascontiguousarray(x))
    room = np.zeros((2 * len(x), *x.shape[1:]), x.dtype)
    room[::2] = x
    return xp.asarray(room)[::2]
