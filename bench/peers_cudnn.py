# SPDX-License-Identifier: Apache-2.0
"""cuDNN through its own frontend: dense attention of 16 and of 8 bits, and over a paged cache.

A case is planned once; what that took is in `config`, and not in the times. Imports torch and
cudnn, of the package nvidia-cudnn-frontend.
"""

from __future__ import annotations

import functools
import time
from dataclasses import dataclass, replace
from typing import Any

import cudnn
import cupy
import torch

from bench.cases import Tensors
from bench.check import Expected, Storage, expected
from bench.decode import DecodeTensors
from bench.decode_check import meanings
from bench.measure import Candidate
from bench.peers import Run, full_or_causal, if_it_runs, plain
from rawattn.paged_problem import PagedProblem
from rawattn.problem import CacheLayout, Mask, Problem

TYPES = {
    torch.float16: cudnn.data_type.HALF,
    torch.bfloat16: cudnn.data_type.BFLOAT16,
    torch.float8_e4m3fn: cudnn.data_type.FP8_E4M3,
    torch.float32: cudnn.data_type.FLOAT,
    torch.int32: cudnn.data_type.INT32,
}
FP8 = "float8_e4m3fn"
FP8_SCALE = 64.0  # of P, at most 1, and of outputs, below 7: both fit, and few are subnormal


