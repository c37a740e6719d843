"""Which elements of a tensor are among those of another."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import TOKEN
from rtkernels.ops.sort.sorting import sort_rows
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_CONTAINS = Kernel(
    "sort/search.cu", "sorted_contains", template="T", max_registers=48, tier="aten",
    variants=[(t,) for t in ("bf16", "fp16", "fp32", "i64", "i32", "u8")],
    args="x:ptr sorted:ptr out:ptr n:i64 count:i64 invert:i64",
)  # fmt: skip


def _plan(x: Meta, ordered: Meta, invert: bool, device: int) -> Steps:
    n = x.numel()
    grid = -(-n // _THREADS)
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    launch = _CONTAINS.bind((TOKEN[x.dtype],), device, grid, _THREADS)
    return Steps(Step(launch, "x", "ordered", "out", n, ordered.numel(), int(invert)))


_SEARCH = Primitive(
    "sorted_contains", (Dense("x", None), Dense("ordered", None)), "invert", results="out", plan=_plan,
    outputs=lambda x: (Memory(x.shape, torch.bool),),
)  # fmt: skip


def is_among(x: Tensor, values: Tensor, invert: bool) -> Tensor:
    """Return whether each element of x is one of `values`: these are sorted, then searched.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; not empty.
        values: Of x's dtype, not empty, fewer than 2^30.
        invert: Return whether it is none of them.

    Returns:
        bool, dense, of x's shape.
    """
    return _SEARCH(x, sort_rows(values.reshape(1, -1), False, False)[0], invert)


OP = Op("search", public=(), kernels=(_CONTAINS,), torch_ops=())
__all__ = ["OP", "is_among"]
