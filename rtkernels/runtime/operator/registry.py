"""What an op declares, and what everything else (warming, listing, tests, benches) reads from it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel

if TYPE_CHECKING:
    from bench.rows.row import Row
from rtkernels.runtime.operator.operator import TorchOp

_OPS: dict[str, Op] = {}


@dataclass(frozen=True)
class Op:
    """One op family: everything ``ops/<name>.py`` offers to the rest of the library.

    Attributes:
        name: Name of the module in ``rtkernels/ops``.
        public: Names of its public functions.
        kernels: Every kernel it launches.
        torch_ops: Its operators in the dispatcher.
        samples: Arguments to try each operator with, on a device: ``(torch_op, args)``.
        rows: Benchmark rows.
    """

    name: str
    public: tuple[str, ...]
    kernels: tuple[Kernel, ...]
    torch_ops: tuple[TorchOp, ...]
    samples: Callable[[str], Iterable[tuple[TorchOp, tuple[Any, ...]]]]
    rows: Callable[[], Iterable[Row]] = field(default=tuple)

    def __post_init__(self) -> None:
        for kernel in self.kernels:
            kernel.op = self.name
        _OPS[self.name] = self


def ops() -> list[Op]:
    """Return every op, importing all of ``rtkernels.ops``."""
    package = importlib.import_module("rtkernels.ops")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"rtkernels.ops.{module.name}")
    return sorted(_OPS.values(), key=lambda op: op.name)


def get(name: str) -> Op:
    """Return one op by name.

    Raises:
        ArgumentError: There is no such op.
    """
    known = {op.name: op for op in ops()}
    if name not in known:
        raise ArgumentError(f"there is no op {name!r}; known: {', '.join(known)}")
    return known[name]


def kernels() -> Iterator[tuple[Op, Kernel]]:
    """Yield every kernel with the op that owns it."""
    for op in ops():
        for kernel in op.kernels:
            yield op, kernel
