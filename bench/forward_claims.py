# SPDX-License-Identifier: Apache-2.0
"""What is claimed of attention on Hopper, held to rows: each claim, whether it holds, and where it
is worst.

    python bench/forward_claims.py [DIR]     DIR holds fwd_sm90.csv and host_time.csv

Exits with 1 where a claim that is no goal does not hold, or was not measured in a cell that it is
stated for. Needs no GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.claims import Claim, Verdict, main, over, share, verdicts
from bench.facets import OTHERS
from bench.forward_cases import (
    FP16,
    FWD_SM90,
    LENGTHS,
    LLAMA,
    MASKS,
    OTHER_SIZES,
    SIZES,
    TABLE,
    VARLEN,
    Case,
    dense,
)
from bench.host_time import HostRow
from bench.rows import load

COMPILE_SECONDS = 3.0  # for one Config
PERCENT_2, PERCENT_3 = 1 / 1.02, 1 / 1.03  # of time that another form may take more

# The better of FlashAttention-3's and cuDNN's time over that of the best variant of a proof of
# concept with one dtype and no features, measured in one run a cell (H200, 2026-11-30); of its last
# run that had the cell, by length.
POSSIBLE = {
    dense(head_dim, causal, length).id: ratio
    for (head_dim, causal), ratios in {
        (64, False): (1.033, 1.045, 1.134, 1.140, 1.110, 1.096),
        (64, True): (1.011, 1.035, 1.070, 1.119, 1.084, 1.095),
        (128, False): (1.053, 1.046, 1.035, 1.023, 0.991, 0.968),
        (128, True): (1.101, 1.126, 1.135, 1.072, 1.013, 1.009),
        (256, False): (0.938, 1.013, 1.011, 1.005, 0.996, 1.000),
        (256, True): (0.843, 0.952, 0.976, 0.969, 0.986, 0.996),
    }.items()
    for length, ratio in zip(LENGTHS, ratios, strict=True)
}


def ids(cases: Sequence[Case]) -> tuple[str, ...]:
    """The ids of cases."""
    return tuple(case.id for case in cases)


EVERY = ids((*TABLE, *OTHER_SIZES, *LLAMA))
SHORTEST_256 = ids([dense(256, causal, 512) for causal in MASKS])
BEST = over(*[name for name in FWD_SM90.peers if name not in OTHERS])
BF16 = over("fwd_sm90 (bf16)")
CLAIMS = (
    Claim(
        text="ratio to the best peer, of the proof of concept's, less 2 %",
        least=0.98,
        factor=share(over("fa3", "cudnn"), POSSIBLE),
        cases=ids(TABLE),
    ),
    Claim(
        text="as fast as the best peer to 5 %, without 256 at 512",
        least=0.95,
        factor=BEST,
        cases=[name for name in EVERY if name not in SHORTEST_256],
    ),
    Claim(
        text="x the best peer, geometric mean",
        least=1.04,
        factor=BEST,
        cases=ids(TABLE),
        mean=True,
    ),
    Claim(text="x the best peer, every cell", least=1.05, factor=BEST, cases=EVERY, goal=True),
    Claim(
        text="x the best peer, head dims 96 and 192 / 128",
        least=1.0,
        factor=BEST,
        cases=ids(OTHER_SIZES),
    ),
    Claim(
        text="packed rows beside dense",
        least=PERCENT_2,
        factor=over("fwd_sm90 (dense)"),
        cases=ids(VARLEN),
    ),
    Claim(
        text="grouped queries beside as many KV heads",
        least=PERCENT_2,
        factor=over("fwd_sm90 (mha)"),
        cases=ids(LLAMA),
    ),
    Claim(text="fp16 beside bf16, every cell", least=PERCENT_3, factor=BF16, cases=ids(FP16)),
    *(
        Claim(
            text=f"fp16 beside bf16, geometric mean, head dim {', '.join(map(str, sizes))}",
            least=PERCENT_3,
            factor=BF16,
            cases=ids([case for case in FP16 if case.problem.head_dim in sizes]),
            mean=True,
        )
        for sizes in (SIZES, *[(size,) for size in SIZES])
    ),
)


def compile_verdict(rows: Sequence[HostRow]) -> Verdict:
    """Whether no Config took longer than COMPILE_SECONDS to compile with an empty cache."""
    newest = {r.what: r.p50_us / 1e6 for r in rows if r.what.startswith("compile: fwd_sm90 ")}
    if not newest:
        return False, "FAIL seconds of compiling a Config: not measured"
    worst = max(newest, key=newest.__getitem__)
    good = newest[worst] <= COMPILE_SECONDS
    text = (
        f"{'ok  ' if good else 'FAIL'} seconds of compiling a Config: at most {COMPILE_SECONDS:g}"
    )
    return good, f"{text}, {len(newest)} measured, worst {newest[worst]:.2f} ({worst})"


def judged(folder: Path) -> list[Verdict]:
    """The verdicts on a folder of rows."""
    return [
        *verdicts(CLAIMS, FWD_SM90.backend, load(folder / "fwd_sm90.csv")),
        compile_verdict(load(folder / "host_time.csv", HostRow)),
    ]


if __name__ == "__main__":
    sys.exit(main(None, __doc__, judged))
