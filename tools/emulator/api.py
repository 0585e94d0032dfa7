# SPDX-License-Identifier: Apache-2.0
"""The public functions on NumPy arrays that count as those of a GPU: checks, plans, Params and the
launches are the GPU's, and the emulator runs the kernels.

    with emulated("H200", seed=3):
        rawattn.paged_attention_v1(out, query, ...)
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import numpy as np

from rawattn import (
    arrays,
    calls,
    cascade_call,
    copy_call,
    forward,
    kv_write_call,
    merge_call,
    paged_call,
)
from rawattn.arrays import DTYPES, Spec, View
from rawattn.device import Device
from rawattn.plan import Plan
from rawattn.testing.paged_cases import PagedLimits
from rawattn.testing.paged_laws import PagedOp, with_kvcache
from tools.emulator.plans import run_launch

READ = (
    "q",
    "k",
    "v",
    "block_table",
    "page_ids",
    "kv_indptr",
    "kv_indices",
    "kv_last_page_len",
    "seqused_k",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "alibi_slopes",
    "sink",
    "pairs",
)
ALIGNMENT = 512  # bytes, of a new array, as CuPy has it
# Whose kinds are kept.
CACHED = (forward, paged_call, cascade_call, copy_call, kv_write_call, merge_call)


class Template:
    """`launch.Template`, whose launches the emulator runs."""

    seed = 0
    launched: list[str] = []  # noqa: RUF012  kernels, for whoever wants to know
    seen: list[np.ndarray] = []  # noqa: RUF012  arrays of the call

    def __init__(
        self,
        plan: Plan,
        device: int,
        scalars: Mapping[str, float],
        specs: Mapping[str, Spec | None],
    ) -> None:
        self._plan, self._scalars, self._specs = plan, scalars, specs

    def pack(self, addresses: Sequence[int]) -> Callable[[], None]:
        given = {
            name: None if spec is None else _array(spec, address)
            for (name, spec), address in zip(self._specs.items(), addresses, strict=True)
        }
        return lambda: self._run(given)

    def _run(self, given: dict[str, np.ndarray | None]) -> None:
        for launch in self._plan.launches:
            if launch.kernel == "copy_blocks":  # addresses lie in memory
                given = given | {f"array {n}": x for n, x in enumerate(Template.seen)}
            outputs = [name for name in given if name not in READ]
            run_launch(launch, given, self._scalars, Template.seed, outputs=outputs)
            Template.launched.append(launch.kernel)


def _array(spec: Spec, address: int) -> np.ndarray:
    """The array of a spec at an address of this process."""
    memory = (ctypes.c_char * max(1, spec.extent)).from_address(address)
    dtype = DTYPES[spec.dtype]
    if 0 in spec.shape:
        return np.zeros(spec.shape, dtype)
    assert address, f"no memory for {spec}"  # NumPy would make some
    return np.ndarray(spec.shape, dtype, memory, strides=spec.byte_strides)


def _view(name: str, x: Any, dtype: str | None = None) -> View:
    """`arrays.view`, of an array that is said to be on device 0."""
    found = arrays.view(name, x, dtype)
    shape, strides, kind, _, offset = found.key
    Template.seen.append(found.array)
    return View(found.array, found.pointer, (shape, strides, kind, 0, offset))


def _empty(spec: Spec) -> View:
    """A new array on device 0, full of NaN."""
    memory = np.full(spec.extent + ALIGNMENT, 0xFF, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT
    cut = memory[start : start + spec.extent]
    return _view("", cut.view(DTYPES[spec.dtype]).reshape(spec.shape))


def _to_device(values: Any, dtype: str, device: int, *, shared: bool = False) -> View:
    return _view("", np.array(values, DTYPES[dtype]))


@contextlib.contextmanager
def emulated(device: str = "H200", seed: int = 0) -> Iterator[list[str]]:
    """Within, arrays of NumPy are those of a GPU of that name. Gives the names of the kernels that
    have run.
    """
    gpu = Device.named(device)
    Template.seed, Template.launched, Template.seen = seed, [], []
    patches = [
        *(mock.patch.object(m, "view", _view) for m in (calls, forward)),
        *(mock.patch.object(m, "empty", _empty) for m in (calls, forward)),
        mock.patch.object(calls.launch, "Template", Template),
        mock.patch.object(Device, "current", staticmethod(lambda number=None: gpu)),
        *(
            mock.patch.object(m, "to_device", _to_device)
            for m in (paged_call, cascade_call, copy_call)
        ),
    ]
    with contextlib.ExitStack() as stack:
        stack.callback(_forget)
        for patch in patches:
            stack.enter_context(patch)
        _forget()
        yield Template.launched


def _forget() -> None:
    for module in CACHED:
        module.resolve.cache_clear()


# Few configs, since g++ takes seconds for each, and small cases.
LIMITS = PagedLimits(
    dtypes=("float16", "bfloat16"),
    cache_dtypes=("same", "float8_e4m3fn"),
    head_dims=(64,),
    pages=(5, 16, 32),
    max_k=90,
    max_heads=4,
    max_batch=3,
    max_q=5,
)


def _call(seed: int, backend: str | None, arguments: dict[str, Any]) -> None:
    with emulated(seed=seed):
        with_kvcache(backend, arguments)


def paged_emulator_op(seed: int = 0, backend: str | None = None) -> PagedOp:
    """The kernels that an H200 would run, for the laws of paged attention."""
    return PagedOp(
        name=f"paged_emulator_op({seed}, {backend!r})",
        imports="from rawattn.testing.paged_laws import *; from tools.emulator.api import *",
        call=lambda **arguments: _call(seed, backend, arguments),
        limits=LIMITS,
        bitwise=False,
    )