class Graph:
    """A graph of one operation, whose tensors are bound to memory as they are described."""

    def __init__(self, io: torch.dtype) -> None:
        self._start = time.perf_counter()
        self._bound: dict[Any, torch.Tensor] = {}
        self.graph = cudnn.pygraph(
            io_data_type=TYPES[io],
            intermediate_data_type=cudnn.data_type.FLOAT,
            compute_data_type=cudnn.data_type.FLOAT,
            handle=_handle(),
        )

    def input(self, x: torch.Tensor) -> Any:
        described = self.graph.tensor(
            dim=list(x.shape), stride=list(x.stride()), data_type=TYPES[x.dtype]
        )
        self._bound[described] = x
        return described

    def output(self, described: Any, x: torch.Tensor) -> None:
        described.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
        described.set_data_type(TYPES[x.dtype])
        self._bound[described] = x

    def candidate(self, out: torch.Tensor, **facts: Any) -> Candidate | None:
        """Plans the graph, which writes what `out` is a view of. None where it does not run."""
        self.graph.build([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        size = max(1, self.graph.get_workspace_size())
        workspace = torch.empty(size, dtype=torch.uint8, device="cuda")
        seconds = time.perf_counter() - self._start

        def launch() -> torch.Tensor:
            self.graph.execute(self._bound, workspace, handle=_handle())
            return out

        run: Run | None = if_it_runs(launch)
        plan = f"plan_ms={1e3 * seconds:.0f}"
        return run and Candidate(backend="cudnn", run=run, config=plan, **facts)


@functools.cache
def _handle() -> Any:
    """Launches on the null stream, as torch and CuPy do."""
    return cudnn.create_handle()


def _band(mask: Mask) -> dict[str, Any]:
    """A mask as cuDNN has it: its window counts the query's own key."""
    if mask.trivial:
        return {}
    ends = cudnn.diagonal_alignment
    band: dict[str, Any] = {"diagonal_band_right_bound": mask.right}
    if mask.left >= 0:
        band["diagonal_band_left_bound"] = mask.left + 1
    return band | {"diagonal_alignment": ends.TOP_LEFT if mask.top_left else ends.BOTTOM_RIGHT}


def _heads_first(*arrays: Any) -> list[torch.Tensor]:
    """(B, S, H, D) -> (B, H, S, D), the same memory."""
    return [torch.from_dlpack(x).transpose(1, 2) for x in arrays]


def dense(p: Problem, t: Tensors) -> Candidate | None:
    """fp16 and bf16, with the lse that we write too."""
    if not plain(p) or not (p.mask.trivial or p.mask.causal):
        return None
    q, k, v = _heads_first(t.q, t.k, t.v)
    out = torch.empty_like(torch.from_dlpack(t.out))
    graph = Graph(q.dtype)
    o, stats = graph.graph.sdpa(
        q=graph.input(q),
        k=graph.input(k),
        v=graph.input(v),
        generate_stats=True,
        attn_scale=t.scale,
        **_band(p.mask),
    )
    graph.output(o, out.transpose(1, 2))
    graph.output(stats, torch.empty(*q.shape[:3], 1, device="cuda"))
    return graph.candidate(out)


def paged(p: PagedProblem, t: DecodeTensors) -> Candidate | None:
    """Queries over the pages of a 16-bit cache."""
    if p.layout is CacheLayout.X_MAJOR or p.quantized:
        return None
    k_cache, v_cache = torch.from_dlpack(t.k_cache), torch.from_dlpack(t.v_cache)
    if p.layout is CacheLayout.NHD:
        k_cache, v_cache = k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    table = torch.from_dlpack(t.table).clamp(min=0).view(p.batch, 1, -1, 1)
    keys = torch.from_dlpack(t.seqused).view(-1, 1, 1, 1)
    (q,), out = _heads_first(t.q), torch.empty_like(torch.from_dlpack(t.out))
    graph = Graph(q.dtype)
    o, _ = graph.graph.sdpa(
        q=graph.input(q),
        k=graph.input(k_cache),
        v=graph.input(v_cache),
        generate_stats=False,
        attn_scale=t.scale,
        use_padding_mask=True,
        seq_len_q=graph.input(torch.full_like(keys, p.max_q)),
        seq_len_kv=graph.input(keys),
        paged_attention_k_table=graph.input(table),
        paged_attention_v_table=graph.input(table),
        paged_attention_max_seq_len_kv=p.max_k,
        **_band(p.mask),
    )
    graph.output(o, out.transpose(1, 2))
    return graph.candidate(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Expected:
    """What an output of 8 bits must be, of the bits that it is handed out as."""

    exact: Expected

    def error_ratio(self, out: Any, xp: Any) -> float:
        found = xp.asarray(meanings(FP8) / FP8_SCALE)[out]
        return self.exact.error_ratio(found, xp)


def dense_fp8(p: Problem, t: Tensors) -> Candidate | None:
    """The same attention in 8 bits: of q, k and v rounded to e4m3, with an output of e4m3. It is
    held to what that makes of them.
    """
    if not plain(p) or not full_or_causal(p) or p.dtype != "bfloat16":
        return None
    inputs = [x.to(torch.float8_e4m3fn) for x in map(torch.from_dlpack, (t.q, t.k, t.v))]
    exact = expected(
        p,
        *(cupy.from_dlpack(x.float()) for x in inputs),
        scale=t.scale,
        xp=cupy,
        storage=Storage(dtype=FP8, scale=FP8_SCALE),
    )
    q, k, v = (x.transpose(1, 2) for x in inputs)
    out = torch.empty(t.out.shape, dtype=q.dtype, device="cuda")
    graph = Graph(q.dtype)

    def number(value: float) -> Any:
        return graph.input(torch.full((1, 1, 1, 1), value, device="cuda"))

    o, stats, *largest = graph.graph.sdpa_fp8(
        q=graph.input(q),
        k=graph.input(k),
        v=graph.input(v),
        descale_q=number(1.0),
        descale_k=number(1.0),
        descale_v=number(1.0),
        descale_s=number(1 / FP8_SCALE),
        scale_s=number(FP8_SCALE),
        scale_o=number(FP8_SCALE),
        generate_stats=True,
        attn_scale=t.scale,
        use_causal_mask=p.mask.causal,
    )
    graph.output(o, out.transpose(1, 2))
    graph.output(stats, torch.empty(*q.shape[:3], 1, device="cuda"))
    for described in largest:
        graph.output(described, torch.empty(1, 1, 1, 1, device="cuda"))
    return graph.candidate(
        out.view(torch.uint8), expected=Fp8Expected(exact=exact), problem=replace(p, dtype=FP8)
    )


def version() -> str:
    """Of the frontend and of cuDNN."""
    return f"cudnn-frontend {cudnn.__version__} cudnn {cudnn.backend_version()}"
