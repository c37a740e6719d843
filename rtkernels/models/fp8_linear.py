"""Linear layers that multiply fp8 codes: recipes, codes of inputs, one product for several layers.

The q, k and v projections read the same tensor, and so do gate and up. A norm gives them codes directly
(``lazy_norm``). The codes of any other tensor are stored on the tensor object, where the next layer finds them.
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
from rtkernels.models.fp8_products import Codes
from rtkernels.models.lazy_norm import LazyNorm
from rtkernels.models.merged import Adjacent, adjacent, is_plain
from rtkernels.nn.fp8_linear import main_grad_of
from rtkernels.ops.quant.quantize_fp8 import BOTH
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling

RECIPES = ("block", "row", "tensor")
MULTIPLE = 16  # rows and columns of codes are multiples of this
BLOCK = 128  # rows and columns of a weight that share a scale
_KEPT = "_rtkernels_codes"
_quantize = BOTH.at_site()


class Recipe(NamedTuple):
    """Options of fp8 linear layers, for ``patch(fp8=...)``.

    Attributes:
        name: "block" (one scale per 128 activations and per 128 x 128 weights), "row" or "tensor".
        wgrad: "bf16" computes weight gradients from 16-bit numbers; norms and activations then do not write codes.
        pow2_scale: Round scales up to powers of two.
        save_weight: Do not keep weight codes from forward to backward; quantise the weights again. Saves memory; set
            automatically for FSDP2.
        save: "input" does not keep the codes of a gated MLP's input and of its gated values; they are recomputed from
            the norm's input and from gate and up, which are saved anyway. Applies with `fused_layers`. Default "codes".
        parts: Number of parts into which the rows of a gated MLP's backward pass are split, with `fused_layers`. Four
            parts lower a layer's peak memory by an eighth and cost one more copy of the codes of the gate and up
            gradient; the results are bitwise equal.
        skip: Names of modules to leave alone, or parts of names ("layers.0.", "down_proj").
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
        """True if norms and activations may write codes for layers of this recipe."""
        return self.name == "block" and self.wgrad == "fp8" and not self.pow2_scale


def check_recipe(fp8: bool | str | Recipe | None) -> Recipe | None:
    """Return the recipe given as ``patch(fp8=...)``, None if fp8 is off."""
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


def codes_of(x: Any, reader: nn.Module) -> Any:
    """Return the codes of x, by rows and transposed, for a layer that reads them; x itself under the compiler.

    The codes are cached on the tensor object for other layers. A layer that reads the same object again gets new ones:
    the tensor is an input that the caller keeps, and CUDA graphs and collectives write to such a tensor without
    counting a version. A graph is captured with a quantisation of its own, also if a warm-up cached codes.
    """
    if isinstance(x, LazyNorm):
        return x.codes()
    if is_dynamo_compiling() or not isinstance(x, Tensor) or x.dtype not in (torch.bfloat16, torch.float16):
        return x
    if is_sharded(x):
        return x
    both, version = torch.is_grad_enabled(), -1 if x.is_inference() else x._version
    kept = getattr(x, _KEPT, None)
    if kept is not None and kept[0] == (version, id(x)) and id(reader) not in kept[2]:
        if kept[1][2] is not None or not both:
            kept[2][id(reader)] = None
            return Codes(*kept[1], x)
    if both:
        quantized = products.quantized(_quantize, x.detach())
    else:
        quantized = (*rtkernels.quantize_fp8(x, granularity="group", scale_layout="column"), None, None)
    if version >= 0:  # not of an inference tensor, which counts no changes
        # Without x, which must not reference itself, and in types that torch.load accepts. A copy has another id.
        setattr(x, _KEPT, ((version, id(x)), tuple(quantized), {id(reader): None}))
    return Codes(*quantized, x)


def multiply(
    reader: nn.Module, x: Any, weight: Tensor, bias: Tensor | None, recipe: Recipe, **options: Any
) -> Tensor:  # fmt: skip
    """Return ``x @ weight.T + bias`` for a tensor, a lazy norm or codes with scales in columns, read by a layer."""
    if recipe.by_codes and not is_sharded(weight):
        x = codes_of(x, reader)
    elif isinstance(x, LazyNorm):
        x = x.tensor()
    return rtkernels.fp8_linear(
        x, weight, bias, recipe=recipe.name, scale_layout="column", wgrad=recipe.wgrad, pow2_scale=recipe.pow2_scale,
        save_weight=recipe.save_weight and options.get("weight_codes") is None, **options,
    )  # fmt: skip


