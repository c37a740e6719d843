"""The kernels of gated linear units, their requirements, and their launches."""

from __future__ import annotations

from math import inf
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_same, check_shape, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import GRID_LIMIT, WIDTH, block_of, group_threads, vector_bytes
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Step, Steps

_UNIT = "act/glu.cu"
_GENERIC_UNIT = "act/glu_generic.cu"
ACT_TYPES = {
    "silu": "Silu",
    "gelu_tanh": "GeluTanh",
    "gelu_erf": "GeluErf",
    "relu": "Relu",
    "relu2": "Relu2",
    "sigmoid": "Sigmoid",
    "none": "Identity",
    "swiglu_oai": "SwigluOai",
    "quick_gelu": "QuickGelu",
}
CLAMPS = {"silu": inf, "swiglu_oai": 7.0}  # limits unless others are given
_KERNEL_TYPES = (*ACT_TYPES.values(), "ClampedSilu")
_THREADS = 256
# Vectors a thread has in flight of each input. The elementwise backward needs only one: there are three inputs, and
# every thread slot of an SM is filled.
_FWD_ROWS = 2
_BWD_ROWS = 1
_BWD_CHUNKS = 2
_GENERIC_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2}  # common/any_type.cuh
_GENERIC_ELEMENTS = 4  # a thread has in flight of each input
_STRIP = 31  # lane_bits of a block that works on one row


def _variants(in_flight: int) -> list[tuple[Any, ...]]:
    return [(t, act, WIDTH[t], in_flight) for t in WIDTH for act in _KERNEL_TYPES]


_BWD_DIMS = "rows:i64 cols:i64 dy_stride:i64 gate_stride:i64 up_stride:i64 out_stride:i64 weight_fp32:i64"
_FWD = Kernel(
    _UNIT, "glu_fwd", template="T Act VEC ROWS", max_registers=40,
    args="gate:ptr up:ptr weight:ptr y:ptr rows:i64 cols:i64 gate_stride:i64 up_stride:i64 weight_fp32:i64 "
    "lane_bits:i64 limit:f64",
    variants=_variants(_FWD_ROWS),
)  # fmt: skip
_BWD = Kernel(
    _UNIT, "glu_bwd", template="T Act VEC ROWS", max_registers=40,
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr {_BWD_DIMS} lane_bits:i64 limit:f64",
    variants=_variants(_BWD_ROWS),
)  # fmt: skip
_BWD_BY_ROW = Kernel(
    _UNIT, "glu_bwd_rows", template="T Act VEC CHUNKS", max_registers=76,
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr dweight:ptr {_BWD_DIMS} threads_per_row:i64 limit:f64",
    variants=_variants(_BWD_CHUNKS),
)  # fmt: skip
# For rows that can only be accessed an element at a time.
_FWD_GENERIC = Kernel(
    _GENERIC_UNIT, "glu_fwd_generic", template="THREADS", max_registers=64,
    args="gate:ptr up:ptr weight:ptr y:ptr rows:i64 cols:i64 gate_stride:i64 up_stride:i64 weight_fp32:i64 "
    "threads_per_row:i64 type:i64 act:i64 limit:f64",
    variants=[(_THREADS,)],
)  # fmt: skip
_BWD_GENERIC = Kernel(
    _GENERIC_UNIT, "glu_bwd_generic", template="THREADS", max_registers=64,
    args=f"dy:ptr gate:ptr up:ptr weight:ptr dgate:ptr dup:ptr dweight:ptr {_BWD_DIMS} threads_per_row:i64 type:i64 "
    "act:i64 limit:f64",
    variants=[(_THREADS,)],
)  # fmt: skip
KERNELS = (_FWD, _BWD, _BWD_BY_ROW, _FWD_GENERIC, _BWD_GENERIC)


