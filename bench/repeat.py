# SPDX-License-Identifier: Apache-2.0
"""The quick profile again, held to the committed rows: do the tables repeat?

    python bench/repeat.py [--out DIR]       measure, then compare; four minutes
    python bench/repeat.py --rows DIR        compare the rows of DIR, no GPU

Each ratio of a peer's time to ours, and each time of ours, is compared with the committed one. The
spread that the tables state is `USUAL` for nine ratios of ten, `MOST` for all of them, and `TIMES`
for times. Peers of another version are left out; so are cases that only one side has.

Exits with 0 where all lie within it, 1 where not or there is no GPU, 2 where there is nothing to
compare, 3 where cases are left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import run
from bench.cases import SUITES
from bench.facets import name
from bench.rows import RESULTS, groups, load

AGAIN = RESULTS / "again"
# Shares: of nine ratios in ten, of every ratio, of times. In three runs of a day on H200s, ratios
# between FlashAttention-3, cuDNN and FlashAttention-2, whose code was the same, moved by up to
# 2.5 % in nine cells of ten and by 7 % at most, their times by 11 %: a GPU that may draw so much
# power has another clock at another temperature.
USUAL, MOST, TIMES = 0.03, 0.08, 0.12
SHARE = 0.9  # of the ratios that must lie within USUAL
SHOWN = 8  # ratios that are printed


@dataclass(frozen=True, slots=True, kw_only=True)
class Off:
    """A number of the committed rows, and the same measured again."""

    suite: str
    case: str
    peer: str  # empty: the time of ours
    before: float  # peer's time over ours, or microseconds
    after: float

    @property
    def share(self) -> float:
        """How far off it is: 0.02 is 2 % more than committed."""
        return self.after / self.before - 1


def offs(before: Path, after: Path) -> list[Off]:
    """Ratios and times of two folders of one GPU's rows. ValueError where they share none."""
    found = []
    for suite in SUITES.values():
        old = groups(load(before / f"{suite.name}.csv"))
        new = groups(load(after / f"{suite.name}.csv"))
        for case in old.keys() & new.keys():
            a, b = old[case], new[case]
            if suite.backend not in a or suite.backend not in b:
                continue
            ours = a[suite.backend].p50_us, b[suite.backend].p50_us
            found.append(_off(suite.name, case, "", *ours))
            for peer in a.keys() & b.keys():
                if not a[peer].peer_version or a[peer].peer_version != b[peer].peer_version:
                    continue
                theirs = a[peer].p50_us, b[peer].p50_us
                ratios = theirs[0] / ours[0], theirs[1] / ours[1]
                found.append(_off(suite.name, case, peer, *ratios))
    if not found:
        raise ValueError(f"{before} and {after}: accepted are folders with a case in common")
    return sorted(found, key=lambda x: (-abs(x.share), x.suite, x.case, x.peer))


def _off(suite: str, case: str, peer: str, before: float, after: float) -> Off:
    return Off(suite=suite, case=case, peer=peer, before=before, after=after)


def repeats(found: Sequence[Off]) -> bool:
    """Whether all of it lies within the spread that is stated."""
    ratios = [abs(x.share) for x in found if x.peer]
    usual = sum(share <= USUAL for share in ratios) >= SHARE * len(ratios)
    return usual and all(abs(x.share) <= (MOST if x.peer else TIMES) for x in found)


def sentence(found: Sequence[Off]) -> str:
    """What was seen, for people."""
    ratios, times = ([x for x in found if bool(x.peer) is kind] for kind in (True, False))
    usual = sum(abs(x.share) <= USUAL for x in ratios)
    text = f"{usual} of {len(ratios)} ratios within {100 * USUAL:g} %"
    if ratios:  # the largest is first
        worst = ratios[0]
        text += f", the farthest {100 * worst.share:+.1f} % ({worst.case}, {name(worst.peer)})"
    if times:
        text += f"; times of ours {100 * times[0].share:+.1f} % at most ({times[0].case})"
    return text


def stated() -> str:
    """The spread, for people."""
    return (
        f"nine ratios of ten within {100 * USUAL:g} %, all within {100 * MOST:g} %, our times "
        f"within {100 * TIMES:g} %"
    )


def pairs(before: Path, rows: Path) -> list[tuple[Path, Path]]:
    """Folders of the GPUs that both have rows of. ValueError without any."""
    found = [
        (before / folder.name, folder)
        for folder in sorted(rows.iterdir() if rows.is_dir() else ())
        if any((folder / f"{suite}.csv").exists() for suite in SUITES)
        and (before / folder.name).is_dir()
    ]
    if not found:
        raise ValueError(f"rows={str(rows)!r}: accepted is a folder as bench/results is")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=AGAIN, metavar="DIR", help="folder of rows")
    parser.add_argument("--rows", type=Path, metavar="DIR", help="compare these, measure nothing")
    about = "what they are compared with (default: bench/results)"
    parser.add_argument("--against", type=Path, default=RESULTS, metavar="DIR", help=about)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    args = parser.parse_args(argv)
    code = 0
    if args.rows is None:
        with contextlib.redirect_stdout(sys.stderr if args.json else sys.stdout):
            code = run.main(["--quick", "--again", "--out", str(args.out)])
        if code not in (0, run.LEFT):
            return code
    try:
        found = [x for pair in pairs(args.against, args.rows or args.out) for x in offs(*pair)]
    except ValueError as error:
        print(f"bench/repeat.py: {error}", file=sys.stderr)
        return run.REFUSED
    good = repeats(found)
    if args.json:
        print(json.dumps({"repeats": good, "off": [asdict(x) for x in found]}, indent=2))
    else:
        line = "{:10}{:32}{:18}{:>10}{:>10}{:>9}".format
        print(line("suite", "case", "", "committed", "again", "off"))
        for x in found[:SHOWN]:
            form, label = (".3f", f"/ {x.peer}") if x.peer else (".1f", "us of ours")
            numbers = format(x.before, form), format(x.after, form), f"{100 * x.share:+.1f} %"
            print(line(x.suite, x.case, label, *numbers))
        print(f"{sentence(found)}.\nStated: {stated()}: {'yes' if good else 'NO'}")
    return code if good else run.WRONG


if __name__ == "__main__":
    sys.exit(main())
