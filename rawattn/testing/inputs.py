# SPDX-License-Identifier: Apache-2.0
"""From a `Case` to arrays: poison where nothing may be read, canaries where nothing may be written.

`tensors(case)` gives the logical arrays in NumPy, for the reference; `place(tensors, xp)` lays them
out in memory as the case says, in NumPy or CuPy, for the kernel. `make_inputs(case, xp)` is both.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import ml_dtypes  # noqa: F401  makes np.dtype("bfloat16") known
import numpy as np
from numpy.typing import NDArray

from rawattn.testing.cases import Case

Array = NDArray[Any]
Results = tuple[Array, Array]  # out and lse
POISON = 0xFF  # a NaN in every float type, when all its bytes are this
CANARY = 0x5A  # every byte around an output
MARGIN = 64  # elements before and behind an array; a multiple of 16 bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensors:
    """The logical arrays of a case, contiguous NumPy; rows that no sequence uses hold NaN."""

    case: Case
    q: Array
    k: Array
    v: Array
    cu_seqlens_q: Array | None = None
    cu_seqlens_k: Array | None = None
    seqused_k: Array | None = None
    alibi_slopes: Array | None = None
    sink: Array | None = None
    seen: list[Array] | None = None  # besides the mask, as in `reference`
    max_seqlen_q: int
    max_seqlen_k: int

    @property
    def rows(self) -> slice:
        """The rows of q and out that belong to a sequence; for dense arrays, all of them."""
        if self.cu_seqlens_q is None:
            return slice(None)
        return slice(int(self.cu_seqlens_q[0]), int(self.cu_seqlens_q[-1]))

    def sequences(self) -> list[tuple[Array, Array, Array]]:
        """q, k and v of each sequence, as views without the slots that do not count."""

        def split(x: Array, cu_seqlens: Array | None) -> list[Array]:
            if cu_seqlens is None:
                return list(x)
            return [x[a:b] for a, b in itertools.pairwise(cu_seqlens.tolist())]

        ks, vs = split(self.k, self.cu_seqlens_k), split(self.v, self.cu_seqlens_k)
        used = self.case.k_lens
        qs = split(self.q, self.cu_seqlens_q)
        return [(q, k[:n], v[:n]) for q, k, v, n in zip(qs, ks, vs, used, strict=True)]


def drawn(case: Any, rng: np.random.Generator, shapes: list[tuple[int, ...]]) -> list[Array]:
    """q, k and v of one sequence, float32, in the pattern of a case with `data` and `dtype`."""
    q, k, v = (rng.standard_normal(shape, np.float32) for shape in shapes)
    match case.data:
        case "tiny":
            q, k, v = q * 2.0**-7, k * 2.0**-7, v * 2.0**-13
        case "huge":
            q, k, v = q * 16, k * 16, v * (2.0**12 if case.dtype == "float16" else 2.0**96)
        case "dominant" if len(k):
            k[rng.integers(len(k))] *= 32
        case "equal" if len(k):
            k[:] = k[0]
        case "negative_zero":
            q, v = q * -0.0, np.where(v > 0, -0.0, v)
        case "integers":
            k, v = (rng.integers(-4, 5, x.shape).astype(np.float32) for x in (k, v))
    return [q, k, v]


def _cumulative(first: int, lengths: list[int]) -> Array:
    return np.cumsum([first, *lengths], dtype=np.int32)


def tensors(case: Case) -> Tensors:
    """The arrays of a case; the same case gives the same bits."""
    rng = np.random.default_rng(case.seed)
    dtype = np.dtype(case.dtype)
    parts = [
        drawn(
            case,
            rng,
            [
                (q_len, case.q_heads, case.head_dim),
                (k_len, case.kv_heads, case.head_dim),
                (k_len, case.kv_heads, case.value_dim),
            ],
        )
        for q_len, k_len in zip(case.q_lens, case.k_lens, strict=True)
    ]
    spare = {"padded": 3, "packed_used": 2}.get(case.layout, 0)
    lead, tail = (0, 0) if case.layout == "dense" else rng.integers(0, 3, 2).tolist()
    longest_q, longest_k = max(case.q_lens, default=0), max(case.k_lens, default=0)

    def dense(index: int, rows: int) -> Array:
        x = np.full((case.batch, rows, *_tail_shape(case, index)), np.nan, dtype)
        for b, part in enumerate(parts):
            x[b, : len(part[index])] = part[index].astype(dtype)
        return x

    def packed(index: int, cu_seqlens: Array) -> Array:
        x = np.full((cu_seqlens[-1] + tail, *_tail_shape(case, index)), np.nan, dtype)
        for first, part in zip(cu_seqlens.tolist(), parts, strict=False):
            x[first : first + len(part[index])] = part[index].astype(dtype)
        return x

    dense_q, dense_k = case.layout == "dense", case.layout in ("dense", "padded")
    cu_q = None if dense_q else _cumulative(lead, list(case.q_lens))
    cu_k = None if dense_k else _cumulative(tail, [n + spare for n in case.k_lens])
    slopes = rng.uniform(
        0.01, 0.5, (case.q_heads,) if case.alibi == "heads" else (case.batch, case.q_heads)
    )
    sink = rng.normal(0, 2, case.q_heads).astype(np.float32)
    return Tensors(
        case=case,
        q=dense(0, longest_q) if cu_q is None else packed(0, cu_q),
        k=dense(1, longest_k + spare) if cu_k is None else packed(1, cu_k),
        v=dense(2, longest_k + spare) if cu_k is None else packed(2, cu_k),
        cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k,
        seqused_k=np.array(case.k_lens, np.int32) if spare else None,
        alibi_slopes=None if case.alibi == "none" else slopes.astype(np.float32),
        sink=sink if case.sink else None,
        max_seqlen_q=longest_q + (0 if dense_q else 2 * lead),  # a bound, not the maximum
        max_seqlen_k=longest_k + spare,
    )


def _tail_shape(case: Case, index: int) -> tuple[int, int]:
    """Heads and columns of q (0), k (1) and v (2)."""
    heads = case.q_heads if index == 0 else case.kv_heads
    return heads, case.value_dim if index == 2 else case.head_dim


# ---- memory --------------------------------------------------------------------------------------


def element_strides(shape: tuple[int, ...], memory: str, salt: int) -> tuple[int, tuple[int, ...]]:
    """Offset and strides, in elements, of an array whose last axis is contiguous; `salt` makes
    arrays differ.
    """
    order = list(reversed(range(len(shape))))  # innermost first
    if memory == "transposed" and len(shape) >= 3:
        order[1:3] = order[2:0:-1]  # rows inside heads
    gap = {"gaps": 8 * salt, "unaligned": 2 * salt + 1}.get(memory, 0)
    strides, step = [0] * len(shape), 1
    for axis in order:
        strides[axis] = step
        step = max(1, shape[axis]) * step + gap
    if memory == "odd_ones":
        strides = [
            s if n != 1 or axis == len(shape) - 1 else 2**31 + 7
            for axis, (n, s) in enumerate(zip(shape, strides, strict=True))
        ]
    return MARGIN + (1 if memory == "unaligned" else 0), tuple(strides)


def to_host(x: Any) -> Array:
    """An array of NumPy or CuPy in NumPy."""
    return np.asarray(x.get() if hasattr(x, "get") else x)


def check_kept(name: str, found: Array, before: Array, case: Any) -> None:
    """Fails where an input is not, bit for bit, what it was before the call."""
    if found.tobytes() != before.tobytes():
        raise AssertionError(f"{name}: an input was written, which a call only reads; {case!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """An array in memory: `view` lies in `buffer` between bytes that must stay as they are."""

    buffer: Any
    before: Array  # the buffer as it was, in NumPy
    view: Any
    index: Array  # position in buffer of each element of view

    @classmethod
    def of(cls, x: Array, memory: str, salt: int, xp: Any, outside: Any, rows: Any = ...) -> Placed:
        """`rows` of `x`, laid out in a buffer that holds bytes of `outside` (a uint8) everywhere
        else.
        """
        offset, strides = element_strides(x.shape, memory, salt)
        extent = sum((n - 1) * s for n, s in zip(x.shape, strides, strict=True) if n > 1) + 1
        size = offset + (extent if x.size else 0) + MARGIN
        as_strided = np.lib.stride_tricks.as_strided
        index = as_strided(np.arange(size)[offset:], x.shape, [8 * s for s in strides])
        buffer = np.full(size * x.itemsize, outside, np.uint8).view(x.dtype)
        buffer[index[rows]] = x[rows]
        moved = xp.array(buffer)
        view = xp.lib.stride_tricks.as_strided(
            moved[offset:], x.shape, [x.itemsize * s for s in strides]
        )
        return cls(buffer=moved, before=buffer, view=view, index=index)

    def host(self) -> Array:
        """The buffer in NumPy."""
        return to_host(self.buffer)

    def check_kept(self, name: str, case: Any) -> None:
        """Fails where anything of it was written."""
        check_kept(name, self.host(), self.before, case)

    def read(self, name: str, rows: Any, case: Any) -> Array:
        """`rows` of it in float64. Fails where anything else in its buffer was written."""
        buffer, written = self.host(), self.index[rows]
        outside = np.ones(buffer.size, bool)
        outside[written] = False
        changed = (buffer.view(np.uint8).reshape(buffer.size, -1) != CANARY).any(axis=1) & outside
        if changed.any():
            raise AssertionError(
                f"{name}: {changed.sum()} elements outside its rows were written, the first is "
                f"{changed.argmax()} of {buffer.size}; {case!r}"
            )
        return buffer[written].astype(np.float64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What a kernel is given: the tensors, placed, and outputs that start as NaN between
    canaries.
    """

    tensors: Tensors
    q: Placed
    k: Placed
    v: Placed
    out: Placed
    lse: Placed
    xp: Any

    def results(self) -> Results:
        """out and lse in float64, the rows of sequences only. Fails where anything else was
        written.
        """
        rows = self.tensors.rows
        case = self.tensors.case
        for name in ("q", "k", "v"):
            getattr(self, name).check_kept(name, case)
        return self.out.read("out", rows, case), self.lse.read("lse", (..., rows), case)


def place(t: Tensors, xp: Any = np) -> Inputs:
    """The tensors in memory as their case says, on the device of `xp` (NumPy or CuPy)."""
    case = t.case
    out = np.full((*t.q.shape[:-1], case.value_dim), np.nan, t.q.dtype)
    lse = np.full((*t.q.shape[:-3], t.q.shape[-2], t.q.shape[-3]), np.nan, np.float32)
    lse_memory = "contiguous" if case.memory == "transposed" else case.memory
    return Inputs(
        tensors=t,
        q=Placed.of(t.q, case.memory, 1, xp, outside=POISON),
        k=Placed.of(t.k, case.memory, 2, xp, outside=POISON),
        v=Placed.of(t.v, case.memory, 3, xp, outside=POISON),
        out=Placed.of(out, case.memory, 4, xp, outside=CANARY, rows=t.rows),
        lse=Placed.of(lse, lse_memory, 5, xp, outside=CANARY, rows=(..., t.rows)),
        xp=xp,
    )


def make_inputs(case: Case, xp: Any = np) -> Inputs:
    return place(tensors(case), xp)
