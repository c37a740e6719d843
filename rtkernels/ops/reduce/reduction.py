"""Sums, products, extremes with and without indices, counts, norms and variances over any dimensions of a tensor.

Two kernels per monoid and type: along elements that lie side by side (or anywhere), and down columns. Both cut
long reductions into slices, whose states the last block combines; no tensor is copied or transposed first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.shared.strided import (
    FLOATS,
    INTEGERS,
    STORED,
    TOKEN,
    Dims,
    by_stride,
    merged,
    padded,
    power_of_two,
    product,
)
from rtkernels.runtime.invariance import choice_rows, level
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.layout import GRID_LIMIT, divisor
from rtkernels.runtime.operator.declared import Argument, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

# What becomes of an element first, and of a state last (cuda_src/reduce/monoids.cuh).
LIFT = {"value": 0, "abs": 1, "square": 2, "power": 3, "nonzero": 4, "flip": 8, "flip_abs": 9}
FINISH = {"value": 0, "divide": 1, "root": 2, "power": 3, "any": 4, "all": 5}

_THREADS = 256
_PER_SM = 1024  # threads on an SM, those of states of 4 bytes; others have half of them
_MAX_SLICE = 2**30  # elements, which kernels count in 32 bits
_FLOAT_TOKENS = ("bf16", "fp16", "fp32")
_INT_TOKENS = ("i64", "i32", "u8")
# Monoids by name: template argument for floats, for integers, bytes of a state, names of results.
_MONOIDS = {
    "sum": ("FloatSum", "IntegerSum", (4, 8)),
    "count": ("IntegerSum", "IntegerSum", (8, 8)),
    "product": ("Product<float>", "Product<rtk::i64>", (4, 8)),
    "maximum": ("Maximum<float>", "Maximum<rtk::i64>", (4, 8)),
    "arg_maximum": ("ArgMaximum<float>", "ArgMaximum<rtk::i64>", (16, 16)),
    "moments": ("Moments", None, (12, 0)),
}
_VARIANTS = sorted(
    {(t, _MONOIDS[m][0]) for m in _MONOIDS for t in _FLOAT_TOKENS}
    | {(t, _MONOIDS[m][1]) for m in _MONOIDS if _MONOIDS[m][1] for t in _INT_TOKENS}
)
_ARGS = (
    "x:ptr out:ptr second:ptr partial:ptr tickets:ptr results:i64 size1:i64 size0:i64 x2:i64 x1:i64 x0:i64 out2:i64 "
    "out1:i64 out0:i64 count:i64 reduced1:i64 reduced0:i64 divider1:i64 divider0:i64 stride2:i64 stride1:i64 "
    "stride0:i64 slices:i64 per_slice:i64 {across}:i64 aligned:i64 lift:i64 power:f64 finish:i64 number:f64 type:i64"
)
_ROWS = Kernel(
    "reduce/reduce_rows.cu", "reduce_rows", template="T Monoid", args=_ARGS.format(across="threads_per_row"),
    variants=_VARIANTS, max_registers=128, tier="aten",
)  # fmt: skip
_COLUMNS = Kernel(
    "reduce/reduce_columns.cu", "reduce_columns", template="T Monoid", args=_ARGS.format(across="across"),
    variants=_VARIANTS, max_registers=128, tier="aten",
)  # fmt: skip


class Geometry(NamedTuple):
    """A reduction after merging: three kept dimensions (size, x, out), three reduced ones (size, x)."""

    kept: Dims
    reduced: Dims
    down: bool  # the innermost kept dimension has stride 1, and is the one to read along


def geometry(shape: tuple[int, ...], stride: tuple[int, ...], dims: tuple[int, ...], ordered: bool) -> Geometry | None:
    """Return how a reduction walks, or None for strides that leave more than three dimensions of a kind.

    Args:
        shape: Without a 0.
        stride: As torch gives it.
        dims: The reduced ones, at least 0.
        ordered: Reduced elements are numbered in their logical order, so that their dimensions keep theirs.
    """
    kept_sizes = [1 if i in dims else n for i, n in enumerate(shape)]
    out = dense_strides(kept_sizes)
    kept = merged(by_stride([(n, stride[i], out[i]) for i, n in enumerate(shape) if i not in dims and n > 1]))
    inner = [(shape[i], stride[i]) for i in sorted(dims) if shape[i] > 1]
    reduced = merged(inner if ordered else by_stride(inner))
    down = bool(kept) and kept[-1][1] == 1 and (not reduced or reduced[-1][1] != 1)
    kept, reduced = padded(kept, 3, 2), padded(reduced, 3, 1)
    if kept is None or reduced is None or (reduced[1][0] > 1 and product([n for n, _ in reduced]) >= 2**31):
        return None
    return Geometry(kept, reduced, down)


def _slices(blocks: int, resident: int, units: int, shortest: int) -> int:
    """Return how many parts reductions are cut into: as many as the device has blocks at a time, of `shortest` units or
    more.
    """
    return max(1, min(resident // max(blocks, 1), units // shortest, 4096))


def row_shape(results: int, units: int, per_sm: int, sm_count: int) -> tuple[int, int]:
    """Return the threads that share a row, and the slices of a row.

    Args:
        results: Rows.
        units: Accesses of a row.
        per_sm: Threads that an SM has at a time.
        sm_count: Number of SMs.
    """
    results = choice_rows(results)
    threads = min(power_of_two(-(-units // 4)), 32)
    # As many as give all SMs something to do, as long as a thread has several accesses.
    while threads >= 32 and threads < _THREADS and results * threads < 0.6 * per_sm * sm_count and units > 8 * threads:
        threads *= 2
    if threads < _THREADS:
        return threads, 1
    return threads, _slices(results, per_sm * sm_count // _THREADS, units, 8 * _THREADS)


def column_shape(vectors: int, others: int, count: int, per_sm: int, sm_count: int) -> tuple[int, int, int]:
    """Return the threads of a block, those that share a row, and the slices of a column.

    Args:
        vectors: Accesses of a row.
        others: Entries of other kept dimensions.
        count: Elements of a column.
        per_sm: Threads that an SM has at a time.
        sm_count: Number of SMs.
    """
    if level():
        return _THREADS, 8, 1
    for across in (32, 16, 8, 4):  # without slices, if tiles of 64 bytes or more are enough for all SMs
        tiles = -(-vectors // across) * others
        for threads in (_THREADS, 2 * _THREADS, 4 * _THREADS):
            if threads <= per_sm and 0.8 * sm_count * (per_sm // threads) <= tiles and count * across >= 4 * threads:
                return threads, across, 1
    across = min(power_of_two(vectors), 32)
    tiles = -(-vectors // across) * others
    return _THREADS, across, _slices(tiles, per_sm * sm_count // _THREADS, count, 8 * _THREADS // across)


def _plan(
    x: Meta, monoid: str, dims: tuple[int, ...], keepdim: bool, lift: str, power: float, finish: str, number: float,
    out_dtype: torch.dtype, wanted: str, device: int,
) -> Steps:  # fmt: skip
    g = geometry(x.shape, x.stride, dims, monoid == "arg_maximum")
    size, floating = x.dtype.itemsize, x.dtype in FLOATS
    name, bytes_each = _MONOIDS[monoid][0 if floating else 1], _MONOIDS[monoid][2][0 if floating else 1]
    (n2, *_), (n1, *_), (n0, *_) = g.kept
    results, (r2, r1, r0) = n2 * n1 * n0, [n for n, _ in g.reduced]
    count = r2 * r1 * r0
    single = r1 == r2 == 1
    dividers = (0, 0) if single else (divisor(r1), divisor(r0))
    # Vectors go along one dimension: distances in all others must be whole ones, also those of overlapping windows (1).
    along = (*g.kept[:2], *g.reduced) if g.down else (*g.kept, *g.reduced[:2])
    others = [step for _, step, *_ in along]
    sm_count, per_sm = device_info(device).sm_count, _PER_SM if bytes_each == 4 else _PER_SM // 2
    if g.down:
        vector = 2 if size == 8 else 8 if size == 2 and monoid != "count" else 4
        aligned = all(step % vector == 0 for step in others) and n0 % vector == 0
        aligned = aligned and x.misaligned % (vector * size) == 0
        vector = vector if aligned else 1
        threads, across, slices = column_shape(-(-n0 // vector), n1 * n2, count, per_sm, sm_count)
        tiles = -(-n0 // (across * vector)) * n1 * n2
        per_slice = -(-count // max(slices, -(-count // _MAX_SLICE)))
        slices = -(-count // per_slice)
        kernel, tickets = _COLUMNS, tiles
        grid, shared = tiles * slices, threads * vector * bytes_each
        part_bytes = tickets * slices * across * vector * bytes_each
    else:
        vector = 16 // size
        aligned = g.reduced[2][1] == 1 and all(step % vector == 0 for step in others)
        aligned = aligned and r0 % vector == 0 and x.misaligned == 0
        vector = vector if aligned else 1
        units = -(-count // vector)
        across, slices = row_shape(results, units, _PER_SM, sm_count)
        threads = across if across > 32 else _THREADS
        per_slice = -(-units // max(slices, -(-count // _MAX_SLICE))) * vector
        slices = -(-count // per_slice)
        kernel, tickets = _ROWS, results
        grid, shared = -(-results * slices // (threads // across)), 0
        part_bytes = slices * results * bytes_each
    if grid > GRID_LIMIT:
        raise OverflowError("more blocks than a grid has")
    first, second = ("out", "second") if monoid in ("arg_maximum", "moments") else ("out", 0)
    first, second = first if "o" in wanted else 0, second if "s" in wanted else 0
    ending = LIFT[lift], float(power), FINISH[finish], float(number), STORED[out_dtype]
    walk = (
        results, n1, n0, *(step for _, step, _ in g.kept), *(step for *_, step in g.kept), count, r1, r0, *dividers,
        *(step for _, step in g.reduced), slices, per_slice, across, int(aligned),
    )  # fmt: skip
    launch = kernel.bind((TOKEN[x.dtype], name), device, grid, threads, shared)
    if slices == 1:
        return Steps(Step(launch, "x", first, second, 0, 0, *walk, *ending))
    return Steps(
        Step(launch, "x", first, second, "partial", "tickets", *walk, *ending),
        scratch={"partial": Memory((part_bytes,), torch.uint8)},
        kept_zeros={"tickets": tickets},
    )


def _outputs(
    x: Meta, monoid: str, dims: tuple[int, ...], keepdim: bool, lift: str, power: float, finish: str, number: float,
    out_dtype: torch.dtype, wanted: str,
) -> tuple[Memory, ...]:  # fmt: skip
    shape = tuple(1 if i in dims else n for i, n in enumerate(x.shape) if keepdim or i not in dims)
    second = torch.int64 if monoid == "arg_maximum" else out_dtype
    return tuple(Memory(shape, out_dtype if which == "o" else second) for which in wanted)


_REDUCE = {
    wanted: Primitive(
        "reduce", (Argument("x", None),), "monoid, dims, keepdim, lift, power, finish, number, out_dtype, wanted",
        results=results, outputs=_outputs, plan=_plan,
    )
    for wanted, results in (("o", "out"), ("s", "second"), ("os", "out second"))
}  # fmt: skip


def reducible(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], dims: tuple[int, ...], *, ordered: bool = False
) -> str | None:
    """Return why a tensor of this metadata cannot be reduced here, or None."""
    if dtype not in TOKEN:
        return f"dtype {str(dtype).removeprefix('torch.')}"
    if 0 in shape:
        return "empty"
    return None if geometry(shape, stride, dims, ordered) is not None else "strides"


def reduce(
    x: Tensor, monoid: str, dims: tuple[int, ...], keepdim: bool, out_dtype: torch.dtype, *, lift: str = "value",
    power: float = 0.0, finish: str = "value", number: float = 0.0, wanted: str = "o",
) -> Any:  # fmt: skip
    """Reduce some dimensions of a tensor; for those who know what the parts mean, see ``cuda_src/reduce/monoids.cuh``.

    Args:
        x: bfloat16, float16, float32, int64, int32, uint8 or bool; any strides that ``reducible`` accepts; not empty.
        monoid: "sum", "count", "product", "maximum", "arg_maximum" or, for floats, "moments".
        dims: Reduced dimensions, at least 0; at least one.
        keepdim: Leave them as dimensions of size 1.
        out_dtype: Of the result: a float for floats (but for counts), else an integer.
        lift: What becomes of elements first; "flip" makes minima of maxima.
        power: For the lift "power".
        finish: What becomes of a result last.
        number: For that: the divisor of a mean or variance, the exponent, the count of "all".
        wanted: "o" for the result (values of "arg_maximum", variances), "s" for the second one (indices, means), "os"
            for both.

    Returns:
        The result, dense; two of them for "os".
    """
    return _REDUCE[wanted](x, monoid, dims, keepdim, lift, power, finish, number, out_dtype, wanted)


OP = Op("reduction", public=(), kernels=(_ROWS, _COLUMNS), torch_ops=())
__all__ = ["FLOATS", "INTEGERS", "OP", "reduce", "reducible"]
