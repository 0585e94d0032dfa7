# SPDX-License-Identifier: Apache-2.0
"""Compare two files of rows, before and after a change, and flag what became slower.

    python bench/compare.py A.csv B.csv [--backend fwd_sm80] [--forgive PERCENT] [--json]
    python bench/compare.py bench/results/nvidia-h200 FOLDER      every suite that both have

A's and B's newest rows of each case are compared. Peers of equal version in both say how much the
machine itself differed on that case; that drift is taken out. Without such a peer it cannot be told
from the change, and 3 % more are forgiven; with several, as much more as they disagree. Slower is
what exceeds the spread of both measurements, p80 to p20, and never less than 1 %: what ratios
inside a run repeat to on one GPU. Between GPUs of one model they moved by up to 4 %: there,
`--forgive 4` (bench/README.md).

Exits with 0 where nothing is slower, 1 where something is or has no row any more, 2 where the files
cannot be compared.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.cases import SUITES
from bench.rows import Row, groups, load

FLOOR = 0.01  # to which ratios inside a run repeat
NO_PEER = 0.03  # to which absolute times do, more or less

Group = dict[str, Row]  # backend -> row, of one case


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One candidate on one case, in both files. NaN: it has no row in one of them."""

    case: str
    backend: str
    before_us: float
    after_us: float
    drift: float  # how much slower the peers were, as a factor
    change: float  # of our time without the drift, as a share: 0.02 is 2 % slower
    spread: float  # what is forgiven, as a share
    verdict: str  # "same", "slower", "faster", "gone", "new"


def compare(
    before: Sequence[Row], after: Sequence[Row], backend: str | None, floor: float = FLOOR
) -> list[Change]:
    """The changes of our backends, or of one; `floor`, a share, is forgiven in any case. ValueError
    where the files have nothing in common.
    """
    gpus = {row.gpu for row in (*before, *after)}
    if len(gpus) > 1:
        raise ValueError(f"rows are of {', '.join(sorted(gpus))}: accepted are rows of one GPU")
    old, new = groups(before), groups(after)
    if not old.keys() & new.keys():
        raise ValueError("the files have no case in common")
    return [
        _change(case, name, old.get(case, {}), new[case], floor)
        for case in new
        for name in dict.fromkeys([*old.get(case, {}), *new[case]])
        if backend in (None, name) and _ours(name, old.get(case, {}), new[case])
    ]


def _ours(name: str, old: Group, new: Group) -> bool:
    return not any(group[name].peer_version for group in (old, new) if name in group)


def _change(case: str, name: str, old: Group, new: Group, floor: float) -> Change:
    drift, forgiven = _drift(old, new)
    spread = floor + forgiven
    change, verdict = math.nan, "gone" if name in old else "new"
    if name in old and name in new:
        ratio = new[name].p50_us / old[name].p50_us
        change = ratio / (1.0 if math.isnan(drift) else drift) - 1
        spread = max(floor, _spread(old[name]), _spread(new[name])) + forgiven
        verdict = "slower" if change > spread else "faster" if change < -spread else "same"
    return Change(
        case=case,
        backend=name,
        before_us=old[name].p50_us if name in old else math.nan,
        after_us=new[name].p50_us if name in new else math.nan,
        drift=drift,
        change=change,
        spread=spread,
        verdict=verdict,
    )


def _drift(old: Group, new: Group) -> tuple[float, float]:
    """The geometric mean of the peers' ratios, and how far they lie apart; NaN without peers."""
    ratios = [
        new[name].p50_us / old[name].p50_us
        for name in old.keys() & new.keys()
        if old[name].peer_version and old[name].peer_version == new[name].peer_version
    ]
    if not ratios:
        return math.nan, NO_PEER
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return mean, max(abs(ratio / mean - 1) for ratio in ratios)


def _spread(row: Row) -> float:
    """Half of what lies between p20 and p80, as a share of the median."""
    return (row.p80_us - row.p20_us) / (2 * row.p50_us)


def pairs(before: Path, after: Path) -> list[tuple[Path, Path]]:
    """The two files, or those of the suites that two folders have in common. ValueError where
    there are none.
    """
    if before.is_dir() and after.is_dir():
        names = [f"{name}.csv" for name in SUITES]
        both = [(before / n, after / n) for n in names if (before / n).exists()]
        found = [(a, b) for a, b in both if b.exists()]
        if not found:
            raise ValueError(f"{before} and {after}: accepted are folders with a suite in common")
        return found
    for path in (before, after):
        if not path.is_file():
            raise ValueError(f"{path}: there is no such file")
    return [(before, after)]


def text(changes: Sequence[Change]) -> str:
    """A line for each change, and how many there are of each verdict."""
    line = "{:32}{:22}{:>11}{:>11}{:>9}{:>10}{:>9}  {}".format
    lines = [line("case", "backend", "before us", "after us", "drift", "change", "spread", "")]
    for c in changes:
        lines.append(
            line(
                c.case,
                c.backend,
                *(_number(x, ".1f") for x in (c.before_us, c.after_us)),
                *(_number(100 * x, "+.1f", " %") for x in (c.drift - 1, c.change)),
                _number(100 * c.spread, ".1f", " %"),
                "" if c.verdict == "same" else c.verdict.upper(),
            ).rstrip()
        )
    counts = {v: sum(c.verdict == v for c in changes) for v in dict.fromkeys(_verdicts(changes))}
    return "\n".join([*lines, ", ".join(f"{n} {v}" for v, n in counts.items())])


def _verdicts(changes: Sequence[Change]) -> list[str]:
    return [c.verdict for c in changes]


def _number(value: float, form: str, unit: str = "") -> str:
    return "-" if math.isnan(value) else format(value, form) + unit


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("before", type=Path, metavar="A.csv", help="or a folder of them")
    parser.add_argument("after", type=Path, metavar="B.csv")
    parser.add_argument("--backend", help="one of ours (default: all)")
    forgiven = 100 * FLOOR
    about = "of a change, in any case (default: 1)"
    parser.add_argument("--forgive", type=float, default=forgiven, metavar="PERCENT", help=about)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    try:
        changes = [
            change
            for before, after in pairs(args.before, args.after)
            for change in compare(load(before), load(after), args.backend, args.forgive / 100)
        ]
        if not changes:
            raise ValueError(f"backend={args.backend!r}: the files have no row of it")
    except ValueError as error:
        print(f"bench/compare.py: {error}", file=sys.stderr)
        return 2
    if args.json:
        facts = [{k: _null(v) for k, v in asdict(c).items()} for c in changes]
        print(json.dumps(facts, indent=2))
    else:
        print(text(changes))
    return int(any(c.verdict in ("slower", "gone") for c in changes))


def _null(value: object) -> object:
    return None if isinstance(value, float) and math.isnan(value) else value


if __name__ == "__main__":
    sys.exit(main())
