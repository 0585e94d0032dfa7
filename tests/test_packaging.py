# SPDX-License-Identifier: Apache-2.0
"""What is installed holds the kernels, and finds them from any folder."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "-d", str(folder)]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_is_small_and_whole(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    assert wheel.stat().st_size < 1 << 20
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"rawattn/cuda/{path.name}" for path in (ROOT / "cuda").glob("*.cu*")} <= names
    assert {"rawattn/__init__.py", "rawattn/testing/laws.py", "rawattn/py.typed"} <= names
    assert all(name.startswith("rawattn") for name in names)


def test_the_sdist_builds_a_wheel(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    tracked = {path.relative_to(ROOT).as_posix() for path in (ROOT / "cuda").glob("*.cu*")}
    assert tracked | {"pyproject.toml", "README.md", "LICENSE", "tests/conftest.py"} <= names


def test_an_installed_package_finds_its_kernels(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
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
