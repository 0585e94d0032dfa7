# SPDX-License-Identifier: Apache-2.0
"""The example decodes over a paged cache as over a contiguous one. A model of random weights: no
file is needed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

for package in ("gguf", "tokenizers"):
    pytest.importorskip(package, reason=f"the example needs pip install {package}")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import generate as example  # noqa: E402
from llama import Llama  # noqa: E402
from paged import PagedKVCache  # noqa: E402
from smollm2 import Config, Layer  # noqa: E402

import rawattn  # noqa: E402

CONFIG = Config(
    layers=2,
    q_heads=4,
    kv_heads=2,
    head_dim=16,
    context=200,
    rope_base=1e4,
    norm_eps=1e-5,
    eos=0,
)
HIDDEN, VOCABULARY = CONFIG.q_heads * CONFIG.head_dim, 97
SYSTEM = [5, 80, 3, 44, 19, 27, 61, 61, 12, 9, 33, 70, 2, 90, 8, 31, 15, 77, 52, 24, 6]
PROMPTS = ("abc", "a longer question of the user", "ab", "zz")
LAYOUTS = ("NHD", "HND", "x-major")


class Random:
    """A checkpoint of random weights, whose tokens are characters."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> np.ndarray:
            return (rng.standard_normal((rows, columns)) / columns**0.5).astype(np.float32)

        qkv = (CONFIG.q_heads + 2 * CONFIG.kv_heads) * CONFIG.head_dim
        ones = np.ones(HIDDEN, np.float32)
        self.config, self.tokenizer, self.norm = CONFIG, self, ones
        self.embedding = rng.standard_normal((VOCABULARY, HIDDEN)).astype(np.float32)
        self.layers = tuple(
            Layer(
                attn_norm=ones,
                qkv=3 * matrix(qkv, HIDDEN),
                attn_out=matrix(HIDDEN, HIDDEN),
                ffn_norm=ones,
                gate_up=matrix(4 * HIDDEN, HIDDEN),
                ffn_down=matrix(HIDDEN, 2 * HIDDEN),
            )
            for _ in range(CONFIG.layers)
        )

    def encode_chat(self, prompt: str) -> list[int]:
        return SYSTEM + [1 + ord(c) % (VOCABULARY - 1) for c in prompt]

    def decode(self, tokens: list[int]) -> str:
        return " ".join(map(str, tokens))


@pytest.fixture(scope="module")
def model() -> Llama:
    return Llama(Random(0), np, np.float32)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def contiguous(model: Llama) -> list[list[int]]:
    answers = example.generate(model, PROMPTS, 12).tokens
    assert len({tuple(answer) for answer in answers}) == len(PROMPTS), "answers tell prompts apart"
    return answers


@pytest.mark.parametrize("page", [1, 5, 16, 64])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_are_those_of_a_contiguous_cache(
    model: Llama, contiguous: list[list[int]], layout: str, page: int
) -> None:
    assert example.generate(model, PROMPTS, 12, layout=layout, page=page).tokens == contiguous


def test_the_prefix_is_stored_once_and_shared(
    model: Llama, contiguous: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches, prefixes = [], set()

    class Watched(PagedKVCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            caches.append(self)

    def cascade(*args: Any, **kwargs: Any) -> Any:
        prefixes.add(kwargs["common_prefix_len"])
        return original(*args, **kwargs)

    original = rawattn.cascade_attention
    monkeypatch.setattr(example, "PagedKVCache", Watched)
    monkeypatch.setattr(rawattn, "cascade_attention", cascade, raising=False)
    assert example.generate(model, PROMPTS, 12, layout="NHD", page=8).tokens == contiguous
    (cache,) = caches
    assert prefixes == {16}, "21 shared tokens fill two pages of 8"
    assert (cache.table[:, :2] == cache.table[0, :2]).all()
    rooms = [len(SYSTEM) + len(prompt) + 12 for prompt in PROMPTS]
    own = [row[2 : -(-room // 8)] for row, room in zip(cache.table, rooms, strict=True)]
    used = np.concatenate([cache.table[0, :2], *own])
    assert len(set(used.tolist())) == len(used) == cache.k.shape[1], "a page has one owner"


def test_prefixes() -> None:
    assert example.common_prefix([[1, 2, 3], [1, 2, 4], [1, 2]]) == 2
    assert example.common_prefix([[1, 2]]) == 2
    assert example.common_prefix([[1], [2]]) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tokens_on_a_gpu(layout: str) -> None:
    """Float16: where tokens differ from those of a contiguous cache, two choices were close."""
    cupy = example.array_module("gpu")
    on_gpu = Llama(Random(0), cupy, np.float16)  # type: ignore[arg-type]
    want = example.generate(on_gpu, PROMPTS, 12).tokens
    got = example.generate(on_gpu, PROMPTS, 12, layout=layout).tokens
    assert [x[:3] for x in got] == [x[:3] for x in want]
