# SPDX-License-Identifier: Apache-2.0
"""The tables of speed in the pages, from the committed rows.

    python bench/table.py            print them
    python bench/table.py --write    put them into the pages, between two comments

The README has attention alone, the kinds of cases that were measured at three lengths or more, and
the peers that are measured on every case; docs/bench.md has all. Each table is followed by its
picture, which bench/plot.py draws, and by what was measured in two forms. docs/install.md has what
installations and a newcomer's steps take; pages of kernels have what their text is about. A test
holds the pages to the rows. Needs no GPU.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import repeat, twins
from bench.cases import SUITES, Suite
from bench.check import SOFTCAP
from bench.compare import FLOOR
from bench.facets import OTHERS, Group, length, name, shared, split
from bench.first_output import FIRST_OUTPUT
from bench.host_time import HostRow
from bench.install_size import InstallRow
from bench.newcomer import StepRow
from bench.rows import RESULTS, ROOT, Row, groups, load

README, ALL, INSTALL = "README.md", "docs/bench.md", "docs/install.md"
FORWARD, MERGE = "docs/kernels/fwd_sm90.md", "docs/kernels/merge.md"
LEAST = {README: 3, ALL: 1}  # lengths of a line
IN_README = ("fwd_sm90", "decode", "fwd_sm80")
WORST = 4  # cells where a peer is faster that the README names; docs/bench.md names all
BEGIN, END = "<!-- bench/table.py: begin -->\n", "<!-- bench/table.py: end -->\n"
NO_ROWS = "No rows have been committed yet, so there is no figure here.\n"


def markdown(page: str, results: Path = RESULTS) -> str:
    """The tables of a page; a sentence where there are no rows."""
    return PAGES[page](results) or NO_ROWS


def _speed(page: str, results: Path) -> str:
    """A table and a picture for each suite and GPU that has rows."""
    up = "../" * page.count("/")
    images = "img" if page == ALL else "docs/img"
    tables = []
    for suite in (SUITES[key] for key in (IN_README if page == README else SUITES)):
        for path, rows in _measured(suite, results):
            link = up + path.relative_to(results.parents[1]).as_posix()
            picture = f"{images}/{suite.name}-{path.parent.name}.png"
            text = _gpu_table(suite, link, rows, LEAST[page])
            text += f"\n![{suite.name} beside others]({picture})\n"
            more = _twins(suite, rows) + _scored(suite, rows) if page == ALL else ""
            tables.append(text + more)
    return "\n".join([*tables, _spread(results)]) if tables else ""


def _measured(suite: Suite, results: Path) -> list[tuple[Path, list[Row]]]:
    """The files that have rows of a suite's own backend, and what they hold; one a GPU."""
    found = [(path, load(path)) for path in sorted(results.glob(f"*/{suite.name}.csv"))]
    return [(p, rows) for p, rows in found if any(r.backend == suite.backend for r in rows)]


def _twins(suite: Suite, rows: Sequence[Row], forms: str = "") -> str:
    """What was measured in two forms, all or some of them; nothing without."""
    found = [pair for pair in twins.pairs(groups(rows).values()) if not pair.scored]
    found = [pair for pair in found if forms in ("", pair.forms)]
    lines = twins.table(found, suite.backend)
    told = (
        "The same work in two forms, medians of interleaved launches in one run: the speed of the "
        "first as a multiple of the second's."
    )
    return f"\n{told}\n\n{_table(lines)}" if lines else ""


def _scored(suite: Suite, rows: Sequence[Row]) -> str:
    """What steps between q.k and the softmax take; nothing without."""
    lines = twins.scored(groups(rows).values(), suite.backend, "fa3")
    told = (
        f"Softcap ({SOFTCAP:g}) and ALiBi beside the same without, medians of interleaved launches "
        "in one run: microseconds, and how many times as long it takes; at last our speed as a "
        f"multiple of {name('fa3')}'s, which has no ALiBi."
    )
    return f"\n{told}\n\n{_table(lines)}" if lines else ""


def _hopper(results: Path) -> str:
    """What fp16 costs beside bf16, and steps of scores beside none."""
    suite = SUITES["fwd_sm90"]
    scored = [_scored(suite, rows) for _, rows in _measured(suite, results)]
    return "".join([_fp16(results), *scored]).lstrip()


def _fp16(results: Path) -> str:
    """What fp16 costs beside bf16."""
    suite = SUITES["fwd_sm90"]
    parts = []
    for path, rows in _measured(suite, results):
        text = _twins(suite, rows, twins.FP16).lstrip()
        picture = f"../img/fp16-{path.parent.name}.png"
        drawn = twins.fp16_lines(rows, suite.backend)
        parts.append(text + (f"\n![fp16 beside bf16]({picture})\n" if drawn else ""))
    return "\n".join(filter(None, parts))


