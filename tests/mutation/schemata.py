"""All mutants compiled at once, and the switch that turns one of them on."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

from mutation import mutator
from rtkernels.emulator import _build
from rtkernels.runtime.build import sources

_SLOTS = 1 << 14


class Switch:
    """The library that mutants ask; kernels find it because it is loaded for all."""

    def __init__(self, folder: Path) -> None:
        library = folder / "switch.so"
        source = Path(__file__).with_name("switch.cpp")
        command = [*_build.compiler().command, "-O2", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run(command, check=True)
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)

    def choose(self, number: int) -> None:
        """Turn one mutant on, or none (0), and forget what was reached."""
        self._library.rtk_mutant_choose(number)

    def reached(self) -> set[int]:
        """Return the numbers of the mutants whose code ran since ``choose``."""
        numbers = (ctypes.c_int * _SLOTS)()
        return set(numbers[: self._library.rtk_mutant_reached(numbers)])


def plant_all(folder: Path) -> Path:
    """Make kernels of this process come from a copy of the sources with every mutant in it, switched off."""
    texts = {file: mutator.schemata(file) for file in mutator.files()}
    tree = folder / "cuda_src"
    shutil.copytree(sources.root(), tree, copy_function=os.symlink)
    for file, text in texts.items():
        (tree / file).unlink()
        (tree / file).write_text(text)
    sources._root_override = tree
    _build._built.clear()
    return tree
