# SPDX-License-Identifier: Apache-2.0
"""Attention for GPU programs without PyTorch. Names are loaded when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rawattn.compile import CompileError
    from rawattn.dense import flash_attn_func, flash_attn_varlen_func
    from rawattn.device import Device
    from rawattn.forward import Prepared
    from rawattn.kv_cache import (
        copy_blocks,
        flash_attn_with_kvcache,
        reshape_and_cache,
        reshape_and_cache_flash,
    )
    from rawattn.merge import cascade_attention, merge_attn_states, merge_states
    from rawattn.paged import paged_attention_v1, paged_attention_v2
    from rawattn.prepared import prepare
    from rawattn.problem import Unsupported

__version__ = "0.1.0"
__all__ = [
    "CompileError",
    "Device",
    "Prepared",
    "Unsupported",
    "__version__",
    "cascade_attention",
    "copy_blocks",
    "flash_attn_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "merge_attn_states",
    "merge_states",
    "paged_attention_v1",
    "paged_attention_v2",
    "prepare",
    "reshape_and_cache",
    "reshape_and_cache_flash",
]

_HOMES = {
    "CompileError": "compile",
    "Device": "device",
    "Prepared": "forward",
    "Unsupported": "problem",
    "cascade_attention": "merge",
    "copy_blocks": "kv_cache",
    "flash_attn_func": "dense",
    "flash_attn_varlen_func": "dense",
    "flash_attn_with_kvcache": "kv_cache",
    "merge_attn_states": "merge",
    "merge_states": "merge",
    "paged_attention_v1": "paged",
    "paged_attention_v2": "paged",
    "prepare": "prepared",
    "reshape_and_cache": "kv_cache",
    "reshape_and_cache_flash": "kv_cache",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'rawattn' has no attribute {name!r}")
    return getattr(importlib.import_module(f"rawattn.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
