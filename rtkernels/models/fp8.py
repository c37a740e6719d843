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
from rtkernels.models import fp8_products as products
from rtkernels.models import replace
from rtkernels.models.fp8_mlp import Saving, gated_mlp
from rtkernels.models.fp8_products import Codes
from rtkernels.models.lazy_norm import LazyNorm
from rtkernels.models.merged import Adjacent, adjacent, is_plain
from rtkernels.models.recognize import NotRecognized, Recognized, autocasts, norm_weight
from rtkernels.models.reuse import glu_gradient, is_private, may_hand_on, norm_and_input, stand_in
from rtkernels.nn.fp8_experts import E4M3, experts, group_ends, weight_codes
from rtkernels.nn.fp8_linear import KeepsCodes, main_grad_of
from rtkernels.ops.act import glu
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.ops.quant.quantize_fp8 import BOTH
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.gradient import applied
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling

RECIPES = ("block", "row", "tensor")
_SMALLEST_GAIN = 600  # n * k / (n + k); below, quantising costs more than the products gain
_MULTIPLE = 16
_BLOCK = 128  # rows and columns of a weight that share a scale
_KEPT = "_rtkernels_codes"
_quantize = BOTH.at_site()
READERS = "_rtkernels_readers"


class Recipe(NamedTuple):
    """How linear layers multiply codes, for ``patch(fp8=...)``.

    Attributes:
        name: "block" (scales of 128 values and of 128 x 128 weights), "row" or "tensor".
        wgrad: "bf16" for gradients of weights from 16-bit numbers; codes then do not travel between layers.
        pow2_scale: Round scales up to powers of two.
        save_weight: Keep no codes of weights from forward to backward, make them anew: for FSDP2, and for memory.
        save: "input" keeps no codes of what a gated MLP reads and of its gated values: they are made anew from the
            norm's input and from gate and up, which are kept anyway. For `fused_layers`; "codes" elsewhere.
        parts: In how many parts a gated MLP takes its rows, with `fused_layers`: what is saved of a part is freed as
            soon as it has its gradient. With `save_weight`, two take an eighth off a layer's peak, and they cost time:
            gradients of weights are sums of products.
        skip: Names of modules that are left alone, or parts of names ("layers.0.", "down_proj").
    """

    name: str = "block"
    wgrad: str = "fp8"
    pow2_scale: bool = False
    save_weight: bool = False
    save: str = "codes"
    parts: int = 1
    skip: tuple[str, ...] = ()

    @property
    def by_codes(self) -> bool:
        """True if norms and activations may give codes to layers of this recipe."""
        return self.name == "block" and self.wgrad == "fp8" and not self.pow2_scale


def check_recipe(fp8: bool | str | Recipe | None) -> Recipe | None:
    """Return the recipe that ``patch(fp8=...)`` names, None for none."""
    if fp8 is None or fp8 is False:
        return None
    recipe = fp8 if isinstance(fp8, Recipe) else Recipe("block" if fp8 is True else fp8)
    if recipe.name not in RECIPES:
        raise ArgumentError(f"fp8 is {recipe.name!r}; expected True or one of {', '.join(map(repr, RECIPES))}")
    if recipe.wgrad not in ("fp8", "bf16"):
        raise ArgumentError(f"fp8 has wgrad {recipe.wgrad!r}; expected 'fp8' or 'bf16'")
    if recipe.save not in ("codes", "input"):
        raise ArgumentError(f"fp8 has save {recipe.save!r}; expected 'codes' or 'input'")
    if not isinstance(recipe.parts, int) or recipe.parts < 1:
        raise ArgumentError(f"fp8 has parts {recipe.parts!r}; expected a positive integer")
    return recipe._replace(skip=tuple(recipe.skip))


# ---- linear layers --------------------------------------------------------------------------------------------------


def recognize(module: nn.Linear, recipe: Recipe, rows: int | None = None) -> Recognized:
    """Return the replacement of a linear layer; `rows` are those of all layers that are one product with it.

    Raises:
        NotRecognized: It is too small to gain, or of sizes that codes cannot have.
    """
    n, k = module.out_features, module.in_features
    if n % _MULTIPLE or k % _MULTIPLE:
        raise NotRecognized(f"its sizes {n} x {k} are no multiples of {_MULTIPLE}")
    n = rows or n
    if n * k / (n + k) < _SMALLEST_GAIN:
        raise NotRecognized(f"{n} x {k} is too small to gain from fp8")
    return Recognized("fp8_linear", (("recipe", recipe),))


