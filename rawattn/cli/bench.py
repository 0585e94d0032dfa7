# SPDX-License-Identifier: Apache-2.0
"""``bench``: runs the suites of ``bench/``, which a clone has and a wheel does not."""

from __future__ import annotations

import contextlib
import importlib
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of `bench.run`. RuntimeError: no clone, or no GPU. ValueError: no such suite or case.

    The code is 1 where an output of ours was wrong, 3 where cases are left for another run.
    """
    if not (ROOT / "bench" / "run.py").is_file():
        raise RuntimeError("the bench is a part of a clone, and this is an installed package")
    sys.path.insert(0, str(ROOT))
    bench = importlib.import_module("bench.run")
    with contextlib.redirect_stdout(sys.stderr):  # what peers and checks print
        facts, code, tables = bench.run(args)
    if not args.json:
        print(tables)
    return facts, code
