# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a plan can choose compiles, spills nothing, and is in the ledger.

All of them are compiled for A100 and Hopper, but one of two forward kernels that differ in their
storage type alone: they take as many registers. Four more architectures take a quarter each,
another one each. So a cold run stays short; `make ledger` compiles everything for all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rawattn import compile, registry
from tools import ledger, sass

JOBS = [
    (arch, name)
    for name, kernel in registry.KERNELS.items()
    for arch in kernel.architectures  # what an architecture cannot run is left out there, by name
]
SAMPLED = [arch for arch in registry.ARCHITECTURES if arch not in ("sm_80", "sm_90a")]


def configs(arch: str, kernel: str) -> list[tuple[registry.Kernel, registry.Config]]:
    return [(k, config) for k, config in registry.all_configs(arch) if k.name == kernel]


def checked(arch: str, kernel: str) -> list[tuple[registry.Kernel, registry.Config]]:
    """What is compiled here."""
    if arch in SAMPLED:
        return configs(arch, kernel)[SAMPLED.index(arch) :: len(SAMPLED)]
    twins: dict[Any, list[tuple[registry.Kernel, registry.Config]]] = {}
    for k, config in configs(arch, kernel):
        alike = config
        if isinstance(config, registry.FwdSm80 | registry.FwdSm90 | registry.FwdSm90Self):
            alike = replace(config, element="")
        twins.setdefault(alike, []).append((k, config))
    return [pair[n % len(pair)] for n, pair in enumerate(twins.values())]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arch", "kernel"), JOBS)
def test_every_config_compiles_cleanly(arch: str, kernel: str) -> None:
    found = {ledger.measure(k, config, arch) for k, config in checked(arch, kernel)}
    assert not [(row, row.faults) for row in found if row.faults]
    committed = {row for row in ledger.read() if (row.arch, row.kernel) == (arch, kernel)}
    assert committed, "tests/ledger.csv lacks it: run `make ledger`"
    # Another compiler allocates registers another way: there only spills and warnings count.
    if {row.nvrtc for row in committed} == {compile.nvrtc_version()}:
        stale = "tests/ledger.csv is out of date: run `make ledger`"
        assert found <= committed, stale
        assert len(committed) == len(configs(arch, kernel)), stale


def test_storage_types_of_a_forward_kernel_take_as_many_registers() -> None:
    rows: dict[tuple[str, ...], set[int]] = {}
    for row in ledger.read():
        if row.kernel.startswith("fwd_"):
            element, rest = row.config.split(" ", 1)
            assert element in ("bf16", "fp16")
            rows.setdefault((row.kernel, row.arch, rest), set()).add(row.registers)
    assert rows and all(len(found) == 1 for found in rows.values())


def test_the_ledger_lists_nothing_else() -> None:
    assert {(row.arch, row.kernel) for row in ledger.read()} == set(JOBS)


LISTING = """
R2UR UR16, R3 ;
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR16], RZ, !UPT ;
HGMMA.64x128x16.F32.BF16 R24, gdesc[UR36], R24, gsb0 ;
MUFU.EX2 R1, R1 ;
HGMMA.64x64x16.F32.BF16 R88, R120, gdesc[UR16].tnspB, R88 ;
HGMMA.64x64x16.F32.BF16 R88, R148, gdesc[UR16].tnspB, R88, gsb0 ;
MUFU.EX2 R1, R1 ;
WARPGROUP.DEPBAR.LE gsb0, 0x1 ;
MUFU.EX2 R1, R1 ;
WARPGROUP.DEPBAR.LE gsb0, 0x0 ;
MUFU.EX2 R1, R1 ;
""".splitlines()


def test_what_runs_under_pv() -> None:
    assert sass.count(LISTING) == sass.Overlap(wgmma=4, waits=2, ex2=4, ex2_under_pv=2, moves=1)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"spills": 4}, "4 bytes of spills"),
        ({"warnings": "(C7510) Potential Performance Loss"}, "C7510"),
        ({"wgmma": 48, "waits": 6}, None),
        ({"wgmma": 48, "waits": 48}, "48 waits for 48 wgmma: serialized"),
        ({"wgmma": 48, "moves": 200}, "200 moves for 48 wgmma: guarded against divergence"),
    ],
)
def test_faults(changes: dict[str, Any], fault: str | None) -> None:
    row = replace(next(iter(ledger.read())), **changes)
    assert (fault is None) == (row.faults == ())
    assert fault is None or fault in row.faults[0]