def codes_of(x: Any) -> Any:
    """Return the codes of x by rows and columns, made at the first call with this tensor object; x if compiled."""
    if isinstance(x, LazyNorm):
        return x.codes()
    if is_dynamo_compiling() or not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    if is_sharded(x):
        return x
    kept = getattr(x, _KEPT, None)
    both = torch.is_grad_enabled()
    if kept is not None and kept[0] == x._version and (kept[1][2] is not None or not both):
        return Codes(*kept[1], x)
    if both:
        made = products.quantized(_quantize, x.detach())
    else:
        made = (*rtkernels.quantize_fp8(x, granularity="group", scale_layout="column"), None, None)
    setattr(x, _KEPT, (x._version, made))  # not with x itself, which must not hold itself
    return Codes(*made, x)


def multiply(x: Any, weight: Tensor, bias: Tensor | None, recipe: Recipe, **options: Any) -> Tensor:
    """Return ``x @ weight.T + bias`` of a tensor, a lazy norm or codes with scales in columns."""
    if recipe.by_codes and not is_sharded(weight):
        x = codes_of(x)
    elif isinstance(x, LazyNorm):
        x = x.tensor()
    return rtkernels.fp8_linear(
        x, weight, bias, recipe=recipe.name, scale_layout="column", wgrad=recipe.wgrad, pow2_scale=recipe.pow2_scale,
        save_weight=recipe.save_weight and options.get("weight_codes") is None, **options,
    )  # fmt: skip


def _weight_codes(recipe: Recipe) -> Callable[[Tensor, bool], Any]:
    def make(weight: Tensor, transposed: bool) -> Any:
        return rtkernels.fp8_weight(weight, recipe=recipe.name, pow2_scale=recipe.pow2_scale, transposed=transposed)

    return make


def _as_step(x: Any, linears: Sequence[nn.Module], matrix: Tensor, given: Any, recipe: Recipe) -> Tensor | None:
    """Return the product of x and the weights of layers, `matrix`, as one step of the graph.

    None where the layers go by ``fp8_linear``: without gradients, for codes that cannot be transposed, for biases of
    some layers only.
    """
    if is_dynamo_compiling() or not torch.is_grad_enabled() or not recipe.by_codes:
        return None
    shape, biases = getattr(x, "shape", ()), [m._parameters["bias"] for m in linears]
    if len(shape) < 2 or row_count(shape) == 0 or row_count(shape) % _MULTIPLE:
        return None
    if biases[0] is None:
        bias = None
    elif None in biases:
        return None
    else:
        bias = biases[0] if len(biases) == 1 else torch.cat(biases)
    codes = codes_of(x)
    if getattr(codes, "q_t", None) is None:
        return None
    weights = (m._parameters["weight"] for m in linears)
    at = products.sites_of(matrix.shape)
    return products.linear(codes.y, bias, codes, matrix, given, recipe.save_weight and given is None, at, *weights)


def linear(module: nn.Linear, x: Any, recipe: Recipe) -> Tensor:
    """Return the result of a linear layer for a tensor or for codes."""
    weight = module.weight
    codes = module.codes_of("weight", weight, _weight_codes(recipe)) if module._kept is not None else None
    main_grad = main_grad_of(weight)
    if main_grad is None and type(weight) in TENSOR_TYPES:
        made = _as_step(x, (module,), weight, codes, recipe)
        if made is not None:
            return made
    return multiply(x, weight, module.bias, recipe, main_grad=main_grad, weight_codes=codes)


class _Merged(NamedTuple):
    """Weights of fp8 layers that lie one behind the other as one, with codes if they are kept, and the recipe."""

    matrix: Tensor
    codes: Any
    recipe: Recipe


