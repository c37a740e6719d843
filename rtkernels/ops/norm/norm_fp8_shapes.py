"""What the quantised normalisations take and give: shapes and checks, shared by launchers, references and fakes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.norm.checks import check_inputs
from rtkernels.runtime.layout import check_same, row_count, token

Metadata = tuple[Any, ...]  # (dtype, shape, stride, device index)

LAYOUTS = ("row", "transposed", "both", "none")  # the last one: no codes, what is kept and the statistics only
SCALE_LAYOUTS = ("row", "column")
CODES = torch.float8_e4m3fn
GROUP = 128


def groups_of(size: int) -> int:
    """Return how many groups of 128 cover `size` elements."""
    return -(-size // GROUP)


def check_options(layout: str, scale_layout: str) -> None:
    """Raise an ArgumentError unless both are known and go together."""
    for name, value, accepted in (("layout", layout, LAYOUTS), ("scale_layout", scale_layout, SCALE_LAYOUTS)):
        if value not in accepted:
            wanted = ", ".join(repr(a) for a in accepted if a != "none")
            raise ArgumentError(f"{name} is {value!r}; expected one of {wanted}")
    if scale_layout == "column" and layout == "transposed":
        raise ArgumentError("scale_layout 'column' is for the scales of rows; layout 'transposed' has none")


def check(
    x: Metadata,
    weight: Metadata | None,
    bias: Metadata | None,
    residual: Metadata | None,
    rstd: Metadata | None,
    mean: Metadata | None,
    layout: str,
    scale_layout: str,
    keep: bool,
    centred: bool,
) -> None:
    """Raise an ArgumentError unless these arguments go together."""
    check_options(layout, scale_layout)
    check_inputs(x, weight, bias, residual)
    shape, device = x[1], x[3]
    for name, meta in (("rstd", rstd), ("mean", mean)):
        if meta is None:
            continue
        token(name, meta[0], (torch.float32,))
        if tuple(meta[1]) != tuple(shape[:-1]):
            raise ArgumentError(f"{name} has shape {tuple(meta[1])}; expected {tuple(shape[:-1])}, one per row of x")
        check_same(name, meta[3], device, "device index")
        if residual is not None:
            raise ArgumentError(f"{name} goes without residual: give the sum that was normalised as x")
    if centred and (rstd is None) != (mean is None):
        raise ArgumentError("mean and rstd come together: both from an earlier call, or neither")
    if keep and layout == "transposed":
        raise ArgumentError("keep goes with layout 'row' or 'both', not 'transposed'")


def outputs_of(
    shape: Sequence[int],
    dtype: torch.dtype,
    layout: str,
    scale_layout: str,
    statistics: tuple[str, ...],
    keep: bool,
    residual: bool,
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return name, shape and dtype of every result of a call, in order. `statistics`: those computed, not given."""
    shape, rows, cols = tuple(shape), row_count(shape), shape[-1]
    found: list[tuple[str, tuple[int, ...], torch.dtype]] = []
    if layout in ("row", "both"):
        groups = groups_of(cols)
        scales = (groups, rows) if scale_layout == "column" else (*shape[:-1], groups)
        found += [("q", shape, CODES), ("scale", scales, torch.float32)]
    if layout in ("transposed", "both"):
        found += [("q_t", (cols, rows), CODES), ("scale_t", (groups_of(rows), cols), torch.float32)]
    return found + _more_outputs(shape, dtype, statistics, keep, residual)


def _more_outputs(shape: tuple[int, ...], dtype: torch.dtype, statistics: tuple[str, ...], keep: bool, residual: bool):
    found = [(name, shape[:-1], torch.float32) for name in statistics]
    if keep:
        found.append(("y", shape, dtype))
    if residual:
        found.append(("sum", shape, dtype))
    return found


def smooth_outputs_of(
    shape: Sequence[int], dtype: torch.dtype, keep: bool, residual: bool, calibrate: bool, centred: bool
) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
    """Return what outputs_of does, for codes with a scale per row of smoothed values."""
    shape = tuple(shape)
    found = [("q", shape, CODES), ("scale", shape[:-1], torch.float32)]
    found += _more_outputs(shape, dtype, statistics_of(centred), keep, residual)
    return found + [("amax", (shape[-1],), torch.float32)] * calibrate


def statistics_of(centred: bool) -> tuple[str, ...]:
    """Return the names of a row's statistics."""
    return ("rstd", "mean") if centred else ("rstd",)
