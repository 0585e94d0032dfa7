# SPDX-License-Identifier: Apache-2.0
"""Tensor maps: how an array looks to the tensor copies (TMA) of Hopper. No GPU, no CuPy.

`describe` turns what a plan wants and the spec of an array into the arguments of
cuTensorMapEncodeTiled, but for the address; `launch.py` encodes them for a GPU, and
`tools/emulator/driver.py` for the emulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from rawattn.arrays import DTYPES, Spec
from rawattn.plan.base import RAGGED, Part, TensorMap

ENCODED_DTYPES = {  # CUtensorMapDataType
    "uint8": 0,
    "int8": 0,
    "float8_e4m3fn": 0,
    "float8_e5m2": 0,
    "uint16": 1,
    "uint32": 2,
    "int32": 3,
    "float16": 6,
    "float32": 7,
    "bfloat16": 9,
}
SWIZZLES = (0, 32, 64, 128)  # bytes; places count as CUtensorMapSwizzle
L2 = (0, 64, 128, 256)  # bytes; as CUtensorMapL2promotion
MAX_SIZE = 2**32  # elements of a dimension
MAX_STRIDE = 2**40  # bytes, not included
MAX_BOX = 256  # elements of a dimension
MAX_RANK = 5
UNBOUNDED = 2**31 - 1  # size of the dimensions that `TensorMap.ragged` adds
WRAP = 2**64 // RAGGED  # bytes: RAGGED steps of it lead back to where they began


@dataclass(frozen=True, slots=True, kw_only=True)
class Described:
    """What cuTensorMapEncodeTiled takes beside an address; dimensions innermost first."""

    dtype: str  # a name of arrays.DTYPES
    sizes: tuple[int, ...]  # elements
    strides: tuple[int, ...]  # bytes, of all dimensions but the innermost
    box: tuple[int, ...]
    swizzle: int
    l2: int

    def __post_init__(self) -> None:
        row = self.box[0] * DTYPES[self.dtype].itemsize
        rank = len(self.sizes)
        requirements = {
            f"dtype {self.dtype}: accepted are {', '.join(ENCODED_DTYPES)}": (
                self.dtype in ENCODED_DTYPES
            ),
            f"{rank} dimensions: accepted are 1 to {MAX_RANK}": 1 <= rank <= MAX_RANK,
            f"box {self.box} for {rank} dimensions": len(self.box) == rank,
            f"sizes {self.sizes}: accepted are 1 to {MAX_SIZE}": (
                all(1 <= n <= MAX_SIZE for n in self.sizes)
            ),
            f"strides {self.strides} bytes: accepted are multiples of 16 below {MAX_STRIDE}": (
                all(map(legal_stride, self.strides))
            ),
            f"box {self.box}: accepted are 1 to {MAX_BOX}": all(
                1 <= b <= MAX_BOX for b in self.box
            ),
            f"a row of the box has {row} bytes: accepted are multiples of 16": row % 16 == 0,
            f"swizzle {self.swizzle}: accepted are {SWIZZLES}": self.swizzle in SWIZZLES,
            f"a row of the box has {row} bytes: accepted are {self.swizzle}, the swizzle": (
                self.swizzle == 0 or row <= self.swizzle
            ),
            f"l2 {self.l2}: accepted are {L2}": self.l2 in L2,
        }
        refused = [what for what, kept in requirements.items() if not kept]
        if refused:
            raise ValueError(f"tensor map: {'; '.join(refused)}")


def legal_stride(stride: int) -> bool:
    """Whether a dimension of more than one element may have a stride, in bytes. 0 may be: a copy
    then takes the same elements again.
    """
    return stride % 16 == 0 and 0 <= stride < MAX_STRIDE


def describe(wanted: TensorMap, spec: Spec) -> Described:
    """The map of an array of a spec. ValueError for what no tensor map can describe.

    An array without elements gets a map of one element, which no kernel copies.
    """
    shape, byte_strides = spec.shape, spec.byte_strides
    parts = [axis if isinstance(axis, Part) else Part(axis, 1) for axis in wanted.axes]
    if len(shape) == max(part.axis for part in parts):  # packed: a batch of 1
        shape, byte_strides = (1, *shape), (0, *byte_strides)
    left_out = {axis for axis, n in enumerate(shape) if n > 1} - {part.axis for part in parts}
    if left_out - ({0} if wanted.ragged else set()):
        raise ValueError(f"{wanted.field} leaves out axes {left_out} of {wanted.array}, {spec}")
    sizes, strides = [], []
    for axis, step, size in parts:
        if not size and shape[axis] % step:
            raise ValueError(f"{wanted.field}: axis {axis} of {spec} is no multiple of {step}")
        sizes.append(size or shape[axis] // step)
        strides.append(step * byte_strides[axis])
    if 0 in shape:
        sizes = [1] * len(sizes)
    if sizes[0] > 1 and strides[0] != DTYPES[spec.dtype].itemsize:
        raise ValueError(
            f"{wanted.field}: the first dimension of {spec} is not its contiguous axis"
        )
    # What stands where an axis has one element is no promise; 16 is always legal.
    outer = [s if n > 1 else 16 for s, n in zip(strides[1:], sizes[1:], strict=True)]
    box = wanted.box
    if wanted.ragged:
        row = _row_stride(wanted, shape, byte_strides)
        sizes = [sizes[0], RAGGED, sizes[2], UNBOUNDED, UNBOUNDED]
        outer = [row, outer[1], WRAP - row, row]
        box = (*box, 1, 1)
    return Described(
        dtype=spec.dtype,
        sizes=tuple(sizes),
        strides=tuple(outer),
        box=box,
        swizzle=wanted.swizzle,
        l2=wanted.l2,
    )


def _row_stride(wanted: TensorMap, shape: tuple[int, ...], byte_strides: tuple[int, ...]) -> int:
    """Bytes between the rows of a ragged map, of which a batch is a whole number apart."""
    if wanted.axes != (3, 1, 2):
        raise ValueError(
            f"{wanted.field}: axes {wanted.axes}: accepted of ragged maps is (3, 1, 2)"
        )
    if not _rows_apart(shape, byte_strides):
        raise ValueError(f"{wanted.field}: sequences of {byte_strides[:2]} bytes are no rows apart")
    if shape[1] > 1:
        return byte_strides[1]
    return byte_strides[0] if shape[0] > 1 else 16


def _rows_apart(shape: tuple[int, ...], byte_strides: tuple[int, ...]) -> bool:
    """Whether the sequences of a dense array (batch, row, ..) are a whole number of rows apart."""
    if min(shape[:2]) <= 1:
        return True
    return byte_strides[1] > 0 and byte_strides[0] % byte_strides[1] == 0


def describable(spec: Spec, *, ragged: bool = False) -> bool:
    """Whether tensor maps exist for an array (.., row, head, column) whose rows are aligned to 16
    bytes.
    """
    axes = zip(spec.shape[:-1], spec.byte_strides[:-1], strict=True)
    if not all(n <= MAX_SIZE and legal_stride(stride) for n, stride in axes if n > 1):
        return math.prod(spec.shape) == 0
    return not ragged or len(spec.shape) < 4 or _rows_apart(spec.shape, spec.byte_strides)
