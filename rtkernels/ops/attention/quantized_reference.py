"""Quantised attention in plain torch: codes, and the attention of what codes stand for; fp32."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.attention import reference
from rtkernels.ops.shared.block_formats import decode_e8m0, divided

_BLOCK = 64


def _coded(x: Tensor, amax: Tensor, e4m3: bool) -> tuple[Tensor, Tensor]:
    """Return codes and scales of x; amax broadcasts to it."""
    scale = torch.where(amax == 0, torch.ones_like(amax), divided(amax, 448.0 if e4m3 else 127.0))
    scale = scale.masked_fill(~amax.isfinite(), float("nan"))
    values = x * (1.0 / scale)
    if e4m3:
        return values.clamp(-448.0, 448.0).to(torch.float8_e4m3fn), scale
    return values.nan_to_num(0.0).round().clamp(-127, 127).to(torch.int8), scale


def _rows(x: Tensor, e4m3: bool, blocks: bool) -> tuple[Tensor, Tensor]:
    """Return codes of x [batch, rows, heads, width] and scales [batch, heads, rows or blocks]."""
    amax = x.abs().amax(-1).transpose(1, 2)
    rows = amax.shape[-1]
    if blocks:
        short = -rows % _BLOCK
        amax = torch.nn.functional.pad(amax, (0, short)).unflatten(-1, (-1, _BLOCK)).amax(-1)
        every = amax.repeat_interleave(_BLOCK, -1)[..., :rows]
    else:
        every = amax
    codes, _ = _coded(x, every.transpose(1, 2).unsqueeze(-1), e4m3)
    return codes.contiguous(), _coded(amax, amax, e4m3)[1].contiguous()


def quantize_qk(q: Tensor, k: Tensor, e4m3: bool, blocks: bool, smooth: bool, scale: float) -> tuple[Tensor, ...]:
    """Return codes and scales of q and k, and what smoothing takes from scores."""
    q, k = q.float(), k.float()
    taken = torch.zeros(q.shape[0], q.shape[2], q.shape[1], dtype=torch.float32, device=q.device)
    if smooth and k.shape[1]:
        mean = k.mean(1, keepdim=True)
        k = k - mean
        mean = mean.repeat_interleave(q.shape[2] // k.shape[2], 2)
        taken = (scale * (q * mean).sum(-1)).transpose(1, 2).contiguous()
    return *_rows(q, e4m3, blocks), *_rows(k, e4m3, blocks), taken


def quantize_v(v: Tensor, e4m3: bool) -> tuple[Tensor, Tensor]:
    """Return transposed codes of v [batch, keys, heads, width], and scales."""
    rows = v.shape[1]
    x = torch.nn.functional.pad(v.float().permute(0, 2, 3, 1), (0, -rows % _BLOCK))  # batch, heads, width, keys
    x = x.unflatten(-1, (-1, _BLOCK))
    codes, scale = _coded(x, x.abs().amax(-1, keepdim=True), e4m3)
    padded = -(-rows // 16) * 16
    return codes.flatten(-2)[..., :padded].contiguous(), scale.squeeze(-1).transpose(-1, -2).contiguous()


def _spread(scale: Tensor, block: int, rows: int) -> Tensor:
    """Return scales [..., rows or blocks] for each row."""
    return scale.repeat_interleave(block, -1)[..., :rows]


def forward(
    q, k, v, scale_q, scale_k, scale_v, lengths, cu_q, cu_k, scale, left, right, block_q, block_k, max_q, max_k, half
):  # fmt: skip
    """Return out and lse."""
    by_row = (1, 0) if cu_q is not None else (0, 2, 1)
    given = []
    for codes, scales, block in ((q, scale_q, block_q), (k, scale_k, block_k)):
        if scales.dtype == torch.uint8:  # e8m0, for 32 columns each
            each = decode_e8m0(scales).repeat_interleave(32, -1)
            given.append(codes.float() * (each.transpose(0, 1) if cu_q is not None else each.transpose(1, 2)))
            continue
        given.append(codes.float() * _spread(scales, block, codes.shape[-3]).permute(by_row).unsqueeze(-1))
    dtype = v.dtype
    if v.dtype in (torch.int8, torch.float8_e4m3fn):
        dtype, keys = torch.float16 if half else torch.bfloat16, k.shape[1]
        every = scale_v.unsqueeze(2) if scale_v.dim() == 3 else scale_v
        every = every.repeat_interleave(_BLOCK if scale_v.dim() == 4 else max(keys, 1), 2)[:, :, :keys]
        v = v.float()[..., :keys].transpose(-1, -2) * every  # batch, heads, keys, width
        v = v.transpose(1, 2)
    out, lse = reference.forward(
        *given, v.float(), None, None, lengths, None, cu_q, cu_k, scale, left, right, 0.0, max_q, max_k
    )
    return out.to(dtype), lse
