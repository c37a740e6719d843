"""Gated linear units with fp8 results, for all rows or for each expert's, and their backward."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from rtkernels.ops.act import glu_fp8_reference as reference
from rtkernels.ops.act import glu_smooth_fp8 as smooth_quant
from rtkernels.ops.act.glu_fp8_kernels import ANY, BWD, BWD_STREAM, FWD, FWD_STREAM
from rtkernels.ops.act.glu_fp8_plan import check_backward, check_forward, outputs_bwd, outputs_fwd, plan_bwd, plan_fwd
from rtkernels.ops.act.glu_smooth_fp8 import glu_smooth_fp8, glu_smooth_fp8_backward
from rtkernels.ops.shared.fp8_layout import asked
from rtkernels.runtime.call.public import public
from rtkernels.runtime.operator.autograd import detached
from rtkernels.runtime.operator.declared import Dense, Operator, Rows
from rtkernels.runtime.operator.registry import Op

__all__ = ["glu_fp8", "glu_fp8_backward", "glu_smooth_fp8", "glu_smooth_fp8_backward"]

_INPUTS = Rows("x", None), Rows("up", None, optional=True), Dense("weight", None, optional=True)
_COUNTS = Dense("counts", None, optional=True)
_OPTIONS = "str act, str layout, bool pow2_scale, str scale_layout, bool check_counts"
FORWARD = Operator(
    "glu_fp8_fwd", (*_INPUTS, _COUNTS), options=_OPTIONS, results="q scale q_t scale_t", outputs=outputs_fwd,
    plan=plan_fwd, reference=reference.forward, check=check_forward,
)  # fmt: skip
BACKWARD = Operator(
    "glu_fp8_bwd", (Rows("dy", None), *_INPUTS, _COUNTS), options=f"{_OPTIONS}, str keep, bool weight_grad",
    results="q scale q_t scale_t dx dweight", outputs=outputs_bwd, plan=plan_bwd, reference=reference.backward,
    check=check_backward,
)  # fmt: skip


class GluFp8(NamedTuple):
    """Codes (float8_e4m3fn) and scales (float32) of a matrix, by rows and transposed; None if not requested."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


