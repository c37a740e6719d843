"""Family ``ew``: torch's pointwise operators of one and two operands, by functors of
``cuda_src/pointwise/functors.cuh``. Those of three operands are in ``ternary.py``, gradients in ``gradients.py``.

An operator is one entry below: its functor, the dtypes it is for, and its forms. Functional, in-place and ``out=``
overloads, numbers for operands, the conformance test and the benchmark row follow from the entry.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import fits, rounded, run
from rtkernels.aten.functors import FLOATS, INTEGERS, NUMBERS, Functor, functor, row_adder
from rtkernels.aten.table import OPTION, NotHandled

_NEGATIVE = NotHandled("negative integer exponent")
_add_row, rows = row_adder()


# ---- unary ----------------------------------------------------------------------------------------------------------


def _unary(name: str, made: Functor, overloads: str = "default _default out", **options: Any) -> None:
    def handler(self: Tensor, *, out: Tensor | None = None) -> Any:
        return run(made, (self,), out=out)

    _add_row(name, handler, overloads, **options)


def _float(name: str, inputs: int = 1) -> Functor:
    """Return a functor that computes in floating point, integers becoming floats."""
    return functor(name, inputs, dtypes=FLOATS, promotion="float")


for _name in (
    "atan", "cos", "erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "reciprocal", "rsqrt", "sigmoid",
    "sin", "sqrt", "tanh",
):  # fmt: skip
    _unary(_name, _float(_name.capitalize()))
for _name in ("ceil", "floor", "trunc", "round"):  # of integers: copies, which torch makes
    _unary(_name, functor(_name.capitalize(), 1, dtypes=FLOATS))
_unary("abs", functor("Abs", 1, dtypes=NUMBERS))
_unary("neg", functor("Neg", 1, dtypes=NUMBERS))
_unary("relu", functor("Relu", 1, dtypes=NUMBERS), "default _default", opinfo="nn.functional.relu")
_unary("silu", functor("Silu", 1, dtypes=FLOATS), opinfo="nn.functional.silu")
_unary("bitwise_not", functor("BitwiseNot", 1, dtypes=INTEGERS | {torch.bool}))
_unary("isnan", functor("IsNan", 1, result=torch.bool), "default")
_unary("isinf", functor("IsInf", 1, result=torch.bool), "default")
_unary("isfinite", functor("IsFinite", 1, result=torch.bool), "default", composite="no gradient")
_unary("angle", _float("Angle"), "default out")
_unary("logical_not", functor("LogicalNot", 1, result=torch.bool), "default out")

_NAN_TO_NUM = functor("NanToNum", 1, dtypes=FLOATS)


def _nan_to_num(
    self: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None, *, out: Any = None
):
    if not self.is_floating_point():
        return NotHandled("integers")
    limits = torch.finfo(self.dtype)
    given = ((nan, 0.0), (posinf, limits.max), (neginf, limits.min))
    return run(_NAN_TO_NUM, (self,), [default if value is None else value for value, default in given], out=out)


_add_row("nan_to_num", _nan_to_num, "default _default out")

_GELU = {"none": functor("Gelu", 1, dtypes=FLOATS), "tanh": functor("GeluTanh", 1, dtypes=FLOATS)}


def _gelu(self: Tensor, *, approximate: str = "none", out: Any = None):
    return run(_GELU[approximate], (self,), out=out) if approximate in _GELU else OPTION


_add_row("gelu", _gelu, "default out", "nn.functional.gelu")
_add_row("gelu", _gelu, "_default", "")

_ELU = functor("Elu", 1, dtypes=FLOATS)


def _elu(self: Tensor, alpha: float = 1, scale: float = 1, input_scale: float = 1, *, out: Any = None):
    return run(_ELU, (self,), (alpha * scale, scale, input_scale), out=out)


_add_row("elu", _elu, "default _default out", "nn.functional.elu")


def _celu(self: Tensor, alpha: float = 1.0, *, out: Any = None):
    return _elu(self, alpha, 1, 1 / alpha, out=out) if alpha else OPTION


_add_row("celu", _celu, "default _default", "nn.functional.celu")

_SOFTPLUS = functor("Softplus", 1, dtypes=FLOATS)
_add_row(
    "softplus", lambda self, beta=1, threshold=20: run(_SOFTPLUS, (self,), (beta, threshold)),
    opinfo="nn.functional.softplus",
)  # fmt: skip
_THRESHOLD = functor("Threshold", 1, dtypes=NUMBERS)


def _threshold(self: Tensor, threshold: Any, value: Any, *, out: Any = None):
    if self.dtype in FLOATS:
        if not fits(threshold, self.dtype):
            return OPTION  # torch raises
        threshold = rounded(threshold, self.dtype)  # with which elements are compared
    return run(_THRESHOLD, (self,), (threshold, value), out=out)


_add_row("threshold", _threshold, "default _default", "nn.functional.threshold")
_LOG_SIGMOID = functor("LogSigmoid", 1, dtypes=FLOATS)


def _log_sigmoid_forward(self: Tensor):
    if self.is_cpu and not self.is_contiguous():
        return OPTION  # torch's CPU kernel makes a dense result of it, that for CUDA keeps strides
    result = run(_LOG_SIGMOID, (self,))
    if type(result) is NotHandled:
        return result
    # The second result is for torch's backward on the CPU; on CUDA it is empty.
    return result, self.abs().neg().exp() if self.is_cpu else self.new_empty(0)


_add_row("log_sigmoid_forward", _log_sigmoid_forward, opinfo="nn.functional.logsigmoid")

# ---- two operands ---------------------------------------------------------------------------------------------------


def _binary(name: str, made: Functor, overloads: str, passes: tuple[str, ...] = ("self", "other")) -> None:
    def handler(self: Any, other: Any, *, out: Tensor | None = None) -> Any:
        return run(made, (self, other), out=out)

    _add_row(name, handler, overloads, passes=passes)


_INTS = INTEGERS | {torch.bool}
COMPARISONS = {
    name: functor(name.capitalize(), 2, result=torch.bool, rounds_numbers=True)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
}
for _name, _compare in COMPARISONS.items():
    _binary(_name, _compare, "Tensor Scalar Tensor_out Scalar_out")
for _name in ("logical_and", "logical_or", "logical_xor"):
    _camel = _name.title().replace("_", "")
    _binary(_name, functor(_camel, 2, result=torch.bool), "default out", passes=())
for _name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
    _camel = _name.title().replace("_", "")
    _binary(
        _name, functor(_camel, 2, dtypes=_INTS),
        "Tensor Scalar Scalar_Tensor _Tensor _Scalar Tensor_out Scalar_out",
    )  # fmt: skip
for _name, _camel in (("bitwise_left_shift", "ShiftLeft"), ("bitwise_right_shift", "ShiftRight")):
    _binary(
        _name, functor(_camel, 2, dtypes=INTEGERS),
        "Tensor Tensor_Scalar Scalar_Tensor _Tensor _Tensor_Scalar Tensor_out",
    )  # fmt: skip
MAXIMUM = functor("Maximum", 2, rounds_numbers=True, numbers_count=False)  # those of clamp
MINIMUM = functor("Minimum", 2, rounds_numbers=True, numbers_count=False)
_binary("maximum", MAXIMUM, "default out", passes=())
_binary("minimum", MINIMUM, "default out", passes=())
_REMAINDER = functor("Remainder", 2, dtypes=NUMBERS, rounds_numbers=True)
_binary("remainder", _REMAINDER, "Tensor Scalar Scalar_Tensor _Tensor _Scalar Tensor_out Scalar_out")
_binary(
    "fmod",
    functor("Fmod", 2, dtypes=NUMBERS, rounds_numbers=True),
    "Tensor Scalar _Tensor _Scalar Tensor_out Scalar_out",
)

_MUL = functor("Mul", 2)
_binary("mul", _MUL, "Tensor Scalar _Tensor _Scalar out")
_ADD, _SUB = functor("Add", 2), functor("Sub", 2, dtypes=NUMBERS)


def _sums(name: str, made: Functor) -> None:
    def handler(self: Any, other: Any, alpha: Any = 1, *, out: Any = None) -> Any:
        if not _alpha(alpha, self, other) or (made is _SUB and (_is_bool(self) or _is_bool(other))):
            return OPTION
        return run(made, (self, other), (alpha,), out=out)

    _add_row(name, handler, "Tensor Scalar _Tensor _Scalar out", passes=("self", "other", "alpha"))


def _is_bool(operand: Any) -> bool:
    """Return True for what torch does not subtract."""
    return operand.dtype == torch.bool if isinstance(operand, Tensor) else isinstance(operand, bool)


def _alpha(alpha: Any, *operands: Any) -> bool:
    """Return True unless torch would refuse alpha: a float for integers, a bool for others than bool."""
    if type(alpha) is int:
        return True
    if type(alpha) is float:
        return any(isinstance(o, float) or (isinstance(o, Tensor) and o.is_floating_point()) for o in operands)
    return False


_sums("add", _ADD)
_sums("sub", _SUB)


def _rsub(self: Tensor, other: Any, alpha: Any = 1) -> Any:
    if _is_bool(self) or _is_bool(other) or not _alpha(alpha, self, other):
        return OPTION
    return run(_SUB, (other, self), (alpha,))


_add_row("rsub", _rsub, "Scalar Tensor", passes=("other", "alpha"))

_DIV = {
    None: functor("Div", 2, dtypes=FLOATS, promotion="float", by_number="Mul", reciprocal=True),
    "floor": functor("DivFloor", 2, dtypes=NUMBERS, by_number="DivFloorBy"),
    "trunc": functor("DivTrunc", 2, dtypes=NUMBERS, by_number="MulTrunc", reciprocal=True),
}
for _name in ("DivFloorBy", "MulTrunc"):
    functor(_name, 2, dtypes=FLOATS)


def _div_mode(self: Any, other: Any, *, rounding_mode: str | None, out: Any = None) -> Any:
    if rounding_mode not in _DIV:
        return OPTION
    return run(_DIV[rounding_mode], (self, other), out=out)


_binary("div", _DIV[None], "Tensor Scalar _Tensor _Scalar out")
_add_row("div", _div_mode, "Tensor_mode _Tensor_mode Scalar_mode _Scalar_mode out_mode")
_binary("floor_divide", _DIV["floor"], "default out _Tensor", passes=())

_POW = functor("Pow", 2, dtypes=NUMBERS, rounds_numbers=True)
_POW_NUMBER = functor("PowNumber", 1, dtypes=FLOATS)
_POWERS = {
    2: functor("Square", 1, dtypes=NUMBERS), 3: functor("Cube", 1, dtypes=NUMBERS),
    -2: functor("InverseSquare", 1, dtypes=FLOATS),
}  # fmt: skip
_ROOTS = {0.5: _float("Sqrt"), -1: _float("Reciprocal"), -0.5: _float("Rsqrt")}


def _pow_number(self: Tensor, exponent: Any, *, out: Any = None) -> Any:
    if type(exponent) not in (int, float) or not exponent:
        return OPTION
    if not self.is_floating_point():
        if type(exponent) is int and exponent in (2, 3):
            return run(_POWERS[exponent], (self,), out=out)
        if type(exponent) is float:
            return NotHandled("integers to a float")
        return run(_POW, (self, exponent), out=out) if exponent > 0 else _NEGATIVE
    if exponent not in _ROOTS and self.dtype in FLOATS:
        if not fits(exponent, self.dtype):
            return OPTION  # torch raises
        exponent = rounded(exponent, self.dtype)  # as torch does, but for these
    made = _ROOTS.get(exponent) or _POWERS.get(exponent)
    return run(_POW_NUMBER, (self,), (exponent,), out=out) if made is None else run(made, (self,), out=out)


def _pow(self: Any, exponent: Any, *, out: Any = None) -> Any:
    if type(self) is int and exponent.dtype in INTEGERS:
        low, high = torch.iinfo(exponent.dtype).min, torch.iinfo(exponent.dtype).max
        self = (self - low) % (high - low + 1) + low  # as torch converts it
    return run(_POW, (self, exponent), out=out)


_add_row("pow", _pow_number, "Tensor_Scalar _Scalar Tensor_Scalar_out")
_add_row("pow", _pow, "Tensor_Tensor Scalar _Tensor Tensor_Tensor_out")

_IS_CLOSE = functor("IsClose", 2, dtypes=FLOATS, result=torch.bool)


def _isclose(self: Tensor, other: Tensor, rtol: float = 1e-05, atol: float = 1e-08, equal_nan: bool = False) -> Any:
    if self.dtype != other.dtype or rtol < 0 or atol < 0:
        return OPTION
    if self.dim() == 0 or other.dim() == 0:
        return NotHandled("0-d")  # whose dtype counts less in torch's chain of ops
    return run(_IS_CLOSE, (self, other), (rtol, atol, equal_nan))


_add_row("isclose", _isclose, composite="no gradient")

_POLAR = functor("Polar", 2, dtypes=frozenset((torch.float32,)), result=torch.int64)


def _polar(abs: Tensor, angle: Tensor, *, out: Tensor | None = None) -> Any:
    """Write both parts of a complex64 as one element of 8 bytes."""
    if abs.dtype != torch.float32 or angle.dtype != torch.float32 or (out is not None and out.dtype != torch.complex64):
        return OPTION
    result = run(_POLAR, (abs, angle), out=None if out is None else out.view(torch.int64))
    return result if type(result) is NotHandled else result.view(torch.complex64) if out is None else out


_add_row("polar", _polar, "default out", replays=False)  # the result is a view
