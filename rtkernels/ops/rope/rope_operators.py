"""Rotation of q and k heads as operators: kernels, plans, and the same in plain torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import LAYOUTS, Angles, Rotated, Rotations
from rtkernels.ops.rope.heads import Heads, as_heads, from_heads, heads_of, shape_in
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.device import device_info
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
_REORDERING = (angles_of.GATHER, angles_of.SCATTER)
_BLOCK = 128
_TOKEN_HEADS = 8  # of a thread of rope_token, or fewer
_TOKEN_THREADS = 192  # of its blocks, or fewer
_MAX_LANES = 96  # of a head
_SPLIT, _ACROSS_WARPS = 1, 2  # flags of rope_token

_ROPE_ARGS = (
    "q:ptr k:ptr q_out:ptr k_out:ptr tokens:i64 length:i64 q_heads:i64 k_heads:i64 slots:i64 lane_bits:i64 first:i64 "
    "spare:i64 pairs:i64 q_batch:i64 q_place:i64 q_head:i64 k_batch:i64 k_place:i64 k_head:i64 q_out_batch:i64 "
    "q_out_place:i64 q_out_head:i64 k_out_batch:i64 k_out_place:i64 k_out_head:i64 by_slots:i64 by_length:i64 "
    + angles_of.ARGS
)
ROPE = Kernel(
    UNIT, "rope", struct=True, template="T PAIRS", max_registers=112,
    args=_ROPE_ARGS, variants=[(t, pairs) for t in TYPES for pairs in (angles_of.GATHER, angles_of.SCATTER)],
)  # fmt: skip
ROPE_TOKEN = Kernel(
    UNIT, "rope_token", struct=True, template="T", max_registers=64,
    args="q:ptr k:ptr q_out:ptr k_out:ptr tokens:i64 length:i64 q_heads:i64 k_heads:i64 q_slots:i64 k_slots:i64 "
    "groups:i64 block_tokens:i64 lanes:i64 begin:i64 width:i64 first:i64 pairs:i64 flags:i64 q_batch:i64 q_place:i64 "
    "q_head:i64 k_batch:i64 k_place:i64 k_head:i64 q_out_batch:i64 q_out_place:i64 q_out_head:i64 k_out_batch:i64 "
    "k_out_place:i64 k_out_head:i64 by_lanes:i64 by_slots:i64 by_length:i64 " + angles_of.ARGS,
    variants=[(t,) for t in TYPES],
)  # fmt: skip
ROPE_ANY = Kernel(
    UNIT, "rope_any", struct=True, template="T", max_registers=56,
    args=_ROPE_ARGS, variants=[(t,) for t in TYPES],
)  # fmt: skip
TABLES = Kernel(
    UNIT, "rope_tables", struct=True, template="T", max_registers=40,
    args="cos_out:ptr sin_out:ptr tokens:i64 length:i64 width:i64 " + angles_of.ARGS, variants=[(t,) for t in TYPES],
)  # fmt: skip


# ---- lanes and tables ------------------------------------------------------------------------------------------------


def lanes_of(head_dim: int, rotary: int, first: int, vec: int, *, copies: bool = True) -> int | None:
    """Return how many lanes share a head in 16-byte chunks (``HeadChunks``); None if they cannot."""
    spare = head_dim - rotary
    if rotary // 2 % vec or first % vec or spare % (2 * vec):
        return None
    lanes = rotary // 2 // vec + (spare // 2 // vec if copies else 0)
    return group_threads(lanes, 32) if lanes <= 32 else None


class Chunks(NamedTuple):
    """How lanes share a head, a 16-byte chunk each."""

    lanes: int
    split: bool  # the halves of a chunk may be in different parts of the head


def chunks_of(begin: int, width: int, rotary: int, first: int, vec: int, adjacent: bool) -> Chunks | None:
    """Return how lanes share `width` elements of a head from `begin` on; None if they cannot."""
    if begin % vec or width % vec or width > vec * _MAX_LANES:
        return None
    bits = first | (rotary if adjacent else rotary // 2)
    return None if bits % (vec // 2) else Chunks(width // vec, bits % vec != 0)


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
    found: Angles, t: str, given: Rotations, pairs: int, vec: int, tokens: int, length: int, device: int
) -> Tables | None:
    """Return the way to tables that kernels can read `vec` entries at a time; None if there is none."""
    cos, sin, index = given.cos, given.sin, given.index
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


class Turned(NamedTuple):
    """Arguments of the operators: of the tensors, checks and plans get the metas, the reference the tensors."""

    q: Any
    k: Any
    layout: str
    first: int
    rotary: int
    pairs: int
    inverse: bool
    out_layout: str | None = None  # of results in memory of their own; None in place

    @property
    def output_layout(self) -> str:
        """That of the results, wherever they are."""
        return self.layout if self.out_layout is None else self.out_layout

    @property
    def order(self) -> int:
        """The order of pairs that the kernel has: that of the forward, or the other way round."""
        return self.pairs ^ 1 if self.inverse and self.pairs in _REORDERING else self.pairs


class _Problem(NamedTuple):
    """What a launch is made for."""

    of: Turned
    given: Rotations
    heads: Heads
    of_k: Heads | None
    rotary: int
    angles: Angles
    strides: list[int]  # of q and k: from batch to batch, place to place, head to head
    out: list[int]  # likewise, of the results
    in_place: bool
    device: int

    @property
    def tokens(self) -> int:
        return self.heads.batch * self.heads.length

    @property
    def counts(self) -> tuple[int, int]:
        """Heads of q and of k."""
        return self.heads.heads, self.of_k.heads if self.of_k else 0

    @property
    def vec(self) -> int:
        """Elements in 16 bytes."""
        return 16 // self.of.q.dtype.itemsize

    @property
    def part(self) -> tuple[int, int]:
        """Where the part of a head begins that is written, and its width."""
        return (self.of.first, self.rotary) if self.in_place else (0, self.heads.head_dim)


def _check(of: Turned, given: Rotations) -> tuple[Heads, Heads | None, int, Angles]:
    """Raise an ArgumentError for arguments that do not fit together; return Heads of q and k, rotary and Angles."""
    q, k = of.q, of.k
    token("x", q[0])
    heads = heads_of("x", q, of.layout)
    of_k = None
    if of.output_layout not in LAYOUTS:
        raise ArgumentError(f"output_layout is {of.output_layout!r}; expected one of {', '.join(LAYOUTS)}")
    if k is not None:
        check_same("k", k[0], q[0], "dtype")
        check_same("k", k[3], q[3], "device index")
        of_k = heads_of("k", k, of.layout)
        if len(k[1]) != len(q[1]) or of_k[:2] != heads[:2] or of_k.head_dim != heads.head_dim:
            raise ArgumentError(
                f"k has shape {tuple(k[1])}; expected that of x, {tuple(q[1])}, except for the number of heads"
            )
    if not 0 <= of.first < heads.head_dim:
        raise ArgumentError(f"rotary_start is {of.first}; expected 0 to {heads.head_dim - 1}, inside of a head")
    rotary = angles_of.check_rotary(of.rotary, heads.head_dim - of.first)
    adjacent, packed = of.pairs in (angles_of.ADJACENT, angles_of.SCATTER), len(q[1]) == 3
    found = angles_of.check(given, Rotated(q[0], q[3], heads.batch, heads.length, packed, rotary, adjacent, of.inverse))
    return heads, of_k, rotary, found


def _plan(of: Turned, given: Rotations, device: int) -> Steps:
    return _steps_of(of, given, False, device)


def _plan_in_place(of: Turned, given: Rotations, device: int) -> Steps:
    if any(m is not None and m.shape[-1] > 1 and m.stride[-1] != 1 for m in (of.q, of.k)):
        return Steps(instead=_by_copy)
    return _steps_of(of, given, True, device)


def _steps_of(of: Turned, given: Rotations, in_place: bool, device: int) -> Steps:
    given, converted = given.uniform()
    heads, of_k, rotary, angles = _check(of, given)
    strides = [*heads.strides, *(of_k.strides if of_k else (0, 0, 0))]
    out = strides if in_place else _result_strides(of, heads, of_k)
    problem = _Problem(of, given, heads, of_k, rotary, angles, strides, out, in_place, device)
    lanes = _lanes(problem)
    tables = None if lanes is None else _tables_in_chunks(problem, lanes)
    if tables is not None and isinstance(lanes, Chunks):
        launch, sizes = _launch_of_tokens(problem, lanes)
    elif tables is not None:
        launch, sizes = _launch_of_groups(problem, lanes)
    elif in_place and of.pairs in _REORDERING:
        return Steps(instead=_by_copy)  # a lane would overwrite what another one has not read
    else:
        tables = plain_tables(angles, given.index)
        launch, sizes = _launch_of_any(problem)
    results = ("q", "k") if in_place else ("q_out", "k_out")
    step = Step(launch, "q", "k", *results, *sizes, *tables.tensors, *tables.angles)
    return Steps(*tables.steps, step, scratch=tables.scratch, converted=converted)


def _result_strides(of: Turned, heads: Heads, of_k: Heads | None) -> list[int]:
    """Return the strides of dense results."""
    out: list[int] = []
    for h in (heads, of_k):
        if h is None:
            out += (0, 0, 0)
        else:
            shape = shape_in(of.output_layout, h, of.q.dim() == 3)
            out += heads_of("", (of.q.dtype, shape, dense_strides(shape)), of.output_layout).strides
    return out


def _lanes(p: _Problem) -> Chunks | int | None:
    """Return how lanes share a head in chunks of 16 bytes (their number if pairs change order); None if they cannot."""
    size = p.of.q.dtype.itemsize
    if p.of.order in _REORDERING:
        lanes = lanes_of(p.heads.head_dim, p.rotary, p.of.first, p.vec, copies=not p.in_place)
    else:
        lanes = chunks_of(*p.part, p.rotary, p.of.first, p.vec, p.of.order == angles_of.ADJACENT)
    aligned16 = vector_bytes(misaligned(p.of.q, p.of.k), *(s * size for s in (*p.strides, *p.out))) == 16
    return lanes if aligned16 else None


def _tables_in_chunks(p: _Problem, lanes: Chunks | int) -> Tables | None:
    vec = p.vec // 2 if isinstance(lanes, Chunks) and lanes.split else p.vec
    return plan_tables(p.angles, p.of.q.token, p.given, p.of.order, vec, p.tokens, p.heads.length, p.device)


def _launch_of_tokens(p: _Problem, chunks: Chunks) -> tuple[Any, tuple[int, ...]]:
    """Return the launch of a kernel whose blocks have whole tokens, or a part of one, and the numbers it takes."""
    _limit(p, 1)
    lanes = chunks.lanes
    slots = [-(-n // _TOKEN_HEADS) for n in p.counts]
    grid = -(-sum(slots) // (_TOKEN_THREADS // lanes))
    block_tokens = 1 if grid > 1 else _block_tokens(sum(slots) * lanes, p.tokens, p.device)
    groups = -(-sum(slots) * block_tokens // grid)
    threads = -(-groups * lanes // 32) * 32
    per_slot = max(-(-n // s) for n, s in zip(p.counts, slots, strict=True) if s)
    blocks = -(-p.tokens // block_tokens), grid
    launch = ROPE_TOKEN.bind((p.of.q.token,), p.device, blocks, threads, 16 * per_slot * threads)
    flags = (_SPLIT if chunks.split else 0) | (_ACROSS_WARPS if 32 % lanes else 0)
    sizes = p.tokens, p.heads.length, *p.counts, *slots, groups, block_tokens, lanes, *p.part, p.of.first, p.of.order
    divisors = divisor(lanes), divisor(sum(slots)), divisor(p.heads.length)
    return launch, (*sizes, flags, *p.strides, *p.out, *divisors)


def _block_tokens(threads: int, tokens: int, device: int) -> int:
    """Return the tokens of a block that have so many threads each: several only if one leaves many lanes idle."""
    if 6 * (-threads % 32) <= threads + -threads % 32:
        return 1
    limit = min(_TOKEN_THREADS // threads, max(1, tokens // (16 * device_info(device).sm_count)))
    return min(range(1, limit + 1), key=lambda n: -(-n * threads // 32) / n)


def _launch_of_groups(p: _Problem, lanes: int) -> tuple[Any, tuple[int, ...]]:
    """Return the same of the kernel that puts pairs into another order: lanes share several heads."""
    slots, bits = -(-sum(p.counts) // HEADS_PER_GROUP), lanes.bit_length() - 1
    return _launch_by_units(p, ROPE, (p.of.q.token, p.of.order), slots, bits, (p.part[1] - p.rotary) // p.vec)


def _launch_of_any(p: _Problem) -> tuple[Any, tuple[int, ...]]:
    """Return the same of the kernel that has an element at a time: a warp has a head."""
    return _launch_by_units(p, ROPE_ANY, (p.of.q.token,), sum(p.counts), 5, p.part[1] - p.rotary)


def _launch_by_units(
    p: _Problem, kernel: Kernel, variant: tuple[Any, ...], slots: int, bits: int, spare: int
) -> tuple[Any, tuple[int, ...]]:
    _limit(p, slots)
    launch = kernel.bind(variant, p.device, -(-p.tokens * slots // (_BLOCK >> bits)), _BLOCK)
    sizes = p.tokens, p.heads.length, *p.counts, slots, bits, p.of.first, spare, p.of.order
    return launch, (*sizes, *p.strides, *p.out, divisor(slots), divisor(p.heads.length))


def _limit(p: _Problem, units: int) -> None:
    if p.tokens * units > UNIT_LIMIT:
        raise ArgumentError(
            f"x has {p.tokens} tokens of {sum(p.counts)} heads; expected at most {UNIT_LIMIT // units} tokens"
        )


def _by_copy(q: Tensor, k: Tensor | None, layout: str, *rest: Any) -> None:
    y, ky = FORWARD.launch(q, k, layout, layout, *rest)
    q.copy_(y)
    if k is not None:
        k.copy_(ky)


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _reference(of: Turned, given: Rotations) -> tuple[Tensor, Tensor]:
    q, k, first = of.q, of.k, of.first
    heads, _, rotary, found = _check(of._replace(q=metadata(q), k=metadata(k)), given.metas)
    tables = angles_of.reference_tables(given, found, heads.batch, heads.length)

    def rotated(t: Tensor) -> Tensor:
        part = as_heads(t, of.layout)
        y = angles_of.rotate(part.float(), tables, first, of.pairs, of.inverse).to(t.dtype)
        # What is not rotated keeps its bits: a conversion may change those of a NaN.
        y[..., :first], y[..., first + rotary :] = part[..., :first], part[..., first + rotary :]
        return from_heads(y, of.output_layout, t.dim() == 3)

    return rotated(q), nothing(q) if k is None else rotated(k)


def _reference_in_place(of: Turned, given: Rotations) -> None:
    y, ky = _reference(of, given)
    of.q.copy_(y)
    if of.k is not None:
        of.k.copy_(ky)


def _outputs(q, k, layout, out_layout):
    def like(t: Meta) -> Memory:
        return Memory(shape_in(out_layout, heads_of("x", t, layout), t.dim() == 3), t.dtype)

    return like(q), None if k is None else like(k)


_OPTIONS = "int first", "int rotary", "int pairs", "bool inverse", *angles_of.ARGUMENTS
FORWARD = Operator(
    "rope_fwd",
    (UnitStride("q", None), UnitStride("k", None, optional=True), "str layout", "str out_layout", *_OPTIONS),
    results="q_out k_out", outputs=_outputs, plan=_plan, reference=_reference, check=_check,
)  # fmt: skip
IN_PLACE = Operator(
    "rope_", (InPlace("q", None), InPlace("k", None, optional=True), "str layout", *_OPTIONS), results="",
    plan=_plan_in_place, reference=_reference_in_place, check=_check,
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
