"""Code that is generated at run time, as for named tuples; tracebacks and debuggers show its lines."""

from __future__ import annotations

import linecache
from functools import lru_cache
from types import CodeType
from typing import Any


def generated(source: str, name: str, scope: dict[str, Any]) -> dict[str, Any]:
    """Run generated code and return `scope`, its globals, with what it defines.

    Args:
        source: The code.
        name: Its file name in tracebacks, ``<rtkernels glu_fwd>``.
        scope: The objects that it refers to.
    """
    exec(_compiled(source, name), scope)
    return scope


@lru_cache(maxsize=256)
def _compiled(source: str, name: str) -> CodeType:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")
