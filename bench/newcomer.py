# SPDX-License-Identifier: Apache-2.0
"""The newcomer's path, timed: clone, `make demo`, a first call of one's own, `make test`.

    python bench/newcomer.py [--without-tests] [--out DIR]

Every step is a line of the README, run in a fresh clone of this checkout's last commit, with an
empty environment and an empty kernel cache. A step that fails ends the run: then the README lacks
one.
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
    result: str  # "ok", or the last line of what it said
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


def timed(step: str, command: Sequence[str], folder: Path, cache: Path) -> StepRow:
    """Runs a step; what it prints goes to stderr."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("RAWATTN_", "MAKE"))}
    env = {**inherited, "RAWATTN_CACHE_DIR": str(cache)}
    start = time.perf_counter()
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    seconds = time.perf_counter() - start
    print(done.stdout, file=sys.stderr)
    last = (done.stdout.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
    return StepRow(
        step=step,
        seconds=round(seconds, 1),
        result="ok" if done.returncode == 0 else last[:200],
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
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        clone, cache = Path(folder) / "rawattn", Path(folder) / "cache"
        for step, command in steps(clone).items():
            if step == "make test" and args.without_tests:
                continue
            rows.append(timed(step, command, clone if clone.exists() else Path(folder), cache))
            print(f"{step:16s} {rows[-1].seconds:8.1f} s  {rows[-1].result}", flush=True)
            if rows[-1].result != "ok":
                break
    append(args.out / "install" / "newcomer.csv", rows)
    return int(rows[-1].result != "ok")


if __name__ == "__main__":
    sys.exit(main())
