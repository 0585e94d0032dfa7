# SPDX-License-Identifier: Apache-2.0
"""Test any attention kernel: cases, inputs with poison and canaries, one comparison, and laws.

`strategies`, which draws cases, needs Hypothesis (the extra [test]) and is imported apart: `from
rawattn.testing.strategies import problems`. docs/testing.md has a whole example.
"""

from rawattn.testing.cases import Case, Limits
from rawattn.testing.closeness import Record, assert_close, assert_same
from rawattn.testing.inputs import Inputs, Tensors, make_inputs, place, tensors
from rawattn.testing.laws import LAWS, Law
from rawattn.testing.ops import Attention, Op, expected, public_op, run

__all__ = [
    "LAWS",
    "Attention",
    "Case",
    "Inputs",
    "Law",
    "Limits",
    "Op",
    "Record",
    "Tensors",
    "assert_close",
    "assert_same",
    "expected",
    "make_inputs",
    "place",
    "public_op",
    "run",
    "tensors",
]
# A repro line names a law: `from rawattn.testing import *` brings them all.
globals().update({law.name: law for law in LAWS})
__all__ += [law.name for law in LAWS]
