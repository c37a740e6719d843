"""``RMSNorm`` and ``LayerNorm``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.layer_norm import layer_norm
from rtkernels.ops.norm.rms_norm import rms_norm
from rtkernels.runtime.operator.sharding import register_rules

_FP32_EPS = torch.finfo(torch.float32).eps


class RMSNorm(torch.nn.RMSNorm):
    """Normalisation by the root mean square; replaces ``torch.nn.RMSNorm`` with the same arguments and state dict.

    Input and result are ``[..., *normalized_shape]`` in bfloat16, float16 or float32; the weight may have any of these
    dtypes. Computed in fp32 and rounded once, also inside ``torch.autocast``.

    Args:
        normalized_shape: The last dimensions of the input, normalised together; an int for one dimension.
        eps: Added to the mean square. Default: the machine epsilon of float32, the dtype of the computation.
        elementwise_affine: Whether the module has a weight.
        device: Device of the weight.
        dtype: Dtype of the weight.
        offset: Added to the weight, which is initialised to ``1 - offset``; 1.0 for models that store ``weight - 1``.
    """

    offset: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        self.offset = offset  # set before the base class initialises the parameters
        super().__init__(normalized_shape, eps, elementwise_affine, device, dtype)
        register_rules()  # compiled calls cannot do this later

    def reset_parameters(self) -> None:
        """Set the weight to ``1 - offset``, so that the module only normalises."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.offset)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normalised x; with a residual, the normalised ``x + residual`` and the sum."""
        eps = _FP32_EPS if self.eps is None else self.eps
        return _normalised(rms_norm, self.normalized_shape, x, residual, (self.weight,), eps, self.offset)

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


class LayerNorm(torch.nn.LayerNorm):
    """Normalisation to mean 0 and variance 1; replaces ``torch.nn.LayerNorm`` with the same arguments and state dict.

    Input and result are ``[..., *normalized_shape]`` in bfloat16, float16 or float32; the parameters may have any of
    these dtypes. Computed in fp32 and rounded once, also inside ``torch.autocast``.

    Args:
        normalized_shape: The last dimensions of the input, normalised together; an int for one dimension.
        eps: Added to the variance.
        elementwise_affine: Whether the module has a weight.
        bias: Whether the module has a bias, if it has a weight.
        device: Device of the parameters.
        dtype: Dtype of the parameters.
        offset: Added to the weight, which is initialised to ``1 - offset``; 1.0 for models that store ``weight - 1``.
    """

    offset: float

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        offset: float = 0.0,
    ) -> None:
        self.offset = offset
        super().__init__(normalized_shape, eps, elementwise_affine, bias, device, dtype)
        register_rules()

    def reset_parameters(self) -> None:
        """Set the weight to ``1 - offset`` and the bias to 0, so that the module only normalises."""
        if self.elementwise_affine:
            torch.nn.init.constant_(self.weight, 1 - self.offset)
            if self.bias is not None:
                torch.nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the normalised x; with a residual, the normalised ``x + residual`` and the sum."""
        parameters = (self.weight, self.bias)
        return _normalised(layer_norm, self.normalized_shape, x, residual, parameters, self.eps, self.offset)

    def extra_repr(self) -> str:
        """Return the arguments of the module as text."""
        return super().extra_repr() + (f", offset={self.offset}" if self.offset else "")


def _normalised(
    op: Callable[..., Any],
    shape: tuple[int, ...],
    x: Tensor,
    residual: Tensor | None,
    parameters: tuple[Tensor | None, ...],
    eps: float,
    offset: float,
) -> Any:
    """Call an op that normalises the last dimension on the module's last dimensions."""
    if x.shape[-len(shape) :] != shape:
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected the last dimensions to be {shape}")
    given = [p for p in parameters if p is not None]
    if any(p.dtype not in (x.dtype, torch.float32) or p.dtype != given[0].dtype for p in given):
        # The ops take x's dtype or float32, and float32 represents every value of the other dtypes.
        parameters = tuple(p if p is None else p.float() for p in parameters)
    if len(shape) == 1:
        return op(x, *parameters, eps=eps, offset=offset, residual=residual)
    flat = [t if t is None else t.flatten(-len(shape)) for t in (x, residual, *parameters)]
    result = op(flat[0], *flat[2:], eps=eps, offset=offset, residual=flat[1])
    if residual is None:
        return result.view(x.shape)
    return tuple(t.view(x.shape) for t in result)
