"""Products of groups of rows with a matrix each (mixture of experts), and the gradients of those matrices.

Sizes of groups are on the device: nothing waits for them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import checks, grouped_mm_plan
from rtkernels.ops.gemm.across import along_k
from rtkernels.ops.gemm.grouped_mm_plan import OPTIONS, TENSORS, WGRAD_OPTIONS, WGRAD_TENSORS, GroupedMm
from rtkernels.ops.gemm.scaled_mm import as_packed, as_scale, refuse_quantised_gradients
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.autograd import once_differentiable
from rtkernels.runtime.operator.declared import InPlace, Operator
from rtkernels.runtime.operator.registry import Op

FORWARD = Operator(
    "grouped_mm", TENSORS, options=OPTIONS, results="out", outputs=grouped_mm_plan.outputs, plan=grouped_mm_plan.plan,
    reference=grouped_mm_plan.run_reference, check=grouped_mm_plan.describe,
)  # fmt: skip
IN_PLACE = Operator(
    "grouped_mm_out", (InPlace("out", None), *TENSORS), options=f"{OPTIONS}, bool accumulate", results="",
    plan=grouped_mm_plan.plan, reference=grouped_mm_plan.run_reference_out, check=grouped_mm_plan.describe,
)  # fmt: skip
WGRAD = Operator(
    "grouped_wgrad", (InPlace("out", None), *WGRAD_TENSORS), options=WGRAD_OPTIONS, results="",
    plan=grouped_mm_plan.plan_wgrad, reference=grouped_mm_plan.run_reference_wgrad,
    check=grouped_mm_plan.describe_wgrad,
)  # fmt: skip


class _Grouped(torch.autograd.Function):
    """A grouped product of floats; the gradients are grouped products as well."""

    @staticmethod
    def forward(ctx, a, b, ends, align, b_layout, out_dtype, acc, backend):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b, ends)
        ctx.flipped = checks.is_flipped("b", b.shape, b.stride(), a.shape[-1], b_layout)
        ctx.align, ctx.acc, ctx.backend = align, acc, backend
        options = (align, 0, "none", b_layout, None, None, out_dtype, acc, backend)
        return FORWARD.call(a, b, None, None, ends, None, None, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout):
        if dout is None:
            return (None,) * 8
        a, b, ends = ctx.saved_tensors
        g, da, db = dout.to(a.dtype), None, None
        if ctx.needs_input_grad[0]:
            da = torch.zeros_like(a, memory_format=torch.contiguous_format)  # rows behind the last group
            options = (ctx.align, 0, "none", "nk" if ctx.flipped else "kn", None, None, None, ctx.acc, ctx.backend)
            IN_PLACE.call(da, g, b, None, None, ends, None, None, *options, False)
        if ctx.needs_input_grad[1]:
            db = torch.empty(b.shape, dtype=b.dtype, device=b.device)
            pair = (a.t(), g.t()) if ctx.flipped else (g.t(), a.t())
            WGRAD.call(db, *pair, None, None, ends, ctx.align, False, "none", ctx.acc, ctx.backend)
        return da, db, *(None,) * 6


@public(own_out=True)
def grouped_mm(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, *, offs: Tensor | None = None,
    m_indices: Tensor | None = None, align: int = 1, recipe: str = "auto", act: str | None = None,
    out_dtype: torch.dtype | None = None, out: Tensor | None = None, accumulate: bool = False,
    zero_padding: bool = False, acc: str = "auto", packed: str | tuple[str | None, str | None] | None = None,
    b_layout: str = "auto", backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Return the product of each row with the matrix of its group: ``out[i] = a[i] @ b[group of i].T``.

    Operands, recipes and scales are those of :func:`scaled_mm`; scales of b have the groups as their first dimension
    (``[g]`` for one number each). Differentiable once in floating-point operands without scales, with `offs`.

    Args:
        a: ``[rows, k]``: the rows of the first group, then those of the second, and so on. Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        b: ``[groups, n, k]``, or ``[groups, k, n]``: the dimension with unit stride is k (see b_layout). Up to 512
            groups.
        scale_a: Scales of the rows of a.
        scale_b: Scales of b, for each group.
        offs: int32 ``[groups]``: the row after the last one of each group, as in torch. Groups may be empty. Rows after
            the last group are not computed.
        m_indices: int32 ``[rows]``, instead of `offs`: the group of each row, -1 for rows that are not computed. Groups
            are consecutive, and each begins at a multiple of `align`.
        align: Every group begins at a multiple of this many rows; with 128, no tile contains two groups. Not checked.
        recipe: As for scaled_mm.
        act: None, "relu", "silu", "gelu_tanh" or "gelu".
        out_dtype: As for scaled_mm.
        out: ``[rows, n]``, the tensor to write the result to.
        accumulate: Add the result to `out` (floating-point), in fp32.
        zero_padding: Set rows that are not computed to 0 in a new result; otherwise they are uninitialised.
        acc: As for scaled_mm.
        packed: As for scaled_mm.
        b_layout: "nk" or "kn" states the layout of b's matrices, regardless of their strides.
        backend: "auto" or "rtkernels", or a specific one: "sm90", "skinny", "unpack", "pad" or "mma".

    Returns:
        ``[rows, n]``, contiguous, or `out`.
    """
    scale_a, scale_b, packed = as_scale(a, scale_a), as_scale(a, scale_b), as_packed(packed)
    a, b = along_k(a, b, b_layout, packed)
    tensors = (a, b, scale_a, scale_b, as_int32(offs), as_int32(m_indices), None)
    options = (align, 0, recipe, b_layout, packed, act, out_dtype, acc, backend)
    if accumulate and out is None:
        raise ArgumentError("accumulate is True; expected out, which the result is added to")
    if out is None and zero_padding:
        (memory,) = grouped_mm_plan.outputs(GroupedMm(*tensors, *options).metas)
        out = torch.zeros(memory.shape, dtype=memory.dtype, device=a.device)
    if out is not None:
        refuse_quantised_gradients("grouped_mm", a, b, scale_a, scale_b, out)
        IN_PLACE.call(out, *tensors, *options, accumulate)
        return out
    if is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors):
        quantised = a.dtype not in checks.FLOATS or b.dtype != a.dtype or scale_a is not None or scale_b is not None
        if quantised or offs is None or act is not None:
            refuse_quantised_gradients("grouped_mm (with offs, without act)", *tensors)
        return _Grouped.apply(a, b, tensors[4], align, b_layout, out_dtype, acc, backend)
    return FORWARD.call(*tensors, *options)


