"""A pointwise operator from C expressions: ``rtkernels.pointwise``."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.aten.elementwise import run, shares_partly
from rtkernels.aten.functors import FLOATS, NUMBERS, TOKENS, Functor, Kernels
from rtkernels.aten.strides import overlaps_itself
from rtkernels.aten.table import NotHandled
from rtkernels.custom.expressions import PROMOTIONS, SCALARS, TENSORS, Expression, Forward
from rtkernels.custom.several import SeveralKernels, run_several, variant_of
from rtkernels.errors import ArgumentError
from rtkernels.runtime.build import sources
from rtkernels.runtime.launch.device import emulating
from rtkernels.runtime.operator import registry
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import TENSOR_TYPES, dispatch_modes, functorch_transform, is_dynamo_compiling

_defined: dict[str, tuple[Any, Callable[..., Any]]] = {}


def pointwise(
    name: str,
    expression: str | Sequence[str],
    *,
    backward: str | Mapping[str, str] | None = None,
    reference: Callable[..., Any] | None = None,
    promotion: str | Sequence[str] = "default",
) -> Callable[..., Any]:
    """Return an operator that computes C expressions of elements, compiled at first use as all kernels are.

    ``scaled = rtkernels.pointwise("scaled", "a * b + s0", backward={"a": "g * b", "b": "g * a"})`` gives
    ``scaled(x, y, 2.0)``, also ``torch.ops.rtkernels.scaled``: any shapes that broadcast, any strides, promotion and
    memory format as torch's; ``torch.compile``, the kernel cache, ``rtkernels.warm(targets, ["scaled"])`` and the
    emulator work.

    With a list of expressions the operator returns a tuple, and reads its operands once for all results. Calls take
    ``out=``: a tensor, or a tuple of tensors and None. One of the tensors may be an operand of the result's shape and
    dtype, which is then overwritten; other overlaps are refused, and so is ``out=`` with gradients.

    Args:
        name: Of the operator: a C identifier that no other operator of rtkernels has.
        expression: C++ over tensors ``a``, ``b``, ``c`` and numbers ``s0`` to ``s3``, as many as it names, or a list of
            up to three such expressions. Values are float for bfloat16, float16 and float32, else integers (int, or
            long long for int64): ``expf``, ``fmaxf`` and the functions of ``cuda_src/pointwise/functors.cuh``
            (``logistic``) are there.
        backward: The gradient with respect to ``a``, or for each tensor of the expression, over ``g`` (the gradient
            of the result), at most two of the tensors, and the numbers. For a list of expressions the gradients are
            ``g0``, ``g1``, ``g2``, and three gradients and tensors may be named. None: not differentiable.
        reference: The same in plain torch, for CPU tensors; a tuple for a list of expressions. Results are converted
            to the dtypes that `promotion` gives. None: CPU tensors run in the emulator, which needs a C++ compiler.
        promotion: The kind of type promotion, for all results or a list of one for each, by the names of
            ``torch._prims_common``: ``"default"``; ``"int_to_float"`` (integers become the default dtype);
            ``"always_bool"`` (the result is bool); ``"bool_to_long"``; ``"no_opmath"`` (as the default, and bool is
            taken; 16-bit floats are computed in float32 here, too). ``"complex_to_float"`` is refused.

    Returns:
        A function of the tensors and numbers, in this order.

    Raises:
        ArgumentError: A name or an expression cannot be used.
    """
    forward = Forward(expression, promotion)
    if not isinstance(name, str) or not re.fullmatch(r"[a-z][A-Za-z0-9_]{0,99}", name):
        expected = "a C identifier of ASCII letters, digits and '_' that begins with a small letter, at most 100 long"
        raise ArgumentError(f"name is {name!r}; expected {expected}")
    gradients = forward.gradients(backward)
    texts = tuple(e.text for e in forward.results), forward.single, tuple(forward.kinds)
    definition = (texts, tuple((tensor, e.text) for tensor, e in gradients.items()), reference)
    if name in _defined:
        if _defined[name][0] == definition:
            return _defined[name][1]
        raise ArgumentError(f"name is {name!r}, which is a pointwise operator with other expressions already")
    if any(name == known.name for op in registry.ops() for known in op.torch_ops):
        raise ArgumentError(f"name is {name!r}, which is an operator of rtkernels already")
    function = _operator(name, forward, gradients, reference)
    _defined[name] = definition, function
    return function


class _Launcher:
    """Device code of one operator: the functors of all results, and the kernels that apply them."""

    def __init__(
        self, name: str, expressions: Sequence[Expression], scalars: Sequence[str], functors: tuple[Functor, ...],
        several: SeveralKernels | None,
    ) -> None:  # fmt: skip
        self.name, self.functors, self.several = name, functors, several
        self.count, self.scalars = functors[0].inputs, scalars
        self.named = [[scalar in e.scalars for scalar in SCALARS] for e in expressions]

    def __call__(self, args: Sequence[Any], outs: Sequence[Tensor] | None = None) -> list[Tensor]:
        tensors, given = args[: self.count], dict(zip(self.scalars, args[self.count :], strict=True))
        numbers = [given.get(scalar, 0.0) for scalar in SCALARS]
        if not any(tensor.is_floating_point() for tensor in tensors):
            numbers = [int(number) if number == int(number) else number for number in numbers]
        if self.several is None:
            result = run(self.functors[0], tensors, numbers, out=None if outs is None else outs[0])
            results = result if type(result) is NotHandled else [result]
        else:
            results = run_several(self.several, self.functors, tensors, numbers, self.named, outs)
        if type(results) is NotHandled:
            raise ArgumentError(f"{self.name} cannot be computed: {results.reason}")
        return results


def _operator(
    name: str, forward: Forward, gradients: dict[str, Expression], reference: Any
) -> Callable[..., Any]:  # fmt: skip
    user, count, scalars = f"user_{name}", len(forward.tensors), forward.scalars
    has_gradient = any(kind != "always_bool" for kind in forward.kinds)
    endings = [""] if forward.single else [f"_{i}" for i in range(len(forward.results))]
    structs = {
        **{ending: (e, forward.tensors) for ending, e in zip(endings, forward.results, strict=True)},
        **{f"_d{tensor}": (e, e.tensors) for tensor, e in gradients.items()},
    }  # fmt: skip
    results = _functors(user, endings, forward)
    text = "".join(e.struct(f"{user}{ending}", tensors) for ending, (e, tensors) in structs.items())
    header = '#include "pointwise/functors.cuh"\n' + ('#include "pointwise/several.cuh"\n' if len(endings) > 1 else "")
    unit = sources.generate(name, f"{header}\nnamespace rtk {{\n{text}\n}}  // namespace rtk\n")

    def variants(kind: str, target: Any) -> list[tuple[Any, ...]]:
        return [
            (f"{user}{ending}", TOKENS[dtype], TOKENS[_result(results, endings, ending) or dtype],
             *[TOKENS[dtype]] * len(tensors), *["u8"] * (3 - len(tensors)), *last)
            for ending, (_, tensors) in structs.items() for dtype in sorted(FLOATS, key=str)
            for last in {"G": [(False,)], "S": [(i,) for i in range(len(tensors))]}.get(kind, [()])
            if len(endings) == 1 or ending not in endings  # several results have kernels of their own
        ]  # fmt: skip

    def variants_of_several(kind: str, target: Any) -> list[tuple[Any, ...]]:
        return [
            (*variant_of(results, dtype, [f.result or dtype for f in results], [dtype] * count),
             *((False,) if kind == "G" else ()))
            for dtype in sorted(FLOATS, key=str)
        ]  # fmt: skip

    kernels = Kernels(unit, variants, tier="core")
    several = SeveralKernels(unit, variants_of_several) if len(endings) > 1 else None
    for functor in results:
        object.__setattr__(functor, "kernels", kernels)
    launcher = _Launcher(name, forward.results, scalars, results, several)
    operators = {"": _torch_op(name, forward.tensors, scalars, launcher, forward, reference)}
    for tensor, e in gradients.items():
        functor = Functor(f"{user}_d{tensor}", len(e.tensors), dtypes=NUMBERS, kernels=kernels)
        launch = _Launcher(f"{name}_d{tensor}", [e], e.scalars, (functor,), None)
        operators[f"_d{tensor}"] = _torch_op(f"{name}_d{tensor}", e.tensors, e.scalars, launch, None, None)
    owned = kernels.all() + (several.all() if several is not None else ())
    record = Op(name, public=(), kernels=owned, torch_ops=tuple(operators.values()))

    class _Pointwise(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):
            ctx.save_for_backward(*args[:count])
            ctx.numbers = args[count:]
            result = operators[""](*args)
            every = (result,) if forward.single else tuple(result)
            ctx.mark_non_differentiable(*(one for one in every if not one.is_floating_point()))
            return result if forward.single else every

        @staticmethod
        @once_differentiable
        def backward(ctx, *grads):
            named = {"g": grads[0]} if forward.single else {f"g{i}": g for i, g in enumerate(grads)}
            values = {**named, **dict(zip(TENSORS, ctx.saved_tensors, strict=False))}
            numbers = dict(zip(scalars, ctx.numbers, strict=True))
            found = []
            for tensor, wanted, e in zip(TENSORS, ctx.needs_input_grad, gradients.values(), strict=False):
                if not wanted:
                    found.append(None)
                    continue
                gradient = operators[f"_d{tensor}"](*[values[t] for t in e.tensors], *[numbers[s] for s in e.scalars])
                found.append(gradient.to(values[tensor].dtype).sum_to_size(values[tensor].shape))
            return (*found, *[None] * len(scalars))

    def call(*args: Tensor | float, out: Any = None) -> Any:
        if len(args) != count + len(scalars):
            wanted = ", ".join([*forward.tensors, *scalars])
            raise ArgumentError(f"{name} got {len(args)} arguments; expected {wanted}")
        for letter, tensor in zip(forward.tensors, args, strict=False):
            if not isinstance(tensor, Tensor):
                raise ArgumentError(f"{letter} is a {type(tensor).__name__}; expected a tensor")
        numbers = [float(check_number(s, value)) for s, value in zip(scalars, args[count:], strict=True)]
        differentiable = has_gradient and torch.is_grad_enabled() and needs_grad(*args[:count])
        if out is not None:
            if differentiable:
                raise ArgumentError("out is given, and a tensor requires a gradient")
            return _into(out, (*args[:count], *numbers), forward, operators[""], launcher)
        if differentiable:
            if not gradients:
                raise ArgumentError(f"{name} has no backward, and a tensor requires a gradient")
            return _Pointwise.apply(*args[:count], *numbers)
        result = operators[""](*args[:count], *numbers)
        return result if forward.single else tuple(result)

    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"``{forward.text}``, element by element: {', '.join([*forward.tensors, *scalars])}."
    call.op = record
    return call


def _functors(user: str, endings: Sequence[str], forward: Forward) -> tuple[Functor, ...]:
    found = []
    for ending, kind in zip(endings, forward.kinds, strict=True):
        promotion, result, dtypes = PROMOTIONS[kind]
        found.append(Functor(f"{user}{ending}", len(forward.tensors), dtypes, promotion, result))
    return tuple(found)


def _result(functors: Sequence[Functor], endings: Sequence[str], ending: str) -> torch.dtype | None:
    return functors[list(endings).index(ending)].result if ending in endings else None


def _without_data(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _empty(tensors: Iterable[Tensor], forward: Forward | None) -> list[Tensor]:
    """Return uninitialised results: of the shape, dtype and memory format that they have for these tensors."""
    sample, *others = tensors
    for tensor in others:
        sample = sample + tensor
    dtypes = [sample.dtype] if forward is None else forward.dtypes(sample.dtype)
    return [torch.empty_like(sample, dtype=dtype) for dtype in dtypes]


def _torch_op(
    name: str, tensors: Sequence[str], scalars: Sequence[str], launcher: _Launcher, forward: Forward | None,
    reference: Callable[..., Any] | None,
) -> TorchOp:  # fmt: skip
    """Return the operator of some expressions; `forward` is None for the one expression of a gradient."""
    arguments = ", ".join([*(f"Tensor {t}" for t in tensors), *(f"float {s}" for s in scalars)])
    count, single = len(tensors), forward is None or forward.single
    results = "Tensor" if single else f"({', '.join(['Tensor'] * len(forward.results))})"

    def unpacked(found: list[Tensor]) -> Any:
        return found[0] if single else tuple(found)

    def launch(*args: Any) -> Any:
        return unpacked(launcher(args))

    def emulated(*args: Any) -> Any:
        with emulator.emulate():
            return op._run_cpu(*args)

    def converted(*args: Any) -> Any:
        given = reference(*args)
        every = [given] if single else list(given)
        wanted = _empty(map(_without_data, args[:count]), forward)
        if len(every) != len(wanted):
            raise ArgumentError(f"reference returned {len(every)} results; expected {len(wanted)}")
        return unpacked([one.to(like.dtype) for one, like in zip(every, wanted, strict=True)])

    def fake(*args: Any) -> Any:
        return unpacked(_empty(args[:count], forward))

    plain = emulated if reference is None else converted
    op = TorchOp(f"{name}({arguments}) -> {results}", launch=launch, reference=plain, fake=fake)
    return op


def _into(out: Any, args: Sequence[Any], forward: Forward, op: TorchOp, launcher: _Launcher) -> Any:
    """Compute into the caller's tensors and return them, with new ones where the caller gives None."""
    tensors = args[: len(forward.tensors)]
    given = [out] if forward.single else out
    if not isinstance(given, (tuple, list)) or len(given) != len(forward.results):
        raise ArgumentError(f"out is {type(out).__name__}; expected a tuple of {len(forward.results)} tensors or None")
    likes = _empty(map(_without_data, tensors), forward)
    for i, (one, like) in enumerate(zip(given, likes, strict=True)):
        _check_out("out" if forward.single else f"out[{i}]", one, like, tensors, given[:i])
    if _launches_directly([*tensors, *(one for one in given if one is not None)]):
        outs = [
            torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=tensors[0].device)
            if one is None else one
            for one, like in zip(given, likes, strict=True)
        ]  # fmt: skip
        features = emulator.active()
        if tensors[0].is_cuda:
            launcher(args, outs)
        else:
            with emulating(features):
                launcher(args, outs)
        for one in outs:
            if not one.is_inference():
                torch.autograd.graph.increment_version(one)
    else:
        results = op(*args)
        every = [results] if forward.single else results
        outs = [new if one is None else one.copy_(new) for one, new in zip(given, every, strict=True)]
    return outs[0] if forward.single else tuple(outs)


