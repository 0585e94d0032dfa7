# SPDX-License-Identifier: Apache-2.0
"""Plans of the kernels around attention: what they take, what they refuse, and how they divide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rawattn.cache_problem import CopyBlocksProblem, KvWriteProblem, MergeProblem, RotaryProblem
from rawattn.device import DEVICES, Device
from rawattn.plan import configs, kv_write, merge, paged_v1, paged_v2
from rawattn.problem import CacheLayout, Mask, Rows, Unsupported
from tests.problems import decode_problem

H200, HOST = Device.named("H200"), Device.host()
WRITE = KvWriteProblem(
    dtype="bfloat16",
    cache_dtype="bfloat16",
    tokens=4096,
    kv_heads=8,
    head_dim=128,
    value_dim=128,
    layout=CacheLayout.NHD,
)
MERGE = MergeProblem(
    dtype="bfloat16", out_dtype="bfloat16", states=2, tokens=512, heads=32, head_dim=128
)
DECODE = decode_problem(batch=8, layout=CacheLayout.X_MAJOR)


@given(
    tokens=st.integers(1, 10**6),
    heads=st.integers(1, 128),
    sizes=st.tuples(st.integers(1, 256), st.integers(1, 256)),
    layout=st.sampled_from(CacheLayout),
    cache=st.sampled_from(["bfloat16", "int8"]),
    sms=st.sampled_from([1, 20, 132]),
)
def test_blocks_hold_every_token_and_share(
    tokens: int, heads: int, sizes: tuple[int, int], layout: CacheLayout, cache: str, sms: int
) -> None:
    p = replace(
        WRITE,
        tokens=tokens,
        kv_heads=heads,
        head_dim=sizes[0],
        value_dim=sizes[1],
        layout=layout,
        cache_dtype=cache,
    )
    (launch,) = kv_write.launches(p, replace(H200, sms=sms))
    s = dict(launch.scalars)
    chunk = 16 if cache == "int8" else 8
    shares = heads * sum(-(-size // chunk) for size in sizes)
    lanes = launch.config.threads // s["token_lanes"]
    assert lanes >= 1 and s["block_tokens"] % s["token_lanes"] == 0
    assert s["block_tokens"] <= launch.config.max_tokens  # has room for their slots
    assert (s["share_blocks"] - 1) * lanes < shares <= s["share_blocks"] * lanes
    blocks, rest = divmod(launch.grid, s["share_blocks"])
    assert rest == 0 and (blocks - 1) * s["block_tokens"] < tokens <= blocks * s["block_tokens"]
    assert launch.config in set(configs("kv_write", "sm_90a"))


@given(
    tokens=st.integers(1, 10**5),
    heads=st.integers(1, 64),
    head_dim=st.integers(0, 1024),
    out=st.sampled_from(["float32", "bfloat16", "float8_e4m3fn"]),
)
def test_blocks_hold_every_row(tokens: int, heads: int, head_dim: int, out: str) -> None:
    p = replace(
        MERGE, dtype="float32", out_dtype=out, tokens=tokens, heads=heads, head_dim=head_dim
    )
    (launch,) = merge.launches(p, H200)
    s = dict(launch.scalars)
    piece = 16 // {"float32": 4, "bfloat16": 2, "float8_e4m3fn": 1}[out]
    row_threads = max(1, -(-head_dim // (launch.config.parts * piece)))
    rows, threads = launch.config.threads // row_threads, range(launch.config.threads + 1)
    assert [n * s["row_magic"] >> 16 for n in threads] == [n // row_threads for n in threads]
    strips = -(-tokens // merge.STRIP) * merge.STRIP * heads
    assert (launch.grid - 1) * rows < strips <= launch.grid * rows
    assert launch.config in set(configs("merge", "sm_90a"))


def test_few_tokens_are_shared_by_many_blocks() -> None:
    """A decode step of 256 sequences fills the device; a prefill keeps its blocks busy."""
    (step,) = kv_write.launches(replace(WRITE, tokens=256), H200)
    (prefill,) = kv_write.launches(replace(WRITE, tokens=32768), H200)
    assert step.grid == 256
    assert prefill.grid == 32768 // kv_write.TURNS


def test_partitions() -> None:
    first, second = paged_v2.launches(DECODE, H200)
    assert (first.kernel, second.kernel) == ("paged_v2", "paged_v2_reduce")
    assert (first.grid, second.grid) == (8 * 8 * 32, 8 * 32)
    assert first.workspace_bytes == 4 * 8 * 32 * 8 * (128 + 2)
    (alone,) = paged_v2.launches(replace(DECODE, max_k=512), H200)
    assert alone == paged_v1.launches(DECODE, H200)[0]
    int8 = replace(DECODE, cache_dtype="int8")
    for kernel, launch in zip(
        ("paged_v2", "paged_v2_reduce"), paged_v2.launches(int8, H200), strict=True
    ):
        assert launch.config in set(configs(kernel, "sm_90a"))


@pytest.mark.parametrize("name", DEVICES)
def test_every_gpu_has_them(name: str) -> None:
    gpu = Device.named(name)
    for plan, problem in (
        (kv_write.plan, WRITE),
        (kv_write.plan, RotaryProblem(dtype="float16", tokens=7, heads=3, head_dim=50)),
        (kv_write.plan, CopyBlocksProblem(caches=64, pairs=3, block_bytes=1000, copy_bytes=4)),
        (merge.plan, MERGE),
    ):
        found = plan(problem, gpu)
        assert len(found.launches) == 1 and found.backend != "reference"
        assert plan(problem, HOST).backend == "reference"
    assert paged_v1.refuses(DECODE, gpu) is None is paged_v2.refuses(DECODE, gpu)


def test_nothing_is_launched_for_nothing() -> None:
    empty: tuple[Any, ...] = (
        replace(WRITE, tokens=0),
        replace(WRITE, kv_heads=0),
        RotaryProblem(dtype="float16", tokens=3, heads=0, head_dim=8),
        CopyBlocksProblem(caches=3, pairs=0, block_bytes=64),
        CopyBlocksProblem(caches=0, pairs=3, block_bytes=64),
    )
    for problem in empty:
        assert kv_write.plan(problem, H200).launches == ()
    assert merge.plan(replace(MERGE, heads=0), H200).launches == ()
    # rows without columns have an lse
    assert len(merge.plan(replace(MERGE, head_dim=0), H200).launches) == 1


REFUSED = [
    (kv_write.plan, replace(WRITE, dtype="int32"), "kv_write: dtype int32: takes float16"),
    (kv_write.plan, replace(WRITE, cache_dtype="float16"), "a cache of float16: takes bfloat16"),
    (kv_write.plan, replace(WRITE, tokens=2**44), "blocks: takes up to 2147483647"),
    (
        kv_write.plan,
        RotaryProblem(dtype="int8", tokens=1, heads=1, head_dim=8),
        "rotary: dtype int8: takes",
    ),
    (
        kv_write.plan,
        CopyBlocksProblem(caches=2**20, pairs=2**20, block_bytes=1),
        "a grid of 1099511627776 blocks",
    ),
    (merge.plan, replace(MERGE, out_dtype="float32"), "states of bfloat16 to float32: takes"),
    (merge.plan, replace(MERGE, states=0), "merge: 0 states: takes one and more"),
    (merge.plan, replace(MERGE, head_dim=1032), "head_dim=1032: takes up to 1024"),
    (merge.plan, replace(MERGE, tokens=2**31), "rows: takes up to 2147483647"),
]


@pytest.mark.parametrize(("plan", "problem", "words"), REFUSED)
def test_what_is_refused(plan: Any, problem: Any, words: str) -> None:
    with pytest.raises(Unsupported) as error:
        plan(problem, H200)
    assert words in str(error.value)
    assert "reference: takes NumPy arrays, found arrays on NVIDIA H200" in str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_sparse": True, "max_q": 2}, "block-sparse attention: takes one query"),
        ({"block_sparse": True, "q_rows": Rows.PACKED}, "block-sparse attention: takes one query"),
        ({"q_rows": Rows.PADDED}, "padded queries: takes dense and packed ones"),
        ({"mask": Mask(right=0, top_left=True)}, "aligned to the top left"),
        ({"dtype": "float32", "cache_dtype": "int8"}, "takes 8-bit ones with 16-bit queries"),
        ({"max_k": 2**30 + 1}, "queries and 1073741825 keys"),
        ({"batch": 2**27}, "134217728 x 1 x 32 rows"),
    ],
)
def test_what_paged_attention_refuses(changes: dict[str, Any], words: str) -> None:
    problem = replace(DECODE, **changes)
    assert words in str(paged_v1.refuses(problem, H200))
    assert paged_v2.refuses(problem, H200) == paged_v1.refuses(problem, H200)


def test_a_query_is_a_row_of_blocks() -> None:
    drafts = replace(DECODE, max_q=5)
    (alone,) = paged_v1.launches(drafts, H200)
    assert alone.grid == DECODE.batch * 5 * DECODE.q_heads
    first, second = paged_v2.launches(drafts, H200)
    assert (first.grid, second.grid) == (alone.grid * 8, alone.grid)
    assert first.workspace_bytes == 4 * alone.grid * 8 * (128 + 2)
    assert "takes up to 16" in str(paged_v2.refuses(replace(DECODE, max_q=17), H200))


def test_long_rows_are_shared_by_blocks() -> None:
    wide = replace(DECODE, head_dim=576, value_dim=513)
    (alone,) = paged_v1.launches(wide, H200)
    assert (alone.config.head_dim, alone.grid) == (256, DECODE.batch * DECODE.q_heads * 3)
    assert dict(alone.scalars) == {"column_blocks": 3, "queries": 1}
    first, second = paged_v2.launches(wide, H200)
    assert (first.grid, second.grid) == (alone.grid * 8, alone.grid)


def test_more_partitions_than_a_grid_has_blocks() -> None:
    many = replace(DECODE, batch=2**20, max_k=2**30)
    assert paged_v1.refuses(many, H200) is None
    assert "max_seq_len= may help" in str(paged_v2.refuses(many, H200))
