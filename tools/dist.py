# SPDX-License-Identifier: Apache-2.0
"""The release check: ``python -m tools.dist`` (`make dist`).

Builds wheel and sdist into dist/, installs each into an empty environment, runs the self-test
there, from a folder that is not the clone, and reports sizes. Exits with 1 where anything fails.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

from rawattn import __version__

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
MAX_WHEEL = 1 << 20  # bytes


class Broken(Exception):
    """What is wrong with a release."""


def build(folder: Path = DIST) -> list[Path]:
    """The wheel and the sdist, of the version that the package states."""
    for old in folder.glob("rawattn-*"):
        old.unlink()
    run([sys.executable, "-m", "hatchling", "build", "-d", str(folder)], ROOT)
    found = sorted(folder.glob(f"rawattn-{__version__}*"))
    if [p.suffix for p in found] != [".whl", ".gz"]:
        raise Broken(f"built are {[p.name for p in found]}: expected are a wheel and an sdist")
    return found


def check_contents(wheel: Path, sdist: Path) -> None:
    """Every kernel source is in both, and the wheel is small and holds the package alone."""
    kernels = {path.name for path in (ROOT / "cuda").glob("*.cu*")}
    names = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sdist) as archive:
        sources = archive.getnames()
    for place, listed in (("wheel", names), ("sdist", sources)):
        missing = kernels - {Path(name).name for name in listed}
        if missing:
            raise Broken(f"the {place} lacks {', '.join(sorted(missing))}")
    strange = [name for name in names if not name.startswith("rawattn")]
    if strange:
        raise Broken(f"the wheel holds {strange[0]!r}, which is not of the package")
    if wheel.stat().st_size > MAX_WHEEL:
        raise Broken(f"the wheel has {wheel.stat().st_size} bytes: accepted are {MAX_WHEEL}")


def selftest(package: Path) -> int:
    """Checks that passed, of a package in an empty environment."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        venv.create(folder / "env", with_pip=True)
        python = str(folder / "env" / "bin" / "python")
        run([python, "-m", "pip", "install", "--quiet", "--prefer-binary", str(package)], folder)
        facts = json.loads(run([python, "-m", "rawattn", "selftest", "--json"], folder))
        run([python, "-m", "rawattn", "info"], folder)
    if facts["failed"] or not facts["checks"]:
        raise Broken(f"{package.name}: {facts['failed']} of {len(facts['checks'])} checks failed")
    return len(facts["checks"])


def run(command: Sequence[str], folder: Path) -> str:
    """What a program prints. `Broken` where it fails."""
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Broken(f"{' '.join(command)}: {(done.stdout + done.stderr).strip()}")
    return done.stdout


def main() -> int:
    try:
        sdist, wheel = sorted(build(), key=lambda path: path.suffix)
        check_contents(wheel, sdist)
        for package in (wheel, sdist):
            checks, size = selftest(package), package.stat().st_size
            print(f"{package.name}: {size / 1e3:.0f} kB, installed, {checks} checks passed")
    except Broken as error:
        print(f"tools.dist: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
