"""Where files of this package may be written and read.

Compiled kernels: the user's cache, those of image layers, or the directory a caller names. Anything temporary that
holds code or leads to it (the host compiler's input and output, CuPy's cache): a fresh directory that only this user
can write to. ``trust.py`` decides which directories qualify. Nothing else in the package chooses a path;
``tests/contracts/test_files.py`` reads every module for calls that do.
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
    """Return the configured cache directory; None if there is no home directory to put it into."""
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
    """Return the user's cache, or None when it is off or must not be used (said once)."""
    mode = env.get("CACHE")
    if mode == "off":
        return None
    path = location()
    if path is None:
        store_module.warn_once("home", "no home directory: kernels stay in memory; set RTKERNELS_CACHE_DIR")
        return None
    return store_module.open_store(path, trust.caller(), writable=mode == "rw")


def extra_owners() -> Owners:
    """Return the users whose files are used in the caches of ``RTKERNELS_CACHE_EXTRA``."""
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
    """Return the configured caches that are not used, or not all of them, because somebody else may have written there.

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
    """Return the caches to look in, the writable one first."""
    if directory is not None:
        return [named_store(directory)]
    own = user_store()
    return ([own] if own else []) + extra_stores()


def named_store(directory: Path) -> Store:
    """Return the cache at a directory that a caller named.

    If it is created, other users may read it; the user's own cache stays private.

    Raises:
        ArgumentError: Somebody else may write there.
    """
    root = Path(os.path.realpath(directory))
    if problem := Store(root).problem():
        raise ArgumentError(f"{directory} cannot hold compiled kernels: {problem}; use another or chmod it")
    own = location()
    published = own is None or os.path.realpath(own) != str(root)
    store = store_module.open_store(root, trust.caller(), published=published)
    if store is None:  # it changed in between
        raise ArgumentError(f"{directory} cannot hold compiled kernels")
    return store


# --- temporary files ----------------------------------------------------------------------------------------


def fresh_directory(purpose: str) -> Path:
    """Create a directory for temporary files that only this user can write to or replace.

    It is made below the first of ``TMPDIR``, ``/tmp``, ``/var/tmp`` and ``XDG_RUNTIME_DIR`` above which others cannot
    exchange it. The current folder is never used.

    Args:
        purpose: Part of its name.

    Raises:
        ToolkitError: There is no such place.
    """
    return _fresh(purpose, lambda path: os.mkdir(path, 0o700))


def _fresh(purpose: str, create: Callable[[Path], None]) -> Path:
    """Return the path of something new in a place for temporary files; ``create`` fails if anything is there."""
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
    """A new directory in a writable cache, removed at the end; what a killed process leaves is swept with the cache.

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

    What processes that were killed have left is removed first.
    """
    path, owner = _locked_directory(purpose)[0], os.getpid()  # the lock's handle stays open in forked children, too
    atexit.register(lambda: shutil.rmtree(path, ignore_errors=True) if os.getpid() == owner else None)
    return path


def _locked_directory(purpose: str) -> tuple[Path, int]:
    """Return a fresh directory and a handle that keeps other processes from taking it for a leftover."""
    _remove_leftovers(purpose)
    while True:
        path = fresh_directory(purpose)
        if (handle := _lock(path, fcntl.LOCK_SH)) is not None:
            return path, handle
        with contextlib.suppress(FileNotFoundError):  # a file system without locks, if it is still there
            return path, os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def _lock(directory: Path, how: int) -> int | None:
    """Return a handle that locks a directory of this user; None if it is gone, locked or somebody else's."""
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
    """Remove the directories for a purpose whose processes were killed: nobody holds their locks."""
    for base in _temporary_bases():
        for directory in Path(os.path.realpath(base)).glob(f"rtkernels-{purpose}-*"):
            if (handle := _lock(directory, fcntl.LOCK_EX)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(handle)


def keep_log(name: str, text: str) -> Path:
    """Write the output of a compiler to a new file that stays, which is returned.

    Raises:
        ToolkitError: It cannot be written.
    """
    return _fresh(f"log-{name}", lambda path: store_module.write(path, (text + "\n").encode(), 0o700))


def make_private_directory(path: str) -> None:
    """Create a directory and its missing parents, all with mode 0700 whatever the umask is.

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
