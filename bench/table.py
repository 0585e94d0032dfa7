# SPDX-License-Identifier: Apache-2.0
"""The README's table of speed, from the committed rows.

    python bench/table.py            print it
    python bench/table.py --write    put it into README.md, between the two comments

A test holds the README to it. Needs no GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.cases import SUITES
from bench.rows import RESULTS, ROOT, Row, groups, load

SUITE = SUITES["fwd_sm80"]
README = ROOT / "README.md"
BEGIN, END = "<!-- bench/table.py: begin -->\n", "<!-- bench/table.py: end -->\n"
NAMES = {"fa2": "FlashAttention-2", "cudnn": "cuDNN", "fa3": "FlashAttention-3"}
NO_ROWS = "No rows have been committed yet, so there is no figure here.\n"

Group = dict[str, Row]  # backend -> row, of one case


def markdown(results: Path = RESULTS) -> str:
    """A table for each GPU that has rows."""
    files = sorted(results.glob(f"*/{SUITE.name}.csv"))
    tables = [_gpu_table(path.relative_to(results.parents[1]), load(path)) for path in files]
    return "\n".join(tables) or NO_ROWS


def section(text: str) -> str:
    """What stands between the two comments. ValueError where they are not there."""
    return text[slice(*_span(text))]


def replaced(text: str, table: str) -> str:
    """The text with another table between the two comments."""
    begin, end = _span(text)
    return text[:begin] + table + text[end:]


def _span(text: str) -> tuple[int, int]:
    return text.index(BEGIN) + len(BEGIN), text.index(END)


def _gpu_table(path: Path, rows: Sequence[Row]) -> str:
    """A line for each head dimension and mask, and what the numbers are."""
    newest = [group for group in groups(rows).values() if SUITE.backend in group]
    kinds: dict[tuple[int, bool], list[Group]] = {}
    for group in newest:
        ours = group[SUITE.backend]
        kinds.setdefault((ours.head_dim, ours.window_right == 0), []).append(group)
    heads = ["head dim", "mask", "lengths", "TFLOP/s", *(f"/ {NAMES[p]}" for p in SUITE.peers)]
    lines = [heads, ["---"] * 3 + ["---:"] * (len(heads) - 3)]
    lines += [_line(*kind, kinds[kind]) for kind in sorted(kinds)]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\n{_caption(path, newest)}"


def _line(head_dim: int, causal: bool, cells: Sequence[Group]) -> list[str]:
    lengths = sorted(group[SUITE.backend].max_q for group in cells)
    line = [
        str(head_dim),
        "causal" if causal else "none",
        f"{len(lengths)}, {_range(lengths, 'd')}",
    ]
    line.append(_range([group[SUITE.backend].tflops for group in cells], ".0f"))
    for peer in SUITE.peers:
        pairs = [(group[peer], group[SUITE.backend]) for group in cells if peer in group]
        line.append(_range([peer.p50_us / ours.p50_us for peer, ours in pairs], ".2f"))
    return line


def _range(values: Sequence[float], form: str) -> str:
    """Smallest to largest; a dash for none."""
    if not values:
        return "-"
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _caption(path: Path, newest: Sequence[Group]) -> str:
    rows = [row for group in newest for row in group.values()]
    versions = {f"{NAMES[r.backend]} in {r.peer_version}" for r in rows if r.backend in NAMES}
    return (
        f"{_list(r.gpu for r in rows)}, driver {_list(r.driver for r in rows)}, "
        f"{_list(r.dtype for r in rows)}, forward. Each line spans the sequence lengths measured: "
        "smallest to largest TFLOP/s, and smallest to largest speed as a multiple of the peer's "
        "(above 1 we are faster), medians of interleaved launches in one run. "
        f"Peers: {_list(versions, '; ')}. "
        f"{_code(rows)}, {_list(r.timestamp[:10] for r in rows)}. "
        f"Rows: [{path.as_posix()}]({path.as_posix()}).\n"
    )


def _code(rows: Sequence[Row]) -> str:
    """The commit that was measured; where it is unknown, the digest of the sources."""
    if any(row.commit == "unknown" for row in rows):
        return f"Sources {_list(r.sources for r in rows)}"
    return f"Commit {_list(r.commit for r in rows)}"


def _list(values: Iterable[str], separator: str = ", ") -> str:
    return separator.join(sorted(set(values)))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--write", action="store_true", help="put it into README.md")
    if parser.parse_args(argv).write:
        README.write_text(replaced(README.read_text(), markdown()))
    else:
        print(markdown(), end="")


if __name__ == "__main__":
    main()