def _merging(results: Path) -> str:
    """Microseconds of merging, of others, and of what moves as many bytes."""
    suite = SUITES["merge"]
    heads = ["case", suite.backend, *map(name, suite.peers), "vLLM / plain sum"]
    parts = []
    for _, rows in _measured(suite, results):
        lines = [heads, ["---", *["---:"] * (len(heads) - 1)]]
        for case, group in groups(rows).items():
            if (ours := group.get(suite.backend)) is None:
                continue
            times = [_beside(group.get(other), ours) for other in suite.peers]
            most = [group[other].p50_us for other in ("vllm", "add") if other in group]
            share = f"{most[0] / most[1]:.3f}" if len(most) == 2 else "-"
            lines.append([case, f"{ours.p50_us:.2f}", *times, share])
        told = "Microseconds, and as a multiple of ours; medians of interleaved launches"
        parts.append(f"{_table(lines)}\n{told}, {rows[-1].gpu}. {_code(rows)}.\n")
    return "\n".join(parts)


def _beside(other: Row | None, ours: Row) -> str:
    return "-" if other is None else f"{other.p50_us:.2f}, {other.p50_us / ours.p50_us:.3f}"


def _spread(results: Path) -> str:
    """To what the numbers repeat, and to what they did."""
    text = f"Measured again, by `python bench/repeat.py`, numbers repeat: {repeat.stated()}."
    for folder in sorted((results / "again").glob("*")):
        rows = [row for path in folder.glob("*.csv") for row in load(path)]
        if not rows:
            continue
        seen = repeat.sentence(repeat.offs(results / folder.name, folder))
        text += f" {_list(r.gpu for r in rows)}, {_list(r.timestamp[:10] for r in rows)}: {seen}."
    return f"{text}\n"


def _installations(folder: Path) -> str:
    """What each stack takes, and each step of a newcomer; newest rows alone."""
    stacks = {row.stack: row for row in load(folder / "install_size.csv", InstallRow)}
    walked = load(folder / "newcomer.csv", StepRow)
    steps = {row.step: row for row in walked if row.result == "ok"}
    lines = [["stack", "versions", "packages", "MB", "seconds of pip", "seconds to a first output"]]
    lines += [["---", "---", *["---:"] * 4]]
    for row in stacks.values():
        known = [str(row.packages), f"{row.size_mb:,.0f}", f"{row.install_seconds:.0f}"]
        first = "-" if math.isnan(row.first_output_seconds) else f"{row.first_output_seconds:.1f}"
        cells = [*known, first] if row.result == "ok" else ["-", "-", "-", "-"]
        failed = "" if row.result == "ok" else " (could not be installed here)"
        lines.append([f"{row.stack}{failed}", row.versions, *cells])
    walk = [["step", "seconds"], ["---", "---:"]]
    walk += [[f"{row.step}", f"{row.seconds:.1f}"] for row in steps.values()]
    tables = [_table(part) for part in (lines, walk) if len(part) > 2]
    told = _when(stacks.values(), "Stacks")
    if steps:
        cores = _list(f"{row.cores} cores of {row.cpu}" for row in steps.values())
        told += _when(steps.values(), f"Steps on {cores}")
    return "\n".join(tables) + (f"\n{told.strip()}\n" if tables else "")


def _when(rows: Iterable[Any], what: str) -> str:
    """Which code was measured, and when; nothing without rows."""
    rows = list(rows)
    days, commits = _list(r.timestamp[:10] for r in rows), _list(r.commit for r in rows)
    return f" {what}: {days}, commit {commits}." if rows else ""


def _first_outputs(results: Path) -> str:
    """From a new process to its first output on a GPU; newest rows alone."""
    newest = {
        (row.gpu, row.what.removeprefix(FIRST_OUTPUT)): row
        for path in sorted(results.glob("*/host_time.csv"))
        for row in load(path, HostRow)
        if row.what.startswith(FIRST_OUTPUT)
    }
    lines = [["first output on a GPU", "seconds", "p20 to p80"], ["---", "---:", "---:"]]
    for (gpu, what), row in newest.items():
        p20, p50, p80 = (f"{us / 1e6:.1f}" for us in (row.p20_us, row.p50_us, row.p80_us))
        lines.append([f"{what}, {gpu}", p50, f"{p20} to {p80}"])
    return "\n" + _table(lines) if newest else ""


