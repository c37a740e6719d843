"""One cache directory on disk: trust, entries, locks, publishing, eviction.

An entry is a directory ``v1/<target>/<op>-<key32>/`` with the image, ``meta.json`` and a readable
``kernel.cu``. It is made under ``v1/tmp/`` and renamed into place, and it leaves the same way, so nobody ever
sees half of one.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rtkernels.runtime import env

FORMAT = 1
META = "meta.json"
LOCK_TIMEOUT_S = 120.0
LOCK_LOG_AFTER_S = 5.0
LOCK_POLL_S = 0.02  # flock has no timeout; polling five times slower let a busy lock starve a waiter
TOUCH_AFTER_S = 86_400.0  # the time of last use is noted at most daily
LEFTOVER_AFTER_S = 86_400.0  # what is older in tmp/ has no living writer; damaged entries stay that long too

_RESERVED = ("tmp", "locks")

_warned: set[str] = set()
_lock_files: set[int] = set()


class BadEntry(Exception):
    """An entry that must not be used; the text says why."""


@dataclass(frozen=True)
class Store:
    """A cache directory, resolved and found trustworthy.

    Attributes:
        root: The directory that holds ``v1/``.
        writable: False for read-only caches; nothing is created, moved or touched there.
        extra: True for the caches of ``RTKERNELS_CACHE_EXTRA``.
        mode: Permissions of the directories made in it.
    """

    root: Path
    writable: bool = True
    extra: bool = False
    mode: int = 0o700

    @property
    def base(self) -> Path:
        """The versioned directory all content is in."""
        return self.root / f"v{FORMAT}"

    def new_tmp(self, prefix: str = "") -> Path:
        """Return an unused name in ``tmp/``, which exists afterwards."""
        self.make_directory(self.base / "tmp")
        return self.base / "tmp" / f"{prefix}{os.urandom(16).hex()}"

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, private unless the user opened the root to others."""
        if directory.is_dir():
            return
        self.make_directory(directory.parent)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            if not directory.is_dir():
                raise
        else:
            self.open_up(directory)

    def open_up(self, directory: Path) -> None:
        """Give a directory of ours the permissions of the root."""
        if self.mode != 0o700:
            os.chmod(directory, self.mode | (os.stat(directory).st_mode & stat.S_ISGID))

    def entries(self, target: str = "*", op: str = "*") -> Iterator[Path]:
        """Yield the directories of all entries, sound or not."""
        for directory in sorted(self.base.glob(f"{target}/{op}-*")):
            if directory.parent.name not in _RESERVED:
                yield directory


def warn_once(topic: str, message: str) -> None:
    """Log a warning, the first time in this process that its topic comes up."""
    if topic not in _warned:
        _warned.add(topic)
        env.logger().warning(message)


# --- trust --------------------------------------------------------------------------------------------------


def open_store(path: Path, *, explicit: bool, writable: bool = True, extra: bool = False) -> Store | None:
    """Return the store at a path, or None (said once) if its directory must not be used."""
    root = Path(os.path.realpath(path))
    if problem := distrust(root, explicit=explicit):
        warn_once(
            f"trust {root}",
            f"the kernel cache {root} is not used: {problem}. Kernels stay in memory; make the directory your "
            "own (chmod 700) or set RTKERNELS_CACHE_DIR",
        )
        return None
    mode = 0o700
    if explicit:
        with contextlib.suppress(OSError):
            # A directory opened to others is shared on purpose; world-writable is never passed on.
            mode = stat.S_IMODE(os.stat(root).st_mode) & 0o775
    return Store(root, writable, extra, mode)


def distrust(root: Path, *, explicit: bool) -> str | None:
    """Return why a directory must not be used, or None; one that does not exist yet is fine.

    Args:
        root: The resolved directory.
        explicit: Whether the user named it. Such a directory may be shared, but not open to everyone.
    """
    try:
        status = os.stat(root)
    except OSError:
        return None
    bits = f"mode {stat.S_IMODE(status.st_mode):04o}"
    if explicit:
        if status.st_mode & stat.S_IWOTH and not status.st_mode & stat.S_ISVTX:
            return f"everyone can write to it ({bits})"
        return None
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others can write to it ({bits})"
    return None


# --- reading ------------------------------------------------------------------------------------------------


def image_name(target: str) -> str:
    """Return the name of the image file in an entry for this target."""
    if target.startswith("emulator-"):
        return "kernel.so"
    return "kernel.ptx" if target.startswith("compute_") else "kernel.cubin"


def read_entry(directory: Path) -> tuple[dict[str, Any], bytes, Path] | None:
    """Return meta, image and image path of an entry whose checksum holds; None if there is no such entry.

    Raises:
        BadEntry: Something is there, but it is damaged or belongs elsewhere.
        OSError: It cannot be read, which says nothing about its content.
    """
    path = directory / META
    try:
        meta = json.loads(path.read_bytes())
        if meta["format"] != FORMAT:
            raise BadEntry(f"its format is {meta['format']!r}, not {FORMAT}")
        if directory.name != f"{meta['op']}-{meta['key'][:32]}" or directory.parent.name != meta["target"]:
            raise BadEntry("it was made for another key")
        if set(meta["names"]) != set(meta["expressions"]):
            raise BadEntry("its kernel names are incomplete")
        path = directory / image_name(meta["target"])
        image = path.read_bytes()
        if hashlib.sha256(image).hexdigest() != meta["sha256"]:
            raise BadEntry(f"{path.name} does not match its checksum")
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(directory):
            return None  # never there, or removed between two reads
        raise BadEntry(f"{path.name} is missing") from None
    except (ValueError, RecursionError):
        raise BadEntry(f"{META} is not valid JSON") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadEntry(f"{META} is incomplete: {error}") from None
    return meta, image, path