@public(own_out=True)
def grouped_mm_masked(
    a: Tensor, b: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None, masked_m: Tensor | None = None,
    *, expected_m: int = 0, recipe: str = "auto", act: str | None = None, out_dtype: torch.dtype | None = None,
    out: Tensor | None = None, acc: str = "auto", packed: str | tuple[str | None, str | None] | None = None,
    b_layout: str = "auto", backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Return ``a[g, :masked_m[g]] @ b[g].T`` for each group; the other rows of the result are uninitialised.

    For decoding in a CUDA graph, where every group has a fixed capacity of `m` rows. Operands, recipes and scales are
    those of :func:`scaled_mm` with the groups as first dimension. Not differentiable.

    Args:
        a: ``[groups, m, k]``. Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        b: ``[groups, n, k]``, or ``[groups, k, n]``, as for grouped_mm.
        scale_a: Scales of a, for each group.
        scale_b: Scales of b, for each group.
        masked_m: int32 ``[groups]``: the number of valid rows of each group.
        expected_m: The expected number of valid rows, 0 if unknown. It selects the tile (a small one for up to 64 rows)
            and whether 4-bit operands are unpacked; ``explain`` shows the effect.
        recipe: As for scaled_mm.
        act: None, "relu", "silu", "gelu_tanh" or "gelu".
        out_dtype: As for scaled_mm.
        out: ``[groups, m, n]``, the tensor to write the result to. Its other rows do not change.
        acc: As for scaled_mm.
        packed: As for scaled_mm.
        b_layout: As for grouped_mm.
        backend: As for grouped_mm.

    Returns:
        ``[groups, m, n]``, contiguous, or `out`.
    """
    if masked_m is None:
        raise ArgumentError("masked_m is None; expected int32 [groups]: how many rows of each group count")
    scale_a, scale_b, packed = as_scale(a, scale_a), as_scale(a, scale_b), as_packed(packed)
    a, b = along_k(a, b, b_layout, packed)
    tensors = (a, b, scale_a, scale_b, None, None, as_int32(masked_m))
    options = (1, check_integer("expected_m", expected_m), recipe, b_layout, packed, act, out_dtype, acc, backend)
    refuse_quantised_gradients("grouped_mm (not grouped_mm_masked)", a, b, scale_a, scale_b, out)
    if out is None:
        return FORWARD.call(*tensors, *options)
    IN_PLACE.call(out, *tensors, *options, False)
    return out


@public(own_out=True, tensors="x offs")
def grouped_wgrad(
    dy: Tensor, x: Tensor, scale_dy: Tensor | None = None, scale_x: Tensor | None = None, *, offs: Tensor,
    out: Tensor | None = None, accumulate: bool = True, align: int | None = None,
    out_dtype: torch.dtype = torch.float32, recipe: str = "auto", acc: str = "auto", backend: str = "auto",
) -> Tensor:  # fmt: skip
    """Return the weight gradients of a grouped product: ``out[g] += dy_g.T @ x_g`` over the rows of group g.

    Args:
        dy: bfloat16 or float16 ``[rows, n]``, or transposed fp8 ``[n, rows]``. Any object with ``__dlpack__`` is
            accepted; results are then of the same kind.
        x: bfloat16 or float16 ``[rows, k]`` in dy's dtype, or transposed fp8 ``[k, rows]``.
        scale_dy: For fp8: float32 ``[n, rows / 128]``, ``quantize_fp8(dy, granularity="group_t")[1].t()``, or ``[n]``.
        scale_x: For fp8: ``[k, rows / 128]`` or ``[k]``.
        offs: int32 ``[groups]``: the row after the last one of each group; groups may be empty.
        out: ``[groups, n, k]``, floating-point. Default: a new tensor.
        accumulate: Add to `out`, in fp32; False overwrites it (with 0 for a group without rows).
        align: Every group begins at a multiple of this many rows; must be 128 for scales of 128 rows. Default: 128 for
            fp8, else 1.
        out_dtype: Dtype of a new result.
        recipe: As for scaled_mm.
        acc: As for scaled_mm.
        backend: "auto" or "rtkernels", or a specific one: "sm90", "skinny", "unpack", "pad" or "mma".

    Returns:
        `out`, or a new tensor.
    """
    refuse_quantised_gradients("grouped_mm (not grouped_wgrad)", dy, x, scale_dy, scale_x, out)
    floats = dy.dtype in checks.FLOATS
    if offs.dim() != 1 or dy.dim() != 2 or x.dim() != 2:
        shapes = ", ".join(str(tuple(t.shape)) for t in (dy, x, offs))
        raise ArgumentError(f"dy, x and offs have shapes {shapes}; expected 2, 2 and 1 dimensions")
    a, b = (t.t() if floats else t for t in (dy, x))
    if out is None:
        out, accumulate = dy.new_empty((offs.shape[0], a.shape[0], b.shape[0]), dtype=out_dtype), False
    align = align or (1 if floats else 128)
    scale_dy, scale_x = as_scale(dy, scale_dy), as_scale(dy, scale_x)
    WGRAD.call(out, a, b, scale_dy, scale_x, as_int32(offs), align, accumulate, recipe, acc, backend)
    return out


def as_int32(t: Any) -> Any:
    """Return sizes as operators take them."""
    return t.int() if isinstance(t, Tensor) and t.dtype == torch.int64 else t


OP = Op(
    "grouped_mm", public=("grouped_mm", "grouped_mm_masked", "grouped_wgrad"), kernels=(),
    torch_ops=(FORWARD, IN_PLACE, WGRAD), uses=("scaled_mm",),
)  # fmt: skip
