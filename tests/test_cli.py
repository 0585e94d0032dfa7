# SPDX-License-Identifier: Apache-2.0
"""``python -m rawattn``: facts are those of the library, and scripts can rely on exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rawattn
from rawattn import device, plan
from rawattn.__main__ import main, parser
from rawattn.cli import flags, info, text
from rawattn.device import Device
from rawattn.plan.fwd_sm90 import DYNAMIC
from rawattn.problem import Problem

pytest_plugins = ("tests.cli",)
H200 = Device.named("H200")
ROOT = Path(__file__).resolve().parent.parent
COMMANDS = ("info", "plan", "roofline", "compile", "cache", "selftest", "bench")


def test_every_command_speaks_json() -> None:
    for command in COMMANDS:
        assert parser().parse_args([command, "--json"]).json


# ---- plan ----------------------------------------------------------------------------------------


def problem(line: str) -> Problem:
    return flags.problem(parser().parse_args(["plan", *line.split()]))


def ones(*shape: int, dtype: str = "bfloat16") -> np.ndarray[Any, Any]:
    return np.ones(shape, np.dtype(dtype))


def prepared(function: Any, *arrays: Any, **arguments: Any) -> Problem:
    return rawattn.prepare(function, *arrays, **arguments).plan.problem


def test_flags_state_the_problem_of_the_call() -> None:
    dense = rawattn.flash_attn_func
    q, k = ones(2, 3, 4, 20), ones(2, 5, 4, 20)
    line = "--batch 2 --q-len 3 --k-len 5 --heads 4 --head-dim 20"
    assert problem(line) == prepared(dense, q, k, k)
    assert problem(line + " --causal") == prepared(dense, q, k, k, causal=True)
    assert problem(line + " --causal top_left --window 7 -1") == prepared(
        dense, q, k, k, causal="top_left", window_size=(7, -1)
    )
    per_head = np.ones(4, np.float32)
    assert problem(line + " --alibi --sink --softcap 3.5") == prepared(
        dense, q, k, k, alibi_slopes=per_head, sink=per_head, softcap=3.5
    )
    line = "--q-len 9 --heads 6 --kv-heads 2 --head-dim 7 --value-dim 16 --dtype float16"
    q, k, v = (ones(1, 9, *x, dtype="float16") for x in ((6, 7), (2, 7), (2, 16)))
    assert problem(line) == prepared(dense, q, k, v)


def test_varlen_flags_state_the_problem_of_the_call() -> None:
    q, k, starts = ones(6, 4, 64), ones(10, 4, 64), np.zeros(3, np.int32)
    line = "--varlen --batch 2 --q-len 3 --k-len 5 --heads 4 --head-dim 64"
    varlen = rawattn.flash_attn_varlen_func
    bounds = {"max_seqlen_q": 3, "max_seqlen_k": 5}
    assert problem(line) == prepared(varlen, q, k, k, starts, starts, **bounds)


def test_plan_says_what_the_planner_says(run: Any) -> None:
    line = "--device H200 --batch 2 --head-dim 80 --causal --softcap 3"
    made = plan.plan(problem(line), H200)
    (launch,) = made.launches
    facts = run(f"plan --json {line}").facts
    assert facts["backend"] == made.backend
    (found,) = facts["launches"]
    scalars = dict(launch.scalars)
    assert found["grid"] == launch.grid
    assert found["scalars"] == scalars | {"schedule": "dynamic"} and scalars["schedule"] == DYNAMIC
    assert found["threads"] == launch.config.threads
    assert found["smem_bytes"] == launch.config.smem_bytes
    assert {name: getattr(launch.config, name) for name in found["config"]} == found["config"]
    shown = run(f"plan {line}").out
    for word in (
        made.backend,
        f"grid {launch.grid}",
        f"block_n {launch.config.block_n}",
        "workspace",
    ):
        assert word in " ".join(shown.split())


def test_plan_shows_no_scalars_that_only_divide(run: Any) -> None:
    line = "plan --device H200 --q-len 1 --k-len 8192 --cache NHD --json"
    (launch,) = run(line).facts["launches"]
    assert launch["kernel"] == "decode_split"
    names = ["columns", "rows", "lines", "row_blocks", "span", "column_slots"]
    assert list(launch["scalars"]) == names


def test_plan_names_the_backends_passed_over(run: Any) -> None:
    found = run("plan --device host --json")
    assert (found.code, found.facts["backend"]) == (0, "reference")
    names = [backend.name for backend in plan.BACKENDS if backend.name != "reference"]
    assert [reason.split(": ")[0] for reason in found.facts["passed_over"]] == names
    assert all("found NumPy arrays" in reason for reason in found.facts["passed_over"])


def test_unsupported_exits_with_2_and_every_reason(run: Any) -> None:
    found = run("plan --device H200 --dtype float32")
    assert found.code == 2
    assert "fwd_sm80: dtype float32" in found.out and "reference: takes NumPy" in found.out
    forced = run("plan --device H200 --backend reference --json")
    assert forced.code == 2 and forced.facts["backend"] is None
    assert forced.facts["passed_over"] == [
        "reference: takes NumPy arrays, found arrays on NVIDIA H200"
    ]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan --device K80", "accepted are host, A100"),
        ("plan --device H200 --heads 7 --kv-heads 2", "accepted are multiples"),
        ("plan --device H200 --window -2 0", "accepted are integers from -1"),
        ("plan --device H200 --dtype fp4", "accepted are float16"),
        ("plan --device H200 --dtype int32", "accepted are float16"),
        ("plan --device H200 --backend fast", "accepted are "),
        ("roofline --device host", "accepted are A100, H100"),
        ("compile --arch sm_70", "accepted are sm_80"),
        ("compile --device host", "nothing to compile"),
        ("compile --device H200 --head-dim 300", "takes up to 256"),
        ("compile --device H200 --batch 0", "batch=0, q_len=4096: accepted are problems with"),
        ("compile --arch sm_80 --q-len 0", "q_len=0: accepted are problems with"),
        ("compile --device H200 --arch sm_80", "--arch: not allowed with argument --device"),
        ("compile --arch sm_80 --jobs 0", "--jobs: '0': accepted are integers from 1"),
        ("plan --batch -1", "--batch: '-1': accepted are integers from 0"),
        ("plan --causal up", "invalid choice: 'up'"),
        ("cache burn", "invalid choice: 'burn'"),
        ("fly", "invalid choice: 'fly'"),
    ],
)
def test_what_is_not_accepted_exits_with_2(run: Any, line: str, words: str) -> None:
    found = run(line)
    assert (found.code, found.out) == (2, "") and words in found.err
    found = run(f"{line} --json")
    assert found.code == 2 and words in found.facts["message"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "--batch 1000000 --heads 100",
            "fwd_sm80: a grid of 3200000000 blocks: takes up to 2147483647",
        ),
        ("--q-len 1073741825", "1073741825 queries and 1073741825 keys: takes up to 1073741824"),
        ("--k-len 1073741825", "4096 queries and 1073741825 keys: takes up to 1073741824"),
        ("--cache NHD --k-len 1073741825", "and 1073741825 keys: takes up to 1073741824"),
        ("--cache HND --q-len 1 --k-len 2147483647", "2147483647 keys: takes up to 1073741824"),
    ],
)
def test_what_is_too_large_to_launch_is_not_planned(run: Any, line: str, words: str) -> None:
    found = run(f"plan --device H200 {line} --json")
    assert found.code == 2 and any(words in reason for reason in found.facts["passed_over"])
    assert run(f"compile --device H200 {line}").code == 2


def test_the_largest_grid_and_the_longest_sequence_are_planned(run: Any) -> None:
    largest = f"plan --device H200 --heads 1 --q-len 128 --batch {2**31 - 1} --json"
    assert run(largest).facts["launches"][0]["grid"] == 2**31 - 1
    assert run("plan --device H200 --heads 1 --q-len 1073741824").code == 0
    found = run("plan --device H200 --q-len 1 --cache NHD --k-len 1073741824 --json")
    assert (found.code, found.facts["problem"]["max_k"]) == (0, 2**30)


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"rawattn {rawattn.__version__}\n"


@pytest.mark.parametrize(
    ("command", "names"),
    [("plan", "host, A100, H100"), ("compile", "A100, H100"), ("roofline", "all, A100, H100")],
)
def test_without_a_gpu_the_error_says_what_to_name(
    run: Any, no_gpu: None, command: str, names: str
) -> None:
    found = run(command)
    assert (found.code, found.out) == (1, "")
    assert "no CUDA GPU here" in found.err and f"--device takes another: {names}" in found.err
    assert run(f"{command} --json").facts["error"] == "RuntimeError"


# ---- info ----------------------------------------------------------------------------------------

NOTHING = """
import runpy, sys
for name in ("numpy", "ml_dtypes", "cupy", "cuda", "cuda.bindings", "rich"):
    sys.modules[name] = None
