"""NVRTC through CuPy's low-level binding: flags, header check, compile, resource report.

Nothing here needs a GPU. CuPy is imported inside functions, so importing this module costs nothing.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from rtkernels.errors import ArgumentError, KernelCompileError, ToolkitError
from rtkernels.runtime import env
from rtkernels.runtime.build import places as places_module
from rtkernels.runtime.build import sources as sources_module
from rtkernels.runtime.targets import Target

# Precompiled headers would hide an edited header; the other options would put paths into the key or override the
# target.
_FORBIDDEN_FLAGS = (
    *("--pch", "-pch", "--create-pch", "-create-pch", "--use-pch", "-use-pch"),
    *("-I", "--include-path", "-arch", "--gpu-architecture"),
)

# Neither changes the code: the first makes ptxas report resources, the second stops NVRTC from searching for headers
# below the current directory.
_REPORT_FLAGS = ("--ptxas-options=-v", "--no-source-include")


@dataclass(frozen=True)
class Resources:
    """Resources of one kernel as ptxas reports them; in bytes except for ``registers``."""

    registers: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0
    shared: int = 0
    constant: int = 0


@dataclass(frozen=True)
class Compiled:
    """The result of one compilation.

    Attributes:
        image: Cubin, or PTX for a PTX target.
        names: Name expression to mangled kernel name.
        log: The whole output of NVRTC and ptxas.
        resources: Name expression to resources; empty for a PTX target, for which ptxas does not run.
        ptx: The PTX of the image, if it was requested.
    """

    image: bytes
    names: dict[str, str]
    log: str
    resources: dict[str, Resources]
    ptx: str | None = None


# --- CuPy and NVRTC themselves ------------------------------------------------------------------------------


def import_cupy() -> ModuleType:
    """Import and return CuPy.

    Raises:
        ToolkitError: CuPy is not installed, or its installation is broken.
    """
    _make_cupy_importable()
    try:
        import cupy
    except Exception as error:  # a broken CuPy may raise anything, from ImportError to OSError
        raise ToolkitError(
            f"CuPy cannot be imported ({type(error).__name__}: {error}). rtkernels compiles and launches through "
            "it: `pip install cupy-cuda13x nvidia-cuda-nvrtc`, or for a torch or a driver of CUDA 12 `pip install "
            "cupy-cuda12x nvidia-cuda-nvrtc-cu12`"
        ) from error
    return cupy


def _make_cupy_importable() -> None:
    """Point ``CUPY_CACHE_DIR`` at a private directory if CuPy could not create its default one.

    CuPy creates that directory on import and fails if it cannot, even if it would never write to it.
    """
    if os.environ.get("CUPY_CACHE_DIR"):
        return
    default = os.path.expanduser("~/.cupy/kernel_cache")
    if os.path.isabs(default):  # without a home directory it begins with "~", a name in the current directory
        try:
            places_module.make_private_directory(default)
            if os.access(default, os.W_OK | os.X_OK):
                return
        except OSError:
            pass
    os.environ["CUPY_CACHE_DIR"] = str(places_module.process_directory("cupy"))


@functools.cache
def _binding() -> ModuleType:
    import_cupy()
    try:
        from cupy_backends.cuda.libs import nvrtc

        nvrtc.getVersion()
    except Exception as error:  # CuPy raises several types of exceptions if it cannot load a library
        raise ToolkitError(
            f"NVRTC cannot be loaded ({type(error).__name__}: {error}). Install what fits your CuPy: "
            "`pip install nvidia-cuda-nvrtc` for cupy-cuda13x, `nvidia-cuda-nvrtc-cu12` for cupy-cuda12x"
        ) from error
    return nvrtc


def version() -> tuple[int, int]:
    """Return NVRTC's (major, minor).

    Raises:
        ToolkitError: CuPy or NVRTC cannot be loaded.
    """
    major, minor = _binding().getVersion()
    return int(major), int(minor)


def supported_archs() -> list[int]:
    """Return the architectures NVRTC compiles for, as numbers (90 for sm_90), ascending."""
    return sorted(int(arch) for arch in _binding().getSupportedArchs())


def library_path() -> str | None:
    """Return the file of the loaded NVRTC, or None if the system does not report it."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            paths = (line.split(maxsplit=5)[-1].strip() for line in maps if "libnvrtc.so" in line)
            return next(paths, None)
    except OSError:
        return None


