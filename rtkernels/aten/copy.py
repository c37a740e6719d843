"""Family ``copy``: clones, conversions, padding and the like, as copies between strided views.

Copies move bits where both sides have one dtype, so every dtype of up to eight bytes is taken. What torch writes as a
fill and a copy is that here too. Concatenation is in ``concat.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import copy_into, run
from rtkernels.aten.functors import FILL, KERNELS, TOKENS
from rtkernels.aten.strides import MAX_DIMS, arrange, like_channels_last, overlaps_itself
from rtkernels.aten.table import OVERLAP, NotHandled, Overload
from rtkernels.errors import ArgumentError
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.memory import dense_strides
from rtkernels.runtime.operator.declared import Argument, InPlace, Meta, Primitive
from rtkernels.runtime.operator.plan import Memory, Offset, Step, Steps
from rtkernels.runtime.operator.registry import Op

TOKEN_OF_SIZE = {1: "u8", 2: "i16", 4: "i32", 8: "i64"}
_THREADS = 256
_TRIANGLE = Kernel(
    "pointwise/triangle.cu", "triangle", template="T UPPER", tier="aten", max_registers=64,
    args="x:ptr y:ptr rows:i64 columns:i64 matrices:i64 inner:i64 outer_stride:i64 matrix_stride:i64 row_stride:i64 "
    "column_stride:i64 diagonal:i64 vectors:i64",
    variants=[(token, upper) for token in TOKEN_OF_SIZE.values() for upper in (False, True)],
)  # fmt: skip
OP = Op("aten_copy", public=(), kernels=(_TRIANGLE,), torch_ops=())

FORMAT = NotHandled("memory format")
_NUMBER = NotHandled("a number")
_DEVICE = NotHandled("another device")
DTYPES = NotHandled("several dtypes")
SHAPES = NotHandled("shapes")
DIM = NotHandled("dim out of range")
ITEM_SIZE = NotHandled("elements of 16 bytes")
_RANK = NotHandled("more than 4 dimensions, strided")
_GAPS = NotHandled("gaps between elements")


def rows() -> Iterator[Overload]:
    """Yield the rows of this family."""
    yield from (
        Overload("clone", "copy", _clone, opinfo=("clone", "contiguous"), replays=True),
        Overload("copy_", "copy", _copy_, opinfo=("clone",), replays=True),
        Overload("_to_copy", "copy", _to_copy, opinfo=("to",), replays=True),
        Overload("repeat", "copy", _repeat, opinfo=("repeat",), replays=True),
        Overload("flip", "copy", _flip, opinfo=("flip",), replays=True),
        Overload(
            "constant_pad_nd", "copy", _constant_pad_nd, opinfo=("nn.functional.pad", "constant_pad_nd"), replays=True
        ),
        Overload("triu", "copy", _triangle(True), opinfo=("triu",), replays=True),
        Overload("tril", "copy", _triangle(False), opinfo=("tril",), replays=True),
        Overload("slice_scatter", "copy", _slice_scatter, opinfo=("slice_scatter",), replays=True),
        Overload("select_scatter", "copy", _select_scatter, opinfo=("select_scatter",), replays=True),
        Overload("diagonal_backward", "copy", _diagonal_backward, opinfo=("diagonal",)),
        Overload("diag_embed", "copy", _diag_embed, opinfo=("diag_embed",), replays=True),
    )


# ---- one input ------------------------------------------------------------------------------------------------------


def _like(self: Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None) -> Tensor:
    return torch.empty_like(self, dtype=dtype, memory_format=memory_format or torch.preserve_format)


def _clone(self: Tensor, *, memory_format: torch.memory_format | None = None) -> Any:
    return copy_into(_like(self, self.dtype, memory_format), self)


def _copy_(self: Tensor, src: Tensor, non_blocking: bool = False) -> Any:
    if not isinstance(src, Tensor):
        return _NUMBER
    if self.device != src.device:
        return _DEVICE
    if self.dtype != src.dtype and (self.dtype not in TOKENS or src.dtype not in TOKENS):
        return NotHandled(str(src.dtype).removeprefix("torch."))
    if self is src:
        return self
    return copy_into(self, src)


def _to_copy(
    self: Tensor,
    *,
    dtype: torch.dtype | None = None,
    layout: torch.layout | None = None,
    device: torch.device | None = None,
    pin_memory: bool | None = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format | None = None,
) -> Any:
    if not isinstance(self, Tensor):
        return _NUMBER
    if device is not None and torch.device(device) != self.device:
        return _DEVICE
    if pin_memory or (layout is not None and layout != torch.strided):
        return NotHandled("pinned memory or another layout")
    dtype = dtype or self.dtype
    if dtype != self.dtype and (dtype not in TOKENS or self.dtype not in TOKENS):
        return NotHandled(str(dtype if dtype not in TOKENS else self.dtype).removeprefix("torch."))
    return copy_into(_like(self, dtype, memory_format), self)


def _repeat(self: Tensor, repeats: Sequence[int]) -> Any:
    extra = len(repeats) - self.dim()
    if extra < 0 or any(times < 0 for times in repeats):
        return SHAPES
    shape = (1,) * extra + tuple(self.shape)
    result = self.new_empty([times * size for times, size in zip(repeats, shape, strict=True)])
    if result.numel() == 0:
        return result
    # Each dimension becomes two: the copies, in which the input stands still, and its own.
    split = [size for times, own in zip(repeats, shape, strict=True) for size in (times, own)]
    source = self.reshape(shape) if extra else self
    for i in range(len(shape)):
        source = source.unsqueeze(2 * i)
    done = copy_into(result.view(split), source.expand(split))
    return done if type(done) is NotHandled else result


def _flip(self: Tensor, dims: Sequence[int]) -> Any:
    rank = self.dim()
    if any(not -rank <= dim < rank for dim in dims) or len({dim % rank for dim in dims if rank}) < len(dims):
        return DIM
    result = torch.empty_like(self)
    if self.numel():
        if self.element_size() not in TOKEN_OF_SIZE:
            return ITEM_SIZE
        _FLIPPED(self, result, tuple(sorted(dim % rank for dim in dims)))
    return result


def _plan_flip(x: Meta, out: Meta, dims: tuple[int, ...], device: int) -> Steps:
    # A flip of the output is one of the input. Tensors have no negative strides, but kernels take them.
    size = x.dtype.itemsize
    strides = tuple(-step if i in dims else step for i, step in enumerate(x.stride))
    start = size * sum((x.shape[i] - 1) * x.stride[i] for i in dims)
    how = arrange(tuple(x.shape), [out.stride, strides], [size, size], [0, (x.misaligned + start) % 16])
    if how is None:
        raise ArgumentError(f"x has {len(x.shape)} dimensions; expected at most {MAX_DIMS} that cannot be merged")
    token = TOKEN_OF_SIZE[size]
    launch = KERNELS.bind(("Copy", token, token, token, "u8", "u8"), how, device)
    return Steps(Step(launch, "out", Offset("x", start), 0, 0, *[0] * 7))


_FLIPPED = Primitive("flip", (Argument("x", None), InPlace("out", None)), "dims", results="", plan=_plan_flip)


def _constant_pad_nd(self: Tensor, pad: Sequence[int], value: Any = 0) -> Any:
    rank = self.dim()
    if len(pad) % 2 or len(pad) > 2 * rank or type(value) is complex:
        return SHAPES
    sizes, inside, source = list(self.shape), [slice(None)] * rank, self
    for i in range(len(pad) // 2):
        dim, before, after = rank - 1 - i, pad[2 * i], pad[2 * i + 1]
        sizes[dim] += before + after
        if sizes[dim] < 0 or (sizes[dim] == 0 and self.shape[dim]):
            return SHAPES
        kept = slice(max(-before, 0), self.shape[dim] - max(-after, 0))
        if kept.stop < kept.start:
            return SHAPES
        source = source[(slice(None),) * dim + (kept,)]
        inside[dim] = slice(max(before, 0), sizes[dim] - max(after, 0))
    if all(number <= 0 for number in pad):  # a crop: torch clones the view, and strides of size 1 stay
        return copy_into(torch.empty_like(source), source)
    if isinstance(value, float) and not self.is_floating_point():
        return SHAPES
    if not self.is_contiguous() or like_channels_last(self.shape, self.stride()):
        return FORMAT
    result = self.new_empty(sizes)
    border = _fill_all(result, value)
    if type(border) is NotHandled or source.numel() == 0:
        return border
    done = copy_into(result[tuple(inside)], source)
    return done if type(done) is NotHandled else result


def _fill_all(result: Tensor, value: Any) -> Any:
    if result.dtype not in TOKENS:
        return NotHandled(str(result.dtype).removeprefix("torch."))
    if result.dtype == torch.bool:
        value = bool(value)
    return run(FILL, (), (value,), out=result, common=result.dtype)


# ---- into a part ----------------------------------------------------------------------------------------------------


def _with_part(self: Tensor, src: Tensor, part: Any) -> Any:
    """Return a copy of `self`, with its strides, of which the view `part(copy)` is overwritten."""
    if self.dtype != src.dtype or self.device != src.device:
        return DTYPES
    if TOKEN_OF_SIZE.get(self.element_size()) is None:
        return ITEM_SIZE
    if overlaps_itself(tuple(self.shape), self.stride()):
        return OVERLAP
    if sum((n - 1) * step for n, step in zip(self.shape, self.stride(), strict=True) if n) >= max(self.numel(), 1):
        return _GAPS  # whose elements torch copies, too
    result = torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)
    view = part(result)
    if view.shape != src.shape:
        return SHAPES
    for done in (copy_into(result, self), copy_into(view, src)):
        if type(done) is NotHandled:
            return done
    return result


def _slice_scatter(
    self: Tensor, src: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    if not -self.dim() <= dim < self.dim() or step <= 0:
        return DIM
    return _with_part(self, src, lambda result: torch.ops.aten.slice.Tensor(result, dim, start, end, step))


def _select_scatter(self: Tensor, src: Tensor, dim: int, index: int) -> Any:
    if not -self.dim() <= dim < self.dim() or not -self.shape[dim] <= index < self.shape[dim]:
        return DIM
    return _with_part(self, src, lambda result: result.select(dim, index))


def _diagonal_backward(grad_output: Tensor, input_sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Any:
    result = grad_output.new_empty(input_sizes)
    return _on_diagonal(result, grad_output, offset, dim1, dim2)


def _diag_embed(self: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    rank = self.dim() + 1
    if self.dim() == 0 or not (-rank <= dim1 < rank and -rank <= dim2 < rank) or dim1 % rank == dim2 % rank:
        return DIM
    first, second = dim1 % rank, dim2 % rank
    size = self.shape[-1] + abs(offset)
    sizes = list(self.shape[:-1])
    for dim in sorted((first, second)):
        sizes.insert(dim, size)
    return _on_diagonal(self.new_empty(sizes), self, offset, first, second)


def _on_diagonal(result: Tensor, values: Tensor, offset: int, dim1: int, dim2: int) -> Any:
    border = _fill_all(result, 0)
    if type(border) is NotHandled:
        return border
    done = copy_into(result.diagonal(offset, dim1, dim2), values)
    return done if type(done) is NotHandled else result


# ---- triangles ------------------------------------------------------------------------------------------------------


def _plan_triangle(x: Meta, diagonal: int, upper: bool, device: int) -> Steps:
    size, dense, rank = x.dtype.itemsize, x.stride == dense_strides(x.shape), len(x.shape)
    *_, rows_, columns = x.shape
    count = math.prod(x.shape)
    matrices = count // (rows_ * columns)
    if dense:
        inner, outer_stride, matrix_stride = matrices, 0, rows_ * columns
    else:
        inner = x.shape[-3] if rank > 2 else 1
        outer_stride = x.stride[0] if rank > 3 else 0
        matrix_stride = x.stride[-3] if rank > 2 else 0
    vector = 16 // size
    strides = outer_stride, matrix_stride, x.stride[-2]
    vectors = (
        x.stride[-1] == 1
        and columns % vector == 0
        and x.misaligned == 0
        and all(step % vector == 0 for step in strides)
    )
    count //= vector if vectors else 1
    launch = _TRIANGLE.bind((TOKEN_OF_SIZE[size], upper), device, -(-count // _THREADS), _THREADS)
    numbers = rows_, columns, matrices, inner, *strides, x.stride[-1], diagonal, int(vectors)
    return Steps(Step(launch, "x", "y", *numbers))


_TRIANGLES = Primitive(
    "triangle", (Argument("x", None),), "diagonal, upper", results="y",
    outputs=lambda x: (Memory(x.shape, x.dtype),), plan=_plan_triangle,
)  # fmt: skip


def _triangle(upper: bool) -> Callable[..., Any]:
    def handler(self: Tensor, diagonal: int = 0) -> Any:
        if self.element_size() not in TOKEN_OF_SIZE:
            return ITEM_SIZE
        if self.dim() < 2:
            return SHAPES
        if not self.is_contiguous():
            if self.dim() > 4:
                return _RANK
            if torch.empty_like(self, device="meta").stride() != dense_strides(self.shape):
                return FORMAT
        return _TRIANGLES(self, diagonal, upper) if self.numel() else torch.empty_like(self)

    return handler
