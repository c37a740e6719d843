"""What contract tests try an op with: ``samples/<family>/<op>.py`` is about ``rtkernels/ops/<family>/<op>.py``.

It has ``samples(device)``, which yields operators with arguments, and, by name of a public function:

- ``CALLS``: a call of float32 ``[rows, 256]`` and of int64 ``[rows, 2]`` below 8, for any number of rows;
- ``OVERWRITING``, if it overwrites an argument: the shape of that, a call of it, and whether it is differentiable.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from rtkernels.runtime.operator.operator import TorchOp


@functools.cache
def _modules() -> dict[str, str]:
    found = pkgutil.walk_packages(__path__, f"{__name__}.")
    return {module.name.rpartition(".")[2]: module.name for module in found if not module.ispkg}


def _module(op: str) -> ModuleType | None:
    return importlib.import_module(_modules()[op]) if op in _modules() else None


def samples_of(op: str, device: str) -> list[tuple[TorchOp, tuple[Any, ...]]]:
    """Return operators of an op with arguments on a device; none if it has no operators."""
    module = _module(op)
    return list(module.samples(device)) if hasattr(module, "samples") else []


def collected(table: str) -> dict[str, Any]:
    """Return a table (``CALLS``, ``OVERWRITING``) of all ops that have one."""
    return {name: value for op in sorted(_modules()) for name, value in getattr(_module(op), table, {}).items()}
