"""One cache directory on disk: entries, publishing, eviction.

An entry is a directory ``v2/<target>/<op>-<key32>/`` with the image, ``meta.json`` and the readable source,
``kernel.cu.gz``. It is written under ``v2/tmp/`` and renamed into place, and it is removed the same way, so readers
never see part of one. Files that another user could have written are neither read nor replaced (``trust.py``).
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env
from rtkernels.runtime.build import trust
from rtkernels.runtime.build.trust import Owners, Untrusted

FORMAT = 2
META = "meta.json"
TOUCH_AFTER_S = 86_400.0  # the time of last use is updated at most daily
LEFTOVER_AFTER_S = 86_400.0  # older files in tmp/ have no running writer; damaged entries are kept as long

_RESERVED = ("tmp", "locks", "tuned")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,127}")  # of a target or an op

_warned: set[str] = set()


class BadEntry(Exception):
    """An entry that must not be used; the text is the reason."""


@dataclass(frozen=True)
class Store:
    """A cache directory that was resolved and found trustworthy.

    Attributes:
        root: The directory that contains ``v2/``.
        writable: False for read-only caches; nothing is created, moved or touched there.
        extra: True for the caches of ``RTKERNELS_CACHE_EXTRA``.
        mode: Permissions of new directories in it.
        owners: User ids whose files are accepted.
    """

    root: Path
    writable: bool = True
    extra: bool = False
    mode: int = 0o700
    owners: Owners = field(default_factory=trust.caller)

    @property
    def base(self) -> Path:
        """The versioned directory with all content."""
        return self.root / f"v{FORMAT}"

    def new_tmp(self, prefix: str = "") -> Path:
        """Return an unused name in ``tmp/``, which is created if needed."""
        self.make_directory(self.base / "tmp")
        return self.base / "tmp" / f"{prefix}{os.urandom(16).hex()}"

    def make_directory(self, directory: Path) -> None:
        """Create a directory and its parents, private unless the user opened the root to others.

        Raises:
            Untrusted: It exists, but another user owns it or may write to it.
        """
        self._make(directory)
        trust.check(directory, self.root, self.owners)

    def _make(self, directory: Path) -> None:
        if directory.is_dir():
            return
        self._make(directory.parent)
        try:
            os.mkdir(directory, 0o700)
        except FileExistsError:
            if not directory.is_dir():
                raise
        else:
            self.open_up(directory)

    def open_up(self, directory: Path) -> None:
        """Give one of our directories the permissions of the root."""
        if self.mode != 0o700:
            os.chmod(directory, self.mode | (os.stat(directory).st_mode & stat.S_ISGID))

    def entry(self, target: str, op: str, key: str) -> Path:
        """Return the directory of one entry.

        Raises:
            ArgumentError: A name is not a valid target or op name, and could lead out of the cache.
        """
        check_name("target", target)
        check_name("op", op)
        return self.base / target / f"{op}-{key[:32]}"

    def entries(self, target: str | None = None, op: str | None = None) -> Iterator[Path]:
        """Yield the directories of all entries, intact or not, optionally of one target or op.

        Raises:
            ArgumentError: A name is not a valid target or op name, and could lead out of the cache.
        """
        for argument, name in (("target", target), ("op", op)):
            if name is not None:
                check_name(argument, name)
        for directory in sorted(self.base.glob(f"{target or '*'}/{op or '*'}-*")):
            if directory.parent.name not in _RESERVED and not directory.parent.is_symlink():
                yield directory

    def problem(self) -> str | None:
        """Return why a directory in this cache must not be used, or None."""
        if found := trust.problem(self.root, self.base, self.owners):
            return found
        with contextlib.suppress(OSError):
            for directory in sorted(self.base.iterdir()):
                if not directory.is_file() and (found := trust.problem(self.root, directory, self.owners)):
                    return found
        return None


def check_name(argument: str, name: Any) -> None:
    """Raise an ArgumentError unless the name can be one component of a cache path and of a glob pattern."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ArgumentError(
            f"{argument} is {name!r}, which cannot name a cache entry: expected letters, digits, '_' and '-'"
        )


