"""The first half of a gated MLP in one pass: two products of the same rows, one through an activation, multiplied."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, reference, scaled_mm_plan
from rtkernels.ops.gemm.across import along_k
from rtkernels.ops.gemm.scaled_mm import (
    as_packed,
    as_scale,
    differentiable_mm,
    quantized_by_steps,
    refuse_quantised_gradients,
)
from rtkernels.ops.gemm.scaled_mm_plan import OPTIONS, TENSORS
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.declared import Operator
from rtkernels.runtime.operator.registry import Op

FORWARD = Operator(
    "gated_mm", TENSORS, options=OPTIONS, results="out", outputs=partial(scaled_mm_plan.outputs, halves=2),
    plan=partial(scaled_mm_plan.plan, gated=True), reference=partial(scaled_mm_plan.run_reference, gated=True),
    check=partial(scaled_mm_plan.describe, gated=True),
)  # fmt: skip
QUANTIZED = Operator(
    "gated_mm_quantized", TENSORS, options=f"{OPTIONS}, str quantized", results="out out_scale",
    outputs=partial(scaled_mm_plan.quantized_outputs, halves=2),
    plan=partial(scaled_mm_plan.plan_quantized, gated=True),
    reference=partial(quantized_by_steps, FORWARD, gated=True), check=partial(scaled_mm_plan.describe, gated=True),
)  # fmt: skip


@public(options={"act": Among(checks.ACTIVATIONS, f"one of {', '.join(checks.ACTIVATIONS)}")})
def gated_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | float | None = None, scale_b: Tensor | float | None = None, *,
    act: str = "silu", recipe: str = "auto", bias: Tensor | None = None, out_dtype: torch.dtype | None = None,
    acc: str = "auto", packed: str | tuple[str | None, str | None] | None = None, nibble: str = "low",
    global_scale: Tensor | float | None = None, quant_out: str | None = None, b_layout: str = "auto",
    backend: str = "auto", out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return ``act(gate) * up`` with ``[gate, up] = a @ b.T * scales + bias``, computed in fp32 and rounded once.

    Operands, recipes and scales are those of :func:`scaled_mm`, for all rows of b. Differentiable once in
    floating-point operands without scales and in bias; the product is then stored in fp32.

    Args:
        a: ``[..., m, k]``. Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        b: ``[2 n, k]``, the rows of the gate first; or ``[k, 2 n]``, as for scaled_mm.
        scale_a: As for scaled_mm.
        scale_b: As for scaled_mm.
        act: "silu", "gelu_tanh", "gelu" or "relu".
        recipe: As for scaled_mm.
        bias: ``[2 n]``, floating-point.
        out_dtype: As for scaled_mm.
        acc: As for scaled_mm.
        packed: As for scaled_mm.
        nibble: As for scaled_mm.
        global_scale: One float32 factor of the sums, or two: for the gate and for up.
        quant_out: Return codes and scales, as for scaled_mm.
        b_layout: As for scaled_mm.
        backend: "auto" or "rtkernels", or a specific one: "sm90", "skinny", "unpack", "pad" or "mma". "swapped"
            (sm_90a, 9 to 256 rows) was compiled and emulated, but not yet run on a GPU with a gate: "auto" does not
            take it.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``[..., m, n]``, contiguous; with `quant_out` ``(codes, scales)``.
    """
    scale_a, scale_b, global_scale = (as_scale(a, t) for t in (scale_a, scale_b, global_scale))
    packed = as_packed(packed, nibble, a)
    a, b = along_k(a, b, b_layout, packed)
    tensors = (a, b, scale_a, scale_b, global_scale, bias, None)
    options = (recipe, b_layout, packed, act, out_dtype, acc, backend)
    if quant_out is not None:
        refuse_quantised_gradients("gated_mm", *tensors)
        return QUANTIZED.call(*tensors, *options, quant_out)
    if is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        scaled = scale_a is not None or scale_b is not None or global_scale is not None
        if a.dtype not in checks.FLOATS or b.dtype != a.dtype or scaled:
            refuse_quantised_gradients("gated_mm", *tensors)
        sums = differentiable_mm(a, b, bias, None, b_layout, None, torch.float32, acc, backend)
        if sums.shape[-1] % 2:
            raise ArgumentError(f"b has {sums.shape[-1]} rows; expected a multiple of 2: those of the gate, the others")
        gate, up = sums.chunk(2, -1)
        return (reference.activated(gate, act) * up).to(out_dtype or a.dtype)
    return FORWARD.call(*tensors, *options)


OP = Op(
    "gated_mm", public=("gated_mm",), kernels=(), torch_ops=(FORWARD, QUANTIZED), uses=("scaled_mm", "quantize_fp8")
)
