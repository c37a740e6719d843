"""Operands of matrix products with their fp64 values, built independently of the library's own descriptions."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.quant import pack
from support.compare import FP8_SUMS, CompareError, assert_close

FLOATS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


class Codes(NamedTuple):
    """An operand ``[..., rows, k]``: as the library takes it, and as fp64 numbers."""

    codes: Tensor
    values: Tensor


def generator(device: str, seed: int = 0) -> torch.Generator:
    """Return a generator of random numbers on a device."""
    return torch.Generator(device).manual_seed(seed)


def codes(kind: str, *shape: int, device: str = "cpu", seed: int = 0) -> Codes:
    """Return random codes of a type ("bf16", "e4m3", "int8", "uint4", ...)."""
    g = generator(device, seed)
    if kind in FLOATS or kind in FP8:
        t = torch.randn(shape, device=device, generator=g).to({**FLOATS, **FP8}[kind])
        return Codes(t, t.double())
    if kind in ("int8", "uint8"):
        low, high = (-128, 128) if kind == "int8" else (0, 256)
        t = torch.randint(low, high, shape, device=device, generator=g).to(getattr(torch, kind))
        return Codes(t, t.double())
    t = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), device=device, generator=g).to(torch.uint8)
    halves = torch.stack([t & 15, t >> 4], -1).flatten(-2).long()
    if kind == "e2m1":
        table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64, device=device)
        return Codes(t, table[halves & 7] * torch.where(halves > 7, -1.0, 1.0).double())
    if kind == "int4":
        return Codes(t.view(torch.int8), torch.where(halves > 7, halves - 16, halves).double())
    return Codes(t, halves.double())


def scale(*shape: int, kind: str = "fp32", device: str = "cpu", seed: int = 1) -> Tensor:
    """Return random scales: positive fp32, e4m3 or e8m0."""
    t = torch.rand(shape, device=device, generator=generator(device, seed)) + 0.25
    if kind == "fp32":
        return t
    if kind == "ue4m3":
        return (8 * t).to(torch.float8_e4m3fn)
    return torch.randint(124, 131, shape, device=device, generator=generator(device, seed)).to(torch.uint8).view(
        torch.float8_e8m0fnu
    )  # fmt: skip


def spread(t: Tensor, rows: int, depth: int, shape: tuple[int, int]) -> Tensor:
    """Return the fp64 scale of each element ``shape`` from scales of blocks ``rows`` x ``depth``."""
    if t.dtype == torch.float8_e8m0fnu:
        t = 2.0 ** (t.view(torch.uint8).double() - 127)
    t = t.double()
    return t.repeat_interleave(rows, -2)[..., : shape[0], :].repeat_interleave(depth, -1)[..., : shape[1]]


def exact(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``a @ b.T`` in fp64 and the sum of magnitudes, which bounds what fp32 sums lose."""
    return a @ b.transpose(-2, -1), a.abs() @ b.abs().transpose(-2, -1)


def assert_product(
    got: Tensor, wanted: Tensor, magnitude: Tensor | None = None, what: str = "product", *, codes: Tensor | None = None
) -> None:
    """Check a product: one rounding of its dtype, and sums in fp32; on a GPU, of fp8 `codes`, sums of tensor cores."""
    wanted = wanted.to(got.device)
    if got.dtype == torch.int32:
        if not torch.equal(got.double(), wanted):
            raise CompareError(f"{what}: integers differ by up to {(got.double() - wanted).abs().max()}")
        return
    magnitude = wanted.abs() if magnitude is None else magnitude.to(got.device)
    unit = torch.finfo(got.dtype).eps / 2
    fp8 = codes is not None and codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    lost = FP8_SUMS if fp8 and got.is_cuda else 2.0**-20
    assert_close(got, wanted, c=1.0, scale=1.02 * wanted.abs() + magnitude * lost / unit, what=what)


def packed_for(*kinds: str) -> tuple[str | None, ...]:
    """Return ``packed=`` for operands of these types."""
    return tuple(kind if kind in ("int4", "uint4", "e2m1") else None for kind in kinds)


def swizzled(t: Tensor) -> Tensor:
    """Return scales in blocks of 128 x 4."""
    return pack.swizzle_scales(t)
