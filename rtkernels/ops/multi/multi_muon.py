"""Muon's passes over lists of tensors, around the orthogonalisation; behind ``rtkernels.optim.Muon``."""

from __future__ import annotations

import torch

from rtkernels.ops.multi.multi_adamw import Lists, single
from rtkernels.ops.multi.multi_tables import THREADS, Table, check_one, check_together
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import Tables
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.declared import Number, Operator, Tensors
from rtkernels.runtime.operator.plan import Step, Steps

_N = 4  # elements of a vector

_MOMENTUM = Kernel(
    "multi/multi_muon.cu", "muon_momentum", template="N", max_registers=64, variants=[(_N,)],
    args="table:ptr tensors:i64 lists:i64 shift:i64 momentum:f64 nesterov:f64 sign:f64",
)  # fmt: skip
_APPLY = Kernel(
    "multi/multi_muon.cu", "muon_apply", template="N", max_registers=64, variants=[(_N,)],
    args="table:ptr lr_by:ptr tensors:i64 lists:i64 shift:i64 lr:f64 factor:f64 decay:f64",
)  # fmt: skip
KERNELS = (_MOMENTUM, _APPLY)


def _check_momentum(lists: Lists) -> None:
    check_one(lists[0], "averages")
    check_together("averages", lists[0], "averages", lists[0], (torch.float32,))
    check_together("grads", lists[1], "averages", lists[0])
    check_together("updates", lists[2], "averages", lists[0])


def _check_apply(lists: Lists) -> None:
    check_one(lists[0], "weights")
    check_together("directions", lists[1], "weights", lists[0])
    if len(lists) > 2:
        check_together("copies", lists[2], "weights", lists[0], FLOAT_DTYPES[:2])


def _plan_momentum(table: Table) -> Steps:
    if not table.chunks:
        return Steps()
    launch = _MOMENTUM.bind((_N,), table.device, table.chunks, THREADS)
    return Steps(Step(launch, "table", table.tensors, table.lists, table.shift, "momentum", "is_nesterov", "sign"))


def _plan_apply(table: Table) -> Steps:
    if not table.chunks:
        return Steps()
    launch = _APPLY.bind((_N,), table.device, table.chunks, THREADS)
    sizes = table.tensors, table.lists, table.shift
    return Steps(Step(launch, "table", "lr_by", *sizes, "lr", "factor", "decay"))


def momentum_reference(averages, grads, updates, momentum, nesterov, maximize) -> None:
    """Advance averages and write updates, any strides."""
    with torch.no_grad():
        for average, grad, update in zip(averages, grads, updates, strict=True):
            grad = -grad.float() if maximize else grad.float()
            average.lerp_(grad, 1 - momentum)
            update.copy_(grad.lerp(average, momentum) if nesterov else average)


def apply_reference(weights, directions, copies, lr_by, lr, factor, decay) -> None:
    """Decay weights, subtract directions and write copies, any strides."""
    with torch.no_grad():
        rate = lr if lr_by is None else lr_by.double().reshape(())
        for i, (w, x) in enumerate(zip(weights, directions, strict=True)):
            new = w.float() * single(1 - rate * decay) - single(rate * factor) * x.float()
            w.copy_(new)
            if len(copies):
                copies[i].copy_(new)


MOMENTUM = Operator(
    "multi_muon_momentum_",
    (Tensors("averages", written=True, counted=False), Tensors("grads"), Tensors("updates", written=True)),
    options="float momentum, bool nesterov, bool maximize", numbers="momentum nesterov maximize",
    derived=("momentum is_nesterov sign", lambda momentum, nesterov, maximize: (
        momentum, float(nesterov), -1.0 if maximize else 1.0)),
    results="", tables=Tables(Table, _check_momentum), plan=_plan_momentum, reference=momentum_reference,
)  # fmt: skip
APPLY = Operator(
    "multi_muon_apply_",
    (
        Tensors("weights", written=True), Tensors("directions"), Tensors("copies", written=True, optional=True),
        Number("lr_by", called="lr"),
    ),
    options="float lr, float factor, float decay", numbers="lr factor decay", results="",
    tables=Tables(Table, _check_apply), plan=_plan_apply, reference=apply_reference,
)  # fmt: skip
