"""Split of a fused qkv projection, RMS norm of q and k heads, rotary embedding and transpose in one pass."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope import qk_norm_rope_plan as plans
from rtkernels.ops.rope.angles import Rotations
from rtkernels.ops.rope.qk_norm_rope_plan import Inputs
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import metadata, nothing
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import applied, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Operator, UnitStride
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op

# "options" in operator arguments: q_heads, kv_heads, grouped, layout, rotary, pairs, silu, eps, offset. They come after
# the first tensors; then follow angles_of.ARGUMENTS.
_OPTION_COUNT = 9


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _columns(found: plans.Qkv, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return which heads of qkv are q's, k's and v's."""
    heads = torch.arange(found.q_heads + 2 * found.kv_heads, dtype=torch.int64, device=device)
    if not found.grouped:
        return heads.split((found.q_heads, found.kv_heads, found.kv_heads))
    group = found.q_heads // found.kv_heads
    parts = heads.view(found.kv_heads, group + 2).split((group, 1, 1), 1)
    return tuple(part.flatten() for part in parts)


def _by_head(qkv: Tensor, found: plans.Qkv, layout: str) -> Tensor:
    """Return qkv as ``[batch, length, all heads, head_dim]``."""
    x = qkv.unsqueeze(0) if qkv.dim() == 2 else qkv.transpose(0, 1) if layout == "sbhd" else qkv
    return x.unflatten(-1, (-1, found.head_dim))


def _gain(weight: Tensor | None, offset: float) -> Tensor | float:
    return 1.0 if weight is None else weight.float() + offset


def _prepare(inputs: Inputs, given: Rotations, inverse: bool):
    qkv = inputs.qkv
    metas = inputs._replace(qkv=metadata(qkv), q_weight=metadata(inputs.q_weight), k_weight=metadata(inputs.k_weight))
    found, angles = plans.check(metas, given.metas, inverse)
    rotation = angles_of.reference_tables(given, angles, found.batch, found.length)
    return rotation, _by_head(qkv, found, inputs.layout).float(), _columns(found, qkv.device)


def _reference_fwd(inputs: Inputs, given: Rotations):
    qkv = inputs.qkv
    rotation, x, columns = _prepare(inputs, given, False)
    if inputs.silu:
        x = x * torch.sigmoid(x)
    results = []
    for heads, weight in zip(columns[:2], (inputs.q_weight, inputs.k_weight), strict=True):
        u = x[..., heads, :]
        n = u * torch.rsqrt(u.square().mean(-1, keepdim=True) + inputs.eps) * _gain(weight, inputs.offset)
        results.append(angles_of.rotate(n, rotation, 0, inputs.pairs, False))
    results.append(x[..., columns[2], :])
    results = [r.to(qkv.dtype) for r in results]
    return tuple((r.squeeze(0) if qkv.dim() == 2 else r).contiguous() for r in results)


def _reference_bwd(dq: Tensor, dk: Tensor, dv: Tensor, inputs: Inputs, weight_grad: bool, given: Rotations):
    qkv, q_weight, silu = inputs.qkv, inputs.q_weight, inputs.silu
    rotation, x, columns = _prepare(inputs, given, True)
    packed = qkv.dim() == 2
    sigmoid = torch.sigmoid(x)
    slope = sigmoid * (1 + x * (1 - sigmoid)) if silu else 1.0
    u = x * sigmoid if silu else x
    dx, dweights = torch.empty_like(x), []
    for heads, weight, d in zip(columns[:2], (q_weight, inputs.k_weight), (dq, dk), strict=True):
        h = u[..., heads, :]
        rstd = torch.rsqrt(h.square().mean(-1, keepdim=True) + inputs.eps)
        a = angles_of.rotate((d.unsqueeze(0) if packed else d).float(), rotation, 0, inputs.pairs, True)
        g = a * _gain(weight, inputs.offset)
        dx[..., heads, :] = rstd * g - h * rstd**3 * (g * h).mean(-1, keepdim=True)
        dweights.append((a * h * rstd).sum((0, 1, 2)))
    dx[..., columns[2], :] = (dv.unsqueeze(0) if packed else dv).float()
    dx = (dx * slope).flatten(-2).to(qkv.dtype)
    dqkv = dx.squeeze(0) if packed else dx.transpose(0, 1) if inputs.layout == "sbhd" else dx
    return dqkv.contiguous(), torch.stack(dweights).to(q_weight.dtype) if weight_grad else nothing(qkv)


def _outputs_fwd(qkv, q_heads, kv_heads, layout):
    outer = qkv.shape[:-1] if layout == "bshd" or qkv.dim() == 2 else (qkv.shape[1], qkv.shape[0])
    dim = qkv.shape[-1] // (q_heads + 2 * kv_heads)
    return tuple(Memory((*outer, heads, dim), qkv.dtype) for heads in (q_heads, kv_heads, kv_heads))


def _outputs_bwd(dq, qkv, q_weight, weight_grad):
    return Memory.like(qkv), Memory((2, dq.shape[-1]), q_weight.dtype) if weight_grad else None


_OPTIONS = (
    "int q_heads, int kv_heads, bool grouped, str layout, int rotary, int pairs, bool silu, float eps, float offset"
).split(", ")
_INPUTS = UnitStride("qkv", None), *(UnitStride(name, None, optional=True) for name in ("q_weight", "k_weight"))
_GRADIENTS = (UnitStride(name, None) for name in ("dq", "dk", "dv"))
FORWARD = Operator(
    "qk_norm_rope_fwd", (*_INPUTS, *_OPTIONS, *angles_of.ARGUMENTS), results="q k v", outputs=_outputs_fwd,
    plan=plans.plan_fwd, reference=_reference_fwd, check=plans.check,
)  # fmt: skip
BACKWARD = Operator(
    "qk_norm_rope_bwd", (*_GRADIENTS, *_INPUTS, *_OPTIONS, "bool weight_grad", *angles_of.ARGUMENTS),
    results="dqkv dweights", outputs=_outputs_bwd, plan=plans.plan_bwd, reference=_reference_bwd,
    check=plans.check_bwd,
)  # fmt: skip
_forward = FORWARD.call


