# SPDX-License-Identifier: Apache-2.0
"""All tests that need a GPU, and the record of them, tests/gpu_record.json.

    python -m tools.gpu_tests                       everything
    python -m tools.gpu_tests --laws 3000           one part: --pytest, --laws N, --sanitizer,
                                                    --outputs (writes tests/gpu_outputs.npz)
    python -m tools.gpu_tests --check               does the record belong to the current sources?
    python -m tools.gpu_carry COMMIT                it does, if their machine code is the same

The tests of the example need gguf, tokenizers and the weights, a file that RAWATTN_EXAMPLE_WEIGHTS
may name. The record counts the tests of each file; where one with GPU tests has none that passed, a
test fails that needs no GPU.

Parts that run on the same sources and GPU add up in one record. It is also copied to the folder
$OUT, if there is one. Every Config of the GPU is compiled first, on all cores.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

from rawattn import compile, registry
from rawattn.cli.workers import program

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "gpu_record.json"
# All between a problem, on a device, and its launches. What makes problems of arguments is not
# here: tests without a GPU see each problem.
LAUNCH_CODE = (
    *("plan", "registry", "compile", "launch", "params", "tensor_map", "counters"),
    *("forward", "calls", "cache_configs", "decode_configs"),
    *("paged_prompt", "paged_steps", "ragged", "softcap"),
    *("paged_call", "cascade_call", "kv_write_call", "copy_call", "merge_call", "cache_request"),
    *("problem", "paged_problem", "cache_problem", "device"),
)
LAW_FILES = ("tests/test_laws.py", "tests/test_paged_laws.py")
EXAMPLE_FILES = ("tests/test_generate.py", "tests/test_generate_paged.py")
COUNTED = ("passed", "failed", "skipped", "why_skipped", "files", "seconds")
TESTED = ("laws", "example", "pytest")  # parts that run pytest
# The example's tests measure no time and wait for the host: they run beside the laws.
TOGETHER = (("laws", "example"), ("pytest",), ("outputs",), ("sanitizer",))
SANITIZERS = ("memcheck", "racecheck", "synccheck", "initcheck")
SANITIZER_SECONDS = 120  # for one tool
GPU_MARK = r"pytest\.mark\.gpu\b"  # in a file with GPU tests

Record = dict[str, Any]


# ---- does the record belong to the sources? ------------------------------------------------------


def sources_digest(
    code: Sequence[str] = LAUNCH_CODE, kernels: Sequence[str] = tuple(registry.KERNELS)
) -> str:
    """A digest of kernels and of modules: of those that plan, compile and launch them."""
    digest = hashlib.sha256()
    for kernel in kernels:
        digest.update(compile.sources(registry.KERNELS[kernel]).digest.encode())
    for name in code:
        for path in sorted([*ROOT.glob(f"rawattn/{name}.py"), *ROOT.glob(f"rawattn/{name}/*.py")]):
            digest.update(_code(path.read_text()).encode())
    return digest.hexdigest()[:16]


def _code(text: str) -> str:
    """Without lines of comments, which change nothing that a GPU sees. Not by way of `ast`, whose
    dumps differ from one Python to the next.
    """
    lines = text.splitlines()
    return "\n".join(x for x in lines if x.strip() and not x.lstrip().startswith("#"))


def load() -> Record:
    return json.loads(RECORD.read_text()) if RECORD.is_file() else {}


def save(record: Record) -> None:
    RECORD.write_text(json.dumps(record, indent=2) + "\n")


def status() -> str:
    """One line: whether the record was made with the current sources, and what it holds."""
    record = load()
    if not record:
        return "GPU record: there is none; `make gpu-record` on a machine with a GPU writes it"
    found = "matches the current sources"
    if record["sources"] != sources_digest():
        found = f"is of OTHER sources ({record['sources']}, not {sources_digest()})"
    elif record.get("carried"):
        found += ", which compile to the machine code that ran (tools.gpu_carry)"
    parts, laws = [record.get(name, {}) for name in ("pytest", "example")], record.get("laws", {})
    tests = {key: sum(part.get(key, 0) for part in parts) for key in COUNTED[:3]}
    left = missing(record) if counts_files(record) else []
    sanitizer = ", ".join(f"{k} {v}" for k, v in record.get("sanitizer", {}).items())
    return (
        f"GPU record: {found}. {record['gpu']}, {record['date']}: "
        f"{tests['passed']} tests passed, {tests['failed']} failed, {tests['skipped']} skipped"
        f"{' (none passed of ' + ', '.join(left) + ')' if left else ''}; "
        f"{laws.get('examples', 0)} examples of laws, {laws.get('failed', 0)} laws failed; "
        f"outputs of {record.get('outputs', {}).get('problems', 0)} problems; "
        f"sanitizer: {sanitizer or 'not run'}"
    )


def gpu_files() -> list[str]:
    """The files that have GPU tests."""
    files = sorted((ROOT / "tests").glob("test_*.py"))
    return [f"tests/{path.name}" for path in files if re.search(GPU_MARK, path.read_text())]


def counts_files(record: Record) -> bool:
    """Whether a record says what ran of each file; those of before did not."""
    return any(part in record and "files" in record[part] for part in TESTED)


def missing(record: Record) -> list[str]:
    """Files with GPU tests of which none passed."""
    counted = [record.get(part, {}).get("files", {}) for part in TESTED]
    passed = [name for files in counted for name, count in files.items() if count.get("passed")]
    return [name for name in gpu_files() if name not in passed]


# ---- the parts -----------------------------------------------------------------------------------


def machine() -> Record:
    """Who ran the tests, with what."""
    from rawattn.compile import nvrtc_version
    from rawattn.device import Device

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout
    cupy = [d for d in ("cupy-cuda12x", "cupy-cuda13x") if _version(d)]
    packages = ("numpy", "ml_dtypes", "hypothesis", "cuda-bindings", *cupy)
    return {
        "gpu": Device.current().name,
        "driver": driver.split("\n")[0].strip(),
        "nvrtc": nvrtc_version(),
        "python": sys.version.split()[0],
        "packages": {name: _version(name) for name in packages},
        "sources": sources_digest(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def compile_all() -> None:
    """Fills the kernel cache for this GPU."""
    from rawattn.device import Device
    from tools import ledger

    start = time.perf_counter()
    workers = min(16, os.cpu_count() or 1)
    rows = list(ledger.measure_all([Device.current().arch], workers, ledger.compiled))
    print(f"{len(rows)} kernels ready in {time.perf_counter() - start:.1f} s", flush=True)


def pytest(*arguments: str, **environment: str) -> Record:
    """Runs pytest on the GPU tests; what `--record` wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "record.json"
        # pytest-benchmark, where it is installed, warns of xdist, and warnings are errors.
        command = [sys.executable, "-m", "pytest", "-p", "no:benchmark", "-q", "-m", "gpu"]
        start = time.perf_counter()
        code = subprocess.run(
            [*command, f"--record={file}", *arguments],
            cwd=ROOT,
            env={**os.environ, **environment},
            check=False,
        ).returncode
        record: Record = dict.fromkeys(COUNTED[:3], 0)
        record |= {"why_skipped": {}, "files": {}, "laws": {}}
        if file.is_file():
            record = json.loads(file.read_text())
    if not record["failed"] and (code or not record["passed"]):
        record["failed"] = 1  # nothing ran, or not to the end
    return {**record, "seconds": round(time.perf_counter() - start, 1)}


