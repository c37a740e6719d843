"""Linear layers of a model in fp8, with codes that are made one time for all layers that read the same tensor.

The three projections of an attention read one tensor, and so do gate and up: a norm gives them codes (``lazy_norm``);
codes of any other tensor are kept on the tensor object, and found there by the next layer. In a gated MLP the
activation writes codes for the down projection, not numbers. Expert layers permute tokens as codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.models import replace
from rtkernels.models.lazy_norm import LazyNorm
from rtkernels.models.merged import Adjacent, adjacent, is_plain
from rtkernels.models.recognize import NotRecognized, Recognized
from rtkernels.nn.fp8_experts import E4M3, Experts
from rtkernels.nn.fp8_linear import KeepsCodes, main_grad_of
from rtkernels.ops.act import glu
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling

RECIPES = ("block", "row", "tensor")
_SMALLEST_GAIN = 600  # n * k / (n + k); below, quantising costs more than the products gain
_MULTIPLE = 16
_BLOCK = 128  # rows and columns of a weight that share a scale
_KEPT = "_rtkernels_codes"


class Codes(NamedTuple):
    """What ``fp8_linear`` takes in place of x, scales in columns; the gradient goes to y, which is x."""

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


# ---- linear layers --------------------------------------------------------------------------------------------------


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


def codes_of(x: Any) -> Any:
    """Return the codes of x by rows and columns, made at the first call with this tensor object; x if compiled."""
    if isinstance(x, LazyNorm):
        return x.codes()
    if is_dynamo_compiling() or not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    kept = getattr(x, _KEPT, None)
    both = torch.is_grad_enabled()
    if kept is not None and kept[0] == x._version and (kept[1].q_t is not None or not both):
        return kept[1]._replace(y=x)
    options = {"granularity": "group", "scale_layout": "column"}
    if both:
        made = rtkernels.quantize_fp8(x.detach(), layout="both", **options)
        codes = Codes(made.q, made.scale, made.q_t, made.scale_t, x)
    else:
        codes = Codes(*rtkernels.quantize_fp8(x, **options), None, None, x)
    # The tensor must not hold itself: what is kept has no y.
    setattr(x, _KEPT, (x._version, codes._replace(y=None)))
    return codes


def multiply(x: Any, weight: Tensor, bias: Tensor | None, recipe: str, **options: Any) -> Tensor:
    """Return ``x @ weight.T + bias`` of a tensor, a lazy norm or codes with scales in columns."""
    if recipe == "block":
        x = codes_of(x)
    elif isinstance(x, LazyNorm):
        x = x.tensor()
    return rtkernels.fp8_linear(x, weight, bias, recipe=recipe, scale_layout="column", **options)


def linear(module: nn.Linear, x: Any, recipe: str) -> Tensor:
    """Return the result of a linear layer for a tensor or for codes."""

    def make(weight: Tensor, transposed: bool) -> Any:
        return rtkernels.fp8_weight(weight, recipe=recipe, transposed=transposed)

    codes = module.codes_of("weight", module.weight, make)
    main_grad = main_grad_of(module.weight)
    return multiply(x, module.weight, module.bias, recipe, main_grad=main_grad, weight_codes=codes)


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of fp8 layers as columns of one tensor, None where they have to be called by themselves.

    Their weights lie one behind the other, in blocks of 128 rows, so that codes and scales are what they are alone.
    """
    kind = replace.replaced(linears[0])
    if is_dynamo_compiling() or kind is None or kind.kind != "fp8_linear" or dict(kind.options)["recipe"] != "block":
        return None
    weights, biases = [m.weight for m in linears], [m.bias for m in linears if m.bias is not None]
    if not all(is_plain(m, type(linears[0])) and m.weight.shape[0] % _BLOCK == 0 for m in linears):
        return None
    if len(biases) not in (0, len(linears)) or adjacent(weights) is None:
        return None

    def make(weight: Tensor, transposed: bool) -> Any:
        return rtkernels.fp8_weight(weight, transposed=transposed)

    whole = Adjacent.apply(*weights)
    codes = linears[0].codes_of("merged", whole, make, version=tuple(w._version for w in weights))
    return multiply(x, whole, torch.cat(biases) if biases else None, "block", weight_codes=codes)


def _fp8_linear(original: type[nn.Module], recipe: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, input):
        if isinstance(input, Tensor) and input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return own(self, input)
        return linear(self, input, recipe)

    return forward


# ---- norms ----------------------------------------------------------------------------------------------------------


