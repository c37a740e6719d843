"""The operators of the divergences: launchers, references and fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.ops.loss.divergence_plan import (
    BWD_PLANS,
    FWD_PLANS,
    LOGARITHM,
    MIXED,
    REVERSE,
    TOTAL_PLANS,
    check,
    check_bwd,
    resolve,
)
from rtkernels.ops.loss.divergence_reference import reference_bwd, reference_each, reference_fwd
from rtkernels.runtime.layout import address, metadata, row_count, rowed
from rtkernels.runtime.operator.operator import TorchOp

# ---- launchers ------------------------------------------------------------------------------------------------------


def _dense(labels: Tensor | None) -> Tensor | None:
    return None if labels is None else labels.contiguous()


def _is_wide(labels: Tensor | None) -> bool:
    return labels is not None and labels.dtype == torch.int64


def _launch_terms(x, target, labels, ignore, mode, beta, row_loss, gradient=None, in_target=False) -> Tensor | None:
    """Fill row_loss, or return the terms one by one if it is None.

    With `gradient`, a pair of a tensor whose second number is the factor of the gradient (or None) and that factor,
    fill row_loss and return the gradient in x, with `in_target` in the target.
    """
    if mode == REVERSE:
        return _launch_terms(target, x, labels, ignore, LOGARITHM, beta, row_loss, gradient, not in_target)
    x, target = rowed(x), rowed(target)
    addresses = x.data_ptr(), target.data_ptr()
    plan = FWD_PLANS[metadata(x), metadata(target), (addresses[0] | addresses[1]) & 15, _is_wide(labels)]
    if plan is None:
        wide = x.float(), target.float()
        found = _launch_terms(*wide, labels, ignore, mode, beta, row_loss, gradient, in_target)
        return None if found is None else found.to(x.dtype)
    launch, before, after = plan
    total, scale = gradient or (None, 1.0)
    found = torch.empty(x.shape, dtype=x.dtype, device=x.device) if row_loss is None or gradient else None
    each, out = (0, found.data_ptr()) if gradient else (address(found), 0)
    launch(
        *addresses, address(labels), address(row_loss), each, out, address(total), *before, ignore, *after, mode,
        int(in_target), beta, scale,
    )  # fmt: skip
    return found


def _finish(row_loss: Tensor | None, labels: Tensor | None, like: Tensor, ignore: int, divide: bool, factor: float):
    """Return the reduced loss and its factor from the sums of the rows; only the factor without them."""
    total = torch.empty(2, dtype=torch.float32, device=like.device)
    rows, wide = row_count(like.shape), int(_is_wide(labels))
    TOTAL_PLANS[(like.get_device(),)](
        address(row_loss), address(labels), total.data_ptr(), rows, wide, ignore, int(divide), factor
    )
    return total


def _launch_fwd(
    x: Tensor, target: Tensor, labels: Tensor | None, ignore: int, mode: int, beta: float, factor: float, over: int
) -> Tensor:
    check(metadata(x), metadata(target), metadata(labels))
    if x.numel() == 0:
        return torch.zeros(2, dtype=torch.float32, device=x.device)
    labels = _dense(labels)
    row_loss = torch.empty(row_count(x.shape), dtype=torch.float32, device=x.device)
    _launch_terms(x, target, labels, ignore, mode, beta, row_loss)
    factor, divide = resolve(x.shape, over, factor)
    return _finish(row_loss, labels, x, ignore, divide, factor)


def _launch_both(
    x: Tensor, target: Tensor, labels: Tensor | None, ignore: int, mode: int, beta: float, factor: float, over: int
) -> tuple[Tensor, Tensor]:
    check(metadata(x), metadata(target), metadata(labels))
    if x.numel() == 0:
        return torch.zeros(2, dtype=torch.float32, device=x.device), torch.empty_like(x)
    labels, rows = _dense(labels), row_count(x.shape)
    row_loss = torch.empty(rows, dtype=torch.float32, device=x.device)
    factor, divide = resolve(x.shape, over, factor)
    counted = divide and labels is not None
    before = _finish(None, labels, x, ignore, True, factor) if counted else None
    scale = factor / rows if divide else factor
    dx = _launch_terms(x, target, labels, ignore, mode, beta, row_loss, (before, scale))
    return _finish(row_loss, labels, x, ignore, divide, factor), dx


def _launch_each(x: Tensor, target: Tensor, labels: Tensor | None, ignore: int, mode: int, beta: float) -> Tensor:
    check(metadata(x), metadata(target), metadata(labels))
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return _launch_terms(x, target, _dense(labels), ignore, mode, beta, None)


def _launch_bwd(
    grad: Tensor,
    x: Tensor,
    target: Tensor,
    labels: Tensor | None,
    total: Tensor | None,
    ignore: int,
    mode: int,
    beta: float,
    in_target: bool,
) -> Tensor:
    check_bwd(grad, x, target, labels, total, mode, in_target)
    if x.numel() == 0:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if mode == REVERSE:
        x, target, mode, in_target = target, x, LOGARITHM, not in_target
    elif mode == MIXED and in_target:
        x, target, beta, in_target = target, x, 1.0 - beta, False
    return _gradient(grad, x, target, _dense(labels), total, ignore, mode, beta, in_target)


def _gradient(grad, x, target, labels, total, ignore, mode, beta, in_target) -> Tensor:
    x, target = rowed(x), rowed(target)
    each = None if total is not None else rowed(grad)
    addresses = x.data_ptr(), target.data_ptr()
    align = (addresses[0] | addresses[1] | address(each)) & 15
    plan = BWD_PLANS[metadata(x), metadata(target), metadata(each), align, _is_wide(labels)]
    if plan is None:
        wide = _gradient(grad.float(), x.float(), target.float(), labels, total, ignore, mode, beta, in_target)
        return wide.to(x.dtype)
    launch, before, after = plan
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        *addresses,
        address(labels),
        grad.data_ptr(),
        address(total),
        address(each),
        out.data_ptr(),
        *before,
        ignore,
        *after,
        mode,
        int(in_target),
        beta,
    )
    return out


def _fake_fwd(x, target, labels, ignore, mode, beta, factor, over):
    return x.new_empty(2, dtype=torch.float32)


def _fake_both(x, target, labels, ignore, mode, beta, factor, over):
    return x.new_empty(2, dtype=torch.float32), torch.empty_like(x, memory_format=torch.contiguous_format)


def _reference_both(x, target, labels, ignore, mode, beta, factor, over):
    total = reference_fwd(x, target, labels, ignore, mode, beta, factor, over)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return total, reference_bwd(one, x, target, labels, total, ignore, mode, beta, False)


def _fake_each(x, target, labels, ignore, mode, beta):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _fake_bwd(grad, x, target, labels, total, ignore, mode, beta, in_target):
    return torch.empty_like(x, memory_format=torch.contiguous_format)


FORWARD = TorchOp(
    "divergence_fwd(Tensor x, Tensor target, Tensor? labels, int ignore, int mode, float beta, float factor, "
    "int over) -> Tensor",
    launch=_launch_fwd,
    reference=reference_fwd,
    fake=_fake_fwd,
)
BOTH = TorchOp(
    "divergence_both(Tensor x, Tensor target, Tensor? labels, int ignore, int mode, float beta, float factor, "
    "int over) -> (Tensor, Tensor)",
    launch=_launch_both,
    reference=_reference_both,
    fake=_fake_both,
)
EACH = TorchOp(
    "divergence_each_fwd(Tensor x, Tensor target, Tensor? labels, int ignore, int mode, float beta) -> Tensor",
    launch=_launch_each,
    reference=reference_each,
    fake=_fake_each,
)
BACKWARD = TorchOp(
    "divergence_bwd(Tensor grad, Tensor x, Tensor target, Tensor? labels, Tensor? total, int ignore, int mode, "
    "float beta, bool in_target) -> Tensor",
    launch=_launch_bwd,
    reference=reference_bwd,
    fake=_fake_bwd,
)
