"""Fused CUDA kernels for torch, compiled at first use with NVRTC through CuPy.

Importing this package touches no device and loads neither CuPy nor NVRTC: every public name (``_public.py`` lists them)
is resolved when it is first used, and imports its own family only.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from typing import Any

from rtkernels import _public

__version__ = "0.1.0"
__all__ = sorted({"__version__", *_public.MODULES, *_public.NAMES})


def __getattr__(name: str) -> Any:
    if name in _public.NAMES:
        module = importlib.import_module(f"rtkernels.{_public.NAMES[name]}")
        value = getattr(module, name)
        globals()[name] = value
        return value
    if not name.startswith("_") and importlib.util.find_spec(f"rtkernels.{name}") is not None:
        return importlib.import_module(f"rtkernels.{name}")
    if not name.startswith("_"):
        from rtkernels.runtime.operator import registry

        if (value := registry.public(name)) is not None:  # an op that the table does not list yet
            return value
    raise AttributeError(f"module 'rtkernels' has no attribute {name!r}; ops: {', '.join(_public.OPS)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if os.environ.get("RTKERNELS_BATCH_INVARIANT", "").strip() not in ("", "0"):
    importlib.import_module("rtkernels.aten.invariant").from_environment()
