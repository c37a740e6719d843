"""Sum of the rows of a dense fp32 matrix: the last step of weight gradients. Not public."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels._kernel import Kernel, Plans
from rtkernels._layout import DTYPE_TOKEN
from rtkernels._registry import Op

_KERNEL = Kernel(
    "reduce/column_sum.cu",
    "column_sum",
    template="T",
    args="partial:ptr out:ptr rows:i64 cols:i64",
    variants=[("bf16",), ("fp16",), ("fp32",)],
    max_registers=40,
)


def _plan(device: int, dtype: torch.dtype, cols: int):
    return _KERNEL.bind((DTYPE_TOKEN[dtype],), device, -(-cols // 32), 256, overlap=True)


_PLANS = Plans(_plan)


def column_sum(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sum over the rows of `partial` (dense fp32 ``[rows, cols]``, cols > 0) as ``[cols]`` of `dtype`.

    The order of additions depends on the shape only. `partial` must come from the previous kernel of the stream or an
    earlier one.
    """
    rows, cols = partial.shape
    out = torch.empty(cols, dtype=dtype, device=partial.device)
    _PLANS[partial.get_device(), dtype, cols](partial.data_ptr(), out.data_ptr(), rows, cols)
    return out


OP = Op("column_sum", public=(), kernels=(_KERNEL,), torch_ops=(), samples=lambda device: ())
