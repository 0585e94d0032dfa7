# SPDX-License-Identifier: Apache-2.0
"""Hypothesis profiles, CuPy, the skip of GPU tests, and the record of what the laws saw (across
xdist workers, too).
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from rawattn import device
from rawattn.testing import Record
from tools import emulator

# Kernels compile on their first call, so no example has a deadline. `ci` draws the same examples
# every time.
settings.register_profile(
    "dev", max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("ci", settings.get_profile("dev"), max_examples=100, derandomize=True)
settings.register_profile("soak", settings.get_profile("dev"), max_examples=2000)
settings.load_profile("dev")

RECORDS = pytest.StashKey[dict[str, Record]]()


def no_gpu() -> str | None:
    """Why GPU tests cannot run here; None where they can."""
    try:
        device.import_cupy()
    except RuntimeError as reason:
        return f"needs a GPU: {reason}"
    return None


# marker: why tests that bear it cannot run here, or None
NEEDS = {"gpu": no_gpu, "emulator": emulator.available}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", metavar="FILE", help="write counts and worst errors to FILE, JSON")
    parser.addoption("--examples", type=int, help="examples a property, in place of the profile's")


@pytest.hookimpl(trylast=True)  # after Hypothesis has loaded its profile
def pytest_configure(config: pytest.Config) -> None:
    config.stash[RECORDS] = {}
    if config.getoption("examples"):
        settings.register_profile("examples", max_examples=config.getoption("examples"))
        settings.load_profile("examples")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what cannot run here. The ledger is long, and starts first: it ends no worker's
    queue.
    """
    items.sort(key=lambda item: item.path.name != "test_ledger.py")
    for marker, why_not in NEEDS.items():
        reason = why_not()
        if reason is not None:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def cupy() -> Any:
    return pytest.importorskip("cupy", reason="CuPy is not installed")


@pytest.fixture(scope="session")
def records(pytestconfig: pytest.Config) -> dict[str, Record]:
    """What the laws saw, by executor; it is printed at the end, and written by --record."""
    return pytestconfig.stash[RECORDS]


def _add(records: dict[str, Record], name: str, examples: int, worst: dict[str, float]) -> None:
    record = records.setdefault(name, Record())
    record.examples += examples
    for output, ratio in worst.items():
        record.saw(output, ratio)


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)  # set in an xdist worker
    if output is not None:
        output["records"] = {
            name: (r.examples, r.worst) for name, r in session.config.stash[RECORDS].items()
        }


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node) -> None:  # type: ignore[no-untyped-def]
    for name, (examples, worst) in getattr(node, "workeroutput", {}).get("records", {}).items():
        _add(node.config.stash[RECORDS], name, examples, worst)


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:  # type: ignore[no-untyped-def]
    records = config.stash[RECORDS]
    for name, record in sorted(records.items()):
        worst = ", ".join(f"{output} {ratio:.3f}" for output, ratio in sorted(record.worst.items()))
        terminalreporter.write_line(
            f"laws on {name}: {record.examples} examples; worst share of a bound: {worst}"
        )
    target = config.getoption("record")
    if target:
        laws = {n: {"examples": r.examples, "worst": r.worst} for n, r in records.items()}
        Path(target).write_text(json.dumps({**counts(terminalreporter.stats), "laws": laws}))


OUTCOMES = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}


def counts(stats: dict[str, list[Any]]) -> dict[str, Any]:
    """How many tests passed, failed and were skipped, in all and of each file, and why; a file that
    was skipped as a whole counts as one. `stats` are pytest's reports by outcome.
    """
    total: Counter[str] = Counter(dict.fromkeys(OUTCOMES.values(), 0))
    files: dict[str, Counter[str]] = {}
    why: Counter[str] = Counter()
    for key, outcome in OUTCOMES.items():
        for report in stats.get(key, []):
            total[outcome] += 1
            files.setdefault(report.nodeid.split("::")[0], Counter())[outcome] += 1
            if outcome == "skipped":
                why[report.longrepr[2].removeprefix("Skipped: ")] += 1
    return {**total, "why_skipped": why, "files": dict(sorted(files.items()))}
