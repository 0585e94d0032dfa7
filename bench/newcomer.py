# SPDX-License-Identifier: Apache-2.0
"""The newcomer's path, timed: clone, `make demo`, a first call of one's own, `make test`.

    python bench/newcomer.py [--without-tests] [--out DIR]

Every step is a line of the README, run in a fresh clone of this checkout's last commit, with an
empty environment and an empty kernel cache. A step that fails ends the run: then the README lacks
one. What steps print goes to stderr as it comes; `make test` takes a quarter of an hour on two
cores, so nothing else should run there.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.host_time import cpu_name
from bench.rows import RESULTS, ROOT, append, commit

ACTIVATE = ". .venv/bin/activate"


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One step."""

    step: str
    seconds: float
    result: str  # "ok", or the exit code and the last line of what it said
    cores: int
    cpu: str
    python: str
    commit: str
    timestamp: str


def first_call(readme: str) -> str:
    """The first example of the README that needs no GPU."""
    blocks = re.findall(r"(?:^<!-- ([^\n]*?) -->\n)?^```python\n(.*?)^```$", readme, re.M | re.S)
    return next(code for comment, code in blocks if not comment)


def steps(clone: Path) -> dict[str, list[str]]:
    """What a newcomer does, in order."""
    readme = (ROOT / "README.md").read_text()
    return {
        "clone": ["git", "clone", "--quiet", str(ROOT), str(clone)],
        "make demo": ["make", "demo"],
        "first own call": ["sh", "-c", f'{ACTIVATE} && python -c "$0"', first_call(readme)],
        "make test": ["make", "test"],
    }


def environment(cache: Path) -> dict[str, str]:
    """That of a newcomer: nothing of this project's, nor of an environment that is active here."""
    ours = ("RAWATTN_", "MAKE", "MFLAGS", "VIRTUAL_ENV", "PYTHONPATH", "PYTHONHOME", "PYTEST_")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    return {**env, "RAWATTN_CACHE_DIR": str(cache)}


def timed(step: str, command: Sequence[str], folder: Path, cache: Path) -> StepRow:
    """Runs a step; what it prints goes to stderr."""
    last, start = "", time.perf_counter()
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        for line in process.stdout or ():
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
    seconds = time.perf_counter() - start
    return StepRow(
        step=step,
        seconds=round(seconds, 1),
        result="ok" if process.returncode == 0 else f"exit code {process.returncode}: {last}"[:200],
        cores=os.cpu_count() or 0,
        cpu=cpu_name(),
        python=platform.python_version(),
        commit=commit().rstrip("+"),
        timestamp=datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--without-tests", action="store_true", help="leave out `make test`")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        clone, cache = Path(folder) / "rawattn", Path(folder) / "cache"
        for step, command in steps(clone).items():
            if step == "make test" and args.without_tests:
                continue
            row = timed(step, command, clone if clone.exists() else Path(folder), cache)
            append(args.out / "install" / "newcomer.csv", [row])
            print(f"{step:16s} {row.seconds:8.1f} s  {row.result}", flush=True)
            if row.result != "ok":
                return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
