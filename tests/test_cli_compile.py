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


def ones(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float16)


def compiled(line: str) -> set[tuple[str, Config]]:
    found = compile_command.of_calls(parser().parse_args(["compile", *line.split()]), H200)
    assert len(set(found)) == len(found)
    return set(found)


def launches(function: Any, *arrays: Any, **arguments: Any) -> set[tuple[str, Config]]:
    """What a call on such a GPU launches."""
    with emulated("H200"):
        made = rawattn.prepare(function, *arrays, **arguments)
        return {(x.kernel, x.config) for plan in made.plans for x in plan.launches}


def launched(batch: int, q_len: int, **arguments: Any) -> set[tuple[str, Config]]:
    """Of attention over pages of 16 tokens, 3 a sequence."""
    blocks = 3 * batch
    stored = np.uint8 if "kv_cache_dtype" in arguments else np.float16
    shapes = {
        "NHD": [(blocks, 16, 2, 64)] * 2,
        "x-major": [(blocks, 2, 8, 16, 8), (blocks, 2, 64, 16)],
    }[arguments.get("layout", "NHD")]
    packed = "cu_seqlens_q" in arguments
    q = np.zeros((batch * q_len, 4, 64) if packed else (batch, q_len, 4, 64), np.float16)
    new = [q[..., :2, :], q[..., 2:, :]] if arguments.pop("append", False) else []
    caches = [np.zeros(shape, stored) for shape in shapes]
    where = {
        "block_table": np.arange(blocks, dtype=np.int32).reshape(batch, 3),
        "cache_seqlens": np.full(batch, 32, np.int32),
        "max_seqlen_k": 40,
    }
    if "kv_indptr" in arguments:
        del where["block_table"], where["cache_seqlens"]
    function = rawattn.flash_attn_with_kvcache
    if "common_prefix_len" in arguments:
        function, where["block_table"][:, 0] = rawattn.cascade_attention, 0
    return launches(function, q, *caches, *new, **where, **arguments)


STARTS = {"cu_seqlens_q": np.array([0, 2, 4, 6], np.int32), "max_seqlen_q": 2}
TREE = {"tree_mask": np.tril(np.ones((3, 2, 2), bool))}
CSR = {
    "kv_indptr": np.array([0, 3, 6, 9], np.int32),
    "kv_indices": np.arange(9, dtype=np.int32),
    "kv_last_page_len": np.full(3, 8, np.int32),
}
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
    "--cache NHD --tree": ({"decode_split"}, TREE),
    "--cache x-major --csr": ({"decode_split"}, {"layout": "x-major", **CSR}),
    "--cache NHD --prefix 16 --causal": (
        {"decode_sm90", "decode_split", "merge"},
        {"common_prefix_len": 16, "causal": True},
    ),
    "--cache NHD --prefix 16 --cache-dtype fp8 --varlen": (
        {"decode_split", "merge"},
        {
            "common_prefix_len": 16,
            "kv_cache_dtype": "fp8",
            "k_descale": 0.5,
            "causal": False,
            **STARTS,
        },
    ),
}


@pytest.mark.parametrize("words", CALLS)
def test_what_a_call_over_pages_launches_is_compiled(words: str) -> None:
    kernels, arguments = CALLS[words]
    line = "--batch 3 --q-len 2 --k-len 40 --heads 4 --kv-heads 2 --head-dim 64 --dtype float16"
    found = compiled(f"{line} {words}")
    assert {kernel for kernel, _ in found} == kernels
    assert found == launched(3, 2, **arguments)


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_a_row_with_padding_in_front_is_compiled(layout: str) -> None:
    line = f"--batch 3 --q-len 2 --k-len 40 --heads 4 --kv-heads 2 --head-dim 64 --cache {layout}"
    shape = (3, 40, 2, 64) if layout == "NHD" else (3, 2, 40, 64)
    q, cache, three = ones(3, 2, 4, 64), ones(*shape), np.full(3, 3, np.int32)
    found = compiled(f"{line} --dtype float16 --leftpad")
    assert {kernel for kernel, _ in found} == {"sequences", "decode_split"}
    assert found == launches(
        rawattn.flash_attn_with_kvcache,
        *(q, cache, cache),
        **{"cache_seqlens": three, "cache_leftpad": three, "layout": layout},
    )


def test_merging_is_compiled() -> None:
    line, two = "--batch 2 --q-len 3 --heads 4 --head-dim 64 --dtype float16", ones(2, 6, 4, 64)
    lses, (first, other) = np.ones((2, 4, 6), np.float32), two
    merged = launches(rawattn.merge_states, two, lses)
    assert compiled(f"{line} --merge 2") == merged and len(merged) == 1
    assert merged == launches(rawattn.merge_attn_states, None, *(first, lses[0], other, lses[1]))
    three = ones(3, 6, 4, 64), np.ones((3, 4, 6), np.float32)
    assert compiled(f"{line} --merge 3") == launches(rawattn.merge_states, *three) != merged
    out = np.zeros((6, 4, 64), np.uint8)
    in_fp8 = launches(
        rawattn.merge_attn_states, out, *(first, lses[0], other, lses[1]), output_scale=0.5
    )
    assert compiled(f"{line} --merge 2 --output-scale") == in_fp8 != merged


