"""Which directories hold compiled kernels: the user's, those of image layers, or the one a caller names."""

from __future__ import annotations

import os
from pathlib import Path

from rtkernels.errors import ArgumentError
from rtkernels.runtime import env
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.store import Store


def location() -> tuple[Path | None, bool]:
    """Return the configured cache directory, and whether the user named it."""
    if named := env.get("CACHE_DIR"):
        return named, True
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "rtkernels", False
    try:
        return Path.home() / ".cache" / "rtkernels", False
    except RuntimeError:
        return None, False


def user_store() -> Store | None:
    """Return the user's cache, or None when it is off or must not be used (said once)."""
    mode = env.get("CACHE")
    if mode == "off":
        return None
    path, explicit = location()
    if path is None:
        store_module.warn_once("home", "no home directory: kernels stay in memory; set RTKERNELS_CACHE_DIR")
        return None
    return store_module.open_store(path, explicit=explicit, writable=mode == "rw")


def extra_stores() -> list[Store]:
    """Return the read-only caches of ``RTKERNELS_CACHE_EXTRA`` that exist and may be used."""
    if env.get("CACHE") == "off":
        return []
    found = []
    for path in env.get("CACHE_EXTRA"):
        if not path.is_dir():
            store_module.warn_once(f"extra {path}", f"RTKERNELS_CACHE_EXTRA: {path} is no directory, ignored")
        elif store := store_module.open_store(path, explicit=True, writable=False, extra=True):
            found.append(store)
    return found


def stores(directory: Path | None) -> list[Store]:
    """Return the caches to look in, the writable one first."""
    if directory is not None:
        if problem := store_module.distrust(Path(os.path.realpath(directory)), explicit=True):
            raise ArgumentError(f"{directory} cannot hold compiled kernels: {problem}; use another or chmod it")
        own = store_module.open_store(directory, explicit=True)
        return [own] if own else []
    own = user_store()
    return ([own] if own else []) + extra_stores()
