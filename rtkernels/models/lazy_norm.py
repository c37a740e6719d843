"""The result of a norm that is not made unless somebody needs numbers: fp8 layers ask it for codes.

In a decoder layer the readers of a norm are projections. They share the codes, which one kernel writes from the norm's
input; normalised rows in 16 bits never exist. Everybody else gets the tensor, made at the first use. It does not leave
the decoder layer it was made in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rtkernels
from rtkernels.models.fp8_mlp import Norm
from rtkernels.models.lazy import Lazy


class LazyNorm(Lazy):
    """``rms_norm(x, weight)``, or with a residual of ``x + residual``: then codes and the sum exist from the start.

    With `stands_for`, codes give their gradient to that tensor, and x gets it from there.
    """

    def __init__(
        self, x: Tensor, weight: Tensor | None, eps: float, offset: float, residual: Tensor | None = None,
        stands_for: Tensor | None = None,
    ) -> None:  # fmt: skip
        self._stands_for = stands_for
        self.x, self.weight, self.options = x, weight, {"eps": eps, "offset": offset}
        self._codes: Any = None
        self._made: Tensor | None = None
        self.sum = None
        if residual is not None:
            self._codes = self._quantized(residual)
            self.x = self.sum = self._codes.sum

    def _quantized(self, residual: Tensor | None = None) -> Any:
        layout = "both" if torch.is_grad_enabled() else "row"
        options = {**self.options, "layout": layout, "scale_layout": "column"}
        if self._stands_for is not None:
            made = rtkernels.rms_norm_fp8(self.x.detach(), self.weight.detach(), **options)
            return made._replace(y=self._stands_for)
        return rtkernels.rms_norm_fp8(self.x, self.weight, residual=residual, **options)

    def codes(self) -> Any:
        """Return the codes by rows (and transposed, where there may be a gradient), with scales in columns."""
        if self._codes is None:
            self._codes = self._quantized()
        return self._codes

    def source(self) -> Norm | None:
        """Return what codes can be made from anew."""
        return None if self.weight is None else Norm(self.x.detach(), self.weight.detach(), **self.options)

    def tensor(self) -> Tensor:
        """Return the normalised rows."""
        if self._made is None:
            self._made = rtkernels.rms_norm(self.x, self.weight, **self.options)
        return self._made

    @property
    def shape(self) -> torch.Size:
        return self.x.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.x.dtype

    @property
    def device(self) -> torch.device:
        return self.x.device

    def __repr__(self) -> str:
        return f"LazyNorm(shape={tuple(self.shape)}, dtype={self.dtype})"
