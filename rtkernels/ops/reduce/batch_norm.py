"""batch_norm with the statistics that aten keeps, and its gradients from them."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.reduction import reduce
from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import WIDTH
from rtkernels.runtime.operator.declared import Dense, InPlaceExact, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_PARAMETER = {"bf16": ("bf16", "fp32"), "fp16": ("fp16", "fp32"), "fp32": ("fp32",)}
_VARIANTS = [(t, w, n) for t, width in WIDTH.items() for w in _PARAMETER[t] for n in (1, width)]
_APPLY = Kernel(
    "reduce/batch_norm.cu", "batch_norm_apply", template="T W N", variants=_VARIANTS, max_registers=80, tier="aten",
    args="x:ptr means:ptr variances:ptr weight:ptr bias:ptr running_mean:ptr running_var:ptr y:ptr mean:ptr rstd:ptr "
    "vectors:i64 channels:i64 spatial:i64 eps:f64 momentum:f64 unbiased:f64",
)  # fmt: skip
_SUMS = Kernel(
    "reduce/batch_norm.cu", "channel_sums", template="T", variants=[(t,) for t in WIDTH], max_registers=64, tier="aten",
    args="dy:ptr x:ptr mean:ptr rstd:ptr partial:ptr batch:i64 channels:i64 spatial:i64 per_slice:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/batch_norm.cu", "batch_norm_bwd", template="T W N", variants=_VARIANTS, max_registers=80, tier="aten",
    args="dy:ptr x:ptr weight:ptr mean:ptr rstd:ptr sums:ptr dx:ptr vectors:i64 channels:i64 spatial:i64 over:f64",
)  # fmt: skip


def _flat(kernel: Kernel, x: Meta, parameter: Meta | None, starts: int, device: int) -> tuple[object, int]:
    """Return the bound kernel of a pass over all elements, and the count of its vectors."""
    width = 16 // x.dtype.itemsize
    n = width if starts == 0 and x.numel() % width == 0 else 1
    vectors = x.numel() // n
    grid = min(-(-vectors // _THREADS), 16 * device_info(device).sm_count)
    variant = TOKEN[x.dtype], TOKEN[(x if parameter is None else parameter).dtype], n
    return kernel.bind(variant, device, grid, _THREADS), vectors


def _plan_apply(
    x: Meta, means: Meta, variances: Meta, weight: Meta | None, bias: Meta | None, running_mean: Meta | None,
    running_var: Meta | None, keeps: bool, device: int,
) -> Steps:  # fmt: skip
    parameters = [p for p in (weight, bias, running_mean, running_var) if p is not None]
    launch, vectors = _flat(_APPLY, x, parameters[0] if parameters else None, misaligned(x), device)
    kept = ("mean", "rstd") if keeps else (0, 0)
    names = "x", "means", "variances", "weight", "bias", "running_mean", "running_var", "y", *kept
    return Steps(Step(launch, *names, vectors, x.shape[1], x.shape[2], "eps", "momentum", "unbiased"))


def _slices(x: Meta | Tensor, device: int) -> tuple[int, int, int]:
    """Return how many blocks own channels, how many slices of the batch there are, and the entries of a slice."""
    batch, channels, spatial = x.shape
    across = channels if spatial > 1 else -(-channels // 32)
    entries = max(1, 2048 // spatial) if spatial > 1 else 64
    slices = max(1, min(-(-batch // entries), 8 * device_info(device).sm_count // across, 1024))
    per_slice = -(-batch // slices)
    return across, -(-batch // per_slice), per_slice


def _plan_sums(dy: Meta, x: Meta, mean: Meta, rstd: Meta, slices: int, device: int) -> Steps:
    across, _, _ = _slices(x, device)
    launch = _SUMS.bind((TOKEN[x.dtype],), device, (across, slices), _THREADS)
    return Steps(Step(launch, "dy", "x", "mean", "rstd", "partial", *x.shape, -(-x.shape[0] // slices)))


def _plan_bwd(dy: Meta, x: Meta, weight: Meta | None, mean: Meta, rstd: Meta, sums: Meta | None, device: int) -> Steps:
    launch, vectors = _flat(_BWD, x, weight, misaligned(dy, x), device)
    names = "dy", "x", "weight", "mean", "rstd", "sums", "dx"
    return Steps(Step(launch, *names, vectors, x.shape[1], x.shape[2], "over"))


_STATISTICS = (Dense("mean", None), Dense("rstd", None))
_APPLIED = Primitive(
    "batch_norm_apply",
    (
        Dense("x", None), Dense("means", None), Dense("variances", None), Dense("weight", None, optional=True),
        Dense("bias", None, optional=True), InPlaceExact("running_mean", None, optional=True),
        InPlaceExact("running_var", None, optional=True),
    ),
    "keeps, eps, momentum, unbiased", numbers="eps momentum unbiased", results="y mean rstd", plan=_plan_apply,
    outputs=lambda x, keeps: (
        Memory(x.shape, x.dtype), *[Memory((x.shape[1] if keeps else 0,), torch.float32)] * 2,
    ),
)  # fmt: skip
_CHANNEL_SUMS = Primitive(
    "channel_sums", (Dense("dy", None), Dense("x", None), *_STATISTICS), "slices", results="partial", plan=_plan_sums,
    outputs=lambda x, slices: (Memory((slices, 2, x.shape[1]), torch.float32),),
)  # fmt: skip
_DX = Primitive(
    "batch_norm_bwd",
    (
        Dense("dy", None), Dense("x", None), Dense("weight", None, optional=True), *_STATISTICS,
        Dense("sums", None, optional=True),
    ),
    "over", numbers="over", results="dx", outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan_bwd,
)  # fmt: skip


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor | None, running_var: Tensor | None,
    training: bool, momentum: float, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Normalise each channel by the statistics of the batch, or by the running ones.

    Args:
        x: (batch, channels, spatial), bfloat16, float16 or float32; not empty.
        weight: (channels,), float32 or of x's dtype, or None.
        bias: Like weight.
        running_mean: Like weight, contiguous; overwritten if training.
        running_var: Like running_mean; gets the unbiased variance.
        training: Whether to use the statistics of the batch.
        momentum: The share of the batch in the running statistics.
        eps: Added to the variance.

    Returns:
        y, and mean and rstd, (channels,), float32; on the CPU without elements unless training, as torch's are.
    """
    if not training:
        given = x, running_mean.float(), running_var.float(), weight, bias, None, None
        return _APPLIED(*given, x.is_cuda, eps, 0.0, 0.0)
    count = x.shape[0] * x.shape[2]
    variances, means = reduce(x, "moments", (0, 2), False, torch.float32, number=count, wanted="os")
    unbiased = count / max(count - 1, 1)
    return _APPLIED(x, means, variances, weight, bias, running_mean, running_var, True, eps, momentum, unbiased)


def batch_norm_grads(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, training: bool, wanted: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Return dx, and the gradients of weight and bias as (2, channels) in fp32; sums in a fixed order.

    Args:
        dy: Like x.
        x: As for ``batch_norm``.
        weight: As for ``batch_norm``.
        mean: (channels,), float32: those that y was computed with.
        rstd: Like mean.
        training: Whether they are statistics of the batch, and depend on x.
        wanted: Whether dx, and whether the gradients of parameters are.

    Returns:
        None for what is not wanted.
    """
    sums = None
    if training or wanted[1]:
        partial = _CHANNEL_SUMS(dy, x, mean, rstd, _slices(x, x.get_device())[1])
        sums = reduce(partial, "sum", (0,), False, torch.float32)
    over = 1.0 / (x.shape[0] * x.shape[2]) if training else 0.0
    dx = _DX(dy, x, weight, mean, rstd, sums, over) if wanted[0] else None
    return dx, sums if wanted[1] else None


OP = Op("batch_norm", public=(), kernels=(_APPLY, _SUMS, _BWD), torch_ops=())
__all__ = ["OP", "batch_norm", "batch_norm_grads"]
