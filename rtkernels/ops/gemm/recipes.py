"""From a recipe and the shape of a scale tensor to ``Scales``: what one scale covers, and where it lies."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.product import Scales
from rtkernels.ops.quant.pack import swizzled_size
from rtkernels.runtime.operator.declared import Meta

# What a scale of a and one of b cover: "tensor", "row", "<rows>x<elements of k>", "tile" (by the shape alone), a block
# format, or "auto" (by shape and dtype).
RECIPES = {
    "auto": ("auto", "auto"),
    "none": (None, None),
    "tensor": ("tensor", "tensor"),
    "row": ("row", "row"),
    "block_1x128_128x128": ("1x128", "128x128"),
    "block_1x128_1x128": ("1x128", "1x128"),
    "block_128x128_128x128": ("128x128", "128x128"),
    "tile": ("tile", "tile"),
    "mx32": ("mx32", "mx32"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
BLOCK_FORMATS = {
    "mx32": (32, "e8m0", (torch.float8_e8m0fnu, torch.uint8)),
    "nvfp4": (16, "ue4m3", (torch.float8_e4m3fn, torch.uint8)),
}
_BY_DTYPE = {torch.float8_e8m0fnu: "mx32", torch.float8_e4m3fn: "nvfp4"}


def kinds_of(recipe: str, scale_a: Meta | None, scale_b: Meta | None) -> tuple[str | None, str | None]:
    """Return what scales of a and of b cover, "auto" resolved as far as dtypes tell."""
    if recipe not in RECIPES:
        raise ArgumentError(f"recipe is {recipe!r}; expected one of {', '.join(RECIPES)}")
    kinds = []
    for name, kind, meta in zip(("scale_a", "scale_b"), RECIPES[recipe], (scale_a, scale_b), strict=True):
        if kind is None and meta is not None:
            raise ArgumentError(f"{name} is given; expected None for recipe 'none'")
        if kind == "auto":
            kind = None if meta is None else _BY_DTYPE.get(meta.dtype, "auto")
            if meta is not None and meta.dtype == torch.uint8:
                raise ArgumentError(f"{name} has dtype uint8, which may be e8m0 or e4m3; pass recipe 'mx32' or 'nvfp4'")
        kinds.append(kind)
    return tuple(kinds)


def scales_of(
    name: str, meta: Meta, kind: str, rows: int, k: int, *, lead: Sequence[int] = (), flipped: bool = False,
    groups: int = 0,
) -> Scales:  # fmt: skip
    """Return how the scales of an operand ``[rows, k]`` lie, or raise an ArgumentError.

    Args:
        name: "scale_a" or "scale_b", for messages.
        meta: The tensor's.
        kind: One of a pair of ``RECIPES``.
        rows: Rows of the operand (of one group).
        k: Elements of a row.
        lead: Dimensions of the operand before k, which the scales may have as well instead of one of `rows`.
        flipped: The operand came as ``[k, rows]``, and so do its scales.
        groups: How many operands lie one behind the other, 0 for one without such a dimension.
    """
    if kind in BLOCK_FORMATS:
        return _block_format(name, meta, kind, rows, k, lead, groups, flipped)
    if meta.dtype != torch.float32:
        raise ArgumentError(f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected float32")
    grid = _grid(name, meta, kind, rows, k, lead, flipped, groups)
    if grid is None:
        raise ArgumentError(_message(name, meta, kind, rows, k, flipped, groups))
    group_pitch, (count, row_pitch), (blocks, depth_pitch) = grid
    cover = _cover(kind, count, blocks, rows, k)
    if cover is None:
        raise ArgumentError(_message(name, meta, kind, rows, k, flipped, groups))
    return Scales(
        *cover, row_pitch * (cover[0] > 0), depth_pitch * (cover[1] > 0), group_pitch=group_pitch,
        aligned=_aligned(meta, row_pitch, depth_pitch, group_pitch),
    )  # fmt: skip


def _grid(
    name: str, meta: Meta, kind: str, rows: int, k: int, lead: Sequence[int], flipped: bool, groups: int
) -> Any:  # fmt: skip
    """Return ``(group pitch, (scales along rows, pitch), (scales along k, pitch))``, or None for a wrong shape."""
    shape, stride, group_pitch = tuple(meta.shape), tuple(meta.stride), 0
    if meta.numel() == 1:
        return 0, (1, 0), (1, 0)
    if groups:
        if not shape or shape[0] != groups:
            return None
        group_pitch, shape, stride = stride[0], shape[1:], stride[1:]
        if not shape:
            return group_pitch, (1, 0), (1, 0)
    lead = tuple(lead)
    if len(lead) > 1 and shape[: len(lead)] == lead and len(shape) - len(lead) <= 1:
        pitch = collapsed(lead, stride[: len(lead)])
        if pitch is None:
            raise ArgumentError(f"{name} has strides {tuple(meta.stride)}; expected a contiguous one")
        shape, stride = (rows, *shape[len(lead) :]), (pitch, *stride[len(lead) :])
    if len(shape) == 1:
        return group_pitch, (shape[0], stride[0]), (1, 0)
    if len(shape) != 2:
        return None
    both = [(shape[0], stride[0]), (shape[1], stride[1])]
    if kind in ("row", "auto") and sorted(shape) == sorted((1, rows)) and rows != 1:  # [rows, 1] or [1, rows]
        if kind == "auto" and rows == -(-k // 128) and flipped == (shape[1] == 1):
            raise ArgumentError(f"{name} has shape {shape}: scales of rows or of blocks of 128; pass the recipe")
        return group_pitch, *(both if shape[1] == 1 else both[::-1])
    if flipped:
        both.reverse()
    return group_pitch, *both


def _cover(kind: str, count: int, blocks: int, rows: int, k: int) -> tuple[int, int] | None:
    """Return how many rows and elements of k a scale covers (0: all), or None for a wrong number of scales."""
    if kind == "tensor":
        return (0, 0) if count == blocks == 1 else None
    if kind == "row":
        return (1, 0) if count == rows and blocks == 1 else None
    if kind in ("1x128", "128x128"):
        tall = int(kind.split("x")[0])
        return (tall, 128) if count == -(-rows // tall) and blocks == -(-k // 128) else None
    across = _share(rows, count, kind == "auto")
    along = _share(k, blocks, kind == "auto")
    if across is None or along is None:
        return None
    if count == 1 and rows > 1:
        across = 128 if kind == "auto" and blocks > 1 and rows <= 128 else 0
    return across, 0 if blocks == 1 else along


def _share(size: int, count: int, auto: bool) -> int | None:
    """Return how many of `size` one of `count` scales covers."""
    if count == size:
        return 1
    if auto and count == -(-size // 128):
        return 128
    return size // count if count and size % count == 0 else None


def _block_format(name, meta, kind, rows, k, lead, groups, flipped) -> Scales:
    depth, token, dtypes = BLOCK_FORMATS[kind]
    if meta.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ArgumentError(
            f"{name} has dtype {str(meta.dtype).removeprefix('torch.')}; expected {wanted} for {kind!r}"
        )
    blocks = -(-k // depth)
    if meta.dim() == (2 if groups else 1) and meta.numel() == max(groups, 1) * swizzled_size(rows, blocks):
        if meta.stride[-1] != 1:
            raise ArgumentError(f"{name} has strides {tuple(meta.stride)}; expected contiguous 128 x 4 blocks")
        group_pitch = meta.stride[0] if groups else 0
        return Scales(1, depth, 0, 0, token, True, _aligned(meta, group_pitch, 0, 0), group_pitch)
    grid = _grid(name, meta, kind, rows, k, lead, flipped, groups)
    if grid is None or (grid[1][0], grid[2][0]) != (rows, blocks):
        shape = [groups] * bool(groups) + [rows, blocks]
        raise ArgumentError(
            f"{name} has shape {tuple(meta.shape)}; expected {tuple(shape)} for recipe {kind!r}, or one dimension of "
            f"{swizzled_size(rows, blocks)} bytes in blocks of 128 x 4"
        )
    group_pitch, (_, row_pitch), (_, depth_pitch) = grid
    return Scales(
        1, depth, row_pitch, depth_pitch, token, group_pitch=group_pitch,
        aligned=_aligned(meta, row_pitch, depth_pitch, group_pitch),
    )  # fmt: skip


def _aligned(meta: Meta, row_pitch: int, depth_pitch: int, group_pitch: int) -> bool:
    size = meta.dtype.itemsize
    return not (meta.misaligned | (max(row_pitch, depth_pitch) * size) % 16 | group_pitch * size % 16)


def _message(name: str, meta: Meta, kind: str, rows: int, k: int, flipped: bool, groups: int) -> str:
    wanted = {
        "tensor": "one number",
        "row": f"[{rows}]",
        "1x128": f"[{rows}, {-(-k // 128)}]",
        "128x128": f"[{-(-rows // 128)}, {-(-k // 128)}]",
        "tile": f"[{rows} / q, {k} / q] with whole numbers",
        "auto": f"one number, [{rows}], or [{rows} / q, {k} / q]",
    }[kind]
    if flipped and kind not in ("tensor", "row"):
        wanted += ", transposed as b is,"
    if groups:
        wanted += f", for each of {groups} groups"
    return f"{name} has shape {tuple(meta.shape)}; expected {wanted} for an operand of {rows} rows and k = {k}"


def collapsed(shape: Sequence[int], stride: Sequence[int]) -> int | None:
    """Return the step through all of these dimensions as one, None if there is no single one."""
    left = [(size, step) for size, step in zip(shape, stride, strict=True) if size != 1]
    for (_, upper), (size, lower) in pairwise(left):
        if upper != size * lower:
            return None
    return left[-1][1] if left else 1
