"""Tensors of a product for measurements: as large, and with the same element types, as those of the call."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.gemm.pad_plan import memory_size
from rtkernels.ops.gemm.product import BYTES, Product, Scales

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "e4m3": torch.float8_e4m3fn,
           "e5m2": torch.float8_e5m2}  # fmt: skip
_ONES = {"e8m0": 127, "ue4m3": 0x38}  # bytes of a scale of 1


def tensors(product: Product, device: torch.device) -> dict[str, Tensor]:
    """Return operands, scales and results by the names of ``product``; values are random and small."""
    p, g = product, product.groups
    count = g.count if g is not None else 1
    generator = torch.Generator(device).manual_seed(0)
    found = {name: _operand(p, name, generator, device) for name in "ab"}
    columns = 2 * p.n if p.gate is not None else p.n
    for name, scales, rows in (("scale_a", p.scale_a, p.m), ("scale_b", p.scale_b, columns)):
        if scales is not None:
            found[name] = _scales(scales, rows, p.k, count, device)

    def space(numbers: int) -> Tensor:
        return torch.zeros(max(numbers, 1), dtype=torch.float32, device=device)

    result = (count - 1) * p.out.group_pitch + p.m * p.out.pitch * (count if p.out.group_pitch == 0 else 1)
    found |= {"out": space(result), "global_scale": torch.ones(2, dtype=torch.float32, device=device)}
    if p.bias is not None:
        found["bias"] = space(count * columns)
    if p.add is not None:
        found["add"] = space(count * p.m * max(p.add_pitch, p.n))
    if p.quantized is not None:
        found["out_scale"] = space(count * (p.m + 4) * (-(-p.n // 16) + 1))
    if g is not None:
        found |= _cuts(p, device)
    return found


def _operand(p: Product, name: str, generator: torch.Generator, device: torch.device) -> Tensor:
    matrix = getattr(p, name)
    matrices, rows, columns = memory_size(p, name)
    numbers = max((matrices - 1) * matrix.group_pitch + (rows - 1) * matrix.pitch + columns, 1)
    if matrix.token in _DTYPES:
        values = torch.randn(numbers, generator=generator, device=device, dtype=torch.float32)
        return values.mul_(0.5).to(_DTYPES[matrix.token])
    size = -(-int(2 * BYTES[matrix.token]) * numbers // 2)
    return torch.randint(0, 256, (size,), generator=generator, device=device, dtype=torch.uint8)


def _scales(scales: Scales, rows: int, k: int, count: int, device: torch.device) -> Tensor:
    across, along = -(-rows // scales.rows) if scales.rows else 1, -(-k // scales.depth) if scales.depth else 1
    if scales.swizzled:
        numbers = count * -(-across // 128) * -(-along // 4) * 512
    else:
        numbers = count * (across * max(scales.row_pitch, 1) + along * max(scales.depth_pitch, 1))
        numbers = max(numbers, (count - 1) * scales.group_pitch + numbers // count)
    if scales.token == "fp32":
        return torch.ones(max(numbers, 1), dtype=torch.float32, device=device)
    return torch.full((max(numbers, 1),), _ONES[scales.token], dtype=torch.uint8, device=device)


def _cuts(p: Product, device: torch.device) -> dict[str, Tensor]:
    """Return where groups end, as if all were equally large."""
    g = p.groups
    total = p.k if g.kind == "depth" else p.m
    each = max(total // max(g.count, 1) // g.align * g.align, min(g.align, total))
    if g.kind == "masked":
        return {"sizes": torch.full((g.count,), min(g.expected or p.m, p.m), dtype=torch.int32, device=device)}
    groups = torch.arange(g.count, dtype=torch.int32, device=device)
    if g.kind == "labels":
        rows = torch.div(torch.arange(p.m, dtype=torch.int32, device=device), each, rounding_mode="floor")
        return {"row_groups": torch.where(rows < g.count, rows, -1).to(torch.int32)}
    return {"ends": ((groups + 1) * each).clamp(max=total).to(torch.int32)}