def open_store(
    path: Path, owners: Owners, *, writable: bool = True, extra: bool = False, published: bool = False
) -> Store | None:
    """Return the store at a path, or None (with a warning) if its directory must not be used.

    Args:
        path: The cache; it may not exist yet.
        owners: User ids whose files are accepted.
        writable: Whether entries may be added.
        extra: Whether it is one of ``RTKERNELS_CACHE_EXTRA``.
        published: Whether other users may read it if it is created.
    """
    root = Path(os.path.realpath(path))
    if problem := trust.problem(root, root, owners):
        _refuse(root, problem, extra)
        return None
    mode = 0o755 if published else 0o700
    with contextlib.suppress(OSError):
        mode = stat.S_IMODE(os.stat(root).st_mode) & 0o755  # readable by others if the user allows it, never writable
    return Store(root, writable, extra, mode, owners)


def warn_once(topic: str, message: str) -> None:
    """Log a warning, once per topic and process."""
    if topic not in _warned:
        _warned.add(topic)
        env.logger().warning(message)


def complain(store: Store, verb: Literal["read", "write"], error: OSError) -> None:
    """Warn, once per process, that a cache cannot be read or written, or must not be."""
    if isinstance(error, Untrusted):
        _refuse(store.root, error.strerror, store.extra)
        return
    advice = ". Kernels stay in memory; set RTKERNELS_CACHE_DIR to a writable directory" if verb == "write" else ""
    why = error.strerror or error
    warn_once(f"{verb} {store.root}", f"cannot {verb} the kernel cache {store.root}: {why}{advice}")


def _refuse(root: Path, problem: str, extra: bool) -> None:
    if extra:
        remedy = "What is in it is ignored; if you trust its owner, name the user in RTKERNELS_CACHE_OWNERS"
    else:
        remedy = "Kernels stay in memory; correct that (chown, chmod go-w) or set RTKERNELS_CACHE_DIR"
    warn_once(f"trust {problem}", f"the kernel cache {root} is not used: {problem}. {remedy}")


# --- reading ------------------------------------------------------------------------------------------------


def image_name(target: str) -> str:
    """Return the name of the image file in an entry for this target."""
    if target.startswith("emulator-"):
        return "kernel.so"
    return "kernel.ptx" if target.startswith("compute_") else "kernel.cubin"