def _table(lines: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def section(text: str) -> str:
    """What stands between the two comments. ValueError where they are not there."""
    return text[slice(*_span(text))]


def replaced(text: str, table: str) -> str:
    """The text with another table between the two comments."""
    begin, end = _span(text)
    return text[:begin] + table + text[end:]


def _span(text: str) -> tuple[int, int]:
    return text.index(BEGIN) + len(BEGIN), text.index(END)


def _gpu_table(suite: Suite, path: str, rows: Sequence[Row], least: int) -> str:
    """A line for each kind of case with so many lengths, and what the numbers are."""
    every = [group for group in groups(rows).values() if suite.backend in group]
    facets, kinds = split(every, suite.backend, least)
    newest = [group for cells in kinds.values() for group in cells]
    figure = "TFLOP/s" if _compute_bound(suite, newest) else "GB/s"
    usual = [p for p in suite.peers if p not in suite.seldom and any(p in g for g in newest)]
    peers = suite.peers if least == 1 else usual
    heads = [*facets, "lengths", figure, *(f"/ {name(p)}" for p in peers)]
    lines = [heads, ["---"] * (1 + len(facets)) + ["---:"] * (1 + len(peers))]
    lines += [[*labels, *_cells(suite, peers, cells, figure)] for labels, cells in kinds.items()]
    missing = [name(p) for p in suite.peers if p not in {row.backend for row in rows}]
    common = shared([group[suite.backend] for group in newest], facets)
    caption = _caption(suite, path, newest, figure, peers, missing, common)
    return f"{_table(lines)}\n{caption}{_behind(suite, every, None if least == 1 else WORST)}"


def _behind(suite: Suite, groups: Sequence[Group], most: int | None) -> str:
    """The cells where a peer that does the same was faster, and the share of its speed of ours; so
    many of them, or all.
    """
    found = []
    for group in groups:
        ours = group[suite.backend]
        rivals = [group[p] for p in suite.peers if p in group and p not in OTHERS]
        best = min(rivals, key=lambda row: row.p50_us, default=ours)
        if best.p50_us < (1 - FLOOR) * ours.p50_us:
            found.append((best.p50_us / ours.p50_us, ours.case, name(best.backend)))
    if not found:
        return ""
    shown = "; ".join(f"{case} {ratio:.2f} of {peer}" for ratio, case, peer in sorted(found)[:most])
    hidden = len(found) - (len(found) if most is None else most)
    more = f"; {hidden} more [there]({ALL})" if hidden > 0 else ""
    count = f"{len(found)} of {len(groups)} cells"
    return f"\nA peer was more than {100 * FLOOR:g} % faster in {count}, ours at: {shown}{more}.\n"


def _compute_bound(suite: Suite, newest: Sequence[Group]) -> bool:
    """Whether most cases are: theirs is the figure of all."""
    bounds = [group[suite.backend].bound for group in newest]
    return bounds.count("compute") * 2 >= len(bounds)


def _cells(suite: Suite, peers: Sequence[str], cells: Sequence[Group], figure: str) -> list[str]:
    ours = [group[suite.backend] for group in cells]
    lengths = sorted({length(row) for row in ours})
    speeds = [row.tflops if figure == "TFLOP/s" else row.gb_per_s for row in ours]
    line = [f"{len(lengths)}, {_range(lengths, 'd')}", _range(speeds, ".0f")]
    for peer in peers:
        pairs = [(group[peer], group[suite.backend]) for group in cells if peer in group]
        some = f" ({len(pairs)} of {len(cells)})" if 0 < len(pairs) < len(cells) else ""
        line.append(_range([peer.p50_us / ours.p50_us for peer, ours in pairs], ".2f") + some)
    return line


def _range(values: Sequence[float], form: str) -> str:
    """Smallest to largest; a dash for none."""
    if not values:
        return "-"
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _caption(
    suite: Suite,
    path: str,
    newest: Sequence[Group],
    figure: str,
    shown: Sequence[str],
    missing: Sequence[str],
    common: Sequence[str],
) -> str:
    rows = [row for group in newest for row in group.values()]
    ours = [group[suite.backend] for group in newest]
    peers = [row for row in rows if row.backend in shown]
    versions = {f"{name(row.backend)} in {row.peer_version}" for row in peers}
    gap = f" Not measured: {'; '.join(missing)}." if missing else ""
    alike = f" All lines: {', '.join(common)}." if common else ""
    return (
        f"{suite.backend} on {_list(r.gpu for r in rows)}, driver {_list(r.driver for r in rows)}, "
        f"{_list(r.dtype for r in ours)}. Each line spans the lengths measured: "
        f"smallest to largest {figure}, and smallest to largest speed as a multiple of the peer's "
        f"(above 1 we are faster), medians of interleaved launches in one run.{alike} "
        f"Peers: {_list(versions, '; ')}.{gap} "
        f"{_code(rows)}, {_list(r.timestamp[:10] for r in rows)}. "
        f"Rows: [{path.removeprefix('../')}]({path}).\n"
    )


def _code(rows: Sequence[Row]) -> str:
    """The commit that was measured; where it is unknown, the digest of the sources."""
    if any(row.commit == "unknown" for row in rows):
        return f"Sources {_list(r.sources for r in rows)}"
    return f"Commit {_list(r.commit for r in rows)}"


def _list(values: Iterable[str], separator: str = ", ") -> str:
    return separator.join(sorted(set(values)))


PAGES: dict[str, Callable[[Path], str]] = {
    README: lambda results: _speed(README, results),
    ALL: lambda results: _speed(ALL, results),
    INSTALL: lambda results: _installations(results / "install") + _first_outputs(results),
    FORWARD: _hopper,
    MERGE: _merging,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put them into the pages")
    write = parser.parse_args(argv).write
    for page in PAGES:
        if write:
            text = (ROOT / page).read_text()
            (ROOT / page).write_text(replaced(text, markdown(page)))
        else:
            print(f"{page}\n\n{markdown(page)}")


if __name__ == "__main__":
    main()
