"""The kernels that move rows between tokens and experts, the choice between them, and their launches."""

from __future__ import annotations

from math import prod

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.shared.fp8_layout import FP8_DTYPES
from rtkernels.runtime.checks import check_same, token
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.layout import FLOAT_DTYPES, GRID_LIMIT, divisor, vector_bytes
from rtkernels.runtime.operator.declared import Meta, misaligned
from rtkernels.runtime.operator.plan import IN_TORCH, Step, Steps

PROB_KIND = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_WARP = 32
_PERMUTE_BLOCK = 256
_LOADS_IN_FLIGHT = 4
_BULK_BLOCK = 256
_BULK_BYTES = 128 << 10  # shared memory of a block, or less
_BULK_ROWS = 4  # for each token at least
_UNPERMUTE_BLOCK = 128
_UNPERMUTE_GROUP = 128  # threads of a token, or fewer
_PAIR_CHOICES = 2  # up to which a thread has _PAIR_UNITS accesses of each row
_PAIR_UNITS = 4
_BLOCKS_PER_SM = 3  # for whose registers moe_unpermute is compiled
_SHAPES = ((2, 8, 8, 1), (2, 8, 2, _PAIR_UNITS), (2, 1, 8, 1), (4, 4, 8, 1), (4, 4, 2, _PAIR_UNITS), (4, 1, 8, 1))
_BACKWARD_THREADS = 256
_PROBS_THREADS = 256

PERMUTE = Kernel(
    "moe/permute.cu", "moe_permute", template="BYTES IN_FLIGHT", max_registers=56,
    args="x:ptr rows:ptr slots:ptr scale:ptr probs:ptr experts:ptr y:ptr scale_out:ptr probs_out:ptr tokens:i64 "
    "top_k:i64 row_count:i64 units:i64 x_stride:i64 scales:i64 prob_kind:i64 prob_columns:i64 threads_per_row:i64 "
    "pad_blocks:i64",
    variants=[(16, 4), (2, 4), (1, 4)],
)  # fmt: skip
PERMUTE_BULK = Kernel(
    "moe/permute_bulk.cu", "moe_permute_bulk", template="THREADS", max_registers=56, needs=("tma",),
    args="x:ptr rows:ptr slots:ptr scale:ptr probs:ptr experts:ptr y:ptr scale_out:ptr probs_out:ptr tokens:i64 "
    "top_k:i64 divisor:i64 row_count:i64 row_bytes:i64 x_stride:i64 scales:i64 prob_kind:i64 prob_columns:i64 "
    "row_blocks:i64",
    variants=[(_BULK_BLOCK,)],
)  # fmt: skip
PROBS = Kernel(
    "moe/permute.cu", "moe_probs", template="THREADS", max_registers=48,
    args="values:ptr rows:ptr experts:ptr out:ptr tokens:i64 top_k:i64 row_count:i64 columns:i64 prob_kind:i64",
    variants=[(_PROBS_THREADS,)],
)  # fmt: skip
UNPERMUTE = Kernel(
    "moe/unpermute.cu", "moe_unpermute", template="SIZE VEC CHOICES UNITS BLOCKS", max_registers=85,
    args="y:ptr rows:ptr probs:ptr experts:ptr carried:ptr out:ptr carried_out:ptr tokens:i64 top_k:i64 row_count:i64 "
    "vectors:i64 y_stride:i64 half:i64 prob_kind:i64 prob_columns:i64 threads_per_row:i64",
    variants=[(*shape, _BLOCKS_PER_SM) for shape in _SHAPES],
)  # fmt: skip
UNPERMUTE_BWD = Kernel(
    "moe/unpermute.cu", "moe_unpermute_bwd", template="SIZE VEC", max_registers=88,
    args="dout:ptr y:ptr rows:ptr slots:ptr probs:ptr experts:ptr dy:ptr dprobs:ptr top_k:i64 row_count:i64 "
    "vectors:i64 dout_stride:i64 y_stride:i64 half:i64 prob_kind:i64 prob_columns:i64 pad_blocks:i64",
    variants=[(2, 8), (2, 1), (4, 4), (4, 1)],
)  # fmt: skip
KERNELS = (PERMUTE, PERMUTE_BULK, PROBS, UNPERMUTE, UNPERMUTE_BWD)


def check_rows(name: str, of: Meta, rows: Meta) -> None:
    """Raise an ArgumentError unless `rows` is the index.rows of the tokens of a tensor ``[T, H]``."""
    if len(of[1]) != 2:
        raise ArgumentError(f"{name} has shape {tuple(of[1])}; expected two dimensions, [tokens, columns]")
    _check_integers("index.rows", rows, 2, of[3], name)
    check_same("index.rows", rows[1][0], of[1][0], "length", of=name)


