# SPDX-License-Identifier: Apache-2.0
"""What is installed holds the kernels, and finds them from any folder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.markdown import ROOT
from tools import dist


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A wheel and an sdist."""
    return sorted(dist.build(tmp_path_factory.mktemp("dist")), key=lambda path: path.suffix)


def test_wheel_and_sdist_are_whole(built: list[Path]) -> None:
    sdist, wheel = built
    dist.check_contents(wheel, sdist)
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"rawattn/cuda/{path.name}" for path in (ROOT / "cuda").glob("*.cu*")} <= names
    assert {"rawattn/__init__.py", "rawattn/testing/laws.py", "rawattn/py.typed"} <= names
    with tarfile.open(sdist) as archive:
        sources = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {"pyproject.toml", "README.md", "LICENSE", "mkdocs.yml", "docs/index.md"}
    assert needed | {"tests/conftest.py", "bench/results/nvidia-h200/fwd_sm80.csv"} <= sources


@pytest.mark.parametrize("wrong", ["kernel", "stranger", "large"])
def test_the_release_check_sees_what_is_wrong(
    built: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    sdist, wheel = built
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(broken, "w") as new:
        for name in old.namelist():
            if not (wrong == "kernel" and name.endswith("fwd_sm80.cu")):
                new.writestr(name, old.read(name))
        if wrong == "stranger":
            new.writestr("tests/x.py", "")
    if wrong == "large":
        monkeypatch.setattr(dist, "MAX_WHEEL", 1000)
    with pytest.raises(dist.Broken, match=r"lacks fwd_sm80.cu|tests/x.py|accepted are 1000"):
        dist.check_contents(broken, sdist)


def test_a_failed_self_test_breaks_a_release(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "run", lambda command, folder: '{"failed": 1, "checks": [1, 2]}')
    monkeypatch.setattr(dist.venv, "create", lambda folder, with_pip: None)
    monkeypatch.setattr(dist, "build", lambda: [Path("a.gz"), Path("b.whl")])
    monkeypatch.setattr(dist, "check_contents", lambda wheel, sdist: None)
    assert dist.main() == 1
    assert "b.whl: 1 of 2 checks failed" in capsys.readouterr().err


def test_an_installed_package_finds_its_kernels(built: list[Path], tmp_path: Path) -> None:
    wheel = built[1]
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = (
        "import sys, numpy as np; sys.path.insert(0, sys.argv[1])\n"
        "import rawattn; from rawattn import registry\n"
        "assert rawattn.__file__.startswith(sys.argv[1]), rawattn.__file__\n"
        "assert str(registry.cuda_folder()).startswith(sys.argv[1])\n"
        "q = np.ones((1, 3, 2, 8), np.float16)\n"
        "print(rawattn.flash_attn_func(q, q, q).shape)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "site")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == "(1, 3, 2, 8)\n", done.stderr