def _merged_weights(linears: Sequence[nn.Module]) -> _Merged | None:
    """Return the weights of fp8 layers as one, None where the layers have to be called by themselves.

    They lie one behind the other, in blocks of 128 rows, so that codes and scales are what they are alone.
    """
    kind = replace.replaced(linears[0])
    if is_dynamo_compiling() or kind is None or kind.kind != "fp8_linear":
        return None
    recipe, same = dict(kind.options)["recipe"], type(linears[0])
    if not recipe.by_codes:
        return None
    if not all(is_plain(m, same) and m.out_features % _BLOCK == 0 for m in linears):
        return None
    weights = [m._parameters["weight"] for m in linears]
    matrix = adjacent(weights)
    if matrix is None:
        return None
    codes = None
    if linears[0]._kept is not None:
        versions = tuple(w._version for w in weights)
        codes = linears[0].codes_of("merged", matrix, _weight_codes(recipe), version=versions)
    return _Merged(matrix, codes, recipe)


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of fp8 layers as columns of one tensor, None where they have to be called by themselves."""
    made = _merged_weights(linears)
    if made is None:
        return None
    result = _as_step(x, linears, made.matrix, made.codes, made.recipe)
    if result is not None:
        return result
    biases = [m.bias for m in linears if m.bias is not None]
    if len(biases) not in (0, len(linears)):
        return None
    whole = Adjacent.apply(*(m.weight for m in linears)) if torch.is_grad_enabled() else made.matrix
    return multiply(x, whole, torch.cat(biases) if biases else None, made.recipe, weight_codes=made.codes)


def _fp8_linear(original: type[nn.Module], recipe: Recipe) -> Callable[..., Any]:
    own = original.forward

    def forward(self, input):
        if isinstance(input, Tensor) and input.dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return own(self, input)
        return linear(self, input, recipe)

    return forward


# ---- norms ----------------------------------------------------------------------------------------------------------


def _fp8_norm(original: type[nn.Module], eps: str, offset: float) -> Callable[..., Any]:
    plain = replace.forward_of("rms_norm", original, eps=eps, offset=offset)

    def forward(self, hidden_states, residual=None, with_input=False):
        fits = isinstance(hidden_states, Tensor) and hidden_states.dtype in (torch.bfloat16, torch.float16)
        fits = fits and not is_sharded(hidden_states)
        # Hooks of the readers (tensor parallelism, somebody's own) are for tensors.
        fits = fits and not any(m._forward_pre_hooks or m._forward_hooks for m in self.__dict__.get(READERS, ()))
        weight = norm_weight(self)
        alike = weight is None or weight.dtype == getattr(hidden_states, "dtype", None)
        if not fits or not alike or is_dynamo_compiling() or autocasts(hidden_states):
            return plain(self, hidden_states, residual, with_input)
        options = getattr(self, eps), offset
        if with_input and may_hand_on(hidden_states, weight):
            y, hidden_states = norm_and_input(hidden_states, weight, *options, False)
            return LazyNorm(hidden_states, weight, *options, stands_for=y), hidden_states
        made = LazyNorm(hidden_states, weight, *options, residual)
        if with_input:
            return made, hidden_states
        return made if residual is None else (made, made.sum)

    return forward


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


class _GluCodes(torch.autograd.Function):
    """The codes of a gated activation, and a tensor without memory that stands for its result and gets the gradient."""

    @staticmethod
    def forward(ctx, gate, up, act, private):
        codes = rtkernels.glu_fp8(gate, up, act=act, layout="both", scale_layout="column")
        ctx.save_for_backward(gate, up)
        ctx.act, ctx.private = act, private
        ctx.mark_non_differentiable(*codes)
        shape = gate.shape if up is not None else (*gate.shape[:-1], gate.shape[-1] // 2)
        return stand_in(gate, shape), *codes

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, *codes):
        gate, up = ctx.saved_tensors
        if ctx.private:
            return *glu_gradient(dy, gate, up, None, ctx.act, False)[:2], None, None
        dx, dup, _ = glu.BACKWARD(dy, gate, up, None, ctx.act, False)
        return dx, dup if up is not None else None, None, None


_differentiable_glu = applied(_GluCodes)


def glu_codes(gate: Tensor, up: Tensor | None, act: str, private: bool = False) -> Any:
    """Return ``glu(gate, up)`` as codes with scales in columns, with a gradient where gate has one.

    If they are `private`, nobody else has gate and up, and their gradient is written over them.
    """
    if torch.is_grad_enabled() and gate.requires_grad:
        y, *codes = _differentiable_glu(gate, up, act, private and is_private(gate, up))
        return Codes(*codes, y)
    return rtkernels.glu_fp8(gate, up, act=act, scale_layout="column")


def _as_one_step(mlp: nn.Module, x: Any, residual: Tensor | None, act: str, recipe: Recipe) -> Tensor | None:
    """Return the result of a gated MLP, with all of it one step of the graph; None where that is not possible."""
    if is_dynamo_compiling() or not torch.is_grad_enabled():
        return None
    gate, up, down = (mlp._modules[name] for name in ("gate_proj", "up_proj", "down_proj"))
    shape = getattr(x, "shape", ())
    if not is_plain(down, type(gate)) or any(m._parameters["bias"] is not None for m in (gate, up, down)):
        return None
    if len(shape) < 2 or row_count(shape) == 0 or row_count(shape) % _MULTIPLE:
        return None
    made = _merged_weights((gate, up))
    codes = None if made is None else codes_of(x)
    if getattr(codes, "q_t", None) is None:
        return None
    weights = [m._parameters["weight"] for m in (gate, up, down)]
    down_codes = None
    if down._kept is not None:
        down_codes = down.codes_of("weight", weights[2], _weight_codes(recipe))
    saving = Saving(recipe.save_weight and made.codes is None, recipe.save == "input", recipe.parts)
    norm = x.source() if saving.input and isinstance(x, LazyNorm) else None
    return gated_mlp(codes.y, residual, *weights, codes, made.matrix, made.codes, down_codes, act, saving, norm)


def _fp8_mlp(original: type[nn.Module], act: str, recipe: Recipe, separate: bool) -> Callable[..., Any]:
    def forward(self, x, residual=None):
        if residual is not None:
            whole = _as_one_step(self, x, residual, act, recipe) if separate else None
            return residual + forward(self, x) if whole is None else whole
        if separate:
            whole = _as_one_step(self, x, None, act, recipe)
            if whole is not None:
                return whole
            gate, up = merged(x, (self.gate_proj, self.up_proj)), None
            private = gate is not None
            if gate is None:
                gate, up = self.gate_proj(x), self.up_proj(x)
        else:
            gate, up, private = self.gate_up_proj(x), None, False
        if is_sharded(gate):
            return self.down_proj(rtkernels.glu(gate, up, act=act))
        return linear(self.down_proj, glu_codes(gate, up, act, private), recipe)

    return forward


# ---- experts --------------------------------------------------------------------------------------------------------


_EXPERT_WEIGHTS = "gate_up_proj", "down_proj"


def _fp8_experts(original: type[nn.Module], act: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x, weights = hidden_states, [self._parameters[name] for name in _EXPERT_WEIGHTS]
        if x.dtype not in (torch.bfloat16, torch.float16) or x.dim() != 2 or weights[0].dtype != x.dtype:
            return own(self, hidden_states, top_k_index, top_k_weights)
        rows = max(moe_rows(top_k_index.numel(), 1, self.num_experts, _BLOCK), _BLOCK)
        index = moe_index(top_k_index, self.num_experts, multiple_of=_BLOCK, rows=rows)
        main_grads = tuple(main_grad_of(weight) for weight in weights)
        given = ()
        if self._kept is not None:
            found = [self.codes_of(name, w, weight_codes) for name, w in zip(_EXPERT_WEIGHTS, weights, strict=True)]
            given = () if None in found else (part for codes in found for part in codes)
        return experts(
            x, top_k_weights.float(), *weights, index.rows, index.slots, group_ends(index.offsets), main_grads, act,
            E4M3, False, *given,
        )  # fmt: skip

    return forward


# ---- replacing ------------------------------------------------------------------------------------------------------

replace.register("fp8_linear", _fp8_linear, KeepsCodes)
replace.register("fp8_norm", _fp8_norm)
replace.register("fp8_mlp", _fp8_mlp)
replace.register("fp8_experts", _fp8_experts, KeepsCodes)


def _is_fp8(module: nn.Module) -> bool:
    kind = replace.replaced(module)
    return kind is not None and kind.kind == "fp8_linear"


def replace_mlp(module: nn.Module, recipe: Recipe) -> None:
    """Let the activation of a replaced gated MLP write codes, where its down projection reads them."""
    kind = replace.replaced(module)
    if recipe.by_codes and kind is not None and kind.kind == "mlp" and _is_fp8(module.down_proj):
        replace.change(module, Recognized("fp8_mlp", (*kind.options, ("recipe", recipe))))


# Norms of a decoder layer, and the child that reads what they give.
_READERS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp", "pre_feedforward_layernorm": "mlp"}


def replace_norms(layer: nn.Module, recipe: Recipe) -> None:
    """Let the norms of a decoder layer give codes to projections that read them."""
    if not recipe.by_codes:
        return
    for name, reader in _READERS.items():
        norm, kind = getattr(layer, name, None), replace.replaced(getattr(layer, name, layer))
        if kind is None or kind.kind != "rms_norm" or not hasattr(layer, reader):
            continue
        readers = tuple(child for child in getattr(layer, reader).children() if _is_fp8(child))
        if readers and getattr(norm, "weight", None) is not None and norm.weight.shape[0] % _MULTIPLE == 0:
            replace.change(norm, Recognized("fp8_norm", kind.options))
            norm.__dict__[READERS] = readers  # not as children


def experts_kind(module: nn.Module, recipe: Recipe) -> Recognized:
    """Return the replacement of a replaced expert layer.

    Raises:
        NotRecognized: It has biases, weights that lie otherwise, or sizes that codes cannot have.
    """
    kind = replace.replaced(module)
    if kind is None or kind.kind != "experts":
        raise NotRecognized("it was not replaced")
    options = dict(kind.options)
    if not recipe.by_codes:
        raise NotRecognized("experts have recipe 'block' only, with gradients of codes")
    if options["bias"] or options["transposed"] or not options["concatenated"]:
        raise NotRecognized("its weights have biases, are transposed or interleaved")
    if any(size % _MULTIPLE for weight in (module.gate_up_proj, module.down_proj) for size in weight.shape[1:]):
        raise NotRecognized(f"its sizes are no multiples of {_MULTIPLE}")
    return Recognized("fp8_experts", (("act", options["act"]),))
