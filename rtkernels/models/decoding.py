"""Decoder layers in decoding steps of ``generate()``: norms, gate and residual sums inside of the products.

``generation.step`` opens a context around the model's forward. Inside of it, fused layers with few rows run
``layer`` instead of their modules one by one: norm and q, k, v are one launch, so are rotation, cache and attention,
the output projection with its residual sum, norm with gate and up, and down with its sum. No kernel of a step writes
weights, so these products load them before the previous kernel has ended. For more rows, products are cuBLAS's, with
norms and gates of their own (unless ``decode_linear.serves_many``, and for codes ``serves_many_codes``); residual sums
stay inside. What a layer cannot do here runs as usual, and the report says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import rtkernels
from rtkernels.models import attention as attentions
from rtkernels.models import decode_experts, quantized_linears, replace, served
from rtkernels.models.lazy import as_tensors
from rtkernels.models.merged import adjacent, has_watched_child, is_plain, is_watched
from rtkernels.models.probe import Recognized, positional
from rtkernels.nn.quantized_linear import QuantizedLinear
from rtkernels.ops.attention import step_attention
from rtkernels.ops.attention.decode_heads import MAX_WIDTH
from rtkernels.ops.gemm import decode_linear
from rtkernels.ops.norm import step_norm
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import row_count
from rtkernels.runtime.operator.kinds import meta_of

MAX_ROWS = 64  # of a step; docs/decisions/gemm.md has the measurements
OWN_ROWS = 8  # up to which products are those of `decode_linear`
_HALVES = (torch.bfloat16, torch.float16)
_NORMS = ("rms_norm", "served_norm")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_of_thread = threading.local()


@contextmanager
def steps(report: Any, tables: Tables | None = None) -> Iterator[None]:
    """Within this context, the model runs a decoding step.

    Args:
        report: The model's ``PatchReport``, or None.
        tables: Angles of rotary embeddings, if all positions are below their limit.
    """
    before = getattr(_of_thread, "report", None), getattr(_of_thread, "tables", None)
    _of_thread.report, _of_thread.tables = (report,), tables
    try:
        yield
    finally:
        _of_thread.report, _of_thread.tables = before


def is_step(x: Any) -> bool:
    """Return True for the few rows of a decoding step."""
    if getattr(_of_thread, "report", None) is None or not isinstance(x, Tensor) or x.dtype not in _HALVES:
        return False
    return 0 < row_count(x.shape) <= MAX_ROWS and not torch.is_grad_enabled() and not level()


def _record(module: nn.Module, reason: str | None) -> None:
    (report,) = _of_thread.report
    if report is not None:
        report.in_steps[f"layer {getattr(module.self_attn, 'layer_idx', id(module))}"] = reason


class Tables:
    """Cosines and sines of all positions below a limit, as the model's own rotary embeddings compute them.

    A step reads its rows in one launch; computing them takes nine.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._found: dict[Hashable, Tensor] = {}

    def rows(
        self, own: Callable[..., Any], key: Hashable, positions: Tensor, args: tuple[Any, ...], named: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """Return ``own(positions, *args, **named)`` for positions ``[batch, 1]``."""
        if key not in self._found:
            if positions.is_cuda and torch.cuda.is_current_stream_capturing():
                return own(positions, *args, **named)
            every = torch.arange(self.limit, dtype=torch.int64, device=positions.device)[None]
            self._found[key] = torch.cat(own(every, *args, **named))
        cos, sin = self._found[key].index_select(1, positions.view(-1)).unsqueeze(2)
        return cos, sin

    def __len__(self) -> int:
        return len(self._found)


_STATIC_ROPE = {"default", "linear", "llama3", "yarn"}  # their angles depend on the position only


def _rotary(original: type[nn.Module]) -> Callable[..., Any]:
    own = original.forward

    def forward(self, x, position_ids, *args, **named):
        tables = getattr(_of_thread, "tables", None)
        if tables is None or position_ids.dim() != 2 or position_ids.shape[1] != 1:
            return own(self, x, position_ids, *args, **named)
        return tables.rows(partial(own, self, x), (id(self), x.dtype, args, *named.items()), position_ids, args, named)

    return forward


replace.register("decode_rotary", _rotary)


def replace_rotary(model: nn.Module) -> None:
    """Let the rotary embeddings of a model read tables in decoding steps."""
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        kinds = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
        known = (
            positional(type(module).forward)[:3] == ["self", "x", "position_ids"] if kinds <= _STATIC_ROPE else False
        )
        if known and not module._parameters and not module._modules and replace.replaced(module) is None:
            replace.replace(module, Recognized("decode_rotary", ()))


class _Unsupported(Exception):
    """A layer must run as usual."""


class _Matrix(NamedTuple):
    """Weights of linear layers as one matrix. `constant`: no kernel that may still be running writes them."""

    weight: Tensor
    scale: Tensor | None
    global_scale: Tensor | None
    packed: str | None
    bias: Tensor | None
    constant: bool


def _matrix(x: Tensor, linears: Sequence[nn.Module]) -> _Matrix:
    """Return the weights, scales and biases of linear layers as one matrix."""
    codes, scale = None, None
    watched = any(is_watched(linear) for linear in linears)
    if not watched and all(_is_of(linear, QuantizedLinear) for linear in linears):
        codes = quantized_linears.codes_of(linears)
        if isinstance(codes, str):
            raise _Unsupported(codes)
    elif not watched and all(_is_of(linear, served.ServedLinear) for linear in linears):
        scale = adjacent([linear.weight_scale_inv for linear in linears])
        if scale is None or any(linear.out_features % served.BLOCK for linear in linears[:-1]):
            raise _Unsupported("scales of its projections are not adjacent in memory")
    elif not all(_is_linear(linear) and linear.weight.dtype == x.dtype for linear in linears):
        raise _Unsupported("a projection is neither a plain linear layer nor one with weights of codes")
    if codes is None:
        weight = adjacent([linear.weight for linear in linears])
        if weight is None:
            raise _Unsupported("weights of its projections are not adjacent in memory")
        codes = quantized_linears.Codes(weight, scale, None, None)
    rows = row_count(x.shape)
    if codes.scale is not None and rows > OWN_ROWS:
        if scale is not None and rows > served.AS_IT_IS:
            raise _Unsupported(f"more than {served.AS_IT_IS} rows: products that quantise them are faster")
        given = rows, x.dtype, codes.weight, codes.scale, codes.packed, codes.global_scale
        if not decode_linear.serves_many_codes(*given):
            raise _Unsupported(f"more than {OWN_ROWS} rows, and weights of codes")
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise _Unsupported("some of its projections have a bias, others have none")
    bias = biases[0] if len(biases) == 1 else None
    if len(biases) > 1 and (bias := adjacent([b.unsqueeze(1) for b in biases])) is not None:
        bias = bias.squeeze(1)
    copied = bias is None and bool(biases)
    return _Matrix(*codes, torch.cat(biases) if copied else bias, not copied)


def _is_of(linear: nn.Module, kind: type[nn.Module]) -> bool:
    return replace.original_of(type(linear)) is kind


def _is_linear(linear: nn.Module) -> bool:
    """Return True for a plain linear layer, or a head that is one outside of training."""
    kind = replace.replaced(linear)
    if kind is not None and kind.kind in ("head", "decode_head") and replace.original_of(type(linear)) is nn.Linear:
        return type(linear.weight) in (Tensor, nn.Parameter)
    return is_plain(linear)


def product(
    x: Tensor, linears: Sequence[nn.Module], norm: nn.Module | None = None, act: str | None = None,
    residual: Tensor | None = None, factor: float = 1.0,
) -> Tensor:  # fmt: skip
    """Return ``linears(norm(x))``, gated if `act` is given, times `factor`, plus the residual.

    Raises:
        _Unsupported: The kernel does not compute it.
    """
    m = _matrix(x, linears)
    gated, gain, eps, offset, constant = act is not None, None, 0.0, 0.0, m.constant
    many = row_count(x.shape) > OWN_ROWS
    if many and m.scale is None and not decode_linear.serves_many(x, m.weight, gated, norm is not None):
        return _by_blas(x, m.weight, m.bias, norm, act, residual, factor)
    if x.is_cuda and not many:
        reason = decode_linear.unsupported(x, m.weight, m.scale, m.packed, gated, norm is not None, m.global_scale)
        if reason is not None:
            raise _Unsupported(f"a product of {x.shape[-1]} x {m.weight.shape[0]}: {reason}")
    if norm is not None:
        gain, eps, offset = norm.weight, *_numbers(norm)
        constant = constant and gain.data_ptr() % 16 == 0  # else it is copied
    return decode_linear.FORWARD.call(
        x, m.weight, m.scale, m.bias, residual, gain, m.global_scale, m.packed, act, gated, constant, eps, offset,
        float(factor),
    )  # fmt: skip


def _by_blas(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm: nn.Module | None, act: str | None, residual: Tensor | None,
    factor: float,
) -> Tensor:  # fmt: skip
    """Return the same as :func:`product`, for so many rows that cuBLAS reads the weights faster."""
    if norm is not None:
        eps, offset = _numbers(norm)
        x = rtkernels.rms_norm(x, norm.weight, eps=eps, offset=offset)
    rows = x.reshape(-1, x.shape[-1])
    if residual is not None and bias is None and act is None:
        result = torch.addmm(residual.reshape(-1, weight.shape[0]), rows, weight.t(), alpha=factor)
    else:
        result = nn.functional.linear(rows, weight, bias)
        if act is not None:
            result = rtkernels.glu(result, act=act)
        if residual is not None:
            result = torch.add(residual.reshape(result.shape), result, alpha=factor)
        elif factor != 1.0:
            result = result * factor
    return result.view(*x.shape[:-1], result.shape[-1])


def _numbers(norm: nn.Module) -> tuple[float, float]:
    """Return the epsilon of a replaced norm, and what is added to its weight."""
    options = dict(replace.replaced(norm).options)
    return float(getattr(norm, options["eps"])), float(options["offset"])


def _normed_sum(x: Tensor, norm: nn.Module, residual: Tensor) -> Tensor:
    """Return ``residual + norm(x)``."""
    return step_norm.FORWARD.call(x, norm.weight, residual, *_numbers(norm))


def _check_norm(norm: nn.Module, x: Tensor) -> None:
    kind = replace.replaced(norm)
    if kind is None or kind.kind not in _NORMS or is_watched(norm):
        raise _Unsupported("a norm was not replaced, or has hooks")
    unweighted = not dict(kind.options).get("weighted", True)
    if unweighted or getattr(norm, "weight", None) is None or norm.weight.dtype != x.dtype:
        raise _Unsupported("a norm has no weight, or one of another dtype")


def layer(
    module: nn.Module, x: Tensor, tables: Any, mask: Any, cache: Any, heads_of: Callable[..., Any], branch: str,
    kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """Return the result of a decoder layer, None if it must run as usual.

    `heads_of(attention, qkv, tables, mask, options, cache)` writes to the cache and returns the result of the
    attention, or q with all keys and values, or None. `branch`: what happens to a branch before it is added: nothing
    (""), it is "scaled", or "normed".
    """
    try:
        result, reason = _layer(module, x, tables, mask, cache, heads_of, branch, kwargs)
    except _Unsupported as found:
        result, reason = None, str(found)
    _record(module, reason)
    return result


def _layer(module, x, tables, mask, cache, heads_of, branch, kwargs) -> tuple[Tensor, str | None]:
    """Return the result of a layer, and why its MLP ran as usual, None if it did not."""
    attention, mlp, normed = module.self_attn, module.mlp, branch == "normed"
    kinds = [replace.replaced(child) for child in (attention, mlp)]
    if kinds[0] is None or kinds[0].kind != "fused_attention":
        raise _Unsupported("its attention is not fused")
    if any(is_watched(child) for child in (attention, attention.o_proj)):
        raise _Unsupported("a part of it has hooks")
    first, second = module.input_layernorm, module.post_attention_layernorm
    norms = (first, second, module.pre_feedforward_layernorm, module.post_feedforward_layernorm) if normed else (first,)
    for norm in norms:
        _check_norm(norm, x)
    _matrix(x, (attention.o_proj,))  # before anything is written to the cache
    if cache is None or x.dim() != 3 or x.shape[1] != 1:
        raise _Unsupported("it has no cache, or several tokens of a sequence")
    factor = module.residual_multiplier if branch == "scaled" else 1.0
    why = _why_not_fused(mlp, kinds[1], norms[2] if normed else second, x)
    options = dict(kinds[0].options)
    qkv = product(x, [attention._modules[name] for name in _QKV], first)
    mixed = heads_of(attention, qkv, tables, mask, options, cache)
    if mixed is None:
        raise _Unsupported("its rotation is of another form")
    if not isinstance(mixed, Tensor):
        if options["capped"]:
            kwargs["softcap"] = attention.attn_logit_softcapping
        if options["sinks"]:
            kwargs["s_aux"] = attention.sinks
        mixed, _ = attentions.attention_forward(attention, *mixed, mask, scaling=attention.scaling, **kwargs)
    mixed = mixed.reshape(*x.shape[:-1], -1)

    def added(y: Tensor, linear: nn.Module, x: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is not None:
            return _normed_sum(product(y, (linear,)), norm, x)
        return product(y, (linear,), residual=x, factor=factor)

    x = added(mixed, attention.o_proj, x, second if normed else None)
    before, behind = (norms[2], norms[3]) if normed else (second, None)
    if why is None:
        gated = product(x, [mlp._modules[name] for name in _GATE_UP], before, act=dict(kinds[1].options)["act"])
        return added(gated, mlp.down_proj, x, behind), None
    if not normed and factor == 1.0 and (why := _why_not_experts(mlp, second, x, why)) is None:
        return decode_experts.call(mlp, x, second.weight, *_numbers(second)), None
    y = mlp(before(x))
    y = y[0] if isinstance(y, tuple) else y  # GPT-OSS's also returns scores
    if normed:
        return _normed_sum(as_tensors(y), behind, x), why
    return x + (y if factor == 1.0 else y * factor), why


def _why_not_fused(mlp: nn.Module, kind: Recognized | None, norm: nn.Module, x: Tensor) -> str | None:
    """Return why an MLP runs as usual behind a fused attention, None if its products have norm and sum inside."""
    if kind is None or kind.kind != "fused_mlp":
        return "its MLP is not one with gate_proj, up_proj and down_proj"
    try:
        if is_watched(mlp) or is_watched(mlp.down_proj) or has_watched_child(mlp, (*_GATE_UP, "down_proj")):
            raise _Unsupported("its MLP has hooks")
        _check_norm(norm, x)
        for linears in ((mlp.down_proj,), [mlp._modules[name] for name in _GATE_UP]):
            _matrix(x, linears)
    except _Unsupported as found:
        return str(found)
    return None


def _why_not_experts(mlp: nn.Module, norm: nn.Module, x: Tensor, why: str) -> str | None:
    """Return why an MLP that is not fused is no expert layer of few launches either, None if it is."""
    if "experts" not in mlp._modules:
        return why
    try:
        _check_norm(norm, x)
    except _Unsupported as found:
        return str(found)
    return decode_experts.unsupported(mlp, x)


def writes_cache(layer: Any, size: int) -> bool:
    """Return True if one kernel can write the keys and values of a step to a layer of the cache."""
    return getattr(layer, "by_op", False) and size <= MAX_WIDTH and layer.k.shape[3] == layer.v.shape[3] == size


def attends(layer: Any, mask: Any, q_heads: int) -> bool:
    """Return True if one kernel can also compute the attention of a step over a layer of the cache."""
    if not isinstance(mask, Tensor) or mask.data_ptr() != layer.lengths.seen.data_ptr():
        return False
    k, v = meta_of(layer.k), meta_of(layer.v)
    return step_attention.unsupported(q_heads, k, v, layer.k.get_device()) is None


def head(module: nn.Module, x: Any) -> Tensor | None:
    """Return the logits of a step, None if the head must compute them as usual."""
    if not is_step(x) or row_count(x.shape) > OWN_ROWS or is_watched(module):
        return None
    try:
        return product(x, (module,))
    except _Unsupported:
        return None


def _head(original: type[nn.Module]) -> Callable[..., Any]:
    own = original.forward

    def forward(self, x):
        logits = head(self, x)
        return own(self, x) if logits is None else logits

    return forward


replace.register("decode_head", _head)


def replace_head(model: nn.Module) -> None:
    """Let the head of a model compute with the kernel for few rows in decoding steps."""
    found = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if type(found) in (nn.Linear, served.ServedLinear, QuantizedLinear) and "forward" not in found.__dict__:
        replace.replace(found, Recognized("decode_head", ()))
