"""A linear layer whose three products, forward and backward, multiply fp8 codes."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import fp8_linear_smooth as smoothed
from rtkernels.ops.gemm.fp8_linear_checks import check_linear, check_recipe, check_rotation, given_codes
from rtkernels.ops.gemm.fp8_linear_shards import linear_of_shards
from rtkernels.ops.gemm.fp8_operands import OPERAND, PITCH, Codes, columns_of, rounded, rows_of
from rtkernels.ops.gemm.scaled_mm import scaled_mm
from rtkernels.ops.quant.quantize_fp8_plan import FP8_DTYPES
from rtkernels.ops.shared import block_sum
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import FLOAT_DTYPES
from rtkernels.runtime.invariance import level, refuse, starts_from_result
from rtkernels.runtime.layout import in_shape, row_count, token
from rtkernels.runtime.operator.arguments import Among, Matching, Within
from rtkernels.runtime.operator.autograd import needs_grad, once_differentiable
from rtkernels.runtime.operator.main_grad import start_of
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import is_dynamo_compiling

E4M3, E5M2 = FP8_DTYPES


class Recipe(NamedTuple):
    """How activations and gradients, and the weight, are quantised (kinds of ``OPERAND``), and what multiplies them."""

    activation: str
    weight: str
    product: str
    weight_gradient: str
    grad_dtype: torch.dtype


RECIPES = {
    "block": Recipe("group", "block", "block_1x128_128x128", "block_1x128_1x128", E4M3),
    "row": Recipe("row", "row", "row", "row", E4M3),
    "tensor": Recipe("tensor", "tensor", "tensor", "tensor", E5M2),
    "hadamard": Recipe("hadamard", "hadamard", "row", "row", E4M3),
}


class Fp8Weight(NamedTuple):
    """Codes of a weight for :func:`fp8_linear`, by rows and transposed; see :func:`fp8_weight`."""

    q: Tensor
    scale: Tensor
    q_t: Tensor
    scale_t: Tensor


# ---- gradients ------------------------------------------------------------------------------------------------------


class _Linear(torch.autograd.Function):
    """``x w^T + bias``. Saved: transposed codes of x (or x) if w needs a gradient, and of w (or w) if x does."""

    @staticmethod
    def forward(
        ctx, x, weight, bias, main_grad, recipe, grad_dtype, out_dtype, pow2_scale, rotation, save_weight, wgrad,
        backend, *given,
    ):  # fmt: skip
        ctx.set_materialize_grads(False)
        ways, codes, (w_q, w_scale, w_q_t, w_scale_t) = RECIPES[recipe], given[:4], given[4:]
        if recipe == "tensor" and level():
            refuse("fp8_linear with recipe 'tensor'", "a scale covers all rows")
        keep_x, keep_w, by_codes = weight.requires_grad, x.requires_grad, wgrad == "fp8"
        if codes[0] is None:
            flat = x.reshape(row_count(x.shape), x.shape[-1])
            codes = OPERAND(flat, ways.activation, E4M3, pow2_scale, True, keep_x and by_codes, rotation)
        if w_q is None:
            transposed = keep_w and not save_weight
            w_q, w_scale, w_q_t, w_scale_t = OPERAND(weight, ways.weight, E4M3, pow2_scale, True, transposed, rotation)
        left = rows_of(codes[0], codes[1], ways.activation)
        right = rows_of(w_q, w_scale, ways.weight)
        options = {"recipe": ways.product, "bias": bias, "out_dtype": out_dtype, "backend": backend}
        y = scaled_mm(left.q, right.q, left.scale, right.scale, **options)
        ctx.save_for_backward(
            *((codes[2], codes[3], codes[1] if recipe == "tensor" else None) if keep_x and by_codes else (None,) * 3),
            x if keep_x and not by_codes else None,
            *((w_q_t, w_scale_t, w_scale) if keep_w and not save_weight else (None,) * 3),
            weight if keep_w and save_weight else None,
        )
        ctx.options = recipe, grad_dtype, pow2_scale, rotation, backend
        ctx.x_shape, ctx.x_dtype, ctx.weight_shape, ctx.weight_dtype = x.shape, x.dtype, weight.shape, weight.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.main_grad = main_grad  # not saved: later micro-batches may have changed it, which is the point
        ctx.flagged = weight if main_grad is not None and has_flag(weight) else None
        ctx.start_bias = start_of(bias, "a linear layer")
        ctx.bias_like = None if bias is None else bias.detach()
        return in_shape(y, *x.shape[:-1], weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return (None,) * 20
        recipe, grad_dtype, pow2_scale, rotation, backend = ctx.options
        ways, (n, k) = RECIPES[recipe], ctx.weight_shape
        x_q_t, x_scale_t, x_scale, x, w_q_t, w_scale_t, w_scale, weight = ctx.saved_tensors
        need_x, need_w, need_bias = ctx.needs_input_grad[:3]
        flat = dy.reshape(row_count(ctx.x_shape), n)
        dx = dw = dbias = None
        if need_x or (need_w and x is None):
            codes_t = need_w and x is None
            q, scale, q_t, scale_t = OPERAND(flat, ways.activation, grad_dtype, pow2_scale, need_x, codes_t, rotation)
        if need_x:
            if weight is not None:
                _, w_scale, w_q_t, w_scale_t = OPERAND(weight, ways.weight, E4M3, pow2_scale, False, True, rotation)
            left = rows_of(q, scale, ways.activation)
            right = columns_of(w_q_t, w_scale, w_scale_t, ways.weight, k)
            options = {"recipe": ways.product, "out_dtype": ctx.x_dtype, "backend": backend}
            dx = scaled_mm(left.q, right.q, left.scale, right.scale, **options).view(ctx.x_shape)
        if need_w and x is not None:
            kind = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
            left, right = flat.to(kind).t(), x.reshape(flat.shape[0], k).to(kind)
            options = {"recipe": "none", "b_layout": "kn", "backend": backend}
            dw = weight_gradient(
                Codes(left, None), Codes(right, None), ctx.weight_dtype, ctx.main_grad, ctx.flagged, **options
            )
        elif need_w:
            left = columns_of(q_t, scale, scale_t, ways.activation, n)
            right = columns_of(x_q_t, x_scale, x_scale_t, ways.activation, k)
            options = {"recipe": ways.weight_gradient, "backend": backend}
            dw = weight_gradient(left, right, ctx.weight_dtype, ctx.main_grad, ctx.flagged, **options)
        if need_bias and starts_from_result():
            dbias = block_sum.weight_gradient(ctx.start_bias, ctx.bias_like, flat)
        elif need_bias:
            dbias = flat.sum(0, dtype=torch.float32).to(ctx.bias_dtype)
        return dx, dw, dbias, *(None,) * 17


def has_flag(weight: Tensor) -> bool:
    """Return True if the trainer reads a flag that says that main_grad already has the gradient."""
    return not is_dynamo_compiling() and hasattr(weight, "grad_added_to_main_grad")


def weight_gradient(
    left: Codes, right: Codes, dtype: torch.dtype, main_grad: Tensor | None, flagged: Tensor | None, **options: Any
) -> Tensor | None:
    """Return the gradient of a weight; or add it to main_grad, tell `flagged`, a weight, and return zeros, else None.

    The trainers that have the flag wait for the hook of a weight, which torch calls where there is a gradient.
    """
    nothing_to_sum = not left.q.numel() or not right.q.numel()  # no rows; codes of other operators are not padded then
    if main_grad is None and nothing_to_sum:
        n, k = left.q.shape[0], right.q.shape[options.get("b_layout") == "kn"]
        return torch.zeros(n, k, dtype=dtype, device=left.q.device)
    if main_grad is None:
        return scaled_mm(left.q, right.q, left.scale, right.scale, out_dtype=dtype, **options)
    if not nothing_to_sum:
        scaled_mm(left.q, right.q, left.scale, right.scale, out=main_grad, accumulate=True, **options)
    if flagged is None:
        return None
    flagged.grad_added_to_main_grad = True
    return torch.zeros((), dtype=dtype, device=main_grad.device).expand(main_grad.shape)


def _one_of(*values: str) -> Among:
    return Among(values, f"one of {', '.join(map(repr, values))}")


_WEIGHT = Matching(FLOAT_DTYPES, "weight.dim() == 2", "[out features, in features]")


@public(options={"weight": _WEIGHT, "recipe": _one_of(*RECIPES), "rotation": Within("int")})
def fp8_weight(
    weight: Tensor, *, recipe: str = "block", pow2_scale: bool = False, rotation: int = 64, transposed: bool = True
) -> Fp8Weight:
    """Quantise a weight once for several calls of :func:`fp8_linear`, which otherwise quantises it in every call.

    For micro-batches between two optimizer steps, and for inference. Not differentiable: fp8_linear takes the weight as
    well, and the weight gets the gradient.

    Args:
        weight: ``[out features, in features]``, bfloat16, float16 or float32.
        recipe: As for fp8_linear; not "smooth".
        pow2_scale: As for fp8_linear.
        rotation: As for fp8_linear.
        transposed: Also compute transposed codes, which the gradient of x needs.

    Returns:
        A named tuple for the argument `weight_codes`; its content depends on the recipe.
    """
    if recipe == "hadamard":
        check_rotation(weight, rotation)
    return Fp8Weight(*OPERAND(weight.detach(), RECIPES[recipe].weight, E4M3, pow2_scale, True, transposed, rotation))


_OPTIONS = {
    "recipe": _one_of(*RECIPES, "smooth"),
    "rotation": Within("int"),
    "wgrad": Among(("fp8", "bf16"), "'fp8' or 'bf16'"),
}


def _of_shards(*, x: Any, weight: Any, bias: Any, scale_layout: str, **options: Any) -> Tensor:
    if not isinstance(x, Tensor):
        if not hasattr(x, "q"):
            raise ArgumentError(f"x is a {type(x).__name__}; expected a tensor")
        raise ArgumentError("x is codes and a DTensor is among the arguments; expected x as a DTensor")
    return linear_of_shards(fp8_linear, x, weight, bias, options)


@public(options=_OPTIONS, sharded=("x weight", _of_shards))
def fp8_linear(
    x: Any, weight: Tensor, bias: Tensor | None = None, *, recipe: str = "block", main_grad: Tensor | None = None,
    out_dtype: torch.dtype | None = None, grad_dtype: torch.dtype | None = None, pow2_scale: bool = False,
    rotation: int = 64, smooth: Tensor | None = None, scale_layout: str = "row", weight_codes: Fp8Weight | None = None,
    save_weight: bool = False, wgrad: str = "fp8", backend: str = "auto", out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``x @ weight.T + bias`` computed from fp8 codes, as are both gradients.

    x, weight and the incoming gradient dy are quantised from their own dtypes, as :func:`quantize_fp8` does; products
    accumulate in fp32 and round once. Nothing is quantised twice: x and dy are read once for the codes of both products
    that use them. The transposed codes of x (1.03 bytes per element) and of the weight are saved for the backward pass
    instead of x. Values that share a scale:

    ==========  =====================================  ==========================  =====================================
    recipe      forward (x ; weight)                   gradient of x (dy ; weight) gradient of the weight (dy ; x)
    ==========  =====================================  ==========================  =====================================
    "block"     128 of a row ; 128 x 128               the same                    128 of a column ; 128 of a column
    "row"       a token ; an output feature            a token ; an input feature  an output feature ; an input feature
    "tensor"    all ; all                              all (e5m2) ; all            all (e5m2) ; all
    "hadamard"  as "row", after multiplying each `rotation` elements along the summed dimension by an orthonormal
                Hadamard matrix, which spreads outliers and does not change products
    "smooth"    as "row", with ``x * smooth`` and ``weight / smooth``; the same codes, transposed, are used for the
                gradients: dy is multiplied by the scales of weight and x before it is quantised
    ==========  =====================================  ==========================  =====================================

    Differentiable once in x, weight and bias; only the needed gradients are computed. Deterministic. NaN in x gives NaN
    in its row of the result.

    Args:
        x: ``[..., in features]``, bfloat16, float16 or float32, any strides; or, for recipe "block", codes: an object
            with ``q`` and ``scale``, such as the result of rms_norm_fp8, glu_fp8 or quantize_fp8. It needs ``q_t`` and
            ``scale_t`` if the weight needs a gradient, and ``y`` if x does: y stands for x in the graph and gets the
            gradient; its values are not read. Any object with ``__dlpack__`` is accepted; results are then of the same
            kind.
        weight: ``[out features, in features]``, bfloat16, float16 or float32; its gradient has its dtype.
        bias: ``[out features]``, bfloat16, float16 or float32; added in fp32.
        recipe: See above.
        main_grad: float32, contiguous, of weight's shape. The backward pass then *adds* weight's gradient to it in
            place, in fp32, and ``weight.grad`` does not change.
        out_dtype: bfloat16, float16 or float32. Default: x's dtype (bfloat16 for codes without y).
        grad_dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, the dtype of the codes of dy. Default: as in the
            table.
        pow2_scale: Round scales up to powers of two.
        rotation: 32, 64, 128 or 256, for recipe "hadamard"; both features are multiples of it.
        smooth: float32 ``[in features]``, for recipe "smooth": see :func:`smooth_factors`.
        scale_layout: If x is codes: "row" or "column", as given to the function that computed them.
        weight_codes: The result of :func:`fp8_weight` with the same options; the weight is then not read.
        save_weight: Save the weight instead of its codes and quantise it again in the backward pass: for weights whose
            memory is released in between (FSDP with ``reshard_after_forward``).
        wgrad: "bf16" computes the weight gradient from dy and x in 16 bits (float32 is rounded to bfloat16); x is then
            saved instead of its codes.
        backend: Backend of the products, as for :func:`scaled_mm`.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor ``[..., out features]``.
    """
    codes: tuple[Tensor | None, ...] = (None,) * 4
    if not isinstance(x, Tensor):
        if not hasattr(x, "q") or not hasattr(x, "scale"):
            raise ArgumentError(f"x is a {type(x).__name__}; expected a torch.Tensor, an array, or codes with scales")
        x, codes = given_codes(x, weight, recipe, scale_layout)
    check_linear(x.shape, x.dtype, x.get_device(), weight, bias, main_grad)
    if out_dtype is not None:
        token("out_dtype", out_dtype)
    grad_dtype = RECIPES[recipe].grad_dtype if grad_dtype is None and recipe != "smooth" else grad_dtype or E4M3
    token("grad_dtype", grad_dtype, FP8_DTYPES)
    check_recipe(recipe, smooth, wgrad, codes[0] is not None)
    dtype = x.dtype if out_dtype is None else out_dtype
    if recipe == "smooth":
        if weight_codes is not None or save_weight or wgrad != "fp8":
            raise ArgumentError("weight_codes, save_weight and wgrad='bf16' cannot be combined with recipe 'smooth'")
        return smoothed.linear(x, weight, bias, main_grad, smooth, grad_dtype, dtype, pow2_scale, False, backend)[0]
    if recipe == "hadamard":
        check_rotation(weight, rotation)
    given = (*codes, *((None,) * 4 if weight_codes is None else _checked(weight_codes, weight, x)))
    if is_grad_enabled() and needs_grad(x, weight, bias):
        return _Linear.apply(
            x, weight, bias, main_grad, recipe, grad_dtype, dtype, pow2_scale, rotation, save_weight, wgrad, backend,
            *given,
        )  # fmt: skip
    return _forward(x, weight, bias, given, recipe, dtype, pow2_scale, rotation, backend)


