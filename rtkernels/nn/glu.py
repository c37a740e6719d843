"""Gated activations of MLPs."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu import glu

_GELUS = {"none": "gelu_erf", "tanh": "gelu_tanh"}


class SwiGLU(torch.nn.Module):
    """``silu(gate) * up``, without parameters.

    ``swiglu(x)`` takes gate and up side by side in the last dimension, ``[..., 2 * d]``, as one projection returns
    them. ``swiglu(gate, up)`` takes two tensors ``[..., d]``. Inputs are bfloat16, float16 or float32. The result is
    computed in fp32, rounded once, and has the input's dtype, also inside ``torch.autocast``.
    """

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """Return ``silu(gate) * up``, ``[..., d]``."""
        return glu(x, up, act="silu")


class GeGLU(torch.nn.Module):
    """``gelu(gate) * up``, without parameters; inputs as in ``SwiGLU``.

    Args:
        approximate: ``"none"`` for the exact GELU, ``"tanh"`` for its approximation, as in ``torch.nn.GELU``.
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        if approximate not in _GELUS:
            raise ArgumentError(f"approximate is {approximate!r}; expected one of {', '.join(_GELUS)}")
        self.approximate = approximate

    def forward(self, x: Tensor, up: Tensor | None = None) -> Tensor:
        """Return ``gelu(gate) * up``, ``[..., d]``."""
        return glu(x, up, act=_GELUS[self.approximate])

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return f"approximate={self.approximate!r}"
