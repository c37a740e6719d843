"""``glu_fp8`` and its backward in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.act.glu_reference import gradients, halves, partner_and_slope, value_and_slope
from rtkernels.ops.quant import reference as fp8
from rtkernels.ops.shared.fp8_layout import E4M3, Fp8Layout
from rtkernels.runtime.layout import nothing, row_count


def quantized(
    y: Tensor, counts: Tensor | None, layout: str, pow2: bool, scale_layout: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return q, scale, q_t and scale_t of an fp32 tensor, with empty tensors for what `layout` leaves out."""
    layout = Fp8Layout(y.shape, layout, scale_layout, None if counts is None else counts.shape[0])
    wanted, rows = layout.outputs(), row_count(y.shape)
    sizes = rows_of(counts, rows)
    parts = y.reshape(rows, y.shape[-1])[: sum(sizes)].split(sizes)
    results = [nothing(y) for _ in range(4)]
    for i, granularity in ((0, "group"), (2, "group_t")):
        if wanted[i] is not None:
            lies = scale_layout if granularity == "group" else "row"
            codes, scales = zip(*(fp8.quantize(part, granularity, E4M3, pow2, lies) for part in parts), strict=True)
            results[i] = joined(codes, wanted[i].shape, E4M3, y)
            results[i + 1] = joined(scales, wanted[i + 1].shape, torch.float32, y)
    return tuple(results)


def rows_of(counts: Tensor | None, rows: int) -> list[int]:
    """Return the rows of each expert, cut to what there is."""
    sizes: list[int] = []
    for count in [rows] if counts is None else counts.tolist():
        sizes.append(max(0, min(count, rows - sum(sizes))))
    return sizes


def check_sum(counts: Tensor | None, rows: int, check: bool) -> None:
    """Raise an ArgumentError if `check` and the counts do not add up."""
    if check and counts is not None and (int(counts.sum()) != rows or bool((counts < 0).any())):
        raise ArgumentError(f"counts are {counts.tolist()}; expected numbers that add up to {rows}, the rows of x")


def joined(parts: Sequence[Tensor], shape: tuple[int, ...], dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return the elements of all parts one after the other, with zeros at the end, as `shape`."""
    bits = torch.uint8 if dtype == E4M3 else dtype
    whole = torch.zeros(shape, dtype=bits, device=like.device)
    flat = torch.cat([whole.new_empty(0), *(part.view(bits).flatten() for part in parts)])
    whole.view(-1)[: flat.numel()] = flat
    return whole.view(dtype)


def forward(
    x: Tensor, up: Tensor | None, weight: Tensor | None, counts: Tensor | None, act: str, layout: str,
    pow2_scale: bool, scale_layout: str, check_counts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return q, scale, q_t and scale_t."""
    check_sum(counts, row_count(x.shape), check_counts)
    return quantized(unquantized(x, up, weight, act), counts, layout, pow2_scale, scale_layout)


def unquantized(x: Tensor, up: Tensor | None, weight: Tensor | None, act: str) -> Tensor:
    """Return the result in fp32."""
    gate, other = halves(x, up)
    y = value_and_slope(act, gate)[0]
    if weight is not None:
        y = y * weight.float().unsqueeze(-1)
    return y * partner_and_slope(act, other)[0]


def backward(
    dy: Tensor, x: Tensor, up: Tensor | None, weight: Tensor | None, counts: Tensor | None, act: str, layout: str,
    pow2_scale: bool, scale_layout: str, check_counts: bool, keep: str, weight_grad: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return q, scale, q_t and scale_t of the gradient of [gate | up], that gradient, and that of the weight."""
    check_sum(counts, row_count(x.shape), check_counts)
    dx, dweight = gradients(dy, x, up, weight, act, weight_grad)
    codes = tuple(nothing(x) for _ in range(4))
    if keep != "dense":
        codes = quantized(dx, counts, layout, pow2_scale, scale_layout)
    return *codes, dx.to(x.dtype, copy=True).contiguous() if keep != "fp8" else nothing(x), dweight
