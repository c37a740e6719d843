"""4-bit codes, two in a byte, and block scales, in plain torch: how weights are packed before they are used.

Codes: "int4" (-8 to 7), "uint4" (0 to 15), "e2m1" (fp4: sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6). Element 2i of a
row lies in the low half of byte i (``nibble="high"``: in the high half). Scales multiply codes. These are functions for
weights, made at load time: they take several passes over memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared import block_formats as formats
from rtkernels.ops.shared.block_formats import decode_e4m3 as e4m3_values
from rtkernels.ops.shared.block_formats import decode_e8m0 as e8m0_values
from rtkernels.ops.shared.block_formats import encode_e2m1 as e2m1_codes
from rtkernels.ops.shared.block_formats import swizzle as swizzle_scales
from rtkernels.ops.shared.block_formats import swizzled_bytes as swizzled_size
from rtkernels.ops.shared.block_formats import unswizzle as unswizzle_scales

__all__ = [
    "as_bytes", "e2m1_codes", "e4m3_values", "e8m0_values", "nibble_values", "nvfp4_global_scale", "pack_nibbles",
    "quantize_int4", "quantize_mx", "quantize_nvfp4", "swap_nibbles", "swizzle_scales", "swizzled_size",
    "unpack_nibbles", "unswizzle_scales",
]  # fmt: skip
_CODES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "e2m1": torch.uint8}


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
        return formats.e2m1_values(codes).to(dtype)
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
    scale = formats.divided(blocks.abs().amax(-1, keepdim=True), 7).clamp_min(1e-30)
    codes = torch.round(blocks / scale).clamp(-7, 7).to(torch.int8).flatten(-2)
    scale = scale.squeeze(-1)
    return pack_nibbles(codes, nibble).view(torch.int8), scale.squeeze(-1) if group == 0 else scale


def _group_of(k: int, group: int) -> int:
    if group and k % group:
        raise ArgumentError(f"weight has {k} columns; expected a multiple of the group, {group}")
    return group or k


# ---- fp4 and block scales -------------------------------------------------------------------------------------------


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
    x = x.float()
    if global_scale is None:
        global_scale = nvfp4_global_scale([x])
    return *formats.encode_nvfp4(x, global_scale, "rne", "rne"), global_scale


def nvfp4_global_scale(tensors: Sequence[Tensor]) -> Tensor:
    """Return the global scale that tensors share, float32 ``[]``: their largest finite magnitude / 2688, or 1 for 0."""
    amax = torch.zeros((), dtype=torch.float32, device=tensors[0].device)
    for x in tensors:
        amax = torch.maximum(amax, formats.finite(x.float()).amax()) if x.numel() else amax
    scaled = formats.divided(amax, formats.E2M1_MAX * formats.E4M3_MAX)
    return torch.where(amax > 0, scaled, torch.ones_like(amax))


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
    if kind not in _CODES:
        raise ArgumentError(f"kind is {kind!r}; expected one of {', '.join(_CODES)}")
    if rule not in ("ocp", "nv"):
        raise ArgumentError(f"rule is {rule!r}; expected 'ocp' or 'nv'")
    if x.shape[-1] % 32:
        raise ArgumentError(f"x has {x.shape[-1]} columns; expected a multiple of 32, the block of MX formats")
    return formats.encode_mx(x.float(), _CODES[kind], rule)
