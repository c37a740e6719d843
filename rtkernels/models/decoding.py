"""Decoder layers in decoding steps of ``generate()``: norms, gate and residual sums inside of the products.

``generation.step`` opens a context around the model's forward. Inside of it, fused layers with few rows run
``layer`` instead of their modules one by one: norm and q, k, v are one launch, so are the output projection with its
residual sum, norm with gate and up, and down with its sum. No kernel of a step writes weights, so these products load
them before the previous kernel has ended. What a layer cannot do here runs as usual, and the report says why.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels.models import attention as attentions
from rtkernels.models import replace, served
from rtkernels.models.merged import adjacent, is_plain, is_watched
from rtkernels.models.probe import Recognized
from rtkernels.ops.attention.decode_heads import MAX_WIDTH
from rtkernels.ops.gemm import decode_linear
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import row_count

MAX_ROWS = 8  # of a step; docs/decisions/gemm.md has the measurements
_HALVES = (torch.bfloat16, torch.float16)
_NORMS = ("rms_norm", "served_norm")
_QKV, _GATE_UP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
_of_thread = threading.local()


@contextmanager
def steps(report: Any) -> Iterator[None]:
    """Within this context, the model runs a decoding step; `report`: its ``PatchReport``, or None."""
    before = getattr(_of_thread, "report", None)
    _of_thread.report = (report,)
    try:
        yield
    finally:
        _of_thread.report = before


def is_step(x: Any) -> bool:
    """Return True for the few rows of a decoding step."""
    if getattr(_of_thread, "report", None) is None or not isinstance(x, Tensor) or x.dtype not in _HALVES:
        return False
    return 0 < row_count(x.shape) <= MAX_ROWS and not torch.is_grad_enabled() and not level()


def _record(module: nn.Module, reason: str | None) -> None:
    (report,) = _of_thread.report
    if report is not None:
        report.in_steps[f"layer {getattr(module.self_attn, 'layer_idx', id(module))}"] = reason


class _Unsupported(Exception):
    """A layer must run as usual."""


def _matrix(x: Tensor, linears: Sequence[nn.Module]) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the weights of linear layers as one matrix, its scales and biases."""
    weights, scale = [linear.weight for linear in linears], None
    if all(_is_served(linear) and not is_watched(linear) for linear in linears):
        scale = adjacent([linear.weight_scale_inv for linear in linears])
        if scale is None or any(linear.out_features % served.BLOCK for linear in linears[:-1]):
            raise _Unsupported("scales of its projections are not adjacent in memory")
    elif not all(_is_linear(linear) and linear.weight.dtype == x.dtype for linear in linears):
        raise _Unsupported("a projection is neither a plain linear layer nor one of serve_fp8")
    weight = adjacent(weights)
    if weight is None:
        raise _Unsupported("weights of its projections are not adjacent in memory")
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        raise _Unsupported("some of its projections have a bias, others have none")
    bias = None if not biases else biases[0] if len(biases) == 1 else torch.cat(biases)
    return weight, scale, bias


def _is_served(linear: nn.Module) -> bool:
    return replace.original_of(type(linear)) is served.ServedLinear


def _is_linear(linear: nn.Module) -> bool:
    """Return True for a plain linear layer, or a head that is one outside of training."""
    kind = replace.replaced(linear)
    if kind is not None and kind.kind in ("head", "decode_head") and replace.original_of(type(linear)) is nn.Linear:
        return type(linear.weight) in (Tensor, nn.Parameter)
    return is_plain(linear)


