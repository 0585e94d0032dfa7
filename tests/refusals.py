# SPDX-License-Identifier: Apache-2.0
"""What tests of refusals on paged caches share: fixtures to import, nothing runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rawattn import cascade_call, copy_call, kv_write_call, merge_call, paged_host

F32, F16, I32, I64 = np.float32, np.float16, np.int32, np.int64
VALUE, TYPE = ValueError, TypeError
Bad = list[tuple[dict[str, Any], type[Exception], str]]


@pytest.fixture(autouse=True)
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a call that is refused has run")

    for module in (kv_write_call, merge_call, cascade_call, copy_call):
        monkeypatch.setattr(module, "_run", run)
        module.resolve.cache_clear()
    monkeypatch.setattr(paged_host, "run", run)


@pytest.fixture(autouse=True, scope="module")
def forget() -> Any:
    """Kinds of calls that hold on to what does not run."""
    yield
    for module in (kv_write_call, merge_call, cascade_call, copy_call):
        module.resolve.cache_clear()


def zeros(*shape: int, dtype: Any = F32) -> np.ndarray:
    return np.zeros(shape, dtype)


def refuses(function: Any, call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error) as caught:
        function(**call)
    assert type(caught.value) is error
    assert message in str(caught.value)


def name_of(case: Any) -> str:
    return ",".join(case) if isinstance(case, dict) else ""


def paged(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call of `flash_attn_with_kvcache`, with changes."""
    return {
        "q": zeros(2, 3, 4, 16),
        "k_cache": zeros(6, 8, 2, 16),
        "v_cache": zeros(6, 8, 2, 16),
        "cache_seqlens": np.array([9, 20], I32),
        "block_table": np.array([[1, 2, 3], [4, 5, 0]], I32),
        **changes,
    }


def vllm(**changes: Any) -> dict[str, Any]:
    """The arguments of a good call of `paged_attention_v1`, with changes."""
    return {
        "out": None,
        "query": zeros(2, 4, 16),
        "key_cache": zeros(6, 2, 4, 8, 4),
        "value_cache": zeros(6, 2, 16, 8),
        "num_kv_heads": 2,
        "scale": 0.25,
        "block_tables": np.array([[1, 2, -1], [4, 5, 0]], I32),
        "seq_lens": np.array([9, 24], I32),
        "block_size": 8,
        "max_seq_len": 24,
        **changes,
    }
