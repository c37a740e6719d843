"""Gated linear units with fp8 results, for all rows or for each expert's, and their backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels._layout import address, metadata, nothing, rowed
from rtkernels._registry import Op, TorchOp
from rtkernels.ops import _glu_fp8_reference as reference
from rtkernels.ops import _glu_fp8_rows as rows
from rtkernels.ops._glu_fp8_plans import BWD, BWD_PLANS, FWD, FWD_PLANS, check_options, padded, quantized_outputs
from rtkernels.ops.column_sum import column_sum

# ---- launchers ------------------------------------------------------------------------------------------------------


def _present(outputs: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple([nothing(like) if o is None else o for o in outputs])


def _dense(weight: Tensor | None, counts: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    return weight if weight is None else weight.contiguous(), counts if counts is None else counts.contiguous()


def _padded(t: Tensor) -> Tensor:
    """Copy a tensor so that its rows are aligned and zeros follow them up to a whole number of accesses."""
    cols = t.shape[-1]
    copy = t.new_zeros((*t.shape[:-1], padded(cols)))
    copy[..., :cols] = t
    return copy


def _launch_fwd(
    x: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    counts: Tensor | None,
    act: str,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    cols: int | None = None,
):
    x_address, up_address = x.data_ptr(), address(up)
    plan = FWD_PLANS[
        metadata(x),
        metadata(up),
        metadata(weight),
        metadata(counts),
        act,
        layout,
        pow2_scale,
        scale_layout,
        cols,
        (x_address | up_address) & 15,
    ]
    options = (act, layout, pow2_scale, scale_layout)
    if plan == "dense":
        return _launch_fwd(rowed(x), rowed(up), *_dense(weight, counts), *options)
    if plan == "aligned":
        gate, up = x.chunk(2, -1) if up is None else (x, up)
        cols = gate.shape[-1]
        q, *others = _launch_fwd(_padded(gate), _padded(up), weight, counts, *options, cols)
        return q if layout == "transposed" else q[..., :cols].contiguous(), *others
    addresses = x_address, up_address or x_address, address(weight), address(counts)
    return _present(plan.run(*addresses), x)


def _launch_bwd(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    counts: Tensor | None,
    act: str,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
    keep: str,
    weight_grad: bool,
    cols: int | None = None,
):
    dy_address, x_address, up_address = dy.data_ptr(), x.data_ptr(), address(up)
    plan = BWD_PLANS[
        metadata(dy),
        metadata(x),
        metadata(up),
        metadata(weight),
        metadata(counts),
        act,
        layout,
        pow2_scale,
        scale_layout,
        keep,
        weight_grad,
        cols,
        (dy_address | x_address | up_address) & 15,
    ]
    options = (act, layout, pow2_scale, scale_layout, keep, weight_grad)
    if plan == "dense":
        return _launch_bwd(rowed(dy), rowed(x), rowed(up), *_dense(weight, counts), *options)
    if plan == "aligned":
        gate, up = x.chunk(2, -1) if up is None else (x, up)
        cols = gate.shape[-1]
        inputs = _padded(dy), _padded(gate), _padded(up), weight, counts
        *codes, dx, dweight = _launch_bwd(*inputs, *options, cols)
        if keep != "fp8":
            dgate, dup = dx.chunk(2, -1)
            dx = torch.cat((dgate[..., :cols], dup[..., :cols]), -1)
        return *codes, dx, dweight
    addresses = dy_address, x_address, up_address or x_address, address(weight), address(counts)
    *outputs, partial = plan.run(*addresses)
    dweight = None
    if partial is not None:
        shape, dtype = weight.shape, weight.dtype
        dweight = column_sum(partial, dtype).view(shape) if partial.numel() else weight.new_zeros(shape)
    return _present((*outputs, dweight), x)


# ---- operators ------------------------------------------------------------------------------------------------------


def _fake_codes(x, shape, counts, layout, scale_layout):
    outputs = quantized_outputs(shape, None if counts is None else counts.shape[0], layout, scale_layout)
    return [nothing(x) if o is None else x.new_empty(o[0], dtype=o[1]) for o in outputs]


def _fake_fwd(x, up, weight, counts, act, layout, pow2_scale, scale_layout):
    check_options(layout, scale_layout)
    shape = x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
    return tuple(_fake_codes(x, shape, counts, layout, scale_layout))


def _fake_bwd(dy, x, up, weight, counts, act, layout, pow2_scale, scale_layout, keep, weight_grad):
    check_options(layout, scale_layout)
    shape = (*dy.shape[:-1], 2 * dy.shape[-1])
    codes = [nothing(x) for _ in range(4)] if keep == "dense" else _fake_codes(x, shape, counts, layout, scale_layout)
    dx = nothing(x) if keep == "fp8" else x.new_empty(shape)
    return *codes, dx, weight.new_empty(weight.shape) if weight_grad else nothing(x)


FORWARD = TorchOp(
    "glu_fp8_fwd(Tensor x, Tensor? up, Tensor? weight, Tensor? counts, str act, str layout, bool pow2_scale, "
    "str scale_layout) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_fwd,
    reference=reference.forward,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "glu_fp8_bwd(Tensor dy, Tensor x, Tensor? up, Tensor? weight, Tensor? counts, str act, str layout, "
    "bool pow2_scale, str scale_layout, str keep, bool weight_grad) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_bwd,
    reference=reference.backward,
    fake=_fake_bwd,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class GluFp8(NamedTuple):
    """Codes (float8_e4m3fn) and scales (float32) of a matrix, by rows and transposed; None where not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


