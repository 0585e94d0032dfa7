# SPDX-License-Identifier: Apache-2.0
"""The one argument of a kernel, its Params: pointers, tensor maps and numbers, in the layout of
``cuda/params.cuh``. No GPU: `launch.py` fills it for one, `tools/emulator/plans.py` for another.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from rawattn import registry
from rawattn.arrays import Spec
from rawattn.plan import Launch
from rawattn.problem import Unsupported
from rawattn.tensor_map import Described, describe

COUNTER = "tile_counter"  # the pointer of Params that no array of the call is for
ADDRESS = struct.Struct("P")
MAP_BYTES, MAP_ALIGNMENT = 128, 64  # of a CUtensorMap


class Argument:
    """The one argument of a kernel, its Params, at a multiple of 64 as tensor maps want it."""

    __slots__ = ("_memory", "_pointer", "address", "pointer_address", "size")

    def __init__(self, image: bytes) -> None:
        self.size = len(image)
        self._memory = ctypes.create_string_buffer(self.size + MAP_ALIGNMENT)
        start = ctypes.addressof(self._memory)
        self.address = start + -start % MAP_ALIGNMENT
        self._pointer = ctypes.c_void_p(self.address)
        self.pointer_address = ctypes.addressof(self._pointer)  # what the driver is given
        ctypes.memmove(self.address, image, self.size)


class Codec(NamedTuple):
    """What makes tensor maps."""

    encode: Callable[[Described], bytes]  # a map of an array at address 0
    move: Callable[[int, int], int]  # gives the map at an address that of its array; 0: it did


class Params:
    """The Params of a launch, packed but for pointers and tensor maps. Needs no GPU.

    Every pointer has the name of one of `specs`, but for tile_counter. A tensor map that the launch
    does not want is zeros.
    """

    __slots__ = ("_counter", "_image", "_maps", "_move", "_runs", "counters")

    def __init__(
        self,
        launch: Launch,
        scalars: Mapping[str, float],
        specs: Mapping[str, Spec | None],
        codec: Codec | None,
    ) -> None:
        structure = registry.params_struct(registry.KERNELS[launch.kernel].params)
        fields = {name: kind for name, kind, *_ in structure._fields_ if name[0] != "_"}
        pointers = [name for name, kind in fields.items() if kind is ctypes.c_void_p]
        maps = {name for name, kind in fields.items() if kind is registry.TensorMap}
        own = dict(launch.scalars)
        numbers = fields.keys() - maps - {*pointers}
        wrong = (
            (numbers - scalars.keys() - own.keys())
            | (own.keys() - numbers)
            | ({*pointers} - specs.keys() - {COUNTER})
            | ({wanted.field for wanted in launch.maps} - maps)
        )
        assert not wrong, f"{structure.__name__}: {wrong}"
        values = {name: own.get(name, scalars.get(name)) for name in numbers}
        filled = structure(**values)
        for name, value in values.items():
            if isinstance(value, int) and getattr(filled, name) != value:
                bits = 8 * ctypes.sizeof(fields[name])
                raise Unsupported(f"{launch.kernel}: {name}={value}: takes integers of {bits} bits")
        image = bytearray(filled)
        places = {name: place for place, name in enumerate(specs)}
        self._runs = _runs(
            {getattr(structure, n).offset: places[n] for n in pointers if n != COUNTER}
        )
        self._maps = []  # offset, and which array
        for wanted in launch.maps:
            spec = specs[wanted.array]
            assert spec is not None and codec, f"{structure.__name__}: {wanted.array} is absent"
            offset = getattr(structure, wanted.field).offset
            image[offset : offset + MAP_BYTES] = codec.encode(describe(wanted, spec))
            self._maps.append((offset, places[wanted.array]))
        self._move = codec and codec.move
        self._image = bytes(image)
        self._counter = getattr(structure, COUNTER).offset if COUNTER in fields else 0
        self.counters = launch.counters if COUNTER in fields else 0  # int32 that it needs

    def bind(self, addresses: Sequence[int], counter: int) -> Argument:
        """The struct as the kernel reads it; `counter` is the address of its counters."""
        image = bytearray(self._image)
        for offset, run, places in self._runs:
            run.pack_into(image, offset, *[addresses[place] for place in places])
        if self.counters:
            ADDRESS.pack_into(image, self._counter, counter)
        argument = Argument(bytes(image))
        for offset, place in self._maps:
            if self._move(argument.address + offset, addresses[place]):  # type: ignore[misc]
                raise RuntimeError(f"no tensor map of an array at {addresses[place]:#x}")
        return argument


def row_strides(name: str, spec: Spec, row: str = "row") -> dict[str, int]:
    """Strides as Params name them: of a batch, 0 where rows are packed, of a row and of a head."""
    *batch, step, head, _ = spec.steps
    return {
        f"stride_{name}_batch": batch[0] if batch else 0,
        f"stride_{name}_{row}": step,
        f"stride_{name}_head": head,
    }


def _runs(places: Mapping[int, int]) -> list[tuple[int, struct.Struct, list[int]]]:
    """Offsets of pointers -> which array each holds, as runs of neighbours."""
    runs: list[tuple[int, list[int]]] = []
    for offset, place in sorted(places.items()):
        if runs and offset == runs[-1][0] + ADDRESS.size * len(runs[-1][1]):
            runs[-1][1].append(place)
        else:
            runs.append((offset, [place]))
    return [(offset, struct.Struct(f"{len(run)}P"), run) for offset, run in runs]
