"""What the quantised normalisations take and give: shapes and checks, shared by launchers, references and fakes."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.checks import check_inputs
from rtkernels.ops.shared.fp8_layout import E4M3, LAYOUTS, SCALE_LAYOUTS, Fp8Layout, check_option
from rtkernels.runtime.checks import check_shape, token
from rtkernels.runtime.operator.declared import Meta
from rtkernels.runtime.operator.plan import Memory


def check_options(layout: str, scale_layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together.

    The layout "none" is not for users: no codes, but what is kept and the statistics.
    """
    if layout != "none":
        check_option("layout", layout, LAYOUTS)
    check_option("scale_layout", scale_layout, SCALE_LAYOUTS)
    if scale_layout == "column" and layout == "transposed":
        raise ArgumentError("scale_layout 'column' is for the scales of rows; layout 'transposed' has none")


def check(
    x: Meta, weight: Meta | None, bias: Meta | None, residual: Meta | None, rstd: Meta | None, mean: Meta | None,
    layout: str, scale_layout: str, keep: bool, centred: bool,
) -> None:  # fmt: skip
    """Raise an ArgumentError unless these arguments go together."""
    check_options(layout, scale_layout)
    check_inputs(x, weight, bias, residual)
    for name, meta in (("rstd", rstd), ("mean", mean)):
        if meta is None:
            continue
        token(name, meta.dtype, (torch.float32,))
        check_shape(name, meta.shape, x.shape[:-1], "one per row of x")
        if residual is not None:
            raise ArgumentError(f"{name} cannot be combined with residual: pass the sum that was normalised as x")
    if centred and (rstd is None) != (mean is None):
        raise ArgumentError("mean and rstd must be given together: both from an earlier call, or neither")
    if keep and layout == "transposed":
        raise ArgumentError("keep requires layout 'row' or 'both', not 'transposed'")


def outputs(x, residual, rstd, layout, scale_layout, keep, centred):
    """Return the results of a call by name, in order; statistics that are computed have names of their own."""
    check_options(layout, scale_layout)
    codes = zip(("q", "scale", "q_t", "scale_t"), Fp8Layout(x.shape, layout, scale_layout).outputs(), strict=True)
    statistics = computed_statistics(centred) if rstd is None else ()
    return {name: memory for name, memory in codes if memory} | _more(x, statistics, keep, residual)


def smooth_outputs(x, residual, keep, calibrate, centred):
    """Return what `outputs` does, for codes with a scale per row of smoothed values."""
    memory = {"q": Memory(x.shape, E4M3), "scale": Memory(x.shape[:-1], torch.float32)}
    memory |= _more(x, computed_statistics(centred), keep, residual)
    return memory | ({"amax": Memory(x.shape[-1:], torch.float32, zero=True)} if calibrate else {})


def _more(x: Any, statistics: tuple[str, ...], keep: bool, residual: Any) -> dict[str, Memory]:
    found = {name: Memory(x.shape[:-1], torch.float32) for name in statistics}
    if keep:
        found["y"] = Memory(x.shape, x.dtype)
    if residual is not None:
        found["sum"] = Memory(x.shape, x.dtype)
    return found


def statistics_of(centred: bool) -> tuple[str, ...]:
    """Return the names of a row's statistics."""
    return ("rstd", "mean") if centred else ("rstd",)


def computed_statistics(centred: bool) -> tuple[str, ...]:
    return tuple(f"computed_{name}" for name in statistics_of(centred))
