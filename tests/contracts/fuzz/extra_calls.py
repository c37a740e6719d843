"""Calls of public functions that other contracts do not make: options with tensors of their own, sizes beside tiles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

F8 = torch.float8_e4m3fn


def calls() -> dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """Return public functions with arguments, by what is special of them."""
    generator = torch.Generator().manual_seed(7)

    def normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def half(*shape: int) -> Tensor:
        return normal(*shape, dtype=torch.bfloat16)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-9, 9, shape, generator=generator).to(torch.int8)

    q, k, v = half(2, 9, 4, 32), half(2, 13, 2, 32), half(2, 13, 2, 32)
    bias = half(1, 4, 9, 13)
    ends = torch.tensor([3, 3, 9], dtype=torch.int32)
    found: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
        ", add": ("scaled_mm", (half(9, 64), half(24, 64)), {"bias": half(24), "add": half(9, 24)}),
        ", add in fp32": (
            "scaled_mm", (half(9, 64), half(24, 64)), {"add": normal(9, 24), "out_dtype": torch.float32}),
        ", add, mma": (
            "scaled_mm", (half(9, 64), half(24, 64)), {"add": half(9, 24), "backend": "mma"}),
        ", add, large": ("scaled_mm", (half(129, 136), half(136, 136)), {"add": half(129, 136), "b_layout": "nk"}),
        ", add, skinny": (
            "scaled_mm", (half(2, 64), half(24, 64)), {"add": half(2, 24), "backend": "skinny"}),
        ", kn": ("scaled_mm", (half(9, 64), half(64, 24)), {"b_layout": "kn"}),
        ", rows and bias": (
            "scaled_mm", (codes(9, 64), codes(24, 64), normal(9).abs(), normal(24).abs()),
            {"bias": normal(24), "out_dtype": torch.float32}),
        ", same matrix": ("grouped_mm", (half(9, 64), half(3, 24, 64)), {"offs": ends}),
        ", rows": (
            "grouped_mm", (codes(9, 64), codes(3, 24, 64), normal(9).abs(), normal(3, 24).abs()), {"offs": ends}),
        ", overwritten": ("grouped_wgrad", (half(9, 16), half(9, 24)), {"offs": ends, "accumulate": False}),
        ", bias": ("attention", (q, k, v), {"bias": bias}),
        ", sinks": ("attention", (q, k, v), {"sinks": normal(4), "causal": True, "return_lse": True}),
        ", bhld": (
            "attention", (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)), {"layout": "bhld"}),
        ", long": ("attention", (half(1, 130, 1, 16), half(1, 130, 1, 16), half(1, 130, 1, 16)), {}),
        ", two": ("multi_scale_", ([normal(5, 24), normal(7)], 2.0), {}),
        ", two and two": ("multi_copy_", ([normal(5, 24), normal(7)], [normal(5, 24), normal(7)], 2.0), {}),
        ", clipped": ("multi_clip_norm_", ([normal(5, 24), normal(7)], 0.5), {}),
        ", limited": ("multi_clip_", ([normal(5, 24), normal(7)], 0.5), {}),
        ", limits": (
            "attention", (q, k, v),
            {"kv_limit": torch.arange(4, 13, dtype=torch.int32),
             "seqused_k": torch.tensor([13, 5], dtype=torch.int32)}),
        ", residual and bias": ("layer_norm", (normal(5, 72), normal(72), normal(72)), {"residual": normal(5, 72)}),
        ", scale": ("index_select", (normal(7, 24), torch.tensor([3, 0, 6])), {"scale": normal(7)}),
        ", weights": ("scatter_add", (normal(5, 24), torch.tensor([3, 0, 6, 3, 1]), 8), {"weights": normal(5)}),
        ", columns": ("softmax", (normal(7, 24), 0), {}),
        ", img": ("patchify", (normal(2, 8, 6, 3), 2), {}),
        ", row": ("add_bias", (normal(5, 24), normal(24)), {}),
        ", column": ("channel_mul", (normal(5, 24), normal(24)), {}),
        ", step": ("euler_step", (normal(5, 24), normal(5, 24), 0.3), {}),
        ", dt": ("euler_step", (normal(5, 24), normal(5, 24), normal(1)), {}),
        ", three": ("cfg_combine", (normal(5, 24), normal(5, 24), normal(5, 24), 2.0), {}),
        ", beta": ("cfg_combine", (normal(5, 24), normal(5, 24), normal(5, 24), normal(1)), {}),
        ", codes": ("quantize_mxfp8", (normal(5, 64),), {}),
        ", nibbles": ("quantize_mxfp4", (normal(5, 64),), {}),
        ", factor": ("scale_", (normal(5, 24), normal(1)), {}),
        ", back": ("dequantize_mxfp8", (normal(5, 64).to(F8), codes(5, 2).abs().view(torch.uint8) + 120), {}),
    }  # fmt: skip
    return found
