# SPDX-License-Identifier: Apache-2.0
"""A small kernel that has all that a launch of sm_90 may have, for tests with and without a GPU."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rawattn import registry
from rawattn.plan import Launch
from rawattn.plan.base import TensorMap

HERE = Path(__file__).resolve().parent
HEADS, COLUMNS = 3, 64
LENGTHS = (70, 0, 5, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Relay:
    """The Config of relay.cu."""

    rows: int = 64
    columns: int = COLUMNS
    cluster: int = 1
    counted: bool = False
    dependent: bool = False
    blocks_per_sm: int = 1

    @property
    def threads(self) -> int:
        return 32

    @property
    def smem_bytes(self) -> int:
        return 2 * self.rows * self.columns + 128


KERNEL = registry.Kernel(
    name="relay",
    source="relay.cu",
    config=Relay,
    params="RelaySm90Params",
    architectures=("sm_90a",),
)


@contextmanager
def registered(folder: Path) -> Iterator[Path]:
    """Makes the kernel one of the registry, whose sources are in a new folder from here on."""
    for path in (*registry.cuda_folder().glob("*.cuh"), *HERE.glob("*.cu*")):
        shutil.copy(path, folder)
    registry.params_struct.cache_clear()
    with (
        mock.patch.object(registry, "cuda_folder", lambda: folder),
        mock.patch.dict(registry.KERNELS, {KERNEL.name: KERNEL}),
    ):
        yield folder
    registry.params_struct.cache_clear()


def launch(config: Relay, *, source: str = "x", target: str = "out", blocks: int = 4) -> Launch:
    """From one array to another."""

    def ragged(field: str, array: str) -> TensorMap:
        rows = config.rows // config.cluster
        box = (config.columns, rows, 1)
        return TensorMap(field=field, array=array, box=box, axes=(3, 1, 2), ragged=True)

    return Launch(
        kernel="relay",
        config=config,
        grid=blocks * config.cluster,
        scalars=(("tiles", -(-max(LENGTHS) // config.rows)),),
        maps=(ragged("from_map", source), ragged("to_map", target)),
        cluster=config.cluster,
        dependent=config.dependent,
    )


def scalars() -> dict[str, float]:
    """The fields of Params that a launch does not decide."""
    return {"sequences": len(LENGTHS), "heads": HEADS, "first": 0, "last": 0.0}


def arrays(rows_behind: int = 9) -> dict[str, Any]:
    """NumPy arrays by name: NaN before, between and behind what is copied, so that a copy that
    takes too much, or leaves something out, shows.
    """
    starts = np.cumsum([0, *LENGTHS]).astype(np.int32)
    room = np.random.default_rng(0).standard_normal((starts[-1] + rows_behind, HEADS, COLUMNS + 8))
    x = room.astype(np.float16)[:, :, :COLUMNS]
    out = np.full_like(room, np.nan, np.float16)[:, :, :COLUMNS]
    movers = np.full(2 * len(LENGTHS) * HEADS, -1, np.int32)
    return {"x": x, "out": out, "starts": starts, "movers": movers}
