"""fp8 quantisation in plain torch, bit for bit what the kernels give."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.ops.quant.quantize_fp8_plan import check_quantize, empty_scale, q_shape, scale_shape
from rtkernels.ops.shared.block_formats import divided
from rtkernels.ops.shared.fp8_layout import GROUP
from rtkernels.runtime.layout import nothing, row_count

_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_NAN_CODE = 0x7F


def codes(v: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes of ``v * inverse``: nearest even, saturating, NaN without sign (a plain cast has neither)."""
    scaled = v * inverse
    bits = scaled.clamp(-_LARGEST[dtype], _LARGEST[dtype]).to(dtype).view(torch.uint8)
    return bits.masked_fill(scaled.isnan(), _NAN_CODE).view(dtype)


def scale_of(amax: Tensor, dtype: torch.dtype, pow2: bool) -> Tensor:
    """Return the scales of sets with these largest finite magnitudes."""
    scale = divided(amax, _LARGEST[dtype]).clamp(min=1e-30)
    return to_pow2(scale) if pow2 else scale


def to_pow2(t: Tensor) -> Tensor:
    """Return float32 numbers rounded up to powers of two; infinities stay, and NaN does not."""
    return ((t.view(torch.int32) + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)


def blocked(v: Tensor, down: int, across: int) -> Tensor:
    """Return a matrix padded with zeros as ``[row blocks, down, column blocks, across]``."""
    rows, cols = v.shape
    padded = F.pad(v, (0, -cols % across, 0, -rows % down))
    return padded.view(padded.shape[0] // down, down, padded.shape[1] // across, across)


def spread(scale: Tensor, down: int, across: int, shape: torch.Size) -> Tensor:
    """Return the scale of every element of a matrix of `shape` from those of its blocks."""
    whole = scale.repeat_interleave(down, 0).repeat_interleave(across, 1)
    return whole[: shape[0], : shape[1]]


def block_of(granularity: str, rows: int, cols: int) -> tuple[int, int]:
    """Return the rows and columns that share a scale; the matrix is the transposed one for "group_t"."""
    return {
        "tensor": (rows, cols),
        "row": (1, cols),
        "group": (1, GROUP),
        "group_t": (1, GROUP),
        "block": (GROUP, GROUP),
    }[granularity]


def transposed_scale(granularity: str, layout: str) -> bool:
    """Return True if scales are stored the other way round than the codes they belong to."""
    return granularity == "group_t" or layout == "column"


def quantize(x: Tensor, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str):
    """Return ``(q, scale)``."""
    check_quantize(x, dtype, granularity, scale_layout)
    shapes = q_shape(x.shape, granularity), scale_shape(x.shape, granularity, scale_layout)
    if x.numel() == 0:
        q = torch.empty(shapes[0], dtype=dtype, device=x.device)
        return q, torch.full(shapes[1], empty_scale(pow2_scale), dtype=torch.float32, device=x.device)
    v = x.float().reshape(-1, x.shape[-1])
    if granularity == "group_t":
        v = v.t()
    block = block_of(granularity, *v.shape)
    finite = torch.where(v.isfinite(), v.abs(), 0.0)
    scale = scale_of(blocked(finite, *block).amax((1, 3)), dtype, pow2_scale)
    q = codes(v, spread(1.0 / scale, *block, v.shape), dtype)
    if transposed_scale(granularity, scale_layout):
        scale = scale.t()
    return q.reshape(shapes[0]).contiguous(), scale.reshape(shapes[1]).contiguous()


def both(x: Tensor, granularity: str, dtype: torch.dtype, pow2_scale: bool, scale_layout: str):
    """Return ``(q, scale, q_t, scale_t)``; for "block", scale_t is no tensor of its own."""
    q, scale = quantize(x, granularity, dtype, pow2_scale, scale_layout)
    if granularity == "block":
        return q, scale, q.reshape(row_count(x.shape), x.shape[-1]).t().contiguous(), nothing(x)
    return q, scale, *quantize(x, "group_t", dtype, pow2_scale, "row")


def static(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the codes for a given scale."""
    return codes(x.float(), 1.0 / scale.reshape(()), dtype).contiguous()


def dequantize(
    q: Tensor, scale: Tensor, granularity: str, code_dtype: torch.dtype, dtype: torch.dtype, scale_layout: str
) -> Tensor:
    """Return ``q * scale``."""
    shape = q.shape[::-1] if granularity == "group_t" else q.shape
    if q.numel() == 0:
        return torch.empty(shape, dtype=dtype, device=q.device)
    v = q.view(code_dtype).float().reshape(-1, q.shape[-1])
    down, across = block_of(granularity, *v.shape)
    blocks = -(-v.shape[0] // down), -(-v.shape[1] // across)
    if transposed_scale(granularity, scale_layout):
        scale = scale.t()
    y = (v * spread(scale.reshape(blocks), down, across, v.shape)).to(dtype)
    return (y.t() if granularity == "group_t" else y.reshape(shape)).contiguous()
