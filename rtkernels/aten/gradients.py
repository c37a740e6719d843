"""Family ``ew``: gradients of pointwise operators; see ``pointwise.py``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import fits, rounded, run
from rtkernels.aten.functors import FLOATS, NUMBERS, TOKENS, Functor, functor, row_adder
from rtkernels.aten.table import OPTION, OUT_OF_RANGE, NotHandled
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import divisor
from rtkernels.runtime.operator.declared import Argument, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_add_row, rows = row_adder()


def _gradient(name: str, made: Functor, opinfo: str) -> None:
    def handler(grad_output: Tensor, other: Tensor) -> Any:
        return run(made, (grad_output, other))

    _add_row(name, handler, opinfo=opinfo)


_gradient("sigmoid_backward", functor("SigmoidBackward", 2, dtypes=FLOATS), "sigmoid")
_gradient("tanh_backward", functor("TanhBackward", 2, dtypes=FLOATS), "tanh")
_gradient("silu_backward", functor("SiluBackward", 2, dtypes=FLOATS), "nn.functional.silu")
_GELU_BACKWARD = {
    "none": functor("GeluBackward", 2, dtypes=FLOATS),
    "tanh": functor("GeluTanhBackward", 2, dtypes=FLOATS),
}
_add_row(
    "gelu_backward",
    lambda grad_output, self, *, approximate="none": run(_GELU_BACKWARD[approximate], (grad_output, self)),
    opinfo="nn.functional.gelu",
)
_ELU_BACKWARD = {
    False: functor("EluBackward", 2, dtypes=FLOATS),
    True: functor("EluBackwardResult", 2, dtypes=FLOATS),
}


def _elu_backward(grad_output, alpha, scale, input_scale, is_result, self_or_result):
    if is_result and alpha < 0:
        return OPTION
    scalars = (alpha * scale, scale, input_scale)
    return run(_ELU_BACKWARD[bool(is_result)], (grad_output, self_or_result), scalars)


_add_row("elu_backward", _elu_backward, opinfo="nn.functional.elu")
_SOFTPLUS_BACKWARD = functor("SoftplusBackward", 2, dtypes=FLOATS)
_add_row(
    "softplus_backward",
    lambda grad_output, self, beta, threshold: run(_SOFTPLUS_BACKWARD, (grad_output, self), (beta, threshold)),
    opinfo="nn.functional.softplus",
)
_THRESHOLD_BACKWARD = functor("ThresholdBackward", 2, dtypes=NUMBERS)


def _threshold_backward(grad_output: Tensor, self: Tensor, threshold: Any) -> Any:
    if self.dtype in FLOATS:
        if not fits(threshold, self.dtype):
            return OUT_OF_RANGE  # torch raises
        threshold = rounded(threshold, self.dtype)
    return run(_THRESHOLD_BACKWARD, (grad_output, self), (threshold,))


_add_row("threshold_backward", _threshold_backward, opinfo="nn.functional.relu")
_LOG_SIGMOID_BACKWARD = functor("LogSigmoidBackward", 2, dtypes=FLOATS)
_add_row(
    "log_sigmoid_backward", lambda grad_output, self, buffer: run(_LOG_SIGMOID_BACKWARD, (grad_output, self)),
    opinfo="nn.functional.logsigmoid",
)  # fmt: skip
_GLU = functor("Glu", 2, dtypes=FLOATS)
_GLU_BACKWARD = Kernel(
    "pointwise/glu_backward.cu", "glu_backward", template="T", tier="aten", max_registers=64,
    args="dy:ptr x:ptr dx:ptr count:i64 inner:i64 divider:i64",
    variants=[(TOKENS[dtype],) for dtype in sorted(FLOATS, key=str)],
)  # fmt: skip


def _plan_glu_backward(dy: Meta, x: Meta, inner: int, device: int) -> Steps:
    vector = 16 // x.dtype.itemsize
    count, inner = dy.numel() // vector, inner // vector
    launch = _GLU_BACKWARD.bind((TOKENS[x.dtype],), device, -(-count // 512), 256)
    return Steps(Step(launch, "dy", "x", "dx", count, inner, divisor(inner) if count < 2**31 else 0))


_GLU_GRADIENT = Primitive(
    "glu_backward", (Argument("dy", None), Argument("x", None)), "inner", results="dx", plan=_plan_glu_backward,
    outputs=lambda dy, x, inner: (Memory(x.shape, x.dtype),),
)  # fmt: skip
_GLU_FIRST = functor("GluBackwardFirst", 2, dtypes=FLOATS)
_GLU_SECOND = functor("GluBackwardSecond", 3, dtypes=FLOATS)


def _glu_halves(self: Tensor, dim: int) -> tuple[Tensor, Tensor] | None:
    if self.dim() == 0 or not -self.dim() <= dim < self.dim() or self.shape[dim] % 2:
        return None
    return self.chunk(2, dim) if self.shape[dim] else None


def _glu(self: Tensor, dim: int = -1) -> Any:
    halves = _glu_halves(self, dim)
    return OPTION if halves is None else run(_GLU, halves)


def _glu_backward(grad_output: Tensor, self: Tensor, dim: int) -> Any:
    halves = _glu_halves(self, dim)
    if halves is None or self.dtype not in FLOATS or grad_output.dtype != self.dtype:
        return OPTION
    inner = self.stride(dim) * halves[0].shape[dim]  # of dense tensors: elements of a half that lie side by side
    if self.is_contiguous() and grad_output.is_contiguous() and inner * self.element_size() % 16 == 0:
        if grad_output.shape == halves[0].shape and not (self.data_ptr() | grad_output.data_ptr()) & 15:
            return _GLU_GRADIENT(grad_output, self, inner)
    result = torch.empty_like(self, memory_format=torch.contiguous_format)
    first, second = result.chunk(2, dim)
    for done in (
        run(_GLU_FIRST, (grad_output, halves[1]), out=first),
        run(_GLU_SECOND, (grad_output, *halves), out=second),
    ):
        if type(done) is NotHandled:
            return done
    return result


_add_row("glu", _glu, opinfo="nn.functional.glu")
_add_row("glu_backward", _glu_backward, opinfo="nn.functional.glu")
_MSE_LOSS_BACKWARD = functor("MseLossBackward", 3, dtypes=FLOATS)


def _mse_loss_backward(grad_output: Tensor, self: Tensor, target: Tensor, reduction: int) -> Any:
    if not grad_output.dtype == self.dtype == target.dtype or self.shape != target.shape or not self.numel():
        return OPTION
    scale = 2.0 / self.numel() if reduction == 1 else 2.0
    return run(_MSE_LOSS_BACKWARD, (grad_output.expand(self.shape), self, target), (scale,))


_add_row("mse_loss_backward", _mse_loss_backward, opinfo="nn.functional.mse_loss")
_DROPOUT_BACKWARD = functor("DropoutBackward", 2, dtypes=FLOATS, own=2, promotion="first")


def _native_dropout_backward(grad_output: Tensor, mask: Tensor, scale: float) -> Any:
    if mask.dtype != torch.bool or mask.shape != grad_output.shape:
        return OPTION
    return run(_DROPOUT_BACKWARD, (grad_output, mask), (scale,))


_add_row("native_dropout_backward", _native_dropout_backward, opinfo="")
OP = Op("aten_gradients", public=(), kernels=(_GLU_BACKWARD,), torch_ops=())
