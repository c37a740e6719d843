"""Memory of several GPUs that each of them can address: signals between them, and sums over them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import upload
from rtkernels.runtime.layout import DTYPE_TOKEN
from rtkernels.runtime.operator.declared import Dense, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

MAX_RANKS = 256
SLOTS = 8
_THREADS = 256
_TOKENS = ("fp32", "bf16", "fp16")
_SIGNAL = Kernel(
    "multi/symmetric_memory.cu", "symmetric_signal", template="kRanks", variants=[(MAX_RANKS,)], max_registers=32,
    args="pads:ptr rank:i64 world:i64 slot:i64 arrives:i64 waits:i64",
)  # fmt: skip
_SUM = Kernel(
    "multi/symmetric_memory.cu", "symmetric_sum", template="T Result N", max_registers=64,
    variants=[(t, r, n) for t in _TOKENS for r in _TOKENS if t in ("fp32", r) for n in (1, 4)],
    args="buffers:ptr y:ptr vectors:i64 world:i64",
)  # fmt: skip


def _plan_signal(pads: Meta, rank: int, slot: int, arrives: bool, waits: bool, device: int) -> Steps:
    launch = _SIGNAL.bind((MAX_RANKS,), device, 1, MAX_RANKS)
    return Steps(Step(launch, "pads", rank, pads.shape[0], slot, int(arrives), int(waits)))


def _plan_sum(buffers: Meta, elements: int, of: torch.dtype, dtype: torch.dtype, aligned: bool, device: int) -> Steps:
    n = 4 if aligned and elements % 4 == 0 else 1
    grid = min(-(-elements // (n * _THREADS)), 8 * device_info(device).sm_count)
    launch = _SUM.bind((DTYPE_TOKEN[of], DTYPE_TOKEN[dtype], n), device, grid, _THREADS)
    return Steps(Step(launch, "buffers", "y", elements // n, buffers.shape[0]))


SIGNAL = Primitive(
    "symmetric_signal", (Dense("pads", None),), "rank, slot, bool arrives, bool waits", results="", plan=_plan_signal,
    plans_empty=True,
)  # fmt: skip
SUM = Primitive(
    "symmetric_sum", (Dense("buffers", None),), "elements, ScalarType of, ScalarType dtype, bool aligned", results="y",
    outputs=lambda elements, dtype: (Memory((elements,), dtype),), plan=_plan_sum,
)  # fmt: skip


def table_of(tensors: Sequence[Tensor]) -> Tensor:
    """Return a table on the device of the first tensor: the address of each."""
    addresses = numpy.array([t.data_ptr() for t in tensors], numpy.int64)
    return upload(addresses, tensors[0].get_device(), lambda: dict(enumerate(tensors)))


OP = Op("symmetric_memory", public=(), kernels=(_SIGNAL, _SUM), torch_ops=())
__all__ = ["MAX_RANKS", "OP", "SIGNAL", "SLOTS", "SUM", "table_of"]
