# SPDX-License-Identifier: Apache-2.0
"""What MkDocs does for this project: the order of the pages, and links that leave docs/.

A page links to sources of the clone, so that it reads well there. The built pages are elsewhere,
and name those files in place of links that would lead nowhere.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"

NAV: list[Any] = [
    {"Start": ["index.md", "guide.md", "contract.md", "migrate.md", "troubleshooting.md"]},
    {"Reference": ["api.md", "command-line.md"]},
    {"Speed": ["bench.md", "roofline.md", "install.md"]},
    {"Kernels": ["kernels/index.md"]},  # and the page of each kernel
    {"Working on it": ["testing.md", "add-a-kernel.md", "emulator.md"]},
]


def nav(docs: Path = DOCS) -> list[Any]:
    """The pages in order; those of kernels are found."""
    found = sorted(p.relative_to(docs).as_posix() for p in docs.glob("kernels/*.md"))
    own = [page for page in found if page != "kernels/index.md"]
    return [
        {title: [*pages, *own] if title == "Kernels" else pages}
        for part in NAV
        for title, pages in part.items()
    ]


def in_docs(markdown: str, page: str) -> str:
    """A page without the links that leave docs/: their text, and the file that they named."""

    def name(match: re.Match[str]) -> str:
        text, target = match.groups()
        file = (DOCS / page).parent.joinpath(target.split("#")[0]).resolve()
        if file.is_relative_to(DOCS):
            return match[0]
        path = f"`{file.relative_to(DOCS.parent).as_posix()}`"
        return path if text.strip("`") in path else f"{text} ({path})"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((\.\./[^)\s]+)\)", name, markdown)


def on_config(config: Any) -> Any:
    """Called by MkDocs with its configuration."""
    config.nav = nav()
    return config


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Called by MkDocs with the text of each page."""
    return in_docs(markdown, page.file.src_uri)
