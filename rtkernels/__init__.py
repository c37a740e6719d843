"""Fused CUDA kernels for torch, compiled at first use with NVRTC through CuPy.

Importing this package touches no device and loads neither CuPy nor NVRTC: every public name is resolved when
it is first used. The ops themselves are found in ``rtkernels/ops/``; a new one needs no edit here.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors see; at run time __getattr__ below gives the same
    from rtkernels import cache as cache
    from rtkernels import errors as errors
    from rtkernels import interop as interop
    from rtkernels import nn as nn
    from rtkernels import optim as optim
    from rtkernels.emulator import emulate as emulate
    from rtkernels.errors import ArgumentError as ArgumentError
    from rtkernels.errors import KernelCompileError as KernelCompileError
    from rtkernels.errors import NotWarmError as NotWarmError
    from rtkernels.errors import RtkError as RtkError
    from rtkernels.errors import SourceError as SourceError
    from rtkernels.errors import ToolkitError as ToolkitError
    from rtkernels.errors import UnsupportedDeviceError as UnsupportedDeviceError
    from rtkernels.ops.moe.moe_index_layout import MoeIndex
    from rtkernels.runtime.warm import warm

__version__ = "0.1.0"

# Everything public that is not an op: name -> (module, attribute), or the module itself.
_NAMES: dict[str, tuple[str, str | None]] = {
    "warm": ("rtkernels.runtime.warm", "warm"),
    "emulate": ("rtkernels.emulator", "emulate"),
    "cache": ("rtkernels.cache", None),
    "errors": ("rtkernels.errors", None),
    "interop": ("rtkernels.interop", None),
    "nn": ("rtkernels.nn", None),
    "optim": ("rtkernels.optim", None),
    "RtkError": ("rtkernels.errors", "RtkError"),
    "ArgumentError": ("rtkernels.errors", "ArgumentError"),
    "SourceError": ("rtkernels.errors", "SourceError"),
    "KernelCompileError": ("rtkernels.errors", "KernelCompileError"),
    "ToolkitError": ("rtkernels.errors", "ToolkitError"),
    "UnsupportedDeviceError": ("rtkernels.errors", "UnsupportedDeviceError"),
    "NotWarmError": ("rtkernels.errors", "NotWarmError"),
    "MoeIndex": ("rtkernels.ops.moe.moe_index_layout", "MoeIndex"),
}


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        module, attribute = _NAMES[name]
        value: Any = importlib.import_module(module)
        if attribute is not None:
            value = getattr(value, attribute)
    elif name == "__all__":
        value = sorted({"__version__", *_NAMES, *_op_names()})
    elif name.startswith("_"):
        raise AttributeError(f"module 'rtkernels' has no attribute {name!r}")
    elif importlib.util.find_spec(f"rtkernels.{name}") is not None:
        # Before the ops are asked: they may themselves be importing this submodule right now.
        return importlib.import_module(f"rtkernels.{name}")
    else:
        value = _public_op(name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_NAMES, *_op_names()})


def _op_names() -> list[str]:
    from rtkernels.runtime.operator import registry

    return [name for op in registry.ops() for name in op.public]


def _public_op(name: str) -> Any:
    if importlib.util.find_spec(f"rtkernels.ops.{name}") is not None:  # the usual case: no other op is imported
        value = getattr(importlib.import_module(f"rtkernels.ops.{name}"), name, None)
        if value is not None:
            return value
    from rtkernels.runtime.operator import registry

    for op in registry.ops():
        if name in op.public:
            return getattr(importlib.import_module(f"rtkernels.ops.{op.name}"), name)
    raise AttributeError(f"module 'rtkernels' has no attribute {name!r}; ops: {', '.join(_op_names())}")