def touch(directory: Path) -> None:
    """Note that an entry is in use, at most daily: eviction goes by the time of its ``meta.json``."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(directory / META).st_mtime > TOUCH_AFTER_S:
            os.utime(directory / META)


def quarantine(store: Store, directory: Path, reason: str) -> bool:
    """Move a damaged entry to ``tmp/`` and return whether that worked; either way it is said once."""
    moved = False
    try:
        aside = store.new_tmp(f"bad-{directory.name}-")
        os.rename(directory, aside)
        moved, outcome = True, f"moved to {aside}"
    except OSError as error:
        outcome = f"it is ignored, but cannot be moved away ({error.strerror or error})"
    warn_once(f"bad {directory}", f"damaged cache entry {directory}: {reason}; {outcome}")
    return moved


# --- lock ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def key_lock(store: Store, key: str, what: str) -> Iterator[None]:
    """Hold the lock of one key across processes.

    After ``LOCK_TIMEOUT_S``, or where locks do not work, the caller goes on without it: publishing by rename
    is what keeps the cache correct, the lock only keeps processes from doing the same work.

    Args:
        store: A writable store.
        key: The whole key.
        what: Named in the log line for those who wait.
    """
    descriptor = _acquire(store, key, what)
    try:
        yield
    finally:
        if descriptor is not None:
            _lock_files.discard(descriptor)
            with contextlib.suppress(OSError):
                # Explicitly: closing alone would leave it locked while a forked child has the file open.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _acquire(store: Store, key: str, what: str) -> int | None:
    # The file is never deleted: whoever waits on it would then hold a lock nobody else can see.
    path = store.base / "locks" / f"{key[:32]}.lock"
    try:
        store.make_directory(path.parent)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, store.mode & 0o666)
    except OSError:
        return None  # publishing will fail for the same reason, and say so
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
        if waited >= LOCK_TIMEOUT_S:
            message = "%s: gave up waiting for %s after %.0f s, going on without the lock"
            env.logger().warning(message, what, _holder(descriptor), waited)
            return False
        if waited >= LOCK_LOG_AFTER_S and not told:
            told = True
            message = "%s: waiting for %s, which is compiling the same kernel (%s)"
            env.logger().warning(message, what, _holder(descriptor), path)
        time.sleep(pause)
        pause = min(2 * pause, LOCK_POLL_S)


def _holder(descriptor: int) -> str:
    try:
        pid, host = os.pread(descriptor, 256, 0).decode().split(maxsplit=1)
        return f"process {int(pid)} on {host.strip()}"
    except (OSError, ValueError):
        return "another process"


def _close_inherited_locks() -> None:
    """In a forked child: an inherited copy would keep a key locked if the parent were killed."""
    for descriptor in _lock_files:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _lock_files.clear()


os.register_at_fork(after_in_child=_close_inherited_locks)


# --- writing and removing -----------------------------------------------------------------------------------


def publish(store: Store, final: Path, files: Mapping[str, bytes]) -> bool:
    """Write an entry and return whether a sound one is at ``final`` now; failure is said once, never raised.

    Args:
        store: A writable store.
        final: Directory of the entry.
        files: Name to content, ``meta.json`` last.
    """
    private: Path | None = None
    try:
        store.make_directory(final.parent)
        private = store.new_tmp()
        os.mkdir(private, 0o700)
        for name, data in files.items():
            _write(private / name, data, store.mode)
        store.open_up(private)
        _sync_directory(private)
        os.rename(private, final)
    except OSError as error:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.is_dir():
            with contextlib.suppress(OSError, BadEntry):
                return read_entry(final) is not None  # someone else won
        warn_once(
            f"write {store.root}",
            f"cannot write the kernel cache {store.root}: {error.strerror or error}. Kernels stay in memory; "
            "set RTKERNELS_CACHE_DIR to a writable directory",
        )
        return False
    with contextlib.suppress(OSError):
        _sync_directory(final.parent)
    return True


def _write(path: Path, data: bytes, directory_mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(descriptor, rest) :]
        if directory_mode != 0o700:
            os.fchmod(descriptor, directory_mode & 0o666)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove(store: Store, directory: Path) -> bool:
    """Remove an entry as a whole: moved out of sight first, so that readers see all of it or nothing."""
    try:
        aside = store.new_tmp()
        os.rename(directory, aside)
    except OSError:
        return False
    shutil.rmtree(aside, ignore_errors=True)
    return True


def usage(directory: Path) -> tuple[float, int]:
    """Return when an entry was last used (seconds since the epoch, 0 if damaged) and its size in bytes."""
    used, size = 0.0, 0
    with contextlib.suppress(OSError), os.scandir(directory) as files:
        for file in files:
            with contextlib.suppress(OSError):
                status = file.stat(follow_symlinks=False)
                size += status.st_size
                if file.name == META:
                    used = status.st_mtime
    return used, size


def shrink(store: Store, max_bytes: int) -> tuple[int, int]:
    """Evict least recently used entries until the rest fits, and sweep old leftovers; 0 bytes means no limit.

    Returns:
        How many entries were removed, and their size in bytes.
    """
    sweep(store)
    known = sorted((*usage(directory), directory) for directory in store.entries())
    excess = sum(size for _, size, _ in known) - max_bytes if max_bytes else 0
    removed = freed = 0
    for _, size, directory in known:
        if freed >= excess:
            break
        if remove(store, directory):
            removed += 1
            freed += size
    return removed, freed


def sweep(store: Store) -> None:
    """Remove what killed writers and quarantine left in ``tmp/`` more than a day ago."""
    for leftover in (store.base / "tmp").glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(leftover).st_ctime > LEFTOVER_AFTER_S:
                shutil.rmtree(leftover, ignore_errors=True)
