"""Products of experts in fp8 with gradients, used by the modules of ``fp8_moe``.

Rows are sorted by expert, and the rows of each expert begin at a multiple of 128. So no column scale covers rows of two
experts, and one matrix ``[columns, rows]`` holds the transposed codes of all experts. Group sizes exist only on the
device.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.act import glu_fp8
from rtkernels.ops.gemm import grouped_mm
from rtkernels.ops.gemm.fp8_operands import (
    OPERAND,
    PITCH,
    SIDE,
    Codes,
    columns_of,
    expert_columns_of,
    expert_rows_of,
    rows_of,
)
from rtkernels.ops.moe import moe_permute_fp8
from rtkernels.ops.moe.moe_permute import UNPERMUTE
from rtkernels.ops.quant import quantize_fp8
from rtkernels.runtime.invariance import OF_EXPERTS, refuse, starts_from_result
from rtkernels.runtime.operator.autograd import applied, once_differentiable
from rtkernels.runtime.torch_private import is_dynamo_compiling

E4M3 = torch.float8_e4m3fn
FORWARD, WEIGHT_GRADIENT = "block_1x128_128x128", "block_1x128_1x128"


class ExpertCodes(NamedTuple):
    """Codes of weights ``[experts, n, k]``, by rows and transposed (empty if not requested)."""

    q: Tensor
    scale: Tensor
    q_t: Tensor


class Sites(NamedTuple):
    """Call sites of the operators for weights of one shape; their tensors have the same metadata in all layers."""

    codes: Callable[..., Any]
    codes_by_rows: Callable[..., Any]
    product: Callable[..., Any]
    dx: Callable[..., Any]
    dw: Callable[..., Any]


_ANYWHERE = Sites(
    quantize_fp8.BOTH.call, quantize_fp8.QUANTIZE.call, grouped_mm.FORWARD.call, grouped_mm.FORWARD.call,
    grouped_mm.WGRAD.call,
)  # fmt: skip


@lru_cache(maxsize=256)
def _sites_of(shape: torch.Size) -> Sites:
    operators = quantize_fp8.BOTH, quantize_fp8.QUANTIZE, grouped_mm.FORWARD, grouped_mm.FORWARD, grouped_mm.WGRAD
    return Sites(*(operator.at_site() for operator in operators))


def _sites(weight: Tensor) -> Sites:
    return _ANYWHERE if is_dynamo_compiling() else _sites_of(weight.shape)


def weight_codes(weight: Tensor, transposed: bool, pow2_scale: bool = False) -> ExpertCodes:
    """Quantise weights ``[experts, n, k]`` in blocks of 128 x 128."""
    weight, (_, n, k) = weight.detach(), weight.shape
    if n % SIDE or k % PITCH or not weight.is_contiguous() or weight.numel() == 0:
        return ExpertCodes(*OPERAND(weight, "block", E4M3, pow2_scale, True, transposed, 0)[:3])
    at, flat = _sites(weight), weight.view(-1, k)
    if transposed:
        return ExpertCodes(*at.codes(flat, "block", E4M3, pow2_scale, "row")[:3])
    return ExpertCodes(*at.codes_by_rows(flat, "block", E4M3, pow2_scale, "row"), flat.new_empty(0))


def _product(site: Any, left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``left[rows of g] @ right[g]^T`` for every group g; other rows are uninitialised."""
    options = SIDE, 0, FORWARD, "auto", None, None, dtype, "auto", "auto"
    return site(left.q, right.q, left.scale, right.scale, ends, None, None, *options)


def _weight_gradient(
    site: Any, left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype, main_grad: Tensor | None
) -> Tensor | None:
    """Return ``left[:, rows of g] @ right[:, rows of g]^T`` for every group g, or add it to main_grad."""
    if main_grad is not None and starts_from_result():
        refuse("the gradient of experts' weights with a main_grad", OF_EXPERTS)
    out = main_grad
    if out is None:
        out = left.q.new_empty((ends.shape[0], left.q.shape[0], right.q.shape[0]), dtype=dtype)
    options = SIDE, main_grad is not None, WEIGHT_GRADIENT, "auto", "auto"
    site(out, left.q, right.q, left.scale, right.scale, ends, *options)
    return out if main_grad is None else None


# ---- one product ----------------------------------------------------------------------------------------------------


def _padded(left: Codes, right: Codes, ends: Tensor, dtype: torch.dtype) -> Tensor:
    options = {"offs": ends, "align": SIDE, "recipe": FORWARD, "out_dtype": dtype, "zero_padding": True}
    return grouped_mm.grouped_mm(left.q, right.q, left.scale, right.scale, **options)


