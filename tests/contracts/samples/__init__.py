"""Arguments to try operators with: ``samples/<family>/<op>.py`` has those of ``rtkernels/ops/<family>/<op>.py``."""

from __future__ import annotations

import importlib
import pkgutil
from typing import Any

from rtkernels.runtime.operator.operator import TorchOp


def samples_of(op: str, device: str) -> list[tuple[TorchOp, tuple[Any, ...]]]:
    """Return operators of an op with arguments on a device; none if it has no operators."""
    found = pkgutil.walk_packages(__path__, f"{__name__}.")
    names = {module.name.rpartition(".")[2]: module.name for module in found if not module.ispkg}
    return list(importlib.import_module(names[op]).samples(device)) if op in names else []
