# SPDX-License-Identifier: Apache-2.0
"""The disk cache: atomic, checked, shared by processes, and never in the way."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from rawattn import cache
from rawattn.cache import Cache

FILES = {"kernel.cubin": b"\x7fELF" * 1000, "kernel.log": b"Used 8 registers\n"}


class Builder:
    """Counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> Mapping[str, bytes]:
        self.calls += 1
        return FILES


def holds_files(entry: Path) -> bool:
    return all((entry / name).read_bytes() == data for name, data in FILES.items())


def test_builds_once(tmp_path: Path) -> None:
    build = Builder()
    for _ in range(3):
        assert holds_files(Cache(tmp_path / "new" / "folder").get("key", build))
    assert build.calls == 1


def test_keys_are_apart(tmp_path: Path) -> None:
    build = Builder()
    assert Cache(tmp_path).get("one", build) != Cache(tmp_path).get("two", build)
    assert build.calls == 2


def truncate(entry: Path) -> None:
    (entry / "kernel.cubin").write_bytes(FILES["kernel.cubin"][:1234])


def flip_a_bit(entry: Path) -> None:
    data = bytearray(FILES["kernel.cubin"])
    data[999] ^= 1
    (entry / "kernel.cubin").write_bytes(data)


def lose_a_file(entry: Path) -> None:
    (entry / "kernel.log").unlink()


def lose_the_sums(entry: Path) -> None:
    (entry / cache.SUMS).unlink()


def empty_the_sums(entry: Path) -> None:
    (entry / cache.SUMS).write_text("")


def garble_the_sums(entry: Path) -> None:
    (entry / cache.SUMS).write_bytes(b"\xff\xfe garbage")


def empty_the_folder(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.mkdir()


def become_a_file(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.write_text("not a folder")


def become_a_link(entry: Path) -> None:
    shutil.move(entry, entry.parent.parent / "elsewhere")
    truncate(entry.parent.parent / "elsewhere")
    entry.symlink_to(entry.parent.parent / "elsewhere")


def become_a_link_to_nothing(entry: Path) -> None:
    shutil.rmtree(entry)
    entry.symlink_to(entry.parent / "nothing")


DAMAGES = (
    truncate,
    flip_a_bit,
    lose_a_file,
    lose_the_sums,
    empty_the_sums,
    garble_the_sums,
    empty_the_folder,
    become_a_file,
    become_a_link,
    become_a_link_to_nothing,
)


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_entries_are_rebuilt(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    build, folder = Builder(), tmp_path / "cache"
    damage(Cache(folder).get("key", build))
    assert holds_files(Cache(folder).get("key", build))
    assert holds_files(Cache(folder).get("key", build))
    assert build.calls == 2
    assert [path.name for path in folder.iterdir()] == ["key"], "scratch folders are removed"
    for linked in tmp_path.glob("elsewhere/kernel.cubin"):
        assert linked.stat().st_size == 1234, "what a link leads to is left alone"


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def fail() -> Mapping[str, bytes]:
        raise RuntimeError("does not compile")

    with pytest.raises(RuntimeError, match="does not compile"):
        Cache(tmp_path).get("key", fail)
    assert list(tmp_path.iterdir()) == []


PROCESS = """
import sys, time
from pathlib import Path
from rawattn.cache import Cache, is_intact
folder, start = Path(sys.argv[1]), float(sys.argv[2])
files = {"kernel.cubin": bytes(100_000), "kernel.log": b"log"}
time.sleep(max(0, start - time.time()))
for turn in range(20):
    path = Cache(folder).get(f"key{turn}", lambda: files)
    assert is_intact(path), path
    assert (path / "kernel.cubin").read_bytes() == files["kernel.cubin"]
print("ok")
"""


@pytest.mark.parametrize("state", ["empty", "corrupt"])
def test_sixteen_processes_at_once(tmp_path: Path, state: str) -> None:
    if state == "corrupt":
        for turn in range(20):
            truncate(Cache(tmp_path).get(f"key{turn}", Builder()))
    start = str(time.time() + 1.5)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROCESS, str(tmp_path), start],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for _ in range(16)
    ]
    assert [process.communicate()[0] for process in processes] == ["ok\n"] * 16
    assert len(list(tmp_path.iterdir())) == 20
    assert all(entry.intact for entry in Cache(tmp_path).entries())


def test_an_unwritable_folder_is_replaced_with_one_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    build, unwritable = Builder(), Cache(tmp_path / "file" / "cache")
    with pytest.warns(RuntimeWarning, match="RAWATTN_CACHE_DIR") as caught:
        entries = [unwritable.get(key, build) for key in ("one", "two", "one", "two")]
    assert len(caught) == 1
    assert all(map(holds_files, entries))
    assert build.calls == 2


def test_a_read_only_folder_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = Cache(tmp_path).get("old", Builder())

    def refuse(*args: object, **kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("error")
        patch.setattr(Path, "mkdir", refuse)
        assert Cache(tmp_path).get("old", Builder()) == entry


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes to read-only folders")
def test_permission_bits_are_honoured(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        with pytest.warns(RuntimeWarning, match="Permission denied"):
            assert holds_files(Cache(tmp_path).get("key", Builder()))
    finally:
        tmp_path.chmod(0o700)


def test_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("RAWATTN_CACHE_DIR", raising=False)
    assert cache.default.__wrapped__().folder == tmp_path / "rawattn"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "~/kernels")
    assert cache.default.__wrapped__().folder == Path.home() / "kernels"
    monkeypatch.setenv("RAWATTN_CACHE_DIR", "~nobody-of-this-name/kernels")
    with pytest.raises(RuntimeError, match=r"no cache folder: .* RAWATTN_CACHE_DIR names one"):
        cache.default.__wrapped__()


def test_listing_and_clearing(tmp_path: Path) -> None:
    kernels = Cache(tmp_path / "cache")
    assert (list(kernels.entries()), kernels.size(), kernels.clear()) == ([], 0, 0)
    one, two = kernels.get("one", Builder()), kernels.get("two", Builder())
    truncate(two)
    (kernels.folder / ".two-interrupted").mkdir()
    assert [(e.key, e.path, e.intact) for e in kernels.entries()] == [
        ("one", one, True),
        ("two", two, False),
    ]
    assert kernels.size() == sum(f.stat().st_size for f in [*one.iterdir(), *two.iterdir()])
    (kernels.folder / "link").symlink_to(kernels.get("kept", Builder()))
    assert kernels.clear(keep=("kept",)) == 3
    assert [path.name for path in kernels.folder.iterdir()] == ["kept"]
    assert kernels.clear() == 1
    assert list(kernels.folder.iterdir()) == []


def test_what_cannot_be_written_is_known_before(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert Cache(tmp_path).unwritable() is None
    assert Cache(tmp_path / "new" / "folder").unwritable() is None
    assert Cache(tmp_path / "file").unwritable() == "Not a directory"
    assert Cache(tmp_path / "file" / "cache").unwritable() == "Not a directory"
    assert Cache(Path("/proc/cache")).unwritable() is not None
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.skipif(shutil.which("sha256sum") is None, reason="needs sha256sum")
def test_sums_are_those_of_coreutils(tmp_path: Path) -> None:
    entry = Cache(tmp_path).get("key", Builder())
    subprocess.run(["sha256sum", "--check", "--strict", cache.SUMS], cwd=entry, check=True)
