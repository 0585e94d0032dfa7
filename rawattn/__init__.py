# SPDX-License-Identifier: Apache-2.0
"""Attention for GPU programs without PyTorch. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rawattn.compile import CompileError
    from rawattn.dense import flash_attn_func, flash_attn_varlen_func, prepare
    from rawattn.device import Device
    from rawattn.forward import Prepared
    from rawattn.problem import Unsupported

__version__ = "0.1.0"
__all__ = [
    "CompileError",
    "Device",
    "Prepared",
    "Unsupported",
    "__version__",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "prepare",
]

_HOMES = {
    "CompileError": "compile",
    "Device": "device",
    "Prepared": "forward",
    "Unsupported": "problem",
    "flash_attn_func": "dense",
    "flash_attn_varlen_func": "dense",
    "prepare": "dense",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rawattn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rawattn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
