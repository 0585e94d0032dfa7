# SPDX-License-Identifier: Apache-2.0
"""Measure suites: ours and the peers, interleaved, every output checked first.

    python bench/run.py [--suite NAME] [--case 'd128-*'] [--peers fa3,jax] [--quick] [--again]
                        [--out DIR] [--json]

Needs a GPU; peers need torch. Rows are appended to DIR/<gpu>/<suite>.csv as they are made, and
cases that hold a row of ours from the same sources are skipped: a run that was cut short goes on
where it stopped. `--quick` takes the quick cases of each suite and fewer rounds, and starts no case
after four minutes, compiling apart. Exits with 1 where an output of ours was wrong or there is no
GPU, 2 where arguments are not accepted, 3 where cases are left for another run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import decode, kv_write, merge
from bench.ahead import compile_ahead
from bench.candidates import peer_candidates, prepared_candidate, twin_candidates
from bench.cases import SUITES, Case, Suite, Tensors, random_tensors
from bench.decode_report import times
from bench.measure import Candidate, measure
from bench.report import table
from bench.rows import RESULTS, Row, append, load, measured, results_path, sources_digest
from rawattn.device import Device

ROUNDS, QUICK_ROUNDS = 25, 13
QUICK_SECONDS = 230  # of four minutes, less the longest case
WRONG, REFUSED, LEFT = 1, 2, 3  # exit codes


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One case to measure, and the file of its rows."""

    suite: Suite
    case: Case
    path: Path


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run did."""

    rows: list[Row] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)  # cases without a row of ours
    left: list[str] = field(default_factory=list)  # cases that were not begun
    seconds: float = 0.0

    @property
    def code(self) -> int:
        return WRONG if self.wrong else LEFT if self.left else 0


def run_case(suite: Suite, case: Case, rounds: int) -> list[Row]:
    """Rows of our backend and of every peer that can do the case."""
    tensors, candidates = BINDERS[suite.op](suite, case)
    return measure(suite.op, case, candidates, tensors, rounds=rounds)


def bind_forward(suite: Suite, case: Case) -> tuple[Tensors, list[Candidate]]:
    """The arrays of a dense case, and what is timed on them."""
    tensors = random_tensors(case.problem)
    ours = prepared_candidate(suite.backend, case, tensors)
    peers = peer_candidates(suite.peers, case, tensors)
    return tensors, [ours, *twin_candidates(suite, case, tensors), *peers]


BINDERS: dict[str, Callable[[Suite, Case], tuple[Any, list[Candidate]]]] = {
    "forward": bind_forward,
    "decode": decode.bind,
    "merge": merge.bind,
    "kv_write": kv_write.bind,
}


def run_tasks(tasks: Sequence[Task], rounds: int, seconds: float = math.inf) -> Outcome:
    """Measure cases one after another; none is begun after `seconds`."""
    start, outcome = time.perf_counter(), Outcome()
    for task in progress(tasks):
        name = f"{task.suite.name}/{task.case.id}"
        if time.perf_counter() - start > seconds:
            outcome.left.append(name)
            continue
        found = run_case(task.suite, task.case, rounds)
        append(task.path, found)
        outcome.rows += found
        if all(row.backend != task.suite.backend for row in found):
            outcome.wrong.append(name)
    outcome.seconds = time.perf_counter() - start
    return outcome


def progress(tasks: Sequence[Task]) -> Iterator[Task]:
    """The tasks, under a bar on stderr where rich is installed, else with a line each."""
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        for i, task in enumerate(tasks, 1):
            print(f"{i} of {len(tasks)}: {task.suite.name} {task.case.id}", file=sys.stderr)
            yield task
    else:
        yield from track(tasks, "measuring", console=Console(stderr=True))


def selected(
    names: Sequence[str], pattern: str | None, quick: bool, peers: str | None = None
) -> list[tuple[Suite, Case]]:
    """Cases of the suites, with some of their peers; ValueError where no case matches, or no suite
    has a peer.
    """
    wanted = None if peers is None else peers.split(",")
    known = {peer for name in names for peer in SUITES[name].peers}
    if wanted is not None and not known.issuperset(wanted):
        raise ValueError(f"peers={peers!r}: accepted are {','.join(sorted(known))}")
    found, refusals = [], []
    for name in names:
        suite = SUITES[name]
        try:
            cases = suite.select(pattern, quick)
        except ValueError as error:
            refusals.append(str(error))
            continue
        for case in cases:
            kept = suite.peers_of(case) if wanted is None else _among(suite.peers, wanted)
            found.append((replace(suite, peers=kept), case))
    if not found:
        raise ValueError("; ".join(refusals))
    return found


def _among(peers: Sequence[str], wanted: Collection[str]) -> tuple[str, ...]:
    return tuple(peer for peer in peers if peer in wanted)


def pending(cases: Sequence[tuple[Suite, Case]], gpu: str, out: Path, *, again: bool) -> list[Task]:
    """The cases without a row of ours from these sources; all of them, with `again`."""
    tasks = [
        Task(suite=suite, case=case, path=results_path(out, gpu, suite.name))
        for suite, case in cases
    ]
    if again:
        return tasks
    files = {(task.path, task.suite.backend) for task in tasks}
    done = {path: measured(load(path), ours, sources_digest()) for path, ours in files}
    return [task for task in tasks if task.case.id not in done[task.path]]


def tables(cases: Sequence[tuple[Suite, Case]], gpu: str, out: Path) -> str:
    """The newest rows of the cases, a table for each suite."""
    parts = []
    for name in dict.fromkeys(suite.name for suite, _ in cases):
        ids = {case.id for owner, case in cases if owner.name == name}
        asked = {peer for owner, _ in cases if owner.name == name for peer in owner.peers}
        suite = replace(SUITES[name], peers=_among(SUITES[name].peers, asked))
        rows = [r for r in load(results_path(out, gpu, suite.name)) if r.case in ids]
        if suite.op == "forward":
            bar = suite.peers[0] if suite.peers else ""
            text = table(rows, [suite.backend], suite.peers, bar=bar)
        else:
            text = times(rows, suite)
        parts.append(f"{suite.name}\n{text}")
    return "\n\n".join(parts)


def run(args: argparse.Namespace) -> tuple[dict[str, Any], int, str]:
    """Facts, exit code and tables. RuntimeError: no GPU here. ValueError: no such suite or case."""
    if args.suite not in (None, *SUITES):
        raise ValueError(f"suite={args.suite!r}: accepted are {', '.join(SUITES)}")
    gpu, out = Device.current().name, Path(args.out or RESULTS)
    names = [args.suite] if args.suite else list(SUITES)
    cases = selected(names, args.case, args.quick, args.peers)
    tasks = pending(cases, gpu, out, again=args.again)
    print(f"{gpu}: {len(tasks)} of {len(cases)} cases to measure", file=sys.stderr)
    compile_ahead([(task.suite, task.case) for task in tasks])
    rounds = QUICK_ROUNDS if args.quick else ROUNDS
    outcome = run_tasks(tasks, rounds, QUICK_SECONDS if args.quick else math.inf)
    facts = {
        "gpu": gpu,
        "folder": str(out),
        "measured": len(tasks) - len(outcome.left),
        "already_measured": len(cases) - len(tasks),
        "left": outcome.left,
        "wrong": outcome.wrong,
        "seconds": round(outcome.seconds, 1),
        "rows": len(outcome.rows),
    }
    return facts, outcome.code, tables(cases, gpu, out)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=SUITES, help="one suite (default: all)")
    parser.add_argument("--case", metavar="PATTERN", help="cases that match a shell pattern")
    parser.add_argument("--peers", metavar="NAMES", help="these, by commas (default: a case's)")
    parser.add_argument("--quick", action="store_true", help="few cells and rounds, four minutes")
    parser.add_argument("--again", action="store_true", help="measure cases that have rows already")
    parser.add_argument("--out", metavar="DIR", help="folder of rows (default: bench/results)")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # what peers and checks print
            facts, code, text = run(args)
    except (RuntimeError, ValueError) as error:
        print(f"bench/run.py: {error}", file=sys.stderr)
        if args.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}, indent=2))
        return WRONG if isinstance(error, RuntimeError) else REFUSED
    if args.json:
        print(json.dumps(facts, indent=2))
        return code
    print(text)
    for name in ("wrong", "left"):
        if facts[name]:
            print(f"{name.upper()}: {', '.join(facts[name])}")
    print(f"{facts['measured']} cases in {facts['seconds']:.0f} s, rows in {facts['folder']}")
    return code


if __name__ == "__main__":
    sys.exit(main())
