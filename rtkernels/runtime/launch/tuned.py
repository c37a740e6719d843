"""Measured choices in memory: read once for each GPU, when its first plan is made, and never changed by a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from rtkernels.errors import RtkError
from rtkernels.runtime.build import places, tuned
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.store import Store
from rtkernels.runtime.launch.device import DeviceInfo
from rtkernels.runtime.launch.plans import Plans

_tables: dict[str, tuned.Table] = {}
_sources: dict[str, str] = {}  # of families


def find(info: DeviceInfo, family: str, units: Callable[[], Sequence[str]], problem: str) -> dict[str, Any] | None:
    """Return the choice for a problem, None if it was not measured with these kernels on such a GPU.

    Args:
        info: The device.
        family: Whose problem it is.
        units: Returns the sources of the family's kernels; called only if there are choices.
        problem: Its key.
    """
    table = _tables.get(info.name)
    if table is None:
        table = _tables[info.name] = tuned.load(info.name)
    if not table:
        return None
    return table.get(source(family, units), {}).get(family, {}).get(problem)


def source(family: str, units: Callable[[], Sequence[str]]) -> str:
    """Return the hash of a family's kernels."""
    if family not in _sources:
        _sources[family] = tuned.source_key(units())
    return _sources[family]


def forget() -> None:
    """Read tables again when they are next needed, and drop all plans, which may have been made with others."""
    _tables.clear()
    _sources.clear()
    Plans.forget_all()


def writable() -> Store:
    """Return the user's cache.

    Raises:
        RtkError: It cannot be written.
    """
    store = places.user_store()
    if store is None or not store.writable:
        raise RtkError("measured choices need a cache directory that can be written; set RTKERNELS_CACHE_DIR")
    try:
        store_module.require_writable(store)
    except OSError as error:
        raise RtkError(f"the cache {store.root} cannot be written: {error.strerror or error}") from None
    return store


def add(store: Store, gpu: str, table: tuned.Table) -> None:
    """Add choices to the table of a GPU, and let plans be made again.

    Raises:
        RtkError: It cannot be written.
    """
    try:
        tuned.add(store, gpu, table)
    except OSError as error:
        raise RtkError(f"the cache {store.root} cannot be written: {error.strerror or error}") from None
    forget()
