"""group_norm with the statistics that aten keeps, and its gradients from them."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.reduction import reduce
from rtkernels.ops.shared.strided import TOKEN, power_of_two
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_SLICED = "slices:i64 per_slice:i64 aligned:i64"
_APPLY = Kernel(
    "reduce/group_norm.cu", "group_norm_apply", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="x:ptr variances:ptr means:ptr weight:ptr bias:ptr y:ptr mean:ptr rstd:ptr cols:i64 groups:i64 spatial:i64 "
    f"eps:f64 {_SLICED}",
)  # fmt: skip
_PLANES = Kernel(
    "reduce/group_norm.cu", "plane_sums", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="dy:ptr x:ptr mean:ptr rstd:ptr partial:ptr planes:i64 channels:i64 group_channels:i64 spatial:i64 "
    "threads_per_row:i64 aligned:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/group_norm.cu", "group_norm_bwd", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="dy:ptr x:ptr weight:ptr mean:ptr rstd:ptr partial:ptr dx:ptr cols:i64 groups:i64 channels:i64 spatial:i64 "
    f"{_SLICED}",
)  # fmt: skip


def _sliced(x: Meta, groups: int, starts: int, device: int) -> tuple[int, int, tuple[int, int, int]]:
    """Return the grid, elements of a row, and how rows are cut: slices for four blocks on each SM."""
    batch, channels, spatial = x.shape
    cols = channels // groups * spatial
    vector = 16 // x.dtype.itemsize
    aligned = starts == 0 and cols % vector == 0
    step = _THREADS * (vector if aligned else 1)
    slices = max(1, min(-(-cols // (4 * step)), 4 * device_info(device).sm_count // (batch * groups)))
    per_slice = -(-cols // (slices * step)) * step
    slices = -(-cols // per_slice)
    return batch * groups * slices, cols, (slices, per_slice, int(aligned))


def _plan_apply(
    x: Meta, variances: Meta, means: Meta, weight: Meta | None, bias: Meta | None, groups: int, device: int
) -> Steps:
    grid, cols, cut = _sliced(x, groups, misaligned(x), device)
    launch = _APPLY.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    names = "x", "variances", "means", "weight", "bias", "y", "mean", "rstd"
    return Steps(Step(launch, *names, cols, groups, x.shape[2], "eps", *cut))


def _plan_planes(dy: Meta, x: Meta, mean: Meta, rstd: Meta, groups: int, device: int) -> Steps:
    batch, channels, spatial = x.shape
    vector = 16 // x.dtype.itemsize
    aligned = misaligned(dy, x) == 0 and spatial % vector == 0
    units = spatial // vector if aligned else spatial
    threads = _THREADS if units > 128 else min(power_of_two(-(-units // 2)), 32)
    launch = _PLANES.bind((TOKEN[x.dtype],), device, -(-batch * channels // (_THREADS // threads)), _THREADS)
    numbers = batch * channels, channels, channels // groups, spatial, threads, int(aligned)
    return Steps(Step(launch, "dy", "x", "mean", "rstd", "partial", *numbers))


def _plan_bwd(
    dy: Meta, x: Meta, weight: Meta | None, mean: Meta, rstd: Meta, partial: Meta, groups: int, device: int
) -> Steps:
    grid, cols, cut = _sliced(x, groups, misaligned(dy, x), device)
    launch = _BWD.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    names = "dy", "x", "weight", "mean", "rstd", "partial", "dx"
    return Steps(Step(launch, *names, cols, groups, x.shape[1], x.shape[2], *cut))


_PARAMETERS = (Dense("weight", None, optional=True), Dense("bias", None, optional=True))
_STATISTICS = (Dense("mean", None), Dense("rstd", None))
_APPLIED = Primitive(
    "group_norm_apply", (Dense("x", None), Dense("variances", None), Dense("means", None), *_PARAMETERS), "groups, eps",
    numbers="eps", results="y mean rstd", plan=_plan_apply,
    outputs=lambda x, groups: (
        Memory(x.shape, x.dtype), *[Memory((x.shape[0], groups), x.dtype)] * 2,
    ),
)  # fmt: skip
_PLANE_SUMS = Primitive(
    "plane_sums", (Dense("dy", None), Dense("x", None), *_STATISTICS), "groups", results="partial", plan=_plan_planes,
    outputs=lambda x: (Memory((x.shape[0], 2, x.shape[1]), torch.float32),),
)  # fmt: skip
_DX = Primitive(
    "group_norm_bwd",
    (Dense("dy", None), Dense("x", None), Dense("weight", None, optional=True), *_STATISTICS, Dense("partial", None)),
    "groups", results="dx", outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan_bwd,
)  # fmt: skip


def group_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise each group of channels of each batch entry.

    Args:
        x: (batch, channels, spatial), bfloat16, float16 or float32; not empty, fewer than 2^31 elements in a group.
        weight: (channels,), of x's dtype, or None.
        bias: Like weight.
        groups: Divides the channels.
        eps: Added to the variance.

    Returns:
        y, and mean and rstd, (batch, groups): all of x's dtype, as aten has them.
    """
    x = x.contiguous()
    rows = x.view(x.shape[0] * groups, -1)
    variances, means = reduce(rows, "moments", (1,), False, torch.float32, number=rows.shape[1], wanted="os")
    return _APPLIED(x, variances, means, weight, bias, groups, eps)


def group_norm_grads(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, groups: int, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Return dx, and the gradients of weight and bias; sums in fp32 in a fixed order.

    Args:
        dy: Like x.
        x: As for ``group_norm``.
        weight: As for ``group_norm``.
        mean: (batch, groups), of x's dtype.
        rstd: Like mean.
        groups: As for ``group_norm``.
        wanted: Whether dx, and whether the gradients of parameters are.

    Returns:
        None for what is not wanted.
    """
    partial = _PLANE_SUMS(dy, x, mean, rstd, groups)
    dx = _DX(dy, x, weight, mean, rstd, partial, groups) if wanted[0] else None
    return dx, tuple(reduce(partial, "sum", (0,), False, x.dtype).unbind()) if wanted[1] else None


OP = Op("group_norm", public=(), kernels=(_APPLY, _PLANES, _BWD), torch_ops=())
__all__ = ["OP", "group_norm", "group_norm_grads"]
