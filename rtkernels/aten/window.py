"""Windows of aten: average and maximum pooling, nearest upsampling, and their gradients (family ``win``)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.strides import like_channels_last
from rtkernels.aten.table import DTYPE, EMPTY, INVALID, RANK, NotHandled, Overload
from rtkernels.ops.shared.strided import FLOATS
from rtkernels.ops.window.pooling import avg_pool, max_pool
from rtkernels.ops.window.pooling_bwd import avg_pool_grad, max_pool_grad
from rtkernels.ops.window.upsampling import upsample_nearest, upsample_nearest_grad

_LARGE, _FORMAT = NotHandled("plane of 2^30"), NotHandled("channels last")


def _refused(x: Tensor, ranks: tuple[int, ...] = (3, 4)) -> NotHandled | None:
    if x.dtype not in FLOATS:
        return DTYPE
    if x.dim() not in ranks:
        return RANK
    if x.numel() == 0:
        return EMPTY
    if max(x.shape[-2:]) >= 2**30:
        return _LARGE
    return _FORMAT if like_channels_last(x.shape, x.stride()) else None  # which torch's results have, too


def _pair(value: int | Sequence[int]) -> tuple[int, int] | None:
    listed = (value,) if isinstance(value, int) else tuple(value)
    return listed * 2 if len(listed) == 1 else listed if len(listed) == 2 else None


def _size(n: int, window: int, step: int, pad: int, dilation: int, ceil_mode: bool) -> int:
    room = n + 2 * pad - dilation * (window - 1) - 1
    made = (room + (step - 1 if ceil_mode else 0)) // step + 1
    return made - 1 if ceil_mode and (made - 1) * step >= n + pad else made  # windows begin inside


def _windows(x: Tensor, kernel: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> Any:
    """Return the result's height and width, and what kernels know of a window.

    NotHandled for what torch refuses, and for numbers with which places would leave 32 bits.
    """
    if (refused := _refused(x)) is not None:
        return refused
    kernel, padding, dilation = _pair(kernel), _pair(padding), _pair(dilation)
    stride = kernel if isinstance(stride, (list, tuple)) and not stride else _pair(stride)
    if None in (kernel, stride, padding, dilation) or min(*kernel, *stride, *dilation) < 1:
        return INVALID
    if max(*kernel, *stride, *dilation) >= 2**29:
        return INVALID
    if any(pad < 0 or 2 * pad > window for pad, window in zip(padding, kernel, strict=True)):
        return INVALID
    per_dim = zip(x.shape[-2:], kernel, stride, padding, dilation, strict=True)
    out = tuple(_size(*how, ceil_mode) for how in per_dim)
    return INVALID if min(out) < 1 else (out, (*kernel, *stride, *padding), dilation)


def _avg_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, ceil_mode: bool = False,
    count_include_pad: bool = True, divisor_override: int | None = None,
) -> Any:  # fmt: skip
    found = INVALID if divisor_override == 0 else _windows(x, kernel_size, stride, padding, 1, ceil_mode)
    if isinstance(found, NotHandled):
        return found
    out, window, _ = found
    y = avg_pool(_planes(x), out, window, count_include_pad, divisor_override or 0)
    return y if x.dim() == 4 else y.squeeze(0)


def _max_pool2d(
    x: Tensor, kernel_size: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False
) -> Any:
    found = _windows(x, kernel_size, stride, padding, dilation, ceil_mode)
    if isinstance(found, NotHandled):
        return found
    made = max_pool(_planes(x), *found)
    return made if x.dim() == 4 else tuple(result.squeeze(0) for result in made)


def _upsample_nearest2d(
    x: Tensor, output_size: Any, scales_h: float | None = None, scales_w: float | None = None
) -> Any:
    if (refused := _refused(x, (4,))) is not None:
        return refused
    out = tuple(output_size)
    if len(out) != 2 or min(out) < 1:
        return INVALID
    if max(out) >= 2**30:
        return _LARGE
    scales = _scales(x.shape[2:], out, (scales_h, scales_w))
    same = (n == m for n, m in zip(x.shape[2:], out, strict=True))  # torch copies, whatever factor comes with it
    return upsample_nearest(x, out, tuple(1.0 if copied else s for copied, s in zip(same, scales, strict=True)))


def _planes(x: Tensor) -> Tensor:
    return x if x.dim() == 4 else x.unsqueeze(0)


def _gradient_refused(dy: Tensor, x: Tensor, out: tuple[int, int]) -> NotHandled | None:
    if dy.dtype != x.dtype:
        return DTYPE
    return None if tuple(dy.shape) == (*x.shape[:-2], *out) else INVALID


def _avg_pool2d_backward(
    grad_output: Tensor, x: Tensor, kernel_size: Any, stride: Any, padding: Any, ceil_mode: bool,
    count_include_pad: bool, divisor_override: int | None,
) -> Any:  # fmt: skip
    found = INVALID if divisor_override == 0 else _windows(x, kernel_size, stride, padding, 1, ceil_mode)
    if isinstance(found, NotHandled):
        return found
    out, window, _ = found
    if (refused := _gradient_refused(grad_output, x, out)) is not None:
        return refused
    size = tuple(x.shape[-2:])
    return avg_pool_grad(_planes(grad_output), size, window, count_include_pad, divisor_override or 0).view(x.shape)


def _max_pool2d_backward(
    grad_output: Tensor, x: Tensor, kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool,
    indices: Tensor,
) -> Any:  # fmt: skip
    found = _windows(x, kernel_size, stride, padding, dilation, ceil_mode)
    if isinstance(found, NotHandled):
        return found
    if indices.dtype != torch.int64 or indices.shape != grad_output.shape:
        return INVALID
    out, window, dilation = found
    if (refused := _gradient_refused(grad_output, x, out)) is not None:
        return refused
    size = tuple(x.shape[-2:])
    return max_pool_grad(_planes(grad_output), _planes(indices), size, window, dilation).view(x.shape)


def _scales(size: Any, out: Any, given: tuple[float | None, float | None]) -> tuple[float, ...]:
    """Return how many elements of the input each of the result stands for, down and across."""
    sizes = zip(size, out, given, strict=True)
    return tuple(1 / scale if scale is not None and scale > 0 else n / m for n, m, scale in sizes)


def _upsample_nearest2d_backward(
    grad_output: Tensor, output_size: Any, input_size: Any, scales_h: float | None = None, scales_w: float | None = None
) -> Any:
    if (refused := _refused(grad_output, (4,))) is not None:
        return refused
    size = tuple(input_size)
    if tuple(grad_output.shape) != (*size[:2], *output_size) or min(size) < 1:
        return INVALID
    if max(size[2:]) >= 2**30:
        return _LARGE
    same = size[2:] == tuple(output_size)  # torch copies
    scales = (1.0, 1.0) if same else _scales(size[2:], output_size, (scales_h, scales_w))
    return upsample_nearest_grad(grad_output, size[2:], scales)


def rows() -> Iterator[Overload]:
    """Yield the overloads of this family."""
    avg, largest = ("nn.functional.avg_pool2d",), ("nn.functional.max_pool2d",)
    nearest = ("nn.functional.upsample_nearest",)
    yield Overload("avg_pool2d", "win", _avg_pool2d, opinfo=avg, replays=True)
    yield Overload("avg_pool2d_backward", "win", _avg_pool2d_backward, opinfo=avg, replays=True)
    yield Overload("max_pool2d_with_indices", "win", _max_pool2d, opinfo=largest, replays=True)
    yield Overload("max_pool2d_with_indices_backward", "win", _max_pool2d_backward, opinfo=largest, replays=True)
    yield Overload("upsample_nearest2d", "win", _upsample_nearest2d, opinfo=nearest, replays=True)
    yield Overload("upsample_nearest2d_backward", "win", _upsample_nearest2d_backward, opinfo=nearest, replays=True)
