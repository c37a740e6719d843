"""One AdamW step over lists of tensors: kernels and operator behind ``rtkernels.optim.AdamW``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi.multi_tables import THREADS, Table, check_one, check_together
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import Tables, check_list
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.declared import Number, Operator, Tensors
from rtkernels.runtime.operator.plan import Step, Steps

_IN_FLIGHT = 2  # groups of four elements a thread requests before it works on the first
_STEPS = 4  # index of the list of step counts; cuda_src/multi/multi_adamw.cu

_ADVANCE = Kernel(
    "multi/multi_adamw.cu", "adamw_advance", template="THREADS", max_registers=32,
    args="table:ptr found_inf:ptr tensors:i64 lists:i64", variants=[(THREADS,)],
)  # fmt: skip
_ADAMW = Kernel(
    "multi/multi_adamw.cu", "multi_adamw", template="IN_FLIGHT", max_registers=96,
    args="table:ptr lr_by:ptr grad_scale:ptr found_inf:ptr tensors:i64 lists:i64 shift:i64 lr:f64 log_beta1:f64 "
    "log_beta2:f64 rest1:f64 rest2:f64 eps:f64 decay:f64 sign:f64",
    variants=[(_IN_FLIGHT,)],
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


_TABLES = Tables(partial(Table, scalars=(_STEPS,)), _check)


def _log(beta: float) -> float:
    return math.log(beta) if beta > 0 else -math.inf


def _numbers(lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool) -> tuple:
    sign = -1.0 if maximize else 1.0
    return lr, _log(beta1), _log(beta2), 1.0 - beta1, 1.0 - beta2, eps, weight_decay, sign


def _plan(table: Table) -> Steps:
    advance = _ADVANCE.bind((THREADS,), table.device, -(-table.tensors // THREADS), THREADS)
    steps = [Step(advance, "table", "found_inf", table.tensors, table.lists)]
    if table.chunks:
        adamw = _ADAMW.bind((_IN_FLIGHT,), table.device, table.chunks, THREADS, overlap=True)
        sizes = table.tensors, table.lists, table.shift
        steps.append(Step(adamw, "table", "lr_by", "grad_scale", "found_inf", *sizes, *_NUMBERS.split()))
    return Steps(*steps)


def _reference(
    weights, grads, exp_avgs, exp_avg_sqs, steps, copies, lr_by, grad_scale, found_inf, lr, beta1, beta2, eps,
    weight_decay, maximize,
) -> None:  # fmt: skip
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
            keep, size = single(1 - rate * weight_decay), (rate / bias1).float()
            new_w = w * keep - size * new_m / denominator
            for old, new in ((w, new_w), (m, new_m), (v, new_v), (step, step + 1)):
                old.copy_(new if skip is None else torch.where(skip, old, new))
            if len(copies):
                low = copies[i]
                low.copy_(w if skip is None else torch.where(skip, low, w.to(low.dtype)))


def single(number: float | Tensor) -> float | Tensor:
    """Return a number as one that multiplies fp32 tensors."""
    return number.float() if isinstance(number, Tensor) else number


_NUMBERS = "lr log_beta1 log_beta2 rest1 rest2 eps decay sign"
STEP = Operator(
    "multi_adamw_",
    (
        Tensors("weights", written=True), Tensors("grads"), Tensors("exp_avgs", written=True, counted=False),
        Tensors("exp_avg_sqs", written=True, counted=False), Tensors("steps", written=True, counted=False),
        Tensors("copies", written=True, optional=True), Number("lr_by", called="lr"), Number("grad_scale"),
        Number("found_inf"),
    ),
    options="float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize",
    numbers="lr beta1 beta2 eps weight_decay maximize", derived=(_NUMBERS, _numbers), results="",
    tables=_TABLES, plan=_plan, reference=_reference,
)  # fmt: skip
