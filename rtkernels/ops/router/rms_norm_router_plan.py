"""The kernel that normalises, quantises and multiplies by a router's weight at once, and where it is the faster way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.norm_fp8_plan import check, outputs_of
from rtkernels.ops.router.router_gemm_kernels import EXACT
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.launch.tensor_map import matrix_map
from rtkernels.runtime.layout import address, check_same, row_count, row_stride, token, vector_bytes

_INPUTS = (torch.bfloat16, torch.float16)
_THREADS, _BLOCK_ROWS, _BOX = 640, 64, 64
_SLOTS, _STAGES = 6, 4  # of x and of the router's weight in shared memory, 16 and 32 KB
_SHARED = _SLOTS * 16384 + _STAGES * 32768 + 1024 + 8 * (4 * _SLOTS + 2 * _STAGES) + 4 * 4 * _BLOCK_ROWS

# Where it is faster than two kernels, by measurements (docs/decisions/router.md). It takes multiples of 4 experts and 8
# columns, but with a slab that is not full it gains nothing. Sums stay in the tensor cores, so their error grows with
# the columns: 2.1e-6 at 2048, 4.5e-6 at 4096.
_EXPERTS = range(64, 257, 4)
_COLUMNS = range(1024, 3073, 128)
_BUSY = 0.7  # of the multiprocessors, over all rounds of blocks

KERNEL = Kernel(
    "router/rms_norm_router.cu",
    "norm_router",
    template="T",
    args="x:tmap router:tmap logits:tmap weight:ptr y:ptr q:ptr scale:ptr rstd:ptr rows:i64 cols:i64 experts:i64 "
    "weight_wide:i64 scale_row:i64 scale_group:i64 pow2:i64 eps:f64 offset:f64",
    variants=[("bf16",)],
    max_registers=96,
    needs=("tma", "wgmma"),
)

Metadata = tuple[Any, ...]


def check_all(x: Metadata, weight: Metadata | None, router: Metadata, scale_layout: str) -> None:
    """Raise an ArgumentError unless these go together."""
    token("x", x[0], _INPUTS)
    check(x, weight, None, None, None, None, "row", scale_layout, True, False)
    token("router_weight", router[0])
    cols = x[1][-1]
    if len(router[1]) != 2 or router[1][1] != cols:
        raise ArgumentError(f"router_weight has shape {tuple(router[1])}; expected [experts, {cols}], the columns of x")
    check_same("router_weight", router[3], x[3], "device index")


def results_of(x: Metadata, experts: int, scale_layout: str) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Return shape and dtype of logits, y, q, scale and rstd."""
    made = {name: (s, d) for name, s, d in outputs_of(x[1], x[0], "row", scale_layout, ("rstd",), True, False)}
    logits = ((*x[1][:-1], experts), torch.float32)
    return [logits, made["y"], made["q"], made["scale"], made["rstd"]]


def _serves(x: Metadata, weight: Metadata | None, router: Metadata, precision: int, align: int) -> bool:
    (dtype, shape, stride, device), experts = x, router[1][0]
    if dtype != torch.bfloat16 or router[0] != dtype or precision == EXACT:
        return False
    rows, cols, pitch = row_count(shape), shape[-1], row_stride(shape, stride)
    if cols not in _COLUMNS or experts not in _EXPERTS or pitch is None or pitch < cols:
        return False
    if (weight is not None and weight[2] != (1,)) or router[2] != (cols, 1) or rows >= 1 << 31:
        return False
    if vector_bytes(align, 2 * cols, 2 * pitch) != 16:
        return False
    info, blocks = device_info(device), -(-rows // _BLOCK_ROWS)
    rounds = -(-blocks // info.sm_count)
    return KERNEL.supports(info.target) and blocks > 0 and blocks >= _BUSY * rounds * info.sm_count


class _Plan:
    """Allocations and the launch for one shape."""

    def __init__(self, x: Metadata, weight: Metadata | None, router: Metadata, scale_layout: str) -> None:
        _, shape, stride, device = x
        self._experts = router[1][0]
        self._rows, self._cols, self._pitch = row_count(shape), shape[-1], row_stride(shape, stride)
        self._allocate = allocator(device)
        self._results = [(s, dense_strides(s), d) for s, d in results_of(x, self._experts, scale_layout)]
        self._launch = KERNEL.bind(("bf16",), device, -(-self._rows // _BLOCK_ROWS), _THREADS, _SHARED)
        groups = self._results[3][0][0 if scale_layout == "column" else -1]
        scale_strides = (1, self._rows) if scale_layout == "column" else (groups, 1)
        wide = weight is not None and weight[0] == torch.float32
        self._args = (self._rows, self._cols, self._experts, wide, *scale_strides)

    def run(self, x: Tensor, weight: Tensor | None, router: Tensor, eps: float, offset: float, pow2: bool):
        rows, cols, experts = self._rows, self._cols, self._experts
        results = [self._allocate(*layout) for layout in self._results]
        logits, *rest = (t.data_ptr() for t in results)
        self._launch(
            matrix_map(x.data_ptr(), "bf16", rows, cols, self._pitch, _BLOCK_ROWS, _BOX),
            matrix_map(router.data_ptr(), "bf16", experts, cols, cols, experts, _BOX),
            matrix_map(logits, "fp32", rows, experts, experts, _BLOCK_ROWS, 32),
            address(weight), *rest, *self._args, pow2, eps, offset,
        )  # fmt: skip
        return tuple(results)


def _plan(x, weight, router, precision: int, scale_layout: str, align: int) -> _Plan | None:
    """Return what to run, or None where two kernels do it."""
    check_all(x, weight, router, scale_layout)
    return _Plan(x, weight, router, scale_layout) if _serves(x, weight, router, precision, align) else None


PLANS = Plans(_plan)
