# SPDX-License-Identifier: Apache-2.0
"""Units, NVRTC and the cubins it makes, on a kernel of our own that takes no time to compile."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rawattn import cache, compile, registry
from rawattn.compile import CompileError
from rawattn.registry import ARCHITECTURES, Kernel

SOURCES = {
    "params.cuh": """\
struct TinyParams {
  const float* x;  // [n]
  float* y;        // [n]
  int n;
  float factor;
};
""",
    "double.cuh": "__device__ inline float doubled(float x) { return x + x; }\n",
    "tiny.cu": """\
#include "params.cuh"
#  include "double.cuh"
struct bf16 {};
template <class C> struct TinySmem { float tile[C::tile]; };
template <class C> __device__ void tiny(const TinyParams& p) {
  extern __shared__ float tile[];
  int i = blockIdx.x * C::threads + threadIdx.x;
  tile[threadIdx.x] = doubled(p.x[i]);
  if (i < p.n) p.y[i] = C::negate ? -tile[threadIdx.x] : p.factor * tile[threadIdx.x];
}
""",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    element: str = "bf16"
    tile: int = 64
    negate: bool = True
    blocks_per_sm: int = 2

    @property
    def threads(self) -> int:
        return self.tile

    @property
    def smem_bytes(self) -> int:
        return 4 * self.tile


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WrongSmem(Tiny):
    @property
    def threads(self) -> int:
        return self.tile

    @property
    def smem_bytes(self) -> int:
        return 4 * self.tile + 4


KERNEL = Kernel(
    name="tiny", source="tiny.cu", config=Tiny, params="TinyParams", architectures=ARCHITECTURES
)


@pytest.fixture(autouse=True)
def cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel folder of our own, and an empty cache."""
    folder = tmp_path / "cuda"
    folder.mkdir()
    for name, text in SOURCES.items():
        (folder / name).write_text(text)
    monkeypatch.setattr(registry, "cuda_folder", lambda: folder)
    monkeypatch.setattr(cache, "default", lambda: cache.Cache(tmp_path / "cache"))
    forget = registry.params_struct.cache_clear
    forget()
    yield folder
    forget()


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_unit() -> None:
    digest = compile.sources(KERNEL).digest[:16]
    assert (
        compile.unit(KERNEL, Tiny())
        == f"""\
// rawattn tiny  sources {digest}
#include "tiny.cu"
struct Config {{
  using Element = bf16;
  static constexpr int tile = 64;
  static constexpr bool negate = true;
  static constexpr int blocks_per_sm = 2;
  static constexpr int threads = 64;
  static constexpr int smem_bytes = 256;
}};
static_assert(sizeof(TinyParams) == 24, "ABI: TinyParams");
static_assert(sizeof(TinySmem<Config>) == Config::smem_bytes,
              "plan and kernel disagree on shared memory");
extern "C" __global__ void __launch_bounds__(Config::threads, Config::blocks_per_sm)
rawattn_tiny(const __grid_constant__ TinyParams p) {{ tiny<Config>(p); }}
"""
    )


def test_digest_follows_what_is_included(cuda: Path) -> None:
    before = compile.sources(KERNEL).digest
    (cuda / "other.cuh").write_text("// nobody includes it")
    assert compile.sources(KERNEL).digest == before
    edit(cuda / "double.cuh", "x + x", "2 * x")
    after = compile.sources(KERNEL).digest
    assert after != before
    edit(cuda / "double.cuh", "__device__", "#include <cuda_fp16.h>\n__device__")
    assert compile.sources(KERNEL).system == ("cuda_fp16.h",)
    assert compile.sources(KERNEL).digest != after


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str) -> None:
    path = compile.cubin(KERNEL, Tiny(), arch)
    code = path.read_bytes()
    assert code[:4] == b"\x7fELF" and b"rawattn_tiny" in code
    assert path.with_suffix(".cu").read_text() == compile.unit(KERNEL, Tiny())
    found = compile.resources(KERNEL, Tiny(), arch)
    assert 0 < found.registers < 64
    assert (found.spill_stores, found.spill_loads, found.stack, found.smem) == (0, 0, 0, 0)
    assert found.warnings == ()


