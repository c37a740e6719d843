"""Benchmark rows of ``grouped_mm`` and its kin: the sizes of DeepGEMM's tests, uneven groups."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.rows.gemm.scaled_mm import _random
from bench.rows.row import Row
from rtkernels.ops.gemm.grouped_mm import grouped_mm, grouped_mm_masked, grouped_wgrad

F8 = torch.float8_e4m3fn
CONTIGUOUS = ((4, 8192), (8, 4096))  # groups, rows of each
MATRICES = ((6144, 7168), (7168, 3072), (4096, 4096), (4096, 2048))  # n, k
MASKED = ((32, 192), (6, 1024), (32, 20), (6, 20))  # groups, valid rows, of 4096
WGRAD = ((4, 4096, 7168, 8192), (4, 7168, 2048, 8192), (8, 4096, 7168, 4096))  # groups, n, k, rows of each
ALIGN = 128


def _counts(groups: int, rows: int) -> list[int]:
    """Return uneven sizes, multiples of ALIGN, 0.7 to 1.3 of `rows`."""
    return [
        max(int(rows * (0.7 + 0.6 * ((i * 37) % groups) / max(groups - 1, 1))) // ALIGN, 1) * ALIGN
        for i in range(groups)
    ]


def _ends(groups: int, rows: int, device: str) -> Tensor:
    return torch.tensor(_counts(groups, rows)).cumsum(0).int().to(device)


def _contiguous(
    device: str, generator: torch.Generator, groups: int, rows: int, n: int, k: int, fp8: bool
) -> dict[str, Any]:
    total = sum(_counts(groups, rows))
    a, b = _random(device, generator, total, k), _random(device, generator, groups, n, k)
    given = {"a": a.bfloat16(), "b": b.bfloat16(), "offs": _ends(groups, rows, device)}
    if not fp8:
        return given
    scales = torch.rand(k // 128, total, device=device).t(), torch.rand(groups, n // 128, k // 128, device=device)
    return {**given, "a": a.to(F8), "b": b.to(F8), "scale_a": scales[0], "scale_b": scales[1]}


def _torch(a: Tensor, b: Tensor, offs: Tensor, scale_a: Tensor | None = None, scale_b: Tensor | None = None) -> Tensor:
    dtype = a.dtype if a.dtype.itemsize > 1 else torch.bfloat16
    dtype = torch.float64 if torch.float64 in (a.dtype, getattr(scale_a, "dtype", None)) else dtype
    parts, first = [], 0
    for group, end in enumerate(offs.tolist()):
        x, w = a[first:end].to(dtype), b[group].to(dtype)
        if scale_a is not None:
            x = x * scale_a[first:end].to(dtype).repeat_interleave(128, 1)
            w = w * scale_b[group].to(dtype).repeat_interleave(128, 0).repeat_interleave(128, 1)
        parts.append(x @ w.t())
        first = end
    return torch.cat(parts)


def _fused(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    return torch._grouped_mm(a, b.transpose(1, 2), offs=offs)


def _uneven(device: str, generator: torch.Generator, counts: tuple[int, ...], n: int, k: int) -> dict[str, Any]:
    a, b = _random(device, generator, sum(counts), k), _random(device, generator, len(counts), n, k)
    return {"a": a.bfloat16(), "b": b.bfloat16(), "offs": torch.tensor(counts).cumsum(0).int().to(device)}


def uneven(counts: tuple[int, ...], n: int, k: int) -> Row:
    """Return a row of bf16 groups of any sizes."""
    total, groups = sum(counts), len(counts)
    return Row(
        name="grouped_mm",
        shape=f"{groups} groups of {min(counts)} to {max(counts)}, {total}x{n}x{k}_bf16",
        make=partial(_uneven, counts=counts, n=n, k=k),
        ours=grouped_mm,
        torch=_fused,  # plain torch would wait for the sizes of the groups
        bytes=2 * (total * k + groups * n * k + total * n),
        flops=2 * total * n * k,
    )


def _rooms(device: str, generator: torch.Generator, groups: int, rows: int, n: int, k: int) -> dict[str, Any]:
    room = 4096 if rows > 256 else 256
    a, b = _random(device, generator, groups, room, k), _random(device, generator, groups, n, k)
    counts = torch.full((groups,), rows, dtype=torch.int32, device=device)
    return {"a": a.bfloat16(), "b": b.bfloat16(), "masked_m": counts}


def _masked(a: Tensor, b: Tensor, masked_m: Tensor, expected_m: int) -> Tensor:
    return grouped_mm_masked(a, b, masked_m=masked_m, expected_m=expected_m)[:, :expected_m]


def _masked_torch(a: Tensor, b: Tensor, masked_m: Tensor, rows: int) -> Tensor:
    return torch.bmm(a[:, :rows], b.transpose(1, 2))


def _rows_and_gradients(
    device: str, generator: torch.Generator, groups: int, n: int, k: int, rows: int
) -> dict[str, Any]:
    total = sum(_counts(groups, rows))
    dy, x = (_random(device, generator, total, columns).bfloat16() for columns in (n, k))
    return {"dy": dy, "x": x, "offs": _ends(groups, rows, device)}


def _wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return grouped_wgrad(dy, x, offs=offs)


def _wgrad_torch(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    first, parts = 0, []
    for end in offs.tolist():
        parts.append(dy[first:end].t() @ x[first:end])
        first = end
    return torch.stack(parts).to(torch.promote_types(dy.dtype, torch.float32))


def rows() -> Iterator[Row]:
    """bf16 and fp8 with scales of blocks, consecutive groups; padded groups; gradients of the matrices."""
    for groups, each in CONTIGUOUS:
        total = sum(_counts(groups, each))
        for n, k in MATRICES:
            for fp8 in (False, True):
                size = 1 if fp8 else 2
                yield Row(
                    name="grouped_mm",
                    shape=f"{groups}x{each}x{n}x{k}_{'fp8_block' if fp8 else 'bf16'}",
                    make=partial(_contiguous, groups=groups, rows=each, n=n, k=k, fp8=fp8),
                    ours=partial(grouped_mm, align=ALIGN),
                    torch=_torch,
                    fused=None if fp8 else _fused,
                    bytes=size * (total * k + groups * n * k) + 2 * total * n,
                    flops=2 * total * n * k,
                )
    for groups, count in MASKED:
        n, k = 4096, 7168
        yield Row(
            name="grouped_mm_masked",
            shape=f"{groups}x{count}x{n}x{k}_bf16",
            make=partial(_rooms, groups=groups, rows=count, n=n, k=k),
            ours=partial(_masked, expected_m=count),
            torch=partial(_masked_torch, rows=count),
            bytes=2 * groups * (count * k + n * k + count * n),
            flops=2 * groups * count * n * k,
        )
    for groups, n, k, each in WGRAD:
        total = sum(_counts(groups, each))
        yield Row(
            name="grouped_wgrad",
            shape=f"{groups}x{n}x{k}x{each}_bf16",
            make=partial(_rows_and_gradients, groups=groups, n=n, k=k, rows=each),
            ours=_wgrad,
            torch=_wgrad_torch,
            bytes=2 * total * (n + k) + 4 * groups * n * k,
            flops=2 * total * n * k,
        )
