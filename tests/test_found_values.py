# SPDX-License-Identifier: Apache-2.0
"""As `test_found`, of values that caches hold and scales that they are held with."""

from __future__ import annotations

import numpy as np
import pytest

import rawattn


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_scales_at_their_bounds_are_taken(scale: float) -> None:
    """Of arrays as of numbers: float32's nearest lie on either side of them."""
    key, cache = np.zeros((1, 2, 16), np.float32), np.zeros((1, 4, 2, 16), np.int8)
    for given in (scale, np.array([scale], np.float32)):
        rawattn.reshape_and_cache_flash(key, key, cache, cache.copy(), np.array([0]), "int8", given)


def test_int8_has_no_nan() -> None:
    """All backends hold the least number for one, as the kernels do."""
    row = np.array([[[np.nan, np.inf, -np.inf, 2.5]]], np.float32)
    caches = np.zeros((2, 1, 1, 1, 4), np.int8)
    slots = np.array([0])
    rawattn.reshape_and_cache_flash(row, row, *caches, slots, kv_cache_dtype="int8")
    assert caches[0].ravel().tolist() == [-128, 127, -128, 2]


def test_caches_whose_blocks_are_copied_may_differ() -> None:
    few, many = np.arange(3.0, dtype=np.float16)[:, None], np.arange(5, dtype=np.int8)[:, None]
    rawattn.copy_blocks([few], [many], np.array([[0, 2]]))
    assert few.ravel().tolist() == [0, 1, 0] and many.ravel().tolist() == [0, 1, 0, 3, 4]
    with pytest.raises(ValueError, match=r"block_mapping\[0, 1\] is 3: accepted are 0 to 2"):
        rawattn.copy_blocks([few], [many], np.array([[0, 3]]))