def sealed(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of ``meta.json`` with a checksum over all other fields."""
    rest = {name: value for name, value in meta.items() if name != "checksum"}
    return {**rest, "checksum": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def read_meta(directory: Path, owners: Owners | None = None) -> dict[str, Any] | None:
    """Return the ``meta.json`` of an entry if its checksum is right, None if there is no such entry.

    Args:
        directory: The entry, in a resolved cache.
        owners: User ids whose files are accepted. Default: the caller and root.

    Raises:
        BadEntry: The entry is damaged, belongs to another key, or is owned by another user.
        Untrusted: Another user could have written it.
        OSError: It cannot be read, which says nothing about its content.
    """
    owners = owners or trust.caller()
    trust.check(directory.parent, directory.parents[2], owners)
    try:
        trust.check(directory, directory.parents[2], owners)
    except Untrusted as untrusted:
        raise BadEntry(untrusted.strerror) from None
    content = read_file(directory / META, owners)
    if content is None:
        return None
    try:
        meta = json.loads(content)
        if meta["format"] != FORMAT:
            raise BadEntry(f"its format is {meta['format']!r}, not {FORMAT}")
        if sealed(meta)["checksum"] != meta["checksum"]:
            raise BadEntry(f"{META} does not match its checksum")
        if directory.name != f"{meta['op']}-{meta['key'][:32]}" or directory.parent.name != meta["target"]:
            raise BadEntry("it belongs to another key")
        if set(meta["names"]) != set(meta["expressions"]):
            raise BadEntry("its kernel names are incomplete")
    except (ValueError, RecursionError):
        raise BadEntry(f"{META} is not valid JSON") from None
    except (KeyError, TypeError, AttributeError) as error:
        raise BadEntry(f"{META} is incomplete: {error}") from None
    return meta


def read_entry(directory: Path, owners: Owners | None = None) -> tuple[dict[str, Any], bytes, Path] | None:
    """Return meta, image and image path of an entry whose checksums are right; otherwise like ``read_meta``."""
    meta = read_meta(directory, owners)
    if meta is None:
        return None
    path = directory / image_name(meta["target"])
    image = read_file(path, owners or trust.caller())
    if image is None:
        return None
    if hashlib.sha256(image).hexdigest() != meta["sha256"]:
        raise BadEntry(f"{path.name} does not match its checksum")
    return meta, image, path


def read_file(path: Path, owners: Owners) -> bytes | None:
    """Return the content of one file of an entry, None if the whole entry is gone."""
    try:
        # Never follow a link or wait for a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        if not os.path.lexists(path.parent):
            return None  # it never existed, or was removed between two reads
        raise BadEntry(f"{path.name} is missing") from None
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise BadEntry(f"{path.name} is not a regular file") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadEntry(f"{path.name} is not a regular file")
        trust.check_file(path, status, owners)
        with open(descriptor, "rb", buffering=0, closefd=False) as file:
            return file.read()
    except Untrusted as untrusted:
        raise BadEntry(untrusted.strerror) from None
    finally:
        os.close(descriptor)


def touch(directory: Path) -> None:
    """Record that an entry is in use, at most daily: eviction uses the time of its ``meta.json``."""
    with contextlib.suppress(OSError):
        if time.time() - os.stat(directory / META).st_mtime > TOUCH_AFTER_S:
            os.utime(directory / META)


def quarantine(store: Store, directory: Path, reason: str) -> bool:
    """Move a damaged entry to ``tmp/`` and return whether that worked; both outcomes are logged once."""
    moved = False
    try:
        aside = store.new_tmp(f"bad-{directory.name}-")
        os.rename(directory, aside)
        moved, outcome = True, f"moved to {aside}"
    except OSError as error:
        outcome = f"it is ignored, but cannot be moved away ({error.strerror or error})"
    warn_once(f"bad {directory}", f"damaged cache entry {directory}: {reason}; {outcome}")
    return moved


# --- writing and removing -----------------------------------------------------------------------------------


def publish(store: Store, final: Path, files: Mapping[str, bytes]) -> bool:
    """Write an entry and return whether an intact one is at ``final`` now. Failures are logged once, never raised.

    Args:
        store: A writable store.
        final: Directory of the entry.
        files: Name to content, ``meta.json`` last; its checksum is added here.
    """
    private: Path | None = None
    try:
        store.make_directory(final.parent)
        private = store.new_tmp()
        os.mkdir(private, 0o700)
        for name, data in files.items():
            text = json.dumps(sealed(json.loads(data)), indent=1).encode() if name == META else data
            write(private / name, text, store.mode)
        store.open_up(private)
        _sync_directory(private)
        os.rename(private, final)
    except OSError as error:
        if private is not None:
            shutil.rmtree(private, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST) and final.is_dir():
            with contextlib.suppress(OSError, BadEntry):
                return read_entry(final, store.owners) is not None  # another process was faster
        complain(store, "write", error)
        return False
    with contextlib.suppress(OSError):
        _sync_directory(final.parent)
    return True


def require_writable(store: Store) -> None:
    """Write and remove a page, so that a long task fails before it starts.

    Raises:
        OSError: Nothing can be written.
    """
    probe = store.new_tmp("probe-")
    try:
        write(probe, bytes(4096), store.mode)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(probe)


def write(path: Path, data: bytes, directory_mode: int) -> None:
    """Write a new file, never through an existing one; readable by users who can read its directory."""
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
    """Remove a whole entry: it is moved away first, so that readers see all of it or nothing."""
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
        The number of removed entries, and their size in bytes.
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
    """Remove leftovers of killed writers and quarantined entries from ``tmp/`` after a day."""
    if trust.problem(store.root, store.base / "tmp", store.owners):
        return
    for leftover in (store.base / "tmp").glob("*"):
        with contextlib.suppress(OSError):
            if time.time() - os.stat(leftover).st_ctime > LEFTOVER_AFTER_S:
                shutil.rmtree(leftover, ignore_errors=True)
