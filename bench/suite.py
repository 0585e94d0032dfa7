# SPDX-License-Identifier: Apache-2.0
"""What a case and a suite are. Pure Python; `cases` has the suites."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

Lengths = tuple[tuple[int, int], ...]  # (queries, keys) of each sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One cell of a suite. `id` is what rows and ``--case`` name, and never changes its meaning."""

    id: str
    problem: Any  # a Problem, PagedProblem, MergeProblem or KvWriteProblem
    quick: bool = False  # part of a ``--quick`` run
    all_peers: bool = False  # the suite's `seldom` peers are measured on it too
    peers: tuple[str, ...] | None = None  # the only ones measured on it; None: as the suite says
    twin_peers: tuple[str, ...] = ()  # that are measured on its twins (`candidates.twins`) too
    lengths: Lengths | None = None  # where they differ; None: all have max_q and max_k


@dataclass(frozen=True, slots=True, kw_only=True)
class Suite:
    """Cases of one op, our backend for them, and the peers they are compared with."""

    name: str
    op: str
    backend: str
    peers: tuple[str, ...]
    cases: tuple[Case, ...]
    seldom: tuple[str, ...] = ()  # peers that take seconds to set up, or are no rivals there

    def peers_of(self, case: Case) -> tuple[str, ...]:
        """The peers that are measured on a case unless others are asked for."""
        if case.peers is not None:
            return tuple(p for p in self.peers if p in case.peers)
        return tuple(p for p in self.peers if case.all_peers or p not in self.seldom)

    def select(self, pattern: str | None, quick: bool) -> list[Case]:
        """Cases whose id matches a shell pattern, or ValueError where none does."""
        chosen = [c for c in self.cases if fnmatch(c.id, pattern or "*") and (c.quick or not quick)]
        if not chosen:
            known = ", ".join(c.id for c in self.cases)
            raise ValueError(f"case={pattern!r}, quick={quick}: suite {self.name} has {known}")
        return chosen
