# SPDX-License-Identifier: Apache-2.0
"""``selftest``: a few problems through the public functions, held to `rawattn.reference`.

Inputs have NaN around them and outputs lie between canaries; the bound is computed, not chosen
(`rawattn.testing.closeness`). The laws of `rawattn.testing` look much further.
"""

from __future__ import annotations

import math
import time
from argparse import Namespace
from dataclasses import replace
from typing import Any

from rawattn import testing
from rawattn.cli.info import operations
from rawattn.device import Device, import_cupy
from rawattn.settings import Settings, forced_backend
from rawattn.testing import Case
from rawattn.testing.paged_cases import PagedCase
from rawattn.testing.paged_inputs import paged_tensors
from rawattn.testing.paged_laws import agree, paged_op, run_paged

CASES = {
    "one token": Case(q_lens=(1,), k_lens=(200,), q_heads=8, kv_heads=2, dtype="float16"),
    "causal": Case(q_lens=(130, 130), k_lens=(130, 130), q_heads=2, kv_heads=2, causal=True),
    "top-left causal, more queries than keys": Case(
        q_lens=(90,), k_lens=(40,), causal="top_left", q_heads=2
    ),
    "grouped heads, window": Case(
        q_lens=(100,), k_lens=(260,), q_heads=6, kv_heads=2, window=(64, 8), head_dim=128
    ),
    "packed, an empty sequence": Case(
        q_lens=(33, 0, 70), k_lens=(65, 12, 70), layout="packed", causal=True, q_heads=2
    ),
    "padded cache, sinks": Case(
        q_lens=(1, 2), k_lens=(150, 0), layout="padded", sink=True, q_heads=4, kv_heads=2
    ),
    "softcap, ALiBi, head dims 80 and 40": Case(
        q_lens=(70,),
        k_lens=(70,),
        softcap=20.0,
        alibi="heads",
        head_dim=80,
        value_dim=40,
        q_heads=2,
    ),
    "rows on odd addresses": Case(q_lens=(65,), k_lens=(80,), memory="unaligned", dtype="float16"),
    "float32": Case(q_lens=(70,), k_lens=(90,), causal=True, dtype="float32"),
}
PAGED = {
    "decoding over pages, two tokens stored": PagedCase(
        q_lens=(1, 1), k_lens=(70, 200), q_heads=8, kv_heads=2, head_dim=128, value_dim=128, new=1
    ),
    "a chunk over x-major pages, an empty sequence": PagedCase(
        q_lens=(9, 0, 3),
        k_lens=(40, 0, 33),
        packed=True,
        causal=True,
        layout="x-major",
        q_heads=4,
        kv_heads=2,
    ),
    "fp8 pages, HND": PagedCase(
        q_lens=(1, 1),
        k_lens=(100, 17),
        layout="HND",
        cache_dtype="float8_e4m3fn",
        q_heads=4,
        kv_heads=1,
    ),
}


def run(args: Namespace) -> tuple[dict[str, Any], int]:
    """Facts of each check; 1 where one did not hold.

    ValueError: a RAWATTN_BACKEND there is not. RuntimeError: one of GPUs, and there is none.
    """
    forced_backend(None, ())
    modules, no_gpu = ["numpy"], None
    try:
        import_cupy()
        modules.append("cupy")
    except RuntimeError as error:
        no_gpu = str(error)
        _refuse_backend_of_gpus(no_gpu)
    checks = [
        {"arrays": module, "problem": name, **check(op, case)}
        for module in modules
        for op, cases in ((testing.public_op(module), CASES), (paged_op(module), PAGED))
        for name, case in cases.items()
        if case.dtype in op.limits.dtypes
    ]
    failed = sum(facts["result"] != "ok" for facts in checks)
    return {"checks": checks, "failed": failed, "no_gpu": no_gpu}, int(failed > 0)


def _refuse_backend_of_gpus(no_gpu: str) -> None:
    """RuntimeError where RAWATTN_BACKEND names one that refuses NumPy arrays."""
    forced, host = Settings.read().backend, Device.host()
    known = operations()
    for operation in ("attention", "paged attention", "store tokens"):
        backends, typical = known[operation]
        if any(b.name == forced and b.refuses(typical, host) for b in backends):
            raise RuntimeError(f"RAWATTN_BACKEND={forced!r} takes GPU arrays: {no_gpu}")


def check(op: Any, case: Any) -> dict[str, Any]:
    """The worst error as a share of its bound, seconds, and "ok" or what went wrong."""
    op, start, result = replace(op, record=testing.Record()), time.perf_counter(), "ok"
    try:
        if isinstance(case, PagedCase):
            pages = paged_tensors(case)
            agree(op, run_paged(op, pages), pages)
        else:
            t = testing.tensors(case)
            testing.assert_close(testing.run(op, t), testing.expected(t), case, op.record)
    except Exception as error:  # whatever a machine does to a call is what is to be reported
        result = f"{type(error).__name__}: {error}"
    worst = max(op.record.worst.values(), default=math.nan)
    return {
        "error_of_bound": round(worst, 3) if math.isfinite(worst) else None,
        "seconds": round(time.perf_counter() - start, 3),
        "result": result,
    }
