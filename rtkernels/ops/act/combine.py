"""``y = act(x + add0 + add1) * mul0 * mul1 * alpha + base0 + base1``: the elementwise operator of inference.

Not public: ``act``, ``glu`` with options, and ``ops/pointwise`` are written with it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_plan import ACT_TYPES
from rtkernels.ops.act.glu_reference import partner_and_slope, value_and_slope
from rtkernels.ops.shared.constants import constant
from rtkernels.ops.shared.fp8_layout import check_option
from rtkernels.ops.shared.row_launch import FORMATS, quant_flags, quick_variants, row_variants
from rtkernels.ops.shared.row_operands import check_rows
from rtkernels.ops.shared.row_quant import BLOCK, KINDS, check_results, quantize_reference
from rtkernels.runtime.checks import DTYPE_TOKEN, check_dimensions, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import block_of, divisor, group_threads, row_count, row_stride
from rtkernels.runtime.operator.declared import Argument, InPlaceExact, Operator, Rows
from rtkernels.runtime.operator.plan import Offset, Step, Steps
from rtkernels.runtime.operator.registry import Op

OPERANDS = ("add0", "add1", "mul0", "mul1", "base0", "base1")
LAYOUTS = ("plain", "concat", "interleaved")
_ACTS = tuple(ACT_TYPES)  # in the order of the kernel's switch
_MAX_THREADS = (256, 128)  # of a block, of combine and combine_three
_PER_THREAD = 2  # vectors, in combine
_WAVE_THREADS = 1024  # of an SM, with 64 registers each
_KERNEL = Kernel(
    "act/combine.cu", "combine", struct=True, template="T FORMAT ALIGNED", max_registers=168,
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


class Combination(NamedTuple):
    """Arguments of the operator. Checks and plans get metas in place of tensors."""

    x: Any
    add0: Any
    add1: Any
    mul0: Any
    mul1: Any
    base0: Any
    base1: Any
    quant_scale: Any
    factor: Any
    out: Any
    kept: Any
    scale_out: Any
    global_out: Any
    act: str
    slope: bool
    subtract: bool
    layout: str
    cyclic: str
    quant: str
    swizzled: bool
    static: float
    floor: float
    alpha: float = 1.0  # no plan depends on it

    @property
    def operands(self) -> dict[str, Any]:
        """All operands by name; None for absent ones."""
        return {name: getattr(self, name) for name in OPERANDS}

    @property
    def given(self) -> dict[str, Any]:
        """x and the operands that are not None, by name."""
        return {"x": self.x, **{name: operand for name, operand in self.operands.items() if operand is not None}}

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's."""
        x = self.x
        return tuple(x.shape) if self.layout == "plain" else (*x.shape[:-1], x.shape[-1] // 2)

    @property
    def scale_is_given(self) -> bool:
        """Whether the scale is known before the codes are computed."""
        return self.quant_scale is not None or self.static != 0


def _check(wanted: Combination) -> None:
    x, layout, quant, out = wanted.x, wanted.layout, wanted.quant, wanted.out
    check_option("act", wanted.act, _ACTS)
    check_option("layout", layout, LAYOUTS)
    check_option("quant", quant, KINDS)
    check_dimensions("x", x.shape)
    if layout != "plain" and (x.shape[-1] % 2 or wanted.mul0 is not None):
        raise ArgumentError(f"x has shape {tuple(x.shape)}; expected gate and up of equal size, and no other up")
    shape = wanted.shape
    rows, cols = row_count(shape), shape[-1]
    narrow = {meta.dtype for meta in wanted.given.values() if meta.dtype != torch.float32}
    if len(narrow) > 1:
        raise ArgumentError(f"operands have dtypes {', '.join(sorted(map(str, narrow)))}; expected one, or float32")
    for name, meta in wanted.given.items():
        token(name, meta.dtype)
        if name in wanted.cyclic.split() and meta.shape[-1] == cols and (rows == 0 or row_count(meta.shape) > 0):
            continue
        if name != "x":
            check_rows(name, meta, rows, cols)
    if wanted.factor is not None:
        token("factor", wanted.factor.dtype, (torch.float32,))
    if quant == "none":
        token("out", out.dtype, (*(narrow or {torch.float32}), torch.float32))
    scales = wanted.scale_out, wanted.global_out
    check_results(shape, quant, wanted.swizzled, wanted.scale_is_given, out, *scales, wanted.kept)


def _row_steps(stride: int, each: int) -> tuple[int, int, int]:
    """Return what ``row_offset`` of act/combine.cu needs: a row for `each` rows, or -each rows over and over."""
    if each > 0:
        return (stride, 0, divisor(1)) if each == 1 else (0, stride, divisor(each))
    return stride, each * stride, divisor(-each)


class _Walk(NamedTuple):
    """A combination as the kernels see it: rows of columns, and where each operand's rows are."""

    rows: int
    cols: int
    dtype: torch.dtype  # what is not float32, if there is any
    names: dict[str, str | Offset]  # of all operands, as arguments of a step
    strides: dict[str, int]  # of x and of the operands that are there
    each: dict[str, int]  # rows that share one of the operand's; negative: that many rows over and over
    aligned: bool  # all rows begin at a multiple of 16 bytes
    fp32_flags: int  # flags of the operands in float32

    @property
    def present(self) -> list[str]:
        """Operands that are there."""
        return [name for name in OPERANDS if name in self.strides]


def _walk_of(wanted: Combination) -> _Walk:
    rows, cols = row_count(wanted.shape), wanted.shape[-1]
    if rows >= 2**31:
        raise ArgumentError(f"x has {rows} rows; expected fewer than 2**31")
    x, layout, metas, cyclic = wanted.x, wanted.layout, wanted.given, wanted.cyclic.split()
    dtype = next((m.dtype for m in metas.values() if m.dtype != torch.float32), torch.float32)
    counts = {name: row_count(meta.shape) for name, meta in metas.items()}
    strides = {n: 0 if counts[n] == 1 else row_stride(meta.shape, meta.stride) for n, meta in metas.items()}
    each = {name: -count if name in cyclic else max(rows // count, 1) for name, count in counts.items()}
    full = layout == "plain" and not cyclic and all(counts[n] == rows and strides[n] == cols for n in metas)
    if rows == 1 or (full and wanted.quant in ("none", "tensor")):
        rows, cols = 1, rows * cols
        strides = dict.fromkeys(strides, 0)
    names: dict[str, str | Offset] = {name: name for name in OPERANDS}
    unfit, fp32_flags = cols * dtype.itemsize, 0
    for name, meta in metas.items():
        unfit |= meta.misaligned | strides[name] * meta.dtype.itemsize
        fp32_flags |= _FP32[name] * (meta.dtype == torch.float32)
    if layout == "concat":
        names["mul0"], strides["mul0"], each["mul0"] = Offset("x", cols * x.dtype.itemsize), strides["x"], 1
        unfit |= cols * x.dtype.itemsize
        fp32_flags |= _FP32["mul0"] * (x.dtype == torch.float32)
    for meta in (wanted.out, wanted.kept):
        unfit |= 0 if meta is None else meta.misaligned
    return _Walk(rows, cols, dtype, names, strides, each, unfit % 16 == 0, fp32_flags)


class _Split(NamedTuple):
    """How rows are cut into blocks."""

    three: bool  # for ``combine_three``, which has at most two operands beside x
    threads: int  # of a row
    row_blocks: int
    slices: int  # of a row
    slice_cols: int
    span: int  # columns with their padding


def _split_of(wanted: Combination, walk: _Walk, device: int) -> _Split:
    quant, size = wanted.quant, walk.dtype.itemsize
    per_thread = 16 if quant == "nvfp4" else 16 // size
    span = -(-walk.cols // 64) * 64 if wanted.swizzled else walk.cols
    padded = -(-walk.rows // 128) * 128 if wanted.swizzled else walk.rows
    three = (
        walk.aligned and len(walk.present) <= 2 and wanted.layout != "interleaved" and span < 2**30
        and (quant != "nvfp4" if size == 4 else not walk.fp32_flags)
    )  # fmt: skip
    # A thread walks through more vectors the more there are, as long as all SMs have enough to do.
    waves = padded * span / (per_thread * _WAVE_THREADS * device_info(device).sm_count)
    vectors = 1 if waves <= 1 or quant == "nvfp4" else 2 if waves <= 2 else 4 if waves <= 8 else 8
    threads = group_threads(-(-span // (per_thread * (vectors if three else 1))), _MAX_THREADS[three])
    if quant == "block128":  # what shares a scale is one vector in each of these lanes
        threads = max(threads, BLOCK // per_thread)
    groups, slice_cols = block_of(threads) // threads, threads * per_thread * (vectors if three else _PER_THREAD)
    slices = -(-span // slice_cols) if threads == _MAX_THREADS[three] and quant != "row" else 1
    return _Split(three, threads, -(-padded // groups), slices, slice_cols, span)


def _plan(wanted: Combination, device: int) -> Steps:
    walk = _walk_of(wanted)
    split = _split_of(wanted, walk, device)
    first, then = quant_flags(
        wanted.quant, wanted.out.dtype, wanted.swizzled, not wanted.scale_is_given, walk.dtype
    )  # fmt: skip
    written = "quant_scale", 0 if first is None else "amax", "factor", "out", "kept", "scale_out", "global_out"
    ending = _ACTS.index(wanted.act), float(wanted.static), float(wanted.floor), "alpha"
    launch, tensors, numbers = (_launch_of_three if split.three else _launch_of_all)(wanted, walk, split, device)
    steps = [
        Step(launch, *tensors, *written, walk.rows, walk.cols, walk.strides["x"], *numbers, mode, *ending)
        for mode in (first, then)
        if mode is not None
    ]
    return Steps(*steps, zeros={} if first is None else {"amax": 1})


def _launch_of_three(wanted: Combination, walk: _Walk, split: _Split, device: int) -> tuple[Any, list[Any], list[Any]]:
    """Return the launch of ``combine_three``, its inputs, and what it takes between x's stride and the mode."""
    present, absent = walk.present, 2 - len(walk.present)
    depth = -(-split.row_blocks // 65535)
    grid = split.slices, -(-split.row_blocks // depth), depth
    variant = DTYPE_TOKEN[walk.dtype], FORMATS[wanted.quant]
    launch = _THREE.bind(variant, device, grid, block_of(split.threads), overlap=True)
    steps_of = [value for name in present for value in _row_steps(walk.strides[name], walk.each[name])]
    steps_of += _row_steps(0, 1) * absent
    roles = [_SUBTRACTED if wanted.subtract and name == "add0" else _ROLES[name] for name in present] + [0, 0]
    flags = _SLOPE * wanted.slope | roles[0] << 8 | roles[1] << 11
    lane_bits = 31 if split.threads > 32 else split.threads.bit_length() - 1
    width = split.slice_cols if split.slices > 1 else split.span
    return launch, ["x", *(walk.names[name] for name in present), *(0,) * absent], [*steps_of, lane_bits, width, flags]


def _launch_of_all(wanted: Combination, walk: _Walk, split: _Split, device: int) -> tuple[Any, list[Any], list[Any]]:
    """Return the same for ``combine``."""
    variant = DTYPE_TOKEN[walk.dtype], FORMATS[wanted.quant], walk.aligned
    launch = _KERNEL.bind(variant, device, split.row_blocks * split.slices, block_of(split.threads), overlap=True)
    steps_of = [value for name in OPERANDS for value in (walk.strides.get(name, 0), walk.each.get(name, 1))]
    flags = walk.fp32_flags | _SLOPE * wanted.slope | _SUBTRACT * wanted.subtract
    flags |= _INTERLEAVED * (wanted.layout == "interleaved")
    numbers = [*steps_of, split.threads, split.slices, split.slice_cols, flags]
    return launch, ["x", *walk.names.values()], numbers


def _reference(wanted: Combination) -> None:
    x, up, kept = wanted.x, wanted.mul0, wanted.kept
    gate = x
    if wanted.layout == "concat":
        gate, up = x.chunk(2, -1)
    elif wanted.layout == "interleaved":
        gate, up = x[..., 0::2], x[..., 1::2]
    shape = gate.shape
    rows, cols = row_count(shape), shape[-1]

    def over(name: str) -> Tensor:
        t = up if name == "mul0" else getattr(wanted, name)
        t = t.float().reshape(row_count(t.shape), cols)
        if t.shape[0] in (1, rows):
            return t
        if name in wanted.cyclic.split():
            return t.repeat(-(-rows // t.shape[0]), 1)[:rows]
        return t.repeat_interleave(rows // t.shape[0], 0)

    y = gate.float().reshape(rows, cols)
    if wanted.add0 is not None:
        y = y - over("add0") if wanted.subtract else y + over("add0")
    if wanted.add1 is not None:
        y = y + over("add1")
    y = value_and_slope(wanted.act, y)[int(wanted.slope)]
    if up is not None:
        y = y * partner_and_slope(wanted.act, over("mul0"))[0]
    if wanted.mul1 is not None:
        y = y * over("mul1")
    times = constant(wanted.alpha, torch.float32, x.device)
    y = y * (times if wanted.factor is None else times * wanted.factor.reshape(()))
    for name in ("base0", "base1"):
        if getattr(wanted, name) is not None:
            y = y + over(name)
    y = y.reshape(shape)
    if kept is not None:
        kept.copy_(y)
    memory = wanted.out, wanted.quant_scale, wanted.scale_out, wanted.global_out
    quantize_reference(y, wanted.quant, *memory, wanted.swizzled, wanted.static, wanted.floor)


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
