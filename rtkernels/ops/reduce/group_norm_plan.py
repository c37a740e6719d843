"""The launches of ``group_norm`` and of its gradients, behind the public function and torch's own operators."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.reduction import reduce
from rtkernels.ops.shared.strided import TOKEN, power_of_two
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import WEIGHTED_TYPES, WIDTH
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_THREADS = 256
_SLICED = "act:i64 slices:i64 per_slice:i64 aligned:i64"
# x, parameters, statistics: all of x's type in aten, else fp32 statistics.
_TYPES = list(dict.fromkeys([*((t, t, t) for t in WIDTH), *((t, w, "fp32") for t, w in WEIGHTED_TYPES)]))
_APPLY = Kernel(
    "reduce/group_norm.cu", "group_norm_apply", template="T W S", variants=_TYPES, max_registers=64,
    args="x:ptr variances:ptr means:ptr weight:ptr bias:ptr y:ptr mean:ptr rstd:ptr cols:i64 groups:i64 spatial:i64 "
    f"eps:f64 {_SLICED}",
)  # fmt: skip
_PLANES = Kernel(
    "reduce/group_norm.cu", "plane_sums", template="T W S", variants=_TYPES, max_registers=64,
    args="dy:ptr x:ptr weight:ptr bias:ptr mean:ptr rstd:ptr partial:ptr planes:i64 channels:i64 group_channels:i64 "
    "spatial:i64 act:i64 threads_per_row:i64 aligned:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/group_norm.cu", "group_norm_bwd", template="T W S", variants=_TYPES, max_registers=64,
    args="dy:ptr x:ptr weight:ptr bias:ptr mean:ptr rstd:ptr partial:ptr dx:ptr cols:i64 groups:i64 channels:i64 "
    f"spatial:i64 {_SLICED}",
)  # fmt: skip
KERNELS = (_APPLY, _PLANES, _BWD)


def _types(x: Meta, weight: Meta | None, bias: Meta | None, statistics: torch.dtype) -> tuple[str, str, str]:
    parameters = weight or bias or x
    return TOKEN[x.dtype], TOKEN[parameters.dtype], TOKEN[statistics]


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
    x: Meta, variances: Meta, means: Meta, weight: Meta | None, bias: Meta | None, groups: int, act: bool,
    statistics: torch.dtype, device: int,
) -> Steps:  # fmt: skip
    grid, cols, cut = _sliced(x, groups, misaligned(x), device)
    launch = _APPLY.bind(_types(x, weight, bias, statistics), device, grid, _THREADS)
    names = "x", "variances", "means", "weight", "bias", "y", "mean", "rstd"
    return Steps(Step(launch, *names, cols, groups, x.shape[2], "eps", int(act), *cut))


def _plan_planes(
    dy: Meta, x: Meta, weight: Meta | None, bias: Meta | None, mean: Meta, groups: int, act: bool, device: int
) -> Steps:
    batch, channels, spatial = x.shape
    vector = 16 // x.dtype.itemsize
    aligned = misaligned(dy, x) == 0 and spatial % vector == 0
    units = spatial // vector if aligned else spatial
    threads = _THREADS if units > 128 else min(power_of_two(-(-units // 2)), 32)
    grid = -(-batch * channels // (_THREADS // threads))
    launch = _PLANES.bind(_types(x, weight, bias, mean.dtype), device, grid, _THREADS)
    numbers = batch * channels, channels, channels // groups, spatial, int(act), threads, int(aligned)
    return Steps(Step(launch, "dy", "x", "weight", "bias", "mean", "rstd", "partial", *numbers))


def _plan_bwd(
    dy: Meta, x: Meta, weight: Meta | None, bias: Meta | None, mean: Meta, groups: int, act: bool, device: int
) -> Steps:
    grid, cols, cut = _sliced(x, groups, misaligned(dy, x), device)
    launch = _BWD.bind(_types(x, weight, bias, mean.dtype), device, grid, _THREADS)
    names = "dy", "x", "weight", "bias", "mean", "rstd", "partial", "dx"
    return Steps(Step(launch, *names, cols, groups, x.shape[1], x.shape[2], int(act), *cut))


_PARAMETERS = (Dense("weight", None, optional=True), Dense("bias", None, optional=True))
_STATISTICS = (Dense("mean", None), Dense("rstd", None))
_APPLIED = Primitive(
    "group_norm_apply", (Dense("x", None), Dense("variances", None), Dense("means", None), *_PARAMETERS),
    "groups, eps, act, statistics", numbers="eps", results="y mean rstd", plan=_plan_apply,
    outputs=lambda x, groups, statistics: (
        Memory(x.shape, x.dtype), *[Memory((x.shape[0], groups), statistics)] * 2,
    ),
)  # fmt: skip
_GIVEN = Dense("dy", None), Dense("x", None), *_PARAMETERS, *_STATISTICS
_PLANE_SUMS = Primitive(
    "plane_sums", _GIVEN, "groups, act", results="partial", plan=_plan_planes,
    outputs=lambda x: (Memory((x.shape[0], 2, x.shape[1]), torch.float32),),
)  # fmt: skip
_DX = Primitive(
    "group_norm_bwd", (*_GIVEN, Dense("partial", None)), "groups, act", results="dx", plan=_plan_bwd,
    outputs=lambda x: (Memory(x.shape, x.dtype),),
)  # fmt: skip


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, act: bool = False,
    statistics: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise each group of channels of each batch entry.

    Args:
        x: (batch, channels, spatial), bfloat16, float16 or float32; not empty, fewer than 2^31 elements in a group.
        weight: (channels,), of x's dtype or, with fp32 statistics, float32; or None.
        bias: Like weight.
        groups: Divides the channels.
        eps: Added to the variance.
        act: Whether silu follows.
        statistics: Of mean and rstd: fp32, or x's dtype (None), as aten has them.

    Returns:
        y, and mean and rstd, (batch, groups).
    """
    x = x.contiguous()
    rows = x.view(x.shape[0] * groups, -1)
    variances, means = reduce(rows, "moments", (1,), False, torch.float32, number=rows.shape[1], wanted="os")
    return _APPLIED(x, variances, means, weight, bias, groups, eps, act, statistics or x.dtype)


def gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor, groups: int,
    wanted: tuple[bool, bool], act: bool = False,
) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:  # fmt: skip
    """Return dx, and the gradients of weight and bias; sums in fp32 in a fixed order.

    Args:
        dy: Like x.
        x: As for ``normalize``.
        weight: As for ``normalize``.
        bias: As for ``normalize``; it matters with `act` only.
        mean: As ``normalize`` returns it.
        rstd: Like mean.
        groups: As for ``normalize``.
        wanted: Whether dx, and whether the gradients of parameters are.
        act: As for ``normalize``.

    Returns:
        None for what is not wanted.
    """
    partial = _PLANE_SUMS(dy, x, weight, bias, mean, rstd, groups, act)
    dx = _DX(dy, x, weight, bias, mean, rstd, partial, groups, act) if wanted[0] else None
    parameters = x if weight is None and bias is None else weight if weight is not None else bias
    return dx, tuple(reduce(partial, "sum", (0,), False, parameters.dtype).unbind()) if wanted[1] else None
