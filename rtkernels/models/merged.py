"""One product for linear layers that read the same tensor; their weights remain separate parameters.

Weights that are adjacent in memory (``make_adjacent``) form one matrix without a copy. If they are not adjacent (FSDP
gathers them, or the model was moved), forward and dx are one product per layer into columns of one result. The weight
gradient is always one product.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

import rtkernels
from rtkernels.models.recognize import autocasts
from rtkernels.models.rotations import apply_rope
from rtkernels.ops.gemm.weight_gradient import add_product_
from rtkernels.ops.rope import angles, qk_norm_rope
from rtkernels.ops.shared.block_sum import BLOCK_ROWS, add_rows_, weight_gradient
from rtkernels.runtime.invariance import starts_from_result
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling, storage_uses


def make_adjacent(linears: Sequence[nn.Module]) -> None:
    """Move the weights of linear layers into one block of memory if each has its own storage, and so their biases.

    Values do not change. Weights whose memory something else holds (another parameter, a process that shares it) stay
    where they are: after a move, that would keep the old values.
    """
    if not all(getattr(type(m), "_rtkernels_original", type(m)) is nn.Linear for m in linears):  # other libraries
        return
    _put_together([linear.weight for linear in linears])
    biases = [linear.bias for linear in linears]
    if all(bias is not None for bias in biases):
        _put_together(biases)


def _put_together(parameters: Sequence[Tensor]) -> None:
    first = parameters[0]
    for p in parameters:
        alike = p.dtype == first.dtype and p.device == first.device and p.shape[1:] == first.shape[1:]
        if not alike or type(p) not in TENSOR_TYPES or p.device.type == "meta" or not p.is_contiguous():
            return
        if p.untyped_storage().nbytes() != p.numel() * p.element_size():  # a part of a flat parameter
            return
        if (p.device.type == "cpu" and p.is_shared()) or _is_shared(p):
            return
    block = torch.cat([p.detach() for p in parameters])
    start = 0
    for p in parameters:
        p.data = block[start : start + p.shape[0]]
        start += p.shape[0]


collected: list[int] = []  # garbage, once for a model: it takes as long as the process has objects


def _is_shared(p: Tensor) -> bool:
    """Return True if another tensor has the memory of a parameter."""

    def shared() -> bool:
        return storage_uses(p.untyped_storage()._cdata) > 2  # by the parameter and by the storage asked for here

    if not shared():
        return False
    if not collected:  # what loaded the weights may have left tensors in cycles
        collected.append(gc.collect())
    return shared()


def adjacent(weights: Sequence[Tensor]) -> Tensor | None:
    """Return adjacent matrices as one matrix that shares their memory, None if they are not adjacent.

    The result is not part of the graph: a Function that multiplies by it must pass the gradient to each matrix.
    """
    first, rows = weights[0], 0
    columns, end, size = first.shape[1], first.data_ptr(), first.element_size()
    for w in weights:
        if w.data_ptr() != end or w.dtype != first.dtype or w.shape[1] != columns or not w.is_contiguous():
            return None
        rows += w.shape[0]
        end += w.shape[0] * columns * size
    # Memory after the first matrix is only ours if the first matrix's storage extends that far.
    offset = first.storage_offset()
    if (offset + rows * columns) * size > first.untyped_storage().nbytes():
        return None
    return first.detach().as_strided((rows, columns), (columns, 1), offset)


class Adjacent(torch.autograd.Function):
    """Adjacent weights as one matrix; each weight gets its part of the gradient without a copy."""

    @staticmethod
    def forward(ctx, *weights):
        ctx.rows = [w.shape[0] for w in weights]
        return adjacent(weights).data  # not a view of the first weight

    @staticmethod
    @once_differentiable
    def backward(ctx, dw):
        parts = dw.split(ctx.rows)
        return tuple(part if need else None for part, need in zip(parts, ctx.needs_input_grad, strict=True))


class _Product(torch.autograd.Function):
    """``x @ [weights]^T + [biases]``, of shape ``[..., rows of all weights]``."""

    @staticmethod
    def forward(ctx, x, count, *parameters):
        weights, biases = parameters[:count], parameters[count:]
        flat, rows = x.reshape(-1, x.shape[-1]), [w.shape[0] for w in weights]
        out = x.new_empty(*x.shape[:-1], sum(rows))  # not a view, because torch forbids in-place changes of views
        y = out.view(flat.shape[0], sum(rows))
        whole = adjacent(weights)
        if whole is not None:
            bias = torch.cat(biases) if biases else None
            _multiply(flat, whole, bias, y)
        else:
            for i, part in enumerate(y.split(rows, -1)):
                _multiply(flat, weights[i], biases[i] if biases else None, part)
        ctx.save_for_backward(x, *weights)
        ctx.rows, ctx.starts = rows, [start_of(parameter, "a linear layer") for parameter in parameters]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        x, *weights = ctx.saved_tensors
        need_x, need = ctx.needs_input_grad[0], ctx.needs_input_grad[2:]
        count, rows = len(weights), ctx.rows
        flat, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, sum(rows))
        parts, dx = dy.split(rows, -1), None
        if need_x:
            whole = adjacent(weights)
            dx = dy @ whole if whole is not None else parts[0] @ weights[0]
            if whole is None:
                for part, w in zip(parts[1:], weights[1:], strict=True):
                    dx.addmm_(part, w)
            dx = dx.view(x.shape)
        if any(ctx.starts):
            return dx, None, *_added(ctx, parts, flat, need)
        if all(need[:count]):
            grads = list((dy.t() @ flat).split(rows))
        else:
            grads = [p.t() @ flat if n else None for p, n in zip(parts, need[:count], strict=True)]
        if len(need) > count:
            sums = dy.sum(0, dtype=torch.float32).to(dy.dtype).split(rows)
            grads += [s if n else None for s, n in zip(sums, need[count:], strict=True)]
        return dx, None, *grads


def _added(ctx: Any, parts: Sequence[Tensor], x: Tensor, need: Sequence[bool]) -> list[Tensor | None]:
    """Return gradients of weights and biases; those that have a main_grad are added to it (level 3)."""
    grads: list[Tensor | None] = []
    for i, (start, wanted) in enumerate(zip(ctx.starts, need, strict=True)):
        part, is_bias = parts[i % len(parts)], i >= len(parts)
        if not wanted:
            grads.append(None)
            continue
        if start is None:
            grads.append(part.sum(0, dtype=torch.float32).to(part.dtype) if is_bias else part.t() @ x)
            continue
        add_rows_(start.total, part) if is_bias else add_product_(start.total, part, x)
        grads.append(start.added())
    return grads


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def is_watched(linear: nn.Module) -> bool:
    """Return True if hooks observe a layer, or if the instance has its own forward."""
    hooked = linear._forward_hooks or linear._forward_pre_hooks or linear._backward_hooks or linear._backward_pre_hooks
    return bool(hooked or "forward" in linear.__dict__ or _has_any_global_hook())


def has_watched_child(module: nn.Module, called: Sequence[str] = ()) -> bool:
    """Return True if our forward would skip what a child does now; `called` names the children that it calls.

    Such a child has hooks or a forward of its own, or is a dropout whose p was 0 when the module was replaced.
    """
    for name, child in module._modules.items():
        if child is not None and name not in called and (is_watched(child) or _drops(child)):
            return True
    return False


def _drops(module: nn.Module) -> bool:
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return module.training and module.p > 0
    return bool(module._modules) and has_watched_child(module)


def is_plain(linear: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Return True if a layer computes only its product: no subclass, hook, adapter or, below level 3, main_grad."""
    if type(linear) is not kind or is_watched(linear):
        return False
    weight = getattr(linear, "weight", None)
    adds = kind is nn.Linear and starts_from_result()
    return type(weight) in TENSOR_TYPES and (adds or not hasattr(weight, "main_grad"))


