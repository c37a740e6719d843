"""Heads of a decoding step in one launch: norm and rotation of q and k, keys and values into the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention.checks import HALVES
from rtkernels.ops.attention.mma_plan import ANY_TYPE
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, FLOAT_DTYPES, check_same
from rtkernels.runtime.operator.declared import Dense, InPlace, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_WIDTH = 256
_WARPS = 4  # of a block
_KERNEL = Kernel(
    "attention/decode_heads.cu", "decode_heads", template="T", max_registers=64, tier="serve",
    args="qkv:ptr q_weight:ptr k_weight:ptr cosines:ptr sines:ptr slots:ptr q:ptr k_cache:ptr v_cache:ptr tokens:i64 "
    "q_heads:i64 kv_heads:i64 dim_:i64 rotary_:i64 qkv_row:i64 angle_row:i64 k_batch:i64 k_row:i64 k_head:i64 "
    "v_batch:i64 v_row:i64 v_head:i64 capacity:i64 tables:i64 interleaved:i64 angle_type:i64 weight_type:i64 eps:f64 "
    "offset:f64",
    variants=[("bf16",), ("fp16",)],
)  # fmt: skip


def head_counts(qkv: Meta, k_cache: Meta) -> tuple[int, int]:
    """Return the numbers of q and kv heads."""
    kv_heads, dim = k_cache.shape[2:]
    return qkv.shape[-1] // max(dim, 1) - 2 * kv_heads, kv_heads


def check(qkv, q_weight, k_weight, cos, sin, slots, k_cache, v_cache, rotary) -> None:
    if qkv.dim() != 2 or k_cache.dim() != 4:
        raise ArgumentError(
            f"qkv has shape {tuple(qkv.shape)}, k_cache {tuple(k_cache.shape)}; expected [batch, columns] and "
            f"[batch, rows, heads, width]"
        )
    check_same("v_cache", tuple(v_cache.shape), tuple(k_cache.shape), "shape", of="k_cache")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_same(name, cache.dtype, qkv.dtype, "dtype", of="qkv")
    batch, (kv_heads, dim) = qkv.shape[0], k_cache.shape[2:]
    check_same("k_cache", k_cache.shape[0], batch, "number of sequences", of="qkv")
    q_heads, _ = head_counts(qkv, k_cache)
    if dim % 2 or not 0 < dim <= MAX_WIDTH or (q_heads + 2 * kv_heads) * dim != qkv.shape[1] or q_heads < 1:
        raise ArgumentError(
            f"qkv has {qkv.shape[1]} columns; expected q heads and 2 x {kv_heads} others of an even width up to "
            f"{MAX_WIDTH}, not {dim}"
        )
    if rotary % 2 or not 0 <= rotary <= dim:
        raise ArgumentError(f"rotary is {rotary}; expected an even number up to {dim}")
    check_same("sin", tuple(sin.shape), tuple(cos.shape), "shape", of="cos")
    check_same("sin", sin.dtype, cos.dtype, "dtype", of="cos")
    if tuple(cos.shape) not in ((batch, rotary), (batch, rotary // 2)):
        raise ArgumentError(f"cos has shape {tuple(cos.shape)}; expected {(batch, rotary)} or {(batch, rotary // 2)}")
    if slots.dtype != torch.int32 or tuple(slots.shape) != (batch,):
        raise ArgumentError(f"slots is {slots.dtype} {tuple(slots.shape)}; expected int32 {(batch,)}")
    if (q_weight is None) is not (k_weight is None):
        raise ArgumentError("q_weight and k_weight go together; expected both or none")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            check_same(name, tuple(weight.shape), (dim,), "shape", of="the width of heads")
            check_same(name, weight.dtype, q_weight.dtype, "dtype", of="q_weight")


def _plan(qkv, q_weight, cos, k_cache, v_cache, rotary, interleaved, device):
    q_heads, kv_heads = head_counts(qkv, k_cache)
    batch, dim = qkv.shape[0], k_cache.shape[3]
    strides = (*k_cache.stride[:3], *v_cache.stride[:3])
    if k_cache.stride[3] != 1 or v_cache.stride[3] != 1:
        raise ArgumentError("k_cache or v_cache has other strides than 1 along heads' elements; expected 1")
    launch = _KERNEL.bind(
        (DTYPE_TOKEN[qkv.dtype],), device, -(-batch * (q_heads + 2 * kv_heads) // _WARPS), 32 * _WARPS, overlap=True
    )
    numbers = (
        batch, q_heads, kv_heads, dim, rotary, qkv.row_stride if batch > 1 else 0, cos.shape[1],
        *strides, k_cache.shape[1], int(cos.shape[1] == rotary), int(interleaved), ANY_TYPE[DTYPE_TOKEN[cos.dtype]],
        ANY_TYPE[DTYPE_TOKEN[q_weight.dtype]] if q_weight is not None else 0,
    )  # fmt: skip
    names = ("qkv", "q_weight", "k_weight", "cos", "sin", "slots", "q", "k_cache", "v_cache")
    return Steps(Step(launch, *names, *numbers, "eps", "offset"))


def heads_reference(
    qkv, q_weight, k_weight, cos, sin, slots, k_cache, v_cache, rotary, interleaved, eps, offset
) -> Tensor:
    batch, rows, kv_heads, dim = k_cache.shape
    x = qkv.float().view(batch, -1, dim)
    parts = x.split((x.shape[1] - 2 * kv_heads, kv_heads, kv_heads), 1)
    rotated = []
    for part, weight in zip(parts[:2], (q_weight, k_weight), strict=True):
        if weight is not None:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + eps) * (offset + weight.float())
        whole = cos.shape[1] == rotary
        c, s = (t.float().unsqueeze(1) for t in (cos, sin))
        turned, rest = part[..., :rotary], part[..., rotary:]
        if interleaved:
            a, b = turned[..., 0::2], turned[..., 1::2]
            c, s = ((t[..., 0::2], t[..., 1::2]) if whole else (t, t) for t in (c, s))
            turned = torch.stack([a * c[0] - b * s[0], b * c[1] + a * s[1]], -1).flatten(-2)
        else:
            a, b = turned.chunk(2, -1)
            c, s = (t.chunk(2, -1) if whole else (t, t) for t in (c, s))
            turned = torch.cat([a * c[0] - b * s[0], b * c[1] + a * s[1]], -1)
        rotated.append(torch.cat([turned, rest], -1))
    fits = (slots >= 0) & (slots < rows)
    place = fits.nonzero().squeeze(1), slots.long()[fits]
    k_cache[place], v_cache[place] = rotated[1].to(k_cache.dtype)[fits], parts[2].to(v_cache.dtype)[fits]
    return rotated[0].to(qkv.dtype).contiguous()


def _outputs(qkv, k_cache) -> tuple[Memory]:
    q_heads, _ = head_counts(qkv, k_cache)
    return (Memory((qkv.shape[0], q_heads, k_cache.shape[3]), qkv.dtype),)


HEADS = Operator(
    "decode_heads",
    (
        Rows("qkv", HALVES), Dense("q_weight", FLOAT_DTYPES, optional=True),
        Dense("k_weight", FLOAT_DTYPES, optional=True), Dense("cos", FLOAT_DTYPES), Dense("sin", FLOAT_DTYPES),
        Dense("slots", None), InPlace("k_cache", None), InPlace("v_cache", None),
    ),
    options="int rotary, bool interleaved, float eps, float offset", numbers="eps offset", results="q",
    outputs=_outputs, plan=_plan, reference=heads_reference, check=check,
)  # fmt: skip

OP = Op("decode_heads", public=(), kernels=(_KERNEL,), torch_ops=(HEADS,))
