# SPDX-License-Identifier: Apache-2.0
"""Every kernel that a plan can choose compiles for every architecture, spills nothing, and is in
the ledger.
"""

from __future__ import annotations

import pytest

from rawattn import compile, registry
from tools import ledger

JOBS = [
    (arch, name)
    for name, kernel in registry.KERNELS.items()
    for arch in kernel.architectures  # what an architecture cannot run is left out there, by name
]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("arch", "kernel"), JOBS)
def test_every_config_compiles_cleanly(arch: str, kernel: str) -> None:
    found = {
        ledger.measure(k, config, arch)
        for k, config in registry.all_configs(arch)
        if k.name == kernel
    }
    assert not [row for row in found if row.spills], "register spills"
    assert not [row for row in found if row.warnings], "warnings of the compiler"
    committed = {row for row in ledger.read() if (row.arch, row.kernel) == (arch, kernel)}
    assert committed, "tests/ledger.csv lacks it: run `make ledger`"
    # Another compiler allocates registers another way: there only spills and warnings count.
    if {row.nvrtc for row in committed} == {compile.nvrtc_version()}:
        assert found == committed, "tests/ledger.csv is out of date: run `make ledger`"


def test_the_ledger_lists_nothing_else() -> None:
    assert {(row.arch, row.kernel) for row in ledger.read()} == set(JOBS)