_product = applied(_Product)


def merged(x: Any, linears: Sequence[nn.Module]) -> Tensor | None:
    """Return the results of linear layers as columns of one tensor, None if the layers must be called separately.

    They must be under ``torch.compile``, which fuses such products itself, under autocast, and if they have hooks,
    adapters or weights of different dtypes.
    """
    if is_dynamo_compiling() or not isinstance(x, Tensor) or autocasts(x):
        return None
    if not all(is_plain(linear) and linear.weight.dtype == x.dtype for linear in linears):
        return None
    biases = [linear.bias for linear in linears if linear.bias is not None]
    if len(biases) not in (0, len(linears)):
        return None
    return _product(x, len(linears), *(linear.weight for linear in linears), *biases)


class RotatedHeads(torch.autograd.Function):
    """Heads of q, k and v ``[batch, tokens, heads, size]`` of a merged product; q and k are rotated in place.

    This overwrites the product's result, which nothing else uses and which autograd did not save.
    """

    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, form):
        ctx.save_for_backward(cos, sin)
        ctx.heads, ctx.form = heads, form
        q, k, v = _heads(qkv.detach(), heads)
        q, k = _rotate(q, k, cos, sin, form)
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        cos, sin = ctx.saved_tensors
        dqkv = torch.cat([d.flatten(2) for d in (dq, dk, dv)], -1)
        q, k, _ = _heads(dqkv, ctx.heads)
        _rotate(q, k, cos, sin, ctx.form, inverse=True)
        return dqkv, None, None, None, None


