"""Largest magnitudes of columns: calibration of quantisers."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_dimensions, check_shape, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import FLOAT_DTYPES, TYPES, reads_evict_first, vector_bytes
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Dense, Meta, Operator, Rows, dense_as
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

_BLOCKS_PER_SM = 4
_WARPS = 8
_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn, torch.float8_e5m2)
_RESULTS = {None: "AbsMax", torch.float8_e4m3fn: "ScaleE4m3", torch.float8_e5m2: "ScaleE5m2"}

_PARTIAL = Kernel(
    "quant/column_absmax.cu", "column_absmax", template="T", max_registers=128,
    args="x:ptr row_factor:ptr column_factor:ptr partial:ptr rows:i64 cols:i64 x_stride:i64 rows_per_block:i64 "
    "column_tiles:i64 aligned16:i64 evict_first:i64",
    variants=TYPES,
)  # fmt: skip
_FINISH = Kernel(
    "quant/column_absmax.cu", "column_max", template="Result", max_registers=40,
    args="partial:ptr out:ptr rows:i64 cols:i64 pow2:i64", variants=[(name,) for name in _RESULTS.values()],
)  # fmt: skip

# ---- plans ----------------------------------------------------------------------------------------------------------


def check_factor(name: str, factor: Meta | None, size: int, what: str) -> None:
    """Raise an ArgumentError unless an optional factor is fp32 of one dimension of `size`."""
    if factor is None:
        return
    token(name, factor.dtype, (torch.float32,))
    check_shape(name, factor.shape, (size,), f"one per {what} of x")


def _check(x: Meta, row_factor: Meta | None, column_factor: Meta | None) -> None:
    check_dimensions("x", x.shape)
    check_factor("row_factor", row_factor, x.rows, "row")
    check_factor("column_factor", column_factor, x.shape[-1], "column")


def column_steps(
    x: Meta, device: int, names: tuple[str, str, str, str], codes: torch.dtype | None = None, pow2: bool = False,
    partial: str = "partial",
) -> tuple[list[Step], dict[str, Memory]]:  # fmt: skip
    """Return what computes the fp8 scales of the columns for `codes`, or their largest magnitudes, and its scratch.

    Args:
        x: Rows, not of fp8 numbers.
        device: CUDA ordinal, or -1.
        names: Of x, the factors of rows and of columns (both dense), and the result.
        codes: The fp8 dtype.
        pow2: Scales are powers of two.
        partial: Name of the scratch.
    """
    rows, cols, stride, size = x.rows, x.shape[-1], x.row_stride, x.dtype.itemsize
    aligned16 = vector_bytes(x.misaligned, cols * size, stride * size) == 16
    tiles = -(-cols // (32 * (16 // size if aligned16 else 1)))
    splits = max(1, min(_BLOCKS_PER_SM * device_info(device).sm_count // tiles, -(-rows // (8 * _WARPS))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    launch = _PARTIAL.bind((x.token,), device, tiles * splits, 32 * _WARPS)
    # With codes, the quantisation reads x a second time.
    evict_first = codes is None and reads_evict_first(rows * cols * size)
    single = splits == 1 and codes is None  # the only row of `partial` is the result
    destination = names[3] if single else partial
    first = Step(launch, *names[:3], destination, rows, cols, stride, each, tiles, aligned16, evict_first)
    if single:
        return [first], {}
    scratch = {partial: Memory((splits, cols), torch.float32)}
    return [first, max_step(partial, names[3], splits, cols, device, codes, pow2)], scratch


def max_step(
    partial: str, out: str, rows: int, cols: int, device: int, codes: torch.dtype | None = None, pow2: bool = False
) -> Step:
    """Return the launch for the largest numbers of the columns of a dense fp32 matrix of magnitudes."""
    launch = _FINISH.bind((_RESULTS[codes],), device, -(-cols // 32), 32 * _WARPS, overlap=True)
    return Step(launch, partial, out, rows, cols, int(pow2))


def _plan(x: Meta, device: int) -> Steps:
    converted = None
    if x.dtype.itemsize == 1:
        x, converted = dense_as(x, torch.bfloat16), {"x": torch.bfloat16}  # exact
    steps, scratch = column_steps(x, device, ("x", "row_factor", "column_factor", "amax"))
    return Steps(*steps, scratch=scratch, converted=converted)


def reference(x: Tensor, row_factor: Tensor | None, column_factor: Tensor | None) -> Tensor:  # fmt: skip
    """Return the largest finite magnitudes in plain torch."""
    if x.numel() == 0:
        return torch.zeros(x.shape[-1], dtype=torch.float32, device=x.device)
    z = x.float().reshape(-1, x.shape[-1])
    if column_factor is not None:
        z = z * column_factor
    if row_factor is not None:
        z = z * row_factor[:, None]
    return torch.where(z.isfinite(), z.abs(), 0.0).amax(0)


_FACTORS = Dense("row_factor", None, optional=True), Dense("column_factor", None, optional=True)
ABSMAX = Operator(
    "column_absmax", (Rows("x", _DTYPES), *_FACTORS), results="amax",
    outputs=lambda x: (Memory(x.shape[-1:], torch.float32),), plan=_plan, reference=reference, check=_check,
)  # fmt: skip


@public
def column_absmax(
    x: Tensor, *, row_factor: Tensor | None = None, column_factor: Tensor | None = None, floor: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return the largest finite magnitude of each column of ``x * column_factor * row_factor``.

    NaN and infinities are ignored, as in :func:`quantize_fp8`; a column without a finite value gives 0. For fp8 codes,
    pass their scales as factors. Not differentiable.

    Args:
        x: ``[..., n]``, at least one dimension; bfloat16, float16 or float32, or float8_e4m3fn or float8_e5m2 (which
            are converted first). Any strides (copied unless rows are unit-stride and evenly spaced). Any object with
            ``__dlpack__`` is accepted; results are then of the same kind.
        row_factor: float32, one per row (leading dimensions flattened), or None.
        column_factor: float32 ``[n]``, or None.
        floor: Lower limit of the results.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        ``[n]``, float32.
    """
    amax = ABSMAX.call(*detached(x, row_factor, column_factor))
    return amax.clamp_(min=floor) if check_number("floor", floor) > 0 else amax


OP = Op("column_absmax", public=("column_absmax",), kernels=(_PARTIAL, _FINISH), torch_ops=(ABSMAX,))
