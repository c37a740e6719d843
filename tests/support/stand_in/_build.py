"""Building the extension: once for a torch, a Python and a compiler, kept in the user's cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import torch

from rtkernels.emulator._compiler import compiler

_SOURCE = Path(__file__).with_name("device.cpp")
_NAME = "rtkernels_stand_in"
_FLAGS = ("-std=c++20", "-O1", "-fPIC", "-shared", "-w")


def extension() -> Any:
    """Return the extension, built if needed."""
    path = _built()
    spec = importlib.util.spec_from_file_location(_NAME, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _built() -> Path:
    found = compiler()
    described = (_SOURCE.read_bytes(), torch.__version__, sys.version, found.command, found.version, _FLAGS)
    key = hashlib.sha256(repr(described).encode()).hexdigest()[:24]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rtkernels-stand-in"
    final = folder / f"{_NAME}-{key}.so"
    if final.exists():
        return final
    folder.mkdir(parents=True, exist_ok=True)
    place = Path(torch.__file__).parent
    includes = (place / "include", place / "include" / "torch" / "csrc" / "api" / "include")
    python = sysconfig.get_paths()["include"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # another process may build it as well
        output = Path(scratch) / final.name
        command = [
            *found.command, *_FLAGS, *(f"-I{path}" for path in (*includes, python)), str(_SOURCE), "-o", str(output),
            f"-L{place / 'lib'}", "-ltorch_python", "-ltorch_cpu", "-lc10", f"-Wl,-rpath,{place / 'lib'}",
        ]  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the stand-in device cannot be built:\n{done.stderr[-4000:]}")
        os.replace(output, final)
    return final
