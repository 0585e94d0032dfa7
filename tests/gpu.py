# SPDX-License-Identifier: Apache-2.0
"""What tests on a GPU share: a call on CuPy arrays, whose bits all other ways to make it give."""

from __future__ import annotations

import importlib
import time
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from rawattn.dense import flash_attn_func

DTYPES = (np.float16, np.dtype(ml_dtypes.bfloat16))


class Data(NamedTuple):
    """Queries, keys and values, and what attention on CuPy arrays makes of them."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any

    @property
    def inputs(self) -> tuple[Any, Any, Any]:
        return self.q, self.k, self.v


def data(cupy: Any, dtype: Any, seed: int = 0) -> Data:
    rng = np.random.default_rng(seed)
    q, k, v = (
        cupy.asarray(rng.standard_normal(shape, np.float32).astype(dtype))
        for shape in ((2, 70, 6, 64), (2, 130, 3, 64), (2, 130, 3, 64))
    )
    out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    return Data(q, k, v, out, lse)


def bits(x: Any) -> np.ndarray:
    """The bits of an array of CuPy, JAX, PyTorch or Numba, on the host."""
    if hasattr(x, "copy_to_host"):
        return x.copy_to_host().view(np.uint8)
    if hasattr(x, "view") and hasattr(x, "cpu"):
        torch = importlib.import_module("torch")
        return x.view(torch.uint8).cpu().numpy()
    return np.ascontiguousarray(x.get() if hasattr(x, "get") else np.asarray(x)).view(np.uint8)


def same(x: Any, y: Any) -> bool:
    return np.array_equal(bits(x), bits(y))


def hold(stream: Any, seconds: float = 0.1) -> None:
    """Keeps a stream busy."""
    stream.launch_host_func(lambda _: time.sleep(seconds), None)


class Foreign:
    """An array of another library, which fills it on a stream."""

    def __init__(self, x: Any, stream: Any) -> None:
        self.x = x
        self.__cuda_array_interface__ = {**x.__cuda_array_interface__, "stream": stream.ptr}
