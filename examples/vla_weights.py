"""The sizes and random weights of the policy in ``vla_parts.py``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Layer = dict[str, Any]


@dataclass(frozen=True)
class Sizes:
    """The sizes of pi0.5: SigLIP So400m, PaliGemma 2B, an action expert of 300M, 10 steps of flow matching."""

    views: int = 3
    image: int = 224
    patch: int = 14
    vision_layers: int = 27
    vision_width: int = 1152
    vision_heads: int = 16
    vision_inner: int = 4304
    vocabulary: int = 257152
    prompt: int = 200
    layers: int = 18  # of the prefix and of the expert: each layer of the expert reads the keys of one of the prefix
    width: int = 2048
    heads: int = 8
    head_dim: int = 256
    inner: int = 16384
    expert_width: int = 1024
    expert_inner: int = 4096
    horizon: int = 10
    action: int = 32
    steps: int = 10
    state: int = 0  # width of the robot's state where it is a token of its own, as in pi0

    @property
    def patches(self) -> int:
        """Patches of one view."""
        return (self.image // self.patch) ** 2

    @property
    def prefix(self) -> int:
        """Tokens of images and prompt."""
        return self.views * self.patches + self.prompt

    @property
    def context(self) -> int:
        """Tokens that actions read: the prefix and the state."""
        return self.prefix + (self.state > 0)

    @property
    def tokens(self) -> int:
        """All tokens."""
        return self.context + self.horizon


TINY = Sizes(1, 28, 14, 2, 32, 2, 48, 50, 5, 2, 64, 2, 32, 96, 32, 64, 4, 8, 3)


def make_weights(sizes: Sizes, device: str, seed: int = 0) -> dict[str, Any]:
    """Return random weights in bfloat16: matrices ``[out, in]``, and what follows from the time of each step."""
    generator = torch.Generator(device).manual_seed(seed)

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator, device=device, dtype=torch.float32)
        return (weight * gain / math.sqrt(columns)).bfloat16()

    def vector(n: int, around: float = 0.0) -> Tensor:
        return (around + 0.1 * torch.randn(n, generator=generator, device=device)).bfloat16()

    def gemma(width: int, inner: int) -> Layer:
        q = sizes.heads * sizes.head_dim
        return {
            "qkv": matrix(q + 2 * sizes.head_dim, width), "out": matrix(width, q),
            "gate_up": matrix(2 * inner, width), "down": matrix(width, inner),
        }  # fmt: skip

    def vision() -> Layer:
        w, inner = sizes.vision_width, sizes.vision_inner
        return {
            "norm1": vector(w, 1.0), "norm1_bias": vector(w), "norm2": vector(w, 1.0), "norm2_bias": vector(w),
            "qkv": matrix(3 * w, w), "qkv_bias": vector(3 * w), "out": matrix(w, w), "out_bias": vector(w),
            "up": matrix(inner, w), "up_bias": vector(inner), "down": matrix(w, inner), "down_bias": vector(w),
        }  # fmt: skip

    width, expert = sizes.width, sizes.expert_width
    prefix = [gemma(width, sizes.inner) for _ in range(sizes.layers)]
    for layer in prefix:
        layer |= {"norm1": vector(width, 1.0), "norm2": vector(width, 1.0)}
    # The time of a step is known in advance, and so are the modulations of the expert's norms.
    times = 1.0 - torch.arange(sizes.steps, device=device) / sizes.steps
    angles = times[:, None] * torch.logspace(0, 3, expert // 2, device=device)
    condition = F.silu(torch.cat([angles.sin(), angles.cos()], 1).bfloat16() @ matrix(expert, expert).t())
    styles = [[condition @ matrix(3 * expert, expert, 0.5).t() for _ in range(2)] for _ in range(sizes.layers)]
    last_style = condition @ matrix(3 * expert, expert, 0.5).t()
    return {
        "vision": [vision() for _ in range(sizes.vision_layers)],
        "prefix": prefix,
        "expert": [gemma(expert, sizes.expert_inner) for _ in range(sizes.layers)],
        "styles": [
            [(styles[i][0][step].contiguous(), styles[i][1][step].contiguous()) for i in range(sizes.layers)]
            for step in range(sizes.steps)
        ],
        "last_styles": [row.contiguous() for row in last_style],
        "table": matrix(sizes.vocabulary, width, math.sqrt(width)),
        "ends": {
            "patch": matrix(sizes.vision_width, 3 * sizes.patch**2), "patch_bias": vector(sizes.vision_width),
            "position": matrix(sizes.patches, sizes.vision_width), "image": matrix(width, sizes.vision_width),
            "norm": vector(sizes.vision_width, 1.0), "norm_bias": vector(sizes.vision_width),
            "image_bias": vector(width), "action_in": matrix(expert, sizes.action),
            "action_out": matrix(sizes.action, expert),
        },
    }  # fmt: skip