def _check_integers(name: str, got: Meta, rank: int, device: int, of: str) -> None:
    if got[0] != torch.int32 or len(got[1]) != rank:
        kind = str(got[0]).removeprefix("torch.")
        raise ArgumentError(
            f"{name} has dtype {kind} and shape {tuple(got[1])}; expected int32 and {rank} dimension{'s' * (rank > 1)}"
        )
    check_same(name, got[3], device, "device index", of=of)
    if prod(got[1]) >= 2**31:
        raise ArgumentError(f"{name} has {prod(got[1])} entries; expected less than 2^31")


def check_probs(probs: Meta | None, experts: Meta | None, rows: Meta) -> None:
    """Raise an ArgumentError unless there is a probability for every choice."""
    if probs is None:
        return
    token("probs", probs[0], tuple(PROB_KIND))
    check_same("probs", probs[3], rows[3], "device index", of="index.rows")
    if experts is None:
        check_same("probs", tuple(probs[1]), tuple(rows[1]), "shape", of="index.rows")
        return
    _check_integers("index.experts", experts, 2, rows[3], "index.rows")
    check_same("index.experts", tuple(experts[1]), tuple(rows[1]), "shape", of="index.rows")
    if len(probs[1]) != 2 or probs[1][0] != rows[1][0]:
        raise ArgumentError(f"probs has shape {tuple(probs[1])}; expected {(rows[1][0], 'experts')}")


def check_permute(
    x: Meta, rows: Meta, slots: Meta, scale: Meta | None, probs: Meta | None, experts: Meta | None
) -> None:
    """Raise an ArgumentError for arguments of moe_permute that do not fit together."""
    token("x", x[0], (*FLOAT_DTYPES, *FP8_DTYPES))
    check_rows("x", x, rows)
    _check_integers("index.slots", slots, 1, x[3], "x")
    check_probs(probs, experts, rows)
    if scale is not None:
        token("scale", scale[0], (torch.float32,))
        if len(scale[1]) not in (1, 2) or scale[1][0] != x[1][0]:
            raise ArgumentError(f"scale has shape {tuple(scale[1])}; expected {(x[1][0],)} or {(x[1][0], 'scales')}")
        check_same("scale", scale[3], x[3], "device index")


def check_unpermute(y: Meta, rows: Meta, probs: Meta | None, experts: Meta | None, carried: Meta | None) -> None:
    """Raise an ArgumentError for arguments of moe_unpermute that do not fit together."""
    token("y", y[0])
    if len(y[1]) != 2:
        raise ArgumentError(f"y has shape {tuple(y[1])}; expected two dimensions, [rows, columns]")
    if y[1][0] >= 2**31 or y[1][1] >= 2**30:
        raise ArgumentError(f"y has shape {tuple(y[1])}; expected less than 2^31 rows and 2^30 columns")
    _check_integers("index.rows", rows, 2, y[3], "y")
    check_probs(probs, experts, rows)
    if carried is not None:
        token("carried", carried[0], tuple(PROB_KIND))
        check_same("carried", tuple(carried[1]), (y[1][0],), "shape", of="the rows of y")


def check_backward(dout: Meta, y: Meta | None, rows: Meta, slots: Meta, probs: Meta, experts: Meta | None) -> None:
    """Raise an ArgumentError for arguments of moe_unpermute's backward that do not fit together."""
    token("dout", dout[0])
    check_rows("dout", dout, rows)
    _check_integers("index.slots", slots, 1, dout[3], "dout")
    check_probs(probs, experts, rows)
    if y is not None:
        check_same("y", y[0], dout[0], "dtype", of="dout")
        check_same("y", tuple(y[1]), (slots[1][0], dout[1][1]), "shape", of="index.slots and dout")


def check_numbers(values: Meta, rows: Meta | None, experts: Meta | None) -> None:
    """Raise an ArgumentError for numbers that cannot be put into a column per expert."""
    token("values", values[0], tuple(PROB_KIND))
    shape = next(m for m in (rows, experts, values) if m is not None)[1]
    if len(shape) != 2:
        raise ArgumentError(f"the choices have shape {tuple(shape)}; expected two dimensions, [tokens, top_k]")


