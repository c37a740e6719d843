"""Layout changes for inference: images to patches, heads repeated for grouped queries."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.layout.strided_copy import strided_copy
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import FLOAT_DTYPES, token
from rtkernels.runtime.operator.arguments import Among, Matching, Within, check_integer
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.registry import Op

_ORDERS = {"hwc": (0, 1, 2, 3, 4, 5), "chw": (0, 1, 2, 5, 3, 4)}  # of n, gh, gw, row, column, channel


# ---- patchify -------------------------------------------------------------------------------------------------------


def _patches(img: Tensor, ph: int, pw: int, img_layout: str, order: str) -> tuple[Tensor, tuple[int, ...]]:
    """Return an image as a view ``[n, gh, gw, ...]`` of its patches, and the shape of the result."""
    pixels = img if img_layout == "nhwc" else img.permute(0, 2, 3, 1)
    n, h, w, c = pixels.shape
    gh, gw = h // ph, w // pw
    view = pixels[:, : gh * ph, : gw * pw].unflatten(2, (gw, pw)).unflatten(1, (gh, ph)).permute(0, 1, 3, 2, 4, 5)
    return view.permute(_ORDERS[order]), (n, gh * gw, ph * pw * c)


class _Patchify(torch.autograd.Function):
    @staticmethod
    def forward(ctx, img, ph, pw, img_layout, order):
        ctx.like, ctx.how = (img.shape, img.dtype, img.device), (ph, pw, img_layout, order)
        ctx.computed_gradient = False
        view, shape = _patches(img.detach(), *ctx.how)
        out = torch.empty(shape, dtype=img.dtype, device=img.device)
        strided_copy(view, out.view(view.shape))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        shape, dtype, device = ctx.like
        dx = torch.zeros(shape, dtype=dtype, device=device)  # pixels beyond the last whole patch
        view, _ = _patches(dx, *ctx.how)
        strided_copy(dy.reshape(view.shape), view)
        return dx, None, None, None, None


_patchify = applied(_Patchify)


_OPTIONS = {
    "img": Matching((), "img.dim() == 4", "four dimensions, [n, h, w, c] or [n, c, h, w]"),
    "img_layout": Among(("nhwc", "nchw"), "'nhwc' or 'nchw'"), "order": Among(_ORDERS, "'hwc' or 'chw'"),
}  # fmt: skip


@public(options=_OPTIONS)
def patchify(
    img: Tensor, patch: int | tuple[int, int], *, img_layout: str = "nhwc", order: str = "hwc",
    lut: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Split images into patches, one row per patch, as a convolution with stride = kernel size reads them.

    Differentiable once in img. Pixels beyond the last whole patch are dropped.

    Args:
        img: ``[n, h, w, c]`` or ``[n, c, h, w]``; bfloat16, float16 or float32, any strides; or uint8 with `lut`.
        patch: Height and width of a patch, or one number for both.
        img_layout: ``"nhwc"`` or ``"nchw"``.
        order: Order of the elements of a patch in a row: ``"hwc"`` (row, column, channel) or ``"chw"``.
        lut: ``[256]``, the values of the bytes of a uint8 image; the result has its dtype.
        out: Tensor to write the result to. Not with gradients.

    Returns:
        ``[n, h // ph * (w // pw), ph * pw * c]``, patches in row-major order of the image.
    """
    ph, pw = patch if isinstance(patch, tuple) and len(patch) == 2 else (patch, patch)
    if check_integer("patch", ph) <= 0 or check_integer("patch", pw) <= 0:
        raise ArgumentError(f"patch is {patch}; expected sizes above 0")
    if lut is not None:
        if img.dtype != torch.uint8 or lut.dtype not in FLOAT_DTYPES or tuple(lut.shape) != (256,):
            raise ArgumentError(
                f"lut is {lut.dtype} {tuple(lut.shape)} and img {img.dtype}; expected a float table [256] and uint8"
            )
    else:
        token("img", img.dtype)
    if is_grad_enabled() and needs_grad(img):
        return _patchify(img, ph, pw, img_layout, order)
    (img,) = detached(img)
    view, shape = _patches(img, ph, pw, img_layout, order)
    result = torch.empty(shape, dtype=img.dtype if lut is None else lut.dtype, device=img.device)
    strided_copy(view, result.view(view.shape), None if lut is None else lut.detach().contiguous())
    return result


# ---- repeat_heads ---------------------------------------------------------------------------------------------------


class _RepeatHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, n):
        ctx.n = n
        ctx.computed_gradient = False
        return _repeat(x.detach(), n)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        *outer, heads, dim = dy.shape
        parts = dy.reshape(*outer, heads // ctx.n, ctx.n, dim)
        dx = torch.empty(*outer, heads // ctx.n, dim, dtype=dy.dtype, device=dy.device)
        strided_copy(parts.movedim(-2, 0), dx, summed=True)
        return dx, None


_repeat_heads = applied(_RepeatHeads)


def _repeat(x: Tensor, n: int) -> Tensor:
    *outer, heads, dim = x.shape
    result = torch.empty(*outer, heads * n, dim, dtype=x.dtype, device=x.device)
    strided_copy(x.unsqueeze(-2).expand(*outer, heads, n, dim), result.view(*outer, heads, n, dim))
    return result


_HEADS = Matching(FLOAT_DTYPES, "x.dim() >= 2", "[..., heads, head_dim]")


@public(options={"x": _HEADS, "n": Within("int", "n >= 1", "1 or more")})
def repeat_heads(x: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """Return every head `n` times: head h of the result is head ``h // n`` of x.

    Differentiable once; the gradient of a head is the sum of the gradients of its copies, in fp32 in a fixed order.

    Args:
        x: ``[..., heads, head_dim]``, bfloat16, float16 or float32, any strides.
        n: Number of repetitions.
        out: Tensor to write the result to, ``[..., heads * n, head_dim]``. Not with gradients.

    Returns:
        ``[..., heads * n, head_dim]``, contiguous, in x's dtype.
    """
    if is_grad_enabled() and needs_grad(x):
        return _repeat_heads(x, n)
    return _repeat(x.detach(), n)


OP = Op("patchify", public=("patchify", "repeat_heads"), kernels=(), torch_ops=(), uses=("strided_copy",))
