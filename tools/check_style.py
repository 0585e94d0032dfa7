# SPDX-License-Identifier: Apache-2.0
"""House rules that no formatter knows: `python -m tools.check_style` prints what breaks one,
`path:line: what`.

Size limits, inline PTX in ptx_*.cuh alone, the few headers that are cheap to compile, one SPDX
line, tidy ends of lines and files, torch nowhere but among the peers, CuPy nowhere but where arrays
are launched.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

MAX_BYTES = 1 << 20  # of any committed file
MAX_COLUMNS = 100  # of C++ and CUDA, comments too, which clang-format leaves; ruff has Python's
FILE_LINES = {".py": 400, ".cuh": 300, ".cu": 600}
PYTHON_FUNCTION_LINES = 50  # without its docstring
CUDA_FUNCTION_LINES = {".cuh": 60, ".cu": 150}
SYSTEM_HEADERS = {"cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h"}  # others take up to 0.7 s to compile
SOURCES = (".py", ".cu", ".cuh", ".cpp", ".hpp", ".toml", ".yaml")
# module: where it may be imported, as path prefixes
IMPORTS = {
    "torch": ("bench/peers", "tests/"),
    "cupy": (
        "rawattn/arrays.py",
        "rawattn/launch.py",
        "rawattn/device.py",
        "bench/",
        "examples/",
        "tests/",
        "tools/",
    ),
}

Problem = tuple[int, str]  # line, what


def check_text(path: Path, text: str) -> Iterator[Problem]:
    """Rules for every text file."""
    lines = text.splitlines()
    if len(text.encode()) > MAX_BYTES:
        yield 1, f"{len(text.encode())} bytes; at most {MAX_BYTES}"
    if text and (not text.endswith("\n") or text.endswith("\n\n")):
        yield len(lines), "a file ends with one newline"
    for number, line in enumerate(lines, 1):
        if line != line.rstrip():
            yield number, "space at the end of the line"
        if path.suffix in (".cu", ".cuh", ".cpp", ".hpp") and len(line) > MAX_COLUMNS:
            yield number, f"{len(line)} columns; at most {MAX_COLUMNS}"
    if path.suffix in SOURCES and path.name != ".pre-commit-config.yaml":
        head = "\n".join(lines[:2])
        if text and "SPDX-License-Identifier: Apache-2.0" not in head:
            yield 1, "no SPDX line"
    limit = FILE_LINES.get(path.suffix)
    if limit and len(lines) > limit:
        yield 1, f"{len(lines)} lines; at most {limit}"


def check_python(path: Path, text: str) -> Iterator[Problem]:
    """Function sizes, and who imports torch."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body
            if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
                body = body[1:]  # the docstring
            length = (node.end_lineno or 0) - body[0].lineno + 1 if body else 0
            if length > PYTHON_FUNCTION_LINES:
                yield (
                    node.lineno,
                    f"{node.name} has {length} lines; at most {PYTHON_FUNCTION_LINES}",
                )
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        for module in {name.split(".")[0] for name in names} & set(IMPORTS):
            if not path.as_posix().startswith(IMPORTS[module]):
                yield node.lineno, f"{module} may be imported in {', '.join(IMPORTS[module])}"


def without_comments(text: str) -> str:
    """CUDA text with comments blanked, lines kept."""
    return re.sub(
        r"//[^\n]*|/\*.*?\*/", lambda m: re.sub(r"[^\n]", " ", m[0]), text, flags=re.DOTALL
    )


def cuda_functions(code: str) -> Iterator[tuple[int, str, int]]:
    """(line, head, lines) of each function body, methods among them."""
    opened: list[tuple[int, str]] = []
    head = ""
    for number, line in enumerate(code.splitlines(), 1):
        for char in line:
            if char == "{":
                opened.append((number, head.strip()))
                head = ""
            elif char == "}" and opened:
                first, what = opened.pop()
                inner = re.search(r"\b(struct|enum|namespace|union)\b(?!.*\()|=\s*$", what)
                if "__device__" in what and not inner:
                    yield first, what, number - first + 1
                head = ""
            elif char == ";":
                head = ""
            else:
                head += char
        head += " "


def check_cuda(path: Path, text: str) -> Iterator[Problem]:
    """Function sizes, inline PTX, includes."""
    code = without_comments(text)
    for number, line in enumerate(code.splitlines(), 1):
        if re.search(r"\basm\b", line) and not re.fullmatch(r"ptx_\w+\.cuh", path.name):
            yield number, "inline PTX lives in cuda/ptx_*.cuh"
        header = re.match(r"\s*#\s*include\s*<([^>]+)>", line)
        if header and header[1] not in SYSTEM_HEADERS:
            yield (
                number,
                f"<{header[1]}>: kernels include {', '.join(sorted(SYSTEM_HEADERS))} alone",
            )
    for number, head, length in cuda_functions(code):
        if length > CUDA_FUNCTION_LINES[path.suffix]:
            name = re.findall(r"(\w+)\s*\(", head)
            limit = CUDA_FUNCTION_LINES[path.suffix]
            yield number, f"{name[0] if name else head} has {length} lines; at most {limit}"


def check(path: Path, text: str) -> Iterator[Problem]:
    """What breaks a rule in a file; `path` is relative to the repository."""
    yield from check_text(path, text)
    if path.suffix == ".py":
        yield from check_python(path, text)
    if path.suffix in CUDA_FUNCTION_LINES and path.parts[0] == "cuda":
        yield from check_cuda(path, text)


def files() -> Iterator[Path]:
    """The text files that are, or could be, committed."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    for name in sorted(listed.stdout.splitlines()):
        if Path(name).suffix not in (".png", ".bin", ".npz") and (ROOT / name).is_file():
            yield Path(name)


def main() -> int:
    broken = [
        f"{path}:{line}: {what}"
        for path in files()
        for line, what in check(path, (ROOT / path).read_text())
    ]
    print("\n".join(broken) or "house rules: all kept")
    return bool(broken)


if __name__ == "__main__":
    sys.exit(main())
