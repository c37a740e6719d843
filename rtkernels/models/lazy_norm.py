"""The result of a norm that is not made unless somebody needs numbers: fp8 layers ask it for codes.

In a decoder layer the readers of a norm are projections. They share the codes, which one kernel writes from the norm's
input; normalised rows in 16 bits never exist. Everybody else gets the tensor, made at the first use. This is not a
subclass of Tensor, and it does not leave the decoder layer it was made in.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import rtkernels


class LazyNorm:
    """``rms_norm(x, weight)``, or with a residual of ``x + residual``: then codes and the sum exist from the start."""

    def __init__(self, x: Tensor, weight: Tensor | None, eps: float, offset: float, residual: Tensor | None = None):
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
        return rtkernels.rms_norm_fp8(self.x, self.weight, residual=residual, **options)

    def codes(self) -> Any:
        """Return the codes by rows (and transposed, where there may be a gradient), with scales in columns."""
        if self._codes is None:
            self._codes = self._quantized()
        return self._codes

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

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.x.dim()

    # ---- everything else is the tensor's ----

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_made" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.tensor()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __add__(self, other: Any) -> Tensor:
        return self.tensor() + other

    __radd__ = __add__

    def __mul__(self, other: Any) -> Tensor:
        return self.tensor() * other

    __rmul__ = __mul__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        return func(*_made(args), **{name: _made(value) for name, value in (kwargs or {}).items()})

    def __repr__(self) -> str:
        return f"LazyNorm(shape={tuple(self.shape)}, dtype={self.dtype})"


def _made(value: Any) -> Any:
    if isinstance(value, LazyNorm):
        return value.tensor()
    if isinstance(value, (tuple, list)):
        return type(value)(_made(v) for v in value)
    return value
