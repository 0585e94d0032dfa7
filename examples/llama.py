# SPDX-License-Identifier: Apache-2.0
"""A Llama model over a packed batch, written once for NumPy and CuPy: `xp` is the array module.

Everything is float32 except attention, which runs in `dtype`: queries, keys, values and the cache
are rounded to it. Float32 matrices work on both (CuPy multiplies no bfloat16 ones), and leave the
rounding of attention as the only difference between devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

import numpy as np
from smollm2 import Checkpoint, Config, Layer

import rawattn

Array = Any  # a NumPy or a CuPy array


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The new tokens of one forward pass, packed sequence after sequence.

    ``n`` new tokens, ``B`` sequences, of which ``L`` have new tokens and the others are finished.
    """

    tokens: Array  # (n,) int64
    positions: Array  # (n,) int64, place of each token in its sequence
    slots: Array  # (n,) int64, where its key and value go, as the cache counts
    cu_seqlens: Array  # (B + 1,) int32, new tokens before each sequence
    seqused: Array  # (B,) int32, keys of each sequence, the new ones included
    last: Array  # (L,) int64, row of the last new token of each sequence that has one
    max_new: int
    prefill: bool  # the new tokens are all there is: the cache was empty

    @classmethod
    def pack(
        cls, xp: Any, new: Sequence[Sequence[int]], cached: Sequence[int], cache: Cache
    ) -> Step:
        """The `new` tokens of each sequence after its `cached` ones, in places of the cache."""
        counts, cached = np.array([len(tokens) for tokens in new]), np.array(cached)
        ends = np.cumsum(counts)
        sequence = np.repeat(np.arange(len(new)), counts)
        positions = np.arange(ends[-1]) + (cached - ends + counts)[sequence]
        return cls(
            tokens=xp.asarray(np.concatenate(new).astype(np.int64)),
            positions=xp.asarray(positions),
            slots=xp.asarray(cache.slots(sequence, positions)),
            cu_seqlens=xp.asarray(np.append(0, ends).astype(np.int32)),
            seqused=xp.asarray((cached + counts).astype(np.int32)),
            last=xp.asarray(ends[counts > 0] - 1),
            max_new=int(counts.max()),
            prefill=not cached.any(),
        )


class Cache(Protocol):
    """Keys and values of every layer. Slots that no token has filled hold anything: rawattn never
    reads past the length of a sequence.
    """

    def slots(self, sequence: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Where tokens at these positions of sequences go, int64."""

    def write(self, layer: int, slots: Array, k: Array, v: Array) -> None:
        """Puts the ``(n, kv_heads, head_dim)`` keys and values of one layer into their slots."""

    def attend(self, layer: int, q: Array, step: Step) -> Array:
        """Queries against every key of their sequence; causal: the last query sees the last key."""


class KVCache:
    """A contiguous cache: (layers, batch, capacity, kv_heads, head_dim)."""

    def __init__(self, config: Config, xp: Any, dtype: Any, batch: int, capacity: int):
        shape = (config.layers, batch, capacity, config.kv_heads, config.head_dim)
        self.capacity = capacity
        self.k = xp.empty(shape, dtype)
        self.v = xp.empty(shape, dtype)

    def slots(self, sequence: np.ndarray, positions: np.ndarray) -> np.ndarray:
        return sequence * self.capacity + positions

    def write(self, layer: int, slots: Array, k: Array, v: Array) -> None:
        for cache, new in ((self.k, k), (self.v, v)):
            cache[layer].reshape(-1, *new.shape[1:])[slots] = new

    def attend(self, layer: int, q: Array, step: Step) -> Array:
        return rawattn.flash_attn_varlen_func(
            q,
            self.k[layer],
            self.v[layer],
            step.cu_seqlens,
            seqused_k=step.seqused,
            max_seqlen_q=step.max_new,
            causal=True,
        )


class Llama:
    """The weights on one device, and the forward pass."""

    def __init__(self, checkpoint: Checkpoint, xp: Any, dtype: Any):
        self.checkpoint, self.config, self.xp, self.dtype = checkpoint, checkpoint.config, xp, dtype
        self.embedding = xp.asarray(checkpoint.embedding)
        self.norm = xp.asarray(checkpoint.norm)
        self.layers = [
            Layer(**{f.name: xp.asarray(getattr(layer, f.name)) for f in fields(Layer)})
            for layer in checkpoint.layers
        ]
        self.cos, self.sin = (xp.asarray(t.astype(np.float32)) for t in _rotations(self.config))

    def forward(self, step: Step, cache: Cache) -> Array:
        """Appends the new tokens to the cache; ``(L, vocabulary)`` logits after the last ones."""
        x = self.embedding[step.tokens]
        for index, layer in enumerate(self.layers):
            x = x + self._attention(index, layer, x, step, cache)
            x = x + self._feed_forward(layer, x)
        return self._rms_norm(x[step.last], self.norm) @ self.embedding.T

    def _attention(self, index: int, layer: Layer, x: Array, step: Step, cache: Cache) -> Array:
        c = self.config
        heads = (self._rms_norm(x, layer.attn_norm) @ layer.qkv.T).reshape(len(x), -1, c.head_dim)
        turned = self._rotate(heads[:, : c.q_heads + c.kv_heads], step.positions).astype(self.dtype)
        q, k = turned[:, : c.q_heads], turned[:, c.q_heads :]
        v = heads[:, c.q_heads + c.kv_heads :].astype(self.dtype)
        cache.write(index, step.slots, k, v)
        out = self._attend(q, k, v, step) if step.prefill else cache.attend(index, q, step)
        return out.reshape(len(x), -1).astype(np.float32) @ layer.attn_out.T

    def _attend(self, q: Array, k: Array, v: Array, step: Step) -> Array:
        """Queries against the keys that came with them, packed alike."""
        return rawattn.flash_attn_varlen_func(
            q,
            k,
            v,
            step.cu_seqlens,
            step.cu_seqlens,
            max_seqlen_q=step.max_new,
            max_seqlen_k=step.max_new,
            causal=True,
        )

    def _feed_forward(self, layer: Layer, x: Array) -> Array:
        gate, up = self.xp.split(self._rms_norm(x, layer.ffn_norm) @ layer.gate_up.T, 2, axis=-1)
        silu = gate * (0.5 + 0.5 * self.xp.tanh(0.5 * gate))  # x * sigmoid(x) that cannot overflow
        return (silu * up) @ layer.ffn_down.T

    def _rms_norm(self, x: Array, weight: Array) -> Array:
        mean_square = (x * x).mean(axis=-1, keepdims=True)
        return x / self.xp.sqrt(mean_square + self.config.norm_eps) * weight

    def _rotate(self, x: Array, positions: Array) -> Array:
        """Turns coordinates 2 i and 2 i + 1 of ``(n, heads, head_dim)``, i-th frequency."""
        cos, sin = self.cos[positions][:, None], self.sin[positions][:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return self.xp.stack((even * cos - odd * sin, odd * cos + even * sin), axis=-1).reshape(
            x.shape
        )


def _rotations(config: Config) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine for every position and frequency, ``(context, head_dim / 2)`` float64."""
    frequencies = config.rope_base ** (-np.arange(0, config.head_dim, 2) / config.head_dim)
    angles = np.arange(config.context)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)
