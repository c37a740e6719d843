"""The operators of cross entropy: launchers, references and fakes."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.cross_entropy_plan import (
    BWD_PLANS,
    FWD_PLANS,
    MEAN,
    NONE,
    ROWS_PLANS,
    SCALE_PLANS,
    RowsPlan,
    aligned,
    check,
    check_options,
    report,
)
from rtkernels.ops.loss.cross_entropy_reduce import count_rows, floats, results_of
from rtkernels.runtime.launch.memory import fresh_zeros
from rtkernels.runtime.layout import address, check_same, metadata, nothing, row_count, row_stride, rowed
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp

# ---- launchers ------------------------------------------------------------------------------------------------------


def _begin(device: int):
    """Return the report of a device, after raising what an earlier call left there."""
    found = report(device)
    found.raise_if_bad()
    return found


def _end(found, device: int) -> None:
    if device < 0:  # the emulator has finished already
        found.raise_if_bad()


def _launch_fwd(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    check_options(label_smoothing, z_loss, softcap, reduction)
    logits, labels = _ready(logits, labels)
    device = logits.get_device()
    plan, cols = FWD_PLANS[metadata(logits), metadata(labels), None if softcap else reduction], logits.shape[-1]
    found = _begin(device)
    more = (label_smoothing, z_loss, label_smoothing / cols)
    if isinstance(plan, RowsPlan):
        return _run_rows(plan, logits, None, labels, None, ignore_index, reduction, accuracy, True, *more)
    losses, stats = floats(logits, plan.shape[0]), floats(logits, 2, plan.shape[0])
    correct = floats(logits, plan.shape[0]) if accuracy else None
    if plan.launch is not None:
        plan.launch(
            logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), stats.data_ptr(), address(correct),
            found.tensor.data_ptr(), *plan.shape, ignore_index, 0, cols, *plan.how, *more, softcap,
        )  # fmt: skip
        _end(found, device)
    loss, hits, factor = results_of(losses, correct, labels, ignore_index, reduction, True)
    return loss, hits, stats, factor


def _launch_parts(logits, labels, ignore_index, label_smoothing, softcap, first, vocabulary):
    check_options(label_smoothing, 0.0, softcap, NONE)
    logits, labels = _ready(logits, labels)
    device = logits.get_device()
    plan = FWD_PLANS[metadata(logits), metadata(labels), None]
    parts = floats(logits, 5, plan.shape[0])
    found = _begin(device)
    if plan.launch is not None:
        plan.launch(
            logits.data_ptr(), labels.data_ptr(), 0, parts.data_ptr(), parts[4].data_ptr(), found.tensor.data_ptr(),
            *plan.shape, ignore_index, first, vocabulary, *plan.how, label_smoothing, 0.0, 0.0, softcap,
        )  # fmt: skip
        _end(found, device)
    return parts


def _run_bwd(dloss, logits, out, labels, stats, factor, ignore_index, smoothing, z_loss, softcap, first, vocabulary):
    """Write the gradient of `logits` (rows, aligned as `out`) into `out`, which may be `logits`."""
    launch, rows, cols, stride, wide, *cut = BWD_PLANS[metadata(logits), metadata(labels)]
    if launch is None:
        return
    dloss = dloss.float()
    if dloss.numel() != 1:
        dloss = dloss.contiguous()
    device = logits.get_device()
    launch(
        dloss.data_ptr(), logits.data_ptr(), out.data_ptr(), labels.data_ptr(), stats.data_ptr(),
        0 if factor is None or factor.numel() == 0 else factor.data_ptr(), report(device).tensor.data_ptr(), rows, cols,
        stride, row_stride(out.shape, out.stride()), int(dloss.numel() != 1), wide, ignore_index, first, vocabulary,
        *cut, smoothing, z_loss, smoothing / vocabulary, softcap,
    )  # fmt: skip


def _launch_bwd(dloss, logits, labels, stats, factor, ignore_index, smoothing, z_loss, softcap, first, vocabulary):
    _check_bwd(dloss, logits, labels, stats)
    _begin(logits.get_device())
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits, labels = aligned(logits), labels.contiguous()
    _run_bwd(dloss, logits, out, labels, stats, factor, ignore_index, smoothing, z_loss, softcap, first, vocabulary)
    return out


def _launch_bwd_in_place(
    dloss, logits, labels, stats, factor, ignore_index, smoothing, z_loss, softcap, first, vocabulary
):
    _check_bwd(dloss, logits, labels, stats)
    _check_own_memory(logits)
    options = (ignore_index, smoothing, z_loss, softcap, first, vocabulary)
    if row_stride(logits.shape, logits.stride()) is None:
        logits.copy_(_launch_bwd(dloss, logits, labels, stats, factor, *options))
        return
    _begin(logits.get_device())
    _run_bwd(dloss, logits, logits, labels.contiguous(), stats, factor, *options)
    _count_version(logits)


def _run_grad(logits, out, labels, ignore_index, smoothing, z_loss, softcap, reduction, accuracy):
    """Return loss, accuracy and stats; write the gradient of `logits` (rows, aligned as `out`) into `out`."""
    device, cols = logits.get_device(), logits.shape[-1]
    if softcap:  # limited by arithmetic, not by memory: a second read costs nothing
        loss, hits, stats, factor = _launch_fwd(
            logits, labels, ignore_index, smoothing, z_loss, softcap, reduction, accuracy
        )
        dloss = factor if reduction == MEAN else torch.ones(1, dtype=torch.float32, device=logits.device)
        _run_bwd(dloss, logits, out, labels, stats, None, ignore_index, smoothing, z_loss, softcap, 0, cols)
        return loss, hits, stats
    plan = ROWS_PLANS[metadata(logits), metadata(labels), reduction]
    _begin(device)
    factor = None
    if reduction == MEAN and plan.launch is not None and not plan.few:
        factor = count_rows(labels, ignore_index)
    more = (smoothing, z_loss, smoothing / cols)
    return _run_rows(plan, logits, out, labels, factor, ignore_index, reduction, accuracy, False, *more)[:3]


def _run_rows(plan, logits, out, labels, factor, ignore_index, reduction, accuracy, count, *more):
    """Run a kernel of one pass, without `out` only for results; return loss, accuracy, stats, and factor if `count`."""
    rows, device = labels.numel(), logits.get_device()
    losses, stats = floats(logits, rows), floats(logits, 2, rows)
    correct = floats(logits, rows) if accuracy else None
    if plan.few and reduction != NONE:
        loss, hits = floats(logits), floats(logits) if accuracy else None
        wanted, arrived = floats(logits, 1) if count else None, fresh_zeros(device, 1)
        sums = (loss.data_ptr(), address(hits), address(wanted), arrived.data_ptr())
        _launch_rows(plan, logits, out, labels, losses, stats, correct, sums, ignore_index, reduction, *more)
        results = loss, nothing(loss) if hits is None else hits, stats, nothing(loss) if wanted is None else wanted
    else:
        if plan.launch is not None:
            sums = (0, 0, 0, 0) if plan.few else (address(factor),)
            _launch_rows(plan, logits, out, labels, losses, stats, correct, sums, ignore_index, NONE, *more)
        loss, hits, wanted = results_of(losses, correct, labels, ignore_index, reduction, count)
        results = loss, hits, stats, wanted
    _end(report(device), device)
    return results


def _launch_rows(plan, logits, out, labels, losses, stats, correct, sums, ignore_index, kind, *more):
    device = logits.get_device()
    counter = fresh_zeros(device, 1) if plan.drawn else None
    first = (kind,) if plan.few else (counter.data_ptr(),) if plan.drawn else ()
    plan.launch(
        logits.data_ptr(), address(out), labels.data_ptr(), losses.data_ptr(), stats.data_ptr(), address(correct),
        *sums, report(device).tensor.data_ptr(), losses.numel(), logits.shape[-1],
        row_stride(logits.shape, logits.stride()), 0 if out is None else row_stride(out.shape, out.stride()),
        int(labels.dtype == torch.int64), ignore_index, *first, *plan.sizes, *more,
    )  # fmt: skip


def gradient_in_place(logits, labels, losses, stats, correct, factor, ignore_index, smoothing, z_loss, softcap) -> None:
    """Overwrite dense logits ``[rows, vocabulary]`` with their gradient (times factor[0]) and fill in losses and stats.

    For callers that go through a long batch in chunks; labels, losses and correct are dense. No checks.
    """
    device, cols = logits.get_device(), logits.shape[-1]
    if softcap:
        plan = FWD_PLANS[metadata(logits), metadata(labels), None]
        plan.launch(
            logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), stats.data_ptr(), address(correct),
            report(device).tensor.data_ptr(), *plan.shape, ignore_index, 0, cols, *plan.how, smoothing, z_loss,
            smoothing / cols, softcap,
        )  # fmt: skip
        dloss = torch.ones(1, dtype=torch.float32, device=logits.device) if factor is None else factor
        _run_bwd(dloss, logits, logits, labels, stats, None, ignore_index, smoothing, z_loss, softcap, 0, cols)
        return
    plan, more = ROWS_PLANS[metadata(logits), metadata(labels), None], (smoothing, z_loss, smoothing / cols)
    _launch_rows(plan, logits, logits, labels, losses, stats, correct, (address(factor),), ignore_index, NONE, *more)


def _launch_grad(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    check(metadata(logits), metadata(labels))
    check_options(label_smoothing, z_loss, softcap, reduction)
    out = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    logits, labels = aligned(logits), labels.contiguous()
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy)
    return *_run_grad(logits, out, labels, *options), out


def _launch_grad_in_place(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    check(metadata(logits), metadata(labels))
    check_options(label_smoothing, z_loss, softcap, reduction)
    _check_own_memory(logits)
    options = (ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy)
    if row_stride(logits.shape, logits.stride()) is None:
        *results, out = _launch_grad(logits, labels, *options)
        logits.copy_(out)
        return tuple(results)
    results = _run_grad(logits, logits, labels.contiguous(), *options)
    _count_version(logits)
    return results


def _launch_scale(dlogits: Tensor, dloss: Tensor) -> None:
    _check_scale(dlogits, dloss)
    if row_stride(dlogits.shape, dlogits.stride()) is None:
        _reference_scale(dlogits, dloss)
        return
    dloss = dloss.float()
    if dloss.numel() != 1:
        dloss = dloss.contiguous()
    launch, rows, cols, stride, threads = SCALE_PLANS[(metadata(dlogits),)]
    if launch is not None:
        launch(dlogits.data_ptr(), dloss.data_ptr(), rows, cols, stride, int(dloss.numel() != 1), threads)
    _count_version(dlogits)


# ---- checks ---------------------------------------------------------------------------------------------------------


def _ready(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    check(metadata(logits), metadata(labels))
    return rowed(logits), labels.contiguous()


def _check_bwd(dloss: Tensor, logits: Tensor, labels: Tensor, stats: Tensor) -> None:
    check(metadata(logits), metadata(labels))
    check_same("stats", tuple(stats.shape), (2, row_count(logits.shape)), "shape", of="[2, rows]")
    if dloss.numel() != 1 and dloss.shape != labels.shape:
        raise ArgumentError(f"dloss has shape {tuple(dloss.shape)}; expected {tuple(labels.shape)}, or one number")


def _check_own_memory(logits: Tensor) -> None:
    stride = row_stride(logits.shape, logits.stride())
    if stride is not None and row_count(logits.shape) > 1 and abs(stride) < logits.shape[-1]:
        raise ArgumentError("logits has overlapping rows; in_place needs memory of its own for every element")


def _check_scale(dlogits: Tensor, dloss: Tensor) -> None:
    if dloss.numel() != 1 and dloss.shape != dlogits.shape[:-1]:
        wanted = tuple(dlogits.shape[:-1])
        raise ArgumentError(f"dloss has shape {tuple(dloss.shape)}; expected {wanted}, or one number")


def _count_version(x: Tensor) -> None:
    """Tell autograd that x was overwritten: a backward that saved it must raise, not use the new values."""
    if not x.is_inference():
        torch.autograd.graph.increment_version(x)


# ---- references and fakes -------------------------------------------------------------------------------------------


def _reference_bwd(dloss, logits, labels, stats, *more):
    _check_bwd(dloss, logits, labels, stats)
    return reference.backward(dloss, logits, labels, stats, *more)


def _reference_bwd_in_place(dloss, logits, labels, stats, *more):
    _check_bwd(dloss, logits, labels, stats)
    _check_own_memory(logits)
    logits.copy_(reference.backward(dloss, logits, labels, stats, *more))


def _reference_grad(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    loss, hits, stats, factor = reference.forward(
        logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy
    )
    dloss = factor if reduction == MEAN else torch.ones(1, device=logits.device)
    options = (ignore_index, label_smoothing, z_loss, softcap, 0, logits.shape[-1])
    return loss, hits, stats, reference.backward(dloss, logits, labels, stats, None, *options)


def _reference_grad_in_place(logits, labels, *options):
    check(metadata(logits), metadata(labels))
    _check_own_memory(logits)
    *results, out = _reference_grad(logits, labels, *options)
    logits.copy_(out)
    return tuple(results)


def _reference_scale(dlogits: Tensor, dloss: Tensor) -> None:
    _check_scale(dlogits, dloss)
    g = dloss.float()
    dlogits.copy_(dlogits.float() * (g if g.numel() == 1 else g.unsqueeze(-1)))


def _new(like: Tensor, *shape: int) -> Tensor:
    return like.new_empty(shape, dtype=torch.float32)


def _fake_fwd(logits, labels, ignore_index, label_smoothing, z_loss, softcap, reduction, accuracy):
    shape = labels.shape if reduction == NONE else ()
    return (
        _new(logits, *shape),
        _new(logits, *shape) if accuracy else _new(logits, 0),
        _new(logits, 2, labels.numel()),
        _new(logits, 0 if reduction == NONE else 1),
    )


def _fake_parts(logits, labels, ignore_index, label_smoothing, softcap, first, vocabulary):
    return _new(logits, 5, labels.numel())


def _fake_bwd(dloss, logits, *more):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_grad(logits, *more):
    return *_fake_fwd(logits, *more)[:3], torch.empty_like(logits, memory_format=torch.contiguous_format)


def _fake_grad_in_place(logits, *more):
    return _fake_fwd(logits, *more)[:3]


def _fake_nothing(*args):
    return None


_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_BWD = f"Tensor labels, Tensor stats, Tensor? factor, {_OPTIONS}, int first, int vocabulary"
FORWARD = TorchOp(
    f"cross_entropy_fwd(Tensor logits, Tensor labels, {_OPTIONS}, int reduction, bool accuracy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_fwd,
    reference=reference.forward,
    fake=_fake_fwd,
)
PARTS = TorchOp(
    "cross_entropy_parts(Tensor logits, Tensor labels, int ignore_index, float label_smoothing, float softcap,"
    " int first, int vocabulary) -> Tensor",
    launch=_launch_parts,
    reference=reference.parts,
    fake=_fake_parts,
)
BACKWARD = TorchOp(
    f"cross_entropy_bwd(Tensor dloss, Tensor logits, {_BWD}) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
BACKWARD_IN_PLACE = MutatingOp(
    f"cross_entropy_bwd_in_place(Tensor dloss, Tensor(a!) logits, {_BWD}) -> ()",
    launch=_launch_bwd_in_place,
    reference=_reference_bwd_in_place,
    fake=_fake_nothing,
)
ONE_PASS = TorchOp(
    f"cross_entropy_grad(Tensor logits, Tensor labels, {_OPTIONS}, int reduction, bool accuracy)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    launch=_launch_grad,
    reference=_reference_grad,
    fake=_fake_grad,
)
ONE_PASS_IN_PLACE = MutatingOp(
    f"cross_entropy_grad_in_place(Tensor(a!) logits, Tensor labels, {_OPTIONS}, int reduction, bool accuracy)"
    " -> (Tensor, Tensor, Tensor)",
    launch=_launch_grad_in_place,
    reference=_reference_grad_in_place,
    fake=_fake_grad_in_place,
)
SCALE = MutatingOp(
    "cross_entropy_scale(Tensor(a!) dlogits, Tensor dloss) -> ()",
    launch=_launch_scale,
    reference=_reference_scale,
    fake=_fake_nothing,
)
