"""The operator behind the backward of ``norm_modulated``: everything that belongs to one row, in one launch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.shared.row_operands import check_rows
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import DTYPE_TOKEN, block_of, check_same, divisor, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Dense, InPlaceExact, Operator, Rows
from rtkernels.runtime.operator.plan import Step, Steps
from rtkernels.runtime.operator.registry import Op

_INPUTS = ("dy", "h", "dsum", "x", "gate", "bias", "weight", "norm_bias", "scale", "channel_scale")
_RESULTS = ("dh", "dscale", "dshift", "dx", "dgate")
_MAX_THREADS = 512
_KERNEL = Kernel(
    "norm/norm_modulated_bwd.cu", "norm_modulated_bwd", template="T", max_registers=128,
    args=" ".join(f"{name}:ptr" for name in (*_INPUTS, *_RESULTS))
    + " rows:i64 cols:i64 dy_stride:i64 h_stride:i64 dsum_stride:i64 x_stride:i64 gate_stride:i64 gate_divisor:i64 "
    "scale_stride:i64 scale_divisor:i64 lane_bits:i64 flags:i64 eps:f64 offset:f64",
    variants=[("bf16",), ("fp16",), ("fp32",)],
)  # fmt: skip
# Flags of norm/norm_modulated_bwd.cu.
_ALIGNED, _CENTRED = 1, 2
_FP32 = {"gate": 32, "bias": 64, "weight": 128, "norm_bias": 256, "scale": 512, "channel_scale": 2048}


class Gradients(NamedTuple):
    """Arguments of the operator: of its tensors, checks and plans get the metas, the reference the tensors."""

    dy: Any
    h: Any
    dsum: Any
    x: Any
    gate: Any
    bias: Any
    weight: Any
    norm_bias: Any
    scale: Any
    channel_scale: Any
    dh: Any
    dscale: Any
    dshift: Any
    dx: Any
    dgate: Any
    eps: float
    offset: float
    centred: bool

    @property
    def tensors(self) -> dict[str, Any]:
        """All of them by name, as the kernel takes them."""
        return {name: getattr(self, name) for name in (*_INPUTS, *_RESULTS)}


def _check(wanted: Gradients) -> None:
    given = wanted.tensors
    h = given["h"]
    for name in ("dy", "dsum", "x", *_RESULTS):
        if given[name] is not None:
            check_same(name, tuple(given[name].shape), tuple(h.shape), "shape", of="h")
            check_same(name, given[name].dtype, h.dtype, "dtype", of="h")
    for name in ("gate", "scale"):
        check_rows(name, given[name], row_count(h.shape), h.shape[-1], of="h")
    for name in ("bias", "weight", "norm_bias", "channel_scale"):
        if given[name] is not None:
            check_same(name, tuple(given[name].shape), tuple(h.shape[-1:]), "shape", of="a row of h")


def _plan(wanted: Gradients, device: int) -> Steps:
    given, h = wanted.tensors, wanted.h
    rows, cols, size = row_count(h.shape), h.shape[-1], h.dtype.itemsize
    unfit, flags, strides = cols * size, _CENTRED * wanted.centred, {}
    for name, meta in given.items():
        strides[name] = 0
        if meta is not None:
            strides[name] = 0 if row_count(meta.shape) == 1 else row_stride(meta.shape, meta.stride)
            unfit |= meta.misaligned | strides[name] * meta.dtype.itemsize
            flags |= _FP32.get(name, 0) * (meta.dtype == torch.float32)
    each = {
        name: divisor(1 if given[name] is None else max(rows // max(row_count(given[name].shape), 1), 1))
        for name in ("gate", "scale")
    }
    threads = group_threads(-(-cols * size // 16), _MAX_THREADS)
    grid = -(-rows // (block_of(threads) // threads))
    launch = _KERNEL.bind((DTYPE_TOKEN[h.dtype],), device, grid, block_of(threads))
    numbers = (
        rows, cols, *(strides[name] for name in ("dy", "h", "dsum", "x")), strides["gate"], each["gate"],
        strides["scale"], each["scale"], 31 if threads > 32 else threads.bit_length() - 1,
        flags | _ALIGNED * (unfit % 16 == 0), float(wanted.eps), float(wanted.offset),
    )  # fmt: skip
    return Steps(Step(launch, *given, *numbers))


def _reference(wanted: Gradients) -> None:
    given, centred = wanted.tensors, wanted.centred
    shape = wanted.h.shape
    rows, cols = row_count(shape), shape[-1]

    def over(name: str, without: float) -> Tensor | float:
        t = given[name]
        if t is None:
            return without
        t = t.float().reshape(row_count(t.shape), cols)
        return t if t.shape[0] in (1, rows) else t.repeat_interleave(rows // t.shape[0], 0)

    n = over("h", 0.0)
    if centred:
        n = n - n.mean(-1, keepdim=True)
    rstd = torch.rsqrt(n.square().mean(-1, keepdim=True) + wanted.eps)
    n = n * rstd
    gain = 1.0 if given["weight"] is None else over("weight", 1.0) + wanted.offset
    d = over("dy", 0.0) * over("channel_scale", 1.0)
    g = d * (1 + over("scale", 0.0)) * gain
    centre = g.mean(-1, keepdim=True) if centred else 0.0
    dh = rstd * (g - centre - n * (g * n).mean(-1, keepdim=True)) + over("dsum", 0.0)
    gradients = {
        "dh": dh, "dscale": (n * gain + over("norm_bias", 0.0)) * d, "dshift": d, "dx": dh * over("gate", 1.0),
        "dgate": (over("x", 0.0) + over("bias", 0.0)) * dh,
    }  # fmt: skip
    for name, t in gradients.items():
        if given[name] is not None:
            given[name].copy_(t.reshape(shape))


_optional_rows = {name: Rows(name, None, optional=True) for name in ("dsum", "x", "gate", "scale")}
_vectors = {name: Dense(name, None, optional=True) for name in ("bias", "weight", "norm_bias", "channel_scale")}
BACKWARD = Operator(
    "norm_modulated_bwd",
    (
        *({"dy": Rows("dy", None), "h": Rows("h", None), **_optional_rows, **_vectors}[name] for name in _INPUTS),
        *(InPlaceExact(name, None, optional=True) for name in _RESULTS),
    ),
    options="float eps, float offset, bool centred", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip
OP = Op("norm_modulated_bwd", public=(), kernels=(_KERNEL,), torch_ops=(BACKWARD,))
