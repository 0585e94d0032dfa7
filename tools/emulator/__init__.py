# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels of ``cuda/`` on a CPU, one thread at a time, in an order that a seed decides. See docs/emulator.md."""

from tools.emulator.driver import (
    EmulatorError,
    available,
    compile_unit,
    pack,
    run,
    tensor_map,
)

__all__ = ["EmulatorError", "available", "compile_unit", "pack", "run", "tensor_map"]
