# SPDX-License-Identifier: Apache-2.0
"""Files for a forge: its CI runs what `.ci/run` runs, its forms ask for what a report needs."""

from __future__ import annotations

import os
import subprocess
from typing import Any

import pytest

from tests.markdown import ROOT

yaml = pytest.importorskip("yaml")  # MkDocs brings it
FORGE = ROOT / ".github"


def load(name: str) -> Any:
    return yaml.safe_load((FORGE / name).read_text())


def test_the_workflow_runs_what_ci_runs() -> None:
    (job,) = load("workflows/ci.yml")["jobs"].values()
    commands = [step.get("run", "") for step in job["steps"]]
    assert ".ci/run" in commands
    mode = subprocess.run(
        ["git", "ls-files", "-s", ".ci/run"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert mode.stdout.startswith("100755")
    script = (ROOT / ".ci/run").read_text()
    assert "make test" in script and "make dist" in script
    least = (ROOT / "pyproject.toml").read_text().split('requires-python = ">=')[1].split('"')[0]
    assert job["strategy"]["matrix"]["python"][0] == least


def test_a_report_holds_what_info_prints() -> None:
    fields = {f["id"]: f for f in load("ISSUE_TEMPLATE/bug.yml")["body"] if "id" in f}
    assert fields["info"]["attributes"]["label"] == "python -m rawattn info --json"
    assert fields["info"]["validations"]["required"]


def test_make_test_lints_and_builds_the_docs() -> None:
    env = {k: v for k, v in os.environ.items() if not k.startswith("MAKE")}
    dry = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, env=env, capture_output=True, text=True, check=True
    )
    for command in ("ruff check", "mypy", "mkdocs build", "pytest"):
        assert command in dry.stdout


def test_warnings_of_the_docs_are_errors() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    assert "\nstrict: true\n" in text and text.count(": warn") == 4
