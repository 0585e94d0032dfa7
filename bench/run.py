# SPDX-License-Identifier: Apache-2.0
"""Measure a suite: ours and the peers, interleaved, every output checked first.

    python bench/run.py --suite fwd_sm80 [--case 'd128-*'] [--quick] [--again] [--out DIR]

Needs a GPU; peers need torch. Rows are appended to DIR/<gpu>/<suite>.csv. Cases that hold a row of
ours from the same sources are skipped. Exits with 1 where an output of ours was wrong, or where
there is no GPU.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.candidates import peer_candidates, prepared_candidate
from bench.cases import SUITES, Case, Suite, random_tensors
from bench.measure import measure
from bench.report import table
from bench.rows import RESULTS, Row, append, load, measured, results_path, sources_digest
from rawattn.device import Device

ROUNDS, QUICK_ROUNDS = 25, 13


def run_case(suite: Suite, case: Case, rounds: int) -> list[Row]:
    """Rows of our backend and of every peer that can do the case."""
    tensors = random_tensors(case.problem)
    ours = prepared_candidate(suite.backend, case, tensors)
    candidates = [ours, *peer_candidates(suite.peers, case, tensors)]
    return measure(suite.op, case, candidates, tensors, rounds=rounds)


def progress(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases, with a bar where rich is installed."""
    try:
        from rich.progress import track
    except ImportError:
        yield from cases
    else:
        yield from track(cases, description="bench")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--case", help="shell pattern of case ids")
    parser.add_argument("--quick", action="store_true", help="few cells, few rounds")
    parser.add_argument("--again", action="store_true", help="measure cases that have rows already")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args(argv)
    suite = SUITES[args.suite]
    try:
        gpu = Device.current().name
    except RuntimeError as error:
        print(f"bench/run.py: {error}", file=sys.stderr)
        return 1
    cases = suite.select(args.case, args.quick)
    path = results_path(args.out, gpu, suite.name)
    done = set() if args.again else measured(load(path), suite.backend, sources_digest())
    todo = [c for c in cases if c.id not in done]
    print(f"{gpu}: {len(todo)} cases to measure, {len(cases) - len(todo)} already in {path}")
    start, wrong = time.perf_counter(), []
    for case in progress(todo):
        found = run_case(suite, case, QUICK_ROUNDS if args.quick else ROUNDS)
        append(path, found)
        if all(row.backend != suite.backend for row in found):
            wrong.append(case.id)
    rows = [r for r in load(path) if r.case in {c.id for c in cases}]
    print(table(rows, [suite.backend], suite.peers, bar="fa2"))
    print(
        f"{time.perf_counter() - start:.0f} s" + (f"; WRONG: {', '.join(wrong)}" if wrong else "")
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
