# SPDX-License-Identifier: Apache-2.0
"""What tests of the command line share, as a plugin of pytest."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rawattn import cache
from rawattn.__main__ import main
from rawattn.device import Device
from rawattn.forward import Settings


class Ran(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def facts(self) -> dict[str, Any]:
        return json.loads(self.out)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Any:
    """Runs a command line in this process."""
    return lambda line: Ran(main(line.split()), *capsys.readouterr())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty kernel cache, for this process and those that it starts."""
    monkeypatch.setenv("RAWATTN_CACHE_DIR", str(tmp_path / "cache"))
    cache.default.cache_clear()
    yield tmp_path / "cache"
    cache.default.cache_clear()


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Sets RAWATTN_BACKEND."""

    def force(name: str) -> None:
        monkeypatch.setenv("RAWATTN_BACKEND", name)
        Settings.read.cache_clear()

    yield force
    Settings.read.cache_clear()


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(device_id: int | None = None) -> Device:
        raise RuntimeError("no CUDA GPU here")

    monkeypatch.setattr(Device, "current", staticmethod(refuse))