class GluFp8Gradients(NamedTuple):
    """The gradient of [gate | up] as codes and scales and unquantised, and that of the weight; None: not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None


def _asked(outputs: tuple[Tensor, ...], layout: str) -> GluFp8:
    q, scale, q_t, scale_t = outputs
    by_rows, transposed = layout != "transposed", layout != "row"
    return GluFp8(
        q if by_rows else None,
        scale if by_rows else None,
        q_t if transposed else None,
        scale_t if transposed else None,
    )


def glu_fp8(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: str = "silu",
    weight: Tensor | None = None,
    counts: Tensor | None = None,
    layout: str = "row",
    pow2_scale: bool = False,
    scale_layout: str = "row",
) -> GluFp8:
    """Quantise ``y = act(gate) * up * weight`` to fp8 in one pass: by rows, transposed, or both.

    y is computed in fp32 and quantised as :func:`quantize_fp8` does with granularity "group" (each 128 elements of a
    row share a scale) and "group_t" (each 128 rows of a column do), without being rounded in between.

    Without `counts`, for y ``[m, d]`` (leading dimensions flattened):

    =========  ==========================  ====================================================================
    result     shape                       holds
    =========  ==========================  ====================================================================
    `q`        y's                         codes
    `scale`    ``[..., ceil(d/128)]``      of q; ``[ceil(d/128), m]`` for scale_layout "column"
    `q_t`      ``[d, m]``                  codes of y transposed
    `scale_t`  ``[ceil(m/128), d]``        of q_t: one for 128 rows of a column
    =========  ==========================  ====================================================================

    With `counts`, rows are sorted by expert, and no set of values that share a scale crosses from one expert to the
    next. With ``c`` rows of an expert and ``s`` rows before them:

    * `q` and `scale` (layout "row") are as above;
    * `scale` with layout "column" is flat: ``scale[s*g : (s+c)*g].view(g, c)`` is the expert's, ``g = ceil(d/128)``;
    * `q_t` is flat: ``q_t[s*d : (s+c)*d].view(d, c)`` is the expert's;
    * `scale_t` has the ``ceil(c/128)`` rows of one expert after those of the other, and then rows of zeros: it has
      ``(m + 127 * experts) // 128`` rows, enough for any counts.

    Counts are read on the device only: nothing waits for them, and a CUDA graph can be replayed with others. They
    should add up to m; rows beyond their sum are not written, counts beyond m are cut.

    The results never require grad. The gradient of x is :func:`glu_fp8_backward` of y's gradient: call it from the
    ``backward`` of the ``torch.autograd.Function`` whose ``forward`` calls this.

    Args:
        x: ``[..., 2 * d]``, gate in the first half of the last dimension and up in the second; with `up`,
            ``[..., d]``, the gate. bfloat16, float16 or float32; any strides (a copy is made unless rows are
            unit-stride and evenly spaced). May be any object with ``__dlpack__``; the results are then of its kind.
        up: ``[..., d]``, same shape and dtype as x; its strides may differ.
        act: As for :func:`glu`.
        weight: ``x.shape[:-1]``, one factor per row, of x's dtype or float32; None for ones.
        counts: ``[experts]``, int32 or int64: the rows of each expert, some perhaps 0. None for one set of rows.
        layout: "row" (`q`, `scale`), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: "row" or "column", how the scales of rows lie.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t)``, dense, with None for what `layout` leaves out.
    """
    if not isinstance(x, Tensor):
        options = {"act": act, "weight": weight, "counts": counts, "layout": layout, "pow2_scale": pow2_scale}
        return GluFp8(*interop.call(glu_fp8, x, up, **options, scale_layout=scale_layout))
    x, up, weight = (t.detach() if t is not None and t.requires_grad else t for t in (x, up, weight))
    return _asked(FORWARD(x, up, weight, counts, act, layout, pow2_scale, scale_layout), layout)


def glu_fp8_backward(
    dy: Tensor,
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: str = "silu",
    weight: Tensor | None = None,
    counts: Tensor | None = None,
    layout: str = "both",
    pow2_scale: bool = False,
    scale_layout: str = "row",
    keep: str = "fp8",
    weight_grad: bool | None = None,
) -> GluFp8Gradients:
    """Compute the gradients of ``act(gate) * up * weight``, that of ``[gate | up]`` as fp8 codes, as it is, or both.

    One pass over dy and x, fp32 arithmetic; codes are made from the fp32 values. They lie as those of :func:`glu_fp8`
    do, for a matrix ``[m, 2 * d]`` with the gradient of gate in its left half. Deterministic. Not differentiable.

    Args:
        dy: ``[..., d]``, the gradient of the result, of x's dtype; any strides.
        x: As given to :func:`glu_fp8`.
        up: As given to :func:`glu_fp8`. The gradient is that of ``[gate | up]`` with and without it.
        act: As given to :func:`glu_fp8`.
        weight: As given to :func:`glu_fp8`.
        counts: As given to :func:`glu_fp8`.
        layout: "row" (`q`, `scale`; d must be a multiple of 128), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: "row" or "column", how the scales of rows lie.
        keep: "fp8" for the codes, "dense" for the gradient in x's dtype (`dx`), "both" for both.
        weight_grad: Whether to compute the gradient of the weight; None: if there is a weight. A temporary of
            ``4 * m * ceil(d / 128)`` bytes is used.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t, dx, dweight)``, dense, with None for what was not asked for: `dx` is
        ``[..., 2 * d]`` of x's dtype, `dweight` has the weight's shape and dtype.
    """
    if weight_grad is None:
        weight_grad = weight is not None
    if not isinstance(dy, Tensor):
        options = {"act": act, "weight": weight, "counts": counts, "layout": layout, "pow2_scale": pow2_scale}
        options |= {"scale_layout": scale_layout, "keep": keep, "weight_grad": weight_grad}
        return GluFp8Gradients(*interop.call(glu_fp8_backward, dy, x, up, **options))
    dy, x, up, weight = (t.detach() if t is not None and t.requires_grad else t for t in (dy, x, up, weight))
    outputs = BACKWARD(dy, x, up, weight, counts, act, layout, pow2_scale, scale_layout, keep, weight_grad)
    codes = (None,) * 4 if keep == "dense" else _asked(outputs[:4], layout)
    return GluFp8Gradients(*codes, outputs[4] if keep != "fp8" else None, outputs[5] if weight_grad else None)


# ---- registry -------------------------------------------------------------------------------------------------------


def _samples(device: str):
    g = torch.Generator(device).manual_seed(0)
    x = torch.randn(3, 50, 2 * 136, generator=g, device=device)
    up, weight = x.flip(-1) * 2, x[..., 0].contiguous()
    counts = torch.tensor([0, 30, 120], device=device)
    yield FORWARD, (x, None, None, None, "silu", "both", False, "row")
    yield FORWARD, (x.bfloat16(), up.bfloat16(), weight, counts, "gelu_tanh", "both", True, "column")
    yield FORWARD, (x.half(), None, weight.half(), counts.int(), "swiglu_oai", "row", False, "row")
    yield FORWARD, (x, None, None, counts, "relu2", "transposed", False, "row")
    dy, merged = x[..., :128] * 3, x[..., :256]
    yield BACKWARD, (dy, merged, None, None, None, "silu", "both", False, "row", "fp8", False)
    yield BACKWARD, (dy.half(), dy.half(), dy.half(), weight, counts, "gelu_erf", "row", True, "column", "both", True)
    yield BACKWARD, (dy, merged, None, weight, counts, "swiglu_oai", "transposed", False, "row", "dense", True)


OP = Op(
    "glu_fp8",
    public=("glu_fp8", "glu_fp8_backward"),
    kernels=(FWD, BWD),
    torch_ops=(FORWARD, BACKWARD),
    samples=_samples,
    rows=lambda: rows.rows(FORWARD, BACKWARD),
)
