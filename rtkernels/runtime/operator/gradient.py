"""``differentiable``: the ``autograd.Function`` of a forward and a backward operator, generated from their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.operator import TorchOp
from rtkernels.runtime.operator.written import generated
from rtkernels.runtime.torch_private import functorch_transform, is_dynamo_compiling


def differentiable(
    forward: TorchOp, backward: TorchOp, *, incoming: dict[str, str] | None = None, constants: str = "",
    dirty: str = "", needs: dict[str, str] | None = None,
) -> Callable[..., Any]:  # fmt: skip
    """Return ``forward`` as a function with a gradient, once differentiable.

    Arguments are matched by name. A tensor ``d<result>`` of the backward operator is the incoming gradient of that
    result; if there is none, it is None if optional, else zeros. A tensor with the name of an argument or result of
    ``forward`` is saved. An option ``need_<argument>`` says whether the gradient of that argument is needed. All other
    options are those of ``forward``. The results ``d<argument>`` are the gradients. ``incoming`` maps tensors of the
    backward operator to results of the forward operator whose names do not follow this rule.

    Args:
        forward: A declared operator.
        backward: A declared operator.
        incoming: Results of `forward`, by the names of their gradients in `backward`.
        constants: Names of results that have no gradient.
        needs: Arguments, by the names of the options of `backward` that say whether their gradients are needed, if
            these are not called ``need_<argument>``.
        dirty: ``"y x"`` for an operator that writes its only result y over x and returns nothing.
    """
    results = dirty.split()[:1] or list(forward.results)
    results_of = incoming or {f"d{result}": result for result in results if result not in constants.split()}
    optional = {argument.name for argument in backward.arguments if argument.optional}
    tensors = {argument.name for argument in forward.arguments}
    saved = [name for name in backward.names if name in tensors or name in results]
    kept = [name for name in backward.names if name in forward.option_names]
    gradients = {result.removeprefix("d"): result for result in backward.results}
    place = {name: i for i, name in enumerate(forward.names)}

    keep = "".join(f"\n        ctx.{name} = {name}" for name in kept)
    call = f"{', '.join(results)} = call_forward({', '.join(forward.names)})"
    if dirty:
        overwritten = dirty.split()[1]
        call = f"ctx.mark_dirty({overwritten})\n        call_forward({', '.join(forward.names)})\n        "
        call += f"{results[0]} = {overwritten}"
    no_gradient = f"\n        ctx.mark_non_differentiable({', '.join(constants.split())})" if constants else ""
    grads = {result: f"grad_{result}" for result in results}
    likes, zeros = "", ""
    for name, result in results_of.items():
        if name not in optional and len(results_of) > 1:
            likes += f"\n        ctx.like_{result} = {result}.shape, {result}.dtype, {result}.device"
            zeros += f"\n        if grad_{result} is None:\n            grad_{result} = zeros(*ctx.like_{result})"
    given = []
    for name in backward.names:
        if name in results_of:
            given.append(grads[results_of[name]])
        elif name in saved:
            given.append(name)
        elif name.startswith("need_") or name in (needs or {}):
            given.append(f"wanted[{place[(needs or {}).get(name) or name.removeprefix('need_')]}]")
        else:
            given.append(f"ctx.{name}")
    returned = [
        f"{gradients[name]} if wanted[{i}] else None" if name in gradients else "None" for name, i in place.items()
    ]
    unpack = f"\n        {', '.join(saved)}, = ctx.saved_tensors" if saved else ""
    source = f"""
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {", ".join(forward.names)}):
        {call}
        ctx.set_materialize_grads(False)
        ctx.save_for_backward({", ".join(saved)}){keep}{likes}{no_gradient}
        return {", ".join(results)}

    @staticmethod
    @once_differentiable
    def backward(ctx, {", ".join(grads.values())}):
        if {" and ".join(f"{grads[result]} is None" for result in results_of.values())}:
            return {", ".join(["None"] * len(place))},{zeros}{unpack}
        wanted = ctx.needs_input_grad
        {", ".join(gradients.values())} = call_backward({", ".join(given)})
        return {", ".join(returned)},
"""
    scope = {  # without a __name__: Dynamo would import it
        "torch": torch,
        "once_differentiable": once_differentiable,
        "call_forward": forward.call,
        "call_backward": backward.call,
        "zeros": lambda shape, dtype, device: torch.zeros(shape, dtype=dtype, device=device),
    }
    generated(source, f"<rtkernels gradient of {forward.name}>", scope)
    function = scope["Function"]
    function.__module__ = __name__
    function.__name__ = function.__qualname__ = forward.name
    return applied(function)


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` without its wrapper, which looks for leaked functorch tensors."""
    plain = super(torch.autograd.Function, function).apply

    def apply(*args: Any) -> Any:
        if is_dynamo_compiling() or functorch_transform() is not None:
            return function.apply(*args)
        return plain(*args)

    return apply
