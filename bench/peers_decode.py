# SPDX-License-Identifier: Apache-2.0
"""The libraries we are compared with around a paged cache. Like `peers`, it imports torch.

A peer is a function (problem, tensors) -> a function without arguments that launches it and returns
its output in the shape of `tensors.out`, or None where it cannot do the case. What a peer computes
once for many layers (schedules, plans) is done here, outside of what is timed.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

from bench.decode import DecodeTensors
from bench.kv_write import WriteTensors
from bench.measure import Candidate
from bench.merge import MergeTensors
from bench.peers import FA3, Run, digest, if_it_runs, library, load
from rawattn.cache_problem import KvWriteProblem, MergeProblem
from rawattn.paged_problem import PagedProblem
from rawattn.problem import CacheLayout

VLLM = "_C.abi3.so"
TORCH = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
}
WORKSPACE = 512 << 20  # bytes, of FlashInfer
V1_KEYS = 16384  # vLLM's v1 keeps all scores of a head in shared memory
V2_PART = 512  # keys of a part of v2


def _loaded(name: str) -> bool:
    path = library(name)
    if path is not None:
        load(path)
    return path is not None


def _like(array: Any, dtype: str) -> torch.Tensor:
    """The same memory as a tensor of a type."""
    found: torch.Tensor = torch.from_dlpack(array)
    return found.view(TORCH[dtype])


# ---- decoding ------------------------------------------------------------------------------------


def fa3(p: PagedProblem, t: DecodeTensors) -> Run | None:
    """FlashAttention-3 as vLLM builds it, with its schedule made beforehand."""
    if p.layout is not CacheLayout.NHD or p.quantized or not _loaded(FA3):
        return None
    ops = torch.ops._vllm_fa3_C
    q, k, v, table, used = (
        torch.from_dlpack(x) for x in (t.q, t.k_cache, t.v_cache, t.table, t.seqused)
    )
    q, shape = q.flatten(0, 1), t.out.shape
    starts = torch.arange(p.batch + 1, device=q.device, dtype=torch.int32) * p.max_q
    # fmt: off
    schedule = ops.get_scheduler_metadata(
        p.batch, p.max_q, p.max_k, p.q_heads, p.kv_heads, p.head_dim, p.value_dim, TORCH[p.dtype],
        used, starts, None, None, None, None,  # cu_k, cu_k_new, seqused_q, leftpad_k
        p.page, 0, True, -1, -1, t.softcap > 0,  # max_k_new, causal, window
        0, None, 0,  # splits, pack_gqa, sm_margin
    )

    def run() -> torch.Tensor:
        result = ops.fwd(
            q, k, v, None, None, None,  # k_new, v_new, q_v
            None,  # out
            starts, None, None, None, used, p.max_q, p.max_k,  # cu_k, cu_k_new, seqused_q
            table, None, None,  # kv_batch_idx, leftpad_k
            None, None, None,  # rotary_cos, rotary_sin, seqlens_rotary
            None, None, None,  # q_descale, k_descale, v_descale
            t.scale, True, -1, -1, t.softcap,  # causal, window
            True, schedule, 0, None, 0, None, 1, 0, None,  # rotary_interleaved, splits, ...
        )
        return (result[0] if isinstance(result, (list, tuple)) else result).view(shape)
    # fmt: on

    return if_it_runs(run)


def flashinfer(p: PagedProblem, t: DecodeTensors) -> Run | None:
    """FlashInfer's kernel for tensor cores; for several queries, that for appended ones."""
    return _flashinfer(p, t, tensor_cores=True)


def flashinfer_cuda(p: PagedProblem, t: DecodeTensors) -> Run | None:
    """FlashInfer's decode kernel for CUDA cores."""
    return _flashinfer(p, t, tensor_cores=False) if p.max_q == 1 else None


def _flashinfer(p: PagedProblem, t: DecodeTensors, *, tensor_cores: bool) -> Run | None:
    if p.layout is CacheLayout.X_MAJOR:
        return None
    built = flashinfer_module(p, tensor_cores=tensor_cores)
    if built is None or not built.is_compiled:
        return None
    import flashinfer as fi

    indptr, indices, last = (x.cuda() for x in _csr(p, t))
    sizes = p.q_heads, p.kv_heads, p.head_dim, p.page
    types = {"q_data_type": TORCH[p.dtype], "kv_data_type": TORCH[p.cache_dtype]}
    workspace = _workspace()
    if p.max_q == 1:
        wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(
            workspace, p.layout.value, use_tensor_cores=tensor_cores, backend="fa2"
        )
        wrapper.plan(indptr, indices, last, *sizes, sm_scale=t.scale, **types)
    else:
        wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(workspace, p.layout.value, backend="fa2")
        starts = torch.arange(p.batch + 1, dtype=torch.int32) * p.max_q
        wrapper.plan(
            starts.cuda(), indptr, indices, last, *sizes, causal=True, sm_scale=t.scale, **types
        )
    q, out = torch.from_dlpack(t.q).flatten(0, 1), torch.from_dlpack(t.out)
    cache = _like(t.k_cache, p.cache_dtype), _like(t.v_cache, p.cache_dtype)
    flat = out.flatten(0, 1)

    def run() -> torch.Tensor:
        wrapper.run(q, cache, out=flat)
        return out

    return if_it_runs(run)


def flashinfer_module(p: PagedProblem, *, tensor_cores: bool) -> Any:
    """What FlashInfer compiles for a problem, `bench/build_flashinfer.py` ahead of time; None where
    it is not installed.
    """
    try:
        from flashinfer import jit
    except ImportError:
        return None
    types = TORCH[p.dtype], TORCH[p.cache_dtype], TORCH[p.dtype], torch.int32
    sizes = p.head_dim, p.value_dim
    if tensor_cores:
        return jit.gen_batch_prefill_module("fa2", *types, *sizes, 0, False, False, False)
    return jit.gen_batch_decode_module(*types, *sizes, 0, False, False)


