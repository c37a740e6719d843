"""Defects planted in the package, one edit each, that the fuzzer must find: the first five are ones that were there.

``python -m contracts.fuzz.planted NAME`` (with ``tests`` on the path) plants one while modules are imported, runs the
cases that are named here, and prints the first failure; without a name nothing is planted.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True)
class Defect:
    """One edit.

    Attributes:
        name: Unique, says what is wrong.
        file: Relative to the repository.
        old: Text in it, once.
        new: What it becomes.
        only: Calls that find it: a part of their names.
        place: Where: ``cpu``, ``sm_80`` or ``sm_90``.
        variation: Part of the names of variations that find it.
        kinds: ``own``, or ``aten``.
    """

    name: str
    file: str
    old: str
    new: str
    only: str
    place: str
    variation: str = ""
    kinds: str = "own"


_OPERATOR, _OPS = "rtkernels/runtime/operator", "rtkernels/ops"
DEFECTS = [
    # ---- these were there ----
    Defect("expanded residual read as dense", f"{_OPS}/gemm/scaled_mm_plan.py",
           "add_pitch = n if add_pitch is None else add_pitch", "add_pitch = add_pitch or n",
           "scaled_mm(), add, mma", "sm_80", "add:expand0"),
    Defect("expanded groups read as dense", f"{_OPERATOR}/plan.py",
           "step * size if n > 1 else row for", "step * size if n > 1 and step else row for",
           "grouped_mm(), same matrix", "sm_90", "b:expand0"),
    Defect("attention over its values", f"{_OPS}/attention/attention.py",
           'checks.Destination("out", HALVES, over="q")', 'checks.Destination("out", HALVES, over="q k v")',
           "attention(), long", "sm_80", "=v+0"),
    Defect("overlap by a shift not seen", f"{_OPERATOR}/aliasing.py",
           "        if may_overlap(written, t):",
           "        if written.data_ptr() == t.data_ptr() and may_overlap(written, t):",
           "attention", "cpu", "out"),
    Defect("vectors along overlapping windows", f"{_OPS}/reduce/reduction.py",
           "    others = [step for _, step, *_ in along]", "    others = [step for _, step, *_ in along if step != 1]",
           "aten sum", "sm_80", "windows1", "aten"),
    # ---- planted ----
    Defect("plans compare no addresses", f"{_OPERATOR}/aliasing.py",
           "    lines, scope[\"shared_error\"] = [], shared_error\n",
           "    lines, scope[\"shared_error\"], guards = [], shared_error, ()\n",
           "scaled_mm(), add, mma", "sm_80", "out[0]=add"),
    Defect("replays compare no addresses", "rtkernels/runtime/call/codegen.py",
           'return f"({low - further} < {distance} <', 'return "False" or f"({low - further} < {distance} <',
           "attention(), bias", "sm_80", "out[0]="),
    Defect("stepped rows read as dense", "rtkernels/runtime/layout.py",
           "    if shape[-1] > 1 and stride[-1] != 1:\n        return None\n", "", "softmax()", "sm_80", "step"),
    Defect("addresses left out of an alignment", f"{_OPS}/norm/rms_norm_plan.py",
           "starts = misaligned(x, residual, weight, out)", "starts = 0", "rms_norm_fwd", "sm_80", ":off"),
    Defect("a stride left out of an alignment", f"{_OPS}/act/glu_plan.py",
           "cols * size, gate_stride * size, up_stride * size) < 16", "cols * size, gate_stride * size) < 16",
           "glu_fwd", "sm_80", "up:"),
    Defect("out that is not aligned taken as it is", "rtkernels/runtime/call/memory.py",
           "    return not (begin + view.first) % 16", "    return True", "softmax()", "sm_80", "out[0]"),
    Defect("copies not written back", f"{_OPERATOR}/declaration.py",
           "                args[i].copy_(used[i])\n        self._count",
           "                pass\n        self._count",
           "add_in_place", "sm_80", "x:"),
    Defect("address of a result left out of an alignment", f"{_OPS}/layout/strided_copy.py",
           "vector_bytes(x.misaligned, out.misaligned, *(", "vector_bytes(x.misaligned, *(",
           "strided_copy", "sm_80", "out:off"),
    Defect("elements that share memory are written", "rtkernels/runtime/layout.py",
           "        if step <= reach:\n            return True\n",
           "        if step <= reach:\n            return False\n",
           "rope_", "cpu", "q:windows"),
    Defect("a tail of one too many", "cuda_src/pointwise/inplace.cu",
           "            if (i * step < left) {", "            if (i * step <= left) {", "add_in_place", "sm_80"),
]  # fmt: skip


class _Finder(importlib.abc.MetaPathFinder):
    """Imports the module that is edited from the edited text."""

    def __init__(self, defect: Defect) -> None:
        self.module = defect.file.removesuffix(".py").replace("/", ".")
        self.defect = defect

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        """Return the loader of the edited module; None for others."""
        if name != self.module:
            return None
        file = str(ROOT / self.defect.file)
        return importlib.util.spec_from_loader(name, _Loader(name, file, edited(self.defect)), origin=file)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> Any:
        return compile(self.text, self.path, "exec")


def edited(defect: Defect) -> str:
    """Return the text of a file with the defect in it."""
    text = (ROOT / defect.file).read_text()
    found = text.count(defect.old)
    if found != 1:
        raise SystemExit(
            f"this planting no longer applies: {defect.file} has {defect.old!r} {found} times, expected once; change "
            f"{defect.name!r} in tests/contracts/fuzz/planted.py so that it plants the same defect in what is there now"
        )
    return text.replace(defect.old, defect.new)


def search(defect: Defect, seed: int = 0, limit: int = 60) -> str | None:
    """Return the first failure of the cases that a defect names, None if there is none."""
    from support.compare import poisoned

    from contracts.fuzz import campaign

    with poisoned():
        found = campaign.run(
            defect.place, seed, 120.0, only=defect.only, part_of_variation=defect.variation, kinds=defect.kinds
        )
        for _, failure in zip(range(limit), found, strict=False):
            if failure is not None:
                return " | ".join(failure)
    return None


def main(names: list[str]) -> int:
    """Plant the defects of these names, or none, and say what the fuzzer finds."""
    for name in names:
        defect = next(d for d in DEFECTS if d.name == name.removeprefix("without "))
        planting: Any = contextlib.nullcontext()
        if not name.startswith("without "):
            if defect.file.endswith(".cu"):
                from support.source_tree import source_tree

                planting = source_tree({defect.file.removeprefix("cuda_src/"): edited(defect)})
            else:
                sys.meta_path.insert(0, _Finder(defect))
        with planting:
            print(f"{name}: {search(defect) or 'nothing'}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
