# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of attention: what a problem, an algorithm and a step of decoding must compute and
move, and the least time of it on a GPU. Pure Python; needs no GPU.

    counts    exact FLOPs and least bytes of a problem, and the convention of published figures
    roofs     roofs of a device: bound, ridge, least time, exponentials beside matrix products
    traffic   bytes of the standard algorithm and of both loop orders of FlashAttention
    walk      the same three run on NumPy arrays that count what they move
    decode    keys and values a token, time of a step, where the cache outweighs the weights
"""

from rawattn.roofline.counts import (
    Work,
    backward_flops,
    convention_flops,
    visible_pairs,
    visible_rows,
    work,
)
from rawattn.roofline.decode import MODELS, Model, Step, step
from rawattn.roofline.roofs import (
    Roofline,
    exp_share,
    exp_tera_per_second,
    limit,
    limit_of,
    peaks,
    ridge,
)
from rawattn.roofline.traffic import (
    Traffic,
    keys_outside,
    paper_tiles,
    queries_outside,
    rescale_flops,
    standard,
)

__all__ = [
    "MODELS",
    "Model",
    "Roofline",
    "Step",
    "Traffic",
    "Work",
    "backward_flops",
    "convention_flops",
    "exp_share",
    "exp_tera_per_second",
    "keys_outside",
    "limit",
    "limit_of",
    "paper_tiles",
    "peaks",
    "queries_outside",
    "rescale_flops",
    "ridge",
    "standard",
    "step",
    "visible_pairs",
    "visible_rows",
    "work",
]
