"""Code that is generated at run time, as for named tuples; tracebacks and debuggers show its lines."""

from __future__ import annotations

import linecache
from functools import lru_cache
from types import CodeType


@lru_cache(maxsize=256)
def written_code(source: str, name: str) -> CodeType:
    """Compile `source`; `name` (``<rtkernels glu_fwd>``) is its file name in tracebacks."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    return compile(source, name, "exec")
