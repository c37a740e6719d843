"""The kernel of ``norm_modulated`` and the choice of a launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags, quick_variants, row_variants
from rtkernels.ops.shared.row_quant import BLOCK
from rtkernels.runtime.invariance import choice_rows
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, block_of, divisor, float_halves, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Step, Steps

_OPERANDS = ("x", "residual", "gate", "bias", "weight", "norm_bias", "scale", "shift", "channel_scale")
_RESULTS = ("out", "residual_out", "kept", "scale_out", "global_out")
_MAX_THREADS = 512
_WAVE_THREADS = 512  # per SM: above that a thread has two vectors
_KERNEL = Kernel(
    "norm/norm_modulated.cu", "norm_modulated", struct=True, template="T FORMAT ALIGNED", max_registers=128,
    args="x:ptr residual:ptr gate:ptr bias:ptr weight:ptr norm_bias:ptr scale:ptr shift:ptr channel_scale:ptr "
    "quant_scale:ptr amax:ptr out:ptr residual_out:ptr kept:ptr scale_out:ptr global_out:ptr rows:i64 cols:i64 "
    "x_stride:i64 residual_stride:i64 gate_stride:i64 gate_each:i64 scale_stride:i64 scale_each:i64 shift_stride:i64 "
    "shift_each:i64 threads_per_row:i64 flags:i64 quant:i64 eps:f64 offset:f64 number:f64 floor:f64",
    variants=row_variants(), tier="serve",
)  # fmt: skip
_IN_REGISTERS = Kernel(
    "norm/norm_in_registers.cu", "norm_in_registers", template="T FORMAT", max_registers=128,
    args="x:ptr residual:ptr before:ptr p:ptr q:ptr quant_scale:ptr amax:ptr out:ptr residual_out:ptr kept:ptr "
    "scale_out:ptr global_out:ptr rows:i64 cols:i64 x_stride:i64 residual_stride:i64 before_stride:i64 "
    "before_divisor:i64 p_stride:i64 p_divisor:i64 q_stride:i64 q_divisor:i64 lane_bits:i64 flags:i64 offsets:i64 "
    "quant:i64 eps:f64 number:f64 floor:f64",
    variants=quick_variants(), tier="serve",
)  # fmt: skip
KERNELS = (_KERNEL, _IN_REGISTERS)
# Flags of norm/norm_modulated.cu.
_CENTRED, _IN_SHARED = 2, 4
_FP32 = {
    "gate": 32, "bias": 64, "weight": 128, "norm_bias": 256, "scale": 512, "shift": 1024, "channel_scale": 2048,
}  # fmt: skip
# Of norm/norm_in_registers.cu: operands before and behind the statistics, and whether they are added or multiply.
_HAS_RESIDUAL, _ADDED, _MULTIPLIED = 4, 1, 2
_BEFORE = {"bias": _ADDED, "gate": _MULTIPLIED}
_BEHIND = {
    "weight": _MULTIPLIED, "norm_bias": _ADDED, "scale": _MULTIPLIED, "shift": _ADDED, "channel_scale": _MULTIPLIED,
}  # fmt: skip


class Modulated(NamedTuple):
    """Metas and options of a call, as the operator has them."""

    x: Meta
    residual: Meta | None
    gate: Meta | None
    bias: Meta | None
    weight: Meta | None
    norm_bias: Meta | None
    scale: Meta | None
    shift: Meta | None
    channel_scale: Meta | None
    quant_scale: Meta | None
    out: Meta
    residual_out: Meta | None
    kept: Meta | None
    eps: float
    offset: float
    centred: bool
    quant: str
    swizzled: bool
    static: float
    floor: float

    @property
    def operands(self) -> dict[str, Meta | None]:
        """x and what comes to it, as the kernel takes them."""
        return {name: getattr(self, name) for name in _OPERANDS}

    @property
    def span(self) -> int:
        """Columns with their padding."""
        cols = self.x.shape[-1]
        return -(-cols // 64) * 64 if self.swizzled else cols

    @property
    def per_vector(self) -> int:
        """Elements that a thread has at a time."""
        return 16 if self.quant == "nvfp4" else 16 // self.x.dtype.itemsize

    def blocks(self, threads: int) -> int:
        """Return how many blocks there are with `threads` for a row."""
        rows = row_count(self.x.shape)
        padded = -(-rows // 128) * 128 if self.swizzled else rows
        return -(-padded // (block_of(threads) // threads))


class _Walk(NamedTuple):
    """Where the kernels find rows of the operands."""

    strides: dict[str, tuple[int, int]]  # from row to row, and how many rows of x share one
    aligned: bool  # all rows begin at a multiple of 16 bytes
    fp32_flags: int  # flags of the operands in float32


def _walk_of(given: Modulated) -> _Walk:
    rows, cols = row_count(given.x.shape), given.x.shape[-1]
    strides, unfit, fp32_flags = {}, cols * given.x.dtype.itemsize, 0
    for name, meta in given.operands.items():
        stride = 0 if meta is None or row_count(meta.shape) == 1 else row_stride(meta.shape, meta.stride)
        strides[name] = stride, 1 if meta is None else max(rows // max(row_count(meta.shape), 1), 1)
        if meta is not None:
            unfit |= meta.misaligned | stride * meta.dtype.itemsize
            fp32_flags |= _FP32.get(name, 0) * (meta.dtype == torch.float32)
    for meta in (given.out, given.residual_out, given.kept):
        unfit |= 0 if meta is None else meta.misaligned
    return _Walk(strides, unfit % 16 == 0, fp32_flags)


def plan(given: Modulated, device: int) -> Steps:
    rows = row_count(given.x.shape)
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    walk = _walk_of(given)
    dynamic = given.quant_scale is None and given.static == 0
    modes = quant_flags(given.quant, given.out.dtype, given.swizzled, dynamic, given.x.dtype)
    threads = _threads_in_registers(given, walk, device)
    make = _step_of_any if threads is None else partial(_step_in_registers, threads)
    results = "quant_scale", 0 if modes[0] is None else "amax", *_RESULTS
    steps = make(given, walk, results, [mode for mode in modes if mode is not None], device)
    return Steps(*steps, zeros={} if modes[0] is None else {"amax": 1})


def _around(given: Modulated) -> tuple[list[str], list[str]]:
    """Return the operands before and after the statistics."""
    present = [name for name, meta in given.operands.items() if meta is not None]
    return [name for name in present if name in _BEFORE], [name for name in present if name in _BEHIND]


def _threads_in_registers(given: Modulated, walk: _Walk, device: int) -> int | None:
    """Return how many threads have a row in their registers, or None for a call that needs the kernel for all."""
    rows, span, each, quant = row_count(given.x.shape), given.span, given.per_vector, given.quant
    uniform = quant != "nvfp4" if given.x.dtype.itemsize == 4 else not walk.fp32_flags
    many = choice_rows(rows) * span > each * _WAVE_THREADS * device_info(device).sm_count or span > each * _MAX_THREADS
    vectors = 2 if many and quant != "nvfp4" else 1  # per thread: two if all SMs have work anyway
    threads = group_threads(-(-span // (each * vectors)), _MAX_THREADS)
    if quant == "block128":  # what shares a scale is one vector in each of these lanes
        threads = max(threads, BLOCK // each)
    before, behind = _around(given)
    serves = walk.aligned and uniform and len(before) <= 1 and len(behind) <= 2 and span <= threads * each * vectors
    return threads if serves else None


def _step_in_registers(
    threads: int, given: Modulated, walk: _Walk, results: Sequence[str | int], modes: Sequence[int], device: int
) -> list[Step]:
    variant, block = (DTYPE_TOKEN[given.x.dtype], FORMATS[given.quant]), block_of(threads)
    launch = _IN_REGISTERS.bind(variant, device, given.blocks(threads), block, overlap=True)
    before, behind = _around(given)
    operands = [*(before or [0]), *behind, *[0] * (2 - len(behind))]
    roles = [{**_BEFORE, **_BEHIND}.get(name, 0) for name in operands]
    flags = _CENTRED * given.centred | _HAS_RESIDUAL * (given.residual is not None)
    flags |= roles[0] << 8 | roles[1] << 10 | roles[2] << 12
    steps_of = [
        value for stride, rows_of in (walk.strides.get(name, (0, 1)) for name in operands)
        for value in (stride, divisor(rows_of))
    ]  # fmt: skip
    offsets = [{"weight": float(given.offset), "scale": 1.0}.get(name, 0.0) for name in operands[1:]]
    sizes = row_count(given.x.shape), given.x.shape[-1], walk.strides["x"][0], walk.strides["residual"][0]
    lane_bits = 31 if threads > 32 else threads.bit_length() - 1
    numbers = *sizes, *steps_of, lane_bits, flags, float_halves(*offsets)
    ending = float(given.eps), float(given.static), float(given.floor)
    return [Step(launch, "x", "residual", *operands, *results, *numbers, mode, *ending) for mode in modes]


def _step_of_any(
    given: Modulated, walk: _Walk, results: Sequence[str | int], modes: Sequence[int], device: int
) -> list[Step]:
    each, strides = given.per_vector, walk.strides
    threads = group_threads(-(-given.span // each), _MAX_THREADS)
    groups, flags = block_of(threads) // threads, _CENTRED * given.centred | walk.fp32_flags
    shared = groups * -(-given.span // (threads * each)) * threads * each * given.x.dtype.itemsize
    if shared <= device_info(device).shared_per_block // 2:
        flags |= _IN_SHARED
    else:
        shared = 0
    variant = DTYPE_TOKEN[given.x.dtype], FORMATS[given.quant], walk.aligned
    launch = _KERNEL.bind(variant, device, given.blocks(threads), block_of(threads), shared, overlap=True)
    sizes = row_count(given.x.shape), given.x.shape[-1], strides["x"][0], strides["residual"][0]
    numbers = *sizes, *strides["gate"], *strides["scale"], *strides["shift"], threads, flags
    ending = float(given.eps), float(given.offset), float(given.static), float(given.floor)
    return [Step(launch, *_OPERANDS, *results, *numbers, mode, *ending) for mode in modes]
