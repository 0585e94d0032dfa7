# SPDX-License-Identifier: Apache-2.0
"""``python -m rawattn compile`` compiles what the calls of its flags launch, and nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn.__main__ import parser
from rawattn.cli import compile as compile_command
from rawattn.device import Device
from rawattn.plan.base import REFERENCE, Plan, choose
from rawattn.registry import Config
from tools.emulator.api import emulated

pytest_plugins = ("tests.cli",)
H200 = Device.named("H200")


def compiled(line: str) -> set[tuple[str, Config]]:
    found = compile_command.of_calls(parser().parse_args(["compile", *line.split()]), H200)
    assert len(set(found)) == len(found)
    return set(found)


def launched(batch: int, q_len: int, **arguments: Any) -> set[tuple[str, Config]]:
    """What a call on such a GPU launches, over pages of 16 tokens, 3 a sequence."""
    blocks = 3 * batch
    stored = np.uint8 if "kv_cache_dtype" in arguments else np.float16
    shapes = {
        "NHD": [(blocks, 16, 2, 64)] * 2,
        "x-major": [(blocks, 2, 8, 16, 8), (blocks, 2, 64, 16)],
    }[arguments.get("layout", "NHD")]
    packed = "cu_seqlens_q" in arguments
    q = np.zeros((batch * q_len, 4, 64) if packed else (batch, q_len, 4, 64), np.float16)
    new = [q[..., :2, :], q[..., 2:, :]] if arguments.pop("append", False) else []
    table = np.arange(blocks, dtype=np.int32).reshape(batch, 3)
    caches = [np.zeros(shape, stored) for shape in shapes]
    lengths = {"cache_seqlens": np.zeros(batch, np.int32), "max_seqlen_k": 40}
    with emulated("H200"):
        made = rawattn.prepare(
            rawattn.flash_attn_with_kvcache,
            *(q, *caches, *new),
            block_table=table,
            **lengths,
            **arguments,
        )
        return {(x.kernel, x.config) for plan in made.plans for x in plan.launches}


STARTS = {"cu_seqlens_q": np.array([0, 2, 4, 6], np.int32), "max_seqlen_q": 2}
TABLES = dict.fromkeys(("rotary_cos", "rotary_sin"), np.zeros((40, 16), np.float16))
CALLS: dict[str, tuple[set[str], dict[str, Any]]] = {
    "--cache NHD": ({"decode_split"}, {}),
    "--cache x-major --causal": ({"decode_split"}, {"layout": "x-major", "causal": True}),
    "--cache NHD --append": ({"kv_write", "decode_split"}, {"append": True}),
    "--cache NHD --append --rotary 32 --causal": (
        {"kv_write", "rotary", "decode_split"},
        {"append": True, "causal": True, **TABLES},
    ),
    "--cache NHD --varlen --append": (
        {"kv_write", "sequences", "decode_split"},
        {"append": True, "cu_seqlens_k_new": STARTS["cu_seqlens_q"], **STARTS},
    ),
    "--cache NHD --append --cache-dtype fp8": (
        {"kv_write", "decode_split"},
        {"append": True, "kv_cache_dtype": "fp8", "k_descale": 0.5},
    ),
    "--cache NHD --backend paged_v1": ({"paged_v1"}, {"backend": "paged_v1"}),
}


@pytest.mark.parametrize("words", CALLS)
def test_what_a_call_over_pages_launches_is_compiled(words: str) -> None:
    kernels, arguments = CALLS[words]
    line = "--batch 3 --q-len 2 --k-len 40 --heads 4 --kv-heads 2 --head-dim 64 --dtype float16"
    found = compiled(f"{line} {words}")
    assert {kernel for kernel, _ in found} == kernels
    assert found == launched(3, 2, **arguments)


def test_a_plan_shows_what_is_compiled(run: Any) -> None:
    line = "--device H200 --q-len 1 --k-len 900 --heads 32 --kv-heads 8 --cache HND --append"
    facts = run(f"plan {line} --rotary 64 --json").facts
    shown = {(x["kernel"], tuple(x["config"].values())) for x in facts["launches"]}
    found = compiled(f"{line} --rotary 64")
    assert {kernel for kernel, _ in found} == {"kv_write", "rotary", "decode_split"}
    assert shown == {
        (kernel, tuple(getattr(config, name) for name in config.__slots__))
        for kernel, config in found
    }


def test_several_batches_and_lengths_are_all_compiled() -> None:
    heads = "--heads 32 --kv-heads 8 --cache NHD --causal"
    found = compiled(f"--batch 1 256 --q-len 1 64 --k-len 256 8192 {heads}")
    each = [
        compiled(f"--batch {batch} --q-len {q_len} --k-len {k_len} {heads}")
        for batch in (1, 256)
        for q_len in (1, 64)
        for k_len in (256, 8192)
    ]
    assert found == set().union(*each)
    assert len(found) > max(map(len, each))
    assert compiled("--q-len 64 4096") == compiled("--q-len 64") | compiled("--q-len 4096")


def options(command: str) -> set[str]:
    (commands,) = (a for a in parser()._actions if isinstance(a, argparse._SubParsersAction))
    return set(commands.choices[command]._option_string_actions)


def test_plan_and_compile_take_the_same_flags() -> None:
    assert options("compile") - options("plan") == {"--all", "--arch", "--jobs"}
    assert options("plan") <= options("compile")


def test_the_kernels_of_a_decode_step_lie_in_the_cache(run: Any, folder: Path) -> None:
    line = "--q-len 1 --k-len 64 --heads 4 --head-dim 64 --cache NHD --append --rotary 64"
    made = run(f"compile --arch sm_80 {line} --json")
    assert made.code == 0, made.err
    names = [path.name.split("-")[0] for path in folder.iterdir()]
    assert sorted(names) == ["decode_split", "kv_write", "rotary"]
    assert made.facts["ready"] == 3


def test_a_step_before_attention_that_nobody_takes(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody(problem: Any, device: Device) -> Plan:
        return choose((REFERENCE,), problem, device, None)

    monkeypatch.setattr("rawattn.plan.kv_write.plan", nobody)
    line = "--device H200 --q-len 1 --k-len 64 --cache NHD"
    assert run(f"plan {line}").code == 0
    for command in ("plan", "compile"):
        code, out, err = run(f"{command} {line} --append")
        assert (code, out) == (2, "") and "tokens of bfloat16 into a NHD cache" in err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("compile --page 8", "--page: says nothing without --cache"),
        ("compile --append", "--append: says nothing without --cache"),
        ("compile --cache NHD --rotary 8", "--rotary: says nothing without --append"),
        ("plan --cache NHD --rotary 8", "--rotary: says nothing without --append"),
        ("compile --all --cache NHD", "--cache: says nothing with --all"),
        ("compile --all --backend fwd_sm80", "--backend: says nothing with --all"),
        ("plan --cache NHD --append --rotary 7", "rotary=7: accepted are even numbers up to head"),
        ("plan --cache NHD --append --rotary 130", "accepted are even numbers up to head_dim=128"),
        ("plan --cache NHD --append --k-len 9", "4096 tokens a sequence: accepted are up to 9"),
        ("compile --cache NHD --batch 1 0", "batch=0, q_len=4096: accepted are problems with"),
        ("plan --batch 1 2", "unrecognized arguments: 2"),
    ],
)
def test_what_is_not_accepted(run: Any, line: str, words: str) -> None:
    code, out, err = run(f"{line} --device H200")
    assert (code, out) == (2, "") and words in err
