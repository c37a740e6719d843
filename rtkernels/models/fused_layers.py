"""Decoder layers with fewer launches: one op for sum and norm, one for q/k norm and rotation, one for q, k and v.

Such a layer needs a new forward, and a copy of transformers' code becomes outdated. So a module is replaced only if the
source of its class's forward (parsed, without annotations, decorators and docstring) is one that this code was written
for; the tables below have the hashes. If transformers changes a forward, the module is left alone and reported.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import decoding, fused_mla, quantized_linears, replace, reuse, served
from rtkernels.models import fp8 as quantized
from rtkernels.models.lazy import as_tensors
from rtkernels.models.merged import (
    collected,
    has_watched_child,
    is_watched,
    make_adjacent,
    merged,
    normed_heads,
    rotated_heads,
)
from rtkernels.models.recognize import NotRecognized, Recognized
from rtkernels.models.rope_view import is_attention, viewed
from rtkernels.models.rotations import rope_tables
from rtkernels.ops.attention import decode_heads, step_attention

Forward = Callable[..., Any]
_QKV = ("q_proj", "k_proj", "v_proj")
_NORMS = ("rms_norm", "fp8_norm", "served_norm")
_GATE_UP = ("gate_proj", "up_proj")
_PROJECTIONS = (*_GATE_UP, "down_proj")
_FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Since 5.23, transformers wraps the forward of every subclass of its layers in checkpointing, including ours.
_CHECKPOINTING = "transformers.modeling_layers"


class AttentionForm(NamedTuple):
    """Differences between attention forwards: where the window is, if q and k are normalised, scores capped, sinks."""

    window: str | None
    normed: bool
    capped: bool = False
    sinks: bool = False


# By hash of the forward: the order of its arguments, and what is done to a branch before it is added: nothing, it is
# scaled, or it is normalised.
LAYERS = {
    "1a8125909341e389": ("cached", ""),  # Llama, Mistral, Qwen2, Qwen3, their MoE, DeepSeek-V3, GLM, OLMoE, ...
    "d4699009e63a2518": ("positions first", ""),
    "bb8119d990e32de7": ("cached", "scaled"),
    "a6e4ee9acdf9615c": ("cached", ""),  # GPT-OSS, whose experts also return scores
    "eb03c623c021985a": ("positions first", "normed"),  # Gemma 2, Gemma 3
}
ATTENTIONS = {
    "b9c6a0ecf29f0cc8": AttentionForm(None, False),  # Llama, Granite, GLM, GLM4, Qwen2-MoE, Ernie 4.5
    "f51654a6b1d14463": AttentionForm("module", True),  # Qwen3, Qwen3-MoE
    "724c683fcbf9e3e3": AttentionForm("module", False),
    "2059eea546b068e1": AttentionForm("config", False),  # Mistral, Mixtral
    "6c04c8ec26bd1a71": AttentionForm("module", True),  # Gemma 3
    "4fc2323f2d8a8362": AttentionForm("module", False, capped=True),  # Gemma 2
    "704a17e0c56a55b7": AttentionForm("module", False, sinks=True),  # GPT-OSS
}


@cache
def form_of(forward: Forward) -> str:
    """Return the hash of a forward's source, "" if there is no source or another library wrapped it."""
    while getattr(forward, "__globals__", {}).get("__name__") == _CHECKPOINTING and hasattr(forward, "__wrapped__"):
        forward = forward.__wrapped__
    if hasattr(forward, "__wrapped__"):
        return ""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(forward))).body[0]
    except (OSError, TypeError, SyntaxError):
        return ""
    if not isinstance(function, ast.FunctionDef):
        return ""
    function.returns, function.decorator_list = None, []
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    if ast.get_docstring(function) is not None:
        function.body = function.body[1:]
    return hashlib.sha256(ast.unparse(function).encode()).hexdigest()[:16]


# ---- decoder layers -------------------------------------------------------------------------------------------------


def is_layer(module: nn.Module) -> bool:
    """Return True if a module may be a decoder layer: one of its children is an attention module."""
    return any(is_attention(child) for child in module.children())


def _layer_kind(module: nn.Module) -> Recognized:
    found = LAYERS.get(form_of(replace.original_of(type(module)).forward))
    if found is None:
        raise NotRecognized("its forward is none that is known here")
    order, branch = found
    norm = module.pre_feedforward_layernorm if branch == "normed" else module.post_attention_layernorm
    kind = replace.replaced(norm)
    if kind is None or kind.kind not in _NORMS:
        raise NotRecognized("the norm behind its attention was not replaced")
    return Recognized("fused_layer", (("order", order), ("branch", branch)))


