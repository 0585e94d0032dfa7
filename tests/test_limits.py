# SPDX-License-Identifier: Apache-2.0
"""Limits of an op under test say what no case has, instead of dropping it."""

from __future__ import annotations

import pydoc
from typing import Any

import pytest

from rawattn.testing import Limits
from rawattn.testing.paged_cases import PagedLimits


@pytest.mark.parametrize(
    ("limits", "error", "message"),
    [
        (
            {"layouts": ("dense", "packt")},
            ValueError,
            r"layouts holds 'packt': accepted are \('den",
        ),
        ({"layouts": "dense"}, TypeError, "layouts='dense': accepted are tuples"),
        (
            {"head_dims": (64, 320)},
            ValueError,
            r"head_dims holds 320: accepted are tuple\(range\(1, 257\)\)",
        ),
        ({"causal": False}, TypeError, "causal=False: accepted are tuples"),
        ({"windows": (False,)}, TypeError, r"windows=\(False,\): accepted are False and True"),
        ({"max_len": 1000}, ValueError, "max_len=1000: accepted are 0 to 300"),
        ({"max_batch": True}, TypeError, "max_batch=True: accepted are integers"),
    ],
)
def test_limits_that_no_case_has(limits: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        Limits(**limits)


def test_limits_of_paged_caches() -> None:
    with pytest.raises(ValueError, match=r"pages holds 4: accepted are \(1, 2, 3, 5"):
        PagedLimits(pages=(16, 4))


def test_limits_may_be_empty() -> None:
    nothing = Limits(layouts=("dense",), max_len=0) & Limits(layouts=("packed",))
    assert nothing.layouts == () and nothing.max_len == 0


def test_sizes_are_short_where_limits_are_shown() -> None:
    assert "head_dims=tuple(range(1, 257))" in repr(Limits())
    assert len(pydoc.render_doc(Limits)) < 6000
    assert Limits(head_dims=Limits().head_dims) == Limits() & Limits() == Limits()
