"""4-bit codes, two in a byte, and block scales, in plain torch: how weights are packed before they are used.

Codes: "int4" (-8 to 7), "uint4" (0 to 15), "e2m1" (fp4: sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6). Element 2i of a
row lies in the low half of byte i (``nibble="high"``: in the high half). Scales multiply codes. These are functions for
weights, made at load time: they take several passes over memory.
"""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError

E2M1_MAX = 6.0
E4M3_MAX = 448.0
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1_TIES = (
    0.25,
    0.75,
    1.25,
    1.75,
    2.5,
    3.5,
    5.0,
)  # between neighbours; a tie goes to the code that is a multiple of 2
_MX = {"e2m1": (2, E2M1_MAX), "e4m3": (8, E4M3_MAX), "e5m2": (15, 57344.0)}  # largest exponent, largest value


# ---- two codes in a byte --------------------------------------------------------------------------------------------


def pack_nibbles(codes: Tensor, nibble: str = "low") -> Tensor:
    """Return codes, the low four bits of integers ``[..., k]``, two in a byte: uint8 ``[..., k/2]``."""
    if codes.shape[-1] % 2:
        raise ArgumentError(f"codes has {codes.shape[-1]} columns; expected a multiple of 2, two codes in a byte")
    bits = codes.to(torch.uint8) & 15
    first, second = bits[..., 0::2], bits[..., 1::2]
    if _is_high(nibble):
        first, second = second, first
    return first | (second << 4)


def unpack_nibbles(packed: Tensor, nibble: str = "low") -> Tensor:
    """Return the codes of bytes ``[..., k/2]`` as uint8 ``[..., k]``, 0 to 15."""
    bits = as_bytes(packed)
    low, high = bits & 15, bits >> 4
    pair = (high, low) if _is_high(nibble) else (low, high)
    return torch.stack(pair, -1).reshape(*bits.shape[:-1], 2 * bits.shape[-1])


def swap_nibbles(packed: Tensor) -> Tensor:
    """Return bytes whose halves changed places: from ``nibble="high"`` to ``"low"`` and back."""
    bits = as_bytes(packed)
    return ((bits >> 4) | (bits << 4)).view(packed.dtype)


def nibble_values(packed: Tensor, kind: str, dtype: torch.dtype = torch.float32, nibble: str = "low") -> Tensor:
    """Return what codes "int4", "uint4" or "e2m1" stand for: ``[..., k]``."""
    codes = unpack_nibbles(packed, nibble)
    if kind == "uint4":
        return codes.to(dtype)
    if kind == "int4":
        return ((codes ^ 8).to(torch.int16) - 8).to(dtype)
    if kind == "e2m1":
        table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], dtype=dtype, device=packed.device)
        return table[codes.int()]
    raise ArgumentError(f"kind is {kind!r}; expected 'int4', 'uint4' or 'e2m1'")


def as_bytes(t: Tensor) -> Tensor:
    """Return a tensor of one-byte elements as uint8."""
    return t if t.dtype == torch.uint8 else t.view(torch.uint8)


def _is_high(nibble: str) -> bool:
    if nibble not in ("low", "high"):
        raise ArgumentError(f"nibble is {nibble!r}; expected 'low' or 'high'")
    return nibble == "high"


# ---- int4 -----------------------------------------------------------------------------------------------------------


def quantize_int4(weight: Tensor, group: int = 0, *, nibble: str = "low") -> tuple[Tensor, Tensor]:
    """Quantise rows to int4, symmetrically: ``scale = amax / 7``, codes -7 to 7.

    Args:
        weight: ``[..., n, k]``, any float.
        group: How many elements of a row share a scale (32, 64, 128); 0 for the whole row.
        nibble: Where element 2i goes.

    Returns:
        int8 ``[..., n, k/2]``, and float32 ``[..., n, k/group]`` (``[..., n]`` for group 0).
    """
    k = weight.shape[-1]
    blocks = weight.float().unflatten(-1, (-1, _group_of(k, group)))
    scale = (blocks.abs().amax(-1, keepdim=True) / 7).clamp_min(1e-30)
    codes = torch.round(blocks / scale).clamp(-7, 7).to(torch.int8).flatten(-2)
    scale = scale.squeeze(-1)
    return pack_nibbles(codes, nibble).view(torch.int8), scale.squeeze(-1) if group == 0 else scale


def _group_of(k: int, group: int) -> int:
    if group and k % group:
        raise ArgumentError(f"weight has {k} columns; expected a multiple of the group, {group}")
    return group or k


# ---- fp4 and block scales -------------------------------------------------------------------------------------------