def _check_out(name: str, out: Any, like: Tensor, tensors: Sequence[Tensor], others: Sequence[Any]) -> None:
    if out is None:
        return
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name} is a {type(out).__name__}; expected a tensor")
    device = tensors[0].device
    if (out.shape, out.dtype, out.device) != (like.shape, like.dtype, device):
        expected = f"{list(like.shape)} {like.dtype} on {device}"
        raise ArgumentError(f"{name} is {list(out.shape)} {out.dtype} on {out.device}; expected {expected}")
    if out.requires_grad:
        raise ArgumentError(f"{name} requires a gradient; expected a tensor that does not")
    if is_dynamo_compiling():  # fakes have no addresses, and the results are copied
        return
    if overlaps_itself(out.shape, out.stride()):
        raise ArgumentError(f"{name} has strides {out.stride()}; expected each element in memory of its own")
    if any(shares_partly(tensor, out) for tensor in tensors):
        raise ArgumentError(f"{name} overlaps an operand; expected separate memory, or the operand itself")
    if any(other is not None and (_same_memory(other, out) or shares_partly(other, out)) for other in others):
        raise ArgumentError(f"{name} overlaps another result; expected separate memory")


def _same_memory(x: Tensor, y: Tensor) -> bool:
    return x.numel() > 0 and x.data_ptr() == y.data_ptr()


def _launches_directly(tensors: Sequence[Tensor]) -> bool:
    """Return True where a launch may write the caller's tensors without the dispatcher."""
    if is_dynamo_compiling() or any(type(tensor) not in TENSOR_TYPES for tensor in tensors):
        return False
    if dispatch_modes() or functorch_transform() is not None:
        return False
    if any(tensor.is_neg() or tensor.is_conj() for tensor in tensors):
        return False
    return tensors[0].is_cuda or (tensors[0].is_cpu and emulator.active() is not None)
