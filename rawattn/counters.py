# SPDX-License-Identifier: Apache-2.0
"""Counters in the memory of a GPU, through which the blocks of a launch share out work, and whoever
leaves the last part of a sum in the workspace learns that it is the last.

A launch finds its counters 0 and leaves them 0, so they are set once, and no launch waits for a
memset. Two launches that run at the same time must not have the same ones. Therefore counters
belong to the address of the output that the launch writes: launches that write the same output are
ordered by the program that makes them (by a stream, an event, a graph), or it has a race already.
This holds for graphs too: a captured launch keeps its counters for good, and whoever replays it
beside another launch on other outputs uses other counters. Nothing is ever given back: 32 bytes or
more for each output address that was seen, and the pools that outputs come from use few of them.
Launches with parts (decoding, fwd_sm90 where it cuts query tiles) have a counter a slot of the
workspace, or one for each warp of a slot, kilobytes; an address that comes with more parts than
before gets others.
"""

from __future__ import annotations

import functools
import threading
from typing import Any

from rawattn.device import import_cupy

SECTOR = 32  # bytes: counters of two launches never share one
SLAB = 1 << 16  # bytes that are allocated at once

Owner = tuple[int, int]  # address of the output, number of the launch in its plan


class Counters:
    """The counters of one device."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._found: dict[Owner, tuple[int, int]] = {}  # address, count
        self._slabs: list[Any] = []  # keeps memory allocated
        self._next = self._end = 0  # what is left of the last one

    def address(self, owner: Owner, count: int) -> int:
        """Where the `count` int32 of an owner are."""
        address, room = self._found.get(owner, (0, 0))
        if room >= count:
            return address
        with self._lock:  # two threads may both get here; either's will do
            self._reserve(count)
            self._found[owner] = self._next, count
            self._next += _bytes(count)
            return self._found[owner][0]

    def reserve(self, count: int) -> None:
        """Allocates now what `address` may need: a stream capture may forbid it later."""
        with self._lock:
            self._reserve(count)

    def _reserve(self, count: int) -> None:
        size = _bytes(count)
        if self._next + size <= self._end:
            return
        cuda = import_cupy().cuda
        with cuda.Device(self._device):
            slab = cuda.Memory(max(SLAB, size))  # of no pool and no stream
            # Not on the current stream, which may be capturing.
            stream = cuda.Stream(non_blocking=True)
            cuda.runtime.memsetAsync(slab.ptr, 0, slab.size, stream.ptr)
            stream.synchronize()
        self._slabs.append(slab)
        self._next, self._end = slab.ptr, slab.ptr + slab.size


def _bytes(count: int) -> int:
    return -(-4 * count // SECTOR) * SECTOR


@functools.cache
def counters(device: int) -> Counters:
    """The counters of a CUDA device."""
    return Counters(device)
