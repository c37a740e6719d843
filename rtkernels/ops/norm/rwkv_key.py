"""The keys of RWKV-7: normalised heads, and keys mixed with their rates, in one pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import WIDTH, vector_bytes
from rtkernels.runtime.operator.arguments import Within
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_KERNEL = Kernel(
    "norm/rwkv_key.cu", "rwkv_key", template="T N", max_registers=64, tier="serve",
    args="k:ptr kk:ptr a:ptr ka:ptr o_k:ptr o_kk:ptr o_kka:ptr rows:i64 heads:i64 width:i64",
    variants=[(t, n) for t in WIDTH for n in (1, 2)],
)  # fmt: skip


class RwkvKey(NamedTuple):
    """Results of :func:`rwkv_key`, each of k's shape and dtype."""

    k: Tensor
    kk: Tensor
    kka: Tensor


def _check(k: Meta, kk: Meta, a: Meta, ka: Meta, heads: int) -> None:
    if k.dim() < 1 or heads < 1 or k.shape[-1] % heads:
        raise ArgumentError(f"heads is {heads}; expected a divisor of the last dimension of k, {tuple(k.shape)}")
    for name, meta in (("kk", kk), ("ka", ka)):
        if tuple(meta.shape) != (k.shape[-1],):
            raise ArgumentError(f"{name} has shape {tuple(meta.shape)}; expected ({k.shape[-1]},)")
        if meta.dtype != k.dtype:
            raise ArgumentError(f"{name} has dtype {meta.dtype}; expected that of k, {k.dtype}")


def _plan(k: Meta, kk: Meta, a: Meta, ka: Meta, heads: int, device: int) -> Steps:
    width, size = k.shape[-1] // heads, k.dtype.itemsize
    n = 2 if vector_bytes(misaligned(k, kk, a, ka), width * size) >= 2 * size else 1
    rows = k.numel() // width
    grid = min(-(-rows // 8), 16 * device_info(device).sm_count)
    launch = _KERNEL.bind((k.token, n), device, grid, 256)
    return Steps(Step(launch, "k", "kk", "a", "ka", "o_k", "o_kk", "o_kka", rows, heads, width))


def _reference(k: Tensor, kk: Tensor, a: Tensor, ka: Tensor, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    sums = torch.float64 if k.dtype == torch.float64 else torch.float32
    key, factor, rate, mix = (t.to(sums) for t in (k, kk, a, ka))
    t = (key * factor).unflatten(-1, (heads, -1))
    unit = (t / (t.square().sum(-1, keepdim=True) + 1e-12).sqrt()).flatten(-2)
    results = key * (1 + (rate - 1) * mix), unit, unit * rate
    return tuple(r.to(k.dtype).contiguous() for r in results)


FORWARD = Operator(
    "rwkv_key_fwd", (Dense("k"), Dense("kk"), Dense("a", like="k"), Dense("ka")), options="int heads",
    results="o_k o_kk o_kka", outputs=lambda k: (Memory.like(k),) * 3, plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


@public(options={"heads": Within("int")}, no_gradients="k kk a ka")
def rwkv_key(
    k: Tensor, kk: Tensor, a: Tensor, ka: Tensor, heads: int, *, out: tuple[Tensor | None, ...] | None = None
) -> RwkvKey:
    """Return RWKV-7's keys: ``k (1 + (a - 1) ka)``, the normalised ``k kk`` of each head, and that times a.

    One launch, computed in fp32; each result is rounded once. A head is divided by the root of its sum of squares plus
    1e-12. Not differentiable.

    Args:
        k: ``[..., heads * width]``; bfloat16, float16 or float32.
        kk: ``[heads * width]``, in k's dtype.
        a: The rates, of k's shape and dtype.
        ka: ``[heads * width]``, in k's dtype.
        heads: Number of heads.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(k, kk, kka)`` of contiguous tensors.
    """
    return RwkvKey(*FORWARD.call(k, kk, a, ka, heads))


OP = Op("rwkv_key", public=("rwkv_key",), kernels=(_KERNEL,), torch_ops=(FORWARD,))
