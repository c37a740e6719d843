"""Rotation of q and k heads as operators: kernels, plans, and the same in plain torch."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import LAYOUTS, Angles, Meta
from rtkernels.runtime.launch.driver import Launch
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import allocator, dense_strides
from rtkernels.runtime.launch.plans import Plans
from rtkernels.runtime.layout import address, check_same, divisor, group_threads, metadata, nothing, token, vector_bytes
from rtkernels.runtime.operator.operator import TorchOp

UNIT = "rope/rope.cu"
TYPES = ("bf16", "fp16", "fp32")
HEADS_PER_GROUP = 4  # kRopeHeads
UNIT_LIMIT = 2**31 - 1024  # (token, head group) pairs that one launch can count, and a block may pass the end
_BLOCK = 128
_TOKEN_HEADS, _TOKEN_THREADS = 8, 192  # of a thread and a block of rope_token, at most

_ROPE_ARGS = (
    "q:ptr k:ptr q_out:ptr k_out:ptr tokens:i64 length:i64 q_heads:i64 k_heads:i64 slots:i64 lane_bits:i64 first:i64 "
    "spare:i64 pairs:i64 q_batch:i64 q_place:i64 q_head:i64 k_batch:i64 k_place:i64 k_head:i64 q_out_batch:i64 "
    "q_out_place:i64 q_out_head:i64 k_out_batch:i64 k_out_place:i64 k_out_head:i64 by_slots:i64 by_length:i64 "
    + angles_of.ARGS
)
ROPE = Kernel(
    UNIT,
    "rope",
    template="T PAIRS",
    args=_ROPE_ARGS,
    variants=[(t, pairs) for t in TYPES for pairs in (angles_of.GATHER, angles_of.SCATTER)],
    max_registers=112,
)
ROPE_TOKEN = Kernel(
    UNIT,
    "rope_token",
    template="T",
    args="q:ptr k:ptr q_out:ptr k_out:ptr length:i64 q_heads:i64 k_heads:i64 q_slots:i64 k_slots:i64 groups:i64 "
    "lane_bits:i64 begin:i64 width:i64 first:i64 pairs:i64 q_batch:i64 q_place:i64 q_head:i64 k_batch:i64 k_place:i64 "
    "k_head:i64 q_out_batch:i64 q_out_place:i64 q_out_head:i64 k_out_batch:i64 k_out_place:i64 k_out_head:i64 "
    "by_length:i64 " + angles_of.ARGS,
    variants=[(t,) for t in TYPES],
    max_registers=64,
)
ROPE_ANY = Kernel(UNIT, "rope_any", template="T", args=_ROPE_ARGS, variants=[(t,) for t in TYPES], max_registers=56)
TABLES = Kernel(
    UNIT,
    "rope_tables",
    template="T",
    args="cos_out:ptr sin_out:ptr tokens:i64 length:i64 width:i64 " + angles_of.ARGS,
    variants=[(t,) for t in TYPES],
    max_registers=40,
)


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
    _, shape, stride, _ = meta
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


def shape_in(layout: str, heads: Heads, packed: bool) -> tuple[int, ...]:
    """Return the shape of a dense tensor of these heads in a layout."""
    if packed:
        return (heads.length, heads.heads, heads.head_dim)
    shape = [0, 0, 0, heads.head_dim]
    for i, size in zip(LAYOUTS[layout], heads[:3], strict=True):
        shape[i] = size
    return tuple(shape)


def unit_stride(*metas: Meta | None) -> bool:
    """Return True if the last dimension of every tensor has stride 1."""
    return all(m is None or m[1][-1] <= 1 or m[2][-1] == 1 for m in metas)


def with_unit_stride(t: Tensor | None) -> Tensor | None:
    """Return the tensor, copied if its last dimension has another stride than 1."""
    return t if t is None or t.shape[-1] <= 1 or t.stride(-1) == 1 else t.contiguous()


def lanes_of(head_dim: int, rotary: int, first: int, vec: int, *, copies: bool = True) -> int | None:
    """Return how many lanes share a head in 16-byte chunks (``Pieces`` in rope/pieces.cuh); None if they cannot."""
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


# ---- plans ----------------------------------------------------------------------------------------------------------


class TablesPlan(NamedTuple):
    """How to read the tables: as they are, or from entries gathered for each token first."""

    angles: tuple[int | float, ...]
    gather: Launch | None = None
    dims: tuple[int, ...] = ()
    first_angles: tuple[int | float, ...] = ()

    def addresses(self, cos: Tensor, sin: Tensor, index: Tensor | None) -> tuple[tuple[int, int, int], Any]:
        """Return the addresses of cos, sin and index for the main kernel, and what must live until its launch."""
        if self.gather is None:
            return (cos.data_ptr(), sin.data_ptr(), address(index)), None
        tokens, _, width = self.dims
        table = torch.empty(2, tokens, width, dtype=torch.float32, device=cos.device)
        here = table.data_ptr(), table[1].data_ptr()
        self.gather(*here, *self.dims, cos.data_ptr(), sin.data_ptr(), address(index), *self.first_angles)
        return (*here, 0), table


def plan_tables(
    found: Angles, t: str, cos: Meta, align: int, pairs: int, vec: int, tokens: int, length: int, device: int
) -> TablesPlan:
    """Return the way to tables that kernels can read in runs of `vec` entries."""
    if angles_of.readable(found, pairs, vec, align, cos[0].itemsize):
        return TablesPlan(found.arguments())
    flags = found.flags & ~angles_of._INVERSE
    width = found.width
    block = min(256, -(-width // 32) * 32)
    grid = (-(-width // block), min(tokens, 65535))
    launch = TABLES.bind((t,), device, grid, block)
    first = found._replace(flags=flags).arguments()
    if pairs in (angles_of.GATHER, angles_of.SCATTER) and not angles_of.readable(found.per_token(), pairs, vec, 0, 4):
        return None  # full tables in an order that runs cannot have
    return TablesPlan(found.per_token().arguments(), launch, (tokens, length, width), first)


class _Plan(NamedTuple):
    launch: Launch | None
    dims: tuple[int, ...]
    tables: TablesPlan | None
    by_chunks: bool  # the lanes of a head read all of it before they write
    allocate: Any
    q_layout: tuple[Any, ...]
    k_layout: tuple[Any, ...] | None


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
    mscale: float, in_place: bool, align: int, table_align: int,
) -> _Plan | None:  # fmt: skip
    """Return the launch and its arguments; None if an input must be copied first."""
    heads, of_k, rotary, found = _check(
        q, k, layout, out_layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, sections, cp_rank,
        cp_size, mscale,
    )  # fmt: skip
    dtype, shape, _, device = q
    packed = len(shape) == 3
    outputs = [None if h is None else shape_in(out_layout, h, packed) for h in (heads, of_k)]
    layouts = [None if s is None else (s, dense_strides(s), dtype) for s in outputs]
    tokens, total = heads.batch * heads.length, heads.heads + (of_k.heads if of_k else 0)
    if tokens == 0 or total == 0:
        return _Plan(None, (), None, True, allocator(device), *layouts)
    if found.table_stride < 0 or not unit_stride(q, k):
        return None
    t, vec = token("x", dtype), 16 // dtype.itemsize
    strides = [*heads.strides, *(of_k.strides if of_k else (0, 0, 0))]
    if in_place:
        out = strides
    else:
        views = [None if s is None else heads_of("", (dtype, s, dense_strides(s), device), out_layout) for s in outputs]
        out = [*views[0].strides, *(views[1].strides if views[1] else (0, 0, 0))]
    order = pairs if not inverse else (pairs ^ 1 if pairs in (angles_of.GATHER, angles_of.SCATTER) else pairs)
    reorders = order in (angles_of.GATHER, angles_of.SCATTER)
    begin, width = (first, rotary) if in_place else (0, heads.head_dim)
    if reorders:
        lanes = lanes_of(heads.head_dim, rotary, first, vec, copies=not in_place)
    else:
        lanes = chunk_lanes(width, rotary, first, vec)
    aligned = vector_bytes(align, *(s * dtype.itemsize for s in (*strides, *out))) == 16
    tables = None
    if lanes is not None and aligned:
        tables = plan_tables(found, t, cos, table_align, order, vec, tokens, heads.length, device)
    if tables is not None and not reorders:
        _limit(tokens, total, 1)
        counts = (heads.heads, total - heads.heads)
        slots = [-(-n // _TOKEN_HEADS) for n in counts]
        grid = -(-sum(slots) // (_TOKEN_THREADS // lanes))
        groups = -(-sum(slots) // grid)
        threads = -(-groups * lanes // 32) * 32
        most = max(-(-n // s) for n, s in zip(counts, slots, strict=True) if s)
        launch = ROPE_TOKEN.bind((t,), device, (tokens, grid), threads, 16 * most * threads)
        dims = (heads.length, *counts, *slots, groups, lanes.bit_length() - 1, begin, width, first, order, *strides,
                *out, divisor(heads.length))  # fmt: skip
        return _Plan(launch, dims, tables, True, allocator(device), *layouts)
    spare = width - rotary
    if tables is not None:
        slots, kernel, variant, bits = -(-total // HEADS_PER_GROUP), ROPE, (t, order), lanes.bit_length() - 1
        spare //= vec
    else:
        tables = TablesPlan(found.arguments())
        slots, kernel, variant, bits = total, ROPE_ANY, (t,), 5
    units = tokens * slots
    _limit(tokens, total, slots)
    launch = kernel.bind(variant, device, -(-units // (_BLOCK >> bits)), _BLOCK)
    dims = (tokens, heads.length, heads.heads, total - heads.heads, slots, bits, first, spare, order, *strides, *out,
            divisor(slots), divisor(heads.length))  # fmt: skip
    return _Plan(launch, dims, tables, kernel is ROPE, allocator(device), *layouts)


def _limit(tokens: int, heads: int, units: int) -> None:
    if tokens * units > UNIT_LIMIT:
        raise ArgumentError(f"x has {tokens} tokens of {heads} heads; expected at most {UNIT_LIMIT // units} tokens")


_PLANS = Plans(_plan)


# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(q, k, layout, out_layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, *options):
    index = positions if positions is not None else cu_seqlens
    q_address, k_address = q.data_ptr(), address(k)
    plan = _PLANS[(
        metadata(q), metadata(k), layout, out_layout, first, rotary, pairs, inverse, metadata(cos), metadata(sin),
        metadata(positions), metadata(cu_seqlens), *options, False, (q_address | k_address) & 15,
        (cos.data_ptr() | sin.data_ptr()) & 15,
    )]  # fmt: skip
    if plan is None or (index is not None and not index.is_contiguous()):
        angles = angles_of.readable_by_kernels((cos, sin, positions, cu_seqlens, *options))
        q, k = with_unit_stride(q), with_unit_stride(k)
        return _launch_fwd(q, k, layout, out_layout, first, rotary, pairs, inverse, *angles)
    y = plan.allocate(*plan.q_layout)
    ky = nothing(q) if k is None else plan.allocate(*plan.k_layout)
    if plan.launch is not None:
        addresses, _alive = plan.tables.addresses(cos, sin, index)
        plan.launch(
            q_address, k_address, y.data_ptr(), 0 if k is None else ky.data_ptr(), *plan.dims, *addresses,
            *plan.tables.angles,
        )  # fmt: skip
    return y, ky


def _launch_in_place(q, k, layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, *options) -> None:
    _check_writable(q, "x")
    _check_writable(k, "k")
    angles = (cos, sin, positions, cu_seqlens, *options)
    cos, sin, positions, cu_seqlens, *options = angles_of.readable_by_kernels(angles)
    index = positions if positions is not None else cu_seqlens
    q_address, k_address = q.data_ptr(), address(k)
    plan = _PLANS[(
        metadata(q), metadata(k), layout, layout, first, rotary, pairs, inverse, metadata(cos), metadata(sin),
        metadata(positions), metadata(cu_seqlens), *options, True, (q_address | k_address) & 15,
        (cos.data_ptr() | sin.data_ptr()) & 15,
    )]  # fmt: skip
    reorders = pairs in (angles_of.GATHER, angles_of.SCATTER)
    if plan is None or (reorders and not plan.by_chunks):
        args = (layout, layout, first, rotary, pairs, inverse, cos, sin, positions, cu_seqlens, *options)
        y, ky = _launch_fwd(q, k, *args)
        q.copy_(y)
        if k is not None:
            k.copy_(ky)
    elif plan.launch is not None:
        addresses, _alive = plan.tables.addresses(cos, sin, index)
        plan.launch(q_address, k_address, q_address, k_address, *plan.dims, *addresses, *plan.tables.angles)


def _check_writable(t: Tensor | None, name: str) -> None:
    if t is not None and any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True)):
        raise ArgumentError(f"{name} has strides {t.stride()}; expected no expanded dimension with in_place")


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
        if t.dim() == 3:
            return y.squeeze(0).contiguous()
        return y.permute(*(LAYOUTS[out_layout].index(i) for i in range(3)), 3).contiguous()

    return rotated(q), nothing(q) if k is None else rotated(k)


def _reference_in_place(q, k, layout, *args) -> None:
    _check_writable(q, "x")
    _check_writable(k, "k")
    y, ky = _reference_fwd(q, k, layout, layout, *args)
    q.copy_(y)
    if k is not None:
        k.copy_(ky)


def _fake_fwd(q, k, layout, out_layout, *args):
    def like(t: Tensor) -> Tensor:
        if t.dim() == 3:
            return t.new_empty(t.shape)
        sizes = [t.shape[i] for i in LAYOUTS[layout]]
        return t.new_empty([sizes[LAYOUTS[out_layout].index(i)] for i in range(3)] + [t.shape[3]])

    return like(q), nothing(q) if k is None else like(k)


_OPTIONS = f"int first, int rotary, int pairs, bool inverse, {angles_of.SCHEMA}"
FORWARD = TorchOp(
    f"rope_fwd(Tensor q, Tensor? k, str layout, str out_layout, {_OPTIONS}) -> (Tensor, Tensor)",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
IN_PLACE = TorchOp(
    f"rope_(Tensor(a!) q, Tensor(b!)? k, str layout, {_OPTIONS}) -> ()",
    launch=_launch_in_place,
    reference=_reference_in_place,
    fake=lambda *args: None,
)


def mutated(*tensors: Tensor | None) -> None:
    """Tell autograd that these were written, so that a backward which saved them complains."""
    for t in tensors:
        if t is not None and not torch.compiler.is_dynamo_compiling() and not t.is_inference():
            torch.autograd.graph.increment_version(t)
