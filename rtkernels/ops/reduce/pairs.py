"""Sums over pairs of elements of two tensors: squared differences, and whether all are close."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.reduce.reduction import reduce
from rtkernels.ops.shared.strided import TOKEN
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import TYPES
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_THREADS = 256
_KINDS = {"squares": 0, "not_close": 1}  # cuda_src/reduce/pairs.cu
_PAIRS = Kernel(
    "reduce/pairs.cu", "reduce_pairs", template="T", variants=TYPES, max_registers=64,
    tier="aten", args="x:ptr y:ptr partial:ptr n:i64 kind:i64 rtol:f64 atol:f64 equal_nan:i64 aligned:i64",
)  # fmt: skip


def _blocks(n: int, device: int) -> int:
    return max(1, min(-(-n // (_THREADS * 16)), 4 * device_info(device).sm_count))


def _plan(x: Meta, y: Meta, kind: str, equal_nan: bool, device: int) -> Steps:
    n, size = x.numel(), x.dtype.itemsize
    aligned = misaligned(x, y) == 0 and n * size % 16 == 0
    launch = _PAIRS.bind((TOKEN[x.dtype],), device, _blocks(n, device), _THREADS)
    return Steps(Step(launch, "x", "y", "partial", n, _KINDS[kind], "rtol", "atol", int(equal_nan), int(aligned)))


_SUMS = Primitive(
    "pair_sums", (Dense("x", None), Dense("y", None)), "kind, equal_nan, rtol, atol", numbers="rtol atol",
    results="partial", outputs=lambda x: (Memory((_blocks(x.numel(), x.device),), torch.float32),), plan=_plan,
)  # fmt: skip


def squared_error(x: Tensor, y: Tensor, mean: bool) -> Tensor:
    """Return the sum, or the mean, of squared differences, in fp32 and rounded to the dtype of x.

    Args:
        x: bfloat16, float16 or float32; not empty.
        y: Of x's shape and dtype.
        mean: Divide by the number of elements.

    Returns:
        No dimensions.
    """
    finish = {"finish": "divide", "number": x.numel()} if mean else {}
    return reduce(_SUMS(x, y, "squares", False, 0.0, 0.0), "sum", (0,), False, x.dtype, **finish)


def all_close(x: Tensor, y: Tensor, rtol: float, atol: float, equal_nan: bool) -> bool:
    """Return whether all pairs are close, as ``torch.isclose`` has it; the host waits for it.

    Args:
        x: float32, not empty.
        y: Of x's shape and dtype.
        rtol: At least 0.
        atol: At least 0.
        equal_nan: Two NaN are close.

    Returns:
        True or False.
    """
    parts = _SUMS(x, y, "not_close", equal_nan, float(rtol), float(atol))
    return reduce(parts, "count", (0,), False, torch.int64, lift="nonzero").item() == 0


OP = Op("pairs", public=(), kernels=(_PAIRS,), torch_ops=())
