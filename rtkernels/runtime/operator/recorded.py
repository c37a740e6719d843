"""Refuses memory for results in calls that autograd records."""

from __future__ import annotations

from torch import Tensor

from rtkernels.errors import ArgumentError


def refuse_outputs(**outputs: Tensor | None) -> None:
    """Raise an ArgumentError that names a given output, for calls that need gradients."""
    for name, t in outputs.items():
        if t is not None:
            raise ArgumentError(
                f"{name} is given but a tensor needs gradients; expected torch.no_grad() around the call, detached "
                f"tensors, or no {name}"
            )