# --- flags --------------------------------------------------------------------------------------------------


def flags_for(target: Target, extra: Iterable[str] = ()) -> list[str]:
    """Return the options that decide the compiled code; all of them are part of the cache key.

    Args:
        target: The compilation target.
        extra: Options of one unit, such as ``--use_fast_math``. None of them is on by default.

    Raises:
        ArgumentError: ``extra`` has an option that would invalidate the cache key.
    """
    flags = [f"-arch={target.name}", "--std=c++17", "-default-device"]
    if env.get("LINEINFO"):
        flags.append("-lineinfo")
    for flag in extra:
        if flag.startswith(_FORBIDDEN_FLAGS):
            raise ArgumentError(
                f"compiler option {flag!r} is not allowed: rtkernels alone decides on targets, include paths and "
                "precompiled headers, so that a cache key says what was compiled"
            )
        if flag not in flags:
            flags.append(flag)
    return flags


# --- CUDA headers, for units that include one of the three allowed ------------------------------------------


def include_directory(headers: Sequence[str]) -> Path:
    """Return a directory with these toolkit headers, of NVRTC's own version.

    Raises:
        ToolkitError: There is none, or only one of another version.
    """
    wanted = version()
    named = env.get("CUDA_INCLUDE")
    candidates = [named] if named else _header_candidates()
    found = [path for path in candidates if all((path / name).is_file() for name in headers)]
    for path in found:
        if header_version(path) == wanted:
            return path

    package = "nvidia-cuda-runtime-cu12" if wanted[0] == 12 else "nvidia-cuda-runtime"
    remedy = f"install `{package}=={wanted[0]}.{wanted[1]}.*` or set RTKERNELS_CUDA_INCLUDE"
    nvrtc = f"NVRTC is {wanted[0]}.{wanted[1]} ({library_path() or 'path unknown'})"
    if not found:
        names, places = ", ".join(headers), ", ".join(map(str, candidates))
        raise ToolkitError(f"{nvrtc}, but the CUDA headers {names} were not found in {places}; {remedy}")
    other = header_version(found[0])
    said = f"{other[0]}.{other[1]}" if other else "of an unknown version"
    raise ToolkitError(f"{nvrtc}, but the CUDA headers are {said} ({found[0]}); {remedy}")


