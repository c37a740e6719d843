"""Modules of a model in fp8: which modules are replaced, and their forwards.

In a gated MLP, the activation writes codes for the down projection. Norms write codes for the projections that read
them. Expert layers permute tokens as codes. ``fp8_linear`` has the linear layers themselves.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import replace, served
from rtkernels.models.fp8_linear import (
    BLOCK,
    MULTIPLE,
    Recipe,
    codes_of,
    linear,
    merged,
    merged_weights,
    weight_maker,
)
from rtkernels.models.fp8_mlp import Saving, gated_mlp, gated_mlp_alone
from rtkernels.models.fp8_products import Codes
from rtkernels.models.lazy_norm import LazyNorm
from rtkernels.models.merged import has_watched_child, is_plain, is_watched
from rtkernels.models.recognize import NotRecognized, Recognized, autocasts, norm_weight
from rtkernels.models.reuse import glu_gradient, is_private, kept_by_hooks, may_hand_on, norm_and_input, stand_in
from rtkernels.nn.fp8_experts import E4M3, experts, group_ends, weight_codes
from rtkernels.nn.fp8_linear import KeepsCodes, main_grad_of
from rtkernels.ops.act import glu
from rtkernels.ops.moe.moe_index import moe_index, moe_rows
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.sharding import is_sharded
from rtkernels.runtime.torch_private import is_dynamo_compiling

_SMALLEST_GAIN = 600  # of n * k / (n + k); for smaller layers quantising costs more than the faster product saves
READERS = "_rtkernels_readers"


class Readers(tuple):
    """The projections that read a norm, not stored as its children: copying a norm alone must not copy their weights.

    If the whole model is copied, the copied norms get the copied readers.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> Readers:
        modules = islice((copied for copied in memo.values() if isinstance(copied, nn.Module)), 2)
        is_alone = len(list(modules)) < 2  # the norm itself is one
        return self if is_alone else Readers(copy.deepcopy(module, memo) for module in self)


# ---- linear layers --------------------------------------------------------------------------------------------------


def recognize(module: nn.Linear, recipe: Recipe, rows: int | None = None) -> Recognized:
    """Return the replacement of a linear layer; `rows` is the total of all layers that are merged with it.

    Raises:
        NotRecognized: It is too small to gain, or its sizes are unsupported.
    """
    n, k = module.out_features, module.in_features
    if n % MULTIPLE or k % MULTIPLE:
        raise NotRecognized(f"its sizes {n} x {k} are no multiples of {MULTIPLE}")
    n = rows or n
    if n * k / (n + k) < _SMALLEST_GAIN:
        raise NotRecognized(f"{n} x {k} is too small to gain from fp8")
    return Recognized("fp8_linear", (("recipe", recipe),))


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
        # Hooks of the readers (tensor parallelism, user hooks) need tensors.
        fits = fits and not any(is_watched(m) for m in self.__dict__.get(READERS, ()))
        weight = norm_weight(self)
        alike = weight is None or weight.dtype == getattr(hidden_states, "dtype", None)
        if not fits or not alike or is_dynamo_compiling() or autocasts(hidden_states):
            return plain(self, hidden_states, residual, with_input)
        options = getattr(self, eps), offset
        if with_input and may_hand_on(hidden_states, weight):
            y, hidden_states = norm_and_input(hidden_states, weight, *options, False)
            return LazyNorm(hidden_states, weight, *options, stands_for=y), hidden_states
        normed = LazyNorm(hidden_states, weight, *options, residual)
        if with_input:
            return normed, hidden_states
        return normed if residual is None else (normed, normed.sum)

    return forward


def _served_norm(original: type[nn.Module], eps: str, offset: float) -> Callable[..., Any]:
    plain, coded = (replace.forward_of(kind, original, eps=eps, offset=offset) for kind in ("rms_norm", "fp8_norm"))

    def forward(self, hidden_states, residual=None, with_input=False):
        as_it_is = served.is_as_it_is(hidden_states)
        return (plain if as_it_is else coded)(self, hidden_states, residual, with_input)

    return forward


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


class _GluCodes(torch.autograd.Function):
    """The codes of a gated activation, and a tensor without memory that stands for its result in the graph."""

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
    """Return ``glu(gate, up)`` as codes with scales in columns, differentiable if gate requires a gradient.

    With `private`, nothing else uses gate and up, and their gradients overwrite them.
    """
    if torch.is_grad_enabled() and gate.requires_grad:
        y, *codes = _differentiable_glu(gate, up, act, private and is_private(gate, up))
        return Codes(*codes, y)
    return rtkernels.glu_fp8(gate, up, act=act, scale_layout="column")


