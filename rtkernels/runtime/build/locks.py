"""One lock per cache key across processes, so that they do not all compile the same kernel."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from rtkernels.runtime import env
from rtkernels.runtime.build.store import Store

TIMEOUT_S = 120.0
LOG_AFTER_S = 5.0
POLL_S = 0.02  # flock has no timeout; with polls five times slower, a waiter starved on a busy lock

_lock_files: set[int] = set()


@contextlib.contextmanager
def key_lock(store: Store, key: str, what: str) -> Iterator[None]:
    """Hold the lock of one key across processes.

    After ``TIMEOUT_S``, or if locks do not work, the caller continues without it: publishing by rename keeps the cache
    correct, and the lock only avoids duplicate work.

    Args:
        store: A writable store.
        key: The whole key.
        what: Named in the log message of waiting processes.
    """
    descriptor = _acquire(store, key, what)
    try:
        yield
    finally:
        if descriptor is not None:
            _lock_files.discard(descriptor)
            with contextlib.suppress(OSError):
                # Unlock explicitly: closing alone would leave it locked while a forked child has the file open.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(store: Store, key: str, what: str) -> int | None:
    # The file is never deleted: a process waiting on it would then hold a lock that no other process can see.
    path = store.base / "locks" / f"{key[:32]}.lock"
    try:
        store.make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, store.mode & 0o666)
    except OSError:
        return None  # publishing will fail for the same reason and report it
    if not _wait_for(descriptor, path, what):
        os.close(descriptor)
        return None
    _lock_files.add(descriptor)
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode(), 0)
    return descriptor


def _wait_for(descriptor: int, path: Path, what: str) -> bool:
    started, pause, told = time.monotonic(), 0.005, False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - started
        except OSError:  # a file system without locks
            return False
        # Logged first, so that a poll that is delayed past both limits still names the process it waited for.
        if waited >= LOG_AFTER_S and not told:
            told = True
            message = "%s: waiting for %s, which is compiling the same kernel (%s)"
            env.logger().warning(message, what, _holder(descriptor), path)
        if waited >= TIMEOUT_S:
            message = "%s: gave up waiting for %s after %.0f s, going on without the lock"
            env.logger().warning(message, what, _holder(descriptor), waited)
            return False
        time.sleep(pause)
        pause = min(2 * pause, POLL_S)


def _holder(descriptor: int) -> str:
    try:
        pid, host = os.pread(descriptor, 256, 0).decode().split(maxsplit=1)
        return f"process {int(pid)} on {host.strip()}"
    except (OSError, ValueError):
        return "another process"


def _close_inherited_locks() -> None:
    """Close inherited locks in a forked child: a copy would keep a key locked if the parent were killed."""
    for descriptor in _lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lock_files.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)