def run_pytest() -> Record:
    """All other GPU tests, one after the other: some of them measure time."""
    record = pytest(*(f"--ignore={name}" for name in (*LAW_FILES, *EXAMPLE_FILES)))
    return {key: record[key] for key in COUNTED}


def run_example() -> Record:
    """The tests of the example model."""
    record = pytest(*EXAMPLE_FILES)
    return {key: record[key] for key in COUNTED}


def run_laws(examples: int) -> Record:
    """The laws on CuPy arrays: dense ones at least `examples` in all on each of their executors,
    paged ones as many each, times an executor's share.
    """
    from rawattn.testing import LAWS

    each = math.ceil(examples / len(LAWS))
    spread = ("-n", str(min(14, os.cpu_count() or 1)), "--dist", "worksteal")
    # The products of the reference are small, and the workers share the cores.
    record = pytest(*LAW_FILES, f"--examples={each}", *spread, OPENBLAS_NUM_THREADS="1")
    seen = record["laws"].values()
    worst = {name: max(x["worst"][name] for x in seen) for x in seen for name in x["worst"]}
    return {
        "examples": sum(x["examples"] for x in seen),
        "laws": record["passed"],
        "failed": record["failed"],
        "files": record["files"],
        "worst_error_of_bound": {k: round(v, 4) for k, v in sorted(worst.items())},
        "seconds": record["seconds"],
    }


