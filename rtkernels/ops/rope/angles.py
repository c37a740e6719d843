"""Which rotation a token gets: validation, kernel arguments (``rope/angles.cuh``) and the same in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.checks import check_dtype, check_same, token
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import as_rows, metadata, vector_bytes
from rtkernels.runtime.operator.declared import Argument, Dense, Meta

# The tail of every kernel's arguments, and of every operator's.
ARGS = (
    "cos:ptr sin:ptr index:ptr table_rows:i64 table_stride:i64 stream_rows:i64 angle_flags:i64 index_kind:i64 "
    "index_count:i64 index_step:i64 section_kind:i64 section_0:i64 section_1:i64 section_2:i64 rotary:i64 cp_rank:i64 "
    "cp_size:i64 mscale:f64"
)
ARGUMENTS = (
    *(Argument(name, None) for name in ("cos", "sin")),
    *(Dense(name, None, optional=True) for name in ("positions", "cu_seqlens")),
    *("str sections", "int cp_rank", "int cp_size", "float mscale"),
)

HALVES, ADJACENT, GATHER, SCATTER = range(4)  # orders of pairs, in and out: rope/head_chunks.cuh
_TABLES_FP32, _FULL, _ADJACENT, _INDEX_INT64, _INVERSE = 1, 2, 4, 8, 16
_BY_PLACE, _BY_TOKEN, _BY_POSITION, _BY_SEQUENCE = range(4)
_SECTION_KINDS = {"": 0, "blocks": 1, "interleaved": 2}

LAYOUTS = {"bshd": (0, 1, 2), "sbhd": (1, 0, 2), "bhsd": (0, 2, 1)}  # where batch, place and head are


class Rotations(NamedTuple):
    """``ARGUMENTS`` of an operator: of its tensors, checks and plans get the metas, references the tensors."""

    cos: Any
    sin: Any
    positions: Any
    cu_seqlens: Any
    sections: str
    cp_rank: int
    cp_size: int
    mscale: float

    @property
    def metas(self) -> Rotations:
        """The same with the metadata of tensors."""
        return Rotations(*map(metadata, self[:4]), *self[4:])

    @property
    def index(self) -> str | int:
        """Name of what tells a token's position; 0 without one."""
        return "positions" if self.positions is not None else 0 if self.cu_seqlens is None else "cu_seqlens"

    def uniform(self) -> tuple[Rotations, dict[str, Any]]:
        """Return tables with uniform rows, as kernels take them, and what is copied for that (``Steps.converted``)."""
        cos, sin = self.cos, self.sin
        step = _row_step(cos.shape, cos.stride)
        if step is not None and step == _row_step(sin.shape, sin.stride):
            return self, {}
        cos, sin = (meta._replace(stride=dense_strides(meta.shape), misaligned=0) for meta in (cos, sin))
        return self._replace(cos=cos, sin=sin), dict.fromkeys(("cos", "sin"), Tensor.contiguous)


class Angles(NamedTuple):
    """Everything a kernel needs to know about the tables except their addresses."""

    table_rows: int
    table_stride: int
    stream_rows: int
    flags: int
    index_kind: int
    index_count: int
    index_step: int
    section_kind: int
    sections: tuple[int, int, int]
    rotary: int
    cp_rank: int
    cp_size: int
    mscale: float

    @property
    def width(self) -> int:
        """Columns of the tables."""
        return self.rotary if self.flags & _FULL else self.rotary // 2

    def arguments(self) -> tuple[int | float, ...]:
        """Return what follows the three addresses."""
        return (*self[:8], *self.sections, *self[9:])

    def per_token(self) -> Angles:
        """Return the same for dense fp32 tables with a row for each token and mscale in them."""
        flags = self.flags & ~_INDEX_INT64 | _TABLES_FP32
        return Angles(2**62, self.width, 0, flags, _BY_TOKEN, 0, 0, 0, (0, 0, 0), self.rotary, 0, 1, 1.0)


def spell_sections(sections: Any, interleaved: bool) -> str:
    """Return sections as operators take them: ``"blocks:16,24,24"``, or ``""`` for None."""
    if sections is None:
        return ""
    sizes = tuple(sections)
    if len(sizes) != 3 or any(not isinstance(size, int) or size < 0 for size in sizes):
        raise ArgumentError(f"sections is {sizes}; expected three sizes, one for each position stream")
    return ("interleaved:" if interleaved else "blocks:") + ",".join(map(str, sizes))