def _is_fused(norm: nn.Module) -> bool:
    """Return True if a norm adds the residual itself; hooks of a norm see what its module would be called with."""
    kind = replace.replaced(norm)
    return kind is not None and kind.kind in _NORMS and not is_watched(norm)


def _layer(original: type[nn.Module], order: str, branch: str) -> Forward:
    scaled, normed_branch = branch == "scaled", branch == "normed"

    def first(self, hidden_states):
        if _is_fused(self.input_layernorm):
            return self.input_layernorm(hidden_states, with_input=True)
        return self.input_layernorm(hidden_states), hidden_states

    def rest(self, residual, mixed):
        if scaled:
            mixed = mixed * self.residual_multiplier
        norm = self.post_attention_layernorm
        if normed_branch:
            mixed, norm = as_tensors(norm(mixed)), self.pre_feedforward_layernorm
        if residual.dtype == mixed.dtype and _is_fused(norm):
            hidden_states, residual = norm(mixed, residual=residual)
        else:
            residual = residual + mixed
            hidden_states = norm(residual)
        kind = replace.replaced(self.mlp)
        if normed_branch:
            return residual + as_tensors(self.post_feedforward_layernorm(self.mlp(hidden_states)))
        adds = not scaled and kind is not None and kind.kind == "fp8_mlp" and not is_watched(self.mlp)
        if adds and residual.dtype == hidden_states.dtype:
            return self.mlp(hidden_states, residual=residual)
        hidden_states = self.mlp(hidden_states)
        hidden_states = hidden_states[0] if isinstance(hidden_states, tuple) else hidden_states
        return residual + (hidden_states * self.residual_multiplier if scaled else hidden_states)

    if order == "cached":

        def forward(
            self, hidden_states, attention_mask=None, position_ids=None, past_key_values=None, use_cache=False,
            position_embeddings=None, **kwargs,
        ):  # fmt: skip
            if decoding.is_step(hidden_states):
                given = position_embeddings, attention_mask, past_key_values
                result = decoding.layer(self, hidden_states, *given, _heads_in_step, branch, dict(kwargs))
                if result is not None:
                    return result
            normed, residual = first(self, hidden_states)
            mixed, _ = self.self_attn(
                hidden_states=normed, attention_mask=attention_mask,
                position_ids=position_ids, past_key_values=past_key_values, use_cache=use_cache,
                position_embeddings=position_embeddings, **kwargs,
            )  # fmt: skip
            return rest(self, residual, mixed)

    else:

        def forward(
            self, hidden_states, position_embeddings=None, attention_mask=None, position_ids=None,
            past_key_values=None, **kwargs,
        ):  # fmt: skip
            if decoding.is_step(hidden_states):
                given = position_embeddings, attention_mask, past_key_values
                result = decoding.layer(self, hidden_states, *given, _heads_in_step, branch, dict(kwargs))
                if result is not None:
                    return result
            normed, residual = first(self, hidden_states)
            mixed, _ = self.self_attn(
                hidden_states=normed, position_embeddings=position_embeddings,
                attention_mask=attention_mask, position_ids=position_ids, past_key_values=past_key_values, **kwargs,
            )  # fmt: skip
            return rest(self, residual, mixed)

    return forward


# ---- attention ------------------------------------------------------------------------------------------------------


_FUSED_ROTATIONS = ("halves", "half tables", "neighbours", "neighbour tables")


def _attention_kind(module: nn.Module) -> Recognized:
    form = ATTENTIONS.get(form_of(replace.original_of(type(module)).forward))
    if form is None:
        raise NotRecognized("its forward is none that is known here")
    kind = replace.replaced(module)
    names = dict(kind.options)["names"] if kind is not None and kind.kind == "rope" else ()
    if len(names) != 1:
        raise NotRecognized("its rotation was not replaced")
    if names[0][1][0] not in _FUSED_ROTATIONS or "inverse" in names[0][1]:
        raise NotRecognized("its rotation is none that norms and products are fused with")
    norm: tuple[str, float] | None = None
    if form.normed:
        kinds = [replace.replaced(child) for child in (module.q_norm, module.k_norm)]
        if kinds[0] is None or kinds[0].kind != "rms_norm" or kinds[0] != kinds[1]:
            raise NotRecognized("its norms of q and k were not replaced")
        options = dict(kinds[0].options)
        norm = options["eps"], options["offset"]
        if getattr(module.q_norm, norm[0]) != getattr(module.k_norm, norm[0]):
            raise NotRecognized("its norms of q and k differ")
    return Recognized(
        "fused_attention",
        (
            ("names", names), ("norm", norm), ("window", form.window), ("capped", form.capped), ("sinks", form.sinks),
        ),
    )  # fmt: skip


