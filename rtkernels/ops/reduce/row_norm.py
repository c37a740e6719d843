"""layer_norm and rms_norm with the statistics that aten keeps, and their gradients from them."""

from __future__ import annotations

import torch

from rtkernels.ops.shared.strided import TOKEN, power_of_two, product
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_WARP_UNITS = 512  # of 16 bytes, of the longest row that a warp has
_WARP_UNITS_BWD = 256  # in the backward
_FWD = Kernel(
    "reduce/row_norm.cu", "row_norm_fwd", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="x:ptr weight:ptr bias:ptr y:ptr mean:ptr rstd:ptr rows:i64 cols:i64 eps:f64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/row_norm.cu", "row_norm_bwd", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="dy:ptr x:ptr weight:ptr mean:ptr rstd:ptr dx:ptr rows:i64 cols:i64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_PARAMS = Kernel(
    "reduce/row_norm.cu", "row_norm_params", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="dy:ptr x:ptr mean:ptr rstd:ptr dw:ptr db:ptr partial:ptr tickets:ptr rows:i64 cols:i64 slices:i64 "
    "per_slice:i64 across:i64 aligned:i64",
)  # fmt: skip


def launch_by_rows(
    kernel: Kernel, x: Meta, rows: int, cols: int, starts: int, device: int, warp_units: int = _WARP_UNITS
) -> tuple:
    """Return a launch with a group of threads for each row, and the kernel's last arguments."""
    vector = 16 // x.dtype.itemsize
    aligned = starts == 0 and cols % vector == 0
    units = cols // vector if aligned else cols
    # A warp needs no barrier and has enough loads in flight; few rows get a block each.
    in_blocks = units > warp_units or (units > 128 and choice_rows(rows) < 8 * device_info(device).sm_count)
    threads = _THREADS if in_blocks else min(power_of_two(-(-units // 2)), 32)
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
    launch, *numbers = launch_by_rows(_BWD, x, *rows, misaligned(dy, x, weight), device, _WARP_UNITS_BWD)
    return Steps(Step(launch, "dy", "x", "weight", "mean", "rstd", "dx", *rows, *numbers))


def _plan_params(dy: Meta, x: Meta, mean: Meta | None, rstd: Meta, over: int, bias: bool, device: int) -> Steps:
    rows, cols = _rows(x, over)
    vector = 16 // x.dtype.itemsize
    aligned = misaligned(dy, x) == 0 and cols % vector == 0
    units = cols // vector if aligned else cols
    across = min(power_of_two(units), 32)
    lanes, tiles = _THREADS // across, -(-units // across)
    slices = max(1, 2 * device_info(device).sm_count // tiles)
    per_slice = rows if rows <= 16 * lanes else max(4 * lanes, -(-rows // slices))
    slices = -(-rows // per_slice)
    launch = _PARAMS.bind((TOKEN[x.dtype],), device, tiles * slices, _THREADS)
    given, numbers = ("dy", "x", "mean", "rstd", "dw", "db" if bias else 0), (per_slice, across, int(aligned))
    if slices == 1:
        return Steps(Step(launch, *given, 0, 0, rows, cols, slices, *numbers))
    return Steps(
        Step(launch, *given, "partial", "tickets", rows, cols, slices, *numbers),
        scratch={"partial": Memory((slices, 2, cols), torch.float32)},
        kept_zeros={"tickets": tiles},
    )


def _statistic(x: Meta, over: int) -> Memory:
    lead = len(x.shape) - over
    return Memory((*x.shape[:lead], *[1] * over), torch.float32)


_STATISTICS = (Dense("mean", None, optional=True), Dense("rstd", None))  # without a mean: rms_norm
FORWARD = Primitive(
    "row_norm_fwd", (Dense("x", None), Dense("weight", None, optional=True), Dense("bias", None, optional=True)),
    "over, centered, eps", numbers="eps", results="y mean rstd", plan=_plan_fwd,
    outputs=lambda x, over, centered: (
        Memory(x.shape, x.dtype), _statistic(x, over) if centered else None, _statistic(x, over),
    ),
)  # fmt: skip
BACKWARD = Primitive(
    "row_norm_bwd", (Dense("dy", None), Dense("x", None), Dense("weight", None, optional=True), *_STATISTICS), "over",
    results="dx", outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan_bwd,
)  # fmt: skip


def _parameter_outputs(dy: Meta, x: Meta, mean: Meta | None, rstd: Meta, over: int, bias: bool) -> tuple:
    memory = Memory(x.shape[len(x.shape) - over :], x.dtype)
    return memory, memory if bias else None


# The gradients of weight and, with `bias`, of bias, of x's dtype: summed in fp32 in a fixed order.
PARAMETERS = Primitive(
    "row_norm_params", (Dense("dy", None), Dense("x", None), *_STATISTICS), "over, bias", results="dw db",
    outputs=_parameter_outputs, plan=_plan_params,
)  # fmt: skip

OP = Op("row_norm", public=(), kernels=(_FWD, _BWD, _PARAMS), torch_ops=())