@pytest.mark.parametrize(
    ("words", "caches"),
    [
        ("--cache NHD", [(5, 16, 2, 64)] * 2),
        ("--cache x-major", [(5, 2, 8, 16, 8), (5, 2, 64, 16)]),
        ("--cache HND --page 1 --head-dim 3 --value-dim 2", [(5, 2, 1, 3), (5, 2, 1, 2)]),
    ],
)
def test_copying_blocks_is_compiled(words: str, caches: Any) -> None:
    line = f"--heads 4 --kv-heads 2 --head-dim 64 --dtype float16 --copy-blocks 3 {words}"
    k, v = ([ones(*shape)] for shape in caches)
    pairs = np.array([[0, 1]] * 3) * 0
    assert compiled(line) == launches(rawattn.copy_blocks, k, v, pairs)


def test_the_plan_of_a_cascade(run: Any) -> None:
    """Of the whole cascade, or why nobody takes a part of it."""
    line = "plan --device H200 --batch 8 --q-len 1 --k-len 4096 --heads 32 --cache HND --json"
    facts = run(f"{line} --prefix 1024").facts
    assert [x["kernel"] for x in facts["launches"]][-1] == "merge" and len(facts["launches"]) == 3
    assert (facts["problem"]["batch"], facts["problem"]["max_k"]) == (8, 4096)
    assert facts["backend"] == "decode_split"
    found = run(f"{line} --prefix 1024 --batch 3000 --backend paged_v2")
    assert found.code == 2
    assert "attention to the shared prefix: no backend" in found.facts["message"]


@pytest.mark.parametrize(
    ("line", "kernel"),
    [
        ("--cache x-major --page 16", "decode_split"),
        ("--cache x-major --page 4 --kv-heads 16", "paged_v2"),
        ("--cache NHD --cache-dtype fp8", "decode_split"),
        ("--cache HND --csr", "decode_split"),
        ("--cache x-major --csr --cache-dtype int8", "decode_split"),
    ],
)
def test_the_plan_of_a_cache_is_whole(run: Any, line: str, kernel: str) -> None:
    """Tiles, grid, shared memory, and why others were passed over."""
    line = f"plan --device H200 --batch 4 --q-len 1 --k-len 8000 --heads 16 {line}"
    facts = run(f"{line} --json").facts
    first = facts["launches"][0]
    assert first["kernel"] == kernel == facts["backend"]
    shown = " ".join(run(line).out.split())
    assert f"grid {first['grid']}" in shown and f"smem_bytes {first['smem_bytes']}" in shown
    assert first["grid"] > 0 and f"head_dim {first['config']['head_dim']}" in shown
    passed_over = [reason.split(": ")[0] for reason in facts["passed_over"]]
    assert passed_over == ([] if kernel == "decode_split" else ["decode_split", "fwd_sm90_paged"])
    assert all(reason.split()[0] in shown for reason in facts["passed_over"])


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
        ("compile --tree", "--tree: says nothing without --cache"),
        ("compile --all --merge 2", "--merge: says nothing with --all"),
        ("compile --merge 2 --cache NHD", "--cache: says nothing with --merge"),
        ("compile --merge 2 --batch 0", "batch=0, q_len=4096: accepted are problems with"),
        ("plan --merge 3 --output-scale", "merge=3: with --output-scale accepted is 2"),
        ("plan --output-scale", "--output-scale: says nothing without --merge"),
        ("plan --merge 2 --dtype int8", "dtype='int8': accepted are float16"),
        ("plan --merge 2 --backend fast", "backend='fast': accepted are merge, reference"),
        ("plan --merge 0", "--merge: '0': accepted are integers from 1"),
        ("plan --copy-blocks 9", "--copy-blocks: says nothing without --cache"),
        ("plan --cache NHD --copy-blocks 9 --q-len 1", "--q-len: says nothing with --copy-blocks"),
        ("plan --cache NHD --copy-blocks 9 --tree", "--tree: says nothing with --copy-blocks"),
        ("plan --cache NHD --leftpad --page 8", "--page: says nothing with --leftpad"),
        ("plan --cache x-major --leftpad", "leftpad: accepted with layout NHD and HND"),
        ("plan --cache NHD --prefix 16 --window 3 0", "--window: says nothing with --prefix"),
        ("plan --cache NHD --prefix 16 --append", "--append: says nothing with --prefix"),
        ("plan --cache NHD --prefix 17", "common_prefix_len=17: accepted are multiples of the 16"),
        ("plan --cache NHD --tree --causal", "causal=True: with tree_mask, which says"),
        ("plan --cache NHD --csr --append", "--append: says nothing with --csr"),
    ],
)
def test_what_is_not_accepted(run: Any, line: str, words: str) -> None:
    code, out, err = run(f"{line} --device H200")
    assert (code, out) == (2, "") and words in err
