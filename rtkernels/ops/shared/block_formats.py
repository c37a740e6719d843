"""Block formats in plain torch: e2m1 codes, two in a byte, with scales of 16 (NVFP4) or 32 elements (MX).

What ``common/block_formats.cuh`` does on a device, with the same bits. NaN and infinities take no part in a scale; both
become the largest code of their sign, for neither format of four bits has them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.constants import constant

E2M1_MAX = 6.0
E4M3_MAX = 448.0
SCALE_RULES = ("rne", "ceil", "mse")
ELEMENT_RULES = ("rne", "away", "zero")
MSE_FACTORS = (0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.125, 1.25, 1.5)
_TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
_MX = {torch.float8_e4m3fn: (8, 448.0), torch.float8_e5m2: (15, 57344.0), torch.uint8: (2, 6.0)}  # uint8: e2m1


def divided(x: Tensor, number: float) -> Tensor:
    """Return ``x / number``, rounded once on every device: CUDA multiplies by the rounded inverse of a number."""
    return x / torch.full((), number, dtype=x.dtype, device=x.device)


def finite(x: Tensor) -> Tensor:
    """Return magnitudes, 0 for what is not finite."""
    return torch.where(x.isfinite(), x, 0.0).abs()


def encode_e2m1(x: Tensor, rule: str = "rne") -> Tensor:
    """Return the code, 0 to 15, of each value; ties to even codes, away from zero or towards it."""
    magnitude = torch.where(x.isnan(), E2M1_MAX, x.abs())
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, tie in enumerate(_TIES):
        up = rule == "away" or (rule == "rne" and lower % 2 == 1)
        code += (magnitude >= tie) if up else (magnitude > tie)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def pack(codes: Tensor) -> Tensor:
    """Return codes ``[..., k]``, two in a byte, the first in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def e2m1_values(codes: Tensor) -> Tensor:
    """Return what codes, 0 to 15, stand for, in float32."""
    codes = codes.int()
    exponent, half = (codes >> 1) & 3, codes & 1
    # The bits of (1 + half / 2) * 2^(exponent - 1); exponent 0 has 0 and 1/2.
    bits = torch.where(exponent > 0, (exponent + 126) << 23 | half << 22, half * (126 << 23))
    return bits.view(torch.float32) * (1 - 2 * (codes >> 3))


def decode_e2m1(packed: Tensor) -> Tensor:
    """Return the values of bytes ``[..., k/2]`` in float32 ``[..., k]``."""
    bits = packed.view(torch.uint8)
    return e2m1_values(torch.stack((bits & 15, bits >> 4), -1).flatten(-2))


def decode_e4m3(scale: Tensor) -> Tensor:
    """Return what the bytes of e4m3 scales stand for; the sign is not looked at."""
    return (scale.view(torch.uint8) & 0x7F).view(torch.float8_e4m3fn).float()


def e4m3_bytes(x: Tensor, rule: str) -> Tensor:
    """Return magnitudes as e4m3: to nearest, or up; at most 448."""
    nearest = x.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    if rule != "ceil":
        return nearest.view(torch.uint8)
    code = nearest.view(torch.uint8)
    return torch.where((nearest.float() < x) & (code < 0x7E), code + 1, code)


def _blocks(x: Tensor, size: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % size)).unflatten(-1, (-1, size))


def encode_nvfp4(x: Tensor, g: Tensor, scale_rule: str, elem_rule: str) -> tuple[Tensor, Tensor]:
    """Return packed codes ``[..., k/2]`` and e4m3 scales ``[..., ceil(k/16)]`` of float32 values.

    ``scale = e4m3(amax / max(6 g, 1e-12))``; codes are those of ``x / (g scale)``, 0 for a scale of 0.
    """
    blocks = _blocks(x, 16)
    sixth = finite(blocks).amax(-1) / (E2M1_MAX * g).clamp_min(1e-12)
    if scale_rule == "mse":
        chosen, error = None, None
        for factor in MSE_FACTORS:
            scale = e4m3_bytes(sixth * factor, "rne")
            step = (g * decode_e4m3(scale)).unsqueeze(-1)
            codes = _codes(blocks, step, elem_rule)
            # Fused, and one after the other, as a thread adds them up.
            off = blocks.double() - decode_e2m1(pack(codes)).double() * step.double()
            off = torch.where(blocks.isfinite(), off.float(), 0.0).double()
            squares = torch.zeros_like(sixth)
            for i in range(16):
                squares = torch.addcmul(squares.double(), off[..., i], off[..., i]).float()
            if chosen is None:
                chosen, error = scale, squares
            else:
                chosen = torch.where(squares < error, scale, chosen)
                error = torch.minimum(squares, error)
        scale = chosen
    else:
        scale = e4m3_bytes(sixth, scale_rule)
    codes = _codes(blocks, (g * decode_e4m3(scale)).unsqueeze(-1), elem_rule)
    return pack(codes.flatten(-2)[..., : x.shape[-1]]), scale.view(torch.float8_e4m3fn)