def _csr(p: PagedProblem, t: DecodeTensors) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of `tensors` as FlashInfer takes them: indptr, indices, tokens of the last page."""
    table = torch.from_dlpack(t.table).cpu()
    counts = [-(-n // p.page) for n in t.keys]
    indptr = torch.tensor([0, *counts]).cumsum(0).int()
    indices = torch.cat([row[:n] for row, n in zip(table, counts, strict=True)])
    last = torch.tensor([(n - 1) % p.page + 1 for n in t.keys], dtype=torch.int32)
    return indptr, indices, last


@functools.cache
def _workspace() -> torch.Tensor:
    return torch.zeros(WORKSPACE, dtype=torch.uint8, device="cuda")


def vllm_v1(p: PagedProblem, t: DecodeTensors) -> Run | None:
    """vLLM's paged_attention_v1: a thread block for each query head."""
    if not _vllm_takes(p) or p.max_k > V1_KEYS:
        return None
    out, arguments = _vllm_arguments(p, t)

    def run() -> torch.Tensor:
        torch.ops._C.paged_attention_v1(out, *arguments)
        return out[:, None]

    return if_it_runs(run)


def vllm_v2(p: PagedProblem, t: DecodeTensors) -> Run | None:
    """vLLM's paged_attention_v2: a thread block for each query head and 512 keys."""
    if not _vllm_takes(p):
        return None
    out, arguments = _vllm_arguments(p, t)
    sums = torch.empty(p.batch, p.q_heads, -(-p.max_k // V2_PART), device="cuda")
    tops, parts = torch.empty_like(sums), torch.empty(*sums.shape, p.value_dim, device="cuda")
    parts = parts.to(out.dtype)

    def run() -> torch.Tensor:
        torch.ops._C.paged_attention_v2(out, sums, tops, parts, *arguments)
        return out[:, None]

    return if_it_runs(run)


def _vllm_takes(p: PagedProblem) -> bool:
    fits = p.layout is CacheLayout.X_MAJOR and p.max_q == 1 and p.page in (8, 16, 32)
    return fits and _loaded(VLLM)


def _vllm_arguments(p: PagedProblem, t: DecodeTensors) -> tuple[torch.Tensor, tuple[Any, ...]]:
    """out, and the arguments that v1 and v2 have in common, from query on."""
    out, q, k, v, table, used = (
        torch.from_dlpack(x)
        for x in (t.out[:, 0], t.q[:, 0], t.k_cache, t.v_cache, t.table, t.seqused)
    )
    one, stored = torch.ones((), device="cuda"), "fp8" if p.quantized else "auto"
    sparse = (0, 0, 0, 64, 0)  # tp_rank, and no block-sparse pattern
    sizes = (p.kv_heads, t.scale, table, used, p.page, p.max_k)
    return out, (q, k, v, *sizes, None, stored, one, one, *sparse)


# ---- merging and storing -------------------------------------------------------------------------


def vllm(p: MergeProblem | KvWriteProblem, t: Any) -> Run | None:
    """vLLM's merge_attn_states, reshape_and_cache and reshape_and_cache_flash."""
    if not _loaded(VLLM):
        return None
    return _vllm_merge(t) if isinstance(p, MergeProblem) else _vllm_write(p, t)


def _vllm_merge(t: MergeTensors) -> Run | None:
    arrays = t.out, t.lse, t.outs[0], t.lses[0], t.outs[1], t.lses[1]
    arguments = [torch.from_dlpack(x) for x in arrays]

    def run() -> torch.Tensor:
        torch.ops._C.merge_attn_states(*arguments, None, None)
        return arguments[0][None]

    return if_it_runs(run)


def _vllm_write(p: KvWriteProblem, t: WriteTensors) -> Run | None:
    if p.layout is CacheLayout.HND:
        return None
    ops = torch.ops._C_cache_ops
    store = (
        ops.reshape_and_cache if p.layout is CacheLayout.X_MAJOR else ops.reshape_and_cache_flash
    )
    arguments = [torch.from_dlpack(x) for x in (t.k, t.v, t.k_cache, t.v_cache, t.slots)]
    out, one = torch.from_dlpack(t.out), torch.ones((), device="cuda")
    stored = "auto" if p.cache_dtype == p.dtype else "fp8"

    def run() -> torch.Tensor:
        store(*arguments, stored, one, one)
        return out

    return if_it_runs(run)


def cudnn_fe(p: PagedProblem, t: DecodeTensors) -> Candidate | None:
    """cuDNN through its own frontend, which may be missing."""
    return importlib.import_module("bench.peers_cudnn").paged(p, t)


PEERS: dict[str, Callable[[Any, Any], Run | Candidate | None]] = {
    "fa3": fa3,
    "cudnn_fe": cudnn_fe,
    "flashinfer": flashinfer,
    "flashinfer_cuda": flashinfer_cuda,
    "vllm_v1": vllm_v1,
    "vllm_v2": vllm_v2,
    "vllm": vllm,
}


@functools.cache
def version(name: str) -> str:
    """What a row needs to name the peer exactly."""
    if name.startswith("flashinfer"):
        import flashinfer as fi

        return f"flashinfer {fi.__version__}"
    if name == "cudnn_fe":
        return importlib.import_module("bench.peers_cudnn").version()
    return (
        f"vllm fa3 {digest(library(FA3))}" if name == "fa3" else f"vllm _C {digest(library(VLLM))}"
    )
