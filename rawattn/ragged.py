# SPDX-License-Identifier: Apache-2.0
"""Values (batch, row, head, column) as a ragged tensor map sees them, which ends where a sequence
does: the rows of all sequences, or pages, as those of one.

Keys need no such map: those behind the end are masked, and never multiplied.
"""

from __future__ import annotations

from rawattn.arrays import Spec
from rawattn.problem import MAX_LENGTH
from rawattn.tensor_map import describable


def rows_of_one(values: Spec) -> bool:
    """Whether there is such a map of values, and kernels can count its rows."""
    if not describable(values, ragged=True):
        return False
    return values.shape[0] * rows_apart(values) <= MAX_LENGTH


def rows_apart(values: Spec) -> int:
    """Rows from a sequence, or page, to the next: 1, where none has more."""
    sequence, row = values.steps[:2]
    return sequence // row if row else 1
