# SPDX-License-Identifier: Apache-2.0
"""What one step of decoding reads: all weights once, and the keys and values of every context.

Nothing else of a step comes near, so its least time is these bytes over the bandwidth of memory,
however good a kernel is.
"""

from __future__ import annotations

from dataclasses import dataclass

from rawattn.device import Device
from rawattn.roofline.roofs import peaks


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What decoding a language model moves."""

    name: str
    layers: int
    q_heads: int
    kv_heads: int
    head_dim: int
    weight_bytes: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.q_heads // self.kv_heads

    def kv_bytes_per_token(self, itemsize: int = 2) -> int:
        """Keys and values of a token, of all layers; `itemsize` is 2 for fp16 and bf16, 1 for
        fp8.
        """
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize

    def kv_outweighs_at(self, itemsize: int = 2) -> int:
        """Tokens (batch x context) from which on a step reads more of the cache than of weights."""
        return self.weight_bytes // self.kv_bytes_per_token(itemsize)


# 16 GB of bf16 weights, as they are commonly counted.
MODELS = {
    "llama-3-8b": Model(
        name="Llama-3-8B",
        layers=32,
        q_heads=32,
        kv_heads=8,
        head_dim=128,
        weight_bytes=16 * 10**9,
    ),
    "llama-3-70b": Model(
        name="Llama-3-70B",
        layers=80,
        q_heads=64,
        kv_heads=8,
        head_dim=128,
        weight_bytes=141 * 10**9,
    ),
    "smollm2-135m": Model(
        name="SmolLM2-135M",
        layers=30,
        q_heads=9,
        kv_heads=3,
        head_dim=64,
        weight_bytes=269 * 10**6,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The least that one step of decoding reads, and takes."""

    weight_bytes: int
    kv_bytes: int
    seconds: float

    @property
    def kv_share(self) -> float:
        """The part of the bytes, hence of the time, that the cache takes."""
        return self.kv_bytes / (self.kv_bytes + self.weight_bytes)


def step(model: Model, batch: int, context: int, device: Device, *, itemsize: int = 2) -> Step:
    """A token for each of `batch` sequences of `context` tokens. ValueError: unknown bandwidth."""
    _, gb_per_s = peaks(device)
    kv = batch * context * model.kv_bytes_per_token(itemsize)
    return Step(
        weight_bytes=model.weight_bytes,
        kv_bytes=kv,
        seconds=(model.weight_bytes + kv) / (1e9 * gb_per_s),
    )


def intensity(group: int, itemsize: int = 2) -> float:
    """FLOPs a byte of decoding attention: each key and value serves `group` query heads."""
    return 2 * group / itemsize


def page_bytes(page: int, head_dim: int, itemsize: int = 2) -> int:
    """Bytes of keys, or of values, that lie together in a page of one KV head."""
    return page * head_dim * itemsize


def resident_share(blocks: int, threads: int, sms: int, threads_per_sm: int = 2048) -> float:
    """The part of a GPU's threads that a grid can fill, at most 1."""
    return min(1.0, blocks * threads / (sms * threads_per_sm))