def header_version(directory: Path) -> tuple[int, int] | None:
    """Return the CUDA (major, minor) of a header directory, or None if it is unknown."""
    for name, macro in (("cuda_runtime_api.h", "CUDART_VERSION"), ("cuda.h", "CUDA_VERSION")):
        try:
            text = (directory / name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if match := re.search(rf"^\s*#\s*define\s+{macro}\s+(\d+)", text, re.MULTILINE):
            number = int(match[1])
            return number // 1000, number % 1000 // 10
    return None


def _header_candidates() -> list[Path]:
    """Return the directories that may have headers, those of the loaded NVRTC first."""
    places: list[Path] = []
    if library := library_path():
        home = Path(library).resolve().parent.parent
        places += [home / "include", home.parent / "cuda_runtime" / "include"]
    try:
        import nvidia  # the namespace package of NVIDIA's wheels

        for base in map(Path, nvidia.__path__):
            places += [base / f"cu{version()[0]}" / "include", base / "cuda_runtime" / "include"]
    except ImportError:
        pass
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    places += [Path(toolkit) / "include" for toolkit in toolkits if toolkit]
    return list(dict.fromkeys(places))


# --- compile ------------------------------------------------------------------------------------------------


def compile_unit(
    unit: str,
    expressions: Sequence[str],
    target: Target,
    flags: Iterable[str] = (),
    *,
    op: str | None = None,
    sources: Mapping[str, bytes] | None = None,
    want_ptx: bool = False,
) -> Compiled:
    """Compile some instantiations of one unit.

    Args:
        unit: Name of the ``.cu`` file, relative to the source root, or its absolute path.
        expressions: C++ name expressions, for example ``rtk::rms_norm_fwd<rtk::bf16, 8>``.
        target: What to compile for.
        flags: Extra options, see ``flags_for``.
        op: Name of the op, for the error message.
        sources: The closure to compile; read from disk when not given.
        want_ptx: Also return the PTX.

    Raises:
        KernelCompileError: NVRTC or ptxas rejected the code.
        ToolkitError: NVRTC is missing, does not know the target, or has no fitting headers.
    """
    nvrtc = _binding()
    _check_target(target)
    options = [*flags_for(target, flags), *_REPORT_FLAGS]
    if toolkit := sources_module.toolkit_headers(unit):
        options.append(f"-I{include_directory(toolkit)}")
    files = dict(sources_module.closure(unit) if sources is None else sources)
    name = sources_module.name(unit)
    text = files.pop(name).decode("utf-8")

    program = nvrtc.createProgram(text, name, list(files.values()), [name.encode() for name in files])
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            log = _clean(nvrtc.getProgramLog(program)) or str(error)
            raise _compile_error(op or unit, unit, expressions, target, log) from None
        log = _clean(nvrtc.getProgramLog(program))
        names = {expression: nvrtc.getLoweredName(program, expression) for expression in expressions}
        image = nvrtc.getPTX(program) if target.is_ptx else nvrtc.getCUBIN(program)
        ptx_text = _clean(nvrtc.getPTX(program)) if want_ptx else None
    finally:
        nvrtc.destroyProgram(program)

    reported = parse_resources(log)
    resources = {expression: reported[name] for expression, name in names.items() if name in reported}
    return Compiled(bytes(image), names, log, resources, ptx_text)


def ptx(unit: str, expressions: Sequence[str], target: Target, flags: Iterable[str] = ()) -> str:
    """Return the PTX of some instantiations of one unit."""
    compiled = compile_unit(unit, expressions, target, flags, want_ptx=True)
    return compiled.ptx or ""


def _clean(text: str | bytes) -> str:
    if isinstance(text, bytes):
        text = text.decode("utf-8", errors="replace")
    return text.rstrip("\0").strip()


def _check_target(target: Target) -> None:
    """Raise an error that names the unsupported target; NVRTC's own message does not."""
    known = supported_archs()
    if target.number not in known:
        major, minor = version()
        raise ToolkitError(
            f"NVRTC {major}.{minor} cannot compile for {target.name}: it knows "
            f"{', '.join(f'sm_{arch}' for arch in known)}. Choose one of these, or install another NVRTC"
        )


# --- what the compiler printed ------------------------------------------------------------------------------

_ENTRY = re.compile(r"Function properties for (\S+)|Compiling entry function '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_CONSTANT = re.compile(r"(\d+) bytes cmem\[\d+\]")


def parse_resources(log: str) -> dict[str, Resources]:
    """Return the report of ``ptxas -v`` by mangled name, including device functions that were not inlined."""
    found: dict[str, Resources] = {}
    name = None
    for line in log.splitlines():
        if match := _ENTRY.search(line):
            name = match[1] or match[2]
        elif name is None:
            continue
        elif match := _FRAME.search(line):
            stack, stores, loads = map(int, match.groups())
            found.setdefault(name, Resources(stack=stack, spill_stores=stores, spill_loads=loads))
        elif match := _USED.search(line):
            shared = _SHARED.search(line)
            found[name] = replace(
                found.get(name, Resources()),
                registers=int(match[1]),
                shared=int(shared[1]) if shared else 0,
                constant=sum(map(int, _CONSTANT.findall(line))),
            )
    return found


def _compile_error(op: str, unit: str, expressions: Sequence[str], target: Target, log: str) -> KernelCompileError:
    lines = [line for line in log.splitlines() if line.strip()]
    first = next((i for i, line in enumerate(lines) if re.search(r"\berror\b|\bfatal\b", line)), 0)
    shown = "\n".join(f"    {line.rstrip()}" for line in lines[first : first + 3])
    major, minor = version()
    log_path, said = _write_log(unit, target, log)
    return KernelCompileError(
        f"{op}: {unit} does not compile for {target.name} (NVRTC {major}.{minor})\n"
        f"  kernel: {'; '.join(expressions)}\n{shown}\n"
        f"  full log: {said}\n"
        "  please report this with the output of `python -m rtkernels doctor`",
        log=log,
        log_path=log_path,
    )


@functools.lru_cache(maxsize=64)  # a retry gets the same file, not a new one
def _write_log(unit: str, target: Target, log: str) -> tuple[str | None, str]:
    try:
        path = str(places_module.keep_log(f"{Path(unit).stem}-{target.name}", log))
    except ToolkitError as error:
        return None, f"could not be written ({error}); it is in the exception's .log"
    return path, path
