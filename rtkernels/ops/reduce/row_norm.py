"""layer_norm and rms_norm with the statistics that aten keeps, and their gradients from them."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.reduction import reduce
from rtkernels.ops.shared.primitive import Memory, Primitive
from rtkernels.ops.shared.strided import TOKEN, power_of_two, product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Dense, Meta, misaligned
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_TYPES = [("bf16",), ("fp16",), ("fp32",)]
_FWD = Kernel(
    "reduce/row_norm.cu", "row_norm_fwd", template="T", variants=_TYPES, max_registers=80, tier="aten",
    args="x:ptr weight:ptr bias:ptr y:ptr mean:ptr rstd:ptr rows:i64 cols:i64 eps:f64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/row_norm.cu", "row_norm_bwd", template="T", variants=_TYPES, max_registers=80, tier="aten",
    args="dy:ptr x:ptr weight:ptr mean:ptr rstd:ptr dx:ptr rows:i64 cols:i64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_PARAMS = Kernel(
    "reduce/row_norm.cu", "row_norm_params", template="T", variants=_TYPES, max_registers=64, tier="aten",
    args="dy:ptr x:ptr mean:ptr rstd:ptr partial:ptr rows:i64 cols:i64 per_slice:i64",
)  # fmt: skip


def launch_by_rows(kernel: Kernel, x: Meta, rows: int, cols: int, starts: int, device: int) -> tuple:
    """Return a launch with a group of threads for each row, and the kernel's last arguments."""
    vector = 16 // x.dtype.itemsize
    aligned = starts == 0 and cols % vector == 0
    units = cols // vector if aligned else cols
    threads = _THREADS if units > 128 else min(power_of_two(-(-units // 2)), 32)
    launch = kernel.bind((TOKEN[x.dtype],), device, -(-rows // (_THREADS // threads)), _THREADS)
    return launch, threads, int(aligned)


def _rows(x: Meta, over: int) -> tuple[int, int]:
    """Return rows, and elements of each: those of the last `over` dimensions."""
    cols = product(x.shape[len(x.shape) - over :])
    return x.numel() // cols, cols


def _plan_fwd(x: Meta, weight: Meta | None, bias: Meta | None, over: int, centered: bool, device: int) -> Steps:
    rows = _rows(x, over)
    launch, *numbers = launch_by_rows(_FWD, x, *rows, misaligned(x, weight, bias), device)
    mean = "mean" if centered else 0
    return Steps(Step(launch, "x", "weight", "bias", "y", mean, "rstd", *rows, "eps", *numbers))


def _plan_bwd(dy: Meta, x: Meta, weight: Meta | None, mean: Meta | None, rstd: Meta, over: int, device: int) -> Steps:
    rows = _rows(x, over)
    launch, *numbers = launch_by_rows(_BWD, x, *rows, misaligned(dy, x, weight), device)
    return Steps(Step(launch, "dy", "x", "weight", "mean", "rstd", "dx", *rows, *numbers))


def _slices(x: Meta, over: int) -> tuple[int, int]:
    """Return slices of the rows, and rows of each."""
    rows, cols = _rows(x, over)
    blocks = max(1, 4 * device_info(x.device).sm_count // -(-cols // _THREADS))
    per_slice = max(16, -(-rows // blocks))
    return -(-rows // per_slice), per_slice


def _plan_params(dy: Meta, x: Meta, mean: Meta | None, rstd: Meta, over: int, device: int) -> Steps:
    slices, per_slice = _slices(x, over)
    rows = _rows(x, over)
    launch = _PARAMS.bind((TOKEN[x.dtype],), device, slices * -(-rows[1] // _THREADS), _THREADS)
    return Steps(Step(launch, "dy", "x", "mean", "rstd", "partial", *rows, per_slice))


def _statistic(x: Meta, over: int) -> Memory:
    lead = len(x.shape) - over
    return Memory((*x.shape[:lead], *[1] * over), torch.float32)


_STATISTICS = (Dense("mean", None, optional=True), Dense("rstd", None))  # without a mean: rms_norm
FORWARD = Primitive(
    "row_norm_fwd", (Dense("x", None), Dense("weight", None, optional=True), Dense("bias", None, optional=True)),
    "over, centered, eps", numbers="eps", results="y mean rstd", plan=_plan_fwd,
    outputs=lambda x, weight, bias, over, centered, *_: (
        Memory(x.shape, x.dtype), _statistic(x, over) if centered else None, _statistic(x, over),
    ),
)  # fmt: skip
BACKWARD = Primitive(
    "row_norm_bwd", (Dense("dy", None), Dense("x", None), Dense("weight", None, optional=True), *_STATISTICS), "over",
    results="dx", outputs=lambda dy, x, *_: (Memory(x.shape, x.dtype),), plan=_plan_bwd,
)  # fmt: skip
PARAMS = Primitive(
    "row_norm_params", (Dense("dy", None), Dense("x", None), *_STATISTICS), "over", results="partial",
    outputs=lambda dy, x, mean, rstd, over: (
        Memory((_slices(x, over)[0], 2, *x.shape[len(x.shape) - over :]), torch.float32),
    ),
    plan=_plan_params,
)  # fmt: skip


def parameter_grads(dy: Tensor, x: Tensor, mean: Tensor | None, rstd: Tensor, over: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of weight and bias, summed in fp32 in a fixed order.

    Args:
        dy: bfloat16, float16 or float32.
        x: Like dy.
        mean: One for each row, float32; None: rms_norm.
        rstd: One for each row, float32.
        over: How many of x's last dimensions are a row.

    Returns:
        Both of these dimensions, of x's dtype.
    """
    sums = reduce(PARAMS(dy, x, mean, rstd, over), "sum", (0,), False, x.dtype)
    return tuple(sums.unbind())


OP = Op("row_norm", public=(), kernels=(_FWD, _BWD, _PARAMS), torch_ops=())
