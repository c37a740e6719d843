"""fp8 codes and scales of a tensor, and back."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant import groups
from rtkernels.ops.quant.quantize_fp8_channel import CHANNEL
from rtkernels.ops.quant.quantize_fp8_kernels import KERNELS
from rtkernels.ops.quant.quantize_fp8_operators import BOTH, DEQUANTIZE, QUANTIZE, STATIC
from rtkernels.ops.shared.fp8_layout import groups_of
from rtkernels.runtime.call.public import public
from rtkernels.runtime.invariance import level, refuse
from rtkernels.runtime.operator.arguments import Among
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.registry import Op


class QuantizedBoth(NamedTuple):
    """Codes and scales of a matrix ``[m, n]``, and of its transposed.

    Attributes:
        q: Of x's shape.
        scale: Of q, as quantize_fp8 gives it for its granularity.
        q_t: ``[n, m]``.
        scale_t: Of q_t. Granularity "group": one per 128 rows of x, ``[ceil(m/128), n]``, as "group_t" gives it.
            Granularity "block": a transposed view of `scale`; ``q_t.t()`` is q. Of quantize_fp8_hadamard: ``[n]``, and
            q_t is ``[n, p]`` with p as described there.
    """

    q: Tensor
    scale: Tensor
    q_t: Tensor
    scale_t: Tensor


@public(options={"layout": Among(("row", "both"), "'row' or 'both'")})
def quantize_fp8(
    x: Tensor, scale: Tensor | float | None = None, *, granularity: str = "tensor",
    dtype: torch.dtype = torch.float8_e4m3fn, pow2_scale: bool = False, scale_layout: str = "row",
    layout: str = "row", with_transposed: bool = False, group_size: int = 128,
    out: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor] | QuantizedBoth:  # fmt: skip
    """Quantise a tensor to fp8 codes and scales.

    For each set of values that share a scale: ``scale = max(amax / fp8_max, 1e-30)`` with ``fp8_max`` 448 (e4m3) or
    57344 (e5m2), and ``q = fp8(x * (1 / scale))``; ``x ≈ q * scale``. Computed in fp32, rounded to nearest even and
    clamped to ±fp8_max. ``amax`` is the largest *finite* magnitude: NaN becomes the code 0x7f and ±infinity ±fp8_max,
    and neither affects the scale. Sets of zeros have scale 1e-30 and codes 0.

    ``[m, n]`` is the shape of x with leading dimensions flattened:

    ============  ======================  ==========================  =========================================
    granularity   values per scale        shape of q                  shape of the scale (float32)
    ============  ======================  ==========================  =========================================
    ``tensor``    all                     x's                         ``[]``
    ``row``       one row                 x's                         x's without the last dimension
    ``group``     128 of a row            x's                         x's with ``ceil(n/128)`` as last dimension;
                                                                      ``[ceil(n/128), m]`` for layout "column"
    ``group_t``   128 of a column         ``[n, m]``, transposed      ``[ceil(m/128), n]``
    ``block``     128 x 128               x's                         ``[ceil(m/128), ceil(n/128)]``
    ``channel``   one column              ``[n, m]``, transposed      ``[n]``
    ============  ======================  ==========================  =========================================

    Not differentiable: the results never require grad.

    Args:
        x: At least one dimension, bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and
            evenly spaced). Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        scale: For granularity "tensor": the scale to use, one float32 element on x's device (never read by the host),
            or a number, which costs a launch to copy it there. It is used unchanged; 0 and non-finite values give
            ``x * (1 / scale)`` as computed in fp32. Default: computed from x.
        granularity: Which values share a scale, see above. The last group of a row or column may be shorter.
        dtype: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        pow2_scale: Round computed scales up to a power of two.
        scale_layout: "row" or "column", for granularity "group".
        layout: "row", or "both" for granularities "group" and "block": quantise along columns too, from the same read
            of x. (Along columns alone is granularity "group_t".)
        with_transposed: Alias for ``layout="both"``.
        group_size: A different number of values instead of 128, for granularities "group" and "block" (squared): a
            divisor of n, for "block" also of m. Only with layout and scale_layout "row".
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        ``(q, scale)``, both contiguous; with layout "both" a :class:`QuantizedBoth`.
    """
    if group_size != 128:
        plain = scale is None and layout == "row" and not with_transposed
        one = functools.partial(quantize_fp8, granularity="row", dtype=dtype, pow2_scale=pow2_scale)
        return groups.quantize(one, x, granularity, group_size, scale_layout, plain)
    with_transposed = with_transposed or layout == "both"
    (x,) = detached(x)
    if isinstance(scale, float | int) and not isinstance(scale, bool):
        scale = torch.full((), scale, dtype=torch.float32, device=x.device)
    if scale is None:
        if level() and granularity not in ("row", "group"):
            refuse(
                f"quantize_fp8 with granularity {granularity!r}",
                "a scale covers several rows (quantise weights before, or with fp8_weight)",
            )
        if granularity == "channel":
            if scale_layout != "row" or with_transposed:
                raise ArgumentError("granularity 'channel' requires scale_layout 'row' and layout 'row'")
            return CHANNEL.call(x, None, None, dtype, pow2_scale, 1)
        if not with_transposed:
            return QUANTIZE.call(x, granularity, dtype, pow2_scale, scale_layout)
        q, scale, q_t, scale_t = BOTH.call(x, granularity, dtype, pow2_scale, scale_layout)
        return QuantizedBoth(q, scale, q_t, scale.t() if granularity == "block" else scale_t)
    if granularity != "tensor":
        raise ArgumentError(f"scale can be given for granularity 'tensor' only, not for {granularity!r}")
    if with_transposed:
        raise ArgumentError("layout 'both' requires computed scales of granularity 'group' or 'block'")
    if pow2_scale:
        raise ArgumentError("pow2_scale rounds computed scales; a given scale is used unchanged")
    if isinstance(scale, Tensor) and scale.requires_grad:
        scale = scale.detach()
    return STATIC.call(x, scale, dtype), scale


@public(tensors="scale")
def dequantize_fp8(
    q: Tensor, scale: Tensor, *, granularity: str = "tensor", dtype: torch.dtype = torch.bfloat16,
    scale_layout: str = "row", code_dtype: torch.dtype | None = None, group_size: int = 128,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Undo :func:`quantize_fp8`: return ``q * scale``.

    One fp32 product per element, rounded once. Not differentiable.

    Args:
        q: Codes, float8_e4m3fn or float8_e5m2; any strides. ``[n, m]`` for granularities "group_t" and "channel". Any
            object with ``__dlpack__`` is accepted; results are then of the same kind.
        scale: float32, with the shape that quantize_fp8 returns for `granularity` and `scale_layout`.
        granularity: As given to quantize_fp8.
        dtype: bfloat16, float16 or float32.
        scale_layout: As given to quantize_fp8.
        code_dtype: The fp8 dtype of codes given as uint8, as NumPy without ml_dtypes does.
        group_size: As given to quantize_fp8.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor of q's shape; ``[m, n]`` for granularities "group_t" and "channel".
    """
    if group_size != 128:
        one = functools.partial(dequantize_fp8, granularity="row", dtype=dtype, code_dtype=code_dtype)
        return groups.dequantize(one, q, scale, granularity, group_size, scale_layout)
    q, scale = detached(q, scale)
    if granularity == "channel" and scale_layout == "row" and q.dim() == 2:
        if scale.shape != q.shape[:1]:
            raise ArgumentError(
                f"scale has shape {tuple(scale.shape)}; expected {tuple(q.shape[:1])} for granularity 'channel' "
                f"and q of shape {tuple(q.shape)}"
            )
        # One scale per 128 rows of a column, all the same.
        scale, granularity = scale.expand(groups_of(q.shape[1]), q.shape[0]).contiguous(), "group_t"
    return DEQUANTIZE.call(q, scale, granularity, code_dtype or q.dtype, dtype, scale_layout)


OP = Op(
    "quantize_fp8", public=("quantize_fp8", "dequantize_fp8"), kernels=KERNELS,
    torch_ops=(QUANTIZE, BOTH, STATIC, DEQUANTIZE), uses=("smooth_quant", "column_absmax", "transpose"),
)  # fmt: skip
