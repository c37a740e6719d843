"""Gated linear units with fp8 results, for all rows or for each expert's, and their backward."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rtkernels import interop
from rtkernels._layout import address, metadata, nothing, rowed
from rtkernels._registry import Op, TorchOp
from rtkernels.ops import _glu_fp8_reference as reference
from rtkernels.ops._glu_fp8_plans import E4M3, FWD, FWD_PLANS, check_options, output_shapes

# ---- launchers ------------------------------------------------------------------------------------------------------


def _present(outputs: tuple[Tensor | None, ...], like: Tensor) -> tuple[Tensor, ...]:
    return tuple([nothing(like) if o is None else o for o in outputs])


def _launch_fwd(
    x: Tensor,
    up: Tensor | None,
    weight: Tensor | None,
    counts: Tensor | None,
    act: str,
    layout: str,
    pow2_scale: bool,
    scale_layout: str,
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
        (x_address | up_address) & 15,
    ]
    if plan is None:
        dense = (t if t is None else t.contiguous() for t in (weight, counts))
        return _launch_fwd(rowed(x), rowed(up), *dense, act, layout, pow2_scale, scale_layout)
    return _present(plan.run(x_address, up_address, address(weight), address(counts)), x)


# ---- operators ------------------------------------------------------------------------------------------------------


def _fake_fwd(x, up, weight, counts, act, layout, pow2_scale, scale_layout):
    check_options(layout, scale_layout)
    shape = x.shape if up is not None else (*x.shape[:-1], x.shape[-1] // 2)
    experts = None if counts is None else counts.shape[0]
    shapes = output_shapes(shape, experts, layout, scale_layout)
    asked = (layout != "transposed",) * 2 + (layout != "row",) * 2
    kinds = (E4M3, torch.float32) * 2
    return tuple(
        x.new_empty(s, dtype=kind if wanted else torch.float32)
        for s, kind, wanted in zip(shapes, kinds, asked, strict=True)
    )


FORWARD = TorchOp(
    "glu_fp8_fwd(Tensor x, Tensor? up, Tensor? weight, Tensor? counts, str act, str layout, bool pow2_scale, "
    "str scale_layout) -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_fwd,
    reference=reference.forward,
    fake=_fake_fwd,
)


# ---- public ---------------------------------------------------------------------------------------------------------


class GluFp8(NamedTuple):
    """Codes (float8_e4m3fn) and scales (float32) of a matrix, by rows and transposed; None where not asked for."""

    q: Tensor | None
    scale: Tensor | None
    q_t: Tensor | None
    scale_t: Tensor | None


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


OP = Op(
    "glu_fp8",
    public=("glu_fp8",),
    kernels=(FWD,),
    torch_ops=(FORWARD,),
    samples=_samples,
)
