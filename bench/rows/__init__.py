"""Benchmark rows: ``bench/rows/<family>/<op>.py`` has those of ``rtkernels/ops/<family>/<op>.py``."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

from bench.rows.row import Row


def modules() -> dict[str, str]:
    """Return the module with the rows of each op, by the op's name."""
    found = pkgutil.walk_packages(__path__, f"{__name__}.")
    return {module.name.rpartition(".")[2]: module.name for module in found if module.name.count(".") == 3}


def rows_of(op: str) -> list[Row]:
    """Return the rows of one op; none if it has no module here."""
    name = modules().get(op)
    module = None if name is None else importlib.import_module(name)
    return list(module.rows()) if hasattr(module, "rows") else []


def _imported(name: str) -> Any:
    """Import a module of rows; None for one of a function that an older tree of the package does not have."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        if not str(error.name).startswith("rtkernels"):
            raise
        return None


def host_calls(device: str) -> dict[str, Callable[[], Any]]:
    """Return the small calls of public functions that modules here have, for host rows: ``host(x)`` of ``<op>.py``."""
    import torch

    x = torch.randn(64, 1024, device=device, dtype=torch.bfloat16)
    found = [getattr(module, "host", None) for module in map(_imported, sorted(modules().values()))]
    return {name: call for host in found if host is not None for name, call in host(x).items()}


def all_rows() -> Iterator[Row]:
    """Yield the rows of every op."""
    for op in sorted(modules()):
        yield from rows_of(op)
