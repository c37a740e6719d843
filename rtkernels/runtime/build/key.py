"""Everything that decides the code of a kernel, and the cache key computed from it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from rtkernels.errors import ArgumentError
from rtkernels.runtime.build import nvrtc as nvrtc_module
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.store import Store
from rtkernels.runtime.targets import Target


@dataclass(frozen=True)
class Request:
    """Everything that decides the compiled code, read once: the sources in it are the ones that are compiled."""

    op: str
    unit: str
    expressions: tuple[str, ...]
    target: Target
    extra_flags: tuple[str, ...]
    flags: tuple[str, ...]
    sources: Mapping[str, bytes]
    nvrtc: tuple[int, int] | None

    @cached_property
    def digests(self) -> dict[str, str]:
        return sources_module.digests(self.sources)

    @cached_property
    def base_key(self) -> str:
        """The key without the NVRTC version."""
        return self._hash(None)

    @cached_property
    def key(self) -> str:
        return self._hash(self.nvrtc)

    def _hash(self, nvrtc: tuple[int, int] | None) -> str:
        content = {
            "format": store_module.FORMAT,
            "unit": sources_module.name(self.unit),
            "target": self.target.name,
            "expressions": sorted(self.expressions),
            "flags": self.flags,
            "nvrtc": nvrtc,
            "files": sorted(self.digests.items()),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    def directory(self, store: Store) -> Path:
        return store.entry(self.target.name, self.op, self.key)


def make_request(
    op: str,
    unit: str,
    expressions: Sequence[str],
    target: Target,
    flags: Iterable[str],
    nvrtc: tuple[int, int] | None,
) -> Request:
    """Return the request for some instantiations of a unit; ``nvrtc`` is None if it cannot be loaded."""
    if not op.replace("_", "").isalnum() or not op.isascii():
        raise ArgumentError(f"op name {op!r} cannot name a cache entry: use letters, digits and '_'")
    extra = tuple(flags)
    code_flags = tuple(nvrtc_module.flags_for(target, extra))
    return Request(op, unit, tuple(expressions), target, extra, code_flags, sources_module.closure(unit), nvrtc)
