# SPDX-License-Identifier: Apache-2.0
"""Small calls of every kind, to be run under compute-sanitizer: `python -m tools.sanitizer_cases`.

Each is held to the reference as well. CuPy's pool is off, so that an access past the end of an
array is one past the end of an allocation.
"""

from __future__ import annotations

import argparse
import sys

from rawattn.device import import_cupy
from rawattn.testing import Case, law_matches_reference, public_op

BUCKETS = ((32, 32), (64, 64), (96, 96), (128, 128), (160, 160), (192, 128), (192, 192), (256, 256))
CASES = (
    *(
        Case(q_lens=(65,), k_lens=(130,), head_dim=d, value_dim=dv, causal=True)
        for d, dv in BUCKETS
    ),
    Case(q_lens=(129, 1, 0, 64), k_lens=(63, 200, 5, 0), layout="packed", q_heads=4, kv_heads=2),
    Case(q_lens=(1, 1), k_lens=(257, 31), layout="padded", q_heads=3, memory="gaps"),
    Case(q_lens=(40, 2), k_lens=(1, 129), layout="packed_used", causal=True, memory="transposed"),
    Case(q_lens=(130,), k_lens=(130,), window=(17, 0), dtype="float16"),
    Case(q_lens=(200,), k_lens=(33,), causal=True, dtype="float16"),
    Case(q_lens=(33,), k_lens=(200,), causal="top_left", window=(64, -1)),
    Case(q_lens=(70, 70), k_lens=(90, 90), softcap=30.0, q_heads=2, alibi="batch", sink=True),
    Case(q_lens=(70, 9), k_lens=(90, 64), softcap=5.0, layout="packed", alibi="heads", sink=True),
    Case(q_lens=(65,), k_lens=(65,), head_dim=7, value_dim=13),
    Case(q_lens=(65,), k_lens=(65,), head_dim=50, value_dim=34, dtype="float16"),
    Case(q_lens=(65,), k_lens=(65,), head_dim=72, value_dim=80, q_heads=2, memory="unaligned"),
    Case(q_lens=(64,), k_lens=(0,), sink=True),
)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        cupy = import_cupy()
    except RuntimeError as error:
        print(f"tools.sanitizer_cases: {error}", file=sys.stderr)
        return 1
    cupy.cuda.set_allocator(None)
    op = public_op("cupy")
    for case in CASES:
        law_matches_reference(op, case)
    print(f"{len(CASES)} cases ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
