"""Inputs and results of rows: their tensors, copies, and errors."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch


def tensors(out: Any) -> list[torch.Tensor]:
    """The tensors of an op's result, in order."""
    if isinstance(out, torch.Tensor):
        return [out]
    if dataclasses.is_dataclass(out) and not isinstance(out, type):
        out = [getattr(out, field.name) for field in dataclasses.fields(out)]
    if isinstance(out, dict):
        out = list(out.values())
    return [t for item in out for t in tensors(item)] if isinstance(out, (list, tuple)) else []


def relative_error(out: Any, reference: Any) -> float:
    """Largest ``||out - ref|| / ||ref||`` over the reference's tensors, in fp64.

    Raises:
        ValueError: Too few outputs, another shape, or a result that is not finite.
    """
    got, want = tensors(out), tensors(reference)
    if not want or len(got) < len(want):
        raise ValueError(f"{len(got)} output tensors, the reference has {len(want)}")
    worst = 0.0
    for a, b in zip(got, want, strict=False):
        if a.shape != b.shape:
            raise ValueError(f"shape {tuple(a.shape)}, the reference has {tuple(b.shape)}")
        a, b = a.to(torch.float64), b.to(torch.float64)
        error = (torch.linalg.vector_norm(a - b) / torch.linalg.vector_norm(b).clamp_min(1e-300)).item()
        if not math.isfinite(error):
            raise ValueError("not finite")
        worst = max(worst, error)
    return worst


def _mapped(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """``value`` with every tensor in nested lists, tuples and dicts changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {k: _mapped(v, change) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        items = [_mapped(item, change) for item in value]
        # A named tuple takes its items one by one.
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value


def _clone(inputs: dict[str, Any]) -> dict[str, Any]:
    return _mapped(inputs, torch.Tensor.clone)


def _double(inputs: dict[str, Any]) -> dict[str, Any]:
    return _mapped(inputs, lambda t: t.to(torch.float64) if t.is_floating_point() else t)


def _storages(value: Any) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors(value)} - {0}
