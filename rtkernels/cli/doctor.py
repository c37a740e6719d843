"""Collect what rtkernels finds on this machine, and what is wrong with it.

Besides the libraries that they test, probes use only the standard library. A probe that fails becomes an ``error`` in
its own section and never hides the others.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import logging
import os
import platform
import re
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rtkernels.cli import diagnosis

_PACKAGES = (
    "rtkernels", "torch", "numpy", "triton",
    "transformers", "accelerate", "peft", "diffusers",
    "cupy-cuda12x", "cupy-cuda13x", "cupy",
    "nvidia-cuda-nvrtc-cu12", "nvidia-cuda-nvrtc",
    "nvidia-cuda-runtime-cu12", "nvidia-cuda-runtime", "cuda-pathfinder",
)  # fmt: skip
_LIBRARIES = re.compile(r"lib(?:nvrtc|nvrtc-builtins|cudart|cuda)(?:-[0-9a-f]+)?\.so[.\d]*$")


def collect() -> dict[str, Any]:
    """Return everything that ``rtkernels doctor`` shows, as JSON-ready data.

    Returns:
        One entry per section; a section whose probe failed is ``{"error": text}``. ``problems`` lists what prevents
        kernels from being compiled, loaded or cached; ``notes`` is other useful information.
    """
    report: dict[str, Any] = {}
    logger = logging.getLogger("rtkernels")
    was_disabled, logger.disabled = logger.disabled, True  # its messages are in the report
    try:
        for name, probe in _PROBES.items():
            try:
                report[name] = probe()
            except Exception as error:
                report[name] = {"error": f"{type(error).__name__}: {error}"}
    finally:
        logger.disabled = was_disabled
    report["problems"], report["notes"] = diagnosis.judge(report)
    return report


def render(report: dict[str, Any]) -> str:
    """Return the report as text, one indented block per section."""
    lines: list[str] = []
    for name, section in report.items():
        if name in ("problems", "notes"):
            continue
        lines += [name.replace("_", " "), *_block(section, 1), ""]
    for name in ("notes", "problems"):
        if report[name]:
            lines += [name, *(f"  - {text}" for text in report[name]), ""]
    count = len(report["problems"])
    lines.append(f"{count} problem(s)" if count else "everything rtkernels needs is here")
    return "\n".join(lines)


def _block(value: Any, depth: int) -> Iterator[str]:
    pad = "  " * depth
    if isinstance(value, dict):
        width = max((len(str(key)) for key in value), default=0)
        for key, item in value.items():
            if item and (isinstance(item, dict) or (isinstance(item, list) and len(str(item)) > 80)):
                yield f"{pad}{key}"
                yield from _block(item, depth + 1)
            else:
                yield f"{pad}{key!s:<{width}}  {_text(item)}"
        if not value:
            yield f"{pad}none"
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, dict):
                yield pad + "  ".join(f"{key}={_text(part)}" for key, part in item.items())
            else:
                yield pad + _text(item)
        if not value:
            yield f"{pad}none"
    else:
        yield pad + _text(value)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (list, tuple, dict)):
        return ", ".join(_text(part) for part in value) or "none"
    return str(value)


# ---- probes ------------------------------------------------------------------------------------------------


def _system() -> dict[str, Any]:
    import rtkernels
    from rtkernels.runtime import cpus

    return {
        "rtkernels": rtkernels.__version__,
        "location": str(Path(rtkernels.__file__).parent),
        "python": f"{platform.python_version()} ({sys.executable})",
        "platform": platform.platform(),
        "cpus": f"{cpus.usable()} usable of {os.cpu_count()}",
    }


def _packages() -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def _torch() -> dict[str, Any]:
    import torch

    return {
        "version": torch.__version__,
        "built for CUDA": torch.version.cuda,
        "CUDA available": torch.cuda.is_available(),
    }


def _cupy() -> dict[str, Any]:
    from rtkernels.runtime.build import nvrtc

    cupy = nvrtc.import_cupy()
    return {"version": cupy.__version__, "location": str(Path(cupy.__file__).parent)}


def _nvrtc() -> dict[str, Any]:
    from rtkernels.runtime.build import nvrtc

    major, minor = nvrtc.version()
    archs = " ".join(f"sm_{number}" for number in nvrtc.supported_archs())
    return {"version": f"{major}.{minor}", "library": nvrtc.library_path(), "compiles for": archs}


def _driver() -> dict[str, Any]:
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return {"version": None, "reason": "libcuda.so.1 is not on this machine (no NVIDIA driver)"}
    number = ctypes.c_int()
    code = library.cuDriverGetVersion(ctypes.byref(number))
    if code:
        return {"version": None, "reason": f"cuDriverGetVersion failed with code {code}"}
    return {"version": f"CUDA {number.value // 1000}.{number.value % 1000 // 10}"}


def _libraries() -> dict[str, list[str]]:
    """Return the CUDA libraries loaded in this process, and other copies on disk."""
    loaded = set()
    with open("/proc/self/maps", encoding="utf-8") as maps:
        for line in maps:
            path = line.split(maxsplit=5)[-1].strip()
            if _LIBRARIES.search(path):
                loaded.add(path)
    files = (path for folder in _library_folders() for path in _listing(folder))
    installed = {os.path.realpath(path) for path in files if _LIBRARIES.search(path.name)}
    known = {os.path.realpath(path) for path in loaded}
    return {"loaded": sorted(loaded), "installed, not loaded": sorted(installed - known)}


def _library_folders() -> Iterator[Path]:
    for site in {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}:
        for nvidia in _listing(Path(site) / "nvidia"):
            yield nvidia / "lib"
    roots = [Path(os.environ[name]) for name in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(name)]
    roots += [path for path in _listing(Path("/usr/local")) if path.name.startswith("cuda")]
    for root in roots:
        yield root / "lib64"
    yield from (Path(text) for text in os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep) if text)


def _listing(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _headers() -> dict[str, Any]:
    from rtkernels.runtime.build import nvrtc, sources

    needed = sorted({name for unit in sources.units() for name in sources.toolkit_headers(unit)})
    found: dict[str, Any] = {"needed by the kernels": needed}
    try:
        folder = nvrtc.include_directory(sources.TOOLKIT_HEADERS)
        found["found"] = str(folder)
    except Exception as error:
        found["found"] = f"none: {error}"
    return found


def _sources() -> dict[str, Any]:
    from rtkernels.runtime.build import sources

    return {"location": str(sources.root()), "units": len(sources.units())}


def _devices() -> list[dict[str, Any]]:
    import torch

    from rtkernels.runtime import targets
    from rtkernels.runtime.build import nvrtc

    if not torch.cuda.is_available():
        return []
    try:
        supported = nvrtc.supported_archs()
    except Exception:
        supported = []
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        device: dict[str, Any] = {
            "index": index,
            "name": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "memory": f"{properties.total_memory / 2**30:.0f} GiB",
        }
        try:
            device["target"] = targets.for_capability((properties.major, properties.minor), supported).name
        except Exception as error:
            device["target"] = f"none ({error})"
        found.append(device)
    return found


def _cache() -> dict[str, Any]:
    from rtkernels import cache
    from rtkernels.runtime.build import tuned

    found = dict(cache.info())
    found["measured choices"] = {gpu: _choices(tuned.load(gpu)) for gpu in tuned.gpus()}
    found["writable"] = found["mode"] == "rw" and found["problem"] is None and _writable(found["path"])
    found["extra"] = [str(path) for path in found["extra"]]
    return {name: str(value) if isinstance(value, Path) else value for name, value in found.items()}


def _choices(table: dict[str, Any]) -> str:
    """Return how many choices of ``rtkernels tune`` there are, and how many of them are for these kernels."""
    from rtkernels.ops.gemm.backend import PRODUCTS
    from rtkernels.runtime.launch import tuned

    counts = {source: sum(map(len, families.values())) for source, families in table.items()}
    used = counts.get(tuned.source(PRODUCTS.what, PRODUCTS.units), 0)
    others = sum(counts.values()) - used
    return f"{used}" + (f", and {others} for other versions of the kernels" if others else "")


def _writable(path: Path) -> bool:
    """Return whether a directory can be written, or created if it does not exist yet."""
    while not os.path.exists(path) and path != path.parent:
        path = path.parent
    return os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)


def _emulator() -> dict[str, Any]:
    from rtkernels import emulator

    reason = emulator.unavailable()
    return {"usable": reason is None, "reason": reason} if reason else {"usable": True}


def _environment() -> dict[str, str]:
    from rtkernels.runtime import env

    found = {}
    for variable in env.VARIABLES:
        text = os.environ.get(variable.name, "")
        try:
            value = _text(env.get(variable.name.removeprefix(env.PREFIX)))
            found[variable.name] = f"{value} (set)" if text else f"{value} (default)"
        except Exception as error:
            found[variable.name] = f"invalid: {error}"
    for name in sorted(os.environ):
        if name.startswith(env.PREFIX) and name not in found:
            found[name] = f"{os.environ[name]} (unknown variable, ignored)"
    for name in ("CUDA_PATH", "CUDA_HOME", "CUPY_CACHE_DIR", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH"):
        if name in os.environ:
            found[name] = os.environ[name]
    return found


def _compile() -> dict[str, str]:
    """Compile the smallest kernel of the library for every target that CI covers, bypassing the cache."""
    from rtkernels.runtime import targets
    from rtkernels.runtime.build import nvrtc
    from rtkernels.runtime.operator import registry

    found = {}
    for name in targets.CI_TARGETS:
        target = targets.parse(name)
        try:
            if target.number not in nvrtc.supported_archs():  # not an error: sm_100 and newer need NVRTC 12.8
                found[name] = f"not known to NVRTC {'.'.join(map(str, nvrtc.version()))}"
                continue
            _, kernel = next(pair for pair in registry.kernels() if pair[1].supports(target))
            expression = kernel.expression(kernel.variants(target)[0])
            started = time.perf_counter()
            compiled = nvrtc.compile_unit(kernel.unit, [expression], target, kernel.flags)
            took = 1e3 * (time.perf_counter() - started)
            found[name] = f"ok, {kernel.name}, {len(compiled.image)} bytes, {took:.0f} ms"
        except Exception as error:
            found[name] = f"failed: {_first_line(error)}"
    return found


def _launch() -> dict[str, str]:
    """Load a kernel on every GPU, launch it and check its result, without the fallbacks of ops."""
    import torch

    from rtkernels.ops.shared.column_sum import column_sum
    from rtkernels.runtime.build import cache as build_cache

    found = {}
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        place = f"cuda:{index}"
        try:
            compiled, started = build_cache.stats.compiles, time.perf_counter()
            rows = torch.arange(33 * 7, dtype=torch.float32, device="cpu").reshape(33, 7)
            with torch.cuda.device(index):
                total = column_sum(rows.to(place), torch.float32).cpu()
            took = 1e3 * (time.perf_counter() - started)
            if not torch.equal(total, rows.sum(0)):  # integers: exact in any order
                raise RuntimeError(f"column_sum gave {total.tolist()}, expected {rows.sum(0).tolist()}")
            origin = "compiled" if build_cache.stats.compiles > compiled else "from the cache"
            found[place] = f"ok, column_sum launched, {origin}, {took:.0f} ms"
        except Exception as error:
            found[place] = f"failed: {_first_line(error)}"
    return found


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


_PROBES: dict[str, Callable[[], Any]] = {
    "system": _system,
    "packages": _packages,
    "torch": _torch,
    "cupy": _cupy,
    "nvrtc": _nvrtc,
    "driver": _driver,
    "devices": _devices,
    "libraries": _libraries,
    "headers": _headers,
    "sources": _sources,
    "cache": _cache,
    "emulator": _emulator,
    "environment": _environment,
    "test_compile": _compile,
    "test_launch": _launch,
}
