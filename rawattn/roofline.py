# SPDX-License-Identifier: Apache-2.0
"""The one formula for work: exact FLOPs, least bytes, and the least time they take on a device.

FLOPs count the two matrix products, 2 a multiply-add, over exactly the (query, key) pairs that the
mask lets through; softmax, score steps and masked halves of a tile are not counted. Bytes count
what must cross device memory at least once: query rows that see a key, keys and values that some
row sees, every output row. Tables, slopes, sinks and cumulated lengths are left out; so both are
lower bounds, and a measured efficiency never flatters.

`convention_flops` is what published TFLOP/s figures divide by, the field's convention. Exact FLOPs
of a causal square are larger by (S + 1) / S; those of a window, or of a causal rectangle, differ
freely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rawattn.arrays import DTYPES
from rawattn.device import DEVICES, Device
from rawattn.problem import Mask, Problem

TENSOR_CORE_DTYPES = ("float16", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a problem asks of any device."""

    flops: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """The least time that a device needs for some work, and which of its two limits sets it."""

    work: Work
    compute_seconds: float
    memory_seconds: float

    @property
    def bound(self) -> str:
        return "compute" if self.compute_seconds >= self.memory_seconds else "memory"

    @property
    def seconds(self) -> float:
        return max(self.compute_seconds, self.memory_seconds)

    def efficiency(self, seconds: float) -> float:
        """The share of the limit that a measured time reaches, 0 to 1."""
        return self.seconds / seconds


def _clamped_sum(count: int, start: int, cap: int) -> int:
    """The sum of min(max(start + i, 0), cap) over 0 <= i < count."""

    def triangle(n: int) -> int:
        return n * (n - 1) // 2 if n > 0 else 0

    def above(floor: int) -> int:
        return triangle(start + count - floor) - triangle(start - floor)

    return above(0) - above(cap)


def _edges(q_len: int, k_len: int, mask: Mask) -> tuple[int, int]:
    """First key of row 0 and the key past its last, unclamped; each later row adds 1 to both."""
    diagonal = 0 if mask.top_left else k_len - q_len
    first = -q_len if mask.left < 0 else diagonal - mask.left
    past = k_len if mask.right < 0 else diagonal + mask.right + 1
    return first, past


def visible_pairs(q_len: int, k_len: int, mask: Mask) -> int:
    """(query, key) pairs that a mask lets through, of one head of one sequence, in closed form."""
    first, past = _edges(q_len, k_len, mask)
    return _clamped_sum(q_len, past, k_len) - _clamped_sum(q_len, first, k_len)


def visible_rows(q_len: int, k_len: int, mask: Mask) -> tuple[int, int]:
    """Query rows that see some key, and keys that some row sees, of one sequence."""
    if q_len == 0 or k_len == 0:
        return 0, 0
    first, past = _edges(q_len, k_len, mask)
    queries = min(q_len, k_len - first) - max(0, 1 - past)
    keys = min(k_len, past + q_len - 1) - max(0, first)
    return max(0, queries), max(0, keys)


def work(
    problem: Problem, lengths: Sequence[tuple[int, int]] | None = None, *, lse: bool = False
) -> Work:
    """Exact FLOPs and least bytes of a problem.

    `lengths` holds the (queries, keys) of each sequence; without it every sequence has `max_q` and
    `max_k`, which is exact for dense rows and an upper bound for others. `lse` counts the
    log-sum-exp output too.
    """
    if lengths is None:
        lengths = [(problem.max_q, problem.max_k)] * problem.batch
    elif len(lengths) != problem.batch:
        raise ValueError(
            f"lengths={lengths!r}: accepted is a pair for each of {problem.batch} sequences"
        )
    p, flops, elements, out_rows = problem, 0, 0, 0
    for q_len, k_len in lengths:
        queries, keys = visible_rows(q_len, k_len, p.mask)
        flops += 2 * p.q_heads * (p.head_dim + p.value_dim) * visible_pairs(q_len, k_len, p.mask)
        elements += queries * p.q_heads * p.head_dim + keys * p.kv_heads * (
            p.head_dim + p.value_dim
        )
        out_rows += q_len * p.q_heads
    moved = (elements + out_rows * p.value_dim) * DTYPES[p.dtype].itemsize + (
        4 * out_rows if lse else 0
    )
    return Work(flops=flops, bytes=moved)


def convention_flops(problem: Problem) -> int:
    """The FLOPs of published figures: 2 B H Sq Sk (D + Dv), halved where the mask is causal."""
    p = problem
    full = 2 * p.batch * p.q_heads * p.max_q * p.max_k * (p.head_dim + p.value_dim)
    return full // 2 if p.mask.causal else full


def limit(
    problem: Problem, device: Device, lengths: Sequence[tuple[int, int]] | None = None
) -> Roofline:
    """The least time that the work of a problem takes on a device; `lengths` as in `work`.

    ValueError where the peaks of the device are not known, or not for the dtype.
    """
    if device.tflops is None or device.gb_per_s is None:
        raise ValueError(
            f"device={device.name!r}: its peaks are not known; accepted are {', '.join(DEVICES)}"
        )
    if problem.dtype not in TENSOR_CORE_DTYPES:
        raise ValueError(
            f"dtype={problem.dtype!r}: peaks are known for {' and '.join(TENSOR_CORE_DTYPES)}"
        )
    needed = work(problem, lengths)
    return Roofline(
        work=needed,
        compute_seconds=needed.flops / (1e12 * device.tflops),
        memory_seconds=needed.bytes / (1e9 * device.gb_per_s),
    )