def order_of_pairs(interleaved: bool, output_interleaved: bool | None) -> int:
    """Return the order of pairs in and out; None means that it does not change."""
    if output_interleaved is None or bool(output_interleaved) == bool(interleaved):
        return ADJACENT if interleaved else HALVES
    return GATHER if interleaved else SCATTER


def check_rotary(rotary: int, head_dim: int) -> int:
    """Return the number of rotated elements of a head (0 means all), or raise an ArgumentError."""
    rotary = rotary or head_dim
    if rotary % 2 or not 0 < rotary <= head_dim:
        raise ArgumentError(f"rotary is {rotary}; expected an even number from 2 to the head size, {head_dim}")
    return rotary


class Rotated(NamedTuple):
    """What is known of a tensor that is to be rotated.

    Attributes:
        dtype: Tables have it or float32.
        device: That of the tables.
        batch: Sequences, of `length` tokens each (one for packed tokens).
        length: Likewise.
        packed: It has no batch dimension.
        rotary: Rotated elements of a head.
        adjacent: The forward leaves pairs as neighbours, not as halves.
        inverse: The kernel applies the adjoint.
    """

    dtype: torch.dtype
    device: int
    batch: int
    length: int
    packed: bool
    rotary: int
    adjacent: bool
    inverse: bool


def check(given: Rotations, of: Rotated) -> Angles:
    """Raise an ArgumentError for tables and positions that do not fit what is rotated; return what kernels need."""
    cos, sin, positions, cu_seqlens, sections, cp_rank, cp_size, mscale = given
    rotary, length = of.rotary, of.length
    token("cos", cos[0], (of.dtype, torch.float32))
    check_same("sin", sin[0], cos[0], "dtype", of="cos")
    check_same("sin", sin[1], cos[1], "shape", of="cos")
    for name, meta in {"cos": cos, "sin": sin, "positions": positions, "cu_seqlens": cu_seqlens}.items():
        if meta is not None:  # the operator would say "q" for what callers know as x
            check_same(name, meta[3], of.device, "device index")
    kind, sizes = _parse_sections(sections, rotary)
    if not 0 <= cp_rank < cp_size:
        raise ArgumentError(f"cp_rank is {cp_rank} and cp_size {cp_size}; expected 0 <= cp_rank < cp_size")
    rows, stream_rows, index_kind = _check_tables(given, of, kind)
    flags = (cos[0] == torch.float32) * _TABLES_FP32 | (cos[1][-1] == rotary) * _FULL | of.adjacent * _ADJACENT
    flags |= of.inverse * _INVERSE
    count = step = 0
    if positions is not None:
        index_kind, flags = _BY_POSITION, flags | (positions[0] == torch.int64) * _INDEX_INT64
        count, step = _check_positions(given, of, kind)
    elif cu_seqlens is not None:
        index_kind, flags = _BY_SEQUENCE, flags | (cu_seqlens[0] == torch.int64) * _INDEX_INT64
        count = _check_sequences(cu_seqlens, of)
    if kind and positions is None and not stream_rows:
        raise ArgumentError("sections need positions of shape [3, ...], or cos of shape [3, batch, length, n]")
    if cp_size > 1 and index_kind not in (_BY_PLACE, _BY_SEQUENCE):
        raise ArgumentError("cp_size applies to positions that the op works out itself; expected 1 here")
    if index_kind == _BY_PLACE:
        if cp_size > 1 and length % 2:
            raise ArgumentError(f"the length is {length}; expected an even one with cp_size > 1")
        if (stream_rows or rows) < length * cp_size:
            raise ArgumentError(f"cos has {rows} rows; expected at least {length * cp_size}, one for each position")
    stride = _row_step(cos[1], cos[2])
    return Angles(
        rows, -1 if stride is None or stride != _row_step(sin[1], sin[2]) else stride, stream_rows, flags, index_kind,
        count, step, kind, sizes, rotary, cp_rank, cp_size, mscale,
    )  # fmt: skip


