"""The fp8 recipe, independent of the library: numpy, tables of values, one set of values at a time."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

E4M3, E5M2 = FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {E4M3: 448.0, E5M2: 57344.0}


def fp8_table(dtype: torch.dtype) -> np.ndarray:
    """Values of the non-negative finite codes, in code order."""
    mantissa, bias, last = (3, 7, 0x7E) if dtype == E4M3 else (2, 15, 0x7B)
    codes = np.arange(last + 1)
    exponent, fraction = codes >> mantissa, (codes & (2**mantissa - 1)) / 2**mantissa
    return np.where(exponent == 0, fraction * 2.0 ** (1 - bias), (1 + fraction) * 2.0 ** (exponent - bias))


def encode(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Codes of fp32 values: the nearest table entry, the even one at ties, the last one beyond it."""
    table = fp8_table(dtype)
    middle = (table[1:] + table[:-1]) / 2
    with np.errstate(invalid="ignore"):
        magnitude = np.abs(values.astype(np.float64))
    code = np.searchsorted(middle, magnitude, side="left")
    tie = (code < len(middle)) & (magnitude == middle[np.minimum(code, len(middle) - 1)])
    code = code + (tie & (code % 2 == 1))
    return np.where(np.isnan(values), 0x7F, code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def scale_of(values: np.ndarray, dtype: torch.dtype, pow2: bool) -> np.float32:
    finite = np.abs(values[np.isfinite(values)])
    amax = finite.max() if finite.size else np.float32(0)
    scale = max(np.float32(amax) / np.float32(LARGEST[dtype]), np.float32(1e-30))
    if pow2:
        fraction, exponent = math.frexp(scale)
        scale = np.float32(2.0 ** (exponent - 1 if fraction == 0.5 else exponent))
    return scale


def slow(x: Tensor, granularity: str, layout: str, dtype: torch.dtype, pow2: bool) -> tuple[np.ndarray, np.ndarray]:
    """Codes and scales of a matrix."""
    v = x.float().numpy()
    rows, cols = v.shape
    down, across = {
        "tensor": (rows, cols), "row": (1, cols), "group": (1, 128), "group_t": (128, 1), "block": (128, 128)
    }[granularity]  # fmt: skip
    codes = np.empty(v.shape, np.uint8)
    scales = np.empty((-(-rows // down), -(-cols // across)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            part = np.s_[i * down : (i + 1) * down, j * across : (j + 1) * across]
            scales[i, j] = scale_of(v[part], dtype, pow2)
            with np.errstate(invalid="ignore"):
                codes[part] = encode(v[part] * (np.float32(1) / scales[i, j]), dtype)
    if granularity == "tensor":
        return codes, scales.reshape(())
    if granularity == "row":
        return codes, scales[:, 0]
    return (codes.T if granularity == "group_t" else codes), (scales.T if layout == "column" else scales)