def test_a_build_is_reproducible(tmp_path: Path) -> None:
    first = compile._build(KERNEL, compile.unit(KERNEL, Tiny()), "sm_80")
    assert compile._build(KERNEL, compile.unit(KERNEL, Tiny()), "sm_80") == first


def test_the_second_call_reads_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile.cubin(KERNEL, Tiny(), "sm_80")
    monkeypatch.setattr(compile, "_build", None)

    def seconds() -> float:
        start = time.perf_counter()
        assert compile.cubin(KERNEL, Tiny(), "sm_80") == path
        return time.perf_counter() - start

    assert min(seconds() for _ in range(5)) < 0.05  # others may have the core for a while


def test_what_the_key_depends_on(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_build", lambda *args: {"kernel.cubin": b"code"})
    paths = [
        compile.cubin(KERNEL, Tiny(), "sm_80"),
        compile.cubin(KERNEL, Tiny(), "sm_86"),
        compile.cubin(KERNEL, Tiny(negate=False), "sm_80"),
    ]
    edit(cuda / "double.cuh", "x + x", "2 * x")
    paths.append(compile.cubin(KERNEL, Tiny(), "sm_80"))
    monkeypatch.setattr(compile, "FLAGS", (*compile.FLAGS, "-G"))
    paths.append(compile.cubin(KERNEL, Tiny(), "sm_80"))
    monkeypatch.setattr(compile, "_installed_nvrtc", lambda: "99.1")
    monkeypatch.setattr(compile, "load_nvrtc", lambda: (None, (99, 1)))
    paths.append(compile.cubin(KERNEL, Tiny(), "sm_80"))
    assert len(set(paths)) == len(paths)


def test_what_is_compiled_is_found_without_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    path = compile.cubin(KERNEL, Tiny(), "sm_80")
    version = compile.nvrtc_version()
    monkeypatch.setattr(compile, "load_nvrtc", None)
    monkeypatch.setattr(compile, "_installed_nvrtc", lambda: version)
    assert compile.cubin(KERNEL, Tiny(), "sm_80") == path


@pytest.mark.parametrize("installed", ["99.1", None])
def test_an_entry_is_named_after_the_nvrtc_that_built_it(
    monkeypatch: pytest.MonkeyPatch, installed: str | None
) -> None:
    path = compile.cubin(KERNEL, Tiny(), "sm_80")
    monkeypatch.setattr(compile, "_installed_nvrtc", lambda: installed)
    assert compile.cubin(KERNEL, Tiny(), "sm_80") == path


def test_the_nvrtc_of_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile, "_wheels", lambda: [tmp_path / "none", tmp_path / "nvidia"])
    found = []
    for name in ("cu13/lib/libnvrtc-builtins.so.13.0", "cuda_nvrtc/lib/libnvrtc-builtins.so.12.9"):
        found.append(compile._installed_nvrtc.__wrapped__())
        file = tmp_path / "nvidia" / name
        file.parent.mkdir(parents=True)
        file.touch()
        file.with_name(f"libnvrtc-builtins.alt{file.name[17:]}").touch()
    found.append(compile._installed_nvrtc.__wrapped__())
    assert found == [None, "13.0", None]


def test_an_error_shows_numbered_sources_and_the_log(cuda: Path) -> None:
    edit(cuda / "double.cuh", "return x + x;", "\n  return x + undeclared;")
    with pytest.raises(CompileError) as caught:
        compile.cubin(KERNEL, Tiny(), "sm_90a")
    message = str(caught.value)
    assert 'identifier "undeclared" is undefined' in message
    assert "    2    return x + undeclared; }" in message
    assert '    2  #include "tiny.cu"' in message
    assert "-arch=sm_90a" in message