class _QkNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_weight, k_weight, *args):
        angles = args[_OPTION_COUNT:]
        ctx.save_for_backward(qkv, q_weight, k_weight, *angles[:4])
        ctx.options, ctx.rest = args[:_OPTION_COUNT], angles[4:]
        return _forward(qkv, q_weight, k_weight, *args)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        qkv, q_weight, k_weight, *tables = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        dqkv, dweights = BACKWARD.call(
            dq, dk, dv, qkv, q_weight, k_weight, *ctx.options, wanted[1] or wanted[2], *tables, *ctx.rest
        )
        return (
            dqkv if wanted[0] else None,
            dweights[0] if wanted[1] else None,
            dweights[1] if wanted[2] else None,
            *(None,) * (_OPTION_COUNT + 8),
        )


_differentiable = applied(_QkNormRope)


@public(options={"head_order": Among(("grouped", "plain"), "'grouped' or 'plain'")})
def qk_norm_rope(
    qkv: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, cos: Tensor, sin: Tensor, *, q_heads: int,
    kv_heads: int, head_order: str = "grouped", layout: str = "sbhd", rotary: int | None = None,
    interleaved: bool = False, silu: bool = False, eps: float = 1e-6, offset: float = 0.0,
    positions: Tensor | None = None, cu_seqlens: Tensor | None = None, sections: tuple[int, int, int] | None = None,
    sections_interleaved: bool = False, cp_rank: int = 0, cp_size: int = 1, mscale: float = 1.0,
    cu_seqlens_kv: Tensor | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split a fused qkv projection into heads, normalise those of q and k, and rotate them.

    With ``u = qkv``, or ``silu(qkv)``: ``n = u / sqrt(mean(u^2) + eps) * (offset + weight)`` over each head of q and k,
    then the rotation of ``rope``; heads of v are u. Computed in fp32 and rounded once. Differentiable once in qkv and
    the weights; gradients are deterministic. Only qkv is saved for the backward pass.

    Args:
        qkv: ``[length, batch, columns]``, ``[batch, length, columns]`` or packed tokens ``[tokens, columns]``, where
            ``columns = (q_heads + 2 * kv_heads) * head_dim``. bfloat16, float16 or float32; any strides (copied unless
            rows have unit stride). Any object with ``__dlpack__`` is accepted.
        q_weight: ``[head_dim]`` in qkv's dtype or float32. None for ones (k_weight must then be None, too).
        k_weight: The same for k, in q_weight's dtype.
        cos: As for ``rope``.
        sin: Like cos.
        q_heads: Number of query heads.
        kv_heads: Number of key heads, and of value heads.
        head_order: ``"grouped"``: for each kv head its q heads, then k, then v; q_heads must be a multiple of kv_heads.
            ``"plain"``: all heads of q, then of k, then of v.
        layout: Layout of qkv: ``"sbhd"`` (sequence first) or ``"bshd"``.
        rotary: The first so many elements of a head are rotated. Default: all.
        interleaved: Pairs are elements (2 i, 2 i + 1) instead of (i, i + rotary / 2).
        silu: Apply SiLU to q, k and v first.
        eps: Added to the mean square.
        offset: Added to the weights.
        positions: As for ``rope``.
        cu_seqlens: As for ``rope``; for packed tokens.
        cu_seqlens_kv: cu_seqlens of k and v if it differs from that of q. Costs a second launch.
        sections: As for ``rope``.
        sections_interleaved: As for ``rope``.
        cp_rank: As for ``rope``.
        cp_size: As for ``rope``.
        mscale: Factor of cos and sin.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(q, k, v)``, contiguous ``[batch, length, heads, head_dim]`` (packed: ``[tokens, heads, head_dim]``), in qkv's
        dtype.
    """
    if cu_seqlens_kv is not None:
        arguments = {**locals(), "cu_seqlens_kv": None}
        q_out = qk_norm_rope(**arguments)[0]
        return q_out, *qk_norm_rope(**{**arguments, "cu_seqlens": cu_seqlens_kv})[1:]
    spelled = angles_of.spell_sections(sections, sections_interleaved) if sections is not None else ""
    pairs = angles_of.ADJACENT if interleaved else angles_of.HALVES
    args = (
        q_heads, kv_heads, head_order == "grouped", layout, rotary or 0, pairs, silu, eps, offset, cos, sin, positions,
        cu_seqlens, spelled, cp_rank, cp_size, mscale,
    )  # fmt: skip
    if is_grad_enabled() and (needs_grad(qkv, q_weight, k_weight) or needs_grad(cos, sin)):
        if cos.requires_grad or sin.requires_grad:
            raise ArgumentError("cos or sin requires a gradient; qk_norm_rope is differentiable in qkv and the weights")
        return _differentiable(qkv, q_weight, k_weight, *args)
    return _forward(qkv, q_weight, k_weight, *args)


OP = Op(
    "qk_norm_rope", public=("qk_norm_rope",), kernels=plans.KERNELS, torch_ops=(FORWARD, BACKWARD),
    uses=("rope", "column_sum"),
)  # fmt: skip
