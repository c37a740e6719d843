"""The directories in which this package may write and read files.

Compiled kernels go to the user's cache, to caches of image layers, or to a directory that the caller names. Temporary
files that contain code or lead to it (the host compiler's input and output, CuPy's cache) go to a fresh directory that
only this user can write to. ``trust.py`` decides which directories qualify. No other module chooses a path;
``tests/contracts/test_files.py`` checks every module for calls that do.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from rtkernels.errors import ArgumentError, ToolkitError
from rtkernels.runtime import env
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build import trust
from rtkernels.runtime.build.store import Store
from rtkernels.runtime.build.trust import Owners


def location() -> Path | None:
    """Return the configured cache directory; None if there is no home directory for it."""
    if named := env.get("CACHE_DIR"):
        return named
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "rtkernels"
    try:
        home = Path.home()
    except RuntimeError:
        return None
    return home / ".cache" / "rtkernels" if home.is_absolute() else None


def user_store() -> Store | None:
    """Return the user's cache, or None (with one warning) if it is off or must not be used."""
    mode = env.get("CACHE")
    if mode == "off":
        return None
    path = location()
    if path is None:
        store_module.warn_once("home", "no home directory: kernels stay in memory; set RTKERNELS_CACHE_DIR")
        return None
    return store_module.open_store(path, trust.caller(), writable=mode == "rw")


def extra_owners() -> Owners:
    """Return the users whose files are accepted in the caches of ``RTKERNELS_CACHE_EXTRA``."""
    return trust.caller() | frozenset(env.get("CACHE_OWNERS"))


def extra_stores() -> list[Store]:
    """Return the read-only caches of ``RTKERNELS_CACHE_EXTRA`` that exist and may be used."""
    if env.get("CACHE") == "off":
        return []
    found = []
    for path in env.get("CACHE_EXTRA"):
        if not os.path.isdir(path):
            message = f"RTKERNELS_CACHE_EXTRA: {path} is no directory that this user can reach, ignored"
            store_module.warn_once(f"extra {path}", message)
        elif store := store_module.open_store(path, extra_owners(), writable=False, extra=True):
            found.append(store)
    return found


def refusals() -> dict[str, str]:
    """Return the configured caches that are not used, fully or in part, because another user may have written to them.

    Returns:
        Path of the cache to the reason.
    """
    if env.get("CACHE") == "off":
        return {}
    own = location()
    places = [(own, trust.caller())] if own else []
    places += [(path, extra_owners()) for path in env.get("CACHE_EXTRA")]
    stores = [Store(Path(os.path.realpath(path)), owners=owners) for path, owners in places]
    return {str(store.root): problem for store in stores if (problem := store.problem())}


def stores(directory: Path | None) -> list[Store]:
    """Return the caches to search, the writable one first."""
    if directory is not None:
        return [named_store(directory)]
    own = user_store()
    return ([own] if own else []) + extra_stores()


def named_store(directory: Path) -> Store:
    """Return the cache at a directory that a caller named.

    If it is created, other users may read it; the user's own cache stays private.

    Raises:
        ArgumentError: Another user may write to it.
    """
    root = Path(os.path.realpath(directory))
    if problem := Store(root).problem():
        raise ArgumentError(f"{directory} cannot hold compiled kernels: {problem}; use another or chmod it")
    own = location()
    published = own is None or os.path.realpath(own) != str(root)
    store = store_module.open_store(root, trust.caller(), published=published)
    if store is None:  # it changed since the check
        raise ArgumentError(f"{directory} cannot hold compiled kernels")
    return store


# --- temporary files ----------------------------------------------------------------------------------------


def fresh_directory(purpose: str) -> Path:
    """Create a directory for temporary files that only this user can write to or replace.

    It is created in the first of ``TMPDIR``, ``/tmp``, ``/var/tmp`` and ``XDG_RUNTIME_DIR`` where other users cannot
    replace it. The current directory is never used.

    Args:
        purpose: Part of its name.

    Raises:
        ToolkitError: There is no such place.
    """
    return _fresh(purpose, lambda path: os.mkdir(path, 0o700))


def _fresh(purpose: str, create: Callable[[Path], None]) -> Path:
    """Return a new path in a directory for temporary files; ``create`` fails if the path exists."""
    refused = []
    for base in _temporary_bases():
        path = Path(os.path.realpath(base)) / f"rtkernels-{purpose}-{os.urandom(12).hex()}"
        try:
            trust.check(path, path, trust.caller())
            create(path)
        except OSError as error:
            named = isinstance(error, trust.Untrusted)
            refused.append(error.strerror if named else f"{base}: {error.strerror or error}")
            continue
        return path
    raise ToolkitError(
        "there is no directory for temporary files that only this user can write to; set TMPDIR to one. Refused: "
        + "; ".join(refused)
    )


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """A fresh directory that is removed at the end of the block; see ``fresh_directory``."""
    path, handle = _locked_directory(purpose)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


@contextlib.contextmanager
def staging(store: Store) -> Iterator[Path]:
    """Create a directory in a writable cache and remove it at the end; leftovers of killed processes are swept later.

    Raises:
        OSError: It cannot be created.
    """
    path = store.new_tmp("compile-")
    os.mkdir(path, 0o700)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def process_directory(purpose: str) -> Path:
    """Create a fresh directory that is removed when this process (not a forked child) ends.

    Leftovers of killed processes are removed first.
    """
    path, owner = _locked_directory(purpose)[0], os.getpid()  # forked children keep the lock's handle open, too
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return path


def _locked_directory(purpose: str) -> tuple[Path, int]:
    """Return a fresh directory and a lock handle, so that other processes do not take it for a leftover."""
    _remove_leftovers(purpose)
    while True:
        path = fresh_directory(purpose)
        if (handle := _lock(path, fcntl.LOCK_SH)) is not None:
            return path, handle
        with contextlib.suppress(FileNotFoundError):  # the file system may not support locks
            return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(directory: Path, how: int) -> int | None:
    """Return a handle that locks a directory of this user; None if it is gone, locked or of another user."""
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


def _remove_leftovers(purpose: str) -> None:
    """Remove the directories for a purpose whose processes were killed: their locks are free."""
    for base in _temporary_bases():
        for directory in Path(os.path.realpath(base)).glob(f"rtkernels-{purpose}-*"):
            if (handle := _lock(directory, fcntl.LOCK_EX)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(handle)


def keep_log(name: str, text: str) -> Path:
    """Write the output of a compiler to a new, permanent file and return its path.

    Raises:
        ToolkitError: It cannot be written.
    """
    return _fresh(f"log-{name}", lambda path: store_module.write(path, (text + "\n").encode(), 0o700))


def make_private_directory(path: str) -> None:
    """Create a directory and its missing parents, all with mode 0700 regardless of the umask.

    Raises:
        OSError: One of them cannot be created.
    """
    if os.path.isdir(path):
        return
    make_private_directory(os.path.dirname(path))
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _temporary_bases() -> list[str]:
    named = [os.environ.get(name, "") for name in ("TMPDIR", "TEMP", "TMP")]
    bases = [*named, "/tmp", "/var/tmp", os.environ.get("XDG_RUNTIME_DIR", "")]
    return list(dict.fromkeys(base for base in bases if os.path.isabs(base)))
