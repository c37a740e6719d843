"""Dense copies with two dimensions swapped, padded by request, and per expert."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.ops.layout import transpose_plan as plans
from rtkernels.ops.layout.transpose_list import MATRICES, one_launch_fits
from rtkernels.ops.layout.transpose_plan import check_pad, checked_dims, out_shape, padded, padded_rows
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import metadata
from rtkernels.runtime.operator.autograd import applied, differentiable, needs_grad
from rtkernels.runtime.operator.declared import Dense, Operator, Rows, UnitStride
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.torch_private import TENSOR_TYPES, is_dynamo_compiling

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _bits(x: Tensor) -> Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.itemsize])


def _reference(x: Tensor, dim0: int, dim1: int, pad_to: int) -> Tensor:
    low, high = checked_dims(metadata(x), dim0, dim1, pad_to)
    y = torch.zeros(out_shape(x.shape, low, high, pad_to), dtype=x.dtype, device=x.device)
    _bits(y)[..., : x.shape[low] if high == x.dim() - 1 else None] = _bits(x).transpose(low, high)
    return y


def _reference_experts(x: Tensor, counts: Tensor, pad_to: int) -> Tensor:
    cols = x.shape[1]
    y = torch.zeros(padded_rows(x.shape[0], counts.shape[0], pad_to) * cols, dtype=x.dtype, device=x.device)
    first = place = 0
    for count in counts.tolist():
        end = min(first + max(count, 0), x.shape[0])
        rows = padded(end - first, pad_to)
        size = rows * cols
        _bits(y)[place : place + size].view(cols, rows)[:, : end - first] = _bits(x[first:end]).t()
        first, place = end, place + size
    return y


def _outputs(x, dim0, dim1, pad_to):
    low, high = sorted((dim0 % x.dim(), dim1 % x.dim()))
    return (Memory(out_shape(x.shape, low, high, pad_to), x.dtype),)


TRANSPOSE = Operator(
    "transpose", (UnitStride("x", None),), options="int dim0, int dim1, int pad_to", results="y", outputs=_outputs,
    plan=plans.plan, reference=_reference, check=checked_dims,
)  # fmt: skip
EXPERTS = Operator(
    "transpose_experts", (Rows("x", None), Dense("counts", None)), options="int pad_to", results="y",
    outputs=lambda x, counts, pad_to: (
        Memory((padded_rows(x.shape[0], counts.shape[0], pad_to) * x.shape[1],), x.dtype),
    ),
    plan=plans.plan_experts, reference=_reference_experts, check=plans.check_experts,
)  # fmt: skip


class _Transpose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, dim0: int, dim1: int, pad_to: int) -> Tensor:
        ctx.dims, ctx.size = (dim0, dim1), x.shape[min(dim0 % x.dim(), dim1 % x.dim())] if pad_to > 1 else None
        return TRANSPOSE.call(x, dim0, dim1, pad_to)

    @staticmethod
    @differentiable
    def backward(ctx, dy: Tensor):
        if ctx.size is not None:
            dy = dy.narrow(-1, 0, ctx.size)
        return transpose(dy, *ctx.dims), None, None, None


_differentiable = applied(_Transpose)


def _transposed_list(xs: Sequence[Tensor], dim0: int, dim1: int, pad_to: int) -> list[Tensor]:
    """Transpose several tensors: in one launch if they are slices at equal distances, or dense and of one shape."""
    if all(isinstance(x, Tensor) for x in xs) and len(xs) > 1:
        stacked = _stacked(xs) if xs[0].dim() < 4 else None
        if stacked is not None:
            dims = [d + 1 if d >= 0 else d for d in (dim0, dim1)]
            return list(transpose(stacked, *dims, pad_to=pad_to).unbind())
        if {dim0, dim1} in ({0, 1}, {-2, -1}) and one_launch_fits(xs):
            check_pad(pad_to)
            return list(MATRICES(list(xs), pad_to).unbind())
    return [transpose(x, dim0, dim1, pad_to=pad_to) for x in xs]


def _stacked(xs: Sequence[Tensor]) -> Tensor | None:
    first = xs[0]
    if is_dynamo_compiling() or any(
        type(x) not in TENSOR_TYPES
        or x.requires_grad
        or (x.shape, x.stride(), x.dtype) != (first.shape, first.stride(), first.dtype)
        or x.untyped_storage().data_ptr() != first.untyped_storage().data_ptr()
        for x in xs
    ):
        return None
    offsets = [x.storage_offset() for x in xs]
    step = offsets[1] - offsets[0]
    if step < 0 or any(b - a != step for a, b in pairwise(offsets)):
        return None
    return first.as_strided((len(xs), *first.shape), (step, *first.stride()))


@public
def transpose(
    x: Tensor | Sequence[Tensor], dim0: int = -2, dim1: int = -1, *, pad_to: int = 1,
    out: Tensor | Sequence[Tensor | None] | None = None,
) -> Tensor | list[Tensor]:  # fmt: skip
    """Return a contiguous copy of a tensor with two dimensions swapped.

    Equal to ``x.transpose(dim0, dim1).contiguous()``. With `pad_to`, the last dimension of the result is padded with
    zeros to a multiple: a matrix ``[m, n]`` becomes ``[n, ceil(m / pad_to) * pad_to]``.

    Differentiable any number of times.

    Args:
        x: Two to four dimensions, elements of 1, 2 or 4 bytes: floating point (fp8 too), integer or bool. Any strides
            (copied unless the last dimension has unit stride). Any object with ``__dlpack__`` is accepted; results are
            then of the same kind. Or a list of tensors: equally spaced slices of one tensor (weights of experts) are
            transposed in one launch, and so are contiguous matrices of one shape if `out` is not given.
        dim0: A dimension; negative ones count from the end.
        dim1: Another one.
        pad_to: Multiple to pad to, 1 to 65536; more than 1 only if the last dimension is one of the two.
        out: Tensor to write the result to, with its shape, dtype and strides; a list for a list. Not with gradients.

    Returns:
        A contiguous tensor in x's dtype; a list for a list.
    """
    if isinstance(x, (list, tuple)):
        return _transposed_list(x, dim0, dim1, pad_to)
    if is_grad_enabled() and needs_grad(x):
        return _differentiable(x, dim0, dim1, pad_to)
    return TRANSPOSE.call(x, dim0, dim1, pad_to)


@public
def transpose_experts(x: Tensor, counts: Tensor, *, pad_to: int = 1, out: Tensor | None = None) -> Tensor:
    """Transpose the rows of each expert separately: matrices ``[c, n]`` to ``[n, p]``, one after the other.

    ``p`` is c padded with zeros to a multiple of `pad_to`. With ``o`` the sum of p over the preceding experts, an
    expert's matrix is ``result[o * n : (o + p) * n].view(n, p)``. The host never reads `counts`, so the call does not
    synchronise and can be captured in a CUDA graph.

    Not differentiable: the result never requires grad.

    Args:
        x: ``[t, n]``, rows sorted by expert; elements of 1, 2 or 4 bytes. Any strides (copied unless rows are
            unit-stride). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        counts: Rows of each expert, ``[experts]``, int32 or int64 on x's device; may be 0. Negative counts are taken as
            0, and rows are never read past the end.
        pad_to: Multiple to pad to, 1 to 65536.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        ``[(t + (pad_to - 1) * min(experts, t)) * n]``, which is enough for any counts; zeros follow the last expert's
        matrix.
    """
    if x.requires_grad:
        x = x.detach()
    return EXPERTS.call(x, counts, pad_to)


OP = Op(
    "transpose", public=("transpose", "transpose_experts"), kernels=plans.KERNELS,
    torch_ops=(TRANSPOSE, EXPERTS, MATRICES),
)  # fmt: skip
