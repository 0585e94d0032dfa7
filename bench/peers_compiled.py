# SPDX-License-Identifier: Apache-2.0
"""Peers that compile at their first call: JAX's attention, and the kernel of Triton's tutorial.

Import torch; jax and triton where they are called.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Any

import torch

from bench.cases import Tensors
from bench.measure import Candidate
from bench.peers import Run, digest, full_or_causal, if_it_runs, library, plain
from rawattn.problem import Problem

TUTORIAL = "06-fused-attention.py"  # of python/tutorials of Triton, in the folder of the peers


@functools.cache
def _jax() -> Any:
    """JAX, which leaves memory to the others."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return importlib.import_module("jax")


def jax_attention(p: Problem, t: Tensors) -> Run | None:
    """`jax.nn.dot_product_attention` by cuDNN.

    JAX has a stream of its own. Taking arrays makes it wait for the null stream, which in turn
    waits for the output that is taken from JAX: both ways are inside the time.
    """
    if not plain(p) or not (full_or_causal(p) or (p.mask.causal and p.max_q == p.max_k)):
        return None
    jax = _jax()
    window = (p.mask.left, 0) if p.mask.left >= 0 else None
    attend = jax.jit(
        functools.partial(
            jax.nn.dot_product_attention,
            scale=t.scale,
            is_causal=p.mask.causal,
            local_window_size=window,
            implementation="cudnn",
        )
    )

    def run() -> torch.Tensor:
        return torch.from_dlpack(attend(*map(jax.dlpack.from_dlpack, (t.q, t.k, t.v))))

    return if_it_runs(run)


def triton_tutorial(p: Problem, t: Tensors) -> Candidate | None:
    """The kernel of Triton's tutorial on fused attention, which knows fp16 alone.

    Its tuner chooses among the Configs that are usual on Hopper, not among all: each takes a second
    or two to compile.
    """
    alike = p.group == 1 and p.head_dim == p.value_dim and p.max_q == p.max_k
    sizes = p.head_dim in (16, 32, 64, 128, 256) and p.dtype == "float16"
    if library(TUTORIAL) is None or not (plain(p) and full_or_causal(p) and alike and sizes):
        return None
    module = _tutorial()
    q, k, v = (torch.from_dlpack(x).transpose(1, 2).contiguous() for x in (t.q, t.k, t.v))

    def launch() -> torch.Tensor:
        with torch.no_grad():
            return module.attention(q, k, v, p.mask.causal, t.scale, False).transpose(1, 2)

    run = if_it_runs(launch)
    chosen = str(module._attn_fwd.best_config).replace(",", "")
    return run and Candidate(backend="triton", run=run, config=chosen)


@functools.cache
def _tutorial() -> Any:
    """The tutorial as a module, with fewer Configs to choose from."""
    spec = importlib.util.spec_from_file_location("fused_attention", library(TUTORIAL) or "")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    tuned = module._attn_fwd
    tuned.configs = [c for c in tuned.configs if _usual(c.kwargs, c.num_warps, c.num_stages)]
    return module


def _usual(blocks: dict[str, int], warps: int, stages: int) -> bool:
    """128 queries by 64 keys in 4 warps, or by 128 in 8; up to 3 stages."""
    known = (blocks["BLOCK_M"], blocks["BLOCK_N"], warps) in ((128, 64, 4), (128, 128, 8))
    return known and stages <= 3


def version(name: str) -> str:
    """Of JAX, or of Triton and the tutorial."""
    found = importlib.import_module(name).__version__
    return (
        f"jax {found}" if name == "jax" else f"triton {found} tutorial {digest(library(TUTORIAL))}"
    )