class NormedHeads(torch.autograd.Function):
    """Heads of q, k and v of a merged product, q and k normalised and rotated; v is a view of the product's result.

    The backward pass needs the product's result, so it is saved. Copying v would store v twice until then.
    """

    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, cos, sin, heads, rotary, interleaved, eps, offset):
        ctx.save_for_backward(qkv, q_weight, k_weight, cos, sin)
        pairs = angles.ADJACENT if interleaved else angles.HALVES
        ctx.options = *heads, False, "bshd", rotary or 0, pairs, False, eps, offset
        ctx.starts = start_of(q_weight, "qk_norm_rope"), start_of(k_weight, "qk_norm_rope")
        q, k, _ = qk_norm_rope.FORWARD.call(qkv, q_weight, k_weight, *ctx.options, cos, sin, *_NO_POSITIONS)
        return q, k, _heads(qkv.detach(), heads)[2]

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        qkv, q_weight, k_weight, cos, sin = ctx.saved_tensors
        need_qkv, need_q, need_k = ctx.needs_input_grad[:3]
        if (need_q or need_k) and starts_from_result():
            dweights = _norm_gradients(ctx, dq, dk, qkv, (q_weight, k_weight), cos, sin)
            need_q = need_k = False
        else:
            dweights = None, None
        dqkv, found = qk_norm_rope.BACKWARD.call(
            dq, dk, dv, qkv, q_weight, k_weight, *ctx.options, need_q or need_k, cos, sin, *_NO_POSITIONS
        )
        dq_weight, dk_weight = (found[i] if need else dweights[i] for i, need in enumerate((need_q, need_k)))
        return dqkv if need_qkv else None, dq_weight, dk_weight, *(None,) * 7


def _norm_gradients(
    ctx: Any, dq: Tensor, dk: Tensor, qkv: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor
) -> list[Tensor | None]:
    """Return the gradients of the norms of q and k, in blocks of 128 tokens; added to main_grad if there is one."""
    q_heads, kv_heads, _, layout, rotary, pairs, _, eps, _ = ctx.options
    interleaved = pairs == angles.ADJACENT
    options = {"layout": layout, "rotary": rotary or None, "interleaved": interleaved, "inverse": True}
    unrotated = rtkernels.rope(dq.contiguous(), cos, sin, k=dk.contiguous(), **options)
    before = _heads(qkv, (q_heads, kv_heads))[:2]
    each = zip(ctx.starts, weights, unrotated, before, ctx.needs_input_grad[1:3], strict=True)
    return [
        weight_gradient(start, weight, d, h.contiguous(), eps, block_rows=BLOCK_ROWS * h.shape[2]) if need else None
        for start, weight, d, h, need in each
    ]


rotated_heads, normed_heads = applied(RotatedHeads), applied(NormedHeads)
# positions, cu_seqlens, sections, cp_rank, cp_size, mscale: unused, because the tables have a row for every token.
_NO_POSITIONS = (None, None, "", 0, 1, 1.0)


def _heads(qkv: Tensor, heads: tuple[int, int]) -> tuple[Tensor, ...]:
    """Return views of the heads of q, k and v."""
    q_heads, kv_heads = heads
    return qkv.unflatten(-1, (q_heads + 2 * kv_heads, -1)).split((q_heads, kv_heads, kv_heads), -2)


def _rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, form: str, inverse: bool = False) -> tuple[Tensor, Tensor]:
    return apply_rope(q, k, cos, sin, form, layout="bshd", inverse=inverse, in_place=True)
