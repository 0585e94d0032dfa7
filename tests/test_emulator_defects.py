# SPDX-License-Identifier: Apache-2.0
"""What the emulator is for: it finds defects. See tests/emulator/defects.py."""

from __future__ import annotations

import pytest

from rawattn.registry import cuda_folder
from tests.emulator.defects import DEFECTS, HERE, Defect, gemm, one_stage, pairs, two_stages

pytestmark = pytest.mark.emulator


@pytest.mark.parametrize("probe", [two_stages, one_stage, pairs], ids=["two", "one", "pairs"])
def test_sound_kernels_pass(probe) -> None:  # type: ignore[no-untyped-def]
    for seed in range(5):
        probe(cuda_folder(), seed)


@pytest.mark.parametrize("seed", range(12))
def test_sound_gemm_passes(seed: int) -> None:
    gemm(HERE, seed)


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda d: f"{d.file.split('.')[0]}: {d.what}")
def test_defect_is_caught(defect: Defect) -> None:
    caught = defect.caught()
    assert caught is not None, "no schedule showed it"
    print(f"seed {caught[0]}: {caught[1]}")
