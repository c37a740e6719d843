"""Division by a number as torch's CUDA kernels do it, on the CPU: a multiplication by the rounded inverse."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class CudaDivision(TorchDispatchMode):
    """While it is active, ``x / 7`` is ``x * (1 / 7)`` in the dtype of x, as on a CUDA device.

    A tensor as divisor divides exactly on both, so device-independent code uses one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.divisions = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func.overloadpacket is torch.ops.aten.div and not kwargs and len(args) == 2:
            x, by = args
            if isinstance(x, torch.Tensor) and not isinstance(by, torch.Tensor) and x.is_floating_point():
                self.divisions += 1
                wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
                inverse = torch.ones((), dtype=wide) / torch.full((), float(by), dtype=wide)
                return (x.to(wide) * inverse).to(x.dtype)
        return func(*args, **kwargs)