def _check_tables(given: Rotations, of: Rotated, kind: int) -> tuple[int, int, int]:
    """Return how many rows the tables have, and each stream of them, and how a token finds its own."""
    shape, (batch, length, rotary) = tuple(given.cos[1]), (of.batch, of.length, of.rotary)
    if len(shape) not in (2, 3, 4) or shape[-1] not in (rotary // 2, rotary):
        raise ArgumentError(
            f"cos has shape {shape}; expected [positions, n] or [batch, length, n], where n is {rotary // 2} (one for "
            f"each pair) or {rotary} (one for each rotated element)"
        )
    if len(shape) == 2 or (len(shape) == 4 and not kind and shape[1:3] == (1, 1)):
        return shape[0], 0, _BY_PLACE
    wanted = (3,) * bool(kind) + (batch, length)
    if shape[:-1] == (*wanted[:-2], 1, length):
        wanted = shape[:-1]
    if shape[:-1] != wanted or given.positions is not None or given.cu_seqlens is not None:
        raise ArgumentError(
            f"cos has shape {shape}; expected {(*wanted, shape[-1])}, a row for each token, and then neither "
            f"positions nor cu_seqlens"
        )
    per_stream = wanted[-2] * length
    by = _BY_TOKEN if wanted[-2] == batch else _BY_PLACE
    return (3 * per_stream, per_stream, by) if kind else (per_stream, 0, by)


def _check_positions(given: Rotations, of: Rotated, kind: int) -> tuple[int, int]:
    """Return how many positions there are (of one stream), and from one sequence's to the next."""
    if given.cu_seqlens is not None:
        raise ArgumentError("got positions and cu_seqlens; expected one of them")
    token_shape = (of.length,) if of.packed else (of.batch, of.length)
    streams = (3,) * bool(kind)
    check_dtype("positions", given.positions[0])
    got = tuple(given.positions[1])
    if got not in ((*streams, *token_shape), (*streams, of.length)):
        raise ArgumentError(f"positions has shape {got}; expected {(*streams, *token_shape)} or one row for all")
    shared = got == (*streams, of.length) and of.batch > 1
    return (of.length, 0) if shared else (of.batch * of.length, of.length)


def _check_sequences(cu_seqlens: Meta, of: Rotated) -> int:
    """Return how many bounds of sequences there are."""
    check_dtype("cu_seqlens", cu_seqlens[0])
    if not of.packed or len(cu_seqlens[1]) != 1 or cu_seqlens[1][0] < 1:
        raise ArgumentError(
            f"cu_seqlens has shape {tuple(cu_seqlens[1])}; expected [sequences + 1], and tokens without a batch "
            f"dimension"
        )
    return cu_seqlens[1][0]


def _parse_sections(sections: str, rotary: int) -> tuple[int, tuple[int, int, int]]:
    if not sections:
        return 0, (0, 0, 0)
    kind, _, sizes = sections.partition(":")
    first, second, third = map(int, sizes.split(","))
    if first + second + third != rotary // 2:
        raise ArgumentError(
            f"sections is {(first, second, third)}; expected a sum of {rotary // 2}, one pair of elements for each"
        )
    return _SECTION_KINDS[kind], (first, second, third)


def _row_step(shape: Any, stride: Any) -> int | None:
    """Return the distance between rows if all leading dimensions are one evenly spaced one, else None."""
    if 0 in shape:
        return shape[-1]
    if shape[-1] > 1 and stride[-1] != 1:
        return None
    step, size = None, 1
    for n, s in zip(reversed(shape[:-1]), reversed(stride[:-1]), strict=True):
        if n == 1:
            continue
        if step is None:
            step = s
        elif s != step * size:
            return None
        size *= n
    return shape[-1] if step is None else step


def readable(angles: Angles, pairs: int, vec: int, align: int, itemsize: int) -> bool:
    """Return True if kernels can read runs of `vec` table entries, or half of that where pairs stay neighbours.

    Args:
        angles: The stride must be known.
        pairs: Order of pairs.
        vec: Elements in 16 bytes of the rotated tensor.
        align: Addresses of both tables, or-ed.
        itemsize: Bytes of a table entry.
    """
    full = angles.flags & _FULL
    if angles.section_kind or (full and pairs in (GATHER, SCATTER) and angles.flags & _ADJACENT):
        return False
    run = vec // 2 if pairs == ADJACENT and not full else vec
    wanted = min(run * itemsize, 16)
    return vector_bytes(align, angles.table_stride * itemsize, limit=wanted) == wanted


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def reference_tables(
    given: Rotations, angles: Angles, batch: int, length: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return cos and sin of the first, then of the second elements of pairs: fp32 ``[batch, length, rotary / 2]``."""
    cos, sin = given.cos, given.sin
    half, device = angles.rotary // 2, cos.device
    pairs = torch.arange(half, dtype=torch.int64, device=device)
    streams = torch.zeros_like(pairs)
    a, b, c = angles.sections  # their sum is the number of pairs
    if angles.section_kind == 1:
        streams = (pairs >= a).long() + (pairs >= a + b).long()
    elif angles.section_kind == 2:
        own = pairs % 3
        streams = torch.where(((own == 1) & (pairs < 3 * b)) | ((own == 2) & (pairs < 3 * c)), own, 0)
    rows = torch.stack([_rows(given.positions, given.cu_seqlens, angles, batch, length, s, device) for s in range(3)])
    limit = angles.stream_rows or angles.table_rows
    rows = rows[streams].permute(1, 2, 0)  # batch, length, pair
    inside = (rows >= 0) & (rows < limit)
    rows = rows.clamp(0, max(limit - 1, 0)) + streams * angles.stream_rows
    full, adjacent = bool(angles.flags & _FULL), bool(angles.flags & _ADJACENT)
    first = 2 * pairs if full and adjacent else pairs
    second = first + ((1 if adjacent else half) if full else 0)

    def entries(table: Tensor, columns: Tensor) -> Tensor:
        table = as_rows(table).float()
        return torch.where(inside, table[rows, columns] * angles.mscale, torch.nan)

    return entries(cos, first), entries(sin, first), entries(cos, second), entries(sin, second)


def _rows(
    positions: Tensor | None, cu_seqlens: Tensor | None, angles: Angles, batch: int, length: int, stream: int,
    device: torch.device,
) -> Tensor:  # fmt: skip
    places = torch.arange(length, dtype=torch.int64, device=device).expand(batch, length)

    def zigzag(offset: Tensor, count: Tensor | int) -> Tensor:
        if angles.cp_size == 1:
            return offset
        half = count // 2
        later = offset - half + (2 * angles.cp_size - 1 - angles.cp_rank) * half
        return torch.where(offset < half, offset + angles.cp_rank * half, later)

    if angles.index_kind == _BY_PLACE:
        return zigzag(places, length)
    if angles.index_kind == _BY_TOKEN:
        return places + length * torch.arange(batch, dtype=torch.int64, device=device).unsqueeze(-1)
    if angles.index_kind == _BY_POSITION:
        index = positions[stream] if angles.section_kind else positions
        return index.long().expand(batch, length)
    bounds = cu_seqlens.long() // angles.cp_size
    sequence = (torch.searchsorted(bounds, places.contiguous(), right=True) - 1).clamp_min(0)
    start, end = bounds[sequence], bounds[(sequence + 1).clamp_max(len(bounds) - 1)]
    return zigzag(places - start, end - start)


def rotate(x: Tensor, tables: tuple[Tensor, ...], first: int, pairs: int, inverse: bool) -> Tensor:
    """Return x ``[batch, length, heads, head_dim]`` (fp32) with the pairs that begin at element `first` rotated.

    Args:
        x: fp32.
        tables: Of ``reference_tables``.
        first: Where the rotary part of a head begins.
        pairs: Order of pairs of the forward.
        inverse: Apply the adjoint instead.
    """
    cos0, sin0, cos1, sin1 = (t.unsqueeze(2) for t in tables)
    half = cos0.shape[-1]
    part = x[..., first : first + 2 * half]
    halves_in, halves_out = pairs in (HALVES, SCATTER), pairs in (HALVES, GATHER)
    if inverse:
        halves_in, halves_out = halves_out, halves_in
    x0, x1 = (part[..., :half], part[..., half:]) if halves_in else (part[..., ::2], part[..., 1::2])
    if inverse:
        y0, y1 = x0 * cos0 + x1 * sin1, x1 * cos1 - x0 * sin0
    else:
        y0, y1 = x0 * cos0 - x1 * sin0, x1 * cos1 + x0 * sin1
    part = torch.cat((y0, y1), -1) if halves_out else torch.stack((y0, y1), -1).flatten(-2)
    return torch.cat((x[..., :first], part, x[..., first + 2 * half :]), -1)