def _fp8_norm(original: type[nn.Module], eps: str, offset: float) -> Callable[..., Any]:
    plain = replace.forward_of("rms_norm", original, eps=eps, offset=offset)

    def forward(self, hidden_states, residual=None):
        fits = isinstance(hidden_states, Tensor) and hidden_states.dtype in (torch.bfloat16, torch.float16)
        weight = getattr(self, "weight", None)
        alike = weight is None or weight.dtype == getattr(hidden_states, "dtype", None)
        if not fits or not alike or is_dynamo_compiling() or torch.is_autocast_enabled(hidden_states.device.type):
            return plain(self, hidden_states, residual)
        made = LazyNorm(hidden_states, weight, getattr(self, eps), offset, residual)
        return made if residual is None else (made, made.sum)

    return forward


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


class _GluCodes(torch.autograd.Function):
    """The codes of a gated activation, and a tensor without memory that stands for its result and gets the gradient."""

    @staticmethod
    def forward(ctx, gate, up, act):
        codes = rtkernels.glu_fp8(gate, up, act=act, layout="both", scale_layout="column")
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
    """Return ``glu(gate, up)`` as codes with scales in columns, with a gradient where gate has one."""
    if torch.is_grad_enabled() and gate.requires_grad:
        y, *codes = _GluCodes.apply(gate, up, act)
        return Codes(*codes, y)
    return rtkernels.glu_fp8(gate, up, act=act, scale_layout="column")


def _fp8_mlp(original: type[nn.Module], act: str, separate: bool) -> Callable[..., Any]:
    def forward(self, x):
        if separate:
            gate, up = merged(x, (self.gate_proj, self.up_proj)), None
            if gate is None:
                gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up = self.gate_up_proj(x), None
        return linear(self.down_proj, glu_codes(gate, up, act), "block")

    return forward


# ---- experts --------------------------------------------------------------------------------------------------------


def _fp8_experts(original: type[nn.Module], act: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x, weights = hidden_states, (self.gate_up_proj, self.down_proj)
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() != 2 or weights[0].dtype != x.dtype:
            return own(self, hidden_states, top_k_index, top_k_weights)
        rows = max(moe_rows(top_k_index.numel(), 1, self.num_experts, _BLOCK), _BLOCK)
        index = moe_index(top_k_index, self.num_experts, multiple_of=_BLOCK, rows=rows)
        main_grads = tuple(main_grad_of(weight) for weight in weights)
        return Experts.apply(
            x, top_k_weights.float(), *weights, index.rows, index.slots, index.offsets[1:], main_grads, act, E4M3, False
        )

    return forward


# ---- replacing ------------------------------------------------------------------------------------------------------

replace.register("fp8_linear", _fp8_linear, KeepsCodes)
replace.register("fp8_norm", _fp8_norm)
replace.register("fp8_mlp", _fp8_mlp)
replace.register("fp8_experts", _fp8_experts)


def _is_fp8(module: nn.Module) -> bool:
    kind = replace.replaced(module)
    return kind is not None and kind.kind == "fp8_linear"


def replace_mlp(module: nn.Module, recipe: str) -> None:
    """Let the activation of a replaced gated MLP write codes, where its down projection reads them."""
    kind = replace.replaced(module)
    if recipe == "block" and kind is not None and kind.kind == "mlp" and _is_fp8(module.down_proj):
        replace.change(module, Recognized("fp8_mlp", kind.options))


def replace_norms(layer: nn.Module, recipe: str) -> None:
    """Let the norms of a decoder layer whose projections read codes give them codes."""
    if recipe != "block" or not any(_is_fp8(module) for module in layer.modules()):
        return
    for child in layer.children():
        kind = replace.replaced(child)
        if kind is not None and kind.kind == "rms_norm" and getattr(child, "weight", None) is not None:
            if child.weight.shape[0] % _MULTIPLE == 0:
                replace.change(child, Recognized("fp8_norm", kind.options))


def experts_kind(module: nn.Module, recipe: str) -> Recognized:
    """Return the replacement of a replaced expert layer.

    Raises:
        NotRecognized: It has biases, weights that lie otherwise, or sizes that codes cannot have.
    """
    kind = replace.replaced(module)
    if kind is None or kind.kind != "experts":
        raise NotRecognized("it was not replaced")
    options = dict(kind.options)
    if recipe != "block":
        raise NotRecognized(f"experts have no recipe {recipe!r}, only 'block'")
    if options["bias"] or options["transposed"] or not options["concatenated"]:
        raise NotRecognized("its weights have biases, are transposed or interleaved")
    if any(size % _MULTIPLE for weight in (module.gate_up_proj, module.down_proj) for size in weight.shape[1:]):
        raise NotRecognized(f"its sizes are no multiples of {_MULTIPLE}")
    return Recognized("fp8_experts", (("act", options["act"]),))
