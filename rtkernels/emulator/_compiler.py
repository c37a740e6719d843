"""The compiler of the host, and the options that kernels are compiled with."""

from __future__ import annotations

import contextlib
import os
import platform
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from rtkernels.errors import ToolkitError

# Options of kernels, if the compiler supports them. Most kernels run once, and optimisation is nine tenths of a
# compilation: slow passes with little effect are disabled, and so is all debug information except line numbers. GCC
# forms fused multiply-adds only with expensive optimisations, and not at all with -Og.
KERNEL_FLAGS = (
    "-fexpensive-optimizations",
    *("-fno-tree-sra", "-fno-gnu-unique", "-fno-extern-tls-init", "--param=tsan-instrument-func-entry-exit=0"),
    "--param=tsan-distinguish-volatile=1",
    *("-fno-tree-dominator-opts", "-fno-tree-loop-optimize", "-fno-tree-pta", "-fira-region=one", "-fno-var-tracking"),
)
GCC_FLAGS = (
    *("-fno-tree-dse", "-fno-tree-sink", "-fno-tree-slsr", "-fno-tree-ch", "-fno-tree-phiprop", "-fno-tree-bit-ccp"),
    *("-fno-tree-switch-conversion", "-fno-ssa-phiopt", "-fno-split-paths", "-fno-thread-jumps"),
    *("-fno-ipa-pure-const", "-fno-ipa-reference", "-fno-ipa-profile", "-fno-ipa-modref"),
    *("-fno-forward-propagate", "-fno-dse", "-fno-if-conversion", "-fno-if-conversion2", "-fno-move-loop-invariants"),
    *("-fno-branch-count-reg", "-fno-split-wide-types", "-fno-shrink-wrap", "-fno-compare-elim"),
    *("-fno-cprop-registers", "-fno-combine-stack-adjustments", "-fno-reorder-blocks"),
    "-fno-guess-branch-probability",
)

# A process that has the sanitizers' library (LD_PRELOAD) may set this before it builds anything: the runtime and the
# kernels are then compiled with AddressSanitizer and UBSan. Kernels call the library for every access, by names that
# the linker gives to the runtime (`SANITIZED_CALLS`), which does its own checks and then those of the library.
sanitized = False
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-sanitize=vptr")
_OF_GCC = ("--param=asan-instrumentation-with-call-threshold=0", "--param=asan-use-after-return=0")
_OF_CLANG = ("-mllvm", "-asan-instrumentation-with-call-threshold=0", "-fsanitize-address-use-after-return=never")
SANITIZED_CALLS = (
    *(f"__asan_{kind}{size}" for kind in ("load", "store") for size in (1, 2, 4, 8, 16, "N")),
    *(f"__asan_{name}" for name in ("memcpy", "memmove", "memset")),
)


@dataclass(frozen=True)
class Compiler:
    """The host C++ compiler."""

    command: tuple[str, ...]
    version: str

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of every object."""
        common = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing", "-fno-math-errno", "-w")
        return common + _contraction(self.command)

    @property
    def is_clang(self) -> bool:
        return "clang" in self.version

    @property
    def hooks(self) -> tuple[str, ...]:
        """Options that make a kernel call the runtime for its accesses."""
        if not sanitized:
            return ("-fsanitize=thread",)
        return (*SANITIZERS, *(_OF_CLANG if self.is_clang else _OF_GCC))


@cache
def _probe(command: tuple[str, ...]) -> str:
    done = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[0] if done.returncode == 0 and done.stdout else ""


@cache
def accepted(command: tuple[str, ...], flags: tuple[str, ...]) -> tuple[str, ...]:
    """Return the flags that the compiler supports, usually all."""
    check = [*command, "-Werror", *flags, "-x", "c++", "-fsyntax-only", os.devnull]
    if subprocess.run(check, capture_output=True, check=False).returncode == 0:
        return flags
    if len(flags) == 1:
        return ()
    middle = len(flags) // 2
    return accepted(command, flags[:middle]) + accepted(command, flags[middle:])


def _contraction(command: tuple[str, ...]) -> tuple[str, ...]:
    """NVRTC fuses a * b + c by default, so the host does too where it has the instruction."""
    if platform.machine() in ("x86_64", "AMD64"):
        with contextlib.suppress(OSError):
            if " fma " in Path("/proc/cpuinfo").read_text():
                return ("-mfma", "-ffp-contract=fast")
        return ("-ffp-contract=off",)
    return ("-ffp-contract=fast",)


def compiler() -> Compiler:
    """Return the host compiler: ``$CXX`` if set, else g++, clang++ or c++ from the path.

    Raises:
        ToolkitError: There is none, or ``$CXX`` does not run.
    """
    if platform.system() != "Linux" or platform.machine() not in ("aarch64", "x86_64"):
        raise ToolkitError(
            f"the host emulator runs on Linux on aarch64 and x86_64, not on {platform.system()} {platform.machine()}"
        )
    named = shlex.split(os.environ.get("CXX", ""))
    candidates = [tuple(named)] if named else [("g++",), ("clang++",), ("c++",)]
    for command in candidates:
        if (found := shutil.which(command[0])) and (version := _probe((found, *command[1:]))):
            return Compiler((found, *command[1:]), version)
    looked = f"CXX={' '.join(named)!r} does not run" if named else "neither g++, clang++ nor c++ is on the path"
    raise ToolkitError(
        f"the host emulator needs a C++17 compiler and found none: {looked}; "
        "install one (apt install g++, dnf install gcc-c++) or set CXX"
    )
