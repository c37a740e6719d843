"""Arrays of other libraries in the public API: anything with ``__dlpack__`` in, the same kind out.

A ``torch.Tensor`` never gets here. The DLPack protocol orders CUDA streams in both directions. bfloat16 and fp8 cross
as bit views if the other library (or its DLPack) lacks the dtype: NumPy and CuPy get ``ml_dtypes`` arrays if that
package is installed, else unsigned integers of the same width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError

_BITS = {1: torch.uint8, 2: torch.uint16}
_BY_NAME = {
    "bfloat16": torch.bfloat16,
    "float8_e4m3fn": torch.float8_e4m3fn,
    "float8_e5m2": torch.float8_e5m2,
}
_NAME = {dtype: name for name, dtype in _BY_NAME.items()}


def with_arrays(function: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    """Call `function` with every array turned into a tensor, and return tensors as arrays of the same library.

    Args:
        function: A public function.
        arguments: All of its arguments by name; the first one decides on the library.

    Raises:
        ArgumentError: The first argument is neither a tensor nor an array, or arrays are of different libraries.
    """
    name, first = next(iter(arguments.items()))
    if not hasattr(first, "__dlpack__"):
        raise ArgumentError(f"{name} is a {_type(first)}; expected a torch.Tensor or an array with __dlpack__")
    kind = _kind(first)

    def convert(name: str, value: Any) -> Any:
        if isinstance(value, (tuple, list)):  # also MoeIndex and the like
            parts = [convert(name, part) for part in value]
            return type(value)._make(parts) if hasattr(value, "_make") else type(value)(parts)
        if not hasattr(value, "__dlpack__"):
            return value
        if isinstance(value, Tensor) or _kind(value) != kind:
            raise ArgumentError(
                f"{function.__name__}: arrays of different libraries in one call ({_type(first)} and {_type(value)})"
            )
        return to_torch(value, name)

    return _returned(function(**{name: convert(name, value) for name, value in arguments.items()}), kind)


def _returned(result: Any, kind: str) -> Any:
    if isinstance(result, (tuple, list)):
        parts = [_returned(part, kind) for part in result]
        return type(result)._make(parts) if hasattr(result, "_make") else type(result)(parts)
    return from_torch(result, kind)


def _type(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def _kind(value: Any) -> str:
    name = type(value).__module__.partition(".")[0]
    return "jax" if name == "jaxlib" else name


def to_torch(value: Any, name: str = "an array") -> Tensor:
    """Return a tensor that shares memory with an array.

    Args:
        value: The array.
        name: The name of the argument in error messages.

    Raises:
        ArgumentError: The array has negative strides, for which ``torch.from_dlpack`` would abort the process. Or torch
            does not accept the array.
    """
    if any(step < 0 for step in getattr(value, "strides", None) or ()):
        raise ArgumentError(f"{name} has strides {value.strides}; expected none below 0 (call .copy())")
    dtype = _BY_NAME.get(str(getattr(value, "dtype", "")))
    try:
        if dtype is not None and _kind(value) in ("numpy", "cupy"):
            return torch.from_dlpack(value.view(f"uint{8 * dtype.itemsize}")).view(dtype)
        return torch.from_dlpack(value)
    except (AttributeError, BufferError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name} is a {_type(value)} that torch.from_dlpack does not take: {error}") from error


def from_torch(value: Any, kind: str) -> Any:
    """Return an array of library `kind` that shares memory with a tensor; return other values unchanged."""
    if not isinstance(value, Tensor):
        return value
    value = value.detach()
    if kind == "numpy":
        return _retyped(value, lambda t: t.numpy())
    if kind == "cupy":
        import cupy

        return _retyped(value, cupy.from_dlpack)
    if kind == "jax":
        import jax.dlpack

        return jax.dlpack.from_dlpack(value.contiguous())
    raise ArgumentError(f"results cannot be handed back as arrays of {kind!r}; pass a torch.Tensor (torch.from_dlpack)")


def _retyped(value: Tensor, export: Callable[[Tensor], Any]) -> Any:
    name = _NAME.get(value.dtype)
    if name is None:
        return export(value)
    bits = export(value.view(_BITS[value.itemsize]))
    try:
        import ml_dtypes
    except ImportError:
        return bits
    return bits.view(getattr(ml_dtypes, name))
