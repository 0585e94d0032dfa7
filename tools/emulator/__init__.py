# SPDX-License-Identifier: Apache-2.0
"""CUDA kernels on a CPU, one thread at a time, in an order that a seed decides.

See docs/emulator.md.
"""

from tools.emulator.build import BuildError, EmulatorError, available, compile_unit
from tools.emulator.driver import pack, run, tensor_map

__all__ = ["BuildError", "EmulatorError", "available", "compile_unit", "pack", "run", "tensor_map"]