sys.argv = ["rawattn", "info", "--json"]
runpy.run_module("rawattn", run_name="__main__")
"""


def test_info_runs_with_nothing_installed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NOTHING],
        cwd=ROOT,
        env={**os.environ, "PATH": "", "CXX": "g++", "RAWATTN_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "need CuPy" in facts["device"] and "cuda-bindings" in facts["compiler"]
    assert facts["compiler"].startswith("not here: ")
    assert facts["g++ (emulator)"] == "not here: the emulator needs 12 or newer"
    assert facts["gpus"] == [] and facts["cache"]["entries"] == 0
    for backend in facts["backends"]:
        assert backend["runs_here"] == (backend["name"] == "reference")


def test_info_shows_what_is_here(run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho 'NVIDIA H200, 580.1'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(Device, "current", staticmethod(lambda device_id=None: H200))
    monkeypatch.setattr(info, "_compiler", lambda: {"nvrtc": "13.0"})
    facts = run("info --json").facts
    assert facts["gpus"] == ["NVIDIA H200, driver 580.1"]
    assert facts["device"]["arch"] == "sm_90a"
    assert all(backend["runs_here"] for backend in facts["backends"])
    assert rawattn.__version__ in run("info").out


def test_info_shows_the_environment(
    run: Any, monkeypatch: pytest.MonkeyPatch, backend: Callable[[str], None], folder: Path
) -> None:
    backend("fast")
    environment = run("info --json").facts["environment"]
    assert environment["RAWATTN_BACKEND"] == "fast"
    assert environment["RAWATTN_CACHE_DIR"] == str(folder)
    assert all(name.startswith("RAWATTN_") for name in environment)


def test_info_says_why_a_backend_cannot_run() -> None:
    for backends, typical in info.operations().values():
        *kernels, on_host = backends
        assert info.why_not(on_host, typical, "no GPU", "no NVRTC") is None
        for kernel in kernels:
            assert info.why_not(kernel, typical, "no GPU", {}) == "no GPU"
            assert info.why_not(kernel, typical, H200, "no NVRTC") == "no NVRTC"
            assert info.why_not(kernel, typical, H200, {"nvrtc": "13.0"}) is None


@pytest.mark.parametrize(
    ("says", "shown"),
    [("14.2.0", "14.2.0"), ("11.4.0", "11.4.0: the emulator needs"), ("", "not g++: the emulator")],
)
def test_info_shows_gxx(
    run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, says: str, shown: str
) -> None:
    compiler = tmp_path / "g++"
    compiler.write_text(f"#!/bin/sh\necho {says}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert run("info --json").facts["g++ (emulator)"].startswith(shown)


# ---- programs beside the package ----


@pytest.mark.parametrize(
    ("command", "code", "words"),
    [
        ("bench/run.py --suite fwd_sm80", 1, "bench/run.py: "),
        ("-m tools.gpu_tests --laws 1", 1, "tools.gpu_tests: "),
        ("-m tools.sanitizer_cases", 1, "tools.sanitizer_cases: "),
        ("-m tests.emulator.defects", 1, "tests.emulator.defects: the emulator needs g++"),
        *((f"{name} --help", 0, "") for name in ("bench/host_time.py", "-m tools.gpu_tests")),
        *(
            (f"-m {name} --help", 0, "")
            for name in ("tools.sanitizer_cases", "tests.emulator.defects")
        ),
    ],
)
def test_what_is_missing_takes_one_line(command: str, code: int, words: str) -> None:
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "CXX": "no-such-compiler"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == bool(words) and done.stderr.startswith(words)


# ---- text ----------------------------------------------------------------------------------------


def test_facts_are_lines_and_tables() -> None:
    facts = {
        "name": "x",
        "flat": {"a": 1, "b": None},
        "list": ["one", "two"],
        "none": [],
        "table": [{"key": "k", "big": 1234567}, {"key": "longer", "big": 0.5}],
        "nested": [{"grid": 3, "config": {"scores": True}}],
    }
    pad = " " * text.COLUMN
    assert text.render(facts).splitlines() == [
        f"{'name':{text.COLUMN}}x",
        f"{'flat':{text.COLUMN}}a 1, b -",
        f"{'list':{text.COLUMN}}one",
        f"{pad}two",
        f"{'none':{text.COLUMN}}none",
        "table",
        "  key     big",
        "  k       1,234,567",
        "  longer  0.5",
        "nested",
        f"{'  grid':{text.COLUMN}}3",
        f"{'  config':{text.COLUMN}}scores yes",
    ]
    long = text.render({"words": " ".join(["word"] * 60)}).splitlines()
    assert len(long) > 2 and all(len(line) <= text.WIDTH for line in long)
    assert all(line.startswith(pad + "word") for line in long[1:])


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "rawattn", "plan", "--device", "A100", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["backend"] == "fwd_sm80"
    assert device.DEVICES["A100"].name == json.loads(done.stdout)["device"]["name"]


def test_no_command_exits_with_2(run: Any) -> None:
    found = run("--json")
    assert found.code == 2 and found.facts["error"] == "UsageError"
    assert found.err.endswith("COMMAND. See python -m rawattn --help\n")


@pytest.mark.parametrize("line", ["plan --device H200", "plan --device H200 --json", "--help"])
@pytest.mark.parametrize("output", ["full", "closed"])
def test_output_that_cannot_be_written_exits_with_1(line: str, output: str) -> None:
    read, write = os.pipe()
    os.close(read)
    with open("/dev/full" if output == "full" else write, "w") as stdout:
        if output == "full":
            os.close(write)
        done = subprocess.run(
            [sys.executable, "-m", "rawattn", *line.split()],
            cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": ""},  # else argparse ignores that --help fails
            stdout=stdout,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    full = "rawattn: cannot write the output: [Errno 28] No space left on device\n"
    assert done.stderr == (full if output == "full" else "")
