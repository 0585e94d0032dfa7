# SPDX-License-Identifier: Apache-2.0
"""What tensor maps describe: sizes and strides of what a kernel of sm_90 sees of an array."""

from __future__ import annotations

from typing import Any

import pytest

from rawattn.arrays import Spec, contiguous
from rawattn.plan.base import RAGGED, Part, TensorMap
from rawattn.tensor_map import UNBOUNDED, describable, describe

DENSE = contiguous((2, 50, 4, 96), "bfloat16", 0)
PACKED = contiguous((50, 4, 96), "bfloat16", 0)


def wanted(**changes: Any) -> TensorMap:
    return TensorMap(**{"field": "m", "array": "x", "box": (64, 128, 1, 1), **changes})


def test_a_map_of_a_dense_array() -> None:
    found = describe(wanted(), DENSE)
    assert (found.dtype, found.sizes) == ("bfloat16", (96, 50, 4, 2))
    assert found.strides == (4 * 96 * 2, 96 * 2, 50 * 4 * 96 * 2)
    assert (found.box, found.swizzle, found.l2) == ((64, 128, 1, 1), 128, 256)


def test_a_packed_array_has_one_batch() -> None:
    found = describe(wanted(), PACKED)
    assert found.sizes == (96, 50, 4, 1) and found.strides[:2] == (768, 192)
    assert describe(wanted(axes=(3, 1, 2), box=(64, 128, 1)), PACKED).sizes == (96, 50, 4)


RAGGED_BOX = {"axes": (3, 1, 2), "box": (64, 128, 1), "ragged": True}


@pytest.mark.parametrize("spec", [PACKED, DENSE], ids=["packed", "dense"])
def test_a_ragged_map_ends_where_a_sequence_does(spec: Spec) -> None:
    """Sequences of a dense array are a whole number of rows apart."""
    found = describe(wanted(**RAGGED_BOX), spec)
    assert found.sizes == (96, RAGGED, 4, UNBOUNDED, UNBOUNDED)
    assert found.strides == (768, 192, 2**34 - 768, 768)
    assert found.box == (64, 128, 1, 1, 1)
    first, length, i, head = 20, 10, 3, 2
    at = RAGGED - length + i, head, RAGGED, first + length
    place = sum(x * stride for x, stride in zip(at, found.strides, strict=True))
    assert place % 2**64 == 768 * (first + i) + 192 * head


def test_ragged_maps_of_few_rows() -> None:
    one_row = Spec((5, 1, 4, 96), (4096, 7, 192, 2), "float16", 0)
    assert describe(wanted(**RAGGED_BOX), one_row).strides == (4096, 192, 2**34 - 4096, 4096)
    one_sequence = Spec((1, 5, 4, 96), (3, 768, 192, 2), "float16", 0)
    assert describe(wanted(**RAGGED_BOX), one_sequence).strides[0] == 768
    shared = Spec((5, 2, 4, 96), (0, 768, 192, 2), "float16", 0)
    assert describe(wanted(**RAGGED_BOX), shared).strides[0] == 768
    repeated = Spec((5, 2, 4, 96), (768, 0, 192, 2), "float16", 0)
    assert describable(repeated) and not describable(repeated, ragged=True)
    odd = Spec((5, 2, 4, 96), (1552, 768, 192, 2), "float16", 0)
    assert describable(odd) and not describable(odd, ragged=True)
    with pytest.raises(ValueError, match=r"sequences of \(1552, 768\) bytes are no rows apart"):
        describe(wanted(**RAGGED_BOX), odd)
    for spec in (one_row, one_sequence, shared, PACKED, DENSE):
        assert describable(spec, ragged=True)


def test_axes_in_parts() -> None:
    heads = wanted(axes=(3, Part(2, 1, 2), 1, Part(2, 2), 0), box=(64, 2, 64, 1, 1))
    found = describe(heads, DENSE)
    assert found.sizes == (96, 2, 50, 2, 2) and found.strides == (192, 768, 384, 38400)
    chunks = wanted(axes=(Part(3, 1, 32), 1, Part(3, 32), 2, 0), box=(32, 50, 3, 1, 1), swizzle=64)
    found = describe(chunks, DENSE)
    assert found.sizes == (32, 50, 3, 4, 2) and found.strides == (768, 64, 192, 38400)


def test_axes_of_one_element_have_any_stride() -> None:
    odd = Spec((1, 50, 1, 96), (3, 192, 7, 2), "float16", 0)
    assert describable(odd) and describe(wanted(), odd).strides == (192, 16, 16)


def test_arrays_without_elements_have_a_map_all_the_same() -> None:
    for shape in ((2, 0, 4, 96), (0, 4, 96), (2, 50, 0, 96)):
        spec = contiguous(shape, "float16", 0)
        assert describable(spec) and set(describe(wanted(), spec).sizes) == {1}
        spec = Spec(shape, (0,) * len(shape), "float16", 0)  # as NumPy's casts make them
        assert set(describe(wanted(), spec).sizes) == {1}


@pytest.mark.parametrize(
    ("strides", "fine"),
    [
        ((38400, 768, 192, 2), True),
        ((1 << 39, 768, 192, 2), True),
        ((1 << 40, 768, 192, 2), False),
        ((38400, 768, 0, 2), True),
        ((38400, 0, 192, 2), True),
        ((38400, 776, 192, 2), False),
    ],
)
def test_what_no_map_can_describe(strides: tuple[int, ...], fine: bool) -> None:
    spec = Spec((2, 50, 4, 96), strides, "float16", 0)
    assert describable(spec) == fine
    if fine:
        assert describe(wanted(), spec).sizes == (96, 50, 4, 2)
    else:
        with pytest.raises(ValueError, match=r"strides .* bytes: accepted are multiples of 16"):
            describe(wanted(), spec)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"axes": (3, 1, 2), "box": (64, 64, 1)}, "m leaves out axes {0} of x"),
        ({"box": (64, 64)}, "for 4 dimensions"),
        ({"box": (128, 64, 1, 1)}, "a row of the box has 256 bytes: accepted are 128"),
        ({"box": (64, 257, 1, 1)}, "accepted are 1 to 256"),
        ({"swizzle": 16}, "swizzle 16: accepted are"),
        ({"l2": 512}, "l2 512: accepted are"),
        ({"axes": (1, 3, 2, 0)}, "not its contiguous axis"),
        ({"axes": (3, 1, Part(2, 3), 0)}, "no multiple of 3"),
        ({"ragged": True}, "accepted of ragged maps is"),
    ],
)
def test_maps_that_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words.replace("{", r"\{")):
        describe(wanted(**changes), DENSE)
