"""Build a shared object for the host from a kernel's own ``.cu``, cached next to the cubins."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

from rtkernels.emulator import _compiler
from rtkernels.emulator._compiler import GCC_FLAGS, KERNEL_FLAGS, accepted, compiler
from rtkernels.errors import KernelCompileError, NotWarmError, SourceError
from rtkernels.runtime import env
from rtkernels.runtime.build import places as places_module
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.build import store as store_module
from rtkernels.runtime.build.locks import key_lock

_HERE = Path(__file__).resolve().parent
INCLUDE = _HERE / "include"
RUNTIME = _HERE / "runtime"
_OWN_HEADERS = os.sep + os.path.join("emulator", "include", "")  # in the path of INCLUDE, in whichever checkout
DYNAMIC_SHARED = 232_448  # bytes reserved for `extern __shared__` arrays: the most any target has

_INCLUDES = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)
_DYNAMIC = re.compile(r"\bextern\s+__shared__\s+([^;{}]*?)\b(\w+)\s*\[\s*\]\s*;")
_ALIGNED = re.compile(r"(?:__align__|alignas)\s*\([^)]*\)")
_BOUNDS = re.compile(r"__global__\s+void\s+__launch_bounds__\s*\(")
_TEMPLATE = re.compile(r"template\s*(<[^;{}]*>)\s*$")
_shrunk = False


# ---- sources --------------------------------------------------------------------------------------------------------


def _closure(unit: str, start: Path, bases: Sequence[Path]) -> tuple[dict[str, bytes], dict[Path, int]]:
    """Return the content of every file of a translation unit, and when each was last changed.

    Headers are named relative to one of the bases, and the first that has one counts: the emulator's before those of
    ``cuda_src``.
    """
    found: dict[str, bytes] = {}
    times: dict[Path, int] = {}
    waiting = [(start.name, start)] + [(name, INCLUDE / name) for name in ("execution.h", "intrinsics.h", "numeric.h")]
    while waiting:
        name, path = waiting.pop()
        if name in found:
            continue
        if path is start and (text := sources_module.generated(unit)) is not None:
            found[name] = text
        else:
            times[path] = os.stat(path).st_mtime_ns
            found[name] = path.read_bytes()
        for included in _INCLUDES.findall(found[name].decode()):
            places = (base / included for base in bases)
            if not (place := next((p for p in places if p.is_file()), None)):
                raise SourceError(f"{name} includes {included!r}, which is neither in the emulator nor in cuda_src")
            if sources_module.is_foreign(unit):  # its folder must not shadow headers of ours
                for ours in (INCLUDE, sources_module.root()):
                    sources_module.having_one(included, (start.parent, ours))
            waiting.append((included, place))
    return found, times


def _wrapper(unit: str, path: Path, expression: str, sources: dict[str, bytes]) -> str:
    """Return the translation unit: the kernel's source, its dynamic shared memory, and one entry point."""
    generated = sources_module.generated(unit)
    kernel = f'#include "{path}"' if generated is None else generated.decode()
    text = "\n".join(content.decode() for name, content in sources.items() if not name.endswith(".h"))
    arrays = dict.fromkeys((kind.strip(), name) for kind, name in _DYNAMIC.findall(text))
    # All `extern __shared__` arrays begin at the same address, as on the device.
    aliases = "".join(
        f"namespace rtk {{ extern __shared__ {kind} {name}[{DYNAMIC_SHARED} / sizeof({_ALIGNED.sub('', kind)})] "
        '__attribute__((alias("rtk_emu_dynamic"))); }\n'
        for kind, name in arrays
    )
    size = DYNAMIC_SHARED if arrays else 0
    bounds, max_threads = _launch_bounds(sources[path.name].decode(), expression)
    storage = f'extern "C" {{ __shared__ __align__(1024) unsigned char rtk_emu_dynamic[{size}]; }}\n' if arrays else ""
    return f"""#include "intrinsics.h"
{kernel}
{storage}{aliases}{bounds}static void rtk_emu_entry(const emu::u64* args) {{ emu::call(&{expression}, args); }}
extern "C" __attribute__((visibility("default"), no_sanitize("thread", "address")))
int rtk_emu_run(emu::Launch* launch) {{
    return emu::run(launch, rtk_emu_entry, {"rtk_emu_dynamic" if arrays else "nullptr"}, {size}, {max_threads});
}}
"""


