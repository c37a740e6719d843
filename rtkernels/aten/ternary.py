"""Family ``ew``: pointwise operators of three operands, and fills; see ``pointwise.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from rtkernels.aten.elementwise import copy_into, fits, meta_of, output_strides, rounded, run
from rtkernels.aten.functors import FILL, FLOATS, NUMBERS, Functor, functor, row_adder
from rtkernels.aten.pointwise import MAXIMUM, MINIMUM
from rtkernels.aten.table import OPTION, NotHandled
from rtkernels.runtime.launch.memory import dense_strides

_add_row, rows = row_adder()
_BOOL = NotHandled("bool")
_CLAMP = functor("Clamp", 3, dtypes=NUMBERS, numbers_count=False)


def _is_bound(limit: Any, dtype: torch.dtype) -> bool:
    """Return False for NaN, which torch ignores in `clamp` and not in `clamp_min`, and for what it cannot convert."""
    if isinstance(limit, Tensor) or limit is None:
        return True
    return limit == limit and fits(limit, dtype if dtype in FLOATS else torch.float32)


def _clamp(self: Tensor, min: Any = None, max: Any = None, *, out: Any = None) -> Any:
    if isinstance(min, bool) or isinstance(max, bool):
        return _BOOL
    if min is None and max is None:
        return OPTION
    if not all(_is_bound(limit, self.dtype) for limit in (min, max)):
        return OPTION
    if max is None:
        return run(MAXIMUM, (self, min), out=out)
    if min is None:
        return run(MINIMUM, (self, max), out=out)
    return run(_CLAMP, (self, min, max), out=out)


_FORMS = "default _default Tensor _Tensor"
_add_row("clamp", _clamp, f"{_FORMS} out Tensor_out")
_add_row("clamp_min", lambda self, min, *, out=None: _clamp(self, min, out=out), _FORMS)
_add_row("clamp_max", lambda self, max, *, out=None: _clamp(self, None, max, out=out), _FORMS)

_LERP = functor("Lerp", 3, dtypes=FLOATS)
_LERP_NUMBER = functor("LerpNumber", 2, dtypes=FLOATS)


def _lerp(self: Tensor, end: Tensor, weight: Any, *, out: Any = None) -> Any:
    if self.dtype != end.dtype or (isinstance(weight, Tensor) and weight.dtype != self.dtype):
        return OPTION
    if isinstance(weight, Tensor):
        return run(_LERP, (self, end, weight), out=out)
    return run(_LERP_NUMBER, (self, end), (weight,), out=out) if type(weight) in (int, float) else OPTION


_add_row("lerp", _lerp, "Tensor _Tensor Tensor_out Scalar _Scalar Scalar_out", passes=("weight",))


def _addc(name: str, made: Functor) -> None:
    def handler(self: Tensor, tensor1: Tensor, tensor2: Tensor, *, value: Any = 1, out: Any = None) -> Any:
        if type(value) not in (int, float):
            return OPTION
        return run(made, (self, tensor1, tensor2), (value,), out=out)

    _add_row(name, handler, "default _default out", passes=("value",))


_addc("addcmul", functor("Addcmul", 3, dtypes=NUMBERS))
_addc("addcdiv", functor("Addcdiv", 3, dtypes=FLOATS))
_ADDR = functor("Addr", 3, dtypes=NUMBERS)


def _addr(self: Tensor, vec1: Tensor, vec2: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if vec1.dim() != 1 or vec2.dim() != 1 or type(beta) is bool or type(alpha) is bool:
        return OPTION
    if self.dim() > 2 or any(
        size not in (1, of) for size, of in zip(self.shape[::-1], (len(vec2), len(vec1)), strict=False)
    ):
        return OPTION
    if self.dtype == vec1.dtype == vec2.dtype and self.dtype in FLOATS:
        if not fits(beta, self.dtype) or not fits(alpha, self.dtype):
            return OPTION  # torch raises
        beta, alpha = rounded(beta, self.dtype), rounded(alpha, self.dtype)
    return run(_ADDR, (self, vec1[:, None], vec2), (beta, alpha))


_add_row("addr", _addr)
_WHERE = functor("Where", 3, own=1)
_MASKED_FILL = functor("MaskedFill", 3, own=2, promotion="first")


def _where(condition: Tensor, self: Tensor, other: Tensor, *, out: Any = None) -> Any:
    if condition.dtype != torch.bool:
        return NotHandled("condition that is not bool")
    return run(_WHERE, (condition, self, other), out=out)


_add_row("where", _where, "self self_out")


def _masked_fill(self: Tensor, mask: Tensor, value: Any, *, out: Any = None) -> Any:
    if mask.dtype != torch.bool or type(value) is complex:
        return OPTION
    if isinstance(value, Tensor):
        if value.dim() or not torch.can_cast(value.dtype, self.dtype):
            return OPTION
    elif isinstance(value, float) and not self.is_floating_point():
        return OPTION
    elif self.is_floating_point() and not fits(value, self.dtype):
        return OPTION  # torch raises
    elif self.dtype == torch.bool:
        value = bool(value)
    if out is None:
        try:
            shape = tuple(torch.broadcast_shapes(self.shape, mask.shape))
        except RuntimeError:
            return OPTION
        dense = output_strides(shape, [meta_of(self)]) if _masked_fill_keeps_strides() else dense_strides(shape)
        out = self.new_empty_strided(shape, dense)
    return run(_MASKED_FILL, (self, mask, value), out=out)


@cache
def _masked_fill_keeps_strides() -> bool:
    """Return whether this torch keeps strides of self (those of the mask never count): one function on all devices."""
    with _disable_current_modes():  # no part of the call that asks first
        x = torch.ones(2, 3, dtype=torch.float32, device="cpu").t()
        return torch.masked_fill(x, x > 0, 0.0).stride() == x.stride()


_add_row("masked_fill", _masked_fill, "Scalar _Scalar Tensor _Tensor")


def _fill(self: Tensor, value: Any, *, out: Tensor | None = None) -> Any:
    to = torch.empty_like(self) if out is None else out
    if isinstance(value, Tensor):
        return copy_into(to, value) if value.dim() == 0 and value.device == self.device else OPTION
    if type(value) is complex or (isinstance(value, float) and not self.is_floating_point()):
        return OPTION
    if self.dtype == torch.bool:
        value = bool(value)
    return run(FILL, (), (value,), out=to, common=self.dtype)


_add_row("fill", _fill, "Scalar _Scalar Tensor _Tensor", passes=("value",))
