# SPDX-License-Identifier: Apache-2.0
"""What the environment says of every call, and the backend that it or the caller forces."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass

from rawattn.plan import NAMES, Backend

VARIABLES = (
    *("RAWATTN_BACKEND", "RAWATTN_CHECK", "RAWATTN_CACHE_DIR"),
    *("RAWATTN_EXAMPLE_WEIGHTS", "RAWATTN_PEERS"),  # of a clone: the example's, and the bench's
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the environment says. A process reads it once, at its first call; ValueError for what
    it may not say.
    """

    backend: str | None  # RAWATTN_BACKEND
    check: bool  # RAWATTN_CHECK

    @staticmethod
    @functools.cache
    def read() -> Settings:
        check = os.environ.get("RAWATTN_CHECK") or "0"
        if check not in ("0", "1"):
            raise ValueError(f"RAWATTN_CHECK={check!r}: accepted are 0 and 1")
        return Settings(backend=os.environ.get("RAWATTN_BACKEND") or None, check=check == "1")


def remarks() -> list[str]:
    """What is wrong with the variables: one that there is not, or a value that calls refuse."""
    found = [
        f"{name}: there is no such variable; accepted are {', '.join(VARIABLES)}"
        for name in sorted(os.environ)
        if name.startswith("RAWATTN_") and name not in VARIABLES
    ]
    try:
        forced_backend(None, ())
    except ValueError as error:
        found.append(str(error))
    return found


def forced_backend(asked: str | None, backends: Sequence[Backend]) -> str | None:
    """The backend that the caller asks for, or RAWATTN_BACKEND where it is one of these.

    The latter may name a backend of another operation, which leaves this one alone; ValueError
    where it names none.
    """
    named = Settings.read().backend
    if named is not None and named not in NAMES:
        raise ValueError(f"RAWATTN_BACKEND={named!r}: accepted are {', '.join(NAMES)}")
    if asked is not None:
        return asked
    return named if named in {backend.name for backend in backends} else None