def product(
    x: Tensor, linears: Sequence[nn.Module], norm: nn.Module | None = None, act: str | None = None,
    residual: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``linears(norm(x))``, gated if `act` is given, plus the residual.

    Raises:
        _Unsupported: The kernel does not compute it.
    """
    weight, scale, bias = _matrix(x, linears)
    if x.is_cuda and (reason := decode_linear.unsupported(x, weight, scale, gated=act is not None)) is not None:
        raise _Unsupported(f"a product of {x.shape[-1]} x {weight.shape[0]}: {reason}")
    gain, eps, offset = None, 0.0, 0.0
    if norm is not None:
        options = dict(replace.replaced(norm).options)
        gain, eps, offset = norm.weight, getattr(norm, options["eps"]), options["offset"]
    return decode_linear.FORWARD.call(
        x, weight, scale, bias, residual, gain, None, act, act is not None, True, float(eps), float(offset)
    )


def _check_norm(norm: nn.Module, x: Tensor) -> None:
    kind = replace.replaced(norm)
    if kind is None or kind.kind not in _NORMS or is_watched(norm):
        raise _Unsupported("a norm was not replaced, or has hooks")
    if getattr(norm, "weight", None) is None or norm.weight.dtype != x.dtype:
        raise _Unsupported("a norm has no weight, or one of another dtype")


def layer(
    module: nn.Module, x: Tensor, tables: Any, mask: Any, cache: Any, heads_of: Callable[..., Any],
    kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """Return the result of a decoder layer whose branches are added as they are; None if it must run as usual.

    `heads_of(attention, qkv, tables, options, cache)` writes to the cache and returns q with all keys and values, or
    None.
    """
    reason = None
    try:
        return _layer(module, x, tables, mask, cache, heads_of, kwargs)
    except _Unsupported as found:
        reason = str(found)
    finally:
        _record(module, reason)
    return None


def _layer(module, x, tables, mask, cache, heads_of, kwargs) -> Tensor:
    attention, mlp = module.self_attn, module.mlp
    kinds = [replace.replaced(child) for child in (attention, mlp)]
    if kinds[0] is None or kinds[0].kind != "fused_attention" or kinds[1] is None or kinds[1].kind != "fused_mlp":
        raise _Unsupported("its attention or MLP is not fused")
    if any(is_watched(child) for child in (attention, mlp, attention.o_proj, mlp.down_proj)):
        raise _Unsupported("a part of it has hooks")
    norms = module.input_layernorm, module.post_attention_layernorm
    for norm in norms:
        _check_norm(norm, x)
    for linears in ((attention.o_proj,), (mlp.down_proj,), [mlp._modules[name] for name in _GATE_UP]):
        _matrix(x, linears)  # before anything is written to the cache
    if cache is None or x.dim() != 3 or x.shape[1] != 1:
        raise _Unsupported("it has no cache, or several tokens of a sequence")
    options = dict(kinds[0].options)
    qkv = product(x, [attention._modules[name] for name in _QKV], norms[0])
    heads = heads_of(attention, qkv, tables, options, cache)
    if heads is None:
        raise _Unsupported("its rotation is of another form")
    if options["capped"]:
        kwargs["softcap"] = attention.attn_logit_softcapping
    mixed, _ = attentions.attention_forward(attention, *heads, mask, scaling=attention.scaling, **kwargs)
    mixed = mixed.reshape(*x.shape[:-1], -1)
    x = product(mixed, (attention.o_proj,), residual=x)
    gated = product(x, [mlp._modules[name] for name in _GATE_UP], norms[1], act=dict(kinds[1].options)["act"])
    return product(gated, (mlp.down_proj,), residual=x)


def writes_cache(layer: Any, size: int) -> bool:
    """Return True if one kernel can write the keys and values of a step to a layer of the cache."""
    return getattr(layer, "by_op", False) and size <= MAX_WIDTH and layer.k.shape[3] == layer.v.shape[3] == size


def head(module: nn.Module, x: Any) -> Tensor | None:
    """Return the logits of a step, None if the head must compute them as usual."""
    if not is_step(x) or is_watched(module):
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
    if type(found) in (nn.Linear, served.ServedLinear) and "forward" not in found.__dict__:
        replace.replace(found, Recognized("decode_head", ()))
