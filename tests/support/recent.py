"""Recent calls of an operator, asked for alone: what its ``call`` tries before anything else."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def recent(op: Any, *args: Any, call: Callable[..., Any] | None = None) -> Any:
    """Return what a call like a recent one gives, by the very lines of ``call``; None if there is none.

    Args:
        op: The operator.
        args: Its arguments.
        call: Its ``call``, or that of a call site.
    """
    call = call or op.call
    scope = call.__globals__
    exec(f"def _recent{inspect.signature(call)}:\n{op._short_cuts()[0]}", scope)
    return scope.pop("_recent")(*args)