def _warps(count: int, limit: int) -> int:
    """Return a number of threads, whole warps, for `count` accesses: the fewest that take `limit` threads' rounds."""
    rounds = max(1, -(-count // limit))
    return max(_WARP, -(-count // (rounds * _WARP)) * _WARP)


def _pad_blocks(rows: int, block: int) -> int:
    return -(-rows // block)  # a warp looks at 32 rows


def _grid(blocks: int) -> int:
    if blocks > GRID_LIMIT:
        raise ArgumentError(f"{blocks} blocks for these rows and tokens; expected at most {GRID_LIMIT}")
    return blocks


def plan_permute(x: Meta, rows: Meta, slots: Meta, scale: Meta | None, probs: Meta | None, device: int) -> Steps:
    (tokens, cols), size, count = x.shape, x.dtype.itemsize, slots.shape[0]
    if count == 0:
        return Steps()
    step = x.row_stride
    scales = 0 if scale is None else (scale.shape[1] if scale.dim() == 2 else 1)
    width = vector_bytes(x.misaligned, cols * size, step * size)
    width = width if width == 16 else min(width, 2)
    kind, columns = (0, 0) if probs is None else (PROB_KIND[probs.dtype], probs.shape[1])
    top_k, row_bytes = rows.shape[1], cols * size
    warps = min(_BULK_BLOCK // _WARP, _BULK_BYTES // max(row_bytes, 1))
    bulk = PERMUTE_BULK.supports(device_info(device).target)
    if bulk and width == 16 and top_k * cols * warps > 0 and 0 < _BULK_ROWS * tokens <= count:
        pads = _pad_blocks(count, warps * _WARP)
        grid = _grid(-(-tokens // warps) + pads)
        launch = PERMUTE_BULK.bind((_BULK_BLOCK,), device, grid, warps * _WARP, shared=warps * (row_bytes + 8))
        sizes = tokens, top_k, divisor(top_k), count, row_bytes, step * size, scales, kind, columns, pads
    else:
        units = cols * size // width
        threads = _warps(-(-units // _LOADS_IN_FLIGHT), _PERMUTE_BLOCK)
        block = max(_PERMUTE_BLOCK // threads, 1) * threads
        pads = _pad_blocks(count, block)
        grid = _grid(pads + -(-tokens // (block // threads)))
        launch = PERMUTE.bind((width, _LOADS_IN_FLIGHT), device, grid, block)
        sizes = tokens, top_k, count, units, step * size, scales, kind, columns, threads, pads
    tensors = "x", "rows", "slots", "scale", "probs", "experts", "y", "scale_out", "probs_out"
    return Steps(Step(launch, *tensors, *sizes))


def plan_unpermute(y: Meta, rows: Meta, probs: Meta | None, carried: Meta | None, device: int) -> Steps:
    (count, cols), size, (tokens, top_k) = y.shape, y.dtype.itemsize, rows.shape
    if tokens == 0:
        return Steps()
    step = y.row_stride
    vec = 16 // size if vector_bytes(y.misaligned, cols * size, step * size) == 16 else 1
    vectors = cols // vec
    choices, units = (_PAIR_CHOICES, _PAIR_UNITS) if vec > 1 and top_k <= _PAIR_CHOICES else (8, 1)
    threads = _warps(-(-vectors // units), _UNPERMUTE_GROUP)
    block = max(_UNPERMUTE_BLOCK // threads, 1) * threads
    variant = (size, vec, choices, units, _BLOCKS_PER_SM)
    launch = UNPERMUTE.bind(variant, device, _grid(-(-tokens // (block // threads))), block)
    numbers = probs if probs is not None else carried
    kind, columns = (0, 0) if numbers is None else (PROB_KIND[numbers.dtype], numbers.shape[-1])
    half = int(y.dtype == torch.float16)
    sizes = tokens, top_k, count, vectors, step * size, half, kind, columns, threads
    return Steps(Step(launch, "y", "rows", "probs", "experts", "carried", "out", "numbers", *sizes))


def plan_backward(dout: Meta, y: Meta | None, rows: Meta, slots: Meta, probs: Meta, need_y: bool, device: int) -> Steps:
    (tokens, cols), size, count, top_k = dout.shape, dout.dtype.itemsize, slots.shape[0], rows.shape[1]
    strides = [0 if m is None else m.row_stride * size for m in (dout, y)]
    vec = 16 // size if vector_bytes(misaligned(dout, y), cols * size, *strides) == 16 else 1
    vectors = cols // vec
    threads = _warps(vectors, _BACKWARD_THREADS)
    pads = _pad_blocks(count, threads) if need_y else 0
    if tokens + pads == 0:
        return Steps()
    launch = UNPERMUTE_BWD.bind((size, vec), device, _grid(pads + tokens), threads)
    half = int(dout.dtype == torch.float16)
    sizes = top_k, count, vectors, *strides, half, PROB_KIND[probs.dtype], probs.shape[1], pads
    return Steps(Step(launch, "dout", "y", "rows", "slots", "probs", "experts", "dy", "dprobs", *sizes))


def plan_probs(values: Meta, rows: Meta | None, experts: Meta | None, columns: int, device: int) -> Steps:
    tokens, top_k = next(m for m in (rows, experts, values) if m is not None).shape
    if tokens * columns == 0:
        return Steps()
    if not top_k:  # the address of no experts would mean that there is no such tensor
        return IN_TORCH
    grid = min(-(-tokens * columns // _PROBS_THREADS), 1 << 20)
    launch = PROBS.bind((_PROBS_THREADS,), device, grid, _PROBS_THREADS)
    sizes = tokens, top_k, values.shape[0], columns, PROB_KIND[values.dtype]
    return Steps(Step(launch, "values", "rows", "experts", "out", *sizes))