def weight_maker(recipe: Recipe) -> Callable[[Tensor, bool], Any]:
    """Return a function that quantises a weight, with transposed codes on request."""

    def make(weight: Tensor, transposed: bool) -> Any:
        return rtkernels.fp8_weight(weight, recipe=recipe.name, pow2_scale=recipe.pow2_scale, transposed=transposed)

    return make


def _as_step(x: Any, linears: Sequence[nn.Module], matrix: Tensor, given: Any, recipe: Recipe) -> Tensor | None:
    """Return the product of x and the weights of layers, `matrix`, as one autograd node.

    None if the layers must use ``fp8_linear``: without gradients, if x needs none (the first layer of a model with
    frozen embeddings), if codes cannot be transposed, or if only some layers have a bias.
    """
    if is_dynamo_compiling() or not torch.is_grad_enabled() or not recipe.by_codes:
        return None
    shape, biases = getattr(x, "shape", ()), [m.bias for m in linears]
    if len(shape) < 2 or row_count(shape) == 0 or row_count(shape) % MULTIPLE or level():
        return None
    without = sum(bias is None for bias in biases)
    if without not in (0, len(biases)):
        return None
    bias = None if without else biases[0] if len(biases) == 1 else torch.cat(biases)
    codes = codes_of(x, linears[0])
    if getattr(codes, "q_t", None) is None or codes.y is None:
        return None
    # A single layer's matrix is its weight, which is no parameter if it is parametrized.
    weights = (matrix,) if len(linears) == 1 else (m._parameters["weight"] for m in linears)
    at = products.sites_of(matrix.shape)
    return products.linear(codes.y, bias, codes, matrix, given, recipe.save_weight and given is None, at, *weights)


def linear(module: nn.Linear, x: Any, recipe: Recipe) -> Tensor:
    """Return the result of a linear layer for a tensor or for codes."""
    weight = module.weight
    codes = module.codes_of("weight", weight, weight_maker(recipe)) if module._kept is not None else None
    main_grad = main_grad_of(weight)
    if main_grad is None and type(weight) in TENSOR_TYPES:
        result = _as_step(x, (module,), weight, codes, recipe)
        if result is not None:
            return result
    return multiply(module, x, weight, module.bias, recipe, main_grad=main_grad, weight_codes=codes)


class Merged(NamedTuple):
    """Adjacent weights of fp8 layers as one matrix, with its codes if they are kept, and the recipe."""

    matrix: Tensor
    codes: Any
    recipe: Recipe


def merged_weights(linears: Sequence[nn.Module]) -> Merged | None:
    """Return the weights of fp8 layers as one matrix, None if the layers must be called separately.

    The weights are adjacent and consist of blocks of 128 rows, so codes and scales are the same as for separate
    weights.
    """
    kind = replace.replaced(linears[0])
    if is_dynamo_compiling() or kind is None or kind.kind != "fp8_linear":
        return None
    recipe, same = dict(kind.options)["recipe"], type(linears[0])
    if not recipe.by_codes:
        return None
    if not all(is_plain(m, same) and m.out_features % BLOCK == 0 for m in linears):
        return None
    weights = [m._parameters["weight"] for m in linears]
    matrix = adjacent(weights)
    if matrix is None:
        return None
    codes = None
    if linears[0]._kept is not None:
        versions = tuple(w._version for w in weights)
        codes = linears[0].codes_of("merged", matrix, weight_maker(recipe), version=versions)
    return Merged(matrix, codes, recipe)


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of fp8 layers as columns of one tensor, None if the layers must be called separately."""
    weights = merged_weights(linears)
    if weights is None:
        return None
    result = _as_step(x, linears, weights.matrix, weights.codes, weights.recipe)
    if result is not None:
        return result
    biases = [m.bias for m in linears if m.bias is not None]
    if len(biases) not in (0, len(linears)):
        return None
    whole = Adjacent.apply(*(m.weight for m in linears)) if torch.is_grad_enabled() else weights.matrix
    bias = torch.cat(biases) if biases else None
    return multiply(linears[0], x, whole, bias, weights.recipe, weight_codes=weights.codes)
