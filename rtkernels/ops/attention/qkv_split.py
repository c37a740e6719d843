"""Split of a fused qkv projection, with norms of heads, rotary embedding and the write into a cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.append_kv_cache import rotated
from rtkernels.ops.norm.statistics import backward as norm_backward
from rtkernels.ops.rope.rope import rope as rotate
from rtkernels.ops.shared.positions import check_positions
from rtkernels.ops.shared.row_quant import memory_for
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same, group_threads, row_count, row_stride, token
from rtkernels.runtime.operator.arguments import Among, Matching, Within, check_integer
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable, refuse_outputs
from rtkernels.runtime.operator.declared import Argument, Dense, InPlace, InPlaceExact, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # common/any_type.cuh
_VECTORS = {"bf16": (8, 4, 1), "fp16": (8, 4, 1), "fp32": (4, 1)}
_THREADS = 256
_KERNEL = Kernel(
    "attention/qkv_split.cu", "qkv_split", template="T VEC", max_registers=96, struct=True,
    args="qkv:ptr q_weight:ptr k_weight:ptr cosines:ptr sines:ptr pos:ptr q:ptr k:ptr v:ptr tokens:i64 length:i64 "
    "q_heads:i64 kv_heads:i64 dim:i64 qkv_stride:i64 k_batch:i64 k_token:i64 k_head:i64 v_batch:i64 v_token:i64 "
    "v_head:i64 capacity:i64 pairs:i64 table_rows:i64 cos_row:i64 cos_column:i64 sin_row:i64 sin_column:i64 "
    "angle_type:i64 pos_step:i64 first_position:i64 lanes:i64 flags:i64 eps:f64",
    variants=[(t, n) for t, widths in _VECTORS.items() for n in widths], tier="serve",
)  # fmt: skip
_INTERLEAVED, _ANGLES_DENSE, _Q_NORM_FP32, _K_NORM_FP32 = 1, 2, 4, 8

# ---- operator -------------------------------------------------------------------------------------------------------


def _check(
    qkv: Meta, q_weight: Meta | None, k_weight: Meta | None, cos: Meta | None, sin: Meta | None, pos: Meta | None,
    q: Meta, k: Meta, v: Meta, q_heads: int, kv_heads: int, cached: bool,
) -> None:  # fmt: skip
    if qkv.dim() not in (2, 3):
        raise ArgumentError(f"qkv has shape {tuple(qkv.shape)}; expected [tokens, columns] or [batch, tokens, columns]")
    heads = q_heads + 2 * kv_heads
    if q_heads < 1 or kv_heads < 1 or qkv.shape[-1] % heads:
        raise ArgumentError(f"qkv has {qkv.shape[-1]} columns; expected a multiple of {heads}, all heads of q, k and v")
    dim = qkv.shape[-1] // heads
    for name, meta in (("q_norm", q_weight), ("k_norm", k_weight)):
        if meta is not None:
            token(name, meta.dtype, (qkv.dtype, torch.float32))
            check_same(name, tuple(meta.shape), (dim,), "shape", of="a head")
    if cos is not None:
        check_same("sin", tuple(sin.shape), tuple(cos.shape), "shape", of="cos")
        check_same("sin", sin.dtype, cos.dtype, "dtype", of="cos")
        token("cos", cos.dtype)
        if cos.dim() != 2 or not 0 < 2 * cos.shape[1] <= dim:
            raise ArgumentError(
                f"cos has shape {tuple(cos.shape)}; expected [positions, pairs], at most {dim // 2} pairs of a head"
            )
        if not cos.shape[0] and qkv.numel():
            raise ArgumentError(f"cos has shape {tuple(cos.shape)}; expected one position or more")
    if pos is not None and (pos.dtype != torch.int32 or pos.numel() not in (1, qkv.shape[0] if qkv.dim() == 3 else 1)):
        raise ArgumentError(f"pos is {pos.dtype} {tuple(pos.shape)}; expected int32, one or as many as sequences")
    lead = tuple(qkv.shape[:-1])
    check_same("q", (q.dtype, tuple(q.shape)), (qkv.dtype, (*lead, q_heads, dim)), "dtype and shape", of="qkv")
    for name, meta in (("k", k), ("v", v)):
        wanted = (*lead[:-1], meta.shape[-3] if cached and meta.dim() > 2 else lead[-1], kv_heads, dim)
        name = f"{name}_cache" if cached else name
        check_same(name, (meta.dtype, tuple(meta.shape)), (qkv.dtype, wanted), "dtype and shape", of="qkv")
        if meta.stride[-1] != 1 and dim > 1:
            raise ArgumentError(f"{name} has strides {tuple(meta.stride)}; expected unit stride in the last dimension")


def _with_batch(meta: Meta) -> tuple[int, ...]:
    return tuple(meta.stride[:-1]) if meta.dim() == 4 else (0, *meta.stride[:-1])


def _plan(
    qkv, q_weight, k_weight, cos, sin, pos, q, k, v, q_heads, kv_heads, interleaved, cached, eps, first, device
) -> Steps:
    dtype, tokens, length = DTYPE_TOKEN[qkv.dtype], row_count(qkv.shape), qkv.shape[-2]
    dim = q.shape[-1]
    if tokens * dim == 0:
        return Steps()
    pairs = 0 if cos is None else cos.shape[1]
    stride, size = row_stride(qkv.shape, qkv.stride), qkv.dtype.itemsize
    places = [*_with_batch(k), *_with_batch(v)]
    unfit = (stride | dim) * size | qkv.misaligned | q.misaligned | k.misaligned | v.misaligned
    for value in places:
        unfit |= value * size
    for meta in (q_weight, k_weight):
        unfit |= 0 if meta is None else meta.misaligned | dim * meta.dtype.itemsize
    n = next(
        n for n in _VECTORS[dtype]
        if n == 1 or (unfit % (n * size) == 0 and pairs % n == 0 and (dim - 2 * pairs) % (2 * n) == 0)
    )  # fmt: skip
    flags = _INTERLEAVED * interleaved
    flags |= _Q_NORM_FP32 * (q_weight is not None and q_weight.dtype == torch.float32)
    flags |= _K_NORM_FP32 * (k_weight is not None and k_weight.dtype == torch.float32)
    tables = (0, 0, 0, 0, 0, 0)
    if cos is not None:
        tables = cos.shape[0], *cos.stride, *sin.stride, _TYPES[DTYPE_TOKEN[cos.dtype]]
        whole = all(
            m.stride[1] == 1 and not (m.misaligned | m.stride[0] * m.dtype.itemsize) % min(n * m.dtype.itemsize, 16)
            for m in (cos, sin)
        )
        flags |= _ANGLES_DENSE * (whole and n > 1 and cos.dtype in (qkv.dtype, torch.float32))
    units = max(-(-pairs // n) + -(-(dim - 2 * pairs) // (2 * n)), -(-dim // (2 * n)))
    lanes = group_threads(units, 32)
    heads = q_heads + 2 * kv_heads
    if tokens * heads * lanes >= 2**31:
        raise ArgumentError(f"qkv has {tokens} tokens of {heads} heads; expected fewer than {2**31 // (heads * lanes)}")
    launch = _KERNEL.bind((dtype, n), device, -(-tokens * heads * lanes // _THREADS), _THREADS, overlap=True)
    numbers = (
        *(tokens, length, q_heads, kv_heads, dim, stride, *places, k.shape[-3] if cached else -1, pairs, *tables),
        *(int(pos is not None and pos.numel() > 1), first, lanes, flags, float(eps)),
    )
    return Steps(Step(launch, "qkv", "q_weight", "k_weight", "cos", "sin", "pos", "q", "k", "v", *numbers))


def _normed(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    x = x.float()
    return x if weight is None else x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()


def _reference(
    qkv, q_weight, k_weight, cos, sin, pos, q, k, v, q_heads, kv_heads, interleaved, cached, eps, first
) -> None:
    dim = q.shape[-1]
    if qkv.numel() == 0:
        return
    given = qkv.unsqueeze(0) if qkv.dim() == 2 else qkv
    batch, length = given.shape[:2]
    heads = given.unflatten(-1, (-1, dim)).split((q_heads, kv_heads, kv_heads), -2)
    position = torch.arange(length, dtype=torch.int64, device=qkv.device) + first
    position = position.expand(batch, length) + (0 if pos is None else pos.long().reshape(-1, 1))
    outputs = [_normed(heads[0], q_weight, eps), _normed(heads[1], k_weight, eps), heads[2].float()]
    if cos is not None:
        known = ((position >= 0) & (position < cos.shape[0]))[..., None, None]
        for i in range(2):
            turned = rotated(outputs[i], cos, sin, position, interleaved)
            part = turned[..., : 2 * cos.shape[1]].where(known, torch.nan)
            outputs[i] = torch.cat([part, turned[..., 2 * cos.shape[1] :]], -1)
    q.copy_(outputs[0].reshape(q.shape))
    if not cached:
        k.copy_(outputs[1].reshape(k.shape))
        v.copy_(outputs[2].reshape(v.shape))
        return
    fits = (position >= 0) & (position < k.shape[-3])
    rows = torch.arange(batch, dtype=torch.int64, device=qkv.device).view(-1, 1).expand(batch, length)
    for cache, values in ((k, outputs[1]), (v, outputs[2])):
        whole = cache.unsqueeze(0) if cache.dim() == 3 else cache
        whole[rows[fits], position[fits]] = values[fits].to(cache.dtype)


SPLIT = Operator(
    "qkv_split",
    (
        Rows("qkv"), Dense("q_weight", None, optional=True), Dense("k_weight", None, optional=True),
        Argument("cos", None, optional=True), Argument("sin", None, optional=True), Dense("pos", None, optional=True),
        InPlaceExact("q", None), InPlace("k", None), InPlace("v", None),
    ),
    options="int q_heads, int kv_heads, bool interleaved, bool cached, float eps, int first",
    results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


# ---- gradient -------------------------------------------------------------------------------------------------------


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, q_norm, k_norm, cos, sin, pos, options):
        ctx.save_for_backward(qkv, q_norm, k_norm, cos, sin, pos)
        ctx.options = options
        return _forward(*detached(qkv, q_norm, k_norm, cos, sin, pos), options, (None, None, None))

    @staticmethod
    @once_differentiable
    def backward(ctx, dq, dk, dv):
        qkv, q_norm, k_norm, cos, sin, pos = ctx.saved_tensors
        q_heads, kv_heads, interleaved, eps, first = ctx.options
        dim = dq.shape[-1]
        grads, weights = [], []
        parts = qkv.unflatten(-1, (-1, dim)).split((q_heads, kv_heads, kv_heads), -2)
        for i, (d, x, weight) in enumerate(zip((dq, dk), parts[:2], (q_norm, k_norm), strict=True)):
            if cos is not None:
                length = qkv.shape[-2]
                place = torch.arange(first, first + length, dtype=torch.int64, device=qkv.device)
                place = place.expand(qkv.shape[:-1]) + (0 if pos is None else pos.long().reshape(-1, 1).squeeze(0))
                whole, table = (d.unsqueeze(0), place.reshape(1, -1)) if d.dim() == 3 else (d, place)
                d = rotate(
                    whole.contiguous(), cos.contiguous(), sin.contiguous(), rotary=2 * cos.shape[1],
                    interleaved=interleaved, positions=table, inverse=True,
                ).reshape(d.shape)  # fmt: skip
            dweight = None
            if weight is not None:
                wanted = ctx.needs_input_grad[1 + i]
                d, dweight, _ = norm_backward(False, d, x.contiguous(), weight, None, None, eps, 0.0, wanted, False)
            grads.append(d)
            weights.append(dweight)
        return torch.cat([*grads, dv], -2).flatten(-2), *weights, None, None, None, None


_differentiable = applied(_Split)


def _forward(qkv, q_norm, k_norm, cos, sin, pos, options, out, k_cache=None, v_cache=None):
    q_heads, kv_heads, interleaved, eps, first = options
    lead, dim = tuple(qkv.shape[:-1]), qkv.shape[-1] // (q_heads + 2 * kv_heads)
    inputs = {"qkv": qkv, "q_norm": q_norm, "k_norm": k_norm}
    q = memory_for("out[0]", out[0], (*lead, q_heads, dim), qkv.dtype, qkv, inputs)
    cached = k_cache is not None
    if cached:
        k, v = k_cache, v_cache
        check_positions("pos", pos, first, lead[-1], k_cache.shape[-3])
    else:
        shape = (*lead, kv_heads, dim)
        k, v = (memory_for(f"out[{i}]", out[i], shape, qkv.dtype, qkv, inputs) for i in (1, 2))
    SPLIT(qkv, q_norm, k_norm, cos, sin, pos, q, k, v, q_heads, kv_heads, interleaved, cached, eps, first)
    return q, k, v


# ---- public ---------------------------------------------------------------------------------------------------------


_OPTIONS = {
    "qkv": Matching(FLOAT_DTYPES), "num_heads": Within("int"), "num_kv_heads": Within("int"), "eps": Within("float"),
    "style": Among(("half", "interleaved"), "'half' or 'interleaved'"),
}  # fmt: skip


@public(own_out=True, options=_OPTIONS)
def qkv_split(
    qkv: Tensor, num_heads: int, num_kv_heads: int, *, rope: tuple[Tensor, Tensor] | None = None, style: str = "half",
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, eps: float = 1e-6, k_cache: Tensor | None = None,
    v_cache: Tensor | None = None, pos: Tensor | int | None = None, out: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Split a fused projection into heads of q, k and v; optionally normalise, rotate and write them into a cache.

    Each head of q and k is normalised, ``x / sqrt(mean(x^2) + eps) * norm``, and then rotated. Computed in fp32 and
    rounded once, in one launch. Differentiable once in qkv and the norms, if there are no caches.

    Args:
        qkv: ``[tokens, columns]`` or ``[batch, tokens, columns]``: all heads of q, then of k, then of v. bfloat16,
            float16 or float32; any strides (copied unless rows are unit-stride and evenly spaced).
        num_heads: Number of heads of q.
        num_kv_heads: Number of heads of k, and of v.
        rope: ``(cos, sin)``, each ``[positions, pairs]`` (:func:`rope_table`), any floating-point dtype and any
            strides. With fewer pairs than half a head, the rest of the head is not rotated. With
            ``[positions, head_dim]`` each pair has two entries, and the first one is used.
        style: ``"half"``: elements i and i + half of the rotated part are a pair. ``"interleaved"``: neighbours are.
        q_norm: ``[head_dim]``, in qkv's dtype or float32. Default: no norm.
        k_norm: The same for k.
        eps: Added to the mean square.
        k_cache: ``[capacity, kv heads, head_dim]``, or ``[batch, capacity, ...]``, in qkv's dtype, unit stride in the
            last dimension: k is written at each token's position, and the cache is returned instead of k.
        v_cache: The same for v.
        pos: Position of the first token: a number, or int32 on the device (one element or ``[batch]``), which the host
            never reads. Default: 0. Tokens beyond a cache are skipped; those beyond the tables become NaN. With
            ``RTKERNELS_DEBUG=1``, tokens beyond a cache raise an error, and each call waits for the device.
        out: Contiguous tensors ``(q, k, v)`` for the results, or with caches ``(q,)``; None entries are allocated.

    Returns:
        ``(q, k, v)``: ``[..., heads, head_dim]``, contiguous; with caches ``(q, k_cache, v_cache)``.
    """
    heads = num_heads + 2 * num_kv_heads
    if num_heads < 1 or num_kv_heads < 1:
        raise ArgumentError(f"num_heads and num_kv_heads are {num_heads} and {num_kv_heads}; expected 1 or more")
    if qkv.dim() not in (2, 3) or qkv.shape[-1] % heads:
        raise ArgumentError(
            f"qkv has shape {tuple(qkv.shape)}; expected [tokens, columns] or [batch, tokens, columns], columns a "
            f"multiple of {heads}, all heads of q, k and v"
        )
    if (k_cache is None) is not (v_cache is None):
        raise ArgumentError("k_cache and v_cache go together; expected both or none")
    cos, sin = _tables(rope, qkv.shape[-1] // heads, style == "interleaved")
    first = 0
    if pos is not None and not isinstance(pos, Tensor):
        pos, first = None, check_integer("pos", pos)
    elif pos is not None:
        pos = pos.reshape(-1)
    options = num_heads, num_kv_heads, style == "interleaved", float(eps), first
    given = tuple(out or ())
    if len(given) > 3 or (k_cache is not None and any(t is not None for t in given[1:])):
        raise ArgumentError(f"out has {len(given)} tensors; expected (q, k, v), or (q,) with caches")
    given += (None,) * (3 - len(given))
    if is_grad_enabled() and (
        needs_grad(qkv, q_norm, k_norm) or (k_cache is not None and needs_grad(k_cache, v_cache))
    ):
        refuse_outputs(out=given[0], k_cache=k_cache)
        return _differentiable(qkv, q_norm, k_norm, cos, sin, pos, options)
    return _forward(*detached(qkv, q_norm, k_norm, cos, sin, pos), options, given, k_cache, v_cache)


def _tables(rope: Any, dim: int, interleaved: bool) -> tuple[Tensor | None, Tensor | None]:
    if rope is None:
        return None, None
    if not isinstance(rope, tuple | list) or len(rope) != 2 or not all(isinstance(t, Tensor) for t in rope):
        raise ArgumentError(f"rope is a {type(rope).__name__}; expected (cos, sin), two tensors")
    for name, t in zip(("cos", "sin"), rope, strict=True):
        if t.dtype not in FLOAT_DTYPES or t.dim() != 2:
            raise ArgumentError(f"{name} is {t.dtype} {tuple(t.shape)}; expected a float table [positions, pairs]")
    if rope[0].shape[1] == dim:
        return tuple(t[:, 0::2] if interleaved else t[:, : dim // 2] for t in rope)
    return tuple(rope)


OP = Op("qkv_split", public=("qkv_split",), kernels=(_KERNEL,), torch_ops=(SPLIT,), uses=("rms_norm", "rope"))
