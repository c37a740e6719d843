"""The negative log-likelihood of target classes, and its gradient, as aten has them."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN, power_of_two
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, TYPES, divisor
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_PLACES = 4096  # of a block
_FWD = Kernel(
    "reduce/nll_loss.cu", "nll_forward", template="T", variants=TYPES, max_registers=64, tier="aten",
    args="x:ptr targets:ptr weight:ptr out:ptr total:ptr partial:ptr count:i64 spatial:i64 batch_stride:i64 "
    "class_stride:i64 spatial_stride:i64 classes:i64 ignore_index:i64 reduction:i64",
)  # fmt: skip
_FINISH = Kernel(
    "reduce/nll_loss.cu", "nll_finish", template="T", variants=TYPES, max_registers=40, tier="aten",
    args="partial:ptr out:ptr total:ptr blocks:i64 reduction:i64",
)  # fmt: skip
_BWD = Kernel(
    "reduce/nll_loss.cu", "nll_backward", template="T", variants=TYPES, max_registers=40, tier="aten",
    args="dy:ptr targets:ptr weight:ptr total:ptr dx:ptr count:i64 classes:i64 class_divider:i64 ignore_index:i64 "
    "reduction:i64",
)  # fmt: skip
_BWD_PLACES = Kernel(
    "reduce/nll_loss.cu", "nll_backward_places", template="T", variants=TYPES, max_registers=80, tier="aten",
    args="dy:ptr targets:ptr weight:ptr total:ptr dx:ptr classes:i64 spatial:i64 ignore_index:i64 reduction:i64 "
    "across:i64 place_tiles:i64 class_tiles:i64 vectors:i64",
)  # fmt: skip
_CLASSES = 8  # kClasses of cuda_src/reduce/nll_loss.cu


def _plan_fwd(x: Meta, targets: Meta, weight: Meta | None, ignore_index: int, reduction: int, device: int) -> Steps:
    batch, classes, spatial = x.shape
    count, types = batch * spatial, (TOKEN[x.dtype],)
    blocks = -(-count // (_THREADS if reduction == 0 else _PLACES))
    blocks = min(blocks, (32 if reduction == 0 else 4) * device_info(device).sm_count)
    launch = _FWD.bind(types, device, blocks, _THREADS)
    several = reduction != 0 and blocks > 1
    numbers = count, spatial, *x.stride, classes, ignore_index, reduction
    first = Step(launch, "x", "targets", "weight", "out", "total", "partial" if several else 0, *numbers)
    if not several:
        return Steps(first)
    last = _FINISH.bind(types, device, 1, _THREADS)
    return Steps(
        first, Step(last, "partial", "out", "total", blocks, reduction),
        scratch={"partial": Memory((2 * blocks,), torch.float32)},
    )  # fmt: skip


def _plan_bwd(
    dy: Meta, targets: Meta, weight: Meta | None, total: Meta, classes: int, spatial: int, ignore_index: int,
    reduction: int, device: int,
) -> Steps:  # fmt: skip
    count, vector = targets.numel() * classes, 16 // dy.dtype.itemsize
    tensors, types = ("dy", "targets", "weight", "total", "dx"), (TOKEN[dy.dtype],)
    if spatial == 1 and classes % vector == 0:
        grid = -(-count // (_THREADS * vector))
        numbers = count, classes, divisor(classes) if count < 2**31 else 0, ignore_index, reduction
        kernel = _BWD
    else:
        vectors = spatial % vector == 0
        places = spatial // vector if vectors else spatial
        across = min(power_of_two(places), _THREADS)
        place_tiles, class_tiles = -(-places // across), -(-classes // (_THREADS // across * _CLASSES))
        grid = targets.numel() // spatial * place_tiles * class_tiles
        numbers = classes, spatial, ignore_index, reduction, across, place_tiles, class_tiles, int(vectors)
        kernel = _BWD_PLACES
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    return Steps(Step(kernel.bind(types, device, grid, _THREADS), *tensors, *numbers))


_FORWARD = Primitive(
    "nll_forward", (Argument("x", None), Dense("targets", None), Dense("weight", None, optional=True)),
    "ignore_index, reduction", results="out total", plan=_plan_fwd,
    outputs=lambda x, targets, reduction: (
        Memory(targets.shape if reduction == 0 else (), x.dtype), Memory((), x.dtype),
    ),
)  # fmt: skip
_BACKWARD = Primitive(
    "nll_backward",
    (Dense("dy", None), Dense("targets", None), Dense("weight", None, optional=True), Dense("total", None)),
    "classes, spatial, ignore_index, reduction", results="dx", plan=_plan_bwd,
    outputs=lambda dy, targets, classes, spatial: (
        Memory((targets.numel() // spatial, classes, spatial), dy.dtype),
    ),
)  # fmt: skip


def nll_loss(
    x: Tensor, targets: Tensor, weight: Tensor | None, ignore_index: int, reduction: int
) -> tuple[Tensor, Tensor]:
    """Return ``-weight[t] * x[t]`` for the target class t of each place, or their sum or weighted mean.

    Args:
        x: (batch, classes, spatial), bfloat16, float16 or float32; any strides; not empty.
        targets: int64, one for each batch entry and spatial place, in that order; its shape is the losses'.
        weight: (classes,), of x's dtype; None: 1.
        ignore_index: A target that counts as nothing.
        reduction: 0: none, 1: the mean, 2: the sum.

    Returns:
        The loss, and the weights that count (0 without a reduction), no dimensions: of x's dtype.
    """
    return _FORWARD(x, targets, weight, ignore_index, reduction)


def nll_loss_grad(
    dy: Tensor, targets: Tensor, weight: Tensor | None, total: Tensor, classes: int, spatial: int, ignore_index: int,
    reduction: int,
) -> Tensor:  # fmt: skip
    """Return the gradient of x.

    Args:
        dy: One for each target, or without dimensions.
        targets: As for ``nll_loss``.
        weight: As for ``nll_loss``.
        total: What the forward returned.
        classes: Of x.
        spatial: Of x.
        ignore_index: As for ``nll_loss``.
        reduction: As for ``nll_loss``.

    Returns:
        (batch, classes, spatial), dense, of dy's dtype.
    """
    return _BACKWARD(dy, targets, weight, total, classes, spatial, ignore_index, reduction)


OP = Op("nll_loss", public=(), kernels=(_FWD, _FINISH, _BWD, _BWD_PLACES), torch_ops=())
__all__ = ["OP", "nll_loss", "nll_loss_grad"]