def _codes(blocks: Tensor, step: Tensor, rule: str) -> Tensor:
    return torch.where(step > 0, encode_e2m1(blocks / torch.where(step > 0, step, 1.0), rule), 0).to(torch.uint8)


# ---- MX -------------------------------------------------------------------------------------------------------------


def encode_mx(x: Tensor, dtype: torch.dtype, rule: str) -> tuple[Tensor, Tensor]:
    """Return codes (float8 ``[..., k]``, or uint8 ``[..., k/2]`` of e2m1) and e8m0 scales ``[..., ceil(k/32)]``."""
    exponent, largest = _MX[dtype]
    blocks = _blocks(x, 32)
    amax = finite(blocks).amax(-1)
    if rule == "ocp":
        byte = ((amax.view(torch.int32) >> 23) - exponent).clamp(0, 254)
    else:
        bits = divided(amax, largest).view(torch.int32)
        byte, mantissa = bits >> 23, bits & 0x7FFFFF
        byte = (byte + torch.where(byte > 0, mantissa > 0, mantissa > 0x400000).int()).clamp(0, 254)
    values = torch.ldexp(blocks.double(), (127 - byte).unsqueeze(-1)).float().flatten(-2)[..., : x.shape[-1]]
    if dtype == torch.uint8:
        codes = pack(encode_e2m1(values))
    else:
        codes = values.clamp(-largest, largest).to(dtype)
        codes = torch.where(values.isnan(), constant(0x7F, torch.uint8, x.device), codes.view(torch.uint8))
        codes = codes.view(dtype)
    return codes, byte.to(torch.uint8).view(torch.float8_e8m0fnu)


def decode_e8m0(scale: Tensor) -> Tensor:
    """Return ``2 ** (byte - 127)``, NaN for 255."""
    byte = scale.view(torch.uint8).int()
    bits = torch.where(byte == 0, 0x400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.int().view(torch.float32)


# ---- scales in blocks of 128 x 4 ------------------------------------------------------------------------------------


def swizzled_bytes(rows: int, blocks: int) -> int:
    """Return how many bytes scales ``[rows, blocks]`` take in blocks of 128 x 4."""
    return -(-rows // 128) * -(-blocks // 4) * 512


def swizzle(scales: Tensor) -> Tensor:
    """Return one-byte scales ``[rows, blocks]`` in blocks of 128 x 4, zeros beyond the last row and column.

    The byte of row r and column c lies ``(r % 32) * 16 + r % 128 // 32 * 4 + c % 4`` behind the first of its block of
    512; blocks along a row follow each other.
    """
    rows, columns = scales.shape
    down, across = -(-rows // 128), -(-columns // 4)
    new = torch.empty if rows % 128 == 0 and columns % 4 == 0 else torch.zeros
    result = new(down, across, 32, 4, 4, dtype=torch.uint8, device=scales.device)
    by_rows, source = result.permute(0, 3, 2, 1, 4), scales.view(torch.uint8)
    if columns % 4 == 0 and (rows % 128 == 0 or (rows < 128 and rows % 32 == 0)):
        by_rows = by_rows[:, : rows // 32]
        by_rows.copy_(source.reshape(by_rows.shape))
    else:
        padded = torch.nn.functional.pad(source, (0, 4 * across - columns, 0, 128 * down - rows))
        by_rows.copy_(padded.view(by_rows.shape))
    return result.view(-1).view(scales.dtype)


def unswizzle(scale: Tensor, rows: int, blocks: int) -> Tensor:
    """Return ``[rows, blocks]`` of what ``swizzle`` gave."""
    if scale.numel() != swizzled_bytes(rows, blocks):
        raise ArgumentError(
            f"scales has {scale.numel()} bytes; expected {swizzled_bytes(rows, blocks)} for {rows} x {blocks} scales"
        )
    tiles = scale.view(torch.uint8).reshape(-(-rows // 128), -(-blocks // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    plain = tiles.reshape(-(-rows // 128) * 128, -(-blocks // 4) * 4)[:rows, :blocks]
    return plain.contiguous().view(scale.dtype)
