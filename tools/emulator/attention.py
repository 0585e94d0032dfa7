# SPDX-License-Identifier: Apache-2.0
"""Plans on the emulator: the very `Plan` that a GPU would run, on NumPy arrays."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rawattn import forward
from rawattn.device import DEVICES, Device
from rawattn.plan import plan
from rawattn.reference import softmax_scale
from rawattn.request import Arrays, Options, plain, problem_of
from rawattn.testing import Limits, Op
from tools.emulator.build import EmulatorError
from tools.emulator.plans import run_plan

# Few configs, since g++ takes seconds for each, and small cases.
LIMITS = Limits(
    dtypes=("float16", "bfloat16"), head_dims=(40, 64), max_len=150, max_heads=4, max_batch=3
)


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    out: np.ndarray,
    lse: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_k: np.ndarray | None = None,
    seqused_k: np.ndarray | None = None,
    alibi_slopes: np.ndarray | None = None,
    sink: np.ndarray | None = None,
    device: str = "H200",
    seeds: int | Sequence[int] = 2,
    kernels: str | os.PathLike[str] | None = None,
    flags: Sequence[str] = (),
    **options: Any,
) -> None:
    """`flash_attn_varlen_func`, or without `cu_seqlens_q` `flash_attn_func`, as `device` would run
    it, a GPU by its short name. `options` are those of `request.Options`; `kernels` and `flags` are
    those of `plans.run_launch`.

    It runs once for each of `seeds`, or for so many that are drawn from the call; the results must
    have the same bits. Raises EmulatorError where they have not, and what the function raises.
    """
    _check_seeds(seeds)
    if kernels is not None and not os.path.isdir(kernels):
        raise ValueError(f"kernels={kernels!r}: accepted is the folder of the sources")
    gpu = Device.named(device)
    if gpu == Device.host():
        raise ValueError(f"device={device!r}: accepted are GPUs, {', '.join(DEVICES)}")
    arrays = Arrays(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, sink)
    if cu_seqlens_q is None:
        options |= {"max_seqlen_q": None, "max_seqlen_k": None}
    call = plain(Options(return_lse=lse is not None, **options))
    views = forward.views_of(arrays, None)
    specs = Arrays(*[x and x.spec for x in views])
    problem = problem_of(specs, call)
    scale = softmax_scale(call.softmax_scale, problem.head_dim)
    chosen = plan(problem, gpu, call.backend)
    scalars = forward.kernel_scalars(specs, problem, scale, float(call.softcap))
    fields = dict(zip(Arrays._fields, [x and x.array for x in views], strict=True))
    if isinstance(seeds, int):
        keys = np.ascontiguousarray(k).view(np.uint8)
        first = zlib.crc32(keys, zlib.crc32(repr(problem).encode()))
        seeds = range(first, first + seeds)
    folder = None if kernels is None else Path(kernels)
    results = set()
    for seed in seeds:
        run_plan(chosen, fields, scalars, seed, kernels=folder, flags=flags)
        results.add((out.tobytes(), b"" if lse is None else lse.tobytes()))
    if len(results) > 1:
        raise EmulatorError(f"seeds {list(seeds)} give different results")


def _check_seeds(seeds: int | Sequence[int]) -> None:
    """ValueError for what leaves nothing to run, or names no seeds."""
    if isinstance(seeds, int):
        accepted = seeds > 0 and not isinstance(seeds, bool)
    else:
        accepted = (
            isinstance(seeds, Sequence)
            and len(seeds) > 0
            and all(isinstance(seed, int) for seed in seeds)
        )
    if not accepted:
        raise ValueError(
            f"seeds={seeds!r}: accepted are a count from 1 and sequences of integers, not empty"
        )


def emulator_op() -> Op:
    """The kernels that an H200 would run, for the laws."""
    imports = "from rawattn.testing import *; from tools.emulator.attention import emulator_op"
    return Op(name="emulator_op()", imports=imports, call=attention, xp=np, limits=LIMITS)
