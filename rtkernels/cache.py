"""Look at and look after the kernel cache: ``path info ls verify prune clear``.

All of it works without a GPU and while other processes use the cache: entries leave it as a whole, and
whoever misses one compiles it again.
"""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import places
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.store import BadEntry, Store

__all__ = ["Cached", "Removed", "Verified", "clear", "info", "ls", "path", "prune", "verify"]


@dataclass(frozen=True)
class Cached:
    """One entry, as ``ls`` reports it.

    Attributes:
        op: Name of the op.
        target: What it was compiled for, for example ``sm_90a``.
        key: First 32 digits of its key.
        size: Bytes on disk, all files together.
        last_used: Seconds since the epoch, to about a day.
        path: Directory of the entry.
        meta: Content of ``meta.json``; empty if the entry is damaged.
        problem: Why it is damaged, or None.
    """

    op: str
    target: str
    key: str
    size: int
    last_used: float
    path: Path
    meta: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Verified:
    """What ``verify`` found: the number of entries looked at, and the damaged ones."""

    checked: int
    bad: list[Cached]


@dataclass(frozen=True)
class Removed:
    """What ``prune`` or ``clear`` removed."""

    entries: int
    size: int


def path() -> Path | None:
    """Return the directory of the cache, symbolic links resolved; None if there is no home to put it in."""
    configured = places.location()
    return Path(os.path.realpath(configured)) if configured else None


def info() -> dict[str, Any]:
    """Return where the cache is, how it is used and how much is in it.

    Returns:
        ``path``, ``mode`` (rw, ro, off), ``problem`` (why it is not used, or None), ``entries``, ``size`` and
        ``max_size`` in bytes, ``targets`` (entries per target), ``nvrtc`` (entries per NVRTC version, those of the
        read-only caches included), ``extra`` (the read-only caches in use), ``refused`` (configured caches in which
        somebody else may have written, each with the reason), and ``stats`` (what this process did).
    """
    place, refused = path(), places.refusals()
    cached = ls()
    extra = places.extra_stores()
    versions = Counter(_version(entry.meta) for entry in cached if entry.meta)
    for store in extra:
        for directory in store.entries():
            with contextlib.suppress(BadEntry, OSError):
                if meta := store_module.read_meta(directory, store.owners):
                    versions[_version(meta)] += 1
    return {
        "path": place,
        "mode": env.get("CACHE"),
        "problem": "no home directory" if place is None else refused.get(str(place)),
        "entries": len(cached),
        "size": sum(entry.size for entry in cached),
        "max_size": env.get("CACHE_MAX_MB") * 1_000_000,
        "targets": dict(Counter(entry.target for entry in cached)),
        "nvrtc": {version: count for version, count in sorted(versions.items()) if version},
        "extra": [store.root for store in extra],
        "refused": refused,
        "stats": vars(build_cache.stats).copy(),
    }


def _version(meta: dict[str, Any]) -> str:
    """Return the NVRTC that made an entry, as ``13.0``; empty for those of the emulator."""
    return ".".join(map(str, meta.get("nvrtc", ())))


def ls(target: str | None = None, op: str | None = None) -> list[Cached]:
    """Return all entries of the user's cache, checksums verified, sorted by target and op.

    Args:
        target: Only those of this target, for example ``sm_90a``.
        op: Only those of this op.

    Raises:
        ArgumentError: ``target`` or ``op`` is not a name.
    """
    _check_names(target, op)
    store = places.user_store()
    if store is None:
        return []
    return [_inspect(store, directory) for directory in store.entries(target, op)]


def verify(*, repair: bool = False) -> Verified:
    """Check every entry against its checksum.

    Args:
        repair: Move damaged entries out of the way; they are compiled again when needed.
    """
    cached = ls()
    bad = [entry for entry in cached if entry.problem]
    store = _writable_store()
    if repair and store:
        for entry in bad:
            store_module.quarantine(store, entry.path, entry.problem or "")
    return Verified(len(cached), bad)


def prune(max_mb: int | None = None) -> Removed:
    """Remove the least recently used entries until the cache is no larger than a limit.

    Args:
        max_mb: The limit in MB, 0 for none; ``RTKERNELS_CACHE_MAX_MB`` if not given.

    Raises:
        ArgumentError: ``max_mb`` is not a whole number from 0 up.
    """
    if max_mb is not None and (type(max_mb) is not int or max_mb < 0):
        raise ArgumentError(f"max_mb is {max_mb!r}; expected a whole number of megabytes, 0 for no limit")
    limit = env.get("CACHE_MAX_MB") if max_mb is None else max_mb
    store = _writable_store()
    return Removed(*store_module.shrink(store, limit * 1_000_000)) if store else Removed(0, 0)


def clear(target: str | None = None, op: str | None = None) -> Removed:
    """Remove all entries, or those of one target or op. Lock files stay: other processes may hold them.

    Args:
        target: Only those of this target, for example ``sm_90a``.
        op: Only those of this op.

    Raises:
        ArgumentError: ``target`` or ``op`` is not a name.
    """
    _check_names(target, op)
    store = _writable_store()
    if store is None:
        return Removed(0, 0)
    removed = size = 0
    for directory in store.entries(target, op):
        _, bytes_used = store_module.usage(directory)
        if store_module.remove(store, directory):
            removed += 1
            size += bytes_used
    store_module.sweep(store)
    return Removed(removed, size)


def _check_names(target: str | None, op: str | None) -> None:
    for argument, name in (("target", target), ("op", op)):
        if name is not None:
            store_module.check_name(argument, name)


def _writable_store() -> Store | None:
    store = places.user_store()
    return store if store and store.writable else None


def _inspect(store: Store, directory: Path) -> Cached:
    op, _, key = directory.name.rpartition("-")
    meta: dict[str, Any] = {}
    problem = None
    try:
        if found := store_module.read_entry(directory, store.owners):
            meta = found[0]
    except (BadEntry, OSError) as error:
        problem = str(error)
    used, size = store_module.usage(directory)
    return Cached(op, directory.parent.name, key, size, used, directory, meta, problem)
