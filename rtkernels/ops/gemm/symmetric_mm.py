"""Batched products whose result is symmetric: one triangle is computed and stored twice.

Behind ``rtkernels.optim.Muon``, whose iterations need ``X X^T`` and polynomials of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Argument, Meta, Operator, UnitStride
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, Steps, box_strides
from rtkernels.runtime.operator.registry import Op

_DTYPES = (torch.bfloat16, torch.float16)
_BOX, _ROW = 64 * 128, 128  # bytes of a box of results, and of a row of operands in shared memory
_TILES = {256: (3, 4), 128: (5, 2)}  # columns of a tile: stages, boxes of a warpgroup
_SLOWER = {256: 1.0, 128: 1.12}  # time of an element, relative to the large tile

_SYMMETRIC = Kernel(
    "gemm/symmetric_mm.cu", "symmetric_mm", template="T ACROSS COLS STAGES SLOTS", max_registers=168,
    args="a_map:tmap b_map:tmap out_map:tmap add:ptr n:i64 k:i64 batch:i64 add_pitch:i64 add_matrix:i64 alpha:f64 "
    "beta:f64 gamma:f64",
    variants=[
        (token, across, cols, *shape)
        for token in ("bf16", "fp16") for across in (False, True) for cols, shape in _TILES.items()
    ],
    needs=("wgmma",),
)  # fmt: skip


class _Operand(Argument):
    """A batch of matrices whose rows or columns have unit stride; others are copied."""

    def fits(self, meta: Meta) -> bool:
        return 1 in meta.stride[-2:] and (0 not in meta.stride or 0 in meta.shape)


def _across(meta: Meta) -> bool:
    return meta.stride[-1] != 1


def tile_columns(n: int, batch: int, sms: int) -> int:
    """Return the columns of the tile with which the busiest SM has the least to do."""

    def cost(cols: int) -> float:
        squares = -(-n // cols)
        tiles = batch * squares * (squares + 1) // 2 * (cols // 128)
        return -(-tiles // sms) * cols * _SLOWER[cols]

    return min(_TILES, key=cost)


def _check(given: dict[str, Any]) -> None:
    a, b, add = given["a"], given["b"], given["add"]
    if len(a.shape) != 3:
        raise ArgumentError(f"a has shape {tuple(a.shape)}; expected a batch of matrices, three dimensions")
    if b is not None and tuple(b.shape) != tuple(a.shape):
        raise ArgumentError(f"b has shape {tuple(b.shape)}; expected {tuple(a.shape)}, as a")
    expected = (a.shape[0], a.shape[1], a.shape[1])
    if add is not None and tuple(add.shape) != expected:
        raise ArgumentError(f"add has shape {tuple(add.shape)}; expected {expected}")


def _aligned(meta: Meta) -> bool:
    pitch = meta.stride[-2] if not _across(meta) else meta.stride[-1]
    return meta.misaligned == 0 and pitch % 8 == 0 and (meta.stride[0] % 8 == 0 or meta.shape[0] == 1)


def _pairs(add: Meta) -> bool:
    """Return whether pairs of elements begin at multiples of 4 bytes in every row."""
    return add.misaligned % 4 == 0 and add.stride[1] % 2 == 0 and (add.stride[0] % 2 == 0 or add.shape[0] == 1)


def _operand(name: str, meta: Meta, rows: int) -> Boxes:
    batch, n, k = meta.shape
    across = _across(meta)
    sizes, pitch = ((n, k, batch), meta.stride[2]) if across else ((k, n, batch), meta.stride[1])
    strides = box_strides(sizes, (pitch, meta.stride[0]), 2)
    return Boxes(name, meta.token, sizes, strides, (64, 64, 1) if across else (64, rows, 1))


def _plan(a: Meta, b: Meta | None, add: Meta | None, device: int) -> Steps:
    batch, n, k = a.shape
    info = device_info(device)
    other = a if b is None else b
    fits = _SYMMETRIC.supports(info.target) and k > 0 and n % 8 == 0 and k % 8 == 0
    fits = fits and _across(a) == _across(other) and max(n, k, batch) < 1 << 24
    if not (fits and _aligned(a) and _aligned(other) and (add is None or _pairs(add))):
        return Steps(instead=_in_torch)
    cols = tile_columns(n, batch, info.sm_count)
    stages, slots = _TILES[cols]
    squares = -(-n // cols)
    grid = min(info.sm_count, batch * squares * (squares + 1) // 2 * (cols // 128))
    shared = stages * ((128 + cols) * _ROW + 16) + 2 * slots * _BOX + 1024
    launch = _SYMMETRIC.bind((a.token, _across(a), cols, stages, slots), device, grid, 384, shared)
    sizes = (n, n, batch)
    out = Boxes("out", a.token, sizes, box_strides(sizes, (n, n * n), 2), (64, 64, 1))
    pitches = (add.stride[1], add.stride[0]) if add is not None else (0, 0)
    return Steps(
        Step(
            launch, _operand("a", a, 128), _operand("a" if b is None else "b", other, cols), out,
            "add" if add is not None else 0, n, k, batch, *pitches, "alpha", "beta", "gamma",
        )
    )  # fmt: skip


def _in_torch(a: Tensor, b: Tensor | None, add: Tensor | None, alpha: float, beta: float, gamma: float) -> Tensor:
    """Return the result with torch's products."""
    if a.is_cpu:
        return _reference(a, b, add, alpha, beta, gamma)
    start, keep = (a.new_zeros(()), 0.0) if add is None else (add, beta)
    out = torch.baddbmm(start, a, (a if b is None else b).mT, beta=keep, alpha=alpha)
    if gamma:
        out.diagonal(dim1=1, dim2=2).add_(gamma)
    return out if b is None else _mirrored(out)  # without this, iterations amplify what is not symmetric


def _mirrored(out: Tensor) -> Tensor:
    return out.tril().add_(out.tril(-1).mT)


def _reference(a, b, add, alpha, beta, gamma) -> Tensor:
    out = alpha * (a.float() @ (a if b is None else b).float().mT)
    if add is not None:
        out = out + beta * add.float()
    if gamma:
        out = out + gamma * torch.eye(a.shape[1], dtype=torch.float32, device=a.device)
    return _mirrored(out.to(a.dtype)).contiguous()


SYMMETRIC_MM = Operator(
    "symmetric_mm",
    (_Operand("a", _DTYPES), _Operand("b", _DTYPES, optional=True), UnitStride("add", _DTYPES, optional=True)),
    options="float alpha, float beta, float gamma", numbers="alpha beta gamma", results="out",
    outputs=lambda a: (Memory((a.shape[0], a.shape[1], a.shape[1]), a.dtype),),
    plan=_plan, reference=_reference, check=lambda a, b, add: _check({"a": a, "b": b, "add": add}),
)  # fmt: skip

OP = Op("symmetric_mm", public=(), kernels=(_SYMMETRIC,), torch_ops=(SYMMETRIC_MM,))
