"""The records of all ops, which warming, listing, tests and benchmarks read."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.operator import TorchOp

_OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Op:
    """One op: everything that ``ops/<family>/<name>.py`` provides to the rest of the library.

    Attributes:
        name: Name of its module.
        public: Names of its public functions.
        kernels: All kernels that it owns.
        torch_ops: Its operators that are registered with torch.
        uses: Names of all other ops whose kernels its public functions launch; warming includes them.
    """

    name: str
    public: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    torch_ops: tuple[TorchOp, ...]
    uses: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            kernel.op = self.name
        _OPS[self.name] = self


def ops() -> list[Op]:
    """Return every op, importing all of ``rtkernels.ops`` and ``rtkernels.aten``."""
    for name in ("rtkernels.ops", "rtkernels.aten"):
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    return sorted(_OPS.values(), key=lambda op: op.name)


def public(name: str) -> Any:
    """Return a public function by searching all ops, or None. ``_public.py`` imports less to find one."""
    for op in ops():
        if name in op.public:
            ours = [m for n, m in sys.modules.items() if n.startswith("rtkernels.ops.")]
            # None for an op that was registered outside this package: its users import its own module.
            return next((getattr(m, name) for m in ours if getattr(m, "OP", None) is op), None)
    return None


def kernels() -> Iterator[tuple[Op, Kernel]]:
    """Yield every kernel with the op that owns it."""
    for op in ops():
        for kernel in op.kernels:
            yield op, kernel