def _as_one_step(mlp: nn.Module, x: Any, residual: Tensor | None, act: str, recipe: Recipe) -> Tensor | None:
    """Return the result of a gated MLP computed as one autograd node; None if that is not possible."""
    if is_dynamo_compiling() or kept_by_hooks():
        return None
    gate, up, down = (mlp._modules[name] for name in ("gate_proj", "up_proj", "down_proj"))
    shape = getattr(x, "shape", ())
    if not _is_fp8(gate) or type(up) is not type(gate) or not is_plain(down, type(gate)):
        return None
    if any(m._parameters["bias"] is not None for m in (gate, up, down)):
        return None
    if len(shape) < 2 or row_count(shape) == 0 or row_count(shape) % MULTIPLE or level():
        return None
    gate_up = merged_weights((gate, up))
    if gate_up is None:
        return None
    grads = torch.is_grad_enabled()
    codes = codes_of(x, gate)
    if getattr(codes, "q_t" if grads else "q", None) is None or (grads and codes.y is None):
        return None
    if isinstance(x, LazyNorm):
        x.taken()
    weights = [m._parameters["weight"] for m in (gate, up, down)]
    down_codes = None
    if down._kept is not None:
        down_codes = down.codes_of("weight", weights[2], weight_maker(recipe))
    if not grads:
        return gated_mlp_alone(residual, weights[2], codes, gate_up.matrix, gate_up.codes, down_codes, act, x.dtype)
    saving = Saving(recipe.save_weight and gate_up.codes is None, recipe.save == "input", recipe.parts)
    norm = x.source() if saving.input and isinstance(x, LazyNorm) else None
    y, only = codes.y, [codes]
    del codes
    return gated_mlp(y, residual, *weights, only, gate_up.matrix, gate_up.codes, down_codes, act, saving, norm)


def _fp8_mlp(original: type[nn.Module], act: str, recipe: Recipe, separate: bool) -> Callable[..., Any]:
    own, called = original.forward, (*(("gate_proj", "up_proj") if separate else ("gate_up_proj",)), "down_proj")

    def forward(self, x, residual=None):
        if has_watched_child(self, called):
            y = own(self, x)
            return y if residual is None else residual + y
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
        if is_sharded(gate) or not _is_fp8(self.down_proj) or is_watched(self.down_proj):
            return self.down_proj(rtkernels.glu(gate, up, act=act))
        return linear(self.down_proj, glu_codes(gate, up, act, private), recipe)

    return forward


# ---- experts --------------------------------------------------------------------------------------------------------


_EXPERT_WEIGHTS = "gate_up_proj", "down_proj"


def _fp8_experts(original: type[nn.Module], act: str) -> Callable[..., Any]:
    own = original.forward

    def forward(self, hidden_states, top_k_index, top_k_weights):
        x, weights = hidden_states, [self._parameters[name] for name in _EXPERT_WEIGHTS]
        fits = x.dtype in (torch.bfloat16, torch.float16) and x.dim() == 2 and weights[0].dtype == x.dtype
        if not fits or has_watched_child(self):
            return own(self, hidden_states, top_k_index, top_k_weights)
        rows = max(moe_rows(top_k_index.numel(), 1, self.num_experts, BLOCK), BLOCK)
        index = moe_index(top_k_index, self.num_experts, multiple_of=BLOCK, rows=rows)
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
replace.register("served_norm", _served_norm)
replace.register("fp8_mlp", _fp8_mlp)
replace.register("fp8_experts", _fp8_experts, KeepsCodes)


def _is_fp8(module: nn.Module) -> bool:
    kind = replace.replaced(module)
    return kind is not None and kind.kind == "fp8_linear"


def _is_served(module: nn.Module) -> bool:
    return type(module) is served.ServedLinear


def replace_mlp(module: nn.Module, recipe: Recipe) -> None:
    """Let the activation of a replaced gated MLP write codes if its down projection reads them."""
    kind = replace.replaced(module)
    if recipe.by_codes and kind is not None and kind.kind == "mlp" and _is_fp8(module.down_proj):
        replace.change(module, Recognized("fp8_mlp", (*kind.options, ("recipe", recipe))))


# Norms of a decoder layer, and the child that reads their results.
_READERS = {"input_layernorm": "self_attn", "post_attention_layernorm": "mlp", "pre_feedforward_layernorm": "mlp"}


def replace_norms(layer: nn.Module, kind_of_readers: str = "fp8_norm") -> None:
    """Let the norms of a decoder layer write codes for their readers; "served_norm" if those are serving layers."""
    for name, reader in _READERS.items():
        norm, kind = getattr(layer, name, None), replace.replaced(getattr(layer, name, layer))
        weighted = kind is not None and dict(kind.options).get("weighted", True)
        if not weighted or kind.kind != "rms_norm" or not hasattr(layer, reader):
            continue
        reads = _is_served if kind_of_readers == "served_norm" else _is_fp8
        readers = Readers(child for child in getattr(layer, reader).children() if reads(child))
        if readers and getattr(norm, "weight", None) is not None and norm.weight.shape[0] % MULTIPLE == 0:
            replace.change(norm, Recognized(kind_of_readers, kind.options))
            norm.__dict__[READERS] = readers  # not registered as children


def replace_experts(module: nn.Module, recipe: Recipe) -> None:
    """Let a replaced expert layer multiply fp8 codes.

    Raises:
        NotRecognized: It has no gate, it has biases, a different weight layout, or unsupported sizes.
    """
    kind = replace.replaced(module)
    if kind is not None and kind.kind == "plain_experts":
        raise NotRecognized("its experts have no gate")
    if kind is not None and kind.kind == "limited_experts":
        raise NotRecognized("its experts clamp gate and up")
    if kind is None or kind.kind != "experts":
        raise NotRecognized("it was not replaced")
    options = dict(kind.options)
    if not recipe.by_codes:
        raise NotRecognized("experts have recipe 'block' only, with gradients of codes")
    if options["bias"] or options["transposed"] or not options["concatenated"]:
        raise NotRecognized("its weights have biases, are transposed or interleaved")
    if any(size % MULTIPLE for weight in (module.gate_up_proj, module.down_proj) for size in weight.shape[1:]):
        raise NotRecognized(f"its sizes are no multiples of {MULTIPLE}")
    replace.change(module, Recognized("fp8_experts", (("act", options["act"]),)))
