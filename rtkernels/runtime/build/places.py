"""Which directories hold compiled kernels: the user's, those of image layers, or the one a caller names."""

from __future__ import annotations

import os
from pathlib import Path

from rtkernels.errors import ArgumentError
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
