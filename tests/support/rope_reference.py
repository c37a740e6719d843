"""Rotary embedding written out plainly in fp64, for tests: no code shared with the library."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

TO_BSHD = {"bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3), "bhsd": (0, 2, 1, 3)}


def to_bshd(x: Tensor, layout: str) -> Tensor:
    """A view of x as [batch, length, heads, head_dim]; three dimensions are packed tokens."""
    return x[None] if x.dim() == 3 else x.permute(*TO_BSHD[layout])


def from_bshd(x: Tensor, layout: str, packed: bool) -> Tensor:
    return x[0] if packed else x.permute(*TO_BSHD[layout])  # each of the permutations is its own inverse


def zigzag(offset: int, count: int, rank: int, size: int) -> int:
    """Global place of the token at `offset` of the `count` that a rank of zigzag context parallelism has."""
    part = count // 2
    whole = list(range(2 * size * part))
    mine = whole[rank * part : (rank + 1) * part] + whole[(2 * size - 1 - rank) * part : (2 * size - rank) * part]
    return mine[offset] if size > 1 else offset


def place_of(batch: int, length: int, options: dict[str, Any]) -> list[Tensor]:
    """Table rows of every token, [batch, length], for each of three position streams."""
    rank, size = options.get("cp_rank", 0), options.get("cp_size", 1)
    positions, starts = options.get("positions"), options.get("cu_seqlens")
    if positions is not None:
        streams = positions if options.get("sections") else positions.expand(3, *positions.shape)
        return [stream.cpu().long().expand(batch, length) for stream in streams]
    if starts is None:
        return [torch.tensor([[zigzag(i, length, rank, size) for i in range(length)]] * batch, dtype=torch.int64)] * 3
    places: list[int] = []
    for begin, end in zip(starts.tolist(), starts.tolist()[1:], strict=False):
        count = (end - begin) // size
        places += [zigzag(i, count, rank, size) for i in range(count)]
    places += range(length - len(places))  # padding after the last sequence
    return [torch.tensor([places], dtype=torch.int64)] * 3


def tables(cos: Tensor, sin: Tensor, batch: int, length: int, half: int, adjacent: bool, options: dict[str, Any]):
    """cos and sin of both elements of each pair: four fp64 tensors [batch, length, 1, half]."""
    sections = options.get("sections")
    stream_of = [0] * half
    if sections and options.get("sections_interleaved"):
        for stream in (1, 2):
            for pair in range(stream, 3 * sections[stream], 3):
                stream_of[pair] = stream
    elif sections:
        stream_of = [stream for stream, size in enumerate(sections) for _ in range(size)]
    rows = place_of(batch, length, options)
    found = []
    for second in (False, True):
        for table in (cos, sin):
            wide = table.detach().cpu().double() * options.get("mscale", 1.0)
            if table.dim() == 4 and not sections:
                wide = wide[:, 0, 0]
            columns = []
            for pair in range(half):
                column = pair
                if table.shape[-1] == 2 * half:
                    column = (2 * pair + second) if adjacent else pair + second * half
                if wide.dim() == 2:
                    columns.append(wide[rows[stream_of[pair]], column])
                else:  # a row for each token already
                    own = wide if wide.dim() == 3 else wide[stream_of[pair]]
                    columns.append(own[..., column].expand(batch, length))
            found.append(torch.stack(columns, -1).unsqueeze(2).to(cos.device))
    return found  # cos0, sin0, cos1, sin1


def rotated(x: Tensor, found: list[Tensor], first: int = 0, adjacent_in: bool = False, adjacent_out: bool = False):
    """x [batch, length, heads, head_dim] with the rotary part from element `first` rotated."""
    cos0, sin0, cos1, sin1 = found
    half = cos0.shape[-1]
    part = x[..., first : first + 2 * half]
    x0, x1 = (part[..., 0::2], part[..., 1::2]) if adjacent_in else (part[..., :half], part[..., half:])
    y0, y1 = x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1
    part = torch.stack((y0, y1), -1).flatten(-2) if adjacent_out else torch.cat((y0, y1), -1)
    return torch.cat((x[..., :first], part, x[..., first + 2 * half :]), -1)


def rope(x: Tensor, cos: Tensor, sin: Tensor, **options: Any) -> Tensor:
    """The public function for one tensor; fp64 in, fp64 out."""
    layout, adjacent = options.get("layout", "bshd"), options.get("interleaved", False)
    first, after = options.get("rotary_start", 0), options.get("output_interleaved", adjacent)
    heads = to_bshd(x, layout)
    half = (options.get("rotary") or x.shape[-1] - first) // 2
    found = tables(cos, sin, heads.shape[0], heads.shape[1], half, after, options)
    return from_bshd(rotated(heads, found, first, adjacent, after), layout, x.dim() == 3)
