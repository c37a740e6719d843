"""Rotation of q and k heads as operators: kernels, plans, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import LAYOUTS, Angles
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import divisor, group_threads, metadata, nothing, vector_bytes
from rtkernels.runtime.operator.declared import InPlace, Meta, Operator, UnitStride, misaligned
from rtkernels.runtime.operator.plan import Memory, Offset, Step, Steps
from rtkernels.runtime.operator.sharding import Way, shard

UNIT = "rope/rope.cu"
TYPES = ("bf16", "fp16", "fp32")
HEADS_PER_GROUP = 4  # kRopeHeads
UNIT_LIMIT = 2**31 - 1024  # (token, head group) pairs that one launch can count, and a block may pass the end
_BLOCK = 128
_TOKEN_HEADS = 8  # of a thread of rope_token, or fewer
_TOKEN_THREADS = 192  # of its blocks, or fewer

_ROPE_ARGS = (
    "q:ptr k:ptr q_out:ptr k_out:ptr tokens:i64 length:i64 q_heads:i64 k_heads:i64 slots:i64 lane_bits:i64 first:i64 "
    "spare:i64 pairs:i64 q_batch:i64 q_place:i64 q_head:i64 k_batch:i64 k_place:i64 k_head:i64 q_out_batch:i64 "
    "q_out_place:i64 q_out_head:i64 k_out_batch:i64 k_out_place:i64 k_out_head:i64 by_slots:i64 by_length:i64 "
    + angles_of.ARGS
)
ROPE = Kernel(
    UNIT, "rope", template="T PAIRS", max_registers=112,
    args=_ROPE_ARGS, variants=[(t, pairs) for t in TYPES for pairs in (angles_of.GATHER, angles_of.SCATTER)],
)  # fmt: skip
ROPE_TOKEN = Kernel(
    UNIT, "rope_token", template="T", max_registers=64,
    args="q:ptr k:ptr q_out:ptr k_out:ptr length:i64 q_heads:i64 k_heads:i64 q_slots:i64 k_slots:i64 groups:i64 "
    "lane_bits:i64 begin:i64 width:i64 first:i64 pairs:i64 q_batch:i64 q_place:i64 q_head:i64 k_batch:i64 k_place:i64 "
    "k_head:i64 q_out_batch:i64 q_out_place:i64 q_out_head:i64 k_out_batch:i64 k_out_place:i64 k_out_head:i64 "
    "by_length:i64 " + angles_of.ARGS,
    variants=[(t,) for t in TYPES],
)  # fmt: skip
ROPE_ANY = Kernel(UNIT, "rope_any", template="T", args=_ROPE_ARGS, variants=[(t,) for t in TYPES], max_registers=56)
TABLES = Kernel(
    UNIT, "rope_tables", template="T", max_registers=40,
    args="cos_out:ptr sin_out:ptr tokens:i64 length:i64 width:i64 " + angles_of.ARGS, variants=[(t,) for t in TYPES],
)  # fmt: skip


# ---- heads in memory ------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """A tensor of heads, whatever its layout. Strides in elements."""

    batch: int
    length: int
    heads: int
    head_dim: int
    batch_stride: int
    place_stride: int
    head_stride: int

    @property
    def strides(self) -> tuple[int, int, int]:
        return self[4:]


def heads_of(name: str, meta: Meta, layout: str) -> Heads:
    """Return the tensor as ``[batch, length, heads, head_dim]``; three dimensions are packed tokens."""
    shape, stride = meta[1:3]
    if layout not in LAYOUTS:
        raise ArgumentError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    if len(shape) == 3:
        return Heads(1, *shape, 0, *stride[:2])
    if len(shape) != 4:
        raise ArgumentError(f"{name} has shape {tuple(shape)}; expected 4 dimensions ({layout}), or 3 (packed tokens)")
    order = LAYOUTS[layout]
    return Heads(*(shape[i] for i in order), shape[3], *(stride[i] for i in order))


def as_heads(t: Tensor, layout: str) -> Tensor:
    """Return a view ``[batch, length, heads, head_dim]``."""
    return t.unsqueeze(0) if t.dim() == 3 else t.permute(*LAYOUTS[layout], 3)


def from_heads(t: Tensor, layout: str, packed: bool) -> Tensor:
    """Return such a view as a dense tensor in a layout."""
    if packed:
        return t.squeeze(0).contiguous()
    return t.permute(*(LAYOUTS[layout].index(i) for i in range(3)), 3).contiguous()


def shape_in(layout: str, heads: Heads, packed: bool) -> tuple[int, ...]:
    """Return the shape of a dense tensor of these heads in a layout."""
    if packed:
        return (heads.length, heads.heads, heads.head_dim)
    shape = [0, 0, 0, heads.head_dim]
    for i, size in zip(LAYOUTS[layout], heads[:3], strict=True):
        shape[i] = size
    return tuple(shape)


def lanes_of(head_dim: int, rotary: int, first: int, vec: int, *, copies: bool = True) -> int | None:
    """Return how many lanes share a head in 16-byte chunks (``HeadChunks``); None if they cannot."""
    spare = head_dim - rotary
    if rotary // 2 % vec or first % vec or spare % (2 * vec):
        return None
    lanes = rotary // 2 // vec + (spare // 2 // vec if copies else 0)
    return group_threads(lanes, 32) if lanes <= 32 else None


def chunk_lanes(head_dim: int, rotary: int, first: int, vec: int) -> int | None:
    """Return how many lanes share a head, a 16-byte chunk each; None if they cannot."""
    if rotary // 2 % vec or first % vec or head_dim % vec or head_dim // vec > 32:
        return None
    return group_threads(head_dim // vec, 32)


class Tables(NamedTuple):
    """How to read the tables: as they are, or from entries gathered for each token first.

    Attributes:
        tensors: Names of cos, sin and index as the main kernel takes them.
        angles: The numbers that follow them.
        steps: What gathers.
        scratch: Where to.
    """

    tensors: tuple[str | int | Offset, ...]
    angles: tuple[int | float, ...]
    steps: tuple[Step, ...] = ()
    scratch: dict[str, Memory] = {}  # noqa: RUF012  never changed


def plain_tables(found: Angles, index: str | int) -> Tables:
    """Return tables read as they are."""
    return Tables(("cos", "sin", index), found.arguments())


def plan_tables(
    found: Angles, t: str, cos: Meta, sin: Meta, index: str | int, pairs: int, vec: int, tokens: int, length: int,
    device: int,
) -> Tables | None:  # fmt: skip
    """Return the way to tables that kernels can read `vec` entries at a time; None if there is none."""
    if angles_of.readable(found, pairs, vec, misaligned(cos, sin), cos.dtype.itemsize):
        return plain_tables(found, index)
    width, per_token = found.width, found.per_token()
    if pairs in (angles_of.GATHER, angles_of.SCATTER) and not angles_of.readable(per_token, pairs, vec, 0, 4):
        return None  # full tables in an order that consecutive entries cannot have
    block = min(256, -(-width // 32) * 32)
    launch = TABLES.bind((t,), device, (-(-width // block), min(tokens, 65535)), block)
    first = found._replace(flags=found.flags & ~angles_of._INVERSE).arguments()
    gathered = "table", Offset("table", 4 * tokens * width)
    step = Step(launch, *gathered, tokens, length, width, "cos", "sin", index, *first)
    scratch = {"table": Memory((2, tokens, width), torch.float32)}
    return Tables((*gathered, 0), per_token.arguments(), (step,), scratch)


def _check(q, k, layout, out_layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, *options):
    """Raise an ArgumentError for arguments that do not fit together; return Heads of q and k, rotary and Angles."""
    token("x", q[0])
    heads = heads_of("x", q, layout)
    of_k = None
    if out_layout not in LAYOUTS:
        raise ArgumentError(f"output_layout is {out_layout!r}; expected one of {', '.join(LAYOUTS)}")
    if k is not None:
        check_same("k", k[0], q[0], "dtype")
        check_same("k", k[3], q[3], "device index")
        of_k = heads_of("k", k, layout)
        if len(k[1]) != len(q[1]) or of_k[:2] != heads[:2] or of_k.head_dim != heads.head_dim:
            raise ArgumentError(
                f"k has shape {tuple(k[1])}; expected that of x, {tuple(q[1])}, except for the number of heads"
            )
    rotary = angles_of.check_rotary(rotary, heads.head_dim - first)
    found = angles_of.check(
        cos, sin, positions, cu_seqlens, *options, dtype=q[0], device=q[3], batch=heads.batch, length=heads.length,
        packed=len(q[1]) == 3, rotary=rotary, adjacent=pairs in (angles_of.ADJACENT, angles_of.SCATTER),
        inverse=inverse,
    )  # fmt: skip
    return heads, of_k, rotary, found


def _plan(
    q: Meta, k: Meta | None, layout: str, out_layout: str, first: int, rotary: int, pairs: int, inverse: bool,
    cos: Meta, sin: Meta, positions: Meta | None, cu_seqlens: Meta | None, sections: str, cp_rank: int, cp_size: int,
    mscale: float, device: int, in_place: bool = False,
) -> Steps:  # fmt: skip
    cos, sin, converted = angles_of.uniform_tables(cos, sin)
    heads, of_k, rotary, found = _check(
        q, k, layout, out_layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, sections, cp_rank,
        cp_size, mscale,
    )  # fmt: skip
    packed, index = q.dim() == 3, angles_of.index_of(positions, cu_seqlens)
    tokens, total = heads.batch * heads.length, heads.heads + (of_k.heads if of_k else 0)
    t, size = q.token, q.dtype.itemsize
    vec = 16 // size
    strides = [*heads.strides, *(of_k.strides if of_k else (0, 0, 0))]
    if in_place:
        out, results = strides, ("q", "k")
    else:
        out, results = [], ("q_out", "k_out")
        for h in (heads, of_k):
            shape = None if h is None else shape_in(out_layout, h, packed)
            view = None if shape is None else heads_of("", (q.dtype, shape, dense_strides(shape)), out_layout)
            out += (0, 0, 0) if view is None else view.strides
    order = pairs if not inverse else (pairs ^ 1 if pairs in (angles_of.GATHER, angles_of.SCATTER) else pairs)
    reorders = order in (angles_of.GATHER, angles_of.SCATTER)
    begin, width = (first, rotary) if in_place else (0, heads.head_dim)
    if reorders:
        lanes = lanes_of(heads.head_dim, rotary, first, vec, copies=not in_place)
    else:
        lanes = chunk_lanes(width, rotary, first, vec)
    aligned16 = vector_bytes(misaligned(q, k), *(s * size for s in (*strides, *out))) == 16
    tables = None
    if lanes is not None and aligned16:
        tables = plan_tables(found, t, cos, sin, index, order, vec, tokens, heads.length, device)
    if tables is not None and not reorders:
        _limit(tokens, total, 1)
        counts = (heads.heads, total - heads.heads)
        slots = [-(-n // _TOKEN_HEADS) for n in counts]
        grid = -(-sum(slots) // (_TOKEN_THREADS // lanes))
        groups = -(-sum(slots) // grid)
        threads = -(-groups * lanes // 32) * 32
        per_slot = max(-(-n // s) for n, s in zip(counts, slots, strict=True) if s)
        launch = ROPE_TOKEN.bind((t,), device, (tokens, grid), threads, 16 * per_slot * threads)
        sizes = (heads.length, *counts, *slots, groups, lanes.bit_length() - 1, begin, width, first, order, *strides,
                 *out, divisor(heads.length))  # fmt: skip
    else:
        spare = width - rotary
        if tables is not None:
            slots, kernel, variant, bits = -(-total // HEADS_PER_GROUP), ROPE, (t, order), lanes.bit_length() - 1
            spare //= vec
        else:
            if in_place and pairs in (angles_of.GATHER, angles_of.SCATTER):
                return Steps(instead=_by_copy)  # a lane would overwrite what another one has not read
            tables = plain_tables(found, index)
            slots, kernel, variant, bits = total, ROPE_ANY, (t,), 5
        _limit(tokens, total, slots)
        launch = kernel.bind(variant, device, -(-tokens * slots // (_BLOCK >> bits)), _BLOCK)
        sizes = (tokens, heads.length, heads.heads, total - heads.heads, slots, bits, first, spare, order, *strides,
                 *out, divisor(slots), divisor(heads.length))  # fmt: skip
    step = Step(launch, "q", "k", *results, *sizes, *tables.tensors, *tables.angles)
    return Steps(*tables.steps, step, scratch=tables.scratch, converted=converted)


def _limit(tokens: int, heads: int, units: int) -> None:
    if tokens * units > UNIT_LIMIT:
        raise ArgumentError(f"x has {tokens} tokens of {heads} heads; expected at most {UNIT_LIMIT // units} tokens")


def _plan_in_place(q: Meta, k: Meta | None, layout: str, *values: Any) -> Steps:
    if any(m is not None and m.shape[-1] > 1 and m.stride[-1] != 1 for m in (q, k)):
        return Steps(instead=_by_copy)
    return _plan(q, k, layout, layout, *values, in_place=True)


def _by_copy(q: Tensor, k: Tensor | None, layout: str, *rest: Any) -> None:
    y, ky = FORWARD.launch(q, k, layout, layout, *rest)
    q.copy_(y)
    if k is not None:
        k.copy_(ky)


def _check_in_place(q: Meta, k: Meta | None, layout: str, *values: Any) -> None:
    _check(q, k, layout, layout, *values)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference_fwd(q, k, layout, out_layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, *options):
    heads, _, rotary, found = _check(
        metadata(q), metadata(k), layout, out_layout, first, rotary, pairs, inverse, metadata(cos), metadata(sin),
        metadata(positions), metadata(cu_seqlens), *options,
    )  # fmt: skip
    tables = angles_of.reference_tables(cos, sin, positions, cu_seqlens, found, heads.batch, heads.length)

    def rotated(t: Tensor) -> Tensor:
        given = as_heads(t, layout)
        y = angles_of.rotate(given.float(), tables, first, pairs, inverse).to(t.dtype)
        # What is not rotated keeps its bits: a conversion may change those of a NaN.
        y[..., :first], y[..., first + rotary :] = given[..., :first], given[..., first + rotary :]
        return from_heads(y, out_layout, t.dim() == 3)

    return rotated(q), nothing(q) if k is None else rotated(k)


def _reference_in_place(q, k, layout, *args) -> None:
    y, ky = _reference_fwd(q, k, layout, layout, *args)
    q.copy_(y)
    if k is not None:
        k.copy_(ky)


def _outputs(q, k, layout, out_layout):
    def like(t: Meta) -> Memory:
        return Memory(shape_in(out_layout, heads_of("x", t, layout), t.dim() == 3), t.dtype)

    return like(q), None if k is None else like(k)


_OPTIONS = "int first", "int rotary", "int pairs", "bool inverse", *angles_of.ARGUMENTS
FORWARD = Operator(
    "rope_fwd",
    (UnitStride("q", None), UnitStride("k", None, optional=True), "str layout", "str out_layout", *_OPTIONS),
    results="q_out k_out", outputs=_outputs, plan=_plan, reference=_reference_fwd, check=_check,
)  # fmt: skip
IN_PLACE = Operator(
    "rope_", (InPlace("q", None), InPlace("k", None, optional=True), "str layout", *_OPTIONS), results="",
    plan=_plan_in_place, reference=_reference_in_place, check=_check_in_place,
)  # fmt: skip


def _shards(args: dict[str, Any]) -> Iterator[Way]:
    """Heads and sequences are independent of one another; tokens are where tables or positions name each of them."""
    from torch.distributed.tensor import Replicate, Shard

    dims, tables, positions = len(args["q"].shape), args["cos"].shape, args["positions"]
    at_batch, at_place, at_head = LAYOUTS[args["layout"]] if dims == 4 else (None, 0, 1)
    out = LAYOUTS[args["out_layout"]] if dims == 4 else (None, 0, 1)

    def way(of_heads: int, result: int, of_tables: int | None = None, of_positions: int | None = None) -> Way:
        given = {"q": Shard(of_heads), "k": Shard(of_heads)}
        if of_tables is not None:
            given |= {"cos": Shard(of_tables), "sin": Shard(of_tables)}
        if of_positions is not None:
            given["positions"] = Shard(of_positions)
        return [Shard(result), Replicate() if args["k"] is None else Shard(result)], given

    yield way(at_head, out[2])
    if args["cu_seqlens"] is not None:
        return
    by_token = len(tables) > 2 and tuple(tables[-3:-1]) != (1, 1)  # [..., batch or 1, length, n]
    streams = int(args["sections"] != "")
    if at_batch is not None:
        own = by_token and tables[-3] != 1
        per_sequence = positions is not None and len(positions.shape) == 2 + streams
        yield way(at_batch, out[0], len(tables) - 3 if own else None, streams if per_sequence else None)
    if args["cp_size"] == 1 and (by_token or positions is not None):
        last = None if positions is None else len(positions.shape) - 1
        yield way(at_place, out[1], len(tables) - 2 if by_token else None, last)


shard(FORWARD, _shards)