def test_plan_and_kernel_agree_on_shared_memory() -> None:
    with pytest.raises(CompileError, match="plan and kernel disagree on shared memory"):
        compile.cubin(KERNEL, WrongSmem(), "sm_80")


def test_python_and_cuda_agree_on_params(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "params_struct", lambda name: ctypes.c_char * 28)
    with pytest.raises(CompileError, match="ABI: TinyParams"):
        compile.cubin(KERNEL, Tiny(), "sm_80")


LOG = """\
kernel.cu(7): warning #177-D: variable "x" was declared but never referenced
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'rawattn_tiny' for 'sm_90a'
ptxas info    : Function properties for rawattn_tiny
    40 bytes stack frame, 56 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 40 bytes cumulative stack size, 16 bytes smem
"""


def test_resources_of_a_log() -> None:
    found = compile.parse_log(LOG)
    numbers = (found.registers, found.spill_stores, found.spill_loads, found.stack, found.smem)
    assert numbers == (255, 56, 44, 40, 16)
    assert [line[:9] for line in found.warnings] == ["kernel.cu", "ptxas inf"]
    with pytest.raises(ValueError, match="no ptxas report"):
        compile.parse_log("")


# ---- what may be missing ----


@pytest.fixture
def fresh_nvrtc() -> Iterator[None]:
    compile.load_nvrtc.cache_clear()
    yield
    compile.load_nvrtc.cache_clear()


@pytest.mark.usefixtures("fresh_nvrtc")
def test_no_bindings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(CompileError, match=r"needs cuda-bindings: install rawattn\[cuda12\]"):
        compile.cubin(KERNEL, Tiny(), "sm_80")


@pytest.mark.usefixtures("fresh_nvrtc")
@pytest.mark.parametrize("answer", [RuntimeError("libnvrtc.so.12 not found"), (1, None, None)])
def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch, answer: Any) -> None:
    def version() -> Any:
        if isinstance(answer, Exception):
            raise answer
        return answer

    bindings = types.ModuleType("cuda.bindings")
    bindings.nvrtc = types.SimpleNamespace(nvrtcVersion=version)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    with pytest.raises(CompileError, match="NVRTC"):
        compile.cubin(KERNEL, Tiny(), "sm_80")


def test_headers_are_found(cuda: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toolkit = tmp_path / "toolkit"
    (toolkit / "include").mkdir(parents=True)
    (toolkit / "include" / "of_the_toolkit.h").write_text("#define ZERO 0\n")
    edit(cuda / "double.cuh", "x + x", "x + x + ZERO")
    edit(cuda / "double.cuh", "__device__", "#include <of_the_toolkit.h>\n__device__")
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    with pytest.raises(CompileError, match=r"<of_the_toolkit\.h>") as caught:
        compile.cubin(KERNEL, Tiny(), "sm_80")
    assert "nowhere" in str(caught.value) and "CUDA_PATH" in str(caught.value)
    monkeypatch.setenv("CUDA_PATH", str(toolkit))
    assert compile.cubin(KERNEL, Tiny(), "sm_80").is_file()


def test_processes_compile_at_once(cuda: Path, tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from rawattn import compile, registry
import test_compile
registry.cuda_folder = lambda: Path(sys.argv[1])
print(compile.cubin(test_compile.KERNEL, test_compile.Tiny(), "sm_90a"))
"""
    here = Path(__file__).parent
    arguments = [sys.executable, "-c", script, str(cuda), str(tmp_path), str(here)]
    changes = {"RAWATTN_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(here.parent)}
    processes = [
        subprocess.Popen(
            arguments, env={**os.environ, **changes}, stdout=subprocess.PIPE, text=True
        )
        for _ in range(4)
    ]
    assert len({process.communicate()[0] for process in processes}) == 1
    (entry,) = cache.Cache(tmp_path / "cache").entries()
    assert entry.intact
