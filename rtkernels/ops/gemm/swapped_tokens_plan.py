"""Tokens behind a norm, or in the order that codes need, for kernels with weights as wgmma's left operand."""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.ops.gemm.product import Product
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Memory, Step, box_strides

# As in gemm_swapped_tokens.cu.
_THREADS = 256
_DEPTH = 32  # of k, within which elements change places
SAME, BYTES, HALF_BYTES = 0, 1, 2  # orders: of a, of codes of 8 bits, of codes of 4 bits

KERNEL = Kernel(
    "gemm/gemm_swapped_tokens.cu", "gemm_swapped_tokens", template="T", max_registers=80, needs=("wgmma", "pdl"),
    args="a:ptr gain:ptr out:ptr k:i64 a_pitch:i64 out_pitch:i64 order:i64 eps:f64 offset:f64",
    variants=[("bf16",)], tier="serve",
)  # fmt: skip
KERNELS = (KERNEL,)


class Tokens(NamedTuple):
    """Tokens in scratch memory named "tokens": the launch that writes them, and their boxes of 128 bytes of k."""

    step: Step
    scratch: dict[str, Memory]
    boxes: Boxes


def prepared(p: Product, device: int, rows: int, *, norm: bool, order: int = SAME) -> Tokens:
    """Return tokens of a product in bf16, in boxes of so many rows.

    Args:
        p: The product.
        device: CUDA ordinal, or -1 for the host emulator.
        rows: Rows of a box.
        norm: The rows are normalised; the call has `norm_weight` and numbers ``eps`` and ``offset``.
        order: Of elements, as above.
    """
    pitch = -(-p.k // _DEPTH) * _DEPTH
    step = Step(
        KERNEL.bind(("bf16",), device, p.m, _THREADS, overlap=True), "a", "norm_weight" if norm else 0, "tokens",
        p.k, p.a.pitch, pitch, order, *(("eps", "offset") if norm else (0.0, 0.0)),
    )  # fmt: skip
    sizes = (pitch, p.m)
    boxes = Boxes("tokens", "bf16", sizes, box_strides(sizes, (pitch,), 2), (64, rows))
    return Tokens(step, {"tokens": Memory((p.m, pitch), torch.bfloat16)}, boxes)
