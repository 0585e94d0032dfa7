# SPDX-License-Identifier: Apache-2.0
"""Facts about GPUs: from the table, from CUDA, and what is said where there is none."""

from __future__ import annotations

import re
import sys
import types
from typing import Any

import pytest

import rawattn
from rawattn import device
from rawattn.device import ARCH_OF_CAPABILITY, DEVICES, Device
from rawattn.registry import ARCHITECTURES
from tests.markdown import ROOT

V100 = {"name": b"Tesla V100", "major": 7, "minor": 0}
H200 = {
    "name": b"NVIDIA H200",
    "major": 9,
    "minor": 0,
    "multiProcessorCount": 132,
    "sharedMemPerBlockOptin": 232448,
    "sharedMemPerMultiprocessor": 233472,
    "l2CacheSize": 62914560,
}


def cuda_with(**runtime: Any) -> Any:
    """A CuPy that answers with these functions."""
    return types.SimpleNamespace(
        cuda=types.SimpleNamespace(runtime=types.SimpleNamespace(**runtime))
    )


def read(monkeypatch: pytest.MonkeyPatch, facts: dict[str, Any]) -> Device:
    stub = cuda_with(getDeviceProperties=lambda number: facts)
    monkeypatch.setattr(device, "import_cupy", lambda: stub)
    return device._read.__wrapped__(0)


def test_table() -> None:
    assert {d.arch for d in DEVICES.values()} == set(ARCHITECTURES)
    for short, known in DEVICES.items():
        assert Device.named(short) == Device.named(short.lower()) == Device.named(known.name)
        assert known.smem_per_block + 1024 <= known.smem_per_sm
        assert min(known.sms, known.l2_bytes, known.tflops or 0, known.gb_per_s or 0) > 0
    assert len({known.name for known in DEVICES.values()}) == len(DEVICES)
    assert Device.named("host") == Device.host()
    with pytest.raises(ValueError, match="device='K80': accepted are host, A100, "):
        Device.named("K80")


def test_capabilities_run_what_is_compiled() -> None:
    assert set(ARCH_OF_CAPABILITY.values()) == set(ARCHITECTURES)
    for (major, minor), arch in ARCH_OF_CAPABILITY.items():
        number = int(arch.removeprefix("sm_").removesuffix("a"))
        assert number // 10 == major and number % 10 <= minor
        assert number % 10 == minor or not arch.endswith("a")


def test_what_cuda_says_is_what_the_table_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert read(monkeypatch, H200) == Device.named("H200")


def test_an_unknown_name_has_no_peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    found = read(monkeypatch, {**H200, "name": b"NVIDIA H200 NVL"})
    assert (found.name, found.arch) == ("NVIDIA H200 NVL", "sm_90a")
    assert (found.tflops, found.gb_per_s) == (None, None)


def test_a_gpu_that_no_kernel_runs_on(monkeypatch: pytest.MonkeyPatch) -> None:
    message = r"device 0 \(Tesla V100\) has compute capability 7\.0: accepted are 8\.0, 8\.6"
    with pytest.raises(RuntimeError, match=message):
        read(monkeypatch, V100)


def test_no_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(RuntimeError, match=r"GPU arrays need CuPy: pip install '\.\[cuda12\]'"):
        Device.current()


@pytest.mark.parametrize("answer", [0, RuntimeError("cudaErrorInsufficientDriver")])
def test_no_gpu(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def count() -> int:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setitem(sys.modules, "cupy", cuda_with(getDeviceCount=count))
    with pytest.raises(RuntimeError, match="no CUDA GPU here"):
        Device.current()


@pytest.mark.parametrize("extra", ["cuda12", "cuda13", "bench"])
def test_messages_and_pages_install_alike(extra: str) -> None:
    clone, wheel = re.findall(r"'([^']+)'", device.INSTALL.format(extra))
    install = (ROOT / "docs/install.md").read_text()
    if extra != "bench":  # which only plots need
        for page in ((ROOT / "README.md").read_text(), install):
            assert f"pip install '{clone}'" in page
    version, cut = f"{rawattn.__version__}-py3", wheel.split("[")[0]
    assert cut.replace("VERSION-py3", version) in install and f"`[{extra}]`" in install
    assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text()
