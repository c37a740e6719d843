"""Linear layers of a model in fp8, with codes that are made one time for all layers that read the same tensor.

The three projections of an attention read one tensor, and so do gate and up: its codes are kept on the tensor object,
and found there by the next layer. In a gated MLP the activation writes codes for the down projection, not numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.models import replace
from rtkernels.models.recognize import NotRecognized, Recognized
from rtkernels.nn.fp8_linear import main_grad_of
from rtkernels.ops.act import glu
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling

RECIPES = ("block", "row", "tensor")
_SMALLEST_GAIN = 600  # n * k / (n + k); below, quantising costs more than the products gain
_MULTIPLE = 16
_KEPT = "_rtkernels_codes"


class Codes(NamedTuple):
    """What ``fp8_linear`` takes in place of x; the gradient goes to y, which is x."""

    q: Tensor
    scale: Tensor
    q_t: Tensor | None
    scale_t: Tensor | None
    y: Tensor


def check_recipe(fp8: bool | str | None) -> str | None:
    """Return the recipe that ``patch(fp8=...)`` names, None for none."""
    if fp8 is None or fp8 is False:
        return None
    recipe = "block" if fp8 is True else fp8
    if recipe not in RECIPES:
        raise ArgumentError(f"fp8 is {fp8!r}; expected True or one of {', '.join(map(repr, RECIPES))}")
    return recipe


def recognize(module: nn.Linear, recipe: str) -> Recognized:
    """Return the replacement of a linear layer.

    Raises:
        NotRecognized: It is too small to gain, or of sizes that codes cannot have.
    """
    n, k = module.out_features, module.in_features
    if n % _MULTIPLE or k % _MULTIPLE:
        raise NotRecognized(f"its sizes {n} x {k} are no multiples of {_MULTIPLE}")
    if n * k / (n + k) < _SMALLEST_GAIN:
        raise NotRecognized(f"{n} x {k} is too small to gain from fp8")
    return Recognized("fp8_linear", (("recipe", recipe),))


def codes_of(x: Tensor) -> Codes | Tensor:
    """Return the codes of x by rows and columns, made at the first call with this tensor object; x if compiled."""
    if is_dynamo_compiling() or not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    kept = getattr(x, _KEPT, None)
    both = torch.is_grad_enabled()
    if kept is not None and kept[0] == x._version and (kept[1].q_t is not None or not both):
        return kept[1]
    if both:
        made = rtkernels.quantize_fp8(x.detach(), granularity="group", layout="both")
        codes = Codes(made.q, made.scale, made.q_t, made.scale_t, x)
    else:
        codes = Codes(*rtkernels.quantize_fp8(x, granularity="group"), None, None, x)
    # The tensor must not hold itself: what is kept has no y.
    setattr(x, _KEPT, (x._version, codes._replace(y=None)))
    return codes


def linear(module: nn.Linear, x: Any, recipe: str) -> Tensor:
    """Return the result of a linear layer for a tensor or for codes."""
    if isinstance(x, Tensor) and recipe == "block":
        found = codes_of(x)
        x = found._replace(y=x) if isinstance(found, Codes) else found
    return rtkernels.fp8_linear(x, module.weight, module.bias, recipe=recipe, main_grad=main_grad_of(module.weight))


def _fp8_linear(original: type[nn.Module], recipe: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, input):
        if isinstance(input, Tensor) and input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return own(self, input)
        return linear(self, input, recipe)

    return forward


class _GluCodes(torch.autograd.Function):
    """The codes of a gated activation, and a tensor without memory that stands for its result and gets the gradient."""

    @staticmethod
    def forward(ctx, gate, up, act):
        codes = rtkernels.glu_fp8(gate, up, act=act, layout="both")
        ctx.save_for_backward(gate, up)
        ctx.act = act
        ctx.mark_non_differentiable(*codes)
        shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
        return gate.new_zeros(()).expand(shape), *codes

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *codes):
        gate, up = ctx.saved_tensors
        dx, dup, _ = glu.BACKWARD(dy, gate, up, None, ctx.act, False)
        return dx, dup if up is not None else None, None


def glu_codes(gate: Tensor, up: Tensor | None, act: str) -> Any:
    """Return ``glu(gate, up)`` as codes that ``fp8_linear`` takes, with a gradient where gate has one."""
    if torch.is_grad_enabled() and gate.requires_grad:
        y, *codes = _GluCodes.apply(gate, up, act)
        return Codes(*codes, y)
    return rtkernels.glu_fp8(gate, up, act=act)


def _fp8_mlp(original: type[nn.Module], act: str, separate: bool) -> Callable[..., Any]:
    def forward(self, x):
        if separate:
            gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x), None
        return linear(self.down_proj, glu_codes(gate, up, act), "block")

    return forward


replace.register("fp8_linear", _fp8_linear)
replace.register("fp8_mlp", _fp8_mlp)


def replace_mlp(module: nn.Module, recipe: str) -> None:
    """Let the activation of a replaced gated MLP write codes, where its down projection reads them."""
    kind = replace.replaced(module)
    down = replace.replaced(module.down_proj)
    if recipe != "block" or kind is None or kind.kind != "mlp" or down is None or down.kind != "fp8_linear":
        return
    original = type(module)._rtkernels_original
    module.__class__ = replace.subclass(original, Recognized("fp8_mlp", kind.options))
