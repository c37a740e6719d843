"""One AdamW step over lists of tensors: kernels and operator behind ``rtkernels.optim.AdamW``."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.multi_tables import THREADS, Table, check_one, check_together
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import Tables, check_list
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.operator import TorchOp

_AHEAD = 2  # groups of four elements a thread requests before it works on the first
_STEPS = 4  # index of the list of step counts; cuda_src/multi/multi_adamw.cu

_ADVANCE = Kernel(
    "multi/multi_adamw.cu", "adamw_advance", template="THREADS", max_registers=32,
    args="table:ptr found_inf:ptr tensors:i64 lists:i64", variants=[(THREADS,)],
)  # fmt: skip
_ADAMW = Kernel(
    "multi/multi_adamw.cu", "multi_adamw", template="AHEAD", max_registers=96,
    args="table:ptr lr_by:ptr grad_scale:ptr found_inf:ptr tensors:i64 lists:i64 shift:i64 lr:f64 log_beta1:f64 "
    "log_beta2:f64 rest1:f64 rest2:f64 eps:f64 decay:f64 sign:f64",
    variants=[(_AHEAD,)],
)  # fmt: skip
KERNELS = (_ADVANCE, _ADAMW)

Lists = Sequence[Sequence[Tensor]]


def _check(lists: Lists) -> None:
    weights, grads, firsts, seconds, steps, *copies = lists
    check_one(weights, "weights")
    full = (torch.float32,)
    check_together("weights", weights, "weights", weights, full)
    check_together("grads", grads, "weights", weights)
    check_together("exp_avgs", firsts, "weights", weights, full)
    check_together("exp_avg_sqs", seconds, "weights", weights, full)
    if copies:
        check_together("copies", copies[0], "weights", weights, FLOAT_DTYPES[:2])
    if len(steps) != len(weights):
        raise ArgumentError(f"steps has {len(steps)} tensors; expected {len(weights)}, as many as weights")
    if len(steps):
        check_list("steps", steps, full, weights[0].device)
    for i, step in enumerate(steps):
        if step.dtype != torch.float32 or step.numel() != 1 or step.device != weights[0].device:
            raise ArgumentError(
                f"steps[{i}] is {str(step.dtype).removeprefix('torch.')} {tuple(step.shape)} on {step.device}; "
                f"expected a single float32 number on {weights[0].device}"
            )


def _build(lists: Lists, device: int) -> Table:
    _check(lists)
    return Table(lists, device, scalars=_STEPS)


_TABLES = Tables(_build)


def _lists(weights, grads, exp_avgs, exp_avg_sqs, steps, copies) -> Lists:
    lists = (weights, grads, exp_avgs, exp_avg_sqs, steps)
    return (*lists, copies) if len(copies) else lists


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _check_scalars(weights: Sequence[Tensor], **numbers: Tensor | None) -> None:
    for name, number in numbers.items():
        if number is not None and (
            number.dtype != torch.float32 or number.numel() != 1 or number.device != weights[0].device
        ):
            raise ArgumentError(
                f"{name} is {str(number.dtype).removeprefix('torch.')} {tuple(number.shape)} on {number.device}; "
                f"expected a single float32 number on {weights[0].device}"
            )


def _launch(
    weights: Sequence[Tensor], grads: Sequence[Tensor], exp_avgs: Sequence[Tensor], exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor], copies: Sequence[Tensor], lr_by: Tensor | None, grad_scale: Tensor | None,
    found_inf: Tensor | None, lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool,
) -> None:  # fmt: skip
    _check_scalars(weights, lr=lr_by, grad_scale=grad_scale, found_inf=found_inf)
    table = _TABLES.find(_lists(weights, grads, exp_avgs, exp_avg_sqs, steps, copies))
    bound = table.launches.get("adamw")
    if bound is None:
        bound = table.launches["adamw"] = (
            _ADVANCE.bind((THREADS,), table.device, -(-table.tensors // THREADS), THREADS),
            _ADAMW.bind((_AHEAD,), table.device, max(table.chunks, 1), THREADS, overlap=True),
        )
    advance, adamw = bound
    lr_address, scale_address, inf_address = (0 if t is None else t.data_ptr() for t in (lr_by, grad_scale, found_inf))
    advance(table.address, inf_address, table.tensors, table.lists)
    if table.chunks:
        adamw(
            table.address, lr_address, scale_address, inf_address, table.tensors, table.lists, table.shift, lr,
            _log(beta1), _log(beta2), 1.0 - beta1, 1.0 - beta2, eps, weight_decay, -1.0 if maximize else 1.0,
        )  # fmt: skip
    if not weights[0].is_inference():
        torch.autograd.graph.increment_version((*weights, *copies))  # no graph saves the others


def _reference(
    weights, grads, exp_avgs, exp_avg_sqs, steps, copies, lr_by, grad_scale, found_inf, lr, beta1, beta2, eps,
    weight_decay, maximize,
) -> None:  # fmt: skip
    if not len(weights):
        return
    _check(_lists(weights, grads, exp_avgs, exp_avg_sqs, steps, copies))
    _check_scalars(weights, lr=lr_by, grad_scale=grad_scale, found_inf=found_inf)
    with torch.no_grad():
        # Whether to skip is known to the device only: then the new values are the old ones.
        skip = None if found_inf is None else (found_inf != 0).reshape(())
        rate = lr if lr_by is None else lr_by.double().reshape(())
        sign = -1.0 if maximize else 1.0
        for i, (w, g, m, v, step) in enumerate(zip(weights, grads, exp_avgs, exp_avg_sqs, steps, strict=True)):
            count = step.double().reshape(()) + 1
            g = g.float() * (sign if grad_scale is None else (sign / grad_scale.reshape(())))
            new_m = beta1 * m + (1 - beta1) * g
            new_v = beta2 * v + (1 - beta2) * g * g
            bias1, bias2 = 1 - beta1**count, 1 - beta2**count
            denominator = new_v.sqrt() * (1 / bias2.sqrt()).float() + eps
            keep, size = _single(1 - rate * weight_decay), (rate / bias1).float()
            new_w = w * keep - size * new_m / denominator
            for old, new in ((w, new_w), (m, new_m), (v, new_v), (step, step + 1)):
                old.copy_(new if skip is None else torch.where(skip, old, new))
            if len(copies):
                low = copies[i]
                low.copy_(w if skip is None else torch.where(skip, low, w.to(low.dtype)))


def _single(number: float | Tensor) -> float | Tensor:
    return number.float() if isinstance(number, Tensor) else number


STEP = TorchOp(
    "multi_adamw_(Tensor(a!)[] weights, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs, "
    "Tensor(d!)[] steps, Tensor(e!)[] copies, Tensor? lr_by, Tensor? grad_scale, Tensor? found_inf, float lr, "
    "float beta1, float beta2, float eps, float weight_decay, bool maximize) -> ()",
    launch=_launch,
    reference=_reference,
    fake=lambda *args: None,
)


def samples(device: str):
    """Arguments for the operator."""
    g = torch.Generator(device).manual_seed(1)

    def some() -> list[Tensor]:
        return [torch.randn(size, generator=g, device=device).abs() for size in (40, 3)]

    def step() -> list[Tensor]:
        return [torch.full((), 2.0, device=device) for _ in range(2)]

    numbers = (1e-2, 0.9, 0.99, 1e-8, 0.1, False)
    yield STEP, (some(), some(), some(), some(), step(), [], None, None, None, *numbers)
    copies = [t.bfloat16() for t in some()]
    one = torch.ones((), device=device)
    low = [t.bfloat16() for t in some()]
    yield STEP, (some(), low, some(), some(), step(), copies, one * 0.1, one * 4, one * 0, *numbers)
