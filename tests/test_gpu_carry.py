# SPDX-License-Identifier: Apache-2.0
"""Carrying the GPU record over to sources with the same machine code."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from pathlib import Path

import pytest

from rawattn import compile, registry
from tools import gpu_carry, gpu_outputs, gpu_tests

RECORDED = {"gpu": "NVIDIA H200", "sources": "old", "pytest": {"passed": 3}}


def test_machine_code_is_that_of_the_config() -> None:
    kernels = {kernel.name: kernel for kernel, _ in registry.all_configs("sm_90a")}
    configs = [c for k, c in registry.all_configs("sm_90a") if k.name == "copy_blocks"]
    digests = [
        gpu_carry.machine_code(compile.cubin(kernels["copy_blocks"], config, "sm_90a"))
        for config in (configs[0], configs[0], configs[1])
    ]
    assert digests[0] == digests[1] != digests[2]


def test_what_differs_is_named() -> None:
    before, now = {"a": "1", "b": "2", "gone": "3"}, {"a": "1", "b": "4", "new": "5"}
    assert gpu_carry.differences(before, before) == []
    assert gpu_carry.differences(before, now) == ["b", "gone", "new"]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A record and outputs of old sources, and no git."""
    record, outputs = tmp_path / "record.json", tmp_path / "outputs.npz"
    record.write_text(json.dumps(RECORDED))
    gpu_outputs.save(dataclasses.replace(gpu_outputs.load(), sources="old-outputs"), outputs)
    monkeypatch.setattr(gpu_tests, "RECORD", record)
    load, save = gpu_outputs.load, gpu_outputs.save
    monkeypatch.setattr(gpu_outputs, "load", lambda: load(outputs))
    monkeypatch.setattr(gpu_outputs, "save", lambda found: save(found, outputs))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: None)
    monkeypatch.setattr(gpu_carry, "codes", lambda arch: {f"{arch} kernel": "1"})
    monkeypatch.setattr(compile, "nvrtc_version", lambda: "13.0")
    return record


def old_tree(monkeypatch: pytest.MonkeyPatch, codes: dict[str, str], launch: str = "") -> None:
    """What the tree of the record prints."""
    digests = f"old old-outputs {launch or gpu_tests.sources_digest(kernels=())}"

    def there(tree: Path, *arguments: str) -> str:
        return json.dumps(codes) if "--codes" in arguments else digests

    monkeypatch.setattr(gpu_carry, "_there", there)


def test_the_same_code_carries_the_record_over(
    recorded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old_tree(monkeypatch, {"sm_90a kernel": "1"})
    assert gpu_carry.carry("abc") == []
    found = json.loads(recorded.read_text())
    step = {"from": "old", "commit": "abc", "same_code_of": 1, "nvrtc": "13.0"}
    assert found == RECORDED | {"sources": gpu_tests.sources_digest(), "carried": [step]}


@pytest.mark.parametrize(
    ("codes", "launch", "why"),
    [
        ({"sm_90a kernel": "2"}, "", "1 of 1 kernels differ"),
        ({"sm_90a kernel": "1"}, "other", "digests: abc has"),
    ],
)
def test_other_code_leaves_the_record_alone(
    codes: dict[str, str],
    launch: str,
    why: str,
    recorded: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    old_tree(monkeypatch, codes, launch)
    assert why in gpu_carry.carry("abc")[0]
    assert json.loads(recorded.read_text()) == RECORDED