def _product(x: Any, linears: tuple[nn.Module, ...]) -> Tensor | None:
    """Return the merged product of linear layers, of 16 bits or codes, None if they must be called separately."""
    for multiply in (merged, quantized.merged, served.merged, quantized_linears.merged):
        result = multiply(x, linears)
        if result is not None:
            return result
    return None


def _heads(
    self: nn.Module, x: Any, tables: Any, form: tuple[str, ...], norm: tuple[str, float] | None
) -> tuple[Tensor, ...] | None:
    """Return q, k and v ``[batch, tokens, heads, size]`` with q and k rotated; None if separate steps are needed."""
    if not _is_rotated_here(self, x, tables, form, norm):
        return None
    qkv = _product(x, (self.q_proj, self.k_proj, self.v_proj))
    return None if qkv is None else _rotated(self, qkv, tables, form, norm)


def _heads_in_step(
    self: nn.Module, qkv: Tensor, tables: Any, mask: Any, options: dict[str, Any], cache: Any
) -> Tensor | tuple[Tensor, Tensor, Tensor] | None:
    """Return the attention of a decoding step, or q with all keys and values, ``[batch, heads, length, size]``."""
    (_, form), norm, size = options["names"][0], options["norm"], self.head_dim
    if not _is_rotated_here(self, qkv, tables, form, norm):
        return None
    layer, batch = cache.layers[self.layer_idx], qkv.shape[0]
    if not decoding.writes_cache(layer, size):
        q, k, v = (t.transpose(1, 2) for t in _rotated(self, qkv, tables, form, norm))
        return q, *cache.update(k, v, self.layer_idx)
    cos, sin, rotation = rope_tables(size, *tables, form[0])
    weights, eps, offset = (None, None), 0.0, 0.0
    if norm is not None:
        weights, eps, offset = (self.q_norm.weight, self.k_norm.weight), getattr(self.q_norm, norm[0]), norm[1]
    angles = [t[:, 0].expand(batch, -1) for t in (cos, sin)]
    given = qkv.view(batch, -1), *weights, *angles
    slots, rotated = layer.lengths.slots, (rotation["rotary"] or size, rotation["interleaved"])
    if decoding.attends(layer, mask, self.q_proj.weight.shape[0] // size):
        softcap = self.attn_logit_softcapping if options["capped"] else None
        sinks = self.sinks if options["sinks"] else None
        constant = all(t.is_contiguous() for t in angles)  # others are copied, so a kernel writes them
        return step_attention.FORWARD.call(
            *given, None, slots, layer.lengths.seen, sinks, layer.k, layer.v, *rotated, constant, float(eps),
            float(offset), float(self.scaling), float(softcap or 0.0),
        )  # fmt: skip
    q = decode_heads.HEADS.call(*given, slots, layer.k, layer.v, *rotated, float(eps), float(offset))
    return q.unsqueeze(2), layer.keys, layer.values


def _is_rotated_here(
    self: nn.Module, x: Any, tables: Any, form: tuple[str, ...], norm: tuple[str, float] | None
) -> bool:
    """Return True if our op computes the rotation of a call, and its norms have not changed and have no hooks."""
    cos, size = tables[0], self.head_dim
    rotary = cos.shape[-1] * (2 if form[0] == "half tables" else 1)
    if len(x.shape) != 3 or x.dtype not in _FLOATS or cos.dim() != 3 or cos.dtype not in (x.dtype, torch.float32):
        return False
    if rotary != size and not ("partial" in form and rotary < size):
        return False
    return norm is None or _has_norms(self, norm)


def _has_norms(self: nn.Module, norm: tuple[str, float]) -> bool:
    """Return True if the norms of q and k are those that an attention was fused with, and nobody observes them."""
    expected = Recognized("rms_norm", (("eps", norm[0]), ("offset", norm[1])))
    for child in (self.q_norm, self.k_norm):
        if replace.replaced(child) != expected or is_watched(child):
            return False
    return getattr(self.q_norm, norm[0]) == getattr(self.k_norm, norm[0])


def _rotated(
    self: nn.Module, qkv: Tensor, tables: Any, form: tuple[str, ...], norm: tuple[str, float] | None
) -> tuple[Tensor, ...]:
    """Return the heads of a merged product, q and k normalised and rotated."""
    (cos, sin), size = tables, self.head_dim
    counts = self.q_proj.weight.shape[0] // size, self.k_proj.weight.shape[0] // size
    if norm is None:
        return rotated_heads(qkv, cos, sin, counts, form[0])
    cos, sin, options = rope_tables(size, cos, sin, form[0])
    weights, eps = (self.q_norm.weight, self.k_norm.weight), getattr(self.q_norm, norm[0])
    if torch.is_grad_enabled():
        return normed_heads(qkv, *weights, cos, sin, counts, *options.values(), eps, norm[1])
    return rtkernels.qk_norm_rope(
        qkv, *weights, cos, sin, q_heads=counts[0], kv_heads=counts[1], head_order="plain", layout="bshd", eps=eps,
        offset=norm[1], **options,
    )  # fmt: skip


def _attention(
    original: type[nn.Module], names: Any, norm: tuple[str, float] | None, window: str | None, capped: bool = False,
    sinks: bool = False,
) -> Forward:  # fmt: skip
    separate, file, (_, form) = viewed(original.forward, dict(names)), original.forward.__globals__, names[0]
    functions, eager = file["ALL_ATTENTION_FUNCTIONS"], file["eager_attention_forward"]

    def forward(
        self, hidden_states, position_embeddings=None, attention_mask=None, past_key_values=None, **kwargs
    ):  # fmt: skip
        heads = _heads(self, hidden_states, position_embeddings, form, norm)
        if heads is None:
            return separate(self, hidden_states, position_embeddings, attention_mask, past_key_values, **kwargs)
        q, k, v = (t.transpose(1, 2) for t in heads)
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        if window is not None:
            kwargs["sliding_window"] = (
                self.sliding_window if window == "module" else getattr(self.config, "sliding_window", None)
            )
        if capped:
            kwargs["softcap"] = self.attn_logit_softcapping
        if sinks:
            kwargs["s_aux"] = self.sinks
        attend = functions.get_interface(self.config._attn_implementation, eager)
        dropout = self.attention_dropout if self.training else 0.0
        mixed, weights = attend(self, q, k, v, attention_mask, dropout=dropout, scaling=self.scaling, **kwargs)
        return self.o_proj(mixed.reshape(*hidden_states.shape[:-1], -1).contiguous()), weights

    return forward


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


def _mlp(original: type[nn.Module], act: str, separate: bool) -> Forward:
    own = original.forward

    def forward(self, x):
        if x.dtype not in _FLOATS or has_watched_child(self, _PROJECTIONS):
            return own(self, x)
        both = _product(x, (self.gate_proj, self.up_proj))
        if both is None:
            return self.down_proj(rtkernels.glu(self.gate_proj(x), self.up_proj(x), act=act))
        result = served.gated(self.down_proj, both, act)
        if result is not None:
            return result
        return reuse.project(self.down_proj, reuse.glu(both, act=act))

    return forward


replace.register("fused_layer", _layer)
replace.register("fused_attention", _attention)
replace.register("fused_mlp", _mlp)


def rows_together(model: nn.Module) -> dict[nn.Module, int]:
    """Map each linear layer that may be merged with others to the total rows of the merged product."""
    found = {}
    for module in model.modules():
        for names in (_QKV, _GATE_UP):
            linears = [module._modules.get(name) for name in names]
            if all(isinstance(linear, nn.Linear) for linear in linears):
                total = sum(linear.out_features for linear in linears)
                found |= dict.fromkeys(linears, total)
    return found


def _put_together(module: nn.Module, names: tuple[str, ...]) -> None:
    """Make the weights of linear layers that read the same tensor adjacent in memory."""
    linears = [getattr(module, name) for name in names]
    make_adjacent(linears)
    served.make_adjacent(linears)
    quantized_linears.make_adjacent(linears)


def fuse(model: nn.Module, record: Callable[[str, str, nn.Module, str | None], None]) -> None:
    """Fuse the layers of a model with replaced norms, rotations and MLPs; call `record` for every layer examined."""
    modules = list(model.named_modules())
    collected.clear()
    for name, module in modules:
        kind = replace.replaced(module)
        try:
            if is_layer(module):
                replace.change(module, _layer_kind(module))
            elif fused_mla.is_latent(module):
                replace.change(module, fused_mla.kind_of(module, form_of))
            elif is_attention(module):
                replace.change(module, _attention_kind(module))
                _put_together(module, _QKV)
            elif kind is not None and kind.kind == "mlp" and dict(kind.options)["separate"]:
                replace.change(module, Recognized("fused_mlp", kind.options))
                _put_together(module, _GATE_UP)
            elif kind is not None and kind.kind == "fp8_mlp" and dict(kind.options)["separate"]:
                _put_together(module, _GATE_UP)  # its forward merges what it can
            else:
                continue
        except NotRecognized as error:
            record("fused", name, module, str(error))
        else:
            record("fused", name, module, None)
