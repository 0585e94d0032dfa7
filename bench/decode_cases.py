# SPDX-License-Identifier: Apache-2.0
"""The suites around a paged cache: decoding, merging partial results, storing new tokens.

Ids of decode cases read: query heads x KV heads, head size, page, batch, keys a sequence, and what
else differs; "32x8-d128-p16-b8-k1024-q4" has 4 queries a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench.suite import Case, Suite
from rawattn.cache_problem import KvWriteProblem, MergeProblem
from rawattn.paged_problem import PagedProblem, Scale
from rawattn.problem import CacheLayout, Mask, Scores

GRID = {  # batch: keys a sequence
    1: (1024, 8192, 32768, 131072),
    8: (1024, 8192, 32768),
    32: (1024, 4096, 16384),
    128: (1024, 4096),
    256: (2048,),
}
SKEWED = (131072, *[128] * 63)
SUFFIX = {CacheLayout.NHD: "", CacheLayout.HND: "-hnd", CacheLayout.X_MAJOR: "-x"}
FIRST_GRID = frozenset(f"32x8-d128-p16-b{b}-k{k}" for b, lengths in GRID.items() for k in lengths)
QUICK = frozenset(
    {
        "32x8-d128-p16-b1-k1024",
        "32x8-d128-p16-b1-k8192",
        "32x8-d128-p16-b8-k8192",
        "32x8-d128-p16-b128-k4096",
        "32x8-d128-p64-b32-k4096",
        "32x8-d128-p16-b8-k8192-q8",
        "32x8-d128-p16-b4-k4096-q512",
        "32x8-d128-p16-b32-k4096-x",
        "32x8-d128-p16-b128-k4096-fp8",
    }
)


def decode(
    batch: int,
    keys: int | tuple[int, ...],
    *,
    heads: tuple[int, int] = (32, 8),
    size: int = 128,
    page: int = 16,
    queries: int = 1,
    layout: CacheLayout = CacheLayout.NHD,
    fp8: bool = False,
    softcap: bool = False,
) -> Case:
    """A step of decoding over random pages: `queries` of each sequence, bf16, over `keys` of it."""
    each = (keys,) * batch if isinstance(keys, int) else keys
    of_keys = f"k{keys}" if isinstance(keys, int) else "skewed"
    name = f"{heads[0]}x{heads[1]}-d{size}-p{page}-b{batch}-{of_keys}"
    name += (f"-q{queries}" if queries > 1 else "") + SUFFIX[layout] + "-fp8" * fp8
    name += "-softcap" * softcap
    scale = Scale.NUMBER if fp8 else Scale.NONE
    return Case(
        id=name,
        problem=PagedProblem(
            dtype="bfloat16",
            cache_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            batch=batch,
            q_heads=heads[0],
            kv_heads=heads[1],
            head_dim=size,
            value_dim=size,
            max_q=queries,
            max_k=max(each),
            page=page,
            layout=layout,
            mask=Mask.of(causal=queries > 1),
            scores=Scores(softcap=softcap),
            k_scale=scale,
            v_scale=scale,
        ),
        quick=name in QUICK,
        all_peers=name in QUICK or name in FIRST_GRID,
        lengths=None if isinstance(keys, int) else tuple((queries, n) for n in each),
    )


def _decode_cases() -> Iterator[Case]:
    for page in (16, 64):
        for batch, lengths in GRID.items():
            for keys in lengths:
                yield decode(batch, keys, page=page)
    yield decode(64, SKEWED)
    for heads, cells in (
        ((64, 8), ((1, 8192), (16, 8192), (64, 4096))),
        ((32, 32), ((1, 8192), (16, 4096), (64, 2048))),
    ):
        for batch, keys in cells:
            yield decode(batch, keys, heads=heads)
    for size, largest in ((64, (256, 4096)), (256, (128, 2048))):  # 2 GB
        for batch, keys in ((1, 8192), (8, 8192), (32, 4096), largest):
            yield decode(batch, keys, size=size)
    for queries in (4, 8, 16):
        for batch, keys in ((1, 8192), (8, 8192), (32, 4096)):
            yield decode(batch, keys, queries=queries)
    yield decode(32, 4096, queries=4, softcap=True)
    for batch, keys in ((1, 1024), (1, 8192), (8, 1024), (8, 8192), (32, 4096), (128, 4096)):
        yield decode(batch, keys, layout=CacheLayout.X_MAJOR)
    for page in (32, 64):
        yield decode(32, 4096, page=page, layout=CacheLayout.X_MAJOR)
    for queries, batch, keys in ((4, 32, 4096), (16, 1, 8192), (16, 32, 4096)):
        yield decode(batch, keys, queries=queries, layout=CacheLayout.X_MAJOR)
    for batch, keys in ((8, 32768), (32, 16384), (128, 4096)):  # 1 to 2 GB, were they bf16
        yield decode(batch, keys, fp8=True)
    yield decode(128, 4096, layout=CacheLayout.X_MAJOR, fp8=True)


def _prompt_cases() -> Iterator[Case]:
    """Chunks of prompts: the last queries of sequences, over all their pages."""
    for queries, batch, keys in ((128, 16, 4096), (512, 4, 4096), (512, 1, 32768), (2048, 1, 8192)):
        yield decode(batch, keys, queries=queries)
    for keys in (8192, 32768):
        yield decode(1, keys, queries=128)
    yield decode(1, 32768, queries=128, size=256)
    yield decode(4, 4096, queries=512, page=64)
    yield decode(4, 4096, queries=512, layout=CacheLayout.HND)
    for size in (64, 256):
        yield decode(4, 4096, queries=512, size=size)
    for size in (64, 128, 256):
        yield decode(4, 4096, queries=512, size=size, layout=CacheLayout.X_MAJOR)
    yield decode(1, 8192, queries=2048, layout=CacheLayout.X_MAJOR)
    for size in (64, 128):
        yield decode(4, 4096, queries=512, size=size, fp8=True)
    yield decode(1, 8192, queries=2048, fp8=True)
    yield decode(4, 4096, queries=512, layout=CacheLayout.X_MAJOR, fp8=True)


def merge(tokens: int, dtype: str) -> Case:
    """Two states into one, as a prefix and a suffix are merged."""
    return Case(
        id=f"{dtype}-t{tokens}",
        problem=MergeProblem(
            dtype=dtype, out_dtype=dtype, states=2, tokens=tokens, heads=32, head_dim=128
        ),
        quick=dtype == "bfloat16" and tokens == 16384,
    )


def kv_write(tokens: int, layout: CacheLayout, *, fp8: bool = False) -> Case:
    """New tokens into random slots of a cache."""
    return Case(
        id=f"t{tokens}" + (SUFFIX[layout] or "-nhd") + "-fp8" * fp8,
        problem=KvWriteProblem(
            dtype="bfloat16",
            cache_dtype="float8_e4m3fn" if fp8 else "bfloat16",
            tokens=tokens,
            kv_heads=8,
            head_dim=128,
            value_dim=128,
            layout=layout,
        ),
        quick=tokens == 16384 and not fp8,
    )


DECODE = Suite(
    name="decode",
    op="decode",
    backend="decode_split",
    peers=("fa3", "flashinfer", "flashinfer_cuda", "cudnn_fe", "vllm_v1", "vllm_v2", "read"),
    cases=tuple(_decode_cases()),
    seldom=("cudnn_fe",),
)
PROMPTS = Suite(
    name="prompts",
    op="decode",
    backend="fwd_sm90_paged",
    peers=("fa3", "flashinfer"),
    cases=tuple(_prompt_cases()),
)
MERGE = Suite(
    name="merge",
    op="merge",
    backend="merge",
    peers=("vllm", "copy", "add"),
    cases=tuple(
        merge(tokens, dtype) for dtype in ("bfloat16", "float16") for tokens in (512, 4096, 16384)
    ),
)
KV_WRITE = Suite(
    name="kv_write",
    op="kv_write",
    backend="kv_write",
    peers=("vllm", "copy"),
    cases=tuple(
        kv_write(tokens, layout, fp8=fp8)
        for layout in (CacheLayout.NHD, CacheLayout.X_MAJOR)
        for fp8 in (False, True)
        for tokens in (256, 4096, 16384)
    ),
)
