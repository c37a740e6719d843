"""Which backend runs an attention: the first one that can."""

from __future__ import annotations

from types import ModuleType

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import mma_plan
from rtkernels.ops.attention.problem import Attention
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.operator.plan import Steps

BACKENDS: dict[str, ModuleType] = {"mma": mma_plan}  # in the order in which they are asked
KERNELS = tuple(kernel for backend in BACKENDS.values() for kernel in backend.KERNELS)


def check_name(name: str) -> None:
    """Raise an ArgumentError unless there is a backend of this name, or it is "auto"."""
    if name != "auto" and name not in BACKENDS:
        raise ArgumentError(f"backend is {name!r}; expected one of auto, {', '.join(BACKENDS)}")


def _chosen(problem: Attention, name: str, device: int, backward: bool) -> ModuleType:
    target, reasons = device_info(device).target, []
    for key, backend in BACKENDS.items():
        if name in ("auto", key):
            reason = backend.unsupported(problem, target, backward)
            if reason is None:
                return backend
            reasons.append(f"{key}: {reason}")
    raise ArgumentError(f"attention has no kernel for this call on {target} ({'; '.join(reasons)})")


def forward(problem: Attention, name: str, device: int) -> Steps:
    """Return the launches of a forward pass."""
    return _chosen(problem, name, device, False).steps_forward(problem, device)


def backward(problem: Attention, name: str, device: int) -> Steps:
    """Return the launches of a backward pass."""
    return _chosen(problem, name, device, True).steps_backward(problem, device)
