# SPDX-License-Identifier: Apache-2.0
"""The house rules hold, and each of them can be broken."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_style

SPDX = {".py": "# ", ".cu": "// ", ".cuh": "// "}


def broken(name: str, text: str) -> list[str]:
    path = Path(name)
    head = SPDX[path.suffix] + "SPDX-License-Identifier: Apache-2.0\n"
    return [what for _, what in check_style.check(path, head + text)]


def test_all_files_keep_the_rules(capsys: pytest.CaptureFixture[str]) -> None:
    code = check_style.main()
    assert code == 0, capsys.readouterr().out


LONG_CUDA = "template <class C>\n__device__ __forceinline__ int f(int x) {\n" + "  x++;\n" * 59
METHOD = "struct S {\n  __device__ void step() const {\n" + "    int i;\n" * 59 + "  }\n};\n"


@pytest.mark.parametrize(
    ("name", "text", "what"),
    [
        ("a.py", "x = 1 \n", "space at the end"),
        ("a.py", "x = 1\n\n", "one newline"),
        ("a.py", "x = 1", "one newline"),
        ("a.py", "x = 1\n" * 400, "401 lines; at most 400"),
        ("a.py", "def f():\n" + "    x = 1\n" * 51, "f has 51 lines; at most 50"),
        ("rawattn/a.py", "import torch\n", "torch may be imported"),
        ("rawattn/a.py", "def f():\n    from torch import nn\n", "torch may be imported"),
        ("rawattn/plan/base.py", "import cupy\n", "cupy may be imported"),
        ("cuda/a.cuh", "int x;\n" * 300, "301 lines; at most 300"),
        ("cuda/a.cuh", LONG_CUDA + "}\n", "f has 61 lines; at most 60"),
        ("cuda/a.cuh", METHOD, "step has 61 lines; at most 60"),
        ("cuda/a.cu", f"// {'word ' * 20}.\n", "104 columns; at most 100"),
        ("cuda/a.cu", 'void f() { asm("exit;"); }\n', "inline PTX"),
        ("cuda/a.cu", "#include <cooperative_groups.h>\n", "<cooperative_groups.h>"),
    ],
)
def test_a_broken_rule_is_named(name: str, text: str, what: str) -> None:
    assert any(what in line for line in broken(name, text)), broken(name, text)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.py", '"""A."""\n\n\ndef f():\n    """' + "x\n    " * 60 + '"""\n' + "    x = 1\n" * 50),
        ("bench/peers.py", "import torch\n"),
        ("rawattn/device.py", "import cupy\n"),
        ("cuda/a.cuh", LONG_CUDA.replace("  x++;\n", "", 1) + "}\n"),
        ("cuda/ptx_sm80.cuh", 'void f() { asm("exit;"); }\n'),
        ("cuda/a.cu", "// no asm here, and no #include <vector>\n#include <cuda_fp16.h>\n"),
        ("cuda/a.cu", "struct S {\n" + "  int x;\n" * 200 + "};\n"),
    ],
)
def test_what_keeps_the_rules_passes(name: str, text: str) -> None:
    assert broken(name, text) == []


def test_every_source_has_its_license() -> None:
    assert [what for _, what in check_style.check(Path("a.py"), "x = 1\n")] == ["no SPDX line"]
