"""fp8 of a flat piece of a weight, as sharded optimizers hold it."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.quant.quantize_fp8 import quantize_fp8
from rtkernels.ops.quant.reference import to_pow2
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES
from rtkernels.runtime.call.public import public
from rtkernels.runtime.checks import check_same, check_tensor, token
from rtkernels.runtime.operator.aliasing import refuse_shared
from rtkernels.runtime.operator.arguments import check_integer


@public(no_gradients="scale")
def quantize_fp8_shard_(
    q: Tensor, scale: Tensor, shard: Tensor, offset: int, smooth: Tensor | None = None, *,
    edge_scales: Tensor | None = None, divide: bool = False, pow2_scale: bool = False,
    store_first_scale: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Quantise a flat shard of a matrix into its position in the codes, with one scale per row.

    Rows that are completely in the shard are quantised as by :func:`quantize_fp8_smooth` (granularity "row"). The first
    and last row may be incomplete: their scales are given by `edge_scales`, and their codes saturate. Their scales are
    stored like those of other rows, so two shards that share a row store the same number. Not differentiable.

    Args:
        q: ``[m, n]`` contiguous, float8_e4m3fn or float8_e5m2; the shard's codes are overwritten.
        scale: ``[m]`` contiguous float32; the scales of the shard's rows are overwritten. Neither scale nor q may
            overlap another argument.
        shard: One dimension, bfloat16, float16 or float32: the elements of the flattened matrix from `offset` on.
        offset: Index of the shard's first element in the flattened matrix; the shard must end inside the matrix.
        smooth: Factors of the columns, float32 ``[n]``, or None.
        edge_scales: float32 ``[2]`` on the same device: the scales of the rows of the shard's first and last element.
            Needed if one of these rows is incomplete.
        divide: Multiply by ``1 / smooth`` (rounded to float32) instead.
        pow2_scale: Round computed scales, and those of `edge_scales`, up to a power of two.
        store_first_scale: False: do not store the scale of the shard's first row if the row begins in an earlier shard.
            Every scale is then stored by one shard only.

    Returns:
        ``(q, scale)``, as given.
    """
    from rtkernels.ops.quant.smooth_quant import quantize_fp8_smooth

    _check(q, scale, shard, offset, smooth, edge_scales)
    shard = shard.detach()
    if smooth is not None:
        smooth = smooth.detach().reciprocal() if divide else smooth.detach()
    cols, end = q.shape[1], offset + shard.numel()
    first, last = -(-offset // cols), end // cols  # whole rows
    flat = q.view(-1)
    if pow2_scale and edge_scales is not None:
        edge_scales = torch.where(edge_scales.isnan(), edge_scales, to_pow2(edge_scales))

    def edge(begin: int, stop: int, which: int) -> None:
        """Quantise elements of one row that is not whole."""
        row, part = begin // cols, shard[begin - offset : stop - offset].float()
        if smooth is not None:
            part = part * smooth[begin - row * cols : stop - row * cols]
        codes, _ = quantize_fp8(part, edge_scales[which], dtype=q.dtype)
        flat[begin:stop] = codes
        if store_first_scale or begin == row * cols:
            scale[row] = edge_scales[which]

    if first > last:  # inside one row
        edge(offset, end, 0)
        return q, scale
    if offset < first * cols:
        edge(offset, first * cols, 0)
    if first < last:
        whole = shard[first * cols - offset : last * cols - offset].view(last - first, cols)
        if smooth is None:
            codes, scales = quantize_fp8(whole, granularity="row", dtype=q.dtype, pow2_scale=pow2_scale)
        else:
            codes, scales, _ = quantize_fp8_smooth(whole, smooth, dtype=q.dtype, pow2_scale=pow2_scale)
        flat[first * cols : last * cols] = codes.view(-1)
        scale[first:last] = scales
    if last * cols < end:
        edge(last * cols, end, 1)
    return q, scale


def _check(
    q: Tensor, scale: Tensor, shard: Tensor, offset: int, smooth: Tensor | None, edge_scales: Tensor | None
) -> None:
    check_integer("offset", offset)
    for name, t in (("q", q), ("scale", scale), ("shard", shard)):
        check_tensor(name, t)
    token("q", q.dtype, FP8_DTYPES)
    token("scale", scale.dtype, (torch.float32,))
    token("shard", shard.dtype)
    if q.dim() != 2 or not q.is_contiguous() or not scale.is_contiguous():
        raise ArgumentError(f"q has shape {tuple(q.shape)}; expected two dimensions, q and scale dense")
    check_same("scale", scale.shape, q.shape[:1], "shape", of="the rows of q")
    if shard.dim() != 1 or offset < 0 or offset + shard.numel() > q.numel():
        raise ArgumentError(
            f"shard has shape {tuple(shard.shape)} and offset {offset}; expected one dimension, inside the {q.numel()} "
            f"elements of q"
        )
    whole = q.shape[1] == 0 or (offset % q.shape[1] == 0 and shard.numel() % q.shape[1] == 0)
    if not whole and (edge_scales is None or edge_scales.shape != (2,) or edge_scales.dtype != torch.float32):
        raise ArgumentError(
            "edge_scales: expected float32 [2], the scales of the first and last row, which are incomplete"
        )
    for name, tensor in (("scale", scale), ("shard", shard), ("smooth", smooth), ("edge_scales", edge_scales)):
        if tensor is not None:
            check_same(name, tensor.get_device(), q.get_device(), "device index", of="q")
    if smooth is not None:
        check_same("smooth", smooth.shape, q.shape[1:], "shape", of="the columns of q")
    read = (("shard", shard), ("smooth", smooth), ("edge_scales", edge_scales))
    refuse_shared("q", q, (("scale", scale), *read))
    refuse_shared("scale", scale, read)