class GroupedLinear(torch.autograd.Function):
    """``y[rows of g] = x[rows of g] @ weight[g]^T``; rows after the last group, and their gradients, are 0."""

    @staticmethod
    def forward(ctx, x, weight, ends, main_grad, grad_dtype, pow2_scale, *given):
        ctx.set_materialize_grads(False)
        keep_x, keep_w = weight.requires_grad, x.requires_grad
        q, scale, q_t, scale_t = OPERAND(x, "group", E4M3, pow2_scale, True, keep_x, 0)
        codes = ExpertCodes(*given) if given else weight_codes(weight, keep_w, pow2_scale)
        ctx.save_for_backward(
            *((q_t, scale_t) if keep_x else (None, None)),
            *((codes.q_t, codes.scale) if keep_w else (None, None)),
            ends,
        )
        ctx.options, ctx.main_grad = (grad_dtype, pow2_scale), main_grad
        ctx.x_shape, ctx.x_dtype, ctx.weight_shape, ctx.weight_dtype = x.shape, x.dtype, weight.shape, weight.dtype
        return _padded(rows_of(q, scale, "group"), expert_rows_of(codes.q, codes.scale, weight.shape), ends, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 9
        (grad_dtype, pow2_scale), shape = ctx.options, ctx.weight_shape
        x_q_t, x_scale_t, w_q_t, w_scale, ends = ctx.saved_tensors
        need_x, need_w = ctx.needs_input_grad[:2]
        q, scale, q_t, scale_t = OPERAND(dy, "group", grad_dtype, pow2_scale, need_x, need_w, 0)
        dx = dw = None
        if need_x:
            right = expert_columns_of(w_q_t, w_scale, shape)
            dx = _padded(rows_of(q, scale, "group"), right, ends, ctx.x_dtype)
        if need_w:
            left = columns_of(q_t, scale, scale_t, "group", shape[1])
            right = columns_of(x_q_t, scale, x_scale_t, "group", shape[2])
            dw = _weight_gradient(_ANYWHERE.dw, left, right, ends, ctx.weight_dtype, ctx.main_grad)
        return dx, dw, *(None,) * 7


# ---- a whole layer of experts ---------------------------------------------------------------------------------------


_bounds: dict[tuple[int, torch.device], Tensor] = {}


def _one_expert(rows: int, device: torch.device) -> Tensor:
    """Return the offsets of a single expert that has all rows, int32."""
    found = None if is_dynamo_compiling() else _bounds.get((rows, device))
    if found is None:
        with torch.inference_mode(False):
            found = torch.arange(0, rows + 1, rows, dtype=torch.int32, device=device)
        if not is_dynamo_compiling() and not (found.is_cuda and torch.cuda.is_current_stream_capturing()):
            if len(_bounds) >= 256:
                _bounds.clear()
            _bounds[rows, device] = found
    return found


def _permuted(
    site: Any, x: Tensor, rows: Tensor, slots: Tensor, probs: Tensor | None, layout: str, dtype: torch.dtype,
    pow2_scale: bool,
) -> tuple[Any, ...]:  # fmt: skip
    """Return codes of the permuted rows (by rows, transposed) and their probabilities.

    Every expert begins at a multiple of 128 rows, so all rows can be quantised as those of one expert: the groups of
    128 rows are the same, and the results are whole matrices.
    """
    count, cols = slots.shape[0], x.shape[1]
    q, scale, q_t, scale_t, carried = site(
        x, rows, slots, _one_expert(count, x.device), probs, None, layout, dtype, pow2_scale
    )
    by_rows = None if layout == "transposed" else Codes(q, scale.view(-1, count).t())
    transposed = None if layout == "row" else Codes(q_t.view(cols, count), scale_t.t())
    return by_rows, transposed, carried


def _layout(by_rows: bool, transposed: bool) -> str:
    return "both" if by_rows and transposed else "row" if by_rows else "transposed"


# The forward pass permutes with probabilities and sums without; the backward pass does the reverse.
_permute, _permute_gradient = moe_permute_fp8.QUANTIZE.at_site(), moe_permute_fp8.QUANTIZE.at_site()
_unpermute, _unpermute_gradient = UNPERMUTE.at_site(), UNPERMUTE.at_site()
_glu, _glu_gradient = glu_fp8.FORWARD.call, glu_fp8.BACKWARD.call


class Experts(torch.autograd.Function):
    """``out[t] = sum over the experts e of t of prob * down[e] @ swiglu(gate_up[e] @ x[t])``.

    The probabilities are multiplied into the gated values before these are quantised, so the results of ``down`` only
    need to be summed, and their gradient is dout, permuted and quantised in one pass. Saved: transposed codes of the
    permuted tokens and of the gated values, gate and up in x's dtype, and transposed codes of the weights. Rows after
    the last expert's are uninitialised, and no valid row or sum reads them.
    """

    @staticmethod
    def forward(ctx, x, probs, gate_up, down, rows, slots, ends, main_grads, act, grad_dtype, pow2_scale, *given):
        ctx.set_materialize_grads(False)
        trains = x.requires_grad or probs.requires_grad or gate_up.requires_grad
        codes_up = ExpertCodes(*given[:3]) if given else weight_codes(gate_up, x.requires_grad, pow2_scale)
        codes_down = ExpertCodes(*given[3:]) if given else weight_codes(down, trains, pow2_scale)
        layout = _layout(True, gate_up.requires_grad)
        tokens, tokens_t, weights = _permuted(_permute, x, rows, slots, probs, layout, E4M3, pow2_scale)
        up_at, down_at = ctx.sites = _sites(gate_up), _sites(down)
        hidden = _product(
            up_at.product, tokens, expert_rows_of(codes_up.q, codes_up.scale, gate_up.shape), ends, x.dtype
        )
        layout = _layout(True, down.requires_grad)
        q, scale, q_t, scale_t = _glu(hidden, None, weights, None, act, layout, pow2_scale, "column", False)
        right = expert_rows_of(codes_down.q, codes_down.scale, down.shape)
        y = _product(down_at.product, Codes(q, scale.t()), right, ends, x.dtype)
        ctx.save_for_backward(
            *((None, None) if tokens_t is None else tokens_t),
            *((q_t, scale_t) if down.requires_grad else (None, None)),
            *((hidden, weights) if trains else (None, None)),
            *((codes_up.q_t, codes_up.scale) if x.requires_grad else (None, None)),
            *((codes_down.q_t, codes_down.scale) if trains else (None, None)),
            rows, slots, ends,
        )  # fmt: skip
        ctx.options, ctx.main_grads = (act, grad_dtype, pow2_scale), main_grads
        ctx.shapes, ctx.dtypes = (gate_up.shape, down.shape), (gate_up.dtype, down.dtype)
        return _unpermute(y, rows, None, None, None)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 17
        x_q_t, x_scale_t, y_q_t, y_scale_t, hidden, weights, *saved = ctx.saved_tensors
        up_q_t, up_scale, down_q_t, down_scale, rows, slots, ends = saved
        (act, grad_dtype, pow2_scale), (shape_up, shape_down) = ctx.options, ctx.shapes
        need_x, need_probs, need_up, need_down = ctx.needs_input_grad[:4]
        up_at, down_at = ctx.sites
        dx = dprobs = dup = ddown = None
        onwards = need_x or need_probs or need_up  # the gradient continues past `down`
        layout = _layout(onwards, need_down)
        by_rows, transposed, _ = _permuted(
            _permute_gradient, dout, rows, slots, None, layout, grad_dtype, pow2_scale
        )  # fmt: skip
        if need_down:
            right = Codes(y_q_t, y_scale_t.t())
            ddown = _weight_gradient(down_at.dw, transposed, right, ends, ctx.dtypes[1], ctx.main_grads[1])
        if onwards:
            right = expert_columns_of(down_q_t, down_scale, shape_down)
            dy = _product(down_at.dx, by_rows, right, ends, dout.dtype)
            layout = _layout(need_x or not need_up, need_up)
            q, scale, q_t, scale_t, _, dweights = _glu_gradient(
                dy, hidden, None, weights, None, act, layout, pow2_scale, "row" if layout == "transposed" else "column",
                False, "fp8", need_probs,
            )  # fmt: skip
            if need_up:
                left, right = Codes(q_t, scale_t.t()), Codes(x_q_t, x_scale_t)
                dup = _weight_gradient(up_at.dw, left, right, ends, ctx.dtypes[0], ctx.main_grads[0])
            if need_x:
                right = expert_columns_of(up_q_t, up_scale, shape_up)
                moved = _product(up_at.dx, Codes(q, scale.t()), right, ends, dout.dtype)
                dx, dprobs = _unpermute_gradient(moved, rows, None, None, dweights if need_probs else None)
            elif need_probs:
                dprobs = moe_permute_fp8.PROBS(dweights, rows, None, rows.shape[1])
        return dx, dprobs if need_probs else None, dup, ddown, *(None,) * 13


experts = applied(Experts)


def group_ends(offsets: Tensor) -> Tensor:
    """Return the row after each expert's last one, in memory aligned to 16 bytes so that calls can be replayed."""
    return offsets[1:].clone()
