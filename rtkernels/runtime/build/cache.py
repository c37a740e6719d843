"""The kernel cache: from (unit, expressions, target) to a verified image, compiling at most once.

The order is memory, the user's directory, the read-only directories, NVRTC. Nothing here raises because a disk is full,
read-only or damaged: the kernel is then compiled in memory, with one warning. ``store.py`` has the code that works on
disk; ``docs/cache.md`` describes the cache for users.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import json
import os
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from rtkernels.errors import NotWarmError, ToolkitError
from rtkernels.runtime import env
from rtkernels.runtime.build import nvrtc, places, sources, trust
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.key import Request, make_request
from rtkernels.runtime.build.locks import key_lock
from rtkernels.runtime.build.store import BadEntry, Store
from rtkernels.runtime.targets import Target

__all__ = ["Entry", "Stats", "forget", "load", "peek", "stats"]


@dataclass
class Stats:
    """Counters of cache events in this process; read by tests and ``doctor``."""

    compiles: int = 0
    disk_hits: int = 0
    extra_hits: int = 0
    memory_hits: int = 0
    quarantined: int = 0

    def count(self, name: str) -> None:
        with _state.guard:
            setattr(self, name, getattr(self, name) + 1)

    def reset(self) -> None:
        for field in fields(self):
            setattr(self, field.name, 0)


@dataclass(frozen=True)
class Entry:
    """A kernel image that is ready to load.

    Attributes:
        image: Cubin or PTX, already verified.
        path: The same image on disk, or None if it exists in memory only.
        names: Name expression to mangled kernel name.
        meta: The content of ``meta.json``.
        source: Where it came from.
    """

    image: bytes
    path: Path | None
    names: dict[str, str]
    meta: dict[str, Any]
    source: Literal["memory", "disk", "extra", "compiled"]


class _State:
    """State that the threads of a process share."""

    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.locks: dict[str, threading.Lock] = {}
        self.memory: dict[str, Entry] = {}
        self.cap_checked = False

    def lock(self, key: str) -> threading.Lock:
        with self.guard:
            return self.locks.setdefault(key, threading.Lock())


_state = _State()
stats = Stats()


def forget() -> None:
    """Reset the state of this process: entries in memory, warnings already given, the size check, counters."""
    global _state
    _state = _State()
    store_module._warned.clear()
    trust.forget()
    stats.reset()


def _renew_locks() -> None:
    """Create new locks in a forked child: threads that exist only in the parent may hold the old ones."""
    _state.guard = threading.Lock()
    _state.locks = {}


os.register_at_fork(after_in_child=_renew_locks)


# --- one store ----------------------------------------------------------------------------------------------


def _read(store: Store, directory: Path, request: Request) -> Entry | None:
    try:
        found = store_module.read_entry(directory, store.owners)
    except OSError as error:
        store_module.complain(store, "read", error)
        return None
    if found is None:
        return None
    meta, image, path = found
    if meta.get("base_key") != request.base_key:
        raise BadEntry("it belongs to another key")
    return Entry(image, path, dict(meta["names"]), meta, "extra" if store.extra else "disk")


def _probe(store: Store, request: Request, *, locked: bool = False) -> Entry | None:
    """Return the entry of one store if it is intact; a damaged one is moved away, under the lock."""
    directory = request.directory(store)
    try:
        entry = _read(store, directory, request)
    except BadEntry as bad:
        if not store.writable:
            store_module.warn_once(f"bad {directory}", f"damaged cache entry {directory}: {bad}; it is ignored")
            return None
        if not locked:
            with key_lock(store, request.key, request.op):
                return _probe(store, request, locked=True)
        if store_module.quarantine(store, directory, str(bad)):
            stats.count("quarantined")
        return None
    if entry is not None and store.writable:
        store_module.touch(directory)
    return entry


def _other_versions(store: Store, request: Request) -> list[tuple[tuple[int, ...], Path]]:
    """Return entries that differ only in the NVRTC version, as (version, directory), best first.

    The best is the newest one not newer than the installed NVRTC, because an equally old driver may not load newer PTX.
    Then come those of the same major version, then any others.
    """
    found = []
    for directory in store.entries(request.target.name, request.op):
        with contextlib.suppress(BadEntry, OSError):
            meta = store_module.read_meta(directory, store.owners)
            if meta and meta.get("base_key") == request.base_key and directory != request.directory(store):
                found.append((tuple(meta.get("nvrtc", ())), directory))

    def preference(candidate: tuple[tuple[int, ...], Path]) -> tuple[bool, bool, tuple[int, ...]]:
        version = candidate[0]
        installed = request.nvrtc or version
        return version[:1] == installed[:1], version <= installed, version

    return sorted(found, key=preference, reverse=True)


def _probe_any_version(store: Store, request: Request) -> Entry | None:
    """Return an entry that differs only in the NVRTC version."""
    for version, directory in _other_versions(store, request):
        with contextlib.suppress(BadEntry):
            if entry := _read(store, directory, request):
                why = f"NVRTC {_dotted(request.nvrtc)} may not compile" if request.nvrtc else "NVRTC cannot be loaded"
                env.logger().info("%s: using %s, built with NVRTC %s", why, entry.path, _dotted(version))
                return entry
    return None


def _dotted(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def _publish(store: Store, request: Request, meta: dict[str, Any], image: bytes) -> Path | None:
    """Write an entry to disk; return the path of its image, or None if that failed."""
    final = request.directory(store)
    name = store_module.image_name(request.target.name)
    instances = "".join(f"//   {expression}\n" for expression in request.expressions)
    heading = f"// {sources.name(request.unit)} {' '.join(request.flags)}\n{instances}"
    listing = heading + sources.flatten(request.sources)
    source = gzip.compress(listing.encode(), mtime=0)  # compressed because it is seldom read and larger than the image
    files = {name: image, "kernel.cu.gz": source, store_module.META: json.dumps(meta).encode()}
    return final / name if store_module.publish(store, final, files) else None


def _meta(request: Request, compiled: nvrtc.Compiled) -> dict[str, Any]:
    content = {
        "format": store_module.FORMAT,
        "key": request.key,
        "base_key": request.base_key,
        "op": request.op,
        "unit": sources.name(request.unit),
        "expressions": list(request.expressions),
        "names": compiled.names,
        "target": request.target.name,
        "nvrtc": list(request.nvrtc or ()),
        "flags": list(request.flags),
        "sources": request.digests,
        "sha256": hashlib.sha256(compiled.image).hexdigest(),
        "size": len(compiled.image),
        "resources": {name: asdict(used) for name, used in compiled.resources.items()},
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    return store_module.sealed(content)


# --- load ---------------------------------------------------------------------------------------------------


def load(
    unit: str,
    expressions: Sequence[str],
    target: Target,
    flags: Iterable[str] = (),
    *,
    op: str,
    compile_allowed: bool = True,
    directory: Path | None = None,
) -> Entry:
    """Return the compiled kernels, from memory, disk or NVRTC, in this order.

    Args:
        unit: Name of the ``.cu`` file, relative to the source root, or its absolute path.
        expressions: C++ name expressions that are compiled together.
        target: The compilation target.
        flags: Extra compiler options, see ``nvrtc.flags_for``.
        op: Name of the op; part of the entry's name and of messages.
        compile_allowed: False while a CUDA graph is captured.
        directory: Use only this cache, as ``warm --out`` does. ``Entry.path`` is None if it could not be written.

    Raises:
        NotWarmError: It is not cached, and compiling is not allowed.
        KernelCompileError: It does not compile.
        ToolkitError: CuPy or NVRTC is missing and no cache has it.
    """
    missing: ToolkitError | None = None
    try:
        version = nvrtc.version()
    except ToolkitError as error:
        missing, version = error, None
    request = make_request(op, unit, expressions, target, flags, version)
    stores = places.stores(directory)

    with _state.lock(request.key):
        if directory is None and (known := _state.memory.get(request.key)):
            stats.count("memory_hits")
            gone = known.path is not None and not known.path.exists()
            return replace(known, source="memory", path=None if gone else known.path)
        entry = _search(request, stores)
        if entry is None:
            _require_compiler(request, stores, missing, compile_allowed)
            entry = _build(request, next((store for store in stores if store.writable), None))
            if directory is None and entry.source == "compiled" and entry.path is not None:
                _enforce_cap(stores[0])
        if directory is None:
            _state.memory[request.key] = entry
        return entry


def peek(
    unit: str,
    expressions: Sequence[str],
    target: Target,
    flags: Iterable[str] = (),
    *,
    op: str,
    directory: Path | None = None,
) -> Path | None:
    """Return the directory of the entry that ``load`` would find, without verifying or building it; None if absent."""
    request = make_request(op, unit, expressions, target, flags, nvrtc.version())
    stores = places.stores(directory)
    for store in stores:
        with contextlib.suppress(BadEntry, OSError):
            if store_module.read_meta(request.directory(store), store.owners):
                return request.directory(store)
    if not env.get("NO_COMPILE"):
        return None
    return next((other for store in stores for _, other in _other_versions(store, request)), None)


def _search(request: Request, stores: Sequence[Store]) -> Entry | None:
    """Return an entry of this NVRTC; if there is none and compiling is impossible, one of another NVRTC."""
    probes = [_probe] if request.nvrtc else []
    if request.nvrtc is None or env.get("NO_COMPILE"):
        probes.append(_probe_any_version)
    for probe in probes:
        for store in stores:
            if entry := probe(store, request):
                stats.count("disk_hits" if entry.source == "disk" else "extra_hits")
                return entry
    return None


def _require_compiler(
    request: Request, stores: Sequence[Store], missing: ToolkitError | None, compile_allowed: bool
) -> None:
    forbidden = env.get("NO_COMPILE")
    if compile_allowed and not forbidden:
        if missing is not None:
            raise missing
        return
    why = "RTKERNELS_NO_COMPILE is set" if forbidden else "it cannot be compiled here (CUDA graph capture)"
    command = f"rtkernels warm --arch {request.target.name} --op {request.op}"
    others = sorted({version for store in stores for version, _ in _other_versions(store, request)})
    said = ""
    if others:
        versions, installed = ", ".join(map(_dotted, others)), _dotted(request.nvrtc or ())
        said = f" (the cache has it from NVRTC {versions}; NVRTC {installed} is installed)"
    said += "".join(f" (not used: {reason})" for reason in places.refusals().values())
    raise NotWarmError(
        f"{request.op}: {'; '.join(request.expressions)} for {request.target.name} is not in the cache "
        f"(key {request.key[:32]}){said}, and {why}. Build it beforehand with `{command}`",
        key=request.key,
        command=command,
    )


def _build(request: Request, store: Store | None) -> Entry:
    if store is None:
        return _compile(request, None)
    with key_lock(store, request.key, request.op):
        if entry := _probe(store, request, locked=True):
            stats.count("disk_hits")
            return entry
        return _compile(request, store)


def _compile(request: Request, store: Store | None) -> Entry:
    env.logger().info("compiling %s for %s: %s", request.op, request.target, "; ".join(request.expressions))
    compiled = nvrtc.compile_unit(
        request.unit,
        request.expressions,
        request.target,
        request.extra_flags,
        op=request.op,
        sources=request.sources,
    )
    stats.count("compiles")
    meta = _meta(request, compiled)
    path = _publish(store, request, meta, compiled.image) if store else None
    return Entry(compiled.image, path, compiled.names, meta, "compiled")


def _enforce_cap(store: Store) -> None:
    """Evict entries over the size cap; checked once per process, after a write."""
    if _state.cap_checked:
        return
    _state.cap_checked = True
    with contextlib.suppress(OSError):
        store_module.shrink(store, env.get("CACHE_MAX_MB") * 1_000_000)
