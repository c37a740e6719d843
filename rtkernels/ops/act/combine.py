"""``y = act(x + add0 + add1) * mul0 * mul1 * alpha + base0 + base1``: the elementwise operator of inference.

Not public: ``act``, ``glu`` with options, and ``ops/pointwise`` are written with it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_plan import ACT_TYPES
from rtkernels.ops.act.glu_reference import partner_and_slope, value_and_slope
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags, quick_variants, row_variants
from rtkernels.ops.shared.row_operands import check_rows
from rtkernels.ops.shared.row_quant import BLOCK, KINDS, check_results, quantize_reference
from rtkernels.runtime.checks import DTYPE_TOKEN, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import block_of, divisor, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Argument, InPlaceExact, Meta, Operator, Rows
from rtkernels.runtime.operator.plan import Offset, Step, Steps
from rtkernels.runtime.operator.registry import Op

OPERANDS = ("add0", "add1", "mul0", "mul1", "base0", "base1")
LAYOUTS = ("plain", "concat", "interleaved")
_ACTS = tuple(ACT_TYPES)  # in the order of the kernel's switch
_MAX_THREADS = (256, 128)  # of a block, of combine and combine_three
_PER_THREAD = 2  # vectors, in combine
_WAVE_THREADS = 1024  # of an SM, with 64 registers each
_KERNEL = Kernel(
    "act/combine.cu", "combine", template="T FORMAT ALIGNED", max_registers=168,
    args="x:ptr add0:ptr add1:ptr mul0:ptr mul1:ptr base0:ptr base1:ptr quant_scale:ptr amax:ptr factor:ptr out:ptr "
    "kept:ptr scale_out:ptr global_out:ptr rows:i64 cols:i64 x_stride:i64 "
    + " ".join(f"{name}_stride:i64 {name}_each:i64" for name in OPERANDS)
    + " threads_per_row:i64 slices:i64 slice_cols:i64 flags:i64 quant:i64 act:i64 number:f64 floor:f64 alpha:f64",
    variants=row_variants(),
)  # fmt: skip
_THREE = Kernel(
    "act/combine.cu", "combine_three", template="T FORMAT", max_registers=136,
    args="x:ptr p:ptr q:ptr quant_scale:ptr amax:ptr factor:ptr out:ptr kept:ptr scale_out:ptr global_out:ptr rows:i64 "
    "cols:i64 x_stride:i64 p_own:i64 p_jump:i64 p_divisor:i64 q_own:i64 q_jump:i64 q_divisor:i64 lane_bits:i64 "
    "slice_cols:i64 flags:i64 quant:i64 act:i64 number:f64 floor:f64 alpha:f64",
    variants=quick_variants(),
)  # fmt: skip
# Flags of act/combine.cu.
_SLOPE, _SUBTRACT, _INTERLEAVED = 2, 4, 8
_ROLES = {"add0": 1, "add1": 1, "mul0": 3, "mul1": 4, "base0": 5, "base1": 5}  # of p and q of combine_three
_SUBTRACTED = 2
_FP32 = {"x": 16, "add0": 32, "add1": 64, "mul0": 128, "mul1": 256, "base0": 512, "base1": 1024}


def _result_shape(x: Meta, layout: str) -> tuple[int, ...]:
    return tuple(x.shape) if layout == "plain" else (*x.shape[:-1], x.shape[-1] // 2)


def _check(x: Meta, *values: Any) -> None:
    operands, rest = dict(zip(OPERANDS, values[:6], strict=True)), values[6:]
    scale, factor, out, kept, scale_out, global_out, act, _, _, layout, cyclic, quant, swizzled, static = rest[:14]
    check_option("act", act, _ACTS)
    check_option("layout", layout, LAYOUTS)
    check_option("quant", quant, KINDS)
    if not x.shape:
        raise ArgumentError("x has no dimensions; expected at least one")
    if layout != "plain" and (x.shape[-1] % 2 or operands["mul0"] is not None):
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected gate and up of equal size, and no other up")
    shape = _result_shape(x, layout)
    rows, cols = row_count(shape), shape[-1]
    narrow = {m.dtype for m in (x, *operands.values()) if m is not None and m.dtype != torch.float32}
    if len(narrow) > 1:
        raise ArgumentError(f"operands have dtypes {', '.join(sorted(map(str, narrow)))}; expected one, or float32")
    for name, meta in {"x": x, **operands}.items():
        if meta is not None:
            token(name, meta.dtype)
            if name in cyclic.split() and meta.shape[-1] == cols and (rows == 0 or row_count(meta.shape) > 0):
                continue
            if name != "x":
                check_rows(name, meta, rows, cols)
    if factor is not None:
        token("factor", factor.dtype, (torch.float32,))
    if quant == "none":
        token("out", out.dtype, (*(narrow or {torch.float32}), torch.float32))
    given = scale is not None or static != 0
    check_results(shape, quant, swizzled, given, out, scale_out, global_out, kept)


def _row_steps(stride: int, each: int) -> tuple[int, int, int]:
    """Return what ``row_offset`` of act/combine.cu needs: a row for `each` rows, or -each rows over and over."""
    if each > 0:
        return (stride, 0, divisor(1)) if each == 1 else (0, stride, divisor(each))
    return stride, each * stride, divisor(-each)


def _plan(x: Meta, *values: Any) -> Steps:
    operands, rest = dict(zip(OPERANDS, values[:6], strict=True)), values[6:]
    quant_scale, _, out, kept, _, _, act, slope, subtract, layout, cyclic, quant, swizzled, static, floor, device = rest
    shape = _result_shape(x, layout)
    rows, cols = row_count(shape), shape[-1]
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    metas = {"x": x, **{name: meta for name, meta in operands.items() if meta is not None}}
    dtype = next((m.dtype for m in metas.values() if m.dtype != torch.float32), torch.float32)
    strides = {name: row_stride(meta.shape, meta.stride) for name, meta in metas.items()}
    each = dict.fromkeys(metas, 1)
    for name, meta in metas.items():
        count = row_count(meta.shape)
        if count == 1:
            strides[name] = 0
        each[name] = -count if name in cyclic.split() else max(rows // count, 1)
    full = (
        layout == "plain"
        and not cyclic
        and all(row_count(m.shape) == rows and strides[n] == cols for n, m in metas.items())
    )
    if rows == 1 or (full and quant in ("none", "tensor")):
        rows, cols = 1, rows * cols
        strides = dict.fromkeys(strides, 0)
    names: dict[str, Any] = {name: name for name in OPERANDS}
    unfit, flags = cols * dtype.itemsize, 0
    for name, meta in metas.items():
        unfit |= meta.misaligned | strides[name] * meta.dtype.itemsize
        flags |= _FP32[name] * (meta.dtype == torch.float32)
    if layout == "concat":
        names["mul0"], strides["mul0"], each["mul0"] = Offset("x", cols * x.dtype.itemsize), strides["x"], 1
        unfit |= cols * x.dtype.itemsize
        flags |= _FP32["mul0"] * (x.dtype == torch.float32)
    for meta in (out, kept):
        unfit |= 0 if meta is None else meta.misaligned
    flags |= _SLOPE * slope | _SUBTRACT * subtract
    flags |= _INTERLEAVED * (layout == "interleaved")
    per_thread = 16 if quant == "nvfp4" else 16 // dtype.itemsize
    span = -(-cols // 64) * 64 if swizzled else cols
    padded = -(-rows // 128) * 128 if swizzled else rows
    present = [name for name in OPERANDS if name in strides]
    three = (
        unfit % 16 == 0 and len(present) <= 2 and layout != "interleaved" and span < 2**30
        and (quant != "nvfp4" if dtype.itemsize == 4 else not flags & sum(_FP32.values()))
    )  # fmt: skip
    # A thread walks through more vectors the more there are, as long as all SMs have enough to do.
    waves = padded * span / (per_thread * _WAVE_THREADS * device_info(device).sm_count)
    walk = 1 if waves <= 1 or quant == "nvfp4" else 2 if waves <= 2 else 4 if waves <= 8 else 8
    threads = group_threads(-(-span // (per_thread * (walk if three else 1))), _MAX_THREADS[three])
    if quant == "block128":  # what shares a scale is one vector in each of these lanes
        threads = max(threads, BLOCK // per_thread)
    groups, slice_cols = block_of(threads) // threads, threads * per_thread * (walk if three else _PER_THREAD)
    slices = -(-span // slice_cols) if threads == _MAX_THREADS[three] and quant != "row" else 1
    first, then = quant_flags(quant, out.dtype, swizzled, quant_scale is None and static == 0, dtype)
    grid, token_of = -(-padded // groups) * slices, DTYPE_TOKEN[dtype]
    written = "quant_scale", 0 if first is None else "amax", "factor", "out", "kept", "scale_out", "global_out"
    ending = _ACTS.index(act), float(static), float(floor), "alpha"
    if three:
        row_blocks = -(-padded // groups)
        depth = -(-row_blocks // 65535)
        shape_of_grid = slices, -(-row_blocks // depth), depth
        launch = _THREE.bind((token_of, FORMATS[quant]), device, shape_of_grid, block_of(threads), overlap=True)
        tensors = "x", *(names[name] for name in present), *(0,) * (2 - len(present))
        steps_of = [value for name in present for value in _row_steps(strides[name], each[name])]
        steps_of += _row_steps(0, 1) * (2 - len(present))
        roles = [_SUBTRACTED if subtract and name == "add0" else _ROLES[name] for name in present] + [0, 0]
        flags = _SLOPE * slope | roles[0] << 8 | roles[1] << 11
        split = 31 if threads > 32 else threads.bit_length() - 1, slice_cols if slices > 1 else span, flags
    else:
        variant = token_of, FORMATS[quant], unfit % 16 == 0
        launch = _KERNEL.bind(variant, device, grid, block_of(threads), overlap=True)
        tensors = "x", *names.values()
        steps_of = [value for name in OPERANDS for value in (strides.get(name, 0), each.get(name, 1))]
        split = threads, slices, slice_cols, flags
    steps = [
        Step(launch, *tensors, *written, rows, cols, strides["x"], *steps_of, *split, mode, *ending)
        for mode in (first, then)
        if mode is not None
    ]
    return Steps(*steps, zeros={} if first is None else {"amax": 1})


def _reference(x: Tensor, *values: Any) -> None:
    operands, rest = dict(zip(OPERANDS, values[:6], strict=True)), values[6:]
    quant_scale, factor, out, kept, scale_out, global_out, act, slope, subtract, layout, cyclic, quant = rest[:12]
    swizzled, static, floor, alpha = rest[12:]
    gate, up = x, operands["mul0"]
    if layout == "concat":
        gate, up = x.chunk(2, -1)
    elif layout == "interleaved":
        gate, up = x[..., 0::2], x[..., 1::2]
    shape = gate.shape
    rows, cols = row_count(shape), shape[-1]

    def over(name: str) -> Tensor:
        t = up if name == "mul0" else operands[name]
        t = t.float().reshape(row_count(t.shape), cols)
        if t.shape[0] in (1, rows):
            return t
        if name in cyclic.split():
            return t.repeat(-(-rows // t.shape[0]), 1)[:rows]
        return t.repeat_interleave(rows // t.shape[0], 0)

    y = gate.float().reshape(rows, cols)
    if operands["add0"] is not None:
        y = y - over("add0") if subtract else y + over("add0")
    if operands["add1"] is not None:
        y = y + over("add1")
    y = value_and_slope(act, y)[int(slope)]
    if up is not None:
        y = y * partner_and_slope(act, over("mul0"))[0]
    if operands["mul1"] is not None:
        y = y * over("mul1")
    times = torch.tensor(alpha, dtype=torch.float32, device=x.device)
    y = y * (times if factor is None else times * factor.reshape(()))
    for name in ("base0", "base1"):
        if operands[name] is not None:
            y = y + over(name)
    y = y.reshape(shape)
    if kept is not None:
        kept.copy_(y)
    quantize_reference(y, quant, out, quant_scale, scale_out, global_out, swizzled, static, floor)


def _written(name: str) -> InPlaceExact:
    return InPlaceExact(name, None, optional=True)


COMBINE = Operator(
    "combine",
    (
        Rows("x", None), *(Rows(name, None, optional=True) for name in OPERANDS),
        Argument("quant_scale", None, optional=True), Argument("factor", None, optional=True),
        InPlaceExact("out", None, over=" ".join(("x", *OPERANDS))), _written("kept"), _written("scale_out"),
        _written("global_out"),
    ),
    options="str act, bool slope, bool subtract, str layout, str cyclic, str quant, bool swizzled, float static, "
    "float floor, float alpha",
    numbers="alpha", results="", plan=_plan, reference=_reference, check=_check,
)  # fmt: skip


def combine(
    x: Tensor, out: Tensor, *, add0: Tensor | None = None, add1: Tensor | None = None, mul0: Tensor | None = None,
    mul1: Tensor | None = None, base0: Tensor | None = None, base1: Tensor | None = None, factor: Tensor | None = None,
    alpha: float = 1.0, act: str = "none", slope: bool = False, subtract: bool = False, cyclic: str = "",
) -> Tensor:  # fmt: skip
    """Write ``act(x + add0 + add1) * mul0 * mul1 * alpha + base0 + base1`` to `out`, not quantised, and return it.

    Operands are as ``by_rows`` gives them; those named in `cyclic` come over and over.
    """
    COMBINE.call(
        x, add0, add1, mul0, mul1, base0, base1, None, factor, out, None, None, None, act, slope, subtract, "plain",
        cyclic, "none", False, 0.0, 0.0, float(alpha),
    )  # fmt: skip
    return out


OP = Op("combine", public=(), kernels=(_KERNEL, _THREE), torch_ops=(COMBINE,))
