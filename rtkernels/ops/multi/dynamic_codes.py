"""Moments of an optimizer as codes, in plain torch: maps of 8 and 4 bits, scales of blocks, random bits."""

from __future__ import annotations

from functools import cache

import numpy
import torch
from torch import Tensor

BLOCKS = {"8bit": 256, "fp8": 256, "4bit": 128}  # elements that share a scale
CODES = {"8bit": torch.uint8, "fp8": torch.float8_e4m3fn, "4bit": torch.int8}  # int8: two codes of 4 bits
KIND_OF = {dtype: kind for kind, dtype in CODES.items()}
FP8_MAX = 448.0


@cache
def dynamic_map(signed: bool, bits: int = 8) -> Tensor:
    """Return the values of all codes in ascending order, fp32 on the CPU: ``bits - 1`` decades up to 1, and 0 and 1.

    The map of bitsandbytes (``create_dynamic_map``): 2^i cells in decade i, twice as many if there are no signs.
    """
    values = [0.0, 1.0]
    for decade in range(bits - 1):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (0 if signed else 1)) + 1, device="cpu", dtype=torch.float32)
        middles = ((edges[:-1] + edges[1:]) / 2).tolist()
        values += [10.0 ** (decade - bits + 2) * middle for middle in middles]
        values += [-(10.0 ** (decade - bits + 2)) * middle for middle in middles] if signed else []
    return torch.tensor(sorted(values), dtype=torch.float32, device="cpu")


@cache
def code_map(kind: str, signed: bool) -> Tensor:
    """Return the values of the codes of a kind. 4 bits without signs: sixteenths up to 1, as TorchAO has them; no 0."""
    if kind == "8bit" or signed:
        return dynamic_map(signed, 8 if kind == "8bit" else 4)
    return torch.arange(1, 17, dtype=torch.float32, device="cpu") / 16


def blocks_of(count: int, kind: str = "8bit") -> int:
    """Return how many scales a tensor of this many elements has."""
    return -(-count // BLOCKS[kind])


def codes_of(count: int, kind: str) -> int:
    """Return how many elements the codes of this many numbers have."""
    return -(-count // 2) if kind == "4bit" else count


def _blocks(x: Tensor, block: int) -> Tensor:
    flat = x.reshape(-1).float()
    return torch.nn.functional.pad(flat, (0, -flat.numel() % block)).reshape(-1, block)


def in_memory(t: Tensor) -> Tensor:
    """Return a view whose row-major order is that of memory: scales belong to elements that are neighbours there."""
    return t.permute(sorted(range(t.dim()), key=t.stride, reverse=True))


def fill_memory(t: Tensor, values: Tensor) -> None:
    """Copy values, in the order of memory, to a tensor."""
    target = in_memory(t)
    target.copy_(values.reshape(target.shape))


def encode(x: Tensor, kind: str, signed: bool) -> tuple[Tensor, Tensor]:
    """Return codes, in the order of x and for 4 bits in one dimension, and the scales of their blocks, fp32."""
    blocks = _blocks(x, BLOCKS[kind])
    amax = blocks.abs().amax(1) if blocks.numel() else blocks.new_zeros(0)
    scale = amax / FP8_MAX if kind == "fp8" else amax
    scale = torch.where(scale < 1e-36, torch.zeros_like(scale), scale)
    scaled = torch.where(scale[:, None] == 0, torch.zeros_like(blocks), blocks / scale[:, None])
    if kind == "fp8":
        codes = scaled.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    else:
        values = code_map(kind, signed).to(x.device)
        codes = torch.bucketize(scaled, (values[:-1].double() + values[1:].double()).div(2).float()).to(torch.uint8)
    codes = codes.reshape(-1)
    if kind == "4bit":
        return (codes[::2] << 4 | codes[1::2])[: codes_of(x.numel(), kind)].view(torch.int8), scale
    return codes[: x.numel()].reshape(x.shape), scale


def decode(codes: Tensor, scale: Tensor, signed: bool, count: int | None = None, block: int | None = None) -> Tensor:
    """Return the fp32 numbers of codes.

    Args:
        codes: As ``encode`` returns them; the dtype says of which kind they are.
        scale: One number per block.
        signed: As for ``encode``.
        count: How many numbers two codes of 4 bits in a byte stand for; the result has one dimension then.
        block: Elements of a block, if others than ``encode`` has.
    """
    kind, flat, shape = KIND_OF[codes.dtype], codes.reshape(-1), codes.shape
    if kind == "4bit":
        flat = flat.view(torch.uint8)
        flat = torch.stack([flat >> 4, flat & 15], 1).reshape(-1)[:count]
        shape = flat.shape
    if kind == "fp8":
        values = flat.float()
    else:
        values = code_map(kind, signed).to(codes.device)[flat.long()]
    blocks = _blocks(values, block or BLOCKS[kind]) * scale[:, None]
    return blocks.reshape(-1)[: flat.numel()].reshape(shape)


def random_bits(seed: int, stream: int, step: int, first: int, count: int) -> Tensor:
    """Return 16 random bits for each of `count` elements from place `first` on: Philox 4x32-10, int32 on the CPU."""
    begin, end = first // 8, -(-(first + count) // 8)
    counter = numpy.arange(begin, end, dtype=numpy.uint64)
    low, mask = numpy.uint64(32), numpy.uint64(0xFFFFFFFF)
    c = [counter & mask, counter >> low, numpy.full_like(counter, step), numpy.full_like(counter, stream)]
    key = [numpy.uint64(seed & 0xFFFFFFFF), numpy.uint64(seed >> 32 & 0xFFFFFFFF)]
    for _ in range(10):
        left, right = c[0] * numpy.uint64(0xD2511F53), c[2] * numpy.uint64(0xCD9E8D57)
        c = [(right >> low) ^ c[1] ^ key[0], right & mask, (left >> low) ^ c[3] ^ key[1], left & mask]
        key = [(key[0] + numpy.uint64(0x9E3779B9)) & mask, (key[1] + numpy.uint64(0xBB67AE85)) & mask]
    words = numpy.stack(c, 1)
    halves = numpy.stack([words & numpy.uint64(0xFFFF), words >> numpy.uint64(16)], 2).reshape(-1)
    return torch.from_numpy(halves[first - 8 * begin :][:count].astype(numpy.int32))


def round_stochastically(x: Tensor, bits: Tensor) -> Tensor:
    """Return fp32 numbers as bfloat16, rounded up where adding 16 random bits carries into the upper half."""
    number = x.contiguous().view(torch.int32)
    rounded = ((number + bits.reshape(x.shape)) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).bfloat16()
