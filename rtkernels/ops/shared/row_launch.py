"""Arguments about the output for kernels with ``common/row_output.cuh``."""

from __future__ import annotations

import torch

from rtkernels.runtime.invariance import level, refuse

FORMATS = {"none": 0, "tensor": 1, "row": 1, "block128": 1, "nvfp4": 2}  # FORMAT of the template
_GRANULARITY = {"row": 1, "block128": 2}
_CODES = {torch.float8_e5m2: 1, torch.int8: 2}
_SWIZZLED, _AMAX_ONLY, _OUT_FP32, _FROM_AMAX = 16, 32, 64, 128


def row_variants() -> list[tuple[str, int, bool]]:
    """Return all variants of such a kernel: type, format, and whether rows allow accesses of 16 bytes.

    The last one is a template argument because both ways in one kernel cost 30 registers of each thread.
    """
    formats = sorted(set(FORMATS.values()))
    return [(t, f, aligned) for t in ("bf16", "fp16", "fp32") for f in formats for aligned in (False, True)]


def quick_variants() -> list[tuple[str, int]]:
    """Return those of kernels for operands of one type in rows of 16-byte units: type and format.

    fp32 tensors that become NVFP4 are left to kernels that take everything.
    """
    return [(t, f) for t, f, aligned in row_variants() if aligned and (t, f) != ("fp32", FORMATS["nvfp4"])]


def quant_flags(
    quant: str, codes: torch.dtype, swizzled: bool, no_scale: bool, dtype: torch.dtype
) -> tuple[int | None, int]:
    """Return the `quant` arguments of two launches: one that only finds the amax of the tensor (None), and the last."""
    flags = _GRANULARITY.get(quant, 0) | _CODES.get(codes, 0) << 2 | _SWIZZLED * swizzled
    if quant == "none":
        return None, _OUT_FP32 * (codes == torch.float32 != dtype)
    if quant in ("tensor", "nvfp4") and no_scale:
        if level():
            refuse(f"quant={quant!r} without a scale", "the largest element of all rows decides every row's codes")
        return flags & ~_SWIZZLED | _AMAX_ONLY, flags | _FROM_AMAX
    return None, flags
