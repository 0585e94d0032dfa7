# SPDX-License-Identifier: Apache-2.0
"""Pages, and what stands in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Block(NamedTuple):
    """A fenced block of a page, and the comment on the line before it."""

    comment: str
    language: str
    text: str


def blocks(markdown: str) -> list[Block]:
    found = re.findall(r"(?:^<!-- ([^\n]*?) -->\n)?^```(\w*)\n(.*?)^```$", markdown, re.M | re.S)
    return [Block(*groups) for groups in found]


def pages() -> list[str]:
    """Every page that a reader is sent to, relative to the root."""
    found = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")]
    return sorted(path.relative_to(ROOT).as_posix() for path in found)
