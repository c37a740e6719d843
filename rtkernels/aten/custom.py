"""A pointwise operator from a C expression: ``rtkernels.pointwise``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.aten.elementwise import run
from rtkernels.aten.functors import FLOATS, NUMBERS, TOKENS, Functor, Kernels
from rtkernels.aten.table import NotHandled
from rtkernels.errors import ArgumentError
from rtkernels.runtime.build import sources
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op

_TENSORS, _SCALARS = "abc", ("s0", "s1", "s2", "s3")
_made: dict[str, tuple[Any, Callable[..., Tensor]]] = {}


def pointwise(
    name: str,
    expression: str,
    *,
    backward: str | Mapping[str, str] | None = None,
    reference: Callable[..., Tensor] | None = None,
) -> Callable[..., Tensor]:
    """Return an operator that computes a C expression of elements, compiled at first use as all kernels are.

    ``scaled = rtkernels.pointwise("scaled", "a * b + s0", backward={"a": "g * b", "b": "g * a"})`` gives
    ``scaled(x, y, 2.0)``, also ``torch.ops.rtkernels.scaled``: any shapes that broadcast, any strides, promotion and
    memory format as torch's; ``torch.compile``, the kernel cache, ``rtkernels.warm(targets, ["scaled"])`` and the
    emulator work.

    Args:
        name: Of the operator: a C identifier that no other operator of rtkernels has.
        expression: C++ over tensors ``a``, ``b``, ``c`` and numbers ``s0`` to ``s3``, as many as it names. Values are
            float for bfloat16, float16 and float32, else integers (int, or long long for int64): ``expf``, ``fmaxf``
            and the functions of ``cuda_src/pointwise/functors.cuh`` (``logistic``) are there.
        backward: The gradient with respect to ``a``, or for each tensor of the expression, over ``g`` (the gradient
            of the result), at most two of the tensors, and the numbers. None: not differentiable.
        reference: The same in plain torch, for CPU tensors. None: these run in the emulator, which needs a C++
            compiler.

    Returns:
        A function of the tensors and numbers, in this order.

    Raises:
        ArgumentError: A name or an expression cannot be used.
    """
    forward = _Expression("expression", expression, _TENSORS)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][A-Za-z0-9_]{0,99}", name):
        expected = "a C identifier of ASCII letters, digits and '_' that begins with a small letter, at most 100 long"
        raise ArgumentError(f"name is {name!r}; expected {expected}")
    if not forward.tensors:
        raise ArgumentError(f"expression is {expression!r}; expected one that names a tensor: a, b or c")
    if forward.tensors != list(_TENSORS[: len(forward.tensors)]):
        raise ArgumentError(f"expression names {', '.join(forward.tensors)}; expected tensors from a on, without gaps")
    gradients = _gradients(backward, forward)
    definition = (expression, tuple((tensor, e.text) for tensor, e in gradients.items()), reference)
    if name in _made:
        if _made[name][0] == definition:
            return _made[name][1]
        raise ArgumentError(f"name is {name!r}, which is a pointwise operator with other expressions already")
    if any(name == made.name for op in registry.ops() for made in op.torch_ops):
        raise ArgumentError(f"name is {name!r}, which is an operator of rtkernels already")
    function = _operator(name, forward, gradients, reference)
    _made[name] = definition, function
    return function


class _Expression:
    """C text, and the tensors and numbers that it names."""

    def __init__(self, argument: str, text: Any, tensors: str) -> None:
        if not isinstance(text, str) or not text.strip() or re.search(r"[;{}#\n\\]", text):
            raise ArgumentError(f"{argument} is {text!r}; expected one C expression")
        self.text = text
        named = set(re.findall(r"(?<![\w.])[A-Za-z_]\w*", text))
        self.tensors = [tensor for tensor in tensors if tensor in named]
        self.scalars = [scalar for scalar in _SCALARS if scalar in named]

    def struct(self, name: str) -> str:
        """Return the functor of this expression."""
        values = ", ".join(f"C {tensor}" for tensor in self.tensors)
        numbers = "".join(f"        const C {s} = s.{s};\n" for s in self.scalars)
        return f"""
