"""A vector with many zeros times a matrix: rows of zeros are not read."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import WIDTH, vector_bytes
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_PART_ROWS = 512
_MAX_PARTS = 64
_PARTS = Kernel(
    "reduce/nonzero_mv.cu", "nonzero_mv_parts", template="T N", max_registers=128, tier="serve",
    args="k:ptr v:ptr sums:ptr n:i64 m:i64 v_row:i64 part_rows:i64",
    variants=[(t, n) for t, width in WIDTH.items() for n in (1, width)],
)  # fmt: skip
_SUM = Kernel(
    "reduce/nonzero_mv.cu", "nonzero_mv_sum", template="T", max_registers=32, tier="serve",
    args="sums:ptr y:ptr parts:i64 m:i64", variants=[(t,) for t in WIDTH],
)  # fmt: skip


def _check(k: Meta, v: Meta) -> None:
    if k.dim() != 1:
        raise ArgumentError(f"k has shape {tuple(k.shape)}; expected one dimension")
    if v.dim() != 2 or v.shape[0] != k.shape[0]:
        raise ArgumentError(f"v has shape {tuple(v.shape)}; expected ({k.shape[0]}, m)")
    if v.dtype != k.dtype:
        raise ArgumentError(f"v has dtype {v.dtype}; expected that of k, {k.dtype}")


def _plan(k: Meta, v: Meta, device: int) -> Steps:
    (n, m), size = v.shape, v.dtype.itemsize
    width = 16 // size if vector_bytes(misaligned(v), m * size) == 16 else 1
    part_rows = max(_PART_ROWS, -(-n // _MAX_PARTS))
    parts = -(-n // part_rows)
    launch = _PARTS.bind((k.token, width), device, (-(-m // (32 * width)), parts), 256)
    first = Step(launch, "k", "v", "sums", n, m, m, part_rows)
    second = Step(_SUM.bind((k.token,), device, -(-m // 256), 256), "sums", "y", parts, m)
    return Steps(first, second, scratch={"sums": Memory((parts, m), torch.float32)})


def _reference(k: Tensor, v: Tensor) -> Tensor:
    rows = k != 0
    sums = torch.float64 if k.dtype == torch.float64 else torch.float32
    return (k[rows].to(sums) @ v[rows].to(sums)).to(k.dtype)


FORWARD = Operator(
    "nonzero_mv_fwd", (Dense("k"), Dense("v")), options="", results="y",
    outputs=lambda k, v: (Memory((v.shape[1],) if v.dim() == 2 else (0,), k.dtype),), plan=_plan,
    reference=_reference, check=_check,
)  # fmt: skip


@public(no_gradients="k v")
def nonzero_mv(k: Tensor, v: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return ``k @ v``, without reading the rows of v whose k is 0.

    For activations after a ReLU, one token at a time: only the rows that are read take time. The other rows may hold
    anything, NaN included. Sums are in fp32, in an order that depends on shapes and on which k are 0, and
    rounded once. Not differentiable.

    Args:
        k: ``[n]``; bfloat16, float16 or float32.
        v: ``[n, m]`` in k's dtype.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        ``[m]`` in k's dtype.
    """
    return FORWARD.call(k, v)


OP = Op("nonzero_mv", public=("nonzero_mv",), kernels=(_PARTS, _SUM), torch_ops=(FORWARD,))
