# SPDX-License-Identifier: Apache-2.0
"""A disk cache of small files: atomic, without locks, checked on every read.

An entry is a folder of files with a ``SHA256SUMS`` that `sha256sum -c` understands. It is written
to a sibling folder and renamed, so nobody sees half of one; two processes that build the same entry
at once both succeed. Nothing is flushed to the disk: what a power cut truncates is found by its
digest and built again.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

SUMS = "SHA256SUMS"


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the cache holds under one key."""

    key: str
    path: Path
    size: int  # bytes
    intact: bool


class Cache:
    """Entries of one folder, which need not exist yet.

    A folder that cannot be written is still read; what is built goes to a temporary one for the
    life of the process, with one warning.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._fallback: Path | None = None

    def find(self, key: str) -> Path | None:
        """The folder with the files of `key`, where there is an intact one."""
        return next((f / key for f in self._folders() if is_intact(f / key)), None)

    def get(self, key: str, build: Callable[[], Mapping[str, bytes]]) -> Path:
        """The folder with the files of `key`, which `build` returns where no intact one is yet."""
        found = self.find(key)
        if found is not None:
            return found
        files = build()
        try:
            return _install(self._folders()[-1], key, files)
        except OSError as error:
            return _install(self._fall_back(error), key, files)

    def entries(self) -> Iterator[Entry]:
        """All entries, by key; without those that a build has not finished."""
        paths = sorted(self.folder.glob("[!.]*")) if self.folder.is_dir() else []
        for path in paths:
            size = sum(file.lstat().st_size for file in path.glob("*"))
            yield Entry(key=path.name, path=path, size=size, intact=is_intact(path))

    def size(self) -> int:
        """Bytes of all entries."""
        return sum(entry.size for entry in self.entries())

    def clear(self, keep: Collection[str] = ()) -> int:
        """Removes all entries but those of the keys to `keep`, and what interrupted builds left.

        Of an entry that is a link, the link goes. Returns how many entries there were.
        """
        count = 0
        for path in self.folder.glob("*"):
            if path.name in keep:
                continue
            if path.is_symlink() or path.is_file():
                path.unlink()
            else:
                shutil.rmtree(path)
            count += not path.name.startswith(".")
        return count

    def unwritable(self) -> str | None:
        """Why nothing can be kept in the folder, or where it would be made; None: something can."""
        places = (self.folder, *self.folder.parents)
        try:
            # Root may do what permissions deny, and still not write to /proc: only a try tells.
            tempfile.TemporaryFile(dir=next(filter(os.path.lexists, places))).close()
        except OSError as error:
            return error.strerror or str(error)
        return None

    def _folders(self) -> list[Path]:
        return [self.folder] + ([self._fallback] if self._fallback else [])

    def _fall_back(self, error: OSError) -> Path:
        if self._fallback is None:
            self._fallback = Path(tempfile.mkdtemp(prefix="rawattn-"))
            atexit.register(shutil.rmtree, self._fallback, ignore_errors=True)
            warnings.warn(
                f"cannot write the cache folder {self.folder} ({error.strerror or error}); until "
                f"this process ends, compiled kernels go to {self._fallback}. "
                "RAWATTN_CACHE_DIR names another folder.",
                RuntimeWarning,
                stacklevel=2,
            )
        return self._fallback


def is_intact(path: Path) -> bool:
    """Whether an entry is there and its files are those that were written."""
    try:
        sums = (path / SUMS).read_text().splitlines()
        pairs = [line.split(maxsplit=1) for line in sums]
        return bool(pairs) and all(
            _sha256((path / name).read_bytes()) == digest for digest, name in pairs
        )
    except (OSError, ValueError):
        return False


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _install(folder: Path, key: str, files: Mapping[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path, scratch = folder / key, folder / f".{key}-{uuid.uuid4().hex}"
    scratch.mkdir()
    try:
        for name, data in files.items():
            (scratch / name).write_bytes(data)
        (scratch / SUMS).write_text(
            "".join(f"{_sha256(data)}  {name}\n" for name, data in files.items())
        )
        try:
            scratch.rename(path)
        except OSError:
            if not os.path.lexists(path):
                raise
            if not is_intact(path):
                _repair(path, scratch)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return path


def _repair(path: Path, scratch: Path) -> None:
    """Replaces the files of a corrupt entry one by one, so that it never vanishes for a reader."""
    if path.is_symlink() or not path.is_dir():
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        path.mkdir(exist_ok=True)
    for file in scratch.iterdir():
        os.replace(file, path / file.name)


@functools.cache
def default() -> Cache:
    """The cache in ``RAWATTN_CACHE_DIR``, by default in the user's cache folder; read once."""
    folder = os.environ.get("RAWATTN_CACHE_DIR")
    try:
        if folder:
            return Cache(Path(folder).expanduser())
        user = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    except RuntimeError as error:
        raise RuntimeError(f"no cache folder: {error} RAWATTN_CACHE_DIR names one.") from None
    return Cache(Path(user) / "rawattn")
