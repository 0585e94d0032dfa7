# SPDX-License-Identifier: Apache-2.0
"""What is asked for: a frozen, hashable description of one attention call, with no pointers and no
lengths in it.

`Problem` holds *bounds* (batch, longest sequence, rows stored), never per-sequence lengths: those
may live on the GPU, and reading them would synchronise. Everything that chooses code or launch
shape is here; everything that is only a number for the kernel (softmax scale, softcap value,
strides, addresses) is not.
"""

from __future__ import annotations

import enum
import math
import numbers
import operator
from dataclasses import dataclass, field, replace
from typing import Any

MAX_LENGTH = 2**30  # of a sequence: kernels add a row, a window and a shift in 32 bits
SMALLEST, LARGEST = 1e-18, 1e18  # softmax scale and softcap: their ratio too is a float32


class Unsupported(NotImplementedError):
    """No backend takes the problem; the message holds the reason of every one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """The keys that a query row sees, counted from its diagonal.

    Row ``i`` of a sequence with ``Sq`` queries and ``Sk`` keys has its diagonal at key ``i + Sk -
    Sq``, or at key ``i`` where `top_left` is set. It sees keys ``diagonal - left`` to ``diagonal +
    right``, both inclusive; -1 is unbounded. Causal attention is ``right=0``.
    """

    left: int = -1
    right: int = -1
    top_left: bool = False

    @classmethod
    def of(cls, causal: bool | str = False, window_size: tuple[int, int] = (-1, -1)) -> Mask:
        """The mask that the public arguments name: `causal` caps the right side of the window at
        the diagonal. TypeError for other kinds of arguments, ValueError for other values.
        """
        causal = check_causal(causal)
        left, right = check_window(window_size)
        if left < -1 or right < -1:
            raise ValueError(
                f"window_size={shown(window_size)}: accepted are -1 (unbounded) and counts from 0"
            )
        left, right = (-1 if w >= MAX_LENGTH else w for w in (left, right))
        if causal:
            right = 0
        return cls(left=left, right=right, top_left=causal == "top_left")

    def within(self, longest: int) -> Mask:
        """The same for sequences of up to `longest` queries and keys: a side of the window that
        reaches every key is unbounded, so that it gets the plan, and the bits, of none.
        """
        left, right = (-1 if side >= longest - 1 else side for side in (self.left, self.right))
        return replace(self, left=left, right=right)

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def trivial(self) -> bool:
        return self.left < 0 and self.right < 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Which steps lie between q.k and the softmax; their values are launch arguments."""

    softcap: bool = False
    alibi: bool = False
    sink: bool = False
    reversed: bool = False  # scale <= 0: the largest q.k is not the largest score
    extreme: bool = False  # softcap and scale > 0, but no numbers of softcap.py for them


class CacheLayout(enum.Enum):
    """How a paged KV cache lies in memory; x is 16 bytes of elements. Outer strides are free."""

    NHD = "NHD"  # K, V (blocks, page, Hkv, D)
    HND = "HND"  # K, V (blocks, Hkv, page, D)
    X_MAJOR = "x-major"  # K (blocks, Hkv, D/x, page, x), V (blocks, Hkv, D, page)


class Rows(enum.Enum):
    """How the sequences of a batch lie in an array."""

    DENSE = "dense"  # (B, S, H, D): every sequence has S rows
    PADDED = "padded"  # (B, S, H, D), of which the first seqused[b] rows count
    PACKED = "packed"  # (total, H, D), sequence b at rows cu_seqlens[b] to cu_seqlens[b + 1]
    PACKED_USED = (
        "packed, used"  # packed, of which the first seqused[b] rows of each sequence count
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One forward attention call. `max_q` and `max_k` bound the lengths of the sequences."""

    dtype: str  # a name of arrays.DTYPES: "float16", "bfloat16", "float32"
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_q: int
    max_k: int
    q_rows: Rows = Rows.DENSE
    k_rows: Rows = Rows.DENSE
    mask: Mask = field(default_factory=Mask)
    scores: Scores = field(default_factory=Scores)
    # every row of q, k, v and out starts on, and is a multiple of, this many bytes
    copy_bytes: int = 16
    # whether tensor maps can describe q, k, v and out, where copy_bytes is 16
    tma: bool = True

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // max(1, self.kv_heads)

    @property
    def empty(self) -> bool:
        """Whether there is no output row to write, so that nothing is launched."""
        return 0 in (self.batch, self.max_q, self.q_heads, self.value_dim)

    def __str__(self) -> str:
        scores = [name for name in Scores.__slots__ if getattr(self.scores, name)]
        window = f"window ({self.mask.left}, {self.mask.right})"
        return (
            f"{self.dtype}, batch {self.batch}, heads {self.q_heads} over {self.kv_heads}, "
            f"head dims {self.head_dim} and {self.value_dim}, up to {self.max_q} rows and "
            f"{self.max_k} keys, {'no mask' if self.mask.trivial else window}"
            + "".join(f", {name}" for name in scores)
        )


# ---- arguments ----


def shown(value: Any) -> str:
    """A value as messages have it: on one line, and cut off where it is long, as an array's is."""
    text = " ".join(repr(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def check_backend(backend: Any) -> str | None:
    """The argument; TypeError for what is neither a name nor None."""
    if backend is not None and not isinstance(backend, str):
        raise TypeError(f"backend={shown(backend)}: accepted are None and the name of a backend")
    return backend


def check_causal(causal: Any) -> bool | str:
    """The argument, if it is one of the four that are accepted."""
    accepted = "accepted are False, True, 'bottom_right' and 'top_left'"
    if not isinstance(causal, (bool, str)):
        raise TypeError(f"causal={shown(causal)}: {accepted}")
    if isinstance(causal, str) and causal not in ("bottom_right", "top_left"):
        raise ValueError(f"causal={shown(causal)}: {accepted}")
    return causal


def check_window(window_size: Any) -> tuple[int, int]:
    """A pair of integers; TypeError for what is none, ValueError for another number of them."""

    def refusal(error: type[Exception]) -> Exception:
        accepted = "accepted is a pair of integers (left, right)"
        return error(f"window_size={shown(window_size)}: {accepted}")

    if not isinstance(window_size, (tuple, list)) or any(isinstance(w, bool) for w in window_size):
        raise refusal(TypeError)
    try:
        window = tuple(operator.index(w) for w in window_size)
    except TypeError:
        raise refusal(TypeError) from None
    if len(window) != 2:
        raise refusal(ValueError)
    return window


def check_scalar(name: str, value: Any, *, positive: bool = False, zero: bool = True) -> float:
    """A number that float32 holds, also times log2(e), and over or under another such number.

    `positive`: none below 0 is accepted; `zero`: 0 is. TypeError for what is no number, ValueError
    for others; both name the argument.
    """
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name}={shown(value)}: accepted is a number, found {type(value).__qualname__}"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    size = number if positive else abs(number)
    if not (zero and number == 0) and not SMALLEST <= size <= LARGEST:
        also, signs = "0 and " if zero else "", "" if positive else "of either sign "
        raise ValueError(
            f"{name}={number}: accepted are {also}numbers {signs}from {SMALLEST} to {LARGEST}"
        )
    return number
