# SPDX-License-Identifier: Apache-2.0
"""What is claimed of decoding, held to rows: each claim, whether it holds, and where it is worst.

    python bench/decode_claims.py [DIR]     DIR holds decode.csv, merge.csv and host_time.csv

Exits with 1 where a claim that is no goal does not hold, or nothing was measured for it. Needs no
GPU.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.claims import Claim, Verdict, main, over, share, verdicts, where
from bench.decode_cases import DECODE, MERGE
from bench.facets import CEILINGS, Group
from bench.host_time import DECODE as OF_DECODE
from bench.host_time import HostRow
from bench.rows import Row, load

GIGABYTE = 1e9
HOST_US = 3.0  # over bare launches

# Least time of each cell: what is aimed at (page 16), in microseconds.
GOALS = {
    "32x8-d128-p16-b1-k1024": 6.0,
    "32x8-d128-p16-b1-k8192": 13.0,
    "32x8-d128-p16-b1-k32768": 35.0,
    "32x8-d128-p16-b8-k1024": 13.0,
    "32x8-d128-p16-b32-k1024": 34.0,
    "32x8-d128-p16-b8-k8192": 64.0,
}
# FlashAttention-3's time over that of a proof of concept with one dtype and no features, measured
# in one run (H200, 2026-11-30).
POSSIBLE = {
    "32x8-d128-p16-b1-k1024": 15.6 / 9.0,
    "32x8-d128-p16-b1-k8192": 23.2 / 15.8,
    "32x8-d128-p16-b1-k32768": 46.8 / 39.1,
    "32x8-d128-p16-b1-k131072": 140.8 / 126.9,
    "32x8-d128-p16-b8-k1024": 21.5 / 16.6,
    "32x8-d128-p16-b8-k8192": 74.6 / 68.1,
    "32x8-d128-p16-b8-k32768": 254.2 / 242.1,
    "32x8-d128-p16-b32-k1024": 47.6 / 36.8,
    "32x8-d128-p16-b32-k4096": 133.8 / 124.1,
    "32x8-d128-p16-b32-k16384": 490.4 / 471.8,
    "32x8-d128-p16-b128-k1024": 146.8 / 125.9,
    "32x8-d128-p16-b128-k4096": 489.3 / 472.4,
    "32x8-d128-p16-b256-k2048": 506.5 / 472.7,
    "32x8-d128-p16-b64-skewed": 144.4 / 138.9,
    "32x8-d128-p64-b1-k1024": 15.6 / 10.7,
    "32x8-d128-p64-b1-k8192": 23.1 / 18.7,
    "32x8-d128-p64-b8-k8192": 73.2 / 66.9,
    "32x8-d128-p64-b32-k4096": 134.4 / 124.1,
    "32x8-d128-p64-b128-k4096": 487.9 / 471.3,
}


def moved(row: Row) -> float:
    """Bytes that a row counts."""
    return row.gb_per_s * 1e3 * row.p50_us


def _goal(group: Group, ours: Row) -> float | None:
    return GOALS[ours.case] / ours.p50_us if ours.case in GOALS else None


RIVALS = [name for name in DECODE.peers if name not in CEILINGS]
VLLM = over("vllm_v1", "vllm_v2")
DECODE_CLAIMS = (
    Claim(text="as fast as the best peer", least=1.0, factor=over(*RIVALS)),
    Claim(
        text="FA3's ratio to the proof of concept, less 3 %",
        least=0.97,
        factor=share(over("fa3"), POSSIBLE),
    ),
    Claim(
        text="of the read bandwidth, from 1 GB on",
        least=0.97,
        factor=where(lambda r: moved(r) >= GIGABYTE, over("read")),
    ),
    Claim(text="goals in microseconds", least=1.0, factor=_goal, goal=True),
    Claim(
        text="x vLLM's v1 and v2, batch 8 and 4 k keys or more",
        least=3.0,
        factor=where(lambda r: r.batch >= 8 and r.max_k >= 4096, VLLM),
    ),
    # "Within 10 % of our NHD speed": a ratio of speeds of 0.9 or more, of times of 1.11 or less.
    Claim(
        text="of our NHD speed, x-major, so within 10 % of it",
        least=0.9,
        factor=over("decode_split (nhd)"),
    ),
    Claim(
        text="x as fast with fp8, where bf16 holds 1 GB",
        least=1.7,
        factor=where(lambda r: 2 * moved(r) >= GIGABYTE, over("decode_split (bf16)")),
    ),
)
MERGE_CLAIMS = (
    Claim(
        text="x vLLM's merge",
        least=1.1,
        factor=where(lambda r: r.dtype == "bfloat16", over("vllm")),
    ),
    Claim(
        text="of the copy bandwidth, 16384 tokens",
        least=0.9,
        factor=where(lambda r: r.max_q == 16384, over("copy")),
    ),
)


def host_verdict(rows: Sequence[HostRow]) -> Verdict:
    """Whether a planned call costs no more than HOST_US over its bare launches."""
    newest = {row.what: row.p50_us for row in rows if row.what.endswith(OF_DECODE)}
    names = "bare cuLaunchKernelEx", "call of plan.run"
    bare, planned = (newest.get(f"{name}{OF_DECODE}") for name in names)
    if bare is None or planned is None:
        return False, "FAIL host time of a planned call: not measured"
    good = planned - bare <= HOST_US
    text = f"host time of a planned call: {planned - bare:+.2f} us over bare launches"
    return good, f"{'ok  ' if good else 'FAIL'} {text}, at most {HOST_US:g}"


def judged(folder: Path) -> list[Verdict]:
    """The verdicts on a folder of rows."""
    return [
        *verdicts(DECODE_CLAIMS, DECODE.backend, load(folder / "decode.csv")),
        *verdicts(MERGE_CLAIMS, MERGE.backend, load(folder / "merge.csv")),
        host_verdict(load(folder / "host_time.csv", HostRow)),
    ]


if __name__ == "__main__":
    sys.exit(main(None, __doc__, judged))