def run_outputs() -> Record:
    """Records what the emulator is held to, tests/gpu_outputs.npz."""
    from rawattn.testing import public_op
    from rawattn.testing.paged_laws import paged_op
    from tools import gpu_bits, gpu_outputs
    from tools.cases.executors import on_gpu

    op, start = public_op("cupy", backend="fwd_sm80"), time.perf_counter()
    try:
        outputs = gpu_outputs.record(op, gpu_outputs.draw_cases(), machine()["gpu"])
        bits = gpu_bits.record(on_gpu, functools.partial(paged_op, "cupy"))
    except AssertionError as error:
        return {"problems": 0, "failed": 1, "error": str(error)}
    gpu_outputs.save(replace(outputs, bits=bits))
    if os.environ.get("OUT"):
        shutil.copy(gpu_outputs.FILE, os.environ["OUT"])
    seconds = round(time.perf_counter() - start, 1)
    problems = len(outputs.outputs) + len(bits)
    return {"problems": problems, "failed": 0, "seconds": seconds}


def run_sanitizer() -> Record:
    """A summary line a tool of compute-sanitizer, over the cases of tools/sanitizer_cases.py."""
    program = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    with ThreadPoolExecutor() as pool:  # each spends most of its time on the host
        return dict(
            zip(SANITIZERS, pool.map(lambda t: _sanitize(program, t), SANITIZERS), strict=True)
        )


def _sanitize(program: str, tool: str) -> str:
    cases = [sys.executable, "-m", "tools.sanitizer_cases"]
    try:
        done = subprocess.run(
            [program, "--tool", tool, "--report-api-errors", "no", "--error-exitcode", "9", *cases],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=SANITIZER_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"did not run: {error}"
    text = done.stdout + done.stderr
    summary = re.findall(r"=+ ((?:ERROR|RACECHECK) SUMMARY: .*)", text)
    ran = re.findall(r"^\d+ cases ran", text, re.M)
    print(f"{tool}: exit {done.returncode}\n{text[-3000:]}", flush=True)
    if done.returncode == 0 and summary and ran:
        return f"{summary[-1]}; {ran[-1]}"
    return f"FAILED (exit {done.returncode}): {summary[-1] if summary else text[-300:].strip()}"


# ---- the record ----------------------------------------------------------------------------------


def write(part: str, result: Record) -> None:
    """Adds a part to the record; parts of other sources or another machine are dropped."""
    here, record = machine(), load()
    if any(record.get(key) != value for key, value in here.items()):
        record = {}
    date = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    save({**record, **here, "date": date, part: result})
    if os.environ.get("OUT"):
        shutil.copy(RECORD, os.environ["OUT"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="say whether the record is current")
    about = "the GPU tests, without the laws: of the example, and all others"
    parser.add_argument("--pytest", action="store_true", help=about)
    parser.add_argument("--laws", type=int, nargs="?", const=3000, help="examples (default 3000)")
    parser.add_argument("--sanitizer", action="store_true", help="compute-sanitizer's four tools")
    parser.add_argument("--outputs", action="store_true", help="what the emulator is held to")
    options = parser.parse_args()
    if options.check:
        print(status())
        return 0
    everything = not (options.pytest or options.laws or options.sanitizer or options.outputs)
    parts: dict[str, Callable[[], Record]] = {}
    if options.laws or everything:
        parts["laws"] = lambda: run_laws(options.laws or 3000)
    if options.pytest or everything:
        parts |= {"example": run_example, "pytest": run_pytest}
    if options.outputs or everything:
        parts["outputs"] = run_outputs
    if options.sanitizer or everything:
        parts["sanitizer"] = run_sanitizer
    try:
        compile_all()
    except RuntimeError as error:
        print(f"tools.gpu_tests: {error}", file=sys.stderr)
        return 1
    failed = False
    for group in TOGETHER:
        names = [name for name in group if name in parts]
        with ThreadPoolExecutor() as pool:
            results = list(pool.map(lambda name: parts[name](), names))
        for name, result in zip(names, results, strict=True):
            write(name, result)
            print(name, json.dumps(result), flush=True)
            failed |= bool(result.get("failed")) or "FAILED" in str(result)
    print(status())
    return failed


if __name__ == "__main__":
    sys.exit(program("tools.gpu_tests", main))
