# SPDX-License-Identifier: Apache-2.0
"""Small calls of every kind, to be run under compute-sanitizer: `python -m tools.sanitizer_cases`.

Each is held to the reference as well. CuPy's pool is off, so that an access past the end of an
array is one past the end of an allocation.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys

from rawattn.device import import_cupy
from rawattn.testing import Case, law_matches_reference, public_op
from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_laws import law_paged_matches_reference, paged_op
from tools.cases import CASES as KERNEL_CASES
from tools.cases.checks import check
from tools.cases.executors import on_gpu

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
    *(  # cut over their keys on Hopper
        Case(q_lens=(70,), k_lens=(k_len,), head_dim=d, value_dim=dv, q_heads=4, kv_heads=2)
        for d, dv, k_len in ((64, 64, 1500), (96, 96, 4100), (192, 128, 2100), (256, 256, 1500))
    ),
    Case(q_lens=(300,), k_lens=(1500,), head_dim=128, value_dim=128, causal=True),
    *(
        Case(q_lens=(130, 5, 0), k_lens=(1500, 300, 9), layout=layout, head_dim=d, value_dim=d)
        for d, layout in ((64, "packed"), (128, "packed_used"), (256, "padded"))
    ),
)
FORWARD_BACKENDS = ("fwd_sm80", None)  # what any GPU runs, and what this one would
KERNEL_SEEDS = range(3)  # of each of tools.cases.CASES

DECODE = PagedCase(q_lens=(1, 1, 1), k_lens=(700, 0, 33), q_heads=4, kv_heads=2, head_dim=128)
X_MAJOR = dataclasses.replace(DECODE, layout="x-major")
X_MAJOR_48 = {"layout": "x-major", "page": 48}
E4M3 = {"cache_dtype": "float8_e4m3fn", "scales": "heads"}
PAGED_CASES = (
    *(
        (backend, dataclasses.replace(X_MAJOR, **changes))
        for backend in ("paged_v1", "paged_v2")
        for changes in (
            {},
            {"layout": "NHD", "head_dim": 300, "value_dim": 270},
            {"page": 5, "value_dim": 13, "head_dim": 40, "alibi": True, "sink": True},
            {"cache_dtype": "float8_e4m3fn", "scales": "heads", "page": 32, "softcap": 20.0},
            {"q_lens": (3, 1, 4), "packed": True, "dtype": "float32", "window": (90, 0)},
            {"q_lens": (2, 2, 2), "head_dim": 304, "value_dim": 40, "tree": True},
        )
    ),
    *(
        ("fwd_sm90_paged", dataclasses.replace(DECODE, **{"value_dim": 128, **changes}))
        for changes in (
            {"q_lens": (140, 1, 33), "k_lens": (700, 5, 33), "packed": True, "causal": True},
            {"q_lens": (9, 9, 9), "layout": "HND", "page": 48, "window": (90, 0), "sink": True},
            {"q_lens": (70, 70, 70), "head_dim": 256, "value_dim": 200, "softcap": 20.0},
            {"q_lens": (8, 8, 8), "k_lens": (700, 8, 33), "new": 8, "memory": "gaps"},
            {"q_lens": (140, 1, 33), "k_lens": (700, 5, 33), "packed": True, "layout": "x-major"},
            {"q_lens": (9, 9, 9), "head_dim": 200, "page": 48, "layout": "x-major"},
            {"q_lens": (140, 1, 33), "k_lens": (700, 0, 33), "packed": True, "table": "csr"},
            {"q_lens": (140, 1, 33), "k_lens": (1500, 5, 300), "packed": True, "causal": True},
            {"q_lens": (9, 9, 9), "k_lens": (1500, 5, 300), "layout": "x-major", "sink": True},
            {"q_lens": (9, 9, 9), "k_lens": (1500, 5, 300), "sink": True, **E4M3},
            {"q_lens": (140, 70, 33), "k_lens": (700, 5, 33), "packed": True, **E4M3},
            {"q_lens": (9, 9, 9), "head_dim": 64, "value_dim": 48, "softcap": 20.0, **E4M3},
            {"q_lens": (140, 70, 33), "k_lens": (700, 5, 33), "packed": True, **E4M3, **X_MAJOR_48},
            {"q_lens": (9, 9, 9), "head_dim": 64, "value_dim": 24, "layout": "x-major", **E4M3},
        )
    ),
    *(
        ("decode_split", dataclasses.replace(DECODE, **{"value_dim": 128, **changes}))
        for changes in (
            {},
            {"page": 5, "window": (300, 0)},
            {"layout": "x-major", "table": "csr"},
            {"layout": "HND", "cache_dtype": "float8_e4m3fn", "dtype": "float16"},
            {"q_lens": (4, 4, 4), "k_lens": (700, 4, 33), "causal": True, "split": 64},
            {"q_lens": (8, 8, 8), "k_lens": (900, 8, 33), "causal": True, "softcap": 20.0},
            {"q_lens": (5, 5, 5), "head_dim": 64, "value_dim": 64, "causal": True},
            {"q_lens": (8, 8, 8), "k_lens": (900, 8, 33), "layout": "x-major", "softcap": 20.0},
            {"q_lens": (5,) * 9, "k_lens": (900, 5, 33, 64, 0, 300, 5, 5, 5), "tree": True},
            {"k_lens": (700, 3, 33), "new": 1, "rotary": "halves", "memory": "gaps"},
            {"head_dim": 65, "value_dim": 7, "page": 3, "table": "csr"},
            {"head_dim": 100, "q_lens": (2, 2, 2), "layout": "HND", "cache_dtype": "int8"},
            {"layout": "x-major", "page": 5, "value_dim": 66},
            {
                "table": "rows",
                "leftpad": True,
                "k_lens": (700, 3, 33),
                "new": 3,
                "new_packed": True,
            },
        )
    ),
)


def main() -> int:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    try:
        cupy = import_cupy()
    except RuntimeError as error:
        print(f"tools.sanitizer_cases: {error}", file=sys.stderr)
        return 1
    cupy.cuda.set_allocator(None)
    for backend in FORWARD_BACKENDS:
        for case in CASES:
            law_matches_reference(public_op("cupy", backend), case)
    for make in KERNEL_CASES.values():
        for seed in KERNEL_SEEDS:
            kernel_case = make(seed)
            check(kernel_case, on_gpu(kernel_case))
    for backend, paged_case in PAGED_CASES:
        law_paged_matches_reference(paged_op("cupy", backend), paged_case)
    ran = (
        len(FORWARD_BACKENDS) * len(CASES)
        + len(KERNEL_CASES) * len(KERNEL_SEEDS)
        + len(PAGED_CASES)
    )
    print(f"{ran} cases ran")
    return 0


if __name__ == "__main__":
    sys.exit(main())
