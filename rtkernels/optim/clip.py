"""Clipping gradients by their norm."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from rtkernels.ops.multi.multi_tensor import clip_norm_, multi_norm


def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    *,
    group: Any = None,
) -> Tensor:
    """Scale the gradients of all parameters so that their norm together is at most `max_norm`.

    As ``torch.nn.utils.clip_grad_norm_``, in three launches and without waiting for the device. Where nothing has to be
    clipped the gradients are not written.

    Args:
        parameters: Their ``.grad`` are changed in place (parameters without one are left out): bfloat16, float16 and
            float32, mixed as they come, on one device, contiguous or permutations of contiguous tensors.
        max_norm: At least 0.
        norm_type: 2, 1 or ``math.inf``.
        error_if_nonfinite: Raise before anything is changed if the norm is NaN or infinite. Waits for the device.
        group: A process group over which gradients are sharded: the norm is that over all its members.

    Returns:
        The norm before clipping, 0-d fp32.

    Raises:
        ArgumentError: The gradients cannot be walked together, or `max_norm` or `norm_type` is none of these.
        RuntimeError: The norm is not finite and `error_if_nonfinite` is set.
    """
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    grads = [p.grad for p in parameters if p.grad is not None]
    if error_if_nonfinite:
        norm = multi_norm(grads, norm_type, group=group)
        if not torch.isfinite(norm):
            raise RuntimeError(
                f"the norm of order {norm_type} of the gradients is {float(norm)}; pass error_if_nonfinite=False to "
                "scale by it anyway"
            )
    return clip_norm_(grads, max_norm, norm_type, group)
