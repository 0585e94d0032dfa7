# SPDX-License-Identifier: Apache-2.0
"""``python -m rawattn roofline``: facts are those of the library."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rawattn import device, roofline
from rawattn.__main__ import parser
from rawattn.cli import flags
from rawattn.device import Device
from rawattn.problem import Problem

pytest_plugins = ("tests.cli",)
H200, H100 = Device.named("H200"), Device.named("H100")
ROOT = Path(__file__).resolve().parent.parent


def problem(line: str) -> Problem:
    return flags.problem(parser().parse_args(["roofline", *line.split()]))


def test_roofline_says_what_the_library_says(run: Any) -> None:
    line = "--device H200 --batch 4 --q-len 1 --k-len 8192 --heads 32 --kv-heads 8"
    limit = roofline.limit(problem(line), H200)
    facts = run(f"roofline --json {line}").facts
    assert (facts["flops"], facts["least_bytes"]) == (limit.work.flops, limit.work.bytes)
    assert facts["bound"] == limit.bound == "memory"
    assert facts["limit_us"] == pytest.approx(1e6 * limit.seconds)
    assert facts["flops_per_byte"] < facts["ridge"]
    assert run("roofline --device H200 --batch 0 --json").facts["flops_per_byte"] is None


def test_roofline_lists_algorithms_and_devices(run: Any) -> None:
    line = "--heads 1 --tiles 256 64 --causal"
    facts = run(f"roofline --device all --json {line}").facts
    moved = [algorithm["bytes"] for algorithm in facts["algorithms"]]
    p = problem("--heads 1 --causal")
    assert moved == [
        roofline.standard(p).total,
        roofline.keys_outside(p, 256, 64).total,
        roofline.queries_outside(p, 256, 64).total,
        roofline.work(p).bytes,
    ]
    assert [d["device"] for d in facts["devices"]] == [d.name for d in device.DEVICES.values()]
    a100 = run(f"roofline --device A100 --json {line}").facts
    assert a100.items() >= facts["devices"][0].items()
    assert a100["exp_over_matmul"] == 0.25
    assert "FlashAttention-1" in run(f"roofline --device all {line}").out


def test_roofline_of_a_model(run: Any) -> None:
    line = "roofline --device H100 --model llama-3-8b --batch 32 --k-len 8192 --json"
    facts, step = run(line).facts, roofline.step(roofline.MODELS["llama-3-8b"], 32, 8192, H100)
    assert (facts["kv_bytes"], facts["context"]) == (step.kv_bytes, 8192)
    assert facts["step_ms"] == pytest.approx(1e3 * step.seconds)
    small = run(f"{line} --kv-bits 8 --weight-bits 4").facts
    assert small["kv_bytes"] * 2 == facts["kv_bytes"]
    assert small["weight_bytes"] * 4 == facts["weight_bytes"]
    assert small["flops_per_byte"] == 2 * facts["flops_per_byte"]
    found = run("roofline --device H100 --model gpt")
    assert found.code == 2 and "accepted are llama-3-8b" in found.err


def test_roofline_draws_rows_under_its_roofs(run: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = ROOT / "bench/results/nvidia-h200/fwd_sm80.csv"
    line = f"roofline --device H200 --plot {tmp_path}/x.png --json"
    facts = run(f"{line} --rows {rows}").facts
    assert facts["points"] >= 72 and (tmp_path / "x.png").read_bytes()[1:4] == b"PNG"
    assert run(line).facts["points"] == 0
    (tmp_path / "y.csv").write_text("a,b\n1,2\n")
    for wrong, words in (
        (f"{line} --rows {tmp_path}/y.csv", "has no column gpu"),
        (f"{line} --rows {tmp_path}/z.csv", "z.csv': accepted are CSV files, and there is none"),
        (f"{line.replace('H200', 'A100')} --rows {rows}", "has no row of NVIDIA A100"),
        (line.replace("H200", "all"), "accepted is one device"),
    ):
        found = run(wrong)
        assert found.code == 2 and words in found.facts["message"]


def test_a_plot_without_matplotlib_says_what_to_install(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    found = run(f"roofline --device H200 --plot {tmp_path}/x.png")
    assert found.code == 1 and "pip install '.[bench]' in the clone" in found.err