struct {name} {{
    static constexpr int kInputs = {len(self.tensors)}, kOwnType = 0;
    template <typename T, typename C>
    RTK_DEVICE static auto apply({values}, const Scalars<T>& s) {{
{numbers}        return {self.text};
    }}
}};
"""


def _gradients(backward: Any, forward: _Expression) -> dict[str, _Expression]:
    if backward is None:
        return {}
    given = {"a": backward} if isinstance(backward, str) else backward
    if not isinstance(given, Mapping) or set(given) != set(forward.tensors):
        wanted = ", ".join(forward.tensors)
        raise ArgumentError(f"backward is {backward!r}; expected an expression for each of {wanted}")
    found = {}
    for tensor in forward.tensors:
        found[tensor] = gradient = _Expression(f"backward[{tensor!r}]", given[tensor], "g" + _TENSORS)
        if len(gradient.tensors) > 3:
            raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}; expected g and at most two tensors")
        if not set(gradient.tensors) <= {"g", *forward.tensors} or not set(gradient.scalars) <= set(forward.scalars):
            raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}, which names what expression does not")
        if "g" not in gradient.tensors:
            raise ArgumentError(f"backward[{tensor!r}] is {gradient.text!r}; expected one that names the gradient g")
    return found


def _operator(
    name: str, forward: _Expression, gradients: dict[str, _Expression], reference: Any
) -> Callable[..., Tensor]:  # fmt: skip
    structs = {"": forward, **{f"_d{tensor}": e for tensor, e in gradients.items()}}
    text = "".join(e.struct(f"user_{name}{ending}") for ending, e in structs.items())
    text = f'#include "pointwise/functors.cuh"\n\nnamespace rtk {{\n{text}\n}}  // namespace rtk\n'
    unit = sources.generate(name, text)

    def variants(kind: str, target: Any) -> list[tuple[Any, ...]]:
        return [
            (f"user_{name}{ending}", *[TOKENS[dtype]] * (2 + len(e.tensors)), *["u8"] * (3 - len(e.tensors)), *last)
            for ending, e in structs.items() for dtype in sorted(FLOATS, key=str)
            for last in {"G": [(False,)], "S": [(i,) for i in range(len(e.tensors))]}.get(kind, [()])
        ]  # fmt: skip

    kernels = Kernels(unit, variants, tier="core")
    operators = {}
    for ending, e in structs.items():
        functor = Functor(f"user_{name}{ending}", len(e.tensors), dtypes=NUMBERS, kernels=kernels)
        operators[ending] = _torch_op(name + ending, e, functor, reference if not ending else None)
    record = Op(name, public=(), kernels=kernels.all(), torch_ops=tuple(operators.values()))
    count, scalars = len(forward.tensors), forward.scalars

    class _Pointwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*args[:count])
            ctx.numbers = args[count:]
            return operators[""](*args)

        @staticmethod
        @once_differentiable
        def backward(ctx, g):
            values = {"g": g, **dict(zip(_TENSORS, ctx.saved_tensors, strict=False))}
            numbers = dict(zip(scalars, ctx.numbers, strict=True))
            found = []
            for tensor, wanted, e in zip(_TENSORS, ctx.needs_input_grad, gradients.values(), strict=False):
                if not wanted:
                    found.append(None)
                    continue
                made = operators[f"_d{tensor}"](*[values[t] for t in e.tensors], *[numbers[s] for s in e.scalars])
                found.append(made.to(values[tensor].dtype).sum_to_size(values[tensor].shape))
            return (*found, *[None] * len(scalars))

    def call(*args: Tensor | float) -> Tensor:
        if len(args) != count + len(scalars):
            wanted = ", ".join([*forward.tensors, *scalars])
            raise ArgumentError(f"{name} got {len(args)} arguments; expected {wanted}")
        for letter, tensor in zip(forward.tensors, args, strict=False):
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{letter} is a {type(tensor).__name__}; expected a tensor")
        numbers = [float(check_number(s, value)) for s, value in zip(scalars, args[count:], strict=True)]
        if torch.is_grad_enabled() and needs_grad(*args[:count]):
            if not gradients:
                raise ArgumentError(f"{name} has no backward, and a tensor requires a gradient")
            return _Pointwise.apply(*args[:count], *numbers)
        return operators[""](*args[:count], *numbers)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``{forward.text}``, element by element: {', '.join([*forward.tensors, *scalars])}."
    call.op = record
    return call


def _torch_op(name: str, e: _Expression, functor: Functor, reference: Callable[..., Tensor] | None) -> TorchOp:
    arguments = ", ".join([*(f"Tensor {t}" for t in e.tensors), *(f"float {s}" for s in e.scalars)])
    count = len(e.tensors)

    def launch(*args: Any) -> Tensor:
        numbers = args[count:]
        if not any(tensor.is_floating_point() for tensor in args[:count]):
            numbers = [int(number) if number == int(number) else number for number in numbers]
        result = run(functor, args[:count], numbers)
        if type(result) is NotHandled:
            raise ArgumentError(f"{name} cannot be computed: {result.reason}")
        return result

    def emulated(*args: Any) -> Tensor:
        with emulator.emulate():
            return op._run_cpu(*args)

    def fake(*args: Any) -> Tensor:
        result = args[0]
        for tensor in args[1:count]:
            result = result + tensor
        return torch.empty_like(result)

    op = TorchOp(f"{name}({arguments}) -> Tensor", launch=launch, reference=reference or emulated, fake=fake)
    return op
