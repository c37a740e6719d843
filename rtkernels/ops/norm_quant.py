"""RMS normalisation whose result leaves as fp8 codes and scales."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled
from torch.autograd.function import once_differentiable

from rtkernels import interop
from rtkernels._guard import needs_grad
from rtkernels._layout import address, metadata, rowed
from rtkernels._registry import Op, TorchOp
from rtkernels.ops import _fp8_reference as fp8
from rtkernels.ops._norm_quant_plans import CODES, GROUP, KERNELS, PLANS, check, check_options, outputs_of
from rtkernels.ops.rms_norm import BACKWARD
from rtkernels.testing.rows import Row

# ---- operator -------------------------------------------------------------------------------------------------------


def _launch(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    offset: float,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    keep: bool,
) -> list[Tensor]:
    align = (x.data_ptr() | address(weight) | address(residual)) & 15
    plan = PLANS[
        (x.dtype, x.shape, x.stride(), x.get_device()),
        metadata(weight), metadata(residual), metadata(rstd), layout, pow2_scale, scale_layout, keep, align,
    ]  # fmt: skip
    if plan:
        return plan.run(x, weight, residual, rstd, eps, offset)
    options = (eps, offset, layout, pow2_scale, scale_layout, keep)
    if plan is False:
        return _reference(x, weight, residual, rstd, *options)
    return _launch(rowed(x), _dense(weight), rowed(residual), _dense(rstd), *options)


def _dense(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.contiguous()


def _reference(
    x: Tensor,
    weight: Tensor | None,
    residual: Tensor | None,
    rstd: Tensor | None,
    eps: float,
    offset: float,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    keep: bool,
) -> list[Tensor]:
    """Do the same in plain torch."""
    check(metadata(x), metadata(weight), metadata(residual), metadata(rstd), layout, scale_layout, keep)
    total = x if residual is None else (x.float() + residual.float()).to(x.dtype).contiguous()
    h = total.float()
    made = None
    if rstd is None:
        made = torch.rsqrt(h.square().sum(-1) / max(x.shape[-1], 1) + eps)
        rstd = made
    v = h * rstd[..., None]
    if weight is not None:
        v = v * (weight.float() + offset)
    results: list[Tensor] = []
    if layout != "transposed":
        results += fp8.quantize(v, "group", CODES, pow2_scale, scale_layout)
    if layout != "row":
        results += fp8.quantize(v, "group_t", CODES, pow2_scale, "row")
    if made is not None:
        results.append(made.contiguous())
    if keep:
        results.append(v.to(x.dtype).contiguous())
    if residual is not None:
        results.append(total)
    return results


def _fake(x, weight, residual, rstd, eps, offset, layout, pow2_scale, scale_layout, keep):
    check_options(layout, scale_layout)
    wanted = outputs_of(x.shape, x.dtype, layout, scale_layout, rstd is None, keep, residual is not None)
    return [x.new_empty(shape, dtype=dtype) for _, shape, dtype in wanted]


FORWARD = TorchOp(
    "rms_norm_fp8(Tensor x, Tensor? weight, Tensor? residual, Tensor? rstd, float eps, float offset, str layout, "
    "bool pow2_scale, str scale_layout, bool keep) -> Tensor[]",
    launch=_launch,
    reference=_reference,
    fake=_fake,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class NormFp8(NamedTuple):
    """Codes, scales and statistics of a normalised tensor ``[..., n]``; None for what was not asked for.

    With ``[m, n]`` for x whose leading dimensions are flattened:

    Attributes:
        q: float8_e4m3fn, of x's shape. Layouts "row" and "both".
        scale: float32, one per 128 columns of a row: x's shape with ``ceil(n/128)`` as last dimension, or
            ``[ceil(n/128), m]`` for scale_layout "column".
        q_t: float8_e4m3fn ``[n, m]``. Layouts "transposed" and "both".
        scale_t: float32 ``[ceil(m/128), n]``, one per 128 rows of a column.
        rstd: float32, x's shape without the last dimension: ``1 / sqrt(mean(h^2) + eps)``. None if it was given.
        y: The normalised values in x's dtype with ``keep``. Otherwise, where a gradient is wanted, a tensor of that
            shape and dtype without values (one NaN, expanded): what takes its gradient. Otherwise None.
        sum: ``x + residual`` in x's dtype, with a residual.
    """

    q: Tensor | None = None
    scale: Tensor | None = None
    q_t: Tensor | None = None
    scale_t: Tensor | None = None
    rstd: Tensor | None = None
    y: Tensor | None = None
    sum: Tensor | None = None


class _RmsNormFp8(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, residual, eps, offset, layout, pow2_scale, scale_layout, keep):
        ctx.set_materialize_grads(False)
        ctx.eps, ctx.offset = eps, offset
        made = FORWARD(x, weight, residual, None, eps, offset, layout, pow2_scale, scale_layout, keep)
        codes = made[: 5 if layout == "both" else 3]  # and scales, and rstd
        y = made[len(codes)] if keep else x.new_full((), float("nan")).expand(x.shape)
        ctx.mark_non_differentiable(*codes)
        if residual is None:
            ctx.save_for_backward(x, weight)
            return *codes, y
        ctx.save_for_backward(made[-1], weight)
        return *codes, y, made[-1]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        # Codes, scales and rstd come first and have none.
        rest = (None,) * 6
        has_residual = len(grads) % 2 == 1
        dy, dsum = grads[-2:] if has_residual else (grads[-1], None)
        if dy is None:
            return dsum, None, dsum, *rest
        h, weight = ctx.saved_tensors
        weight_grad = ctx.needs_input_grad[1]
        dh, dweight = BACKWARD(dy, h, weight, dsum, ctx.eps, ctx.offset, weight_grad)
        return dh, dweight if weight_grad else None, dh if ctx.needs_input_grad[2] else None, *rest


def rms_norm_fp8(
    x: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float | None = None,
    offset: float = 0,
    residual: Tensor | None = None,
    layout: str = "row",
    pow2_scale: bool = False,
    scale_layout: str = "row",
    rstd: Tensor | None = None,
    keep: bool = False,
) -> NormFp8:
    """Normalise the last dimension by its root mean square and quantise the result to fp8 (e4m3).

    ``v = h / sqrt(mean(h^2) + eps) * (offset + weight)`` with ``h = x``, or ``h = x + residual`` rounded to the dtype
    of x. v stays in fp32 and is quantised as :func:`rtkernels.quantize_fp8` does it with granularity "group" (codes
    of x's shape) and "group_t" (transposed codes): ``scale = max(amax / 448, 1e-30)``, ``q = fp8(v * (1 / scale))``.

    **Gradients.** Codes, scales and rstd are not differentiable. The result's ``y`` is, in x, weight and residual, as
    the result of :func:`rtkernels.rms_norm` is; so is ``sum``. An ``autograd.Function`` that multiplies the codes takes
    ``y`` as one more input and returns the gradient of what it multiplied there; without ``keep`` y has no memory and
    no values (NaN), only that place in the graph. Of the forward only h and weight are kept.

    **Recomputing.** Given ``rstd`` of an earlier call, layout "transposed" needs no sums over rows: the transposed
    codes are made when the backward pass needs them, from x (the sum, where there was a residual). Not differentiable.

    Args:
        x: ``[..., n]``, bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride and
            evenly spaced). May be any object with ``__dlpack__``; the results are then of its kind.
        weight: ``[n]`` of x's dtype or float32; None for ones (then `offset` is not used).
        eps: Added to the mean square; None for 1e-6.
        offset: Added to the weight; 1.0 for models that store ``weight - 1``.
        residual: Same shape and dtype as x.
        layout: "row" for codes of x's shape, "transposed" for codes ``[n, m]``, "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: "row" or "column", for the scales of rows.
        rstd: float32, x's shape without the last dimension. For layout "transposed", without residual and keep.
        keep: Return y too, rounded once from fp32. Not with layout "transposed".

    Returns:
        A :class:`NormFp8`; every tensor in it is dense.
    """
    if eps is None:  # as a default value it would become symbolic under torch.compile(dynamic=True)
        eps = 1e-6
    if not isinstance(x, Tensor):
        options = {"layout": layout, "pow2_scale": pow2_scale, "scale_layout": scale_layout, "keep": keep}
        plain = interop.call(rms_norm_fp8, x, weight, eps=eps, offset=offset, residual=residual, rstd=rstd, **options)
        return NormFp8(*plain)
    differentiate = is_grad_enabled() and needs_grad(x, weight, residual)
    if differentiate and rstd is not None:
        x, weight, rstd, differentiate = x.detach(), weight if weight is None else weight.detach(), rstd.detach(), False
    if differentiate:
        made = _RmsNormFp8.apply(x, weight, residual, eps, offset, layout, pow2_scale, scale_layout, keep)
        has_y = True
    else:
        made = FORWARD(x, weight, residual, rstd, eps, offset, layout, pow2_scale, scale_layout, keep)
        has_y = keep
    return _named(made, layout, rstd is None, has_y, residual is not None)


def _named(made: Any, layout: str, rstd: bool, y: bool, total: bool) -> NormFp8:
    parts = iter(made)
    q, scale = (next(parts), next(parts)) if layout != "transposed" else (None, None)
    q_t, scale_t = (next(parts), next(parts)) if layout != "row" else (None, None)
    return NormFp8(
        q, scale, q_t, scale_t, next(parts) if rstd else None, next(parts) if y else None,
        next(parts) if total else None,
    )  # fmt: skip


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 5, 136, generator=g, device=device)
    weight = torch.randn(136, generator=g, device=device)
    yield FORWARD, (x, weight, None, None, 1e-6, 0.0, "row", False, "column", False)
    yield FORWARD, (x.bfloat16(), weight, x.bfloat16(), None, 1e-6, 1.0, "both", True, "row", True)
    yield FORWARD, (x, None, None, x[..., 0].abs().contiguous(), 1e-6, 0.0, "transposed", False, "row", False)


def _rows() -> Iterator[Row]:
    rows = 8192
    for cols in (2048, 4096, 8192):
        n = rows * cols
        small = 2 * cols + 4 * rows  # weight and rstd

        def make(device: str, generator: torch.Generator, cols: int = cols, rstd: bool = False) -> dict[str, Any]:
            def normal(*shape: int) -> Tensor:
                return torch.randn(*shape, dtype=torch.bfloat16, device=device, generator=generator)

            x = normal(8192, cols)
            known = {"rstd": torch.rsqrt(x.float().square().mean(-1) + 1e-6)} if rstd else {}
            return {"x": x, "weight": normal(cols), **known}

        def both(x: Tensor, weight: Tensor, layout: str) -> list[Tensor]:
            return FORWARD(x, weight, None, None, 1e-6, 0.0, layout, False, "row", False)

        for name, layout, codes in (("both", "both", 2), ("row", "row", 1)):
            yield Row(
                name=f"rms_norm_fp8_{name}",
                shape=f"{rows}x{cols}",
                make=make,
                ours=lambda x, weight, layout=layout, both=both: both(x, weight, layout),
                torch=_torch(layout),
                bytes=(2 + codes) * n + 4 * codes * n // GROUP + small,
            )
        yield Row(
            name="rms_norm_fp8_t",
            shape=f"{rows}x{cols}",
            make=lambda device, g, make=make: make(device, g, rstd=True),
            ours=lambda x, weight, rstd: FORWARD(x, weight, None, rstd, 1e-6, 0.0, "transposed", False, "row", False),
            torch=_torch("transposed"),
            bytes=3 * n + 4 * n // GROUP + small,
        )


def _torch(layout: str) -> Callable[..., list[Tensor]]:
    """Return the plain torch of a layout for a matrix whose sides are multiples of 128."""

    def run(x: Tensor, weight: Tensor, rstd: Tensor | None = None) -> list[Tensor]:
        h = x if x.dtype == torch.float64 else x.float()
        given, r = rstd is not None, rstd
        if r is None:
            r = torch.rsqrt(h.square().mean(-1) + 1e-6)
        v = h * r[:, None] * weight
        results = []
        for along in [v] * (layout != "transposed") + [v.t()] * (layout != "row"):
            groups = along.reshape(along.shape[0], -1, GROUP)
            scale = (groups.abs().amax(-1, keepdim=True) / 448).clamp(min=1e-30)
            q = (groups * (1 / scale)).clamp(-448, 448).to(CODES).reshape(along.shape)
            scale = scale.squeeze(-1)
            results += [q, scale if along is v else scale.t()]
        return results if given else [*results, r]

    return run


OP = Op(
    "norm_quant",
    public=("rms_norm_fp8",),
    kernels=KERNELS,
    torch_ops=(FORWARD,),
    samples=_samples,
    rows=_rows,
)
