"""Calls that a public function does not take as they are: with arrays of other libraries, or with ``out=``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from rtkernels import interop
from rtkernels.runtime.operator.into import into


def redirected(function: Callable[..., Any], arguments: dict[str, Any], over: str = "") -> Any:
    """Make a call once more, with arrays turned into tensors, and after that with results that go to `out`.

    Args:
        function: The public function.
        arguments: Its ``locals()`` at its first line; the first argument decides of which kind results are.
        over: Names of tensors that `out` may be.

    Returns:
        What the function returns: arrays for arrays.
    """
    if not isinstance(next(iter(arguments.values())), Tensor):
        return interop.call_with(function, arguments)
    return into(function, arguments, over=over)
