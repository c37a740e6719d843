"""Kernels and plans of qk_norm_rope: validation, the order of heads in qkv, launch geometry."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.rope import angles as angles_of
from rtkernels.ops.rope.angles import Angles, Rotated, Rotations
from rtkernels.ops.rope.heads import heads_of
from rtkernels.ops.rope.qk_norm_rope_bulk_plan import BWD_BULK, PAIR_ORDERS, order_of_pairs, plan_bulk
from rtkernels.ops.rope.rope_operators import TYPES, UNIT_LIMIT, Tables, plain_tables, plan_tables
from rtkernels.ops.shared.column_sum import column_sum_step
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import divisor, group_threads, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_FWD_UNIT, _BWD_UNIT = "rope/qk_norm_rope_fwd.cu", "rope/qk_norm_rope_bwd.cu"
_BLOCK = 128
_HEADS = 8  # of a thread in the forward, at most (kFetchedHeads)
_FWD_THREADS = 192  # kQkThreads
_BWD_HEADS = 4
_ANY_HEAD_DIM = 4096  # what rows of dweight in shared memory allow everywhere

_DIMS = (
    "tokens:i64 length:i64 qkv_batch:i64 qkv_place:i64 q_heads:i64 kv_heads:i64 q_slots:i64 kv_slots:i64 "
    "group_magic:i64 q_extra:i64 kv_step:i64 k_first:i64 v_first:i64 head_dim:i64 lane_bits:i64 weight_fp32:i64 "
    "by_slots:i64 by_length:i64 eps:f64 offset:f64 inverse_dim:f64 "
)
_FWD_POINTERS = "qkv:ptr q_weight:ptr k_weight:ptr q:ptr k:ptr v:ptr "
_FWD_DIMS = (
    "tokens:i64 length:i64 qkv_batch:i64 qkv_place:i64 q_heads:i64 kv_heads:i64 q_slots:i64 kv_slots:i64 "
    "set_slots:i64 set_heads:i64 set_columns:i64 q_step:i64 q_extra:i64 kv_step:i64 k_first:i64 v_first:i64 "
    "head_dim:i64 block_tokens:i64 groups:i64 max_heads:i64 pairs:i64 weight_fp32:i64 by_chunks:i64 by_groups:i64 "
    "by_set:i64 by_group:i64 inner:i64 by_inner:i64 batch_inner:i64 eps:f64 offset:f64 inverse_dim:f64 "
)
_BWD_ARGS = (
    "dq:ptr dk:ptr dv:ptr qkv:ptr q_weight:ptr k_weight:ptr dqkv:ptr partial:ptr "
    "dq_batch:i64 dq_place:i64 dq_head:i64 dk_batch:i64 dk_place:i64 dk_head:i64 "
    "dv_batch:i64 dv_place:i64 dv_head:i64 dqkv_batch:i64 dqkv_place:i64 {} " + _DIMS + angles_of.ARGS
)
_SILU = (False, True)


def _bwd_threads(limit: int, silu: bool) -> int:
    """Return the block size of the backward: two tokens' chunks (HeadRing) in `limit` bytes of shared memory."""
    return min(256 if silu else 384, (limit - 1024) // (2 * _BWD_HEADS * 4 * 16) // 32 * 32)


def _bwd_variants(target: Target) -> Iterator[tuple[Any, ...]]:
    if BWD_BULK.supports(target):  # which serves in its place
        return
    for t in TYPES:
        for pairs in PAIR_ORDERS:
            for silu in _SILU:
                yield t, pairs, silu, _BWD_HEADS, _bwd_threads(shared_limit(target), silu)


FWD = Kernel(
    _FWD_UNIT, "qk_norm_rope_fwd", struct=True, template="T SILU", max_registers=64,
    args=_FWD_POINTERS + _FWD_DIMS + angles_of.ARGS, variants=[(t, s) for t in TYPES for s in _SILU],
)  # fmt: skip
FWD_ANY = Kernel(
    _FWD_UNIT, "qk_norm_rope_fwd_any", struct=True, template="T", max_registers=80,
    args=_FWD_POINTERS + _DIMS + "pairs:i64 activated:i64 " + angles_of.ARGS, variants=[(t,) for t in TYPES],
)  # fmt: skip
BWD = Kernel(
    _BWD_UNIT, "qk_norm_rope_bwd", struct=True, template="T PAIRS SILU HEADS THREADS", max_registers=208,
    args=_BWD_ARGS.format("walkers:i64 inner:i64 batch_inner:i64 neighbours:i64"), variants=_bwd_variants,
)  # fmt: skip
BWD_ANY = Kernel(
    _BWD_UNIT, "qk_norm_rope_bwd_any", struct=True, template="T", max_registers=120,
    args=_BWD_ARGS.format("pairs:i64 activated:i64"), variants=[(t,) for t in TYPES],
)  # fmt: skip


class Qkv(NamedTuple):
    """A fused projection as the kernels see it."""

    batch: int
    length: int
    batch_stride: int
    place_stride: int
    q_heads: int
    kv_heads: int
    head_dim: int
    grouped: bool

    @property
    def tokens(self) -> int:
        return self.batch * self.length

    def shape(self, packed: bool, heads: int) -> tuple[int, ...]:
        """Return the shape of q (or k, v)."""
        return (self.length, heads, self.head_dim) if packed else (self.batch, self.length, heads, self.head_dim)

    @property
    def inner(self) -> tuple[int, bool]:
        """Return how many tokens lie side by side, and whether those are of different batches (or places)."""
        by_batch = self.batch_stride < self.place_stride
        return self.batch if by_batch else self.length, by_batch

    def head_order(self) -> tuple[int, ...]:
        """Return group_magic, q_extra, kv_step, k_first and v_first: see rope/qk_norm_rope.cuh."""
        if self.grouped:
            group = self.q_heads // self.kv_heads
            return -(-(2**32) // group), 2, group + 2, group, group + 1
        return 0, 0, 1, self.q_heads, self.q_heads + self.kv_heads


def check_qkv(qkv: Meta, q_heads: int, kv_heads: int, grouped: bool, layout: str) -> Qkv:
    """Raise an ArgumentError for a qkv that cannot be split so; return how it is."""
    dtype, shape, stride = qkv[:3]
    token("qkv", dtype)
    if layout not in ("sbhd", "bshd"):
        raise ArgumentError(f"layout is {layout!r}; expected 'sbhd' or 'bshd'")
    if len(shape) not in (2, 3):
        raise ArgumentError(f"qkv has shape {tuple(shape)}; expected 3 dimensions ({layout[:2]}), or 2 (packed tokens)")
    if q_heads < 1 or kv_heads < 1:
        raise ArgumentError(f"q_heads is {q_heads} and kv_heads {kv_heads}; expected at least 1 of each")
    if grouped and q_heads % kv_heads:
        raise ArgumentError(
            f"q_heads is {q_heads}; expected a multiple of kv_heads, {kv_heads}, for the grouped order of heads"
        )
    total = q_heads + 2 * kv_heads
    if shape[-1] % total or shape[-1] == 0:
        raise ArgumentError(
            f"qkv has {shape[-1]} columns; expected a multiple of q_heads + 2 * kv_heads, {q_heads} + 2 * {kv_heads}"
        )
    if len(shape) == 2:
        sizes = (1, shape[0], 0, stride[0])
    elif layout == "sbhd":
        sizes = (shape[1], shape[0], stride[1], stride[0])
    else:
        sizes = (shape[0], shape[1], stride[0], stride[1])
    return Qkv(*sizes, q_heads, kv_heads, shape[-1] // total, grouped)


def check_weights(q_weight: Meta | None, k_weight: Meta | None, qkv: Meta, head_dim: int) -> None:
    """Raise an ArgumentError for weights that do not fit."""
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        token(name, weight[0], (qkv[0], torch.float32))
        if tuple(weight[1]) != (head_dim,):
            raise ArgumentError(f"{name} has shape {tuple(weight[1])}; expected ({head_dim},), the size of a head")
    if (q_weight is None) != (k_weight is None):
        raise ArgumentError("got one of q_weight and k_weight; expected both or neither")
    if q_weight is not None:
        check_same("k_weight", k_weight[0], q_weight[0], "dtype", of="q_weight")


class Inputs(NamedTuple):
    """What both directions have in common: of the tensors, checks and plans get the metas, references the tensors."""

    qkv: Any
    q_weight: Any
    k_weight: Any
    q_heads: int
    kv_heads: int
    grouped: bool
    layout: str
    rotary: int
    pairs: int
    silu: bool
    eps: float
    offset: float

    @property
    def heads(self) -> tuple[int, int, bool, str]:
        """How the columns of qkv are heads."""
        return self.q_heads, self.kv_heads, self.grouped, self.layout


def check(inputs: Inputs, given: Rotations, inverse: bool = False) -> tuple[Qkv, Angles]:
    """Raise an ArgumentError for arguments that do not fit together."""
    qkv = inputs.qkv
    found = check_qkv(qkv, *inputs.heads)
    check_weights(inputs.q_weight, inputs.k_weight, qkv, found.head_dim)
    rotary, packed = angles_of.check_rotary(inputs.rotary, found.head_dim), len(qkv[1]) == 2
    adjacent = inputs.pairs == angles_of.ADJACENT
    rotated = Rotated(qkv[0], qkv[3], found.batch, found.length, packed, rotary, adjacent, inverse)
    return found, angles_of.check(given, rotated)


def _dims(found: Qkv, slots: tuple[int, int], lane_bits: int, weight: Meta | None, eps: float, offset: float):
    weight_fp32 = int(weight is not None and weight.dtype == torch.float32)
    return (
        found.tokens, found.length, found.batch_stride, found.place_stride, found.q_heads, found.kv_heads, *slots,
        *found.head_order(), found.head_dim, lane_bits, weight_fp32,
        divisor(slots[0] + 2 * slots[1]), divisor(found.length), eps, offset, 1.0 / found.head_dim,
    )  # fmt: skip


def _slots(found: Qkv, heads: int) -> tuple[int, int]:
    return -(-found.q_heads // heads), -(-found.kv_heads // heads)


class _Sets(NamedTuple):
    """How the forward shares out the q heads: rope/qk_norm_rope_fwd.cu."""

    slots: int
    set_slots: int
    set_heads: int
    set_columns: int
    step: int
    group: int
    extra: int

    @property
    def max_heads(self) -> int:
        """Heads of one group of threads."""
        return -(-self.set_heads // self.set_slots)


def _sets(found: Qkv) -> _Sets:
    """Return sets such that the heads of a group of threads are evenly spaced in qkv."""
    sets, extra = (found.kv_heads, 2) if found.grouped else (1, 0)
    group = found.q_heads // sets
    inside = -(-group // _HEADS)  # a set is what shares a kv head
    rounds = -(-found.q_heads // _HEADS)
    across = -(-rounds // group) * group  # or there is one set: heads in the same place of their groups
    if sets * inside <= across:
        return _Sets(sets * inside, inside, group, group + extra, inside, group, extra)
    return _Sets(across, across, found.q_heads, 0, across + extra * (across // group), group, extra)


def _limit(found: Qkv, units: int) -> None:
    if units > UNIT_LIMIT:
        raise ArgumentError(
            f"qkv has {found.tokens} tokens; expected fewer than {UNIT_LIMIT * found.tokens // units} with these heads"
        )


def plan_fwd(inputs: Inputs, given: Rotations, device: int) -> Steps:
    qkv, q_weight, k_weight, *_, pairs, silu, eps, offset = inputs
    given, converted = given.uniform()
    found, angles = check(inputs, given)
    t, size, vec = qkv.token, qkv.dtype.itemsize, 16 // qkv.dtype.itemsize
    strides = (found.batch_stride * size, found.place_stride * size)
    aligned16 = vector_bytes(misaligned(qkv, q_weight, k_weight), *strides) == 16
    if aligned16 and in_chunks(found.head_dim, angles.rotary, size, _FWD_THREADS // 2):
        _limit(found, found.tokens)
        tables = _plan_tables(angles, t, given, pairs, vec, found, device)
        sizes, grid, threads, shared = _fwd_geometry(found, vec, pairs, silu, q_weight)
        launch = FWD.bind((t, silu), device, grid, threads, shared)
        sizes = (*sizes, eps, offset, 1.0 / found.head_dim)
    else:
        slots, tables = _slots(found, 1), plain_tables(angles, given.index)
        units = found.tokens * (slots[0] + 2 * slots[1])
        _limit(found, units)
        launch = FWD_ANY.bind((t,), device, -(-units // (_BLOCK // 32)), _BLOCK)
        sizes = (*_dims(found, slots, 5, q_weight, eps, offset), pairs, int(silu))
    tensors = "qkv", "q_weight", "k_weight", "q", "k", "v"
    step = Step(launch, *tensors, *sizes, *tables.tensors, *tables.angles)
    return Steps(*tables.steps, step, scratch=tables.scratch, converted=converted)


def in_chunks(head_dim: int, rotary: int, size: int, limit: int) -> bool:
    """Return whether heads are up to `limit` 16-byte chunks, and pairs lie in the same places of 4-byte words."""
    return head_dim * size % 16 == 0 and rotary // 2 * size % 4 == 0 and head_dim * size // 16 <= limit


def _plan_tables(found: Angles, t: str, given: Rotations, pairs: int, vec: int, qkv: Qkv, device: int) -> Tables:
    """Return the way to tables: entry by entry where halves are no whole chunks, several at a time otherwise."""
    if found.rotary // 2 % vec and not found.section_kind:
        return plain_tables(found, given.index)
    return plan_tables(found, t, given, pairs, vec, qkv.tokens, qkv.length, device)


def _tokens_of_block(threads: int) -> int:
    """Return how many tokens, each the work of so many threads, leave least of a block's warps idle."""
    shares = {n: n * threads / (-(-n * threads // 32) * 32) - n / 50 for n in range(1, _FWD_THREADS // threads + 1)}
    return max((n for n in shares if n * threads > 48 or n == len(shares)), key=shares.get)


def _fwd_geometry(found: Qkv, vec: int, pairs: int, silu: bool, weight: Meta | None):
    """Return the integer arguments of the forward, its grid, threads, and bytes of shared memory."""
    chunks = found.head_dim // vec
    sets, kv_slots = _sets(found), -(-found.kv_heads // _HEADS)
    slots = sets.slots + 2 * kv_slots
    parts = -(-slots // (_FWD_THREADS // chunks))  # blocks of a token
    groups = -(-slots // parts)
    tokens = _tokens_of_block(groups * chunks) if parts == 1 else 1
    threads = -(-tokens * groups * chunks // 32) * 32
    max_heads = max(sets.max_heads, -(-found.kv_heads // kv_slots))
    _, _, kv_step, k_first, v_first = found.head_order()
    inner, batch_inner = found.inner
    dims = (
        found.tokens, found.length, found.batch_stride, found.place_stride, found.q_heads, found.kv_heads, sets.slots,
        kv_slots, *sets[1:5], sets.extra, kv_step, k_first, v_first, found.head_dim, tokens, groups, max_heads, pairs,
        int(weight is not None and weight.dtype == torch.float32), divisor(chunks), divisor(groups),
        divisor(sets.set_slots), divisor(sets.group), inner, divisor(inner), int(batch_inner),
    )  # fmt: skip
    planes = vec // 4 if silu else 1
    shared = 16 * (planes * max_heads * threads + tokens * vec * chunks)
    shared += 4 * (max_heads * (threads + 1) + tokens * groups * _HEADS)
    return dims, (-(-found.tokens // tokens), parts), threads, shared


def check_bwd(dq: Meta, dk: Meta, dv: Meta, inputs: Inputs, weight_grad: bool, given: Rotations) -> None:
    """Raise an ArgumentError for arguments of the backward that do not fit together."""
    qkv, q_heads, kv_heads = inputs.qkv, inputs.q_heads, inputs.kv_heads
    if weight_grad and inputs.q_weight is None:
        raise ArgumentError("weight_grad is True but there are no weights")
    found, _ = check(inputs, given, inverse=True)
    packed = len(qkv[1]) == 2
    for name, d, heads in (("dq", dq, q_heads), ("dk", dk, kv_heads), ("dv", dv, kv_heads)):
        check_same(name, d[0], qkv[0], "dtype", of="qkv")
        check_same(name, tuple(d[1]), found.shape(packed, heads), "shape", of="the result")


def plan_bwd(dq: Meta, dk: Meta, dv: Meta, inputs: Inputs, weight_grad: bool, given: Rotations, device: int) -> Steps:
    qkv, q_weight, k_weight, *_, pairs, silu, eps, offset = inputs
    given, converted = given.uniform()
    found, angles = check(inputs, given, inverse=True)
    t, size, info = qkv.token, qkv.dtype.itemsize, device_info(device)
    gradients = [s for d in (dq, dk, dv) for s in heads_of("", d, "bshd").strides]
    dense = check_qkv((qkv.dtype, qkv.shape, dense_strides(qkv.shape), device), *inputs.heads)
    strides = (*gradients, dense.batch_stride, dense.place_stride)
    every = (found.batch_stride, found.place_stride, *strides)
    starts, in_rows = (
        misaligned(dq, dk, dv, qkv, q_weight, k_weight),
        in_chunks(found.head_dim, angles.rotary, size, 64),
    )
    chunked, launched = vector_bytes(starts, *(s * size for s in every)) == 16 and in_rows, None
    if chunked:
        _limit(found, found.tokens)
        if BWD_BULK.supports(info.target):
            launched = plan_bulk(found, strides, angles.rotary, t, size, pairs, silu, q_weight, eps, offset, device)
        else:
            launched = _bwd_in_chunks(inputs, found, angles.rotary, strides, device)
    if launched is not None:
        tables = _plan_tables(angles, t, given, pairs, 16 // size, found, device)
    else:
        tables, launched = plain_tables(angles, given.index), _bwd_of_any(inputs, found, strides, device)
    launch, sizes, grid = launched
    scratch, after = dict(tables.scratch), []
    if weight_grad:
        width = 2 * found.head_dim
        scratch["partial"] = Memory((grid, width), torch.float32)
        after = [column_sum_step("partial", "dweights", grid, width, q_weight.dtype, device)]
    tensors = "dq", "dk", "dv", "qkv", "q_weight", "k_weight", "dqkv", "partial" if weight_grad else 0
    step = Step(launch, *tensors, *sizes, *tables.tensors, *tables.angles)
    return Steps(*tables.steps, step, *after, scratch=scratch, converted=converted)


def _bwd_in_chunks(
    inputs: Inputs, found: Qkv, rotary: int, strides: tuple[int, ...], device: int
) -> tuple[Any, tuple[Any, ...], int] | None:
    """Return the launch of the kernel that has heads in chunks, its numbers and its blocks; None if they do not fit."""
    info, size, pairs, silu = device_info(device), inputs.qkv.dtype.itemsize, inputs.pairs, inputs.silu
    threads = _bwd_threads(info.shared_per_block, silu)
    lanes = group_threads(-(-found.head_dim // (2 * (16 // size))), 32)
    groups, slots = threads // lanes, _slots(found, _BWD_HEADS)
    per_token = slots[0] + 2 * slots[1]
    if info.sm_count * groups < per_token:
        return None
    together = min(found.tokens, info.sm_count * groups // per_token)  # tokens
    grid = -(-together * per_token // groups)
    inner, batch_inner = found.inner
    bits, extra = lanes.bit_length() - 1, (together, inner, int(batch_inner), int(pairs == angles_of.ADJACENT))
    order, shared = order_of_pairs(found.head_dim, rotary, size, pairs), 2 * _BWD_HEADS * 4 * 16 * threads
    launch = BWD.bind((inputs.qkv.token, order, silu, _BWD_HEADS, threads), device, grid, threads, shared)
    return launch, (*strides, *extra, *_dims(found, slots, bits, inputs.q_weight, inputs.eps, inputs.offset)), grid


def _bwd_of_any(inputs: Inputs, found: Qkv, strides: tuple[int, ...], device: int) -> tuple[Any, tuple[Any, ...], int]:
    """Return the same of the kernel that has an element at a time."""
    if found.head_dim > _ANY_HEAD_DIM:
        raise ArgumentError(f"heads have {found.head_dim} elements; expected at most {_ANY_HEAD_DIM} here")
    slots = _slots(found, 1)
    units = found.tokens * (slots[0] + 2 * slots[1])
    _limit(found, units)
    warps = max(1, min(4, 32768 // (8 * found.head_dim)))
    grid = min(-(-units // warps), 4 * device_info(device).sm_count)
    launch = BWD_ANY.bind((inputs.qkv.token,), device, grid, 32 * warps, 8 * found.head_dim * warps)
    numbers = *strides, inputs.pairs, int(inputs.silu)
    return launch, (*numbers, *_dims(found, slots, 5, inputs.q_weight, inputs.eps, inputs.offset)), grid


KERNELS = (FWD, FWD_ANY, BWD, BWD_BULK, BWD_ANY)
