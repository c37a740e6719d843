"""Rows of tokens to the experts that chose them, quantised to fp8 on the way, in one pass or two."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.moe import reference
from rtkernels.ops.moe.moe_index_layout import MoeIndex
from rtkernels.ops.moe.moe_permute import PERMUTE, PROBS, UNPERMUTE, as_index, experts_if_dense
from rtkernels.ops.moe.moe_permute_fp8_plan import KERNELS, check, outputs, plan
from rtkernels.ops.quant import quantize_fp8_experts as quantizer
from rtkernels.ops.shared.fp8_layout import asked, groups_of
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, Operator, Rows
from rtkernels.runtime.operator.registry import Op


def _in_two(x, rows, slots, offsets, probs, experts, output, dtype, pow2_scale) -> tuple[Tensor, ...]:
    """Permute, then quantise; everything after the last expert's rows is cleared."""
    y, _, probs_out = PERMUTE.launch(x, rows, slots, None, probs, experts)
    counts = offsets.diff()
    codes = quantizer.QUANTIZE.launch(y, counts, output, dtype, pow2_scale)
    used, (count, cols) = counts.clamp(min=0).sum(), y.shape
    for i, t in enumerate(codes[:3]):
        if t.numel():
            unit = groups_of(cols) if i == 1 else cols
            bits = t.view(torch.uint8 if t.itemsize == 1 else torch.int32).view(-1)
            bits.masked_fill_(torch.arange(count * unit, dtype=torch.int64, device=x.device) >= used * unit, 0)
    return *codes, probs_out


def _reference(x, rows, slots, offsets, probs, experts, output, dtype, pow2_scale):
    y, _, probs_out = reference.permute(x, rows, slots, None, probs, experts)
    return *quantizer.QUANTIZE.reference(y, offsets.diff(), output, dtype, pow2_scale), probs_out


_INDEX = Dense("rows", None), Dense("slots", None), Dense("offsets", None)
QUANTIZE = Operator(
    "moe_permute_fp8_fwd",
    (Rows("x", None), *_INDEX, Dense("probs", None, optional=True), Dense("experts", None, optional=True)),
    options="str output, ScalarType dtype, bool pow2_scale", results="q scale q_t scale_t probs_out",
    outputs=outputs, plan=partial(plan, _in_two), reference=_reference, check=check, plans_empty=True,
)  # fmt: skip


class MoePermutedFp8(NamedTuple):
    """Codes and scales of the permuted rows, as :class:`QuantizedExperts` has them; None if not requested.

    Attributes:
        q: ``[R, H]``.
        scale: ``[R * g]`` with ``g = ceil(H/128)``. An expert's part, with rows ``s`` to ``s + c - 1``, is
            ``[s * g : (s + c) * g]``, a matrix ``[g, c]``.
        q_t: ``[R * H]``. The expert's part ``[s * H : (s + c) * H]`` is a matrix ``[H, c]``.
        scale_t: ``[blocks, H]``, one scale per 128 rows of an expert and column; rows past the last block are 0.
        probs: ``[R]``, the probabilities carried along.
        y: Where a gradient of x is wanted, a tensor ``[R, H]`` of x's dtype without values (one NaN, expanded): what
            takes the gradient of the permuted rows.
    """

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    probs: Tensor | None
    y: Tensor | None


class _PermuteFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, probs, rows, slots, offsets, experts, output, dtype, pow2_scale):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows, experts)
        ctx.columns = 0 if probs is None else probs.shape[1]
        *codes, probs_out = QUANTIZE.call(x, rows, slots, offsets, probs, experts, output, dtype, pow2_scale)
        ctx.mark_non_differentiable(*codes)
        y = x.new_full((), float("nan")).expand(slots.shape[0], x.shape[1])
        return *codes, None if probs is None else probs_out, y

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        *_, dprobs_out, dy = grads
        rows, experts = ctx.saved_tensors
        dx = None if dy is None else UNPERMUTE.call(dy, rows, None, None, None)[0]
        dprobs = None if dprobs_out is None else PROBS.call(dprobs_out, rows, experts, ctx.columns)
        return dx, dprobs, *(None,) * 7


_differentiable = applied(_PermuteFp8)


@public
def moe_permute_fp8(
    x: Tensor, index: MoeIndex, *, layout: str = "both", dtype: torch.dtype = torch.float8_e4m3fn,
    pow2_scale: bool = False, probs: Tensor | None = None, dense_probs: bool | None = None, output: str | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> MoePermutedFp8:  # fmt: skip
    """Copy the rows of tokens to the rows of their experts as fp8 codes with block scales, in one pass.

    Bitwise equal to ``quantize_fp8_experts(moe_permute(x, index), index.offsets.diff())``: an expert's pad rows count
    as its rows (their codes are 0), groups of 128 rows start over with each expert, and codes, scales and probabilities
    of the rows after the last expert are 0. The permuted rows themselves are never written. bfloat16 rows that are a
    multiple of 16 bytes take one launch (two for layout "row"), others two or more. The host reads nothing from the
    device.

    **Gradients.** Codes and scales are not differentiable; probs is. The result's ``y``, which has no memory and no
    values, stands for the permuted rows in the graph: an ``autograd.Function`` that multiplies the codes takes y as an
    additional input and returns the gradient for it. dx is then the same as for :func:`moe_permute`.

    **Gradients as fp8.** The gradient of :func:`moe_unpermute` without weights is ``moe_permute(dout, index)``; so
    ``moe_permute_fp8(dout, index)`` is that gradient as codes, for the backward GEMMs of the experts.

    Args:
        x: ``[T, H]``, bfloat16, float16 or float32. Any strides (copied unless rows are unit-stride). Any object with
            ``__dlpack__`` is accepted; the index must be, and results are, of the same kind.
        index: From ``moe_index``, for these T tokens.
        layout: "row" (q and scale), "transposed" (q_t and scale_t) or "both".
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round scales up to a power of two.
        probs: Probabilities to permute as well, as for :func:`moe_permute`.
        dense_probs: As for :func:`moe_permute`.
        output: Alias for `layout`.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A :class:`MoePermutedFp8`; all its tensors except y are contiguous.
    """
    layout = layout if output is None else output
    index = as_index(index)
    experts = experts_if_dense(probs, index, dense_probs)
    y = None
    if is_grad_enabled() and needs_grad(x, probs):
        *codes, probs_out, y = _differentiable(
            x, probs, index.rows, index.slots, index.offsets, experts, layout, dtype, pow2_scale
        )
        y = y if x.requires_grad else None
    else:
        given = x, index.rows, index.slots, index.offsets, probs, experts, layout, dtype, pow2_scale
        *codes, probs_out = QUANTIZE.call(*given)
    return MoePermutedFp8(*asked(layout, codes), None if probs is None else probs_out, y)


OP = Op(
    "moe_permute_fp8", public=("moe_permute_fp8",), kernels=KERNELS, torch_ops=(QUANTIZE,),
    uses=("moe_permute", "quantize_fp8_experts"),
)  # fmt: skip
