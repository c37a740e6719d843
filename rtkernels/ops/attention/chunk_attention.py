"""Attention of a short chunk of tokens over a prefix in the cache and over itself, with the rotation in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import reference
from rtkernels.ops.attention.checks import HALVES, check_factor
from rtkernels.ops.attention.options import default_scale
from rtkernels.ops.rope.rope import rope as rotate
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, check_same
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.declared import Argument, Dense, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_WIDTHS = (128, 256)
# As in chunk_attention.cu.
_BLOCKS = 8  # of a cluster
_WARPS = 8
_ROWS = 16  # of queries of a cluster
_KEYS = 16 * _BLOCKS * _WARPS

_KERNEL = Kernel(
    "attention/chunk_attention.cu", "chunk_attention", template="T D", max_registers=255, needs=("cluster", "pdl"),
    tier="serve",
    args="qkv:ptr k_cache:ptr v_cache:ptr cosines:ptr sines:ptr out:ptr group:i64 kv_heads:i64 tokens:i64 prefix:i64 "
    "qkv_batch:i64 qkv_row:i64 k_batch:i64 k_row:i64 k_head:i64 v_batch:i64 v_row:i64 v_head:i64 angle_row:i64 "
    "constant:i64 scale:f64",
    variants=[(t, d) for t in ("bf16", "fp16") for d in _WIDTHS],
)  # fmt: skip


def _check(qkv: Meta, k_cache: Meta, v_cache: Meta, cos: Meta, sin: Meta, prefix: int, scale: float) -> None:
    if qkv.dim() != 3:
        raise ArgumentError(f"qkv has shape {tuple(qkv.shape)}; expected [batch, tokens, columns]")
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if cache.dim() != 4 or not all(cache.shape[2:]):
            raise ArgumentError(f"{name} has shape {tuple(cache.shape)}; expected [batch, keys, heads, width]")
        check_same(name, cache.dtype, qkv.dtype, "dtype", of="qkv")
    check_same("v_cache", tuple(v_cache.shape), tuple(k_cache.shape), "shape", of="k_cache")
    check_same("k_cache", k_cache.shape[0], qkv.shape[0], "batch", of="qkv")
    for name, other in (("k_cache", k_cache), ("v_cache", v_cache), ("cos", cos), ("sin", sin)):
        check_same(name, other.device, qkv.device, "device index", of="qkv")
    _, capacity, kv_heads, width = k_cache.shape
    columns, heads = qkv.shape[2], qkv.shape[2] // width - 2 * kv_heads
    if columns % width or heads < 1 or heads % kv_heads:
        raise ArgumentError(
            f"qkv has {columns} columns; expected heads of {width}: {kv_heads} of k, as many of v, a multiple for q"
        )
    if not 0 <= prefix <= capacity:
        raise ArgumentError(f"prefix is {prefix}; expected 0 to {capacity}, the rows of k_cache")
    check_same("sin", tuple(sin.shape), tuple(cos.shape), "shape", of="cos")
    if cos.dim() != 2 or cos.shape[1] != width // 2 or width % 2 or cos.shape[0] < prefix + qkv.shape[1]:
        raise ArgumentError(
            f"cos has shape {tuple(cos.shape)}; expected [positions, {width // 2}] with at least "
            f"{prefix + qkv.shape[1]} positions"
        )
    check_factor(scale)


def _outputs(qkv: Meta, k_cache: Meta) -> tuple[Memory]:
    width = k_cache.shape[3]
    return (Memory((*qkv.shape[:2], qkv.shape[2] // width - 2 * k_cache.shape[2], width), qkv.dtype),)


def _fits(qkv: Meta, k_cache: Meta, v_cache: Meta, prefix: int, device: int) -> bool:
    """Return True if the kernel takes a call: its clusters all run at the same time."""
    info, (batch, tokens, columns) = device_info(device), qkv.shape
    kv_heads, width = k_cache.shape[2:]
    if not _KERNEL.supports(info.target) or width not in _WIDTHS or not 0 < prefix + tokens <= _KEYS:
        return False
    for cache in (k_cache, v_cache):
        if cache.misaligned or cache.stride[3] != 1 or any(stride % 8 for stride in cache.stride[:3]):
            return False
    if qkv.misaligned or qkv.stride[2] != 1 or any(stride % 8 for stride in qkv.stride[:2]):
        return False
    tiles = -(-tokens * (columns // width - 2 * kv_heads) // kv_heads // _ROWS)
    return device < 0 or tiles * kv_heads * batch * _BLOCKS <= info.sm_count


def _plan(qkv, k_cache, v_cache, cos, prefix, scale, constant, device) -> Steps:
    if not _fits(qkv, k_cache, v_cache, prefix, device):
        return IN_TORCH
    batch, tokens, columns = qkv.shape
    kv_heads, width = k_cache.shape[2:]
    group = (columns // width - 2 * kv_heads) // kv_heads
    tiles = -(-tokens * group // _ROWS)
    shared = _WARPS * _ROWS * (2 * width + 16 + 4 * (width + 8) + 8)
    launch = _KERNEL.bind(
        (DTYPE_TOKEN[qkv.dtype], width), device, (tiles * _BLOCKS, kv_heads, batch), 32 * _WARPS, shared, overlap=True,
        cluster=_BLOCKS,
    )  # fmt: skip
    numbers = (
        group, kv_heads, tokens, prefix, *qkv.stride[:2], *k_cache.stride[:3], *v_cache.stride[:3], cos.shape[1],
        int(constant),
    )  # fmt: skip
    return Steps(Step(launch, "qkv", "k_cache", "v_cache", "cos", "sin", "out", *numbers, scale))


def _reference(qkv, k_cache, v_cache, cos, sin, prefix, scale) -> Tensor:
    width, kv_heads = k_cache.shape[3], k_cache.shape[2]
    heads = qkv.view(*qkv.shape[:2], qkv.shape[2] // width, width)
    q, k, v = heads.split([heads.shape[2] - 2 * kv_heads, kv_heads, kv_heads], 2)
    angles = [t[prefix : prefix + qkv.shape[1]] for t in (cos, sin)]
    q, k = (rotate(t, *angles, layout="bshd") for t in (q, k))
    k, v = torch.cat([k_cache[:, :prefix], k], 1), torch.cat([v_cache[:, :prefix], v], 1)
    out, _ = reference.forward(q.float(), k.float(), v.float(), None, None, None, None, None, None, scale, -1, -1, 0.0)
    return out.to(qkv.dtype)


FORWARD = Operator(
    "chunk_attention_fwd",
    (
        Rows("qkv", HALVES), Argument("k_cache", None), Argument("v_cache", None), Dense("cos", (torch.float32,)),
        Dense("sin", (torch.float32,)),
    ),
    options="int prefix, float scale, bool constant", results="out", outputs=_outputs, plan=_plan,
    reference=_reference, check=_check, not_invariant=(1, "the kernel is for as many sequences as run at once"),
)  # fmt: skip


@public(options={"prefix": Within("int")})
def chunk_attention(
    qkv: Tensor, k_cache: Tensor, v_cache: Tensor, rope: tuple[Tensor, Tensor], *, prefix: int,
    scale: float | None = None, constant: bool = False, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the attention of a chunk of tokens over the first rows of a cache and over all tokens of the chunk.

    Rotation and attention are one launch for up to 1024 keys. Nothing is written to the cache: a chunk that is computed
    again, as the action tokens of a policy in every denoising step, leaves the prefix as it is.

    Args:
        qkv: ``[batch, tokens, (heads + 2 kv_heads) * width]`` or without batch: a fused projection, heads of q first,
            then those of k and of v. bfloat16 or float16.
        k_cache: ``[batch, keys, kv_heads, width]`` (without batch if qkv has none), qkv's dtype; rotated keys.
        v_cache: Like k_cache.
        rope: ``(cos, sin)``, float32 ``[positions, width / 2]`` (:func:`rope_table`). Elements i and i + width / 2 of a
            head are a pair; the first token has position `prefix`.
        prefix: How many rows of the cache are keys.
        scale: Factor of the scores. Default: ``width ** -0.5``.
        constant: No kernel that may still be running writes the cache. The kernel then loads it before the previous
            kernel has ended.
        out: Tensor to write the result to, with its shape, dtype and strides.

    Returns:
        ``[batch, tokens, heads, width]`` (without batch if qkv has none) in qkv's dtype. There is no gradient.
    """
    if not isinstance(rope, tuple | list) or len(rope) != 2:
        raise ArgumentError(f"rope is a {type(rope).__name__}; expected (cos, sin), two tensors")
    refuse_gradients("chunk_attention", (qkv, k_cache, v_cache, *rope))
    batched = qkv.dim() != 2
    if not batched:
        qkv, k_cache, v_cache = qkv[None], k_cache[None], v_cache[None]
    factor = default_scale(scale, k_cache)
    result = FORWARD.call(qkv, k_cache, v_cache, *rope, prefix, factor, bool(constant))
    return result if batched else result[0]


OP = Op("chunk_attention", public=("chunk_attention",), kernels=(_KERNEL,), torch_ops=(FORWARD,), uses=("rope",))
