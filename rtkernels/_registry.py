"""What an op declares, and what everything else (the dispatcher, warming, listing, tests, benches) reads from it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from rtkernels import _env, emulator
from rtkernels._guard import TENSOR_TYPES, dispatch_modes, functorch_transform, is_dynamo_compiling
from rtkernels._kernel import Kernel, emulate_features
from rtkernels.errors import ArgumentError, KernelCompileError, NotWarmError, ToolkitError, UnsupportedDeviceError

if TYPE_CHECKING:
    from rtkernels.testing.rows import Row

_LIBRARY = torch.library.Library("rtkernels", "FRAGMENT")
_OPS: dict[str, Op] = {}
_CANNOT_LAUNCH = (ToolkitError, UnsupportedDeviceError, KernelCompileError, NotWarmError)
_fell_back: set[str] = set()


class TorchOp:
    """One ``torch.ops.rtkernels.<name>``: device code for CUDA tensors, plain torch for CPU tensors, shapes for fakes.

    Calling it skips the dispatcher when nobody but the launcher needs to see the call. It records no gradient; the
    ``autograd.Function`` around it does.

    Args:
        schema: ``"name(Tensor x, float eps) -> Tensor"``; the first argument is a tensor.
        launch: Runs device code. Gets CUDA tensors, or CPU tensors while emulating.
        reference: The same in plain torch, on any device.
        fake: The same on tensors without data.
    """

    def __init__(self, schema: str, *, launch: Callable, reference: Callable, fake: Callable) -> None:
        self.name = schema.split("(", 1)[0]
        self.schema = schema
        self.launch = launch
        self.reference = reference
        _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order))
        _LIBRARY.impl(self.name, self._run_cuda, "CUDA")
        _LIBRARY.impl(self.name, self._run_cpu, "CPU")
        torch.library.register_fake(f"rtkernels::{self.name}", fake, lib=_LIBRARY)
        self.overload = getattr(torch.ops.rtkernels, self.name).default
        self.call = self._make_call()

    def __call__(self, *args: Any) -> Any:
        return self.call(*args)

    def _make_call(self) -> Callable[..., Any]:
        """Return the function behind ``__call__``; public functions use it directly, which saves a Python call.

        It is written out from the schema, as named tuples are: checks by name instead of loops over ``*args`` save a
        tenth of the host time of a small op.
        """
        arguments = self.overload._schema.arguments
        names = ", ".join(argument.name for argument in arguments)
        plain = ["not is_dynamo_compiling()"]
        for argument in arguments:
            if str(argument.type) == "Tensor":
                plain.append(f"type({argument.name}) in TENSOR_TYPES")
            elif str(argument.type) == "Optional[Tensor]":
                plain.append(f"({argument.name} is None or type({argument.name}) in TENSOR_TYPES)")
        first = arguments[0].name
        source = f"""
def call({names}):
    if {" and ".join(plain)} and not dispatch_modes() and functorch_transform() is None:
        if {first}.is_cuda:
            try:
                return launch({names})
            except cannot_launch as error:
                return fall_back(error, ({names},))
        if {first}.is_cpu:
            return run_cpu({names})
    return overload({names})
"""
        scope = {
            "TENSOR_TYPES": TENSOR_TYPES,
            "is_dynamo_compiling": is_dynamo_compiling,
            "dispatch_modes": dispatch_modes,
            "functorch_transform": functorch_transform,
            "cannot_launch": _CANNOT_LAUNCH,
            "launch": self.launch,
            "fall_back": self._fall_back,
            "run_cpu": self._run_cpu,
            "overload": self.overload,
        }
        exec(compile(source, f"<rtkernels {self.name}>", "exec"), scope)
        return scope["call"]

    def _run_cuda(self, *args: Any) -> Any:
        try:
            return self.launch(*args)
        except _CANNOT_LAUNCH as error:
            return self._fall_back(error, args)

    def _fall_back(self, error: Exception, args: tuple[Any, ...]) -> Any:
        """Run the reference if the user allows it, else raise."""
        if _env.get("FALLBACK") != "torch":
            raise error
        if self.name not in _fell_back:
            _fell_back.add(self.name)
            _env.logger().warning("%s runs as plain torch (RTKERNELS_FALLBACK=torch): %s", self.name, error)
        return self.reference(*args)

    def _run_cpu(self, *args: Any) -> Any:
        features = emulator.active()
        if features is None:
            return self.reference(*args)
        emulate_features(features)
        with emulator.recording():
            return self.launch(*args)


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