def _launch_bounds(text: str, expression: str) -> tuple[str, str]:
    """Return a declaration and an expression of it that gives the largest block, "0" if the kernel does not say.

    The bounds may depend on template parameters, so the kernel's template header is repeated for a function.
    """
    name = expression.partition("<")[0].rpartition("::")[2]
    for found in _BOUNDS.finditer(text):
        depth, end = 1, found.end()
        while depth:
            depth += {"(": 1, ")": -1}.get(text[end], 0)
            end += 1
        if not re.match(rf"\s*{name}\s*\(", text[end:]):
            continue
        before = text[: found.start()].rstrip()
        header = _TEMPLATE.search(before[before.rfind("template") :]) if before.endswith(">") else None
        template = f"template {header[1]} " if header else ""
        body = f"constexpr int rtk_emu_bounds() {{ return emu::launch_bounds({text[found.end() : end - 1]}); }}"
        arguments = "<" + expression.partition("<")[2] if header else ""
        return f"namespace rtk {{ {template}{body} }}\n", f"rtk::rtk_emu_bounds{arguments}()"
    return "", "0"


# ---- cache ----------------------------------------------------------------------------------------------------------


def _target() -> str:
    return f"emulator-{platform.machine()}"


def _cached(op: str, expression: str, content: dict[str, object], make: Callable[[Path], None]) -> Path:
    """Return the file that ``make`` writes, from the cache if there is one for this content."""
    key = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    store = places_module.user_store()
    if store is None:
        return _private(key, make)
    final = store.entry(_target(), op, key)
    if (found := _read(store, final)) or not store.writable:
        return found or _private(key, make)
    with key_lock(store, key, op):
        if found := _read(store, final):
            return found
        _require_allowed(op, expression)
        try:
            with places_module.staging(store) as directory:
                make(output := directory / "kernel.so")
                image = output.read_bytes()
        except OSError as error:
            store_module.complain(store, "write", error)
            return _private(key, make)
        meta = {
            "format": store_module.FORMAT, "key": key, "base_key": key, "op": op, "unit": content["unit"],
            "expressions": [expression], "names": {expression: "rtk_emu_run"}, "target": _target(),
            "nvrtc": [], "flags": content["flags"], "compiler": content["compiler"], "sources": content["files"],
            "sha256": hashlib.sha256(image).hexdigest(), "size": len(image), "resources": {},
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }  # fmt: skip
        name = store_module.image_name(_target())
        if store_module.publish(store, final, {name: image, store_module.META: json.dumps(meta, indent=1).encode()}):
            _limit(store)
            return final / name
    return _private(key, make)


def _read(store: store_module.Store, directory: Path) -> Path | None:
    try:
        found = store_module.read_entry(directory)
    except store_module.BadEntry as bad:
        if store.writable:
            store_module.quarantine(store, directory, str(bad))
        return None
    except OSError:
        return None
    if found and store.writable:
        store_module.touch(directory)
    return found[2] if found else None


def _require_allowed(op: str, expression: str) -> None:
    if env.get("NO_COMPILE"):
        raise NotWarmError(f"{op}: {expression} is not in the emulator's cache and RTKERNELS_NO_COMPILE is set")


def _limit(store: store_module.Store) -> None:
    global _shrunk
    if not _shrunk:
        _shrunk = True
        with contextlib.suppress(OSError):
            store_module.shrink(store, env.get("CACHE_MAX_MB") * 1_000_000)


@cache
def _private_directory() -> Path:
    return places_module.process_directory("emulator")


def _private(key: str, make: Callable[[Path], None]) -> Path:
    """Return a directory that lives as long as the process, for lack of a usable cache."""
    path = _private_directory() / f"{key[:32]}.so"
    if not path.exists():
        _require_allowed("emulator", path.name)
        make(path)
    return path


# ---- building -------------------------------------------------------------------------------------------------------


def _hashes(sources: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(content).hexdigest() for name, content in sorted(sources.items())}


def _compile(command: list[str], output: Path, what: str) -> None:
    # The compiler's temporary files are next to the output, so a killed compiler leaves nothing elsewhere.
    command, env = [*command, "-o", str(output)], {**os.environ, "TMPDIR": str(output.parent)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error" in line][:3] or done.stderr.splitlines()[:3]
        raise KernelCompileError(
            f"the host compiler rejects {what}:\n  " + "\n  ".join(lines) + f"\ncommand: {shlex.join(command)}",
            log=done.stderr,
        )


def runtime() -> tuple[Path, str]:
    """Return the shared object that holds the execution model, compiling it if needed, and its soname."""
    tool = compiler()
    # With types, so that a debugger can print threadIdx. With sanitizers, optimising would take most of the time.
    flags = [*tool.flags, *(("-O0", "-g1", *_compiler.SANITIZERS) if _compiler.sanitized else ("-O2", "-g"))]
    sources = [INCLUDE / "execution.h", *sorted(RUNTIME.iterdir())]
    files = _hashes({file.name: file.read_bytes() for file in sources if file.suffix in (".h", ".cpp")})
    content = {"unit": "runtime.cpp", "flags": flags, "compiler": tool.version, "files": files}
    # Kernels name their runtime by this, so two versions in one process stay apart.
    soname = "librtk_emu-" + hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16] + ".so"

    def make(output: Path) -> None:
        command = [
            *tool.command,
            *flags,
            "-shared",
            f"-Wl,-soname,{soname}",
            f"-I{INCLUDE}",
            str(RUNTIME / "runtime.cpp"),
        ]
        _compile(command, output, "the emulator's runtime")

    return _cached("emulator_runtime", "emu::run", content, make), soname


