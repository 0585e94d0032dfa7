# SPDX-License-Identifier: Apache-2.0
"""Processes that work for this one, and end with it: on Ctrl+C, on SIGTERM, if it is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, TypeVar

from rawattn.cli import INTERRUPTED

Result = TypeVar("Result")


def each(
    job: Callable[..., Result], todo: Sequence[Sequence[Any]], workers: int
) -> Iterator[tuple[int, Result]]:
    """The place of each item and what `job` makes of it, as they are done.

    Raises what a job raises. Whatever ends this generator early ends the workers too: what waits is
    not begun, and what runs is given up.
    """
    context = get_context("spawn")
    # A worker ends when the other end of its pipe is closed: here, or because this process is gone.
    reader, writer = context.Pipe(duplex=False)
    with writer, _terminated(), _pool(workers, context, reader, writer) as pool:
        with _signals_held():
            places = {pool.submit(job, *item): n for n, item in enumerate(todo)}
        for done in as_completed(list(places)):
            yield places[done], done.result()


@contextlib.contextmanager
def _pool(
    workers: int, context: Any, reader: Connection, writer: Connection
) -> Iterator[ProcessPoolExecutor]:
    """A pool that is not waited for where something is raised."""
    pool = ProcessPoolExecutor(
        workers, mp_context=context, initializer=_end_with, initargs=(reader,)
    )
    try:
        yield pool
    except BaseException:
        writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        reader.close()


def _end_with(reader: Connection) -> None:
    """Has this worker end when nobody can write to its pipe any more; only then is it readable."""

    def watch() -> None:
        with contextlib.suppress(OSError):
            reader.poll(None)
        os._exit(1)

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C goes to all: the parent says what happens
    threading.Thread(target=watch, daemon=True).start()


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """Ctrl+C waits until the workers are started, which ignore it from their first moment on."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    held = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, held)


@contextlib.contextmanager
def _terminated() -> Iterator[None]:
    """SIGTERM raises SystemExit here, with the code that shells say, so that clean-up runs."""
    if threading.current_thread() is not threading.main_thread():  # others get no signals
        yield
        return
    before = signal.signal(signal.SIGTERM, _raise_exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _raise_exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def program(name: str, main: Callable[[], int]) -> int:
    """The exit code of a program's `main`; one line where Ctrl+C ends it."""
    try:
        return main()
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return INTERRUPTED
