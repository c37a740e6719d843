"""Running the kernels of ``emulator_bugs/`` on the host emulator."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rtkernels import emulator
from rtkernels.emulator import Pointer

FOLDER = Path(__file__).parents[1] / "emulator" / "bugs"
ORDERS = ("forward", "reverse", 0, 1)
FORMATS = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
}

_reason = emulator.unavailable()
needs_compiler = pytest.mark.skipif(_reason is not None, reason=str(_reason))


@dataclass
class Record:
    """What the emulator reads of a ``Kernel``, for a unit outside ``cuda_src``."""

    unit: str
    name: str
    args: tuple[tuple[str, str], ...]
    op: str = "emulator_test"

    def expression(self, variant: tuple[str, ...]) -> str:
        return f"rtk::{self.name}" + (f"<{', '.join(variant)}>" if variant else "")


def run(
    unit: str, name: str, *, variant: tuple[str, ...] = (), grid: Any = 1, block: Any = 32, shared: int = 0,
    arch: int = 90, cluster: int = 1, overlap: bool = False, **args: Any,
) -> None:  # fmt: skip
    """Run one kernel of the test folder; tensors become pointers."""
    kinds = {torch.Tensor: "ptr", int: "i64", float: "f64", type(None): "ptr"}
    record = Record(str(FOLDER / unit), name, tuple((key, kinds[type(v)]) for key, v in args.items()))
    values = [Pointer.of(v) if isinstance(v, torch.Tensor) else v or 0 for v in args.values()]
    emulator.bind(record, variant, arch, grid, block, shared, cluster, overlap=overlap)(*values)