class GluFp8Gradients(NamedTuple):
    """Gradients of [gate | up], as codes and scales and unquantised, and of the weight; None if not requested."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None
    dx: Tensor | None
    dweight: Tensor | None


@public
def glu_fp8(
    x: Tensor, up: Tensor | None = None, *, act: str = "silu", weight: Tensor | None = None,
    counts: Tensor | None = None, layout: str = "row", pow2_scale: bool = False, scale_layout: str = "row",
    check_counts: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> GluFp8:  # fmt: skip
    """Quantise ``y = act(gate) * up * weight`` to fp8 in one pass: by rows, transposed, or both.

    y is computed in fp32 and quantised as :func:`quantize_fp8` does with granularity "group" (each 128 elements of a
    row share a scale) and "group_t" (each 128 rows of a column do), without intermediate rounding.

    Without `counts`, for y ``[m, d]`` (leading dimensions flattened):

    =========  ==========================  ====================================================================
    result     shape                       content
    =========  ==========================  ====================================================================
    `q`        y's                         codes
    `scale`    ``[..., ceil(d/128)]``      of q; ``[ceil(d/128), m]`` for scale_layout "column"
    `q_t`      ``[d, m]``                  codes of y transposed
    `scale_t`  ``[ceil(m/128), d]``        of q_t: one for 128 rows of a column
    =========  ==========================  ====================================================================

    With `counts`, rows are sorted by expert, and values of different experts never share a scale. For an expert with
    ``c`` rows and ``s`` rows before them:

    * `q` and `scale` (layout "row") are as above;
    * `scale` with layout "column" is flat: the expert's part is ``scale[s*g : (s+c)*g].view(g, c)`` with
      ``g = ceil(d/128)``;
    * `q_t` is flat: the expert's part is ``q_t[s*d : (s+c)*d].view(d, c)``;
    * `scale_t` has ``ceil(c/128)`` rows per expert, expert after expert, followed by rows of zeros; it has
      ``(m + 127 * min(experts, m)) // 128`` rows, enough for any counts.

    These are the layouts of :func:`quantize_fp8` and (with scale_layout "column") :func:`quantize_fp8_experts`.

    Counts are read on the device only: the call does not synchronise, and a CUDA graph can be replayed with other
    counts. They should add up to m. Otherwise rows beyond their sum are not quantised (their results are
    uninitialised), counts beyond m are clamped, and negative ones are taken as 0; nothing is read or written out of
    bounds. `check_counts` detects such counts.

    The results never require grad. :func:`glu_fp8_backward` computes the gradient of x from that of y: call it from the
    ``backward`` of the ``torch.autograd.Function`` whose ``forward`` calls this function.

    Args:
        x: ``[..., 2 * d]``, gate in the first half of the last dimension and up in the second; with `up`, ``[..., d]``,
            the gate. bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and evenly spaced).
            Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        up: ``[..., d]``, same shape and dtype as x; its strides may differ.
        act: As for :func:`glu`.
        weight: ``x.shape[:-1]``, one factor per row, in x's dtype or float32 (which avoids a copy). Default: 1.
        counts: ``[experts]``, int32 or int64: the number of rows of each expert; may be 0. None for a single set of
            rows.
        layout: "row" (`q`, `scale`), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: "row" or "column", the layout of the scales of rows.
        check_counts: Trap on the device if counts are negative or do not add up to m; like a failed device assertion,
            this ends all work on the device. For debugging.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t)`` of contiguous tensors, with None for those that `layout` omits.
    """
    options = counts, act, layout, pow2_scale, scale_layout, check_counts
    return GluFp8(*asked(layout, FORWARD.call(*detached(x, up, weight), *options)))


@public
def glu_fp8_backward(
    dy: Tensor, x: Tensor, up: Tensor | None = None, *, act: str = "silu", weight: Tensor | None = None,
    counts: Tensor | None = None, layout: str = "both", pow2_scale: bool = False, scale_layout: str = "row",
    keep: str = "fp8", weight_grad: bool | None = None, check_counts: bool = False,
    out: tuple[Tensor | None, ...] | None = None,
) -> GluFp8Gradients:  # fmt: skip
    """Return the gradients of ``act(gate) * up * weight``; that of ``[gate | up]`` as fp8 codes, in x's dtype, or both.

    One pass over dy and x in fp32; the fp32 values are quantised directly. The codes have the layout of :func:`glu_fp8`
    for a matrix ``[m, 2 * d]`` with the gradient of gate in its left half, as the product with the merged weight
    ``[2 * d, hidden]`` takes it. Groups of 128 columns are counted from the first column: if d is not a multiple of
    128, one group extends into up's half, and if ``2 * d`` is not a multiple either, the last group is shorter.
    Deterministic. Not differentiable.

    Args:
        dy: ``[..., d]``, the gradient of the result, of x's dtype; any strides.
        x: As given to :func:`glu_fp8`.
        up: As given to :func:`glu_fp8`. The gradient is that of ``[gate | up]`` in both cases.
        act: As given to :func:`glu_fp8`.
        weight: As given to :func:`glu_fp8`.
        counts: As given to :func:`glu_fp8`.
        layout: "row" (`q`, `scale`), "transposed" (`q_t`, `scale_t`) or "both".
        pow2_scale: Round scales up to a power of two.
        scale_layout: "row" or "column", the layout of the scales of rows.
        keep: "fp8" for the codes, "dense" for the gradient in x's dtype (`dx`), "both" for both.
        weight_grad: Whether to compute the gradient of the weight. Default: if there is a weight. A temporary of
            ``4 * m * ceil(d / 128)`` bytes is used.
        check_counts: As for :func:`glu_fp8`.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        A named tuple ``(q, scale, q_t, scale_t, dx, dweight)`` of contiguous tensors, with None for results that were
        not requested: `dx` is ``[..., 2 * d]`` of x's dtype, `dweight` has the weight's shape and dtype.
    """
    if weight_grad is None:
        weight_grad = weight is not None
    options = counts, act, layout, pow2_scale, scale_layout, check_counts, keep, weight_grad
    *codes, dx, dweight = BACKWARD.call(*detached(dy, x, up, weight), *options)
    codes = asked("" if keep == "dense" else layout, codes)
    return GluFp8Gradients(*codes, dx if keep != "fp8" else None, dweight if weight_grad else None)


OP = Op(
    "glu_fp8", public=("glu_fp8", "glu_fp8_backward", "glu_smooth_fp8", "glu_smooth_fp8_backward"),
    kernels=(FWD, BWD, FWD_STREAM, BWD_STREAM, ANY, smooth_quant.SMOOTH),
    torch_ops=(FORWARD, BACKWARD, smooth_quant.FORWARD, smooth_quant.BACKWARD), uses=("column_sum",),
)  # fmt: skip
