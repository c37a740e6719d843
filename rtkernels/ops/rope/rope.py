"""Rotary position embedding of query and key heads, alone and for multi-head latent attention, with its inverse."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope import mla_rope as mla
from rtkernels.ops.rope import rope_operators as launch
from rtkernels.ops.rope import rope_table
from rtkernels.ops.rope.rope_operators import FORWARD, IN_PLACE
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.autograd import (
    applied,
    needs_grad,
    once_differentiable,
    refuse_leaf,
    written_by_copy,
)
from rtkernels.runtime.operator.registry import Op

_forward = FORWARD.call


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k, layout, start, rotary, pairs, inverse, in_place, *angles):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*angles[:4])
        ctx.options = layout, start, rotary, pairs, inverse, angles[4:]
        if in_place:
            ctx.mark_dirty(*(t for t in (x, k) if t is not None))
            IN_PLACE.call(x, k, layout, start, rotary, pairs, inverse, *angles)
            return (x, k) if k is not None else x
        y, ky = _forward(x, k, layout, layout, start, rotary, pairs, inverse, *angles)
        return (y, ky) if k is not None else y

    @staticmethod
    @once_differentiable
    def backward(ctx, dy, dky=None):
        layout, start, rotary, pairs, inverse, rest = ctx.options
        given = [d for d in (dy, dky) if d is not None]
        if not given:
            return (None,) * 16
        first, second = given[0], given[1] if len(given) > 1 else None
        results = _forward(
            first, second, layout, layout, start, rotary, pairs, not inverse, *ctx.saved_tensors, *rest
        )  # fmt: skip
        found = iter(results)
        dx = next(found) if dy is not None else None
        dk = next(found) if dky is not None else None
        return (dx, dk, *(None,) * 14)


_differentiable = applied(_Rope)


@public(options={"rotary_start": Within("int")})
def rope(
    x: Tensor, cos: Tensor, sin: Tensor, *, k: Tensor | None = None, layout: str = "bshd", rotary: int | None = None,
    interleaved: bool = False, positions: Tensor | None = None, cu_seqlens: Tensor | None = None,
    sections: tuple[int, int, int] | None = None, sections_interleaved: bool = False, cp_rank: int = 0,
    cp_size: int = 1, mscale: float = 1.0, inverse: bool = False, in_place: bool = False,
    output_interleaved: bool | None = None, rotary_start: int = 0,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Rotate pairs of elements of every head by the angles of its token.

    ``y0 = x0 * cos0 - x1 * sin0`` and ``y1 = x1 * cos1 + x0 * sin1`` for each pair; other elements are copied. Computed
    in fp32 and rounded once. Differentiable once in x and k; the gradient is the adjoint rotation, also if the two
    elements of a pair have different angles.

    Args:
        x: ``[batch, length, heads, head_dim]`` or as given by `layout`, or packed tokens ``[tokens, heads, head_dim]``.
            bfloat16, float16 or float32; any strides (copied unless heads have unit stride). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        cos: ``[positions, n]``, or ``[batch, length, n]`` with a row for each token (batch may be 1; with `sections`
            ``[3, batch, length, n]``). n is ``rotary / 2``, one value per pair, or `rotary`, one value per element in
            the order of the head. x's dtype or float32. A position outside the table gives NaN.
        sin: Like cos.
        k: A second tensor to rotate in the same launch; may have a different number of heads.
        layout: Layout of x, k and the results: ``"bshd"``, ``"sbhd"`` (sequence first) or ``"bhsd"``.
        rotary: So many elements of a head are rotated, those from `rotary_start` on. Default: all of them.
        interleaved: Pairs are elements (2 i, 2 i + 1) instead of (i, i + rotary / 2).
        positions: int32 or int64 ``[batch, length]`` or ``[length]``; the positions of the tokens. Default: their
            indices in the sequence.
        cu_seqlens: int32 or int64 ``[sequences + 1]``, the starts of the packed sequences and the end of the last one,
            before context parallelism (fewer than 2^32 tokens in total). The position of a token is then its index in
            its own sequence.
        sections: Number of pairs for each of three position streams (mrope of Qwen-VL); `positions` is then
            ``[3, ...]``.
        sections_interleaved: Pair i belongs to stream ``i % 3`` while that stream has pairs left, then to the first.
        cp_rank: Rank in zigzag context parallelism: this rank has parts ``cp_rank`` and ``2 * cp_size - 1 - cp_rank``
            of the ``2 * cp_size`` parts of every sequence.
        cp_size: Number of such ranks; sequence lengths are multiples of ``2 * cp_size``.
        mscale: Factor of cos and sin.
        inverse: Apply the adjoint rotation instead, as the backward pass does.
        in_place: Overwrite x and k and return them. With gradients, neither may be a leaf.
        output_interleaved: The order of pairs in the result, like `interleaved`, which is the default. DeepSeek-V3
            reads neighbours and writes halves: ``interleaved=True, output_interleaved=False``. Tables with one value
            per element are in the order of the result.
        rotary_start: The first element of a head that is rotated.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``y``, contiguous, in x's shape and dtype; with k ``(y, rotated k)``. With sections, or with tables whose rows
        are not aligned, fp32 tables of ``tokens * n`` entries are allocated temporarily.
    """
    spelled = angles_of.spell_sections(sections, sections_interleaved) if sections is not None else ""
    pairs = angles_of.order_of_pairs(interleaved, output_interleaved)
    angles = (cos, sin, positions, cu_seqlens, spelled, cp_rank, cp_size, mscale)
    if is_grad_enabled() and (needs_grad(x, k) or needs_grad(cos, sin)):
        no_gradient(cos, sin)
        if in_place:
            refuse_leaf("x", x)
            refuse_leaf("k", k)
        copied = written_by_copy(in_place)
        rotated = _differentiable(
            x, k, layout, rotary_start, rotary or 0, pairs, inverse, in_place and not copied, *angles
        )  # fmt: skip
        if not copied:
            return rotated
        return x.copy_(rotated) if k is None else (x.copy_(rotated[0]), k.copy_(rotated[1]))
    if in_place:
        IN_PLACE.call(x, k, layout, rotary_start, rotary or 0, pairs, inverse, *angles)
        return x if k is None else (x, k)
    y, ky = _forward(x, k, layout, layout, rotary_start, rotary or 0, pairs, inverse, *angles)
    return y if k is None else (y, ky)


def no_gradient(cos: Tensor, sin: Tensor) -> None:
    """Raise if a table requires a gradient, which is not supported."""
    if cos.requires_grad or sin.requires_grad:
        raise ArgumentError("cos or sin requires a gradient; rotations are differentiable in the rotated tensors only")


OP = Op(
    "rope",
    public=("rope", "mla_rope", "rope_table"),
    kernels=(launch.ROPE, launch.ROPE_TOKEN, launch.ROPE_ANY, launch.TABLES, *mla.KERNELS, rope_table.KERNEL),
    torch_ops=(FORWARD, IN_PLACE, *mla.TORCH_OPS, rope_table.TABLE),
)
