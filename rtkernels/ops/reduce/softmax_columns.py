"""softmax and log_softmax over a dimension that is not the last, and their gradients, as aten has them."""

from __future__ import annotations

from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_WARP = 32  # columns, or vectors of them, of a block
_VECTOR = 4  # elements
_FWD = Kernel(
    "reduce/softmax_columns.cu", "softmax_columns_fwd", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="x:ptr y:ptr n:i64 inner:i64 log:i64 vectors:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/softmax_columns.cu", "softmax_columns_bwd", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="dy:ptr y:ptr dx:ptr n:i64 inner:i64 log:i64 vectors:i64",
)  # fmt: skip


def _launch(kernel: Kernel, x: Meta, starts: int, log: bool, device: int) -> tuple:
    """Return the launch, and the kernel's numbers. x: (outer, n, inner)."""
    outer, n, inner = x.shape
    vectors = inner % _VECTOR == 0 and starts % (_VECTOR * x.dtype.itemsize) == 0
    grid = outer * -(-inner // (_WARP * (_VECTOR if vectors else 1)))
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch = kernel.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    return launch, (n, inner, int(log), int(vectors))


def _plan_fwd(x: Meta, log: bool, device: int) -> Steps:
    launch, numbers = _launch(_FWD, x, misaligned(x), log, device)
    return Steps(Step(launch, "x", "y", *numbers))


def _plan_bwd(dy: Meta, y: Meta, log: bool, device: int) -> Steps:
    launch, numbers = _launch(_BWD, y, misaligned(dy, y), log, device)
    return Steps(Step(launch, "dy", "y", "dx", *numbers))


_FORWARD = Primitive(
    "softmax_columns_fwd", (Dense("x", None),), "log", results="y", plan=_plan_fwd,
    outputs=lambda x: (Memory(x.shape, x.dtype),),
)  # fmt: skip
_BACKWARD = Primitive(
    "softmax_columns_bwd", (Dense("dy", None), Dense("y", None)), "log", results="dx", plan=_plan_bwd,
    outputs=lambda y: (Memory(y.shape, y.dtype),),
)  # fmt: skip


def softmax_columns(x: Tensor, log: bool) -> Tensor:
    """Return the softmax over the middle dimension, or its logarithm.

    Args:
        x: (outer, n, inner), bfloat16, float16 or float32; not empty.
        log: The logarithm.

    Returns:
        Dense, of x's shape and dtype.
    """
    return _FORWARD(x, log)


def softmax_columns_grad(dy: Tensor, y: Tensor, log: bool) -> Tensor:
    """Return the gradient of x.

    Args:
        dy: Like y.
        y: What ``softmax_columns`` returned.
        log: As for it.

    Returns:
        Dense, of y's shape and dtype.
    """
    return _BACKWARD(dy, y, log)


OP = Op("softmax_columns", public=(), kernels=(_FWD, _BWD), torch_ops=())
__all__ = ["OP", "softmax_columns", "softmax_columns_grad"]
