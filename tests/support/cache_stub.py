"""A compiler that only counts, small sources, and ways to load and to damage an entry: for the tests of the cache."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rtkernels.runtime import targets
from rtkernels.runtime.build import cache as build_cache
from rtkernels.runtime.build import nvrtc, store
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.build.key import make_request

SM80, SM90A = targets.parse("sm_80"), targets.parse("sm_90a")
UNIT, KERNEL = "norm/scale.cu", "rtk::scale<float>"


def cache_key(unit: str, expressions: list[str], target: targets.Target, flags: Any, version: tuple[int, int]) -> str:
    """Return the key of an entry."""
    return make_request("key", unit, expressions, target, flags, version).key


class Compiler:
    """Stands in for NVRTC: the image names what was compiled."""

    version = (13, 0)
    image_size = 0

    def __init__(self) -> None:
        self.calls: list[tuple] = []

    def compile_unit(self, unit, expressions, target, flags=(), *, op=None, sources=None, want_ptx=False):
        self.calls.append((unit, tuple(expressions), target.name))
        text = f"{self.calls[-1]} {self.version} {sorted(sources)} {b''.join(sources.values())!r}"
        names = {expression: f"mangled {expression}" for expression in expressions}
        return nvrtc.Compiled(text.encode().ljust(self.image_size), names, "", {})


def install_sources(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Write a unit with one header below a directory and make it the source root, which is returned."""
    root = directory / "cuda_src"
    (root / "norm").mkdir(parents=True)
    (root / "common").mkdir()
    (root / UNIT).write_text(
        '#include "common/k.cuh"\nnamespace rtk { template <typename T> __global__ void scale(T* x) { *x *= kK; } }\n'
    )
    (root / "common" / "k.cuh").write_text("#pragma once\nnamespace rtk { inline constexpr int kK = 2; }\n")
    monkeypatch.setattr(sources_module, "_root_override", root)
    monkeypatch.setenv("TMPDIR", str(directory))  # compiler logs
    return root


def install_compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    """Replace NVRTC by a compiler that counts."""
    stub = Compiler()
    monkeypatch.setattr(nvrtc, "compile_unit", stub.compile_unit)
    monkeypatch.setattr(nvrtc, "version", lambda: stub.version)
    return stub


def load(expression: str = KERNEL, target: targets.Target = SM90A, **options: Any) -> build_cache.Entry:
    """Load the kernel of the test sources."""
    return build_cache.load(UNIT, [expression], target, op="scale", **options)


def load_anew(**options: Any) -> build_cache.Entry:
    """Load as a new process would: nothing in memory, no warning given yet."""
    build_cache.forget()
    return load(**options)


def edit_meta(directory: Path, *, seal: bool = True, **changes: Any) -> None:
    """Change fields of an entry's ``meta.json``; its checksum follows unless ``seal`` is False."""
    meta = {**json.loads((directory / "meta.json").read_text()), **changes}
    (directory / "meta.json").write_text(json.dumps(store.sealed(meta) if seal else meta))


def flip_a_bit(directory: Path) -> None:
    """Damage the image of an entry."""
    data = bytearray((directory / "kernel.cubin").read_bytes())
    data[len(data) // 2] ^= 1
    (directory / "kernel.cubin").write_bytes(data)


def tree(directory: Path) -> list[tuple[str, int]]:
    """Return every path below a directory with its time, to see whether anything was written."""
    return sorted((str(path), path.stat().st_mtime_ns) for path in directory.rglob("*"))