def result_shape(x: Any, up: Any) -> tuple[int, ...]:
    """Return the shape of the result: half of x's last dimension, unless it is the gate alone."""
    return tuple(x.shape) if up is not None else (*x.shape[:-1], x.shape[-1] // 2)


def act_with_limit(act: str, limit: float | None) -> str:
    """Return the option of the operators for an activation and a limit, as ``"silu:10.0"``.

    Raises:
        ArgumentError: The activation is not known or takes no limit, or the limit is not positive.
    """
    if act not in ACT_TYPES:
        raise ArgumentError(f"act is {act!r}; expected one of {', '.join(ACT_TYPES)}")
    if limit is None:
        return act
    if act not in CLAMPS:
        others = " or ".join(map(repr, CLAMPS))
        raise ArgumentError(f"limit is {limit!r} with act {act!r}; expected None, or act {others}")
    limit = check_number("limit", limit)
    if not limit > 0.0:
        raise ArgumentError(f"limit is {limit}; expected a number above 0, or None")
    return act if limit == CLAMPS[act] else f"{act}:{float(limit)!r}"


def split_act(act: str) -> tuple[str, float]:
    """Return the activation and the limit of what :func:`act_with_limit` returns; infinity without a limit."""
    name, _, limit = act.partition(":")
    return name, float(limit) if limit else CLAMPS.get(name, inf)


def _checked(act: str) -> str:
    name, limit = split_act(act)
    act_with_limit(name, limit if ":" in act else None)
    return name


def check_inputs(x: Meta, up: Meta | None, weight: Meta | None, act: str) -> tuple[int, ...]:
    """Raise an ArgumentError for arguments that do not fit together; return the shape of the result."""
    dtype, shape = x.dtype, x.shape
    if act not in ACT_TYPES:
        raise ArgumentError(f"act is {act!r}; expected one of {', '.join(ACT_TYPES)}")
    token("x", dtype)
    if not shape:
        raise ArgumentError("x has no dimensions; expected at least one, the last holds gate (and up)")
    if up is None:
        if shape[-1] % 2:
            raise ArgumentError(f"x has an odd last dimension, {shape[-1]}; expected gate and up of equal size, or up=")
    else:
        check_same("up", up.dtype, dtype, "dtype")
        check_same("up", up.shape, shape, "shape")
    if weight is not None:
        token("weight", weight.dtype, (dtype, torch.float32))
        check_shape("weight", weight.shape, shape[:-1], "one number for each row of x")
    return result_shape(x, up)


def check_fwd(x: Meta, up: Meta | None, weight: Meta | None, act: str) -> None:
    check_inputs(x, up, weight, _checked(act))


def check_bwd(dy: Meta, x: Meta, up: Meta | None, weight: Meta | None, act: str, weight_grad: bool) -> None:
    shape = check_inputs(x, up, weight, _checked(act))
    check_same("dy", dy.dtype, x.dtype, "dtype")
    check_same("dy", tuple(dy.shape), shape, "shape", of="the result")
    if weight_grad and weight is None:
        raise ArgumentError("weight_grad is True but there is no weight")


def weight_fp32(weight: Meta | None) -> int:
    return int(weight is not None and weight.dtype == torch.float32)


def _tile(rows: int, vectors: int, rows_per_thread: int) -> tuple[tuple[int, int, int], int, int]:
    """Return grid, block and lane_bits (see Tile in act/glu.cu) that cover rows of `vectors` accesses each."""
    strips = -(-vectors // _THREADS)
    lanes = group_threads(-(-vectors // strips), _THREADS)
    block, bits, block_rows = lanes, _STRIP, 1
    if lanes <= 32:
        block, bits, block_rows = _THREADS, lanes.bit_length() - 1, _THREADS // lanes
    row_blocks = -(-rows // (block_rows * rows_per_thread))
    depth = -(-row_blocks // 65535)
    return (strips, -(-row_blocks // depth), depth), block, bits


def _rows_of_threads(rows: int, cols: int, per_thread: int) -> tuple[tuple[int, int], int, int]:
    """Return grid, block and threads per row of kernels in which a group of threads works on a row."""
    threads = group_threads(-(-cols // per_thread), _THREADS)
    block = block_of(threads)
    row_blocks = -(-rows // (block // threads))
    depth = -(-row_blocks // GRID_LIMIT)
    return (-(-row_blocks // depth), depth), block, threads


def _kernel_act(act: str) -> tuple[str, float]:
    """Return the type of an activation in the kernels, and its limit."""
    name, limit = split_act(act)
    return "ClampedSilu" if name == "silu" and limit < inf else ACT_TYPES[name], limit


def _generic_types(t: str, act_type: str) -> tuple[int, int]:
    """Return the type and the activation as the kernels for rows of any alignment take them."""
    return _GENERIC_TYPES[t], _KERNEL_TYPES.index(act_type)


def plan_fwd(x: Meta, up: Meta | None, weight: Meta | None, act: str, device: int) -> Steps:
    act, limit = _kernel_act(act)
    t, size = x.token, x.dtype.itemsize
    rows, cols = x.rows, x.shape[-1] // (2 if up is None else 1)
    gate_stride = x.row_stride
    up_stride = gate_stride if up is None else up.row_stride
    sizes = rows, cols, gate_stride, up_stride, weight_fp32(weight)
    if vector_bytes(misaligned(x, up), cols * size, gate_stride * size, up_stride * size) < 16:
        grid, block, threads = _rows_of_threads(rows, cols, _GENERIC_ELEMENTS)
        launch, ending = _FWD_GENERIC.bind((_THREADS,), device, grid, block), (threads, *_generic_types(t, act))
    else:
        grid, block, lane_bits = _tile(rows, cols // WIDTH[t], _FWD_ROWS)
        variant = t, act, WIDTH[t], _FWD_ROWS
        launch, ending = _FWD.bind(variant, device, grid, block), (lane_bits,)
    return Steps(Step(launch, "x", "up", "weight", "y", *sizes, *ending, limit))


def plan_bwd(
    dy: Meta, x: Meta, up: Meta | None, weight: Meta | None, act: str, weight_grad: bool, device: int,
    results: tuple[str, ...] = ("dx", "dup"),
) -> Steps:  # fmt: skip
    """Return the launch that writes gradients to `results`, which may alias x and up (threads write what they read)."""
    t, size, rows, cols = x.token, x.dtype.itemsize, x.rows, dy.shape[-1]
    act, limit = _kernel_act(act)
    strides = [meta.row_stride for meta in (dy, x, x if up is None else up)]
    vec = WIDTH[t]
    sizes = rows, cols, *strides, x.shape[-1], weight_fp32(weight)
    dweight = ("dweight",)
    if vector_bytes(misaligned(dy, x, up), cols * size, *(s * size for s in strides)) < 16:
        grid, block, threads = _rows_of_threads(rows, cols, _GENERIC_ELEMENTS)
        launch, ending = _BWD_GENERIC.bind((_THREADS,), device, grid, block), (threads, *_generic_types(t, act))
    elif weight_grad:
        grid, block, threads = _rows_of_threads(rows, cols, vec * _BWD_CHUNKS)
        launch = _BWD_BY_ROW.bind((t, act, vec, _BWD_CHUNKS), device, grid, block)
        ending = (threads,)
    else:
        grid, block, lane_bits = _tile(rows, cols // vec, _BWD_ROWS)
        launch = _BWD.bind((t, act, vec, _BWD_ROWS), device, grid, block)
        dweight, ending = (), (lane_bits,)
    return Steps(Step(launch, "dy", "x", "up", "weight", *results, *dweight, *sizes, *ending, limit))
