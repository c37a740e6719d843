"""Limiting every element of many tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.multi_tensor import Tensors, _listed, _overwritten
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.tables import Tables
from rtkernels.runtime.layout import overlaps_itself
from rtkernels.runtime.operator.aliasing import refuse_shared_lists
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.torch_private import is_dynamo_compiling, refuse_lazy


@public(recent=False, options={"limit": Within("float", "limit >= 0", "a number of at least 0")})
def multi_clip_(tensors: Tensors, limit: float) -> None:
    """Clamp every element of all tensors to ``-limit .. limit``, in place; NaN stays NaN.

    To limit the norm, use ``multi_clip_norm_``. Not differentiable: tensors that require grad are refused unless under
    ``torch.no_grad()``. Uses torch's kernels, with one launch for many tensors.

    Args:
        tensors: As for ``multi_norm``; no two of them may overlap.
        limit: Largest magnitude, at least 0.

    Returns:
        Nothing.
    """
    tensors = list(_overwritten("multi_clip_", _listed(tensors)))
    if not tensors:
        return
    if not is_dynamo_compiling():  # which knows neither addresses nor the order of strides
        _check_memory(tensors)
    torch._foreach_clamp_min_(tensors, -float(limit))  # none requires a gradient, or autograd is off
    torch._foreach_clamp_max_(tensors, float(limit))


def _check_memory(tensors: list[torch.Tensor]) -> None:
    """Raise an ArgumentError for tensors that share memory, unless this list was checked before."""
    if not getattr(tensors[0], "is_cuda", False):
        _check_lists((tensors,))
        return
    try:
        _CHECKED.find((tensors,))
    except (AttributeError, RuntimeError, TypeError):  # no tensor, or one without memory: torch says what is wrong
        _check_lists((tensors,))


def _check_lists(lists: Sequence[Sequence[torch.Tensor]]) -> None:
    (tensors,) = lists
    refuse_shared_lists([("tensors", tensors, True)])
    for i, t in enumerate(tensors):
        if t.is_neg() or t.is_conj():  # torch would refuse it, in words of its dispatcher
            refuse_lazy(f"tensors[{i}]", t)
        if not t.is_contiguous() and t.numel() and overlaps_itself(t.shape, t.stride()):
            raise ArgumentError(f"tensors[{i}] has strides {t.stride()}; expected memory of its own for every element")


_CHECKED = Tables(lambda lists, device: True, _check_lists)  # by addresses and layouts
