# SPDX-License-Identifier: Apache-2.0
"""What is wrong with a call on a paged cache is said before anything runs: argument, value, what is
accepted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rawattn
from tests.refusals import (  # noqa: F401  two of them are fixtures
    F16,
    F32,
    I32,
    TYPE,
    VALUE,
    Bad,
    forget,
    name_of,
    nothing_runs,
    paged,
    refuses,
    vllm,
    zeros,
)

# ---- paged_attention_v1 and v2 -------------------------------------------------------------------


BAD_VLLM: Bad = [
    ({"query": zeros(2, 1, 4, 16)}, VALUE, "query has shape (2, 1, 4, 16): accepted is (batch, q_"),
    ({"query": zeros(2, 3, 16)}, VALUE, "query has 3 heads, the cache has 2: accepted are"),
    ({"query": zeros(2, 4, 20)}, VALUE, "query has shape (2, 4, 20): accepted is (batch, q_heads,"),
    ({"query": zeros(2, 4, 16, dtype=float)}, TYPE, "query has dtype float64: accepted are"),
    ({"key_cache": zeros(6, 2, 16, 8)}, VALUE, "key_cache has shape (6, 2, 16, 8): accepted is"),
    ({"key_cache": zeros(6, 2, 2, 8, 8)}, VALUE, "accepted is (blocks, kv_heads, head_dim / 4, p"),
    ({"key_cache": zeros(6, 2, 4, 8, 4, dtype=F16)}, TYPE, "key_cache has dtype float16: accepted"),
    ({"key_cache": zeros(6, 2, 1, 8, 16, dtype=np.uint8)}, TYPE, "with kv_cache_dtype= also 8-bit"),
    ({"value_cache": zeros(6, 2, 16, 9)}, VALUE, "value_cache has shape (6, 2, 16, 9): accepted"),
    ({"value_cache": zeros(6, 2, 8, 16).swapaxes(2, 3)}, VALUE, "value_cache of shape (6, 2, 16,"),
    ({"num_kv_heads": 4}, VALUE, "num_kv_heads=4, and key_cache has shape (6, 2, 4, 8, 4): accep"),
    ({"num_kv_heads": "2"}, TYPE, "num_kv_heads='2': accepted is an integer, found str"),
    ({"block_size": 16}, VALUE, "block_size=16, and key_cache has shape"),
    ({"block_size": 8.0}, TYPE, "block_size=8.0: accepted is an integer"),
    ({"max_seq_len": -1}, VALUE, "max_seq_len=-1: accepted are integers from 0"),
    ({"scale": None}, TYPE, "scale is None: accepted is a number"),
    ({"num_kv_heads": None}, TYPE, "num_kv_heads is None: accepted is a number"),
    ({"block_size": None}, TYPE, "block_size is None: accepted is a number"),
    ({"max_seq_len": None}, TYPE, "max_seq_len is None: accepted is a number"),
    ({"scale": float("nan")}, VALUE, "scale=nan: accepted are 0 and numbers"),
    ({"block_tables": np.array([[1], [2]])}, TYPE, "block_tables has dtype int64: accepted is int"),
    ({"block_tables": np.zeros((3, 2), I32)}, VALUE, "block_tables has shape (3, 2): accepted is"),
    ({"block_tables": None}, TYPE, "block_tables is None: accepted is an array"),
    ({"seq_lens": np.array([9, 24])}, TYPE, "seq_lens has dtype int64: accepted is int32"),
    ({"seq_lens": np.array([9, 24, 0], I32)}, VALUE, "seq_lens has shape (3,): accepted is (2,)"),
    ({"seq_lens": np.array([9, 25], I32)}, VALUE, "seq_lens of sequence 1: found 25, accepted are"),
    ({"seq_lens": np.array([-1, 2], I32)}, VALUE, "seq_lens of sequence 0: found -1, accepted are"),
    ({"max_seq_len": 20}, VALUE, "seq_lens of sequence 1: found 24, accepted are 0 to 20"),
    ({"seq_lens": np.array([17, 2], I32)}, VALUE, "block_tables[0, 2] is -1: accepted are 0 to 5"),
    ({"key_cache": zeros(5, 2, 4, 8, 4), "value_cache": zeros(5, 2, 16, 8)}, VALUE, "[1, 1] is 5:"),
    ({"alibi_slopes": zeros(2)}, VALUE, "alibi_slopes has shape (2,): accepted is (4,)"),
    ({"alibi_slopes": zeros(4, dtype=float)}, TYPE, "alibi_slopes has dtype float64: accepted is"),
    ({"kv_cache_dtype": "fp4"}, VALUE, "kv_cache_dtype='fp4': accepted are auto, fp8, fp8_e4m3, f"),
    ({"kv_cache_dtype": None}, TYPE, "kv_cache_dtype=None: accepted are auto, fp8"),
    ({"kv_cache_dtype": "fp8"}, VALUE, "accepted is (blocks, kv_heads, head_dim / 16, page, 16)"),
    ({"k_scale": 0.5}, VALUE, "k_scale is 0.5, and the cache holds float32: accepted is 1.0"),
    ({"v_scale": zeros(1)}, VALUE, "v_scale is an array, and the cache holds float32: accepted is"),
    ({"k_scale": 0.0}, VALUE, "k_scale=0.0: accepted are numbers from 1e-18 to 1e+18"),
    ({"k_scale": -1.0}, VALUE, "k_scale=-1.0: accepted are numbers from 1e-18 to 1e+18"),
    ({"k_scale": float("nan")}, VALUE, "k_scale=nan: accepted"),
    ({"k_scale": None}, TYPE, "k_scale=None: accepted are a number and an array"),
    ({"v_scale": None}, TYPE, "v_scale=None: accepted are a number and an array"),
    ({"tp_rank": -1}, VALUE, "tp_rank=-1: accepted are integers from 0"),
    ({"blocksparse_vert_stride": 2.0}, TYPE, "blocksparse_vert_stride=2.0: accepted is an integer"),
    ({"blocksparse_local_blocks": 2}, VALUE, "blocksparse_local_blocks=2: accepted is 0 with bl"),
    ({"blocksparse_vert_stride": 2, "blocksparse_block_size": 12}, VALUE, "accepted are multiples"),
    ({"blocksparse_vert_stride": 2, "blocksparse_block_size": 0}, VALUE, "accepted are integers f"),
    ({"out": zeros(2, 4, 8)}, VALUE, "out has shape (2, 4, 8): accepted is (2, 4, 16)"),
    ({"out": zeros(2, 4, 16, dtype=F16)}, TYPE, "out has dtype float16: accepted is float32"),
    ({"stream": 3}, VALUE, "stream=3: with NumPy arrays accepted is None"),
    ({"backend": "fast"}, VALUE, "backend='fast': accepted are decode_split, fwd_sm90_paged,"),
    ({"backend": "paged_v1"}, rawattn.Unsupported, "paged_v1: needs CUDA arrays, found NumPy"),
    ({"backend": 1}, TYPE, "backend=1: accepted are None and the name of a backend"),
    ({"plan": "fast"}, TYPE, "plan='fast': accepted is what rawattn.prepare returns"),
    ({"workspace": zeros(8)}, TYPE, "workspace has dtype float32: accepted is uint8"),
    ({"dtype": "int8"}, TYPE, "dtype='int8': accepted are float16, bfloat16, float32"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_VLLM, ids=name_of)
def test_paged_attention(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.paged_attention_v1, vllm(**changes), error, message)
    scratch: dict[str, Any] = dict.fromkeys(("exp_sum", "max_logits", "tmp_out"))
    refuses(rawattn.paged_attention_v2, vllm(**changes, **scratch), error, message)


def test_rooms_of_v2() -> None:
    good = {"exp_sum": zeros(2, 4, 2), "max_logits": zeros(2, 4, 2), "tmp_out": zeros(2, 4, 2, 16)}
    table, lengths = np.zeros((2, 80), I32), np.array([9, 640], I32)
    call = vllm(**good, block_tables=table, seq_lens=lengths, max_seq_len=640)
    with pytest.raises(AssertionError, match="has run"):
        rawattn.paged_attention_v2(**call)
    for changes, message in (
        ({"exp_sum": zeros(2, 4, 1)}, "exp_sum has shape (2, 4, 1): accepted are 2 parts or more"),
        (
            {"max_logits": zeros(2, 2, 2)},
            "max_logits has shape (2, 2, 2): accepted is (2, 4, parts",
        ),
        (
            {"tmp_out": zeros(2, 4, 2, 8)},
            "tmp_out has shape (2, 4, 2, 8): accepted is (2, 4, parts",
        ),
    ):
        refuses(rawattn.paged_attention_v2, call | changes, VALUE, message)


# ---- flash_attn_with_kvcache ---------------------------------------------------------------------


def growing(**changes: Any) -> dict[str, Any]:
    angles = {"rotary_cos": zeros(24, 4), "rotary_sin": zeros(24, 4)}
    new = {"k": zeros(2, 3, 2, 16), "v": zeros(2, 3, 2, 16)}
    return paged(**{**new, **angles, **changes})


INDPTR, INDICES, LAST = np.array([0, 2, 3], I32), np.array([1, 2, 5], I32), np.array([8, 1], I32)
CSR = {"kv_indptr": INDPTR, "kv_indices": INDICES, "kv_last_page_len": LAST}
NO_TABLE = {"block_table": None, "cache_seqlens": None}

BAD_PAGED: Bad = [
    ({"layout": "NDH"}, VALUE, "layout='NDH': accepted are NHD, HND, x-major"),
    ({"layout": None}, TYPE, "layout=None: accepted are NHD, HND, x-major"),
    ({"causal": "top_left"}, VALUE, "causal='top_left': the queries are the last tokens"),
    ({"causal": 1}, TYPE, "causal=1: accepted are"),
    ({"window_size": (-2, 0)}, VALUE, "window_size=(-2, 0): accepted are -1"),
    ({"softcap": -1.0}, VALUE, "softcap=-1.0: accepted are 0 and numbers"),
    ({"split_tokens": -1}, VALUE, "split_tokens=-1: accepted are integers from 0"),
    ({"split_tokens": 16.0}, TYPE, "split_tokens=16.0: accepted is an integer"),
    ({"return_softmax_lse": 1}, TYPE, "return_softmax_lse=1: accepted are False and True"),
    ({"cache_seqlens": None}, VALUE, "cache_seqlens is None: with block_table accepted is"),
    ({"cache_seqlens": np.array([9, 20])}, TYPE, "cache_seqlens has dtype int64: accepted is int3"),
    ({"cache_batch_idx": np.array([1, 0], I32)}, VALUE, "cache_batch_idx: with block_table accept"),
    ({"k_cache": zeros(6, 8, 2, 24)}, VALUE, "q has shape (2, 3, 4, 16): accepted is (batch, q_le"),
    ({"v_cache": zeros(6, 8, 1, 16)}, VALUE, "v_cache has shape (6, 8, 1, 16): accepted is (6, 8,"),
    ({"v_cache": zeros(6, 8, 2, 16, dtype=F16)}, TYPE, "v_cache has dtype float16: accepted is"),
    ({"k_cache": zeros(6, 0, 2, 16), "v_cache": zeros(6, 0, 2, 16)}, VALUE, "accepted are pages a"),
    ({"k_cache": zeros(6, 8, 2, 32)[..., ::2]}, VALUE, "k_cache of shape (6, 8, 2, 16) has stride"),
    ({"tree_mask": np.ones((2, 3, 2), bool)}, VALUE, "tree_mask has shape (2, 3, 2): accepted is"),
    ({"tree_mask": zeros(2, 3, 3)}, TYPE, "tree_mask has dtype float32: accepted are bool, uint8"),
    ({"sink": zeros(2)}, VALUE, "sink has shape (2,): accepted is (4,)"),
    ({"k_descale": None}, TYPE, "k_descale=None: accepted are a number and an array, 1.0 sca"),
    ({"v_descale": None}, TYPE, "v_descale=None: accepted are a number and an array, 1.0 sca"),
    ({"lse": zeros(2, 3, 4)}, VALUE, "lse has shape (2, 3, 4): accepted is (2, 4, 3)"),
    ({"k_descale": zeros(2, 2)}, VALUE, "k_descale is an array, and the cache holds float32"),
    ({**CSR, "block_table": np.zeros((2, 3), I32)}, VALUE, "found block_table, cache_seqlens, kv_"),
    ({**NO_TABLE, "kv_indptr": INDPTR}, VALUE, "found kv_indptr: accepted are kv_indptr, kv_indic"),
    ({**NO_TABLE, **CSR, "cache_batch_idx": LAST}, VALUE, "found cache_batch_idx, kv_indptr, k"),
    ({**NO_TABLE, **CSR, "kv_indptr": np.array([0, 2, 3])}, TYPE, "kv_indptr has dtype int64: acc"),
    ({**NO_TABLE, **CSR, "kv_indptr": INDPTR[:2]}, VALUE, "kv_indptr has shape (2,): accepted is"),
    ({**NO_TABLE, **CSR, "kv_indptr": np.array([0, 3, 2], I32)}, VALUE, "kv_indptr[2] is 2: accep"),
    ({**NO_TABLE, **CSR, "kv_indices": np.array([1, 9, 0], I32)}, VALUE, "kv_indices[1] is 9: acc"),
    ({**NO_TABLE, **CSR, "kv_last_page_len": np.array([9, 1], I32)}, VALUE, "kv_last_page_len[0]"),
    ({**NO_TABLE, **CSR, "kv_last_page_len": np.array([8, 0], I32)}, VALUE, "kv_last_page_len[1]"),
    (NO_TABLE, VALUE, "k_cache has shape (6, 8, 2, 16) and q a batch of 2: without block_table an"),
    ({**NO_TABLE, "cache_batch_idx": np.array([6, 0], I32)}, VALUE, "cache_batch_idx[0] is 6: acc"),
    ({"cu_seqlens_q": np.array([0, 2, 3], I32)}, VALUE, "q has shape (2, 3, 4, 16): accepted is ("),
    ({"v": zeros(2, 3, 2, 16)}, VALUE, "v: without k accepted is None"),
    ({"rotary_cos": zeros(24, 4)}, VALUE, "rotary_cos: without k accepted is None"),
]  # fmt: skip

BAD_GROWING: Bad = [
    ({"v": None}, VALUE, "v is None: with k accepted is an array"),
    ({"k": zeros(2, 3, 4, 16)}, VALUE, "k has shape (2, 3, 4, 16): accepted is (2, new_len, 2, 16"),
    ({"k": zeros(2, 3, 2, 16, dtype=F16)}, TYPE, "k has dtype float16: accepted is float32"),
    ({"v": zeros(2, 2, 2, 16)}, VALUE, "v has shape (2, 2, 2, 16): accepted is (2, 3, 2, 16)"),
    ({"k": zeros(2, 25, 2, 16), "v": zeros(2, 25, 2, 16)}, VALUE, "k has 25 tokens a sequence: ac"),
    ({"cache_seqlens": np.array([9, 22], I32)}, VALUE, "cache_seqlens of sequence 1: found 22, ac"),
    ({**NO_TABLE, **CSR}, VALUE, "k: with kv_indptr accepted is None; store them before"),
    ({"rotary_sin": None}, VALUE, "accepted are rotary_cos and rotary_sin together"),
    ({"rotary_sin": zeros(24, 3)}, VALUE, "rotary_sin has shape (24, 3): accepted is (24, 4)"),
    ({"rotary_cos": zeros(24, 4, dtype=F16)}, TYPE, "rotary_cos has dtype float16: accepted is fl"),
    ({"rotary_cos": zeros(24, 9), "rotary_sin": zeros(24, 9)}, VALUE, "accepted are 1 to 8 column"),
    ({"rotary_cos": zeros(23, 4), "rotary_sin": zeros(23, 4)}, VALUE, "accepted are 24 rows or mo"),
    ({"rotary_interleaved": 1}, TYPE, "rotary_interleaved=1: accepted are False and True"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "error", "message"), BAD_PAGED, ids=name_of)
def test_with_kvcache(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_with_kvcache, paged(**changes), error, message)


@pytest.mark.parametrize(("changes", "error", "message"), BAD_GROWING, ids=name_of)
def test_appending(changes: dict[str, Any], error: type[Exception], message: str) -> None:
    refuses(rawattn.flash_attn_with_kvcache, growing(**changes), error, message)


def test_scales_of_8_bits() -> None:
    q, cache = zeros(2, 3, 4, 16, dtype=F16), np.zeros((6, 8, 2, 16), np.uint8)
    call = paged(q=q, k_cache=cache, v_cache=cache, kv_cache_dtype="fp8")
    for name, scale, error, message in (
        (
            "k_descale",
            zeros(3),
            VALUE,
            "k_descale has shape (3,): accepted are (), (1,), (2,), (2, 2)",
        ),
        (
            "v_descale",
            zeros(2, dtype=F16),
            TYPE,
            "v_descale has dtype float16: accepted is float32",
        ),
        (
            "k_descale",
            np.array([1, 0], F32),
            VALUE,
            "k_descale[1] is 0.0: accepted are numbers from 1e-18",
        ),
        ("v_descale", np.array([np.nan], F32), VALUE, "v_descale[0] is nan: accepted are numbers"),
        (
            "k_descale",
            np.array([1e30], F32),
            VALUE,
            "e+30: accepted are numbers from 1e-18 to 1e+18",
        ),
    ):
        refuses(rawattn.flash_attn_with_kvcache, call | {name: scale}, error, message)
    new = {"k": zeros(2, 1, 2, 16, dtype=F16), "v": zeros(2, 1, 2, 16, dtype=F16)}
    by_batch = {"k_descale": np.ones((2, 2), F32)}
    message = "k: new tokens are stored with one scale, or one for each head"
    refuses(rawattn.flash_attn_with_kvcache, call | new | by_batch, VALUE, message)


def test_outputs_lie_apart() -> None:
    memory = zeros(6, 8, 2, 16)
    call = paged(k_cache=memory)
    out = memory.reshape(-1)[: 2 * 3 * 4 * 16].reshape(2, 3, 4, 16)
    message = "out shares memory with k_cache: accepted is an output of its own"
    refuses(rawattn.flash_attn_with_kvcache, call | {"out": out}, VALUE, message)
    k = memory.reshape(-1)[: 2 * 3 * 2 * 16].reshape(2, 3, 2, 16)
    message = "k_cache shares memory with k: accepted"
    refuses(rawattn.flash_attn_with_kvcache, growing(k_cache=memory, k=k), VALUE, message)
    frozen = zeros(6, 8, 2, 16)
    frozen.flags.writeable = False
    message = "k_cache is read-only: accepted is an array that can be written"
    refuses(rawattn.flash_attn_with_kvcache, growing(k_cache=frozen), VALUE, message)


def test_good_calls_run() -> None:
    for function, call in (
        (rawattn.paged_attention_v1, vllm()),
        (rawattn.flash_attn_with_kvcache, paged()),
        (rawattn.flash_attn_with_kvcache, growing()),
    ):
        with pytest.raises(AssertionError, match="has run"):
            function(**call)