_built: dict[tuple[object, ...], tuple[dict[Path, int], Path]] = {}


def kernel(
    op: str, unit: str, expression: str, arch: int, defines: tuple[str, ...] = (), *, debug: bool = False
) -> Path:
    """Return the shared object of one kernel variant, compiling it if needed.

    Args:
        op: Names the cache entry.
        unit: The ``.cu`` file, relative to ``cuda_src`` or absolute.
        expression: C++ name of the instantiation.
        arch: 80, 89, 90, 100 or 120: the value of ``__CUDA_ARCH__`` divided by ten.
        defines: ``-D`` options of the kernel's record.
        debug: Without optimisation and with full debug information, for stepping through it.
    """
    request = (op, unit, expression, arch, defines, debug, os.environ.get("CXX"), os.environ.get("RTKERNELS_CACHE_DIR"))
    if known := _built.get(request):
        times, library = known
        with contextlib.suppress(OSError):
            if library.exists() and all(os.stat(file).st_mtime_ns == time for file, time in times.items()):
                return library
    times, library = _build_kernel(op, unit, expression, arch, defines, debug)
    _built[request] = times, library
    return library


def _build_kernel(
    op: str, unit: str, expression: str, arch: int, defines: tuple[str, ...], debug: bool
) -> tuple[dict[Path, int], Path]:
    tool = compiler()
    path = Path(unit) if os.path.isabs(unit) else sources_module.root() / unit
    bases = (INCLUDE, *sources_module.places(unit))
    sources, times = _closure(unit, path, bases)
    flags = [
        *tool.flags,
        *(("-O0", "-g", "-gdwarf-4") if debug else ("-O1", "-g1", "-gdwarf-4")),
        *tool.hooks,
        *accepted(tool.command, KERNEL_FLAGS),
        *(() if tool.is_clang else accepted(tool.command, GCC_FLAGS)),
        f"-D__CUDA_ARCH__={arch}0",
        *((f"-D__CUDA_ARCH_FEAT_SM{arch}_ALL",) if arch >= 100 else ()),
        *defines,
    ]
    engine, soname = runtime()
    content = {
        "unit": path.name if os.path.isabs(unit) else unit,
        "expression": expression,
        "flags": flags,
        "compiler": tool.version,
        "files": _hashes(sources),
        "runtime": soname,
    }
    if debug:  # debuggers look for sources where they were
        content["directory"] = str(path.parent)

    def make(output: Path) -> None:
        source = output.with_suffix(".cpp")
        store_module.write(source, _wrapper(unit, path, expression, sources).encode(), 0o700)
        wrapped = ("memcpy", "memmove", "memset", *(_compiler.SANITIZED_CALLS if _compiler.sanitized else ()))
        # -nodefaultlibs: the runtime answers the sanitizer's callbacks, not the compiler's own library.
        wrap = [f"-Wl,--wrap={name}" for name in wrapped]
        link = ["-shared", "-nodefaultlibs", *wrap, str(engine), "-lm", "-lc", "-lgcc"]
        places = [f"-I{base}" for base in bases]
        _compile([*tool.command, *flags, *places, str(source), *link], output, f"{expression} ({unit})")

    return times, _cached(op, expression, content, make)


def locate(library: Path, pc: int) -> str:
    """Return ``file:line`` of a program counter (the call site), innermost first; "" if unknown."""
    tool = shutil.which("addr2line")
    if not tool or not pc:
        return ""
    command = [tool, "-i", "-e", str(library), hex(pc - 1)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    places = []
    for line in done.stdout.splitlines():
        name = line.split(" ")[0]
        if _OWN_HEADERS in name or not name.rpartition(":")[0].endswith((".cu", ".cuh")):
            continue
        places.append(_shorten(name))
    return ", from ".join(dict.fromkeys(places))


def _shorten(place: str) -> str:
    """Return a path as it is written in ``#include``.

    It may be one of another checkout: cache entries are found by the contents of sources, and know the paths under
    which they were compiled. So the longest end of the path that names a file of ``cuda_src`` is what counts.
    """
    path, _, line = place.rpartition(":")
    parts = os.path.normpath(path).split(os.sep)
    root = sources_module.root()
    ends = (os.path.join(*parts[i:]) for i in range(1, len(parts)))
    return f"{next((end for end in ends if (root / end).is_file()), parts[-1])}:{line}"
