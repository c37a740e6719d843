"""Benchmark rows of ``patchify`` and ``repeat_heads``, at the sizes of policies."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from bench.rows.row import Row
from rtkernels.ops.layout.patchify import patchify, repeat_heads


def _torch(img: Tensor) -> Tensor:
    n, h, w, c = img.shape
    return img.view(n, h // 14, 14, w // 14, 14, c).permute(0, 1, 3, 2, 4, 5).reshape(n, -1, 588)


def rows() -> Iterator[Row]:
    yield Row(
        name="patchify", shape="3x224x224x3, 14",
        make=lambda device, g: {
            "img": torch.randn(3, 224, 224, 3, dtype=torch.bfloat16, device=device, generator=g),
        },
        ours=lambda img: patchify(img, 14), torch=_torch, bytes=4 * 3 * 224 * 224 * 3,
    )  # fmt: skip
    yield Row(
        name="repeat_heads", shape="968x8x128, 2",
        make=lambda device, g: {"x": torch.randn(968, 8, 128, dtype=torch.bfloat16, device=device, generator=g)},
        ours=lambda x: repeat_heads(x, 2), torch=lambda x: x.repeat_interleave(2, -2), bytes=6 * 968 * 8 * 128,
    )  # fmt: skip
