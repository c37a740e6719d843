"""Measured choices on disk: ``v2/tuned/<GPU>.json`` in a cache directory, written by ``rtkernels tune``.

A table holds, for one GPU by its name, ``{source: {family: {problem: choice}}}``. ``source`` is a hash of the kernels
that were measured, so a choice is not used with other kernels. Tables hold names and sizes only; whoever reads a choice
checks it against the candidates of its problem (``ops/shared/backend.py``).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rtkernels.runtime.build import places, sources, trust
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.store import BadEntry, Store

FOLDER = "tuned"
FORMAT = 1
Table = dict[str, dict[str, dict[str, dict[str, Any]]]]


def source_key(units: Iterable[str]) -> str:
    """Return a hash of the text of these units and of their headers."""
    files: dict[str, str] = {}
    for unit in units:
        files |= sources.digests(sources.closure(unit))
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]


def _path(store: Store, gpu: str) -> Path:
    return store.base / FOLDER / f"{re.sub(r'[^A-Za-z0-9]+', '_', gpu)}.json"


def read(store: Store, gpu: str) -> Table:
    """Return the table of a GPU in one cache; an empty one if there is none, or (with one warning) if it is damaged."""
    content = _content(store, _path(store, gpu))
    return content["choices"] if content is not None and content["gpu"] == gpu else {}


def _content(store: Store, path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        trust.check(path.parent, store.root, store.owners)
        data = json.loads(store_module.read_file(path, store.owners) or b"")
        if data["format"] != FORMAT or not isinstance(data["gpu"], str):
            raise BadEntry(f"its format is {data['format']!r}, not {FORMAT}")
        for families in data["choices"].values():
            for choices in families.values():
                for choice in choices.values():
                    choice["backend"], dict(choice["options"])
        return data
    except (OSError, BadEntry, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        store_module.warn_once(f"tuned {path}", f"measured choices in {path} are ignored: {error}")
        return None


def _merged(*tables: Table) -> Table:
    """Return all choices, those of later tables in preference."""
    result: Table = {}
    for table in tables:
        for source, families in table.items():
            for family, choices in families.items():
                result.setdefault(source, {}).setdefault(family, {}).update(choices)
    return result


def load(gpu: str) -> Table:
    """Return the choices for a GPU: the user's own, then those of ``RTKERNELS_CACHE_EXTRA``, the first one first."""
    return _merged(*(read(store, gpu) for store in reversed(places.stores(None))))


def gpus() -> list[str]:
    """Return the names of GPUs for which there are choices."""
    found = [
        content["gpu"] for store in places.stores(None) for path in sorted((store.base / FOLDER).glob("*.json"))
        if (content := _content(store, path)) is not None
    ]  # fmt: skip
    return list(dict.fromkeys(found))


def write(store: Store, gpu: str, table: Mapping[str, Any]) -> Path:
    """Replace the table of a GPU in a writable cache.

    Raises:
        OSError: It cannot be written.
    """
    path = _path(store, gpu)
    store.make_directory(path.parent)
    private = store.new_tmp()
    data = json.dumps({"format": FORMAT, "gpu": gpu, "choices": table}, indent=1, sort_keys=True)
    try:
        store_module.write(private, data.encode(), store.mode)
        os.replace(private, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(private)
        raise
    return path


def add(store: Store, gpu: str, table: Table) -> Path:
    """Add choices to the table of a GPU."""
    return write(store, gpu, _merged(read(store, gpu), table))


def ship(store: Store) -> int:
    """Copy all choices of this user to another cache, and return how many that has now."""
    count = 0
    for gpu in gpus():
        table = load(gpu)
        add(store, gpu, table)
        count += sum(len(choices) for families in table.values() for choices in families.values())
    return count


def clear() -> int:
    """Remove the user's own tables, and return how many there were."""
    store, removed = places.user_store(), 0
    if store is not None and store.writable and not trust.problem(store.root, store.base / FOLDER, store.owners):
        for path in (store.base / FOLDER).glob("*.json"):
            with contextlib.suppress(OSError):
                os.unlink(path)
                removed += 1
    return removed