def e2m1_codes(x: Tensor) -> Tensor:
    """Return the fp4 code (0 to 15) of each value, to nearest, ties to even codes; NaN gives 6."""
    magnitude = x.float().abs()
    magnitude = torch.where(magnitude.isnan(), E2M1_MAX, magnitude)
    code = torch.zeros(x.shape, dtype=torch.uint8, device=x.device)
    for lower, tie in enumerate(_E2M1_TIES):
        code += (magnitude >= tie) if lower % 2 else (magnitude > tie)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def quantize_nvfp4(x: Tensor, global_scale: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantise to NVFP4: e2m1 codes, a scale of e4m3 for 16 of them, and one float32 for all.

    ``g = amax(x) / 2688`` (1 if that is 0), ``scale = e4m3(block_amax / (6 g))``, code = e2m1(x / (g scale)).

    Args:
        x: ``[..., k]``, any float, k a multiple of 16.
        global_scale: g, float32 ``[]``, if it is known.

    Returns:
        uint8 ``[..., k/2]``, float8_e4m3fn ``[..., k/16]``, float32 ``[]``.
    """
    if x.shape[-1] % 16:
        raise ArgumentError(f"x has {x.shape[-1]} columns; expected a multiple of 16, the block of NVFP4")
    blocks = x.float().unflatten(-1, (-1, 16))
    if global_scale is None:
        amax = blocks.abs().amax() if blocks.numel() else torch.zeros((), device=x.device)
        global_scale = torch.where(amax > 0, amax / (E2M1_MAX * E4M3_MAX), torch.ones_like(amax))
    scale = blocks.abs().amax(-1) / (E2M1_MAX * global_scale).clamp_min(1e-12)
    scale = scale.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    step = (global_scale * scale.float()).unsqueeze(-1)
    codes = torch.where(step > 0, e2m1_codes(blocks / step.clamp_min(1e-12)), 0)
    return pack_nibbles(codes.flatten(-2)), scale, global_scale


def quantize_mx(x: Tensor, kind: str = "e4m3", *, rule: str = "ocp") -> tuple[Tensor, Tensor]:
    """Quantise to an MX format: codes and, for 32 of them, the exponent of a power of two.

    Args:
        x: ``[..., k]``, any float, k a multiple of 32.
        kind: "e4m3", "e5m2" or "e2m1".
        rule: "ocp": the exponent of amax less that of the largest code, values beyond it are clamped; "nv": that of
            ``amax / largest code``, rounded up.

    Returns:
        Codes, float8 ``[..., k]`` or uint8 ``[..., k/2]``, and float8_e8m0fnu ``[..., k/32]``.
    """
    if kind not in _MX:
        raise ArgumentError(f"kind is {kind!r}; expected one of {', '.join(_MX)}")
    if rule not in ("ocp", "nv"):
        raise ArgumentError(f"rule is {rule!r}; expected 'ocp' or 'nv'")
    if x.shape[-1] % 32:
        raise ArgumentError(f"x has {x.shape[-1]} columns; expected a multiple of 32, the block of MX formats")
    exponent, largest = _MX[kind]
    blocks = x.float().unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1)
    if rule == "ocp":
        byte = ((amax.view(torch.int32) >> 23) - exponent).clamp(0, 254)
    else:
        bits = (amax / largest).view(torch.int32)
        mantissa = bits & 0x7FFFFF
        byte = ((bits >> 23) + torch.where(bits >> 23 > 0, mantissa > 0, mantissa > 0x400000).int()).clamp(0, 254)
    byte = byte.to(torch.uint8)
    values = (blocks / e8m0_values(byte).unsqueeze(-1).clamp_min(1e-12)).clamp(-largest, largest).flatten(-2)
    if kind == "e2m1":
        codes = pack_nibbles(e2m1_codes(values))
    else:
        codes = values.to(torch.float8_e4m3fn if kind == "e4m3" else torch.float8_e5m2)
    return codes, byte.view(torch.float8_e8m0fnu)


def e8m0_values(scale: Tensor) -> Tensor:
    """Return what exponent bytes stand for: ``2 ** (byte - 127)`` in float32, NaN for 255."""
    byte = as_bytes(scale).int()
    bits = torch.where(byte == 0, 0x400000, torch.where(byte == 255, 0x7FC00000, byte << 23))
    return bits.int().view(torch.float32)


def e4m3_values(scale: Tensor) -> Tensor:
    """Return what the bytes of unsigned e4m3 scales stand for, in float32; their highest bit is not looked at."""
    return (as_bytes(scale) & 0x7F).view(torch.float8_e4m3fn).float()


def swizzled_size(rows: int, columns: int) -> int:
    """Return how many bytes scales ``[rows, columns]`` take in blocks of 128 x 4."""
    return -(-rows // 128) * -(-columns // 4) * 512


def swizzle_scales(scale: Tensor) -> Tensor:
    """Return scales of one byte ``[rows, columns]`` in blocks of 128 x 4, as block-scaled tensor cores read them.

    The byte of row r and column c lies ``(r % 32) * 16 + r % 128 // 32 * 4 + c % 4`` behind the first of its block of
    512; blocks along a row follow each other. What is beyond the last row and column is 0.

    Returns:
        One dimension, of ``swizzled_size(rows, columns)``, and of the dtype of `scale`.
    """
    rows, columns = scale.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8, device=scale.device)
    padded[:rows, :columns] = as_bytes(scale)
    blocks = padded.view(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4)
    return blocks.reshape(-1).view(scale.dtype)


def unswizzle_scales(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Return ``[rows, columns]`` of what ``swizzle_scales`` gave."""
    if scale.numel() != swizzled_size(rows, columns):
        wanted = swizzled_size(rows, columns)
        raise ArgumentError(f"scale has {scale.numel()} bytes; expected {wanted} for {rows} x {columns} scales")
    blocks = as_bytes(scale).reshape(-(-rows // 128), -(-columns // 4), 32, 4, 4).permute(0, 3, 2, 1, 4)
    plain = blocks.reshape(-(-rows // 128) * 128, -(-columns // 4) * 4)[:rows, :columns]
    return plain.contiguous().view(scale.dtype)
