"""Where objects are compiled: in the cache's own staging area, or in a private directory of this process.

A killed process cannot clean up. What it leaves in the cache is swept there (``store.sweep``); what it leaves without a
cache is removed by the next process that needs such a directory.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from rtkernels.runtime.build.store import Store

_PREFIX = "rtkernels-emulator-"


@contextlib.contextmanager
def staging(store: Store) -> Iterator[Path]:
    """A new directory in a writable cache, removed at the end.

    Raises:
        OSError: It cannot be made.
    """
    directory = store.new_tmp("compile-")
    os.mkdir(directory, 0o700)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@cache
def private() -> Path:
    """Return a directory that lives as long as this process: there is no cache that could be used."""
    _remove_leftovers()
    while True:
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # nobody else may enter it, or knows its name before
        handle = _lock(directory, fcntl.LOCK_SH)  # kept open: who lives holds it, forked children too
        if handle is not None:
            break
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:
            shutil.rmtree(directory, ignore_errors=True)

    atexit.register(remove)
    return directory


def _lock(directory: Path, how: int) -> int | None:
    """Return a handle that holds a lock on a directory of this user; None if it is gone, locked or somebody else's."""
    try:
        handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with contextlib.suppress(OSError):
        fcntl.flock(handle, how | fcntl.LOCK_NB)
        mine = os.fstat(handle)
        if mine.st_uid == os.geteuid() and os.path.samestat(mine, os.stat(directory, follow_symlinks=False)):
            return handle
    os.close(handle)
    return None


def _remove_leftovers() -> None:
    """Remove the directories of processes that were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if (handle := _lock(directory, fcntl.LOCK_EX)) is not None:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(handle)
