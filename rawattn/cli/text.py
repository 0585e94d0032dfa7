# SPDX-License-Identifier: Apache-2.0
"""Facts as text: one way to print what JSON holds."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

WIDTH = 100
COLUMN = 20  # where values start


def render(facts: Mapping[str, Any]) -> str:
    """A line for each fact; flat mappings share one, and lists of flat mappings are tables."""
    return "\n".join(_lines(facts, ""))


def _lines(facts: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, value in facts.items():
        if _has_mappings(value):
            yield indent + key
            yield from _nested(value, indent + "  ")
        else:
            items = value if isinstance(value, list) else [value]
            first = indent + key.ljust(COLUMN - len(indent) - 1) + " "
            for item in items or ["none"]:
                yield from textwrap.wrap(
                    _cell(item),
                    WIDTH,
                    initial_indent=first,
                    subsequent_indent=" " * COLUMN,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
                first = " " * COLUMN


def _nested(value: Any, indent: str) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _lines(value, indent)
    elif any(isinstance(x, Mapping) for row in value for x in row.values()):
        for row in value:
            yield from _lines(row, indent)
    else:
        yield from _table(value, indent)


def _table(rows: Sequence[Mapping[str, Any]], indent: str) -> Iterator[str]:
    names = list(rows[0])
    cells = [names, *([_cell(row[name]) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        yield (indent + "  ".join(padded)).rstrip()


def _has_mappings(value: Any) -> bool:
    """Whether a value takes lines of its own."""
    if isinstance(value, Mapping):
        return any(isinstance(x, Mapping) for x in value.values())
    return isinstance(value, list) and any(isinstance(x, Mapping) for x in value)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {_cell(x)}" for k, x in value.items())
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and value >= 10**6 else str(value)
