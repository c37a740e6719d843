"""Rotary embedding of multi-head latent attention: q's rotary part, and one rotary part of k shared by all heads."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import Rotated, Rotations
from rtkernels.ops.rope.heads import Heads, as_heads, from_heads, heads_of, shape_in
from rtkernels.ops.rope.rope_operators import FORWARD, IN_PLACE, TYPES, UNIT_LIMIT, plain_tables
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import metadata, vector_bytes
from rtkernels.runtime.operator.autograd import (
    applied,
    needs_grad,
    once_differentiable,
    refuse_leaf,
    written_by_copy,
)
from rtkernels.runtime.operator.declared import Meta, Operator, UnitStride
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_UNIT = "rope/mla_rope.cu"
_HEADS = 4  # kMlaHeads
_WARPS = 4  # kMlaWarps
_VECTORS = [(t, v) for t in TYPES for v in (1, 4 if t == "fp32" else 8)]
_DIMS = (
    "tokens:i64 length:i64 heads:i64 nope:i64 value_dim:i64 pairs:i64 kv_batch:i64 kv_place:i64 kv_head:i64 "
    "pos_batch:i64 pos_place:i64 k_batch:i64 k_place:i64 k_head:i64 v_batch:i64 v_place:i64 v_head:i64 "
) + angles_of.ARGS
_FWD = Kernel(
    _UNIT, "mla_rope_kv_fwd", struct=True, template="T VEC", max_registers=64,
    args="kv:ptr k_pos:ptr k:ptr v:ptr " + _DIMS, variants=_VECTORS,
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "mla_rope_kv_bwd", struct=True, template="T VEC", max_registers=64,
    args="dk:ptr dv:ptr dkv:ptr dk_pos:ptr " + _DIMS, variants=_VECTORS,
)  # fmt: skip
KERNELS = (_FWD, _BWD)
_HEAD_DIMENSION = {"bshd": 2, "sbhd": 2, "bhsd": 1}


def _pos_heads(name: str, pos: Meta, layout: str, like: Heads, packed: bool) -> Heads:
    """Return k_pos as one head per token; it may lack the dimension of heads."""
    dtype, shape, stride, device = pos[:4]
    if len(shape) == (2 if packed else 3):
        at = 1 if packed else _HEAD_DIMENSION.get(layout, 2)
        shape, stride = (*shape[:at], 1, *shape[at:]), (*stride[:at], 0, *stride[at:])
    found = heads_of(name, (dtype, shape, stride, device), layout)
    if len(shape) != (3 if packed else 4) or found[:3] != (*like[:2], 1):
        raise ArgumentError(f"{name} has shape {tuple(pos[1])}; expected the batch and length of kv and one head")
    return found


class Latent(NamedTuple):
    """Options of both directions."""

    nope: int
    layout: str
    out_layout: str
    pairs: int


def _check(kv: Meta, k_pos: Meta, of: Latent, given: Rotations, inverse: bool = False):
    token("kv", kv[0])
    check_same("k_pos", k_pos[0], kv[0], "dtype", of="kv")
    nope, packed = of.nope, len(kv[1]) == 3
    heads = heads_of("kv", kv, of.layout)
    pos = _pos_heads("k_pos", k_pos, of.layout, heads, packed)
    if not 0 <= nope <= heads.head_dim:
        raise ArgumentError(
            f"q has {nope} elements of a head beside the rotary part and kv {heads.head_dim} in all; expected kv to "
            f"have as many, and v"
        )
    rotary = angles_of.check_rotary(0, pos.head_dim)
    adjacent = of.pairs in (angles_of.ADJACENT, angles_of.SCATTER)
    found = angles_of.check(given, Rotated(kv[0], kv[3], heads.batch, heads.length, packed, rotary, adjacent, inverse))
    k = heads._replace(head_dim=nope + rotary)
    v = heads._replace(head_dim=heads.head_dim - nope)
    return heads, pos, found, shape_in(of.out_layout, k, packed), shape_in(of.out_layout, v, packed)


def _steps(
    kv: Meta, k_pos: Meta, of: Latent, given: Rotations, starts: int, device: int,
    gradients: tuple[Meta, Meta] | None = None,
) -> Steps:  # fmt: skip
    """Return the launch.

    Forward: kv and k_pos are inputs. Backward: they stand for dense gradients of these shapes; `gradients` are the
    incoming ones, of k and v.
    """
    backward, nope, pairs = gradients is not None, of.nope, of.pairs
    given, converted = given.uniform()
    heads, pos, found, *shapes = _check(kv, k_pos, of, given, backward)
    t, size, tokens, value_dim = kv.token, kv.dtype.itemsize, heads.batch * heads.length, heads.head_dim - nope
    dense = [Meta(kv.dtype, s, dense_strides(s), device, 0) for s in shapes]
    to_k, to_v = (heads_of("", m, of.out_layout) for m in gradients or dense)
    strides = [*heads.strides, *to_k.strides, *to_v.strides]
    sizes = nope, value_dim, to_k.head_dim, heads.head_dim, *strides
    aligned16 = vector_bytes(starts, *(n * size for n in sizes)) == 16
    order = pairs ^ 1 if backward and pairs in (angles_of.GATHER, angles_of.SCATTER) else pairs
    per_token = -(-heads.heads // _HEADS)
    units = tokens if backward else tokens * per_token
    if units > UNIT_LIMIT:
        raise ArgumentError(f"kv has {tokens} tokens; expected fewer than {UNIT_LIMIT // max(per_token, 1)}")
    variant = (t, (16 // size) if aligned16 else 1)
    if backward:
        launch, tensors = _BWD.bind(variant, device, tokens, 32 * _WARPS), ("dk", "dv", "dkv", "dk_pos")
    else:
        launch, tensors = _FWD.bind(variant, device, -(-units // 4), 128), ("kv", "k_pos", "k", "v")
    numbers = tokens, heads.length, heads.heads, nope, value_dim, order, *heads.strides, *pos.strides[:2]
    tables = plain_tables(found, given.index)
    step = Step(launch, *tensors, *numbers, *to_k.strides, *to_v.strides, *tables.tensors, *tables.angles)
    return Steps(step, converted=converted)


def _plan_fwd(kv: Meta, k_pos: Meta, of: Latent, given: Rotations, device: int) -> Steps:
    return _steps(kv, k_pos, of, given, kv.misaligned, device)


def _plan_bwd(dk: Meta, dv: Meta, of: Latent, pos_dims: int, given: Rotations, device: int) -> Steps:
    results = _gradient_metas(dk, dv, of, pos_dims)
    return _steps(*results, of, given, dk.misaligned | dv.misaligned, device, (dk, dv))


def _gradient_metas(dk: Meta, dv: Meta, of: Latent, pos_dims: int) -> tuple[Meta, Meta]:
    """Return what dkv and dk_pos are."""
    of_k, of_v = heads_of("dk", dk, of.out_layout), heads_of("dv", dv, of.out_layout)
    packed = len(dk[1]) == 3
    kv = shape_in(of.layout, of_k._replace(head_dim=of.nope + of_v.head_dim), packed)
    pos = shape_in(of.layout, of_k._replace(heads=1, head_dim=of_k.head_dim - of.nope), packed)
    if pos_dims < len(pos):
        at = 1 if packed else _HEAD_DIMENSION[of.layout]
        pos = pos[:at] + pos[at + 1 :]
    check_same("dv", dv[0], dk[0], "dtype", of="dk")
    return tuple(Meta(dk[0], s, dense_strides(s), dk[3], 0) for s in (kv, pos))


def _check_bwd(dk: Meta, dv: Meta, of: Latent, pos_dims: int, given: Rotations) -> None:
    _check(*_gradient_metas(dk, dv, of, pos_dims), of, given, True)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(kv: Tensor, k_pos: Tensor, of: Latent, given: Rotations):
    heads, _, found, *_ = _check(metadata(kv), metadata(k_pos), of, given.metas)
    packed, nope = kv.dim() == 3, of.nope
    x = as_heads(kv, of.layout)
    pos = k_pos.reshape(_with_head(k_pos, kv, of.layout))
    tables = angles_of.reference_tables(given, found, heads.batch, heads.length)
    rotated = angles_of.rotate(as_heads(pos, of.layout).float(), tables, 0, of.pairs, False).to(kv.dtype)
    k = torch.cat((x[..., :nope], rotated.expand(*x.shape[:3], -1)), -1)
    return from_heads(k, of.out_layout, packed), from_heads(x[..., nope:], of.out_layout, packed)


def _with_head(k_pos: Tensor, kv: Tensor, layout: str) -> list[int]:
    if k_pos.dim() == kv.dim():
        return list(k_pos.shape)
    at = 1 if kv.dim() == 3 else _HEAD_DIMENSION[layout]
    return [*k_pos.shape[:at], 1, *k_pos.shape[at:]]


def _reference_bwd(dk: Tensor, dv: Tensor, of: Latent, pos_dims: int, given: Rotations):
    kv, k_pos = _gradient_metas(metadata(dk), metadata(dv), of, pos_dims)
    heads, _, found, *_ = _check(kv, k_pos, of, given.metas, True)
    packed, nope = dk.dim() == 3, of.nope
    gk, gv = as_heads(dk, of.out_layout), as_heads(dv, of.out_layout)
    dkv = torch.cat((gk[..., :nope], gv), -1)
    tables = angles_of.reference_tables(given, found, heads.batch, heads.length)
    total = gk[..., nope:].float().sum(2, keepdim=True)
    pos = angles_of.rotate(total, tables, 0, of.pairs, True).to(dk.dtype)
    return from_heads(dkv, of.layout, packed), from_heads(pos, of.layout, packed).reshape(k_pos[1])


def _outputs_fwd(kv, k_pos, nope, layout, out_layout):
    heads, sizes = heads_of("kv", kv, layout), (nope + k_pos.shape[-1], kv.shape[-1] - nope)
    shapes = (shape_in(out_layout, heads._replace(head_dim=size), kv.dim() == 3) for size in sizes)
    return tuple(Memory(shape, kv.dtype) for shape in shapes)


def _outputs_bwd(dk: Meta, dv: Meta, of: Latent, pos_dims: int):
    return tuple(map(Memory.like, _gradient_metas(dk, dv, of, pos_dims)))


_OPTIONS = "int nope", "str layout", "str out_layout", "int pairs"
KV_FORWARD = Operator(
    "mla_rope_kv_fwd", (UnitStride("kv", None), UnitStride("k_pos", None), *_OPTIONS, *angles_of.ARGUMENTS),
    results="k v", outputs=_outputs_fwd, plan=_plan_fwd, reference=_reference_fwd, check=_check,
)  # fmt: skip
KV_BACKWARD = Operator(
    "mla_rope_kv_bwd",
    (UnitStride("dk", None), UnitStride("dv", None), *_OPTIONS, "int pos_dims", *angles_of.ARGUMENTS),
    results="dkv dk_pos", outputs=_outputs_bwd, plan=_plan_bwd, reference=_reference_bwd, check=_check_bwd,
)  # fmt: skip
TORCH_OPS = (KV_FORWARD, KV_BACKWARD)


class _MlaRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, kv, k_pos, nope, layout, out_layout, pairs, in_place, *angles):
        ctx.save_for_backward(*angles[:4])
        ctx.options = nope, layout, out_layout, pairs, k_pos.dim(), k_pos.shape[-1], angles[4:]
        if in_place:
            ctx.mark_dirty(q)
        return _run(q, kv, k_pos, nope, layout, out_layout, pairs, in_place, *angles)

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        nope, layout, out_layout, pairs, pos_dims, rotary, rest = ctx.options
        angles = (*ctx.saved_tensors, *rest)
        wants_q, wants_kv, wants_pos = ctx.needs_input_grad[:3]
        dqx = dkv = dk_pos = None
        if wants_q:
            dqx = FORWARD.call(dq, None, out_layout, layout, nope, rotary, pairs, True, *angles)[0]
        if wants_kv or wants_pos:
            dkv, dk_pos = KV_BACKWARD.call(dk, dv, nope, layout, out_layout, pairs, pos_dims, *angles)
        return (dqx, dkv if wants_kv else None, dk_pos if wants_pos else None, *(None,) * 13)


def _run(q, kv, k_pos, nope, layout, out_layout, pairs, in_place, *angles):
    rotary = k_pos.shape[-1]
    if in_place:
        IN_PLACE.call(q, None, layout, nope, rotary, pairs, False, *angles)
        y = q
    else:
        y, _ = FORWARD.call(q, None, layout, out_layout, nope, rotary, pairs, False, *angles)
    return (y, *KV_FORWARD.call(kv, k_pos, nope, layout, out_layout, pairs, *angles))


def _check_q(q: Tensor, kv: Tensor, layout: str) -> None:
    """Raise an ArgumentError unless q, which is rotated by itself, has the tokens of kv."""
    if q.dim() < 3:
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected 3 dimensions or 4, those of kv")
    check_same("q", q.dtype, kv.dtype, "dtype", of="kv")
    check_same("q", q.get_device(), kv.get_device(), "device index", of="kv")
    if q.shape[:-1] == kv.shape[:-1]:
        return
    heads = -3 if layout == "bhsd" and q.dim() == 4 else -2
    sizes = [[*t.shape[:heads], *t.shape[heads + 1 : -1]] for t in (q, kv)]
    if sizes[0] != sizes[1]:
        raise ArgumentError(
            f"q has shape {tuple(q.shape)}; expected the batch and length of kv, which has shape {tuple(kv.shape)}"
        )


_differentiable = applied(_MlaRope)


@public
def mla_rope(
    q: Tensor, kv: Tensor, k_pos: Tensor, cos: Tensor, sin: Tensor, *, layout: str = "sbhd",
    output_layout: str | None = None, interleaved: bool = True, output_interleaved: bool = False,
    positions: Tensor | None = None, cu_seqlens: Tensor | None = None, cp_rank: int = 0, cp_size: int = 1,
    mscale: float = 1.0, in_place: bool = False,
    cu_seqlens_kv: Tensor | None = None,
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotate the rotary part of q and k and assemble the heads of k and v for multi-head latent attention.

    A head of q is ``[nope | rotary]``, a head of kv ``[nope | value]``; k_pos is the rotary part that all heads of k
    share. The sizes are free: ``rotary`` is the size of k_pos, and ``nope`` is the rest of q's head. Computed in fp32
    and rounded once; other elements are copied. Differentiable once in q, kv and k_pos; the gradient of k_pos is summed
    over heads in fp32.

    Args:
        q: ``[length, batch, heads, nope + rotary]`` or as given by `layout`, or packed
            ``[tokens, heads, nope + rotary]``. bfloat16, float16 or float32; any strides. Any object with
            ``__dlpack__`` is accepted.
        kv: Like q, with ``nope + value`` elements per head; may have a different number of heads.
        k_pos: Like q, with one head of ``rotary`` elements, or without the head dimension.
        cos: As for ``rope``; n is ``rotary / 2`` or ``rotary``, the latter in the order of the result.
        sin: Like cos.
        layout: ``"sbhd"``, ``"bshd"`` or ``"bhsd"``.
        output_layout: Layout of the results. Default: `layout`. Packed tokens stay packed.
        interleaved: Input pairs are elements (2 i, 2 i + 1) of the rotary parts instead of (i, i + rotary / 2).
        output_interleaved: The same for the rotary parts of the results.
        positions: As for ``rope``.
        cu_seqlens: As for ``rope``.
        cu_seqlens_kv: cu_seqlens of k and v if it differs from that of q. Costs a second launch.
        cp_rank: As for ``rope``.
        cp_size: As for ``rope``.
        mscale: Factor of cos and sin.
        in_place: Overwrite q's rotary part and return q. With gradients, q must not be a leaf. kv and k_pos are never
            overwritten.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(q, k, v)`` of head sizes ``nope + rotary``, ``nope + rotary`` and ``value``; contiguous (except an in-place
        q).
    """
    if cu_seqlens_kv is not None:
        arguments = {**locals(), "cu_seqlens_kv": None}
        q_out = mla_rope(**arguments)[0]
        return q_out, *mla_rope(**{**arguments, "cu_seqlens": cu_seqlens_kv, "in_place": False})[1:]
    out_layout = output_layout or layout
    if in_place and out_layout != layout:
        raise ArgumentError(f"output_layout is {out_layout!r}; expected {layout!r}, that of q, with in_place")
    _check_q(q, kv, layout)
    nope = q.shape[-1] - k_pos.shape[-1]
    if nope < 0:
        raise ArgumentError(
            f"k_pos has {k_pos.shape[-1]} elements; expected at most {q.shape[-1]}, the size of a head of q"
        )
    pairs = angles_of.order_of_pairs(interleaved, bool(output_interleaved))
    args = (q, kv, k_pos, nope, layout, out_layout, pairs, in_place)
    angles = (cos, sin, positions, cu_seqlens, "", cp_rank, cp_size, mscale)
    if is_grad_enabled() and (needs_grad(q, kv, k_pos) or needs_grad(cos, sin)):
        if cos.requires_grad or sin.requires_grad:
            raise ArgumentError("cos or sin requires a gradient; mla_rope is differentiable in q, kv and k_pos only")
        if in_place:
            refuse_leaf("q", q)
        if written_by_copy(in_place):
            y, k, v = _differentiable(*args[:-1], False, *angles)
            return q.copy_(y), k, v
        return _differentiable(*args, *angles)
    return _run(*args, *angles)
