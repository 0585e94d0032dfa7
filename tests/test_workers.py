# SPDX-License-Identifier: Apache-2.0
"""Processes that work for a command end with it, however it ends."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rawattn.cli.workers import each

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = """\
import sys
import time
from pathlib import Path

from rawattn.cli.workers import each, program


def job(folder, n):
    Path(folder, str(n)).touch()
    time.sleep(60)


def main():
    return len(list(each(job, [(sys.argv[1], n) for n in range(9)], 2)))


if __name__ == "__main__":
    sys.exit(program("jobs", main))
"""


@pytest.mark.parametrize(
    ("number", "to_all", "code", "said"),
    [
        (signal.SIGINT, True, 130, "jobs: interrupted\n"),
        (signal.SIGINT, False, 130, "jobs: interrupted\n"),
        (signal.SIGTERM, False, 143, ""),
        (signal.SIGKILL, False, -9, None),
    ],
)
def test_workers_end_with_their_program(
    tmp_path: Path, number: int, to_all: bool, code: int, said: str | None
) -> None:
    """At once, with what they do; what waits is not begun."""
    (tmp_path / "jobs.py").write_text(PROGRAM)
    begun = tmp_path / "begun"
    begun.mkdir()
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "jobs.py"), str(begun)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's & ignores it
    ) as program:
        try:
            late = time.monotonic() + 60
            while len(list(begun.iterdir())) < 2 and time.monotonic() < late:
                time.sleep(0.02)
            (os.killpg if to_all else os.kill)(program.pid, number)
            # Workers hold the pipes too: this waits for all of them.
            _, err = program.communicate(timeout=20)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == code
    assert said is None or err == said
    assert len(list(begun.iterdir())) == 2


def test_results_come_with_their_places() -> None:
    assert sorted(each(divmod, [(7, 2), (9, 4)], 2)) == [(0, (3, 1)), (1, (2, 1))]


def test_what_a_job_raises_is_raised() -> None:
    with pytest.raises(ZeroDivisionError):
        list(each(divmod, [(7, 2), (1, 0)], 1))
