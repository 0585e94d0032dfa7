# SPDX-License-Identifier: Apache-2.0
"""Softcap, folded into the softmax of the forward kernels: the numbers that ``cuda/scores.cuh``
takes.

c tanh(s / c) is an odd polynomial of the product q.k while |s| < NEAR * c, with the scale in its
coefficients.
"""

from __future__ import annotations

import math

from rawattn.reference import softmax_scale

LOG2_E = math.log2(math.e)
# tanh(u) / u in powers of u * u: minimax of the relative error, 1.5e-6, over |u| < NEAR.
NEAR = 0.31
TERMS = 0.99999859, -0.33306849, 0.12588573
NONE = {"fold_near": 0.0, "fold_x": 0.0, "fold_x3": 0.0, "fold_x5": 0.0, "fold_power": 0.0}


def fold(scale: float, softcap: float) -> dict[str, float]:
    """The fields of FwdParams for a softcap of products times `scale`, both in natural units.

    fold_near is 0 where there is no softcap, where larger products have smaller scores, and where
    a coefficient would leave the range of float32: kernels then scale and cap one after the other.
    """
    if not (softcap > 0.0 and scale > 0.0):
        return NONE
    power = scale / softcap
    x, x3, x5 = (scale * LOG2_E * term * power ** (2 * i) for i, term in enumerate(TERMS))
    if not (1e-15 < power < 1e15 and all(1e-37 < abs(term) < 1e37 for term in (x, x3, x5))):
        return NONE
    return {
        "fold_near": NEAR / power,
        "fold_x": x,
        "fold_x3": x3,
        "fold_x5": x5,
        "fold_power": 2.0 * LOG2_E * power,
    }


def extreme(scale: float | None, head_dim: int, softcap: float) -> bool:
    """Whether there is no fold of a softcap and a positive scale; None is the default one."""
    scale = softmax_scale(scale, head_dim)
    return softcap > 0.0 and scale > 0.0 and fold(scale, softcap) is NONE
