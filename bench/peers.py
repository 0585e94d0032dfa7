# SPDX-License-Identifier: Apache-2.0
"""The libraries we are compared with. The files named peers are the only ones that import torch.

A peer is a function (problem, tensors) -> a function without arguments that launches it and returns
its output (B, Sq, Hq, Dv), or None where it cannot do the case; a `Candidate` where there is more
to say of it. Tensors are CuPy arrays; torch sees the same memory through DLPack, and the same
(null) stream.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.cases import Tensors
from bench.measure import Candidate
from rawattn.problem import Problem, Rows

Run = Callable[[], torch.Tensor]
FA3 = "_vllm_fa3_C.abi3.so"


def plain(p: Problem, rows: tuple[Rows, ...] = (Rows.DENSE,)) -> bool:
    """Rows of these kinds. Score steps are seen to before a peer is asked: `candidates.STEPS`."""
    return p.q_rows in rows and p.k_rows in rows


def full_or_causal(p: Problem) -> bool:
    """No mask, or a causal one of a square, where all agree on what it is."""
    return p.mask.trivial or (p.mask.causal and p.mask.left < 0 and p.max_q == p.max_k)


def _sdpa(backend: SDPBackend, p: Problem, tensors: Tensors) -> Run | None:
    if not plain(p) or not full_or_causal(p):
        return None
    q, k, v = (torch.from_dlpack(x).transpose(1, 2) for x in (tensors.q, tensors.k, tensors.v))

    def run() -> torch.Tensor:
        with sdpa_kernel(backend):
            out = functional.scaled_dot_product_attention(
                q, k, v, is_causal=p.mask.causal, scale=tensors.scale, enable_gqa=p.group > 1
            )
        return out.transpose(1, 2)

    return if_it_runs(run)


def if_it_runs(run: Run) -> Run | None:
    """`run`, or None and a line where it refuses; torch also warns, of all that it did not take."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            run()
    except RuntimeError as error:  # torch has no narrower one for "this backend does not take it"
        print(f"refused: {error}")
        return None
    return run


def fa2(p: Problem, tensors: Tensors) -> Run | None:
    """FlashAttention-2 as torch ships it: the flash backend of scaled_dot_product_attention."""
    return _sdpa(SDPBackend.FLASH_ATTENTION, p, tensors)


def cudnn(p: Problem, tensors: Tensors) -> Run | None:
    """cuDNN's fused attention through scaled_dot_product_attention."""
    return _sdpa(SDPBackend.CUDNN_ATTENTION, p, tensors)


def library(name: str) -> Path | None:
    """A shared object in the folder that RAWATTN_PEERS names."""
    folder = os.environ.get("RAWATTN_PEERS")
    path = Path(folder) / name if folder else None
    return path if path is not None and path.is_file() else None


@functools.cache
def load(path: Path) -> None:
    """Registers the operators of a shared object."""
    torch.ops.load_library(str(path))


def fa3(p: Problem, tensors: Tensors) -> Run | None:
    """FlashAttention-3 as vLLM builds it: packed rows only, so a dense batch is passed as such."""
    path = library(FA3)
    if (
        path is None
        or not plain(p, (Rows.DENSE, Rows.PACKED))
        or p.mask.top_left
        or torch.cuda.get_device_capability()[0] != 9
    ):
        return None
    load(path)
    q, k, v = (torch.from_dlpack(x) for x in (tensors.q, tensors.k, tensors.v))

    def starts(rows: int) -> torch.Tensor:
        return torch.arange(p.batch + 1, device=q.device, dtype=torch.int32) * rows

    cu_q, cu_k, shape = starts(p.max_q), starts(p.max_k), (p.batch, p.max_q, p.q_heads, p.value_dim)
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))

    def run() -> torch.Tensor:
        # fmt: off
        result = torch.ops._vllm_fa3_C.fwd(
            q, k, v, None, None, None,  # q, k, v, k_new, v_new, q_v
            None,  # out
            cu_q, cu_k, None, None, None, p.max_q, p.max_k,  # cu_k_new, seqused_q, seqused_k
            None, None, None,  # page_table, kv_batch_idx, leftpad_k
            None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
            None, None, None,  # q_descale, k_descale, v_descale
            tensors.scale, p.mask.causal, p.mask.left, p.mask.right, tensors.softcap,
            True, None, 0, None, 0, None, 1, 0, None,  # rotary_interleaved, scheduler, splits, ...
        )
        # fmt: on
        return (result[0] if isinstance(result, (list, tuple)) else result).view(shape)

    return if_it_runs(run)


def _lazy(module: str, function: str) -> Callable[[Problem, Tensors], Run | Candidate | None]:
    """A peer in a module whose imports may be missing; they are looked for when it is called."""
    return lambda p, tensors: getattr(importlib.import_module(module), function)(p, tensors)


PEERS: dict[str, Callable[[Problem, Tensors], Run | Candidate | None]] = {
    "fa2": fa2,
    "cudnn": cudnn,
    "fa3": fa3,
    "cudnn_fe": _lazy("bench.peers_cudnn", "dense"),
    "cudnn_fp8": _lazy("bench.peers_cudnn", "dense_fp8"),
    "jax": _lazy("bench.peers_compiled", "jax_attention"),
    "triton": _lazy("bench.peers_compiled", "triton_tutorial"),
}


def digest(path: Path | None) -> str:
    """What names the contents of a file, or, in NAME.sha256, of the larger one it was cut from."""
    if path is None:
        return ""
    whole = path.with_name(f"{path.name}.sha256")
    found = whole.read_text() if whole.exists() else hashlib.sha256(path.read_bytes()).hexdigest()
    return f"sha256:{found[:12]}"


@functools.cache
def version(name: str) -> str:
    """What a row needs to name the peer exactly."""
    if name == "fa3":
        return f"vllm fa3 {digest(library(FA3))}"
    if name in ("cudnn_fe", "cudnn_fp8"):
        return importlib.import_module("bench.peers_cudnn").version()
    if name in ("jax", "triton"):
        return importlib.import_module("bench.peers_compiled").version(name)
    found = f"torch {torch.__version__}"
    return f"{found} cudnn {torch.backends.cudnn.version()}" if name == "cudnn" else found
