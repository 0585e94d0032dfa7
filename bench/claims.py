# SPDX-License-Identifier: Apache-2.0
"""How claims of speed are held to rows. The claims are in `forward_claims` and `decode_claims`.

Times are only compared inside a group, that is one case of one run.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.facets import Group
from bench.report import geometric_mean
from bench.rows import RESULTS, Row, groups

Factor = Callable[[Group, Row], float | None]  # of a group, and our row in it; None: not stated
Verdict = tuple[bool, str]  # whether it holds, and a line


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That a factor is at least so large in every cell that it is stated for."""

    text: str
    least: float
    factor: Factor
    cases: Collection[str] = ()  # each of which must have the factor; none: all that have it
    mean: bool = False  # it is the geometric mean of the factors that must be so large
    goal: bool = False  # not needed: what is hoped for


def over(*others: str) -> Factor:
    """The least time of some other candidates, over ours."""

    def factor(group: Group, ours: Row) -> float | None:
        times = [group[name].p50_us for name in others if name in group]
        return min(times) / ours.p50_us if times else None

    return factor


def where(holds: Callable[[Row], bool], factor: Factor) -> Factor:
    """A factor that is stated for some cells only."""
    return lambda group, ours: factor(group, ours) if holds(ours) else None


def share(factor: Factor, wanted: dict[str, float]) -> Factor:
    """A factor over what is wanted of it in a case; not stated for other cases."""

    def of(group: Group, ours: Row) -> float | None:
        found = factor(group, ours) if ours.case in wanted else None
        return None if found is None else found / wanted[ours.case]

    return of


def verdicts(claims: Sequence[Claim], backend: str, rows: Sequence[Row]) -> list[Verdict]:
    """Whether each claim holds, and lines that say where it does not, or is closest to that."""
    by_case = {case: group for case, group in groups(rows).items() if backend in group}
    return [_verdict(claim, backend, by_case) for claim in claims]


def _verdict(claim: Claim, backend: str, by_case: dict[str, Group]) -> Verdict:
    stated = {case: claim.factor(group, group[backend]) for case, group in by_case.items()}
    factors = {
        case: factor
        for case, factor in stated.items()
        if factor is not None and (not claim.cases or case in claim.cases)
    }
    missing = [case for case in claim.cases if case not in factors]
    ranked = sorted((factor, case) for case, factor in factors.items())
    failing = [] if claim.mean else [pair for pair in ranked if pair[0] < claim.least]
    mean = geometric_mean(factors.values())
    enough = mean >= claim.least if claim.mean else not failing
    good = bool(factors) and not missing and enough
    mark = "ok  " if good else "open" if claim.goal else "FAIL"
    line = f"{mark} {claim.text}: at least {claim.least:.3g}, "
    line += f"{len(factors) - len(failing)} of {len(factors) + len(missing)} cells"
    if factors:
        line += f", geometric mean {mean:.3f}, worst {ranked[0][0]:.3f} at {ranked[0][1]}"
    more = [f"       {factor:.3f} {case}" for factor, case in failing[1:]]
    if missing:
        others = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        more.append(f"       not measured: {', '.join(missing[:3])}{others}")
    return good or claim.goal, "\n".join([line, *more])


def main(
    argv: Sequence[str] | None, about: str, judged: Callable[[Path], Sequence[Verdict]]
) -> int:
    """Prints the verdicts on a folder of rows; 1 where one that is needed does not hold."""
    parser = argparse.ArgumentParser(description=about.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, default=RESULTS / "nvidia-h200")
    found = judged(parser.parse_args(argv).folder)
    print("\n".join(line for _, line in found))
    return 0 if all(good for good, _ in found) else 1
