# SPDX-License-Identifier: Apache-2.0
"""One call flows down one list of files, and importing the package costs next to nothing."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable
from graphlib import TopologicalSorter
from pathlib import Path
from typing import Any

import pytest

import rawattn
from rawattn.prepared import FUNCTIONS

PACKAGE = Path(rawattn.__file__).parent
FOLDERS = (PACKAGE, PACKAGE / "plan", PACKAGE / "roofline")
FILES = sorted(path for folder in FOLDERS for path in folder.glob("*.py"))


def imports(tree: ast.AST) -> set[str]:
    """Dotted names that the import statements of a tree name."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names.add(node.module or "")
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def module(path: Path) -> str:
    """ "launch", "plan.base"; a package goes by its own name."""
    return ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__")


def at_import(path: Path) -> set[str]:
    """Other modules of the package, by name, that are imported when a file is."""
    body = ast.parse(path.read_text()).body
    statements = [node for node in body if isinstance(node, (ast.Import, ast.ImportFrom))]
    found = imports(ast.Module(body=statements, type_ignores=[]))
    own = {module(path), module(path).rpartition(".")[0]}  # a file names its own package
    return {module(f) for f in FILES if f"rawattn.{module(f)}" in found} - own


def test_imports_form_a_dag() -> None:
    graph = {module(path): at_import(path) for path in FILES}
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError
    assert order.index("problem") < order.index("plan") < order.index("launch")
    assert order.index("launch") < order.index("forward") < order.index("dense")


def test_one_file_imports_cupy_and_none_imports_torch() -> None:
    for path in PACKAGE.rglob("*.py"):
        packages = {name.split(".")[0] for name in imports(ast.parse(path.read_text()))}
        assert "torch" not in packages, path
        assert "cupy" not in packages or path == PACKAGE / "device.py", path


IMPORT = """
import sys, time
start = time.perf_counter()
import rawattn
seconds = time.perf_counter() - start
print(seconds, sorted({"cupy", "torch", "numpy"} & set(sys.modules)))
"""


def test_import_is_fast_and_light() -> None:
    def seconds() -> float:
        command = [sys.executable, "-c", IMPORT]
        done = subprocess.run(
            command, cwd=PACKAGE.parent, check=True, capture_output=True, text=True
        )
        took, loaded = done.stdout.split(maxsplit=1)
        assert loaded == "[]\n"
        return float(took)

    # The least counts, and one suffices: others may have the cores for a while.
    assert any(seconds() < 0.1 for _ in range(30))


def test_public_names_load() -> None:
    assert dir(rawattn) == rawattn.__all__
    for name in rawattn.__all__:
        assert getattr(rawattn, name) is not None
    try:
        rawattn.flash_attention  # noqa: B018
    except AttributeError as error:
        assert "flash_attention" in str(error)
    else:
        raise AssertionError("an unknown name must not load")


@pytest.mark.parametrize("function", [rawattn.prepare, *FUNCTIONS], ids=lambda f: f.__name__)
def test_docstrings_are_whole(function: Callable[..., Any]) -> None:
    """An example, and all arguments, here or where a sentence sends the reader."""
    text = " ".join((inspect.getdoc(function) or "").split())
    assert "Parameters ---" in text and ">>> " in text
    missing = {
        x for x in inspect.signature(function).parameters if not re.search(rf"\b{x}\b", text)
    }
    assert not missing or "not described here are those of" in text


@pytest.mark.parametrize("name", ["dense", "kv_cache", "merge", "paged", "prepared"])
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"rawattn.{name}"))
    assert found.attempted > 5 and found.failed == 0