def _checked(codes: Fp8Weight, weight: Tensor, x: Tensor) -> Fp8Weight:
    """Return codes of a weight, or raise an ArgumentError."""
    wanted = weight.shape[0], rounded(weight.shape[1], PITCH)
    if not isinstance(codes, Fp8Weight) or tuple(codes.q.shape) != wanted:
        came = f"codes of shape {tuple(codes.q.shape)}" if isinstance(codes, Fp8Weight) else f"a {type(codes).__name__}"
        raise ArgumentError(f"weight_codes is {came}; expected what fp8_weight gives for weight, {wanted}")
    if is_grad_enabled() and x.requires_grad and codes.q_t.numel() == 0:
        raise ArgumentError("weight_codes has no transposed codes and x requires grad; expected transposed=True")
    return codes


def _forward(x, weight, bias, given, recipe, dtype, pow2_scale, rotation, backend) -> Tensor:
    """Return the result of a call without gradients."""
    ways, (q, scale, _, _, w_q, w_scale, _, _) = RECIPES[recipe], given
    if q is None:
        flat = x.detach().reshape(row_count(x.shape), x.shape[-1])
        q, scale, _, _ = OPERAND(flat, ways.activation, E4M3, pow2_scale, True, False, rotation)
    if w_q is None:
        w_q, w_scale, _, _ = OPERAND(weight.detach(), ways.weight, E4M3, pow2_scale, True, False, rotation)
    left = rows_of(q, scale, ways.activation)
    right = rows_of(w_q, w_scale, ways.weight)
    options = {"bias": None if bias is None else bias.detach(), "out_dtype": dtype, "backend": backend}
    y = scaled_mm(left.q, right.q, left.scale, right.scale, recipe=ways.product, **options)
    return y.view(*x.shape[:-1], weight.shape[0])


OP = Op(
    "fp8_linear", public=("fp8_linear", "fp8_weight"), kernels=(), torch_ops=(),
    uses=("scaled_mm", "quantize_fp8", "smooth_quant", "hadamard", "column_absmax", "transpose"),
)  # fmt: skip
