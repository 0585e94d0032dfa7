# SPDX-License-Identifier: Apache-2.0
"""The row schema, and CSV files of rows. Pure Python.

Rows measured together (one case, all its candidates, interleaved) share their `timestamp`; ratios
between rows are only ever taken inside such a group.
"""

from __future__ import annotations

import csv
import functools
import hashlib
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One candidate on one case."""

    op: str
    case: str
    dtype: str
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    max_q: int  # tokens, of what only moves them
    max_k: int
    window_left: int
    window_right: int  # 0 is causal
    top_left: bool
    rows: str  # how the queries of sequences lie: "dense", "packed"
    scores: str  # what lies between q.k and the softmax: "softcap", "alibi"; empty: nothing
    kv_dtype: str  # of a paged cache
    page_size: int  # of a paged cache; 0: keys lie one behind the other
    layout: str  # of a paged cache
    lengths: str  # how those of the sequences differ; empty: all have max_q and max_k
    backend: str  # one of ours by name, or a peer
    config: str  # the Config of our kernel, empty for a peer
    n: int  # launches timed
    p20_us: float
    p50_us: float
    p80_us: float
    tflops: float  # roofline.convention_flops over the median; exact with lengths or windows
    gb_per_s: float  # least bytes of roofline.work over the median
    roofline_percent: float  # exact: roofline.limit over the median
    bound: str  # "compute" or "memory"
    error_ratio: float  # largest error over the bound of validation.md, at most 1
    l2: str  # "exceeded": tensors are over twice L2; "cleared": a buffer is read before each launch
    gpu: str
    driver: str
    clock_before_mhz: int
    clock_after_mhz: int
    temperature_before_c: int
    temperature_after_c: int
    commit: str  # of rawattn
    sources: str  # digest of what ran, see `sources_digest`
    peer_version: str  # empty for our backends
    timestamp: str  # UTC, ISO 8601


def results_path(folder: Path, gpu: str, name: str) -> Path:
    """``folder/nvidia-h200/name.csv``."""
    return folder / gpu.lower().replace(" ", "-") / f"{name}.csv"


BLANK: dict[str, Any] = {"int": 0, "float": 0.0, "str": "", "bool": False}  # of a new column
PARSE = {"int": int, "float": float, "str": str, "bool": lambda text: text == "True"}


def append(path: Path, rows: Iterable[Any]) -> None:
    """Append instances of one dataclass to a CSV file.

    A file from before a column was added is written anew, with blanks there. ValueError where it
    has a column that the rows lack.
    """
    rows = list(rows)
    if not rows:
        return
    kind = type(rows[0])
    names = [f.name for f in fields(kind)]
    path.parent.mkdir(parents=True, exist_ok=True)
    found = columns(path)
    if set(found) - set(names):
        raise ValueError(f"{path}: has columns {found}, rows have {names}")
    old = load(path, kind) if found != names else []
    with path.open("a" if found == names else "w", newline="") as file:
        writer = csv.DictWriter(file, names, lineterminator="\n")
        if found != names:
            writer.writeheader()
        writer.writerows(asdict(r) for r in [*old, *rows])


def columns(path: Path) -> list[str]:
    """The columns of a file; none where there is no file."""
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return next(csv.reader(file), [])


def load(path: Path, kind: type[Any] = Row) -> list[Any]:
    """The rows of a file, oldest first; none where there is no file. Columns that it lacks are
    blank. ValueError where it has one that `kind` lacks.
    """
    types = {f.name: str(f.type) for f in fields(kind)}
    strange = [name for name in columns(path) if name not in types]
    if strange:
        raise ValueError(f"{path}: has columns {strange}, {kind.__name__} has {list(types)}")
    if not path.exists():
        return []
    blank = {name: BLANK[type] for name, type in types.items()}
    with path.open(newline="") as file:
        return [
            kind(**blank | {k: PARSE[types[k]](v) for k, v in line.items()})
            for line in csv.DictReader(file)
        ]


def measured(rows: Iterable[Row], backend: str, sources: str) -> set[str]:
    """Case ids that hold a row of `backend` from these very sources."""
    return {r.case for r in rows if r.backend == backend and r.sources == sources}


def groups(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    """Case id -> backend -> row, of the newest group of each case."""
    by_case: dict[str, dict[str, Row]] = {}
    for row in rows:
        group = by_case.setdefault(row.case, {})
        if any(r.timestamp != row.timestamp for r in group.values()):
            group.clear()
        group[row.backend] = row
    return by_case


@functools.cache
def sources_digest(root: Path = ROOT) -> str:
    """12 hex digits over the kernel sources and the Python that plans and launches them."""
    digest = hashlib.sha256()
    for path in sorted(
        [*root.glob("cuda/*.cu*"), *root.glob("rawattn/*.py"), *root.glob("rawattn/plan/*.py")]
    ):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


@functools.cache
def commit(root: Path = ROOT) -> str:
    """The commit of the checkout, + where tracked files differ; "unknown" outside a checkout."""
    done = subprocess.run(
        ["git", "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"],
        cwd=root,
        capture_output=True,
        text=True,
    )
    return done.stdout.strip() if done.returncode == 0 else "unknown"
