"""One AdamW step with 8-bit moments, or on 16-bit weights without an fp32 copy; behind ``rtkernels.optim.AdamW``."""

from __future__ import annotations

from typing import Any

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes, multi_adamw
from rtkernels.ops.multi.multi_tables import THREADS, Table, check_one, check_together
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import Tables, check_list
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.declared import Number, Operator, Tensors
from rtkernels.runtime.operator.plan import Step, Steps

# As in cuda_src/multi/multi_adamw_codes.cu.
_STATES = {torch.float32: 0, torch.uint8: 1, torch.float8_e4m3fn: 2}
_RESIDENT = {0: 3, 1: 2, 2: 2}  # blocks of an SM
_NOT_ELEMENTS = (4, 5, 6, 7)  # lists of numbers per tensor, and of scales
_KINDS = {torch.uint8: "8bit", torch.float8_e4m3fn: "fp8"}

_CODES = Kernel(
    "multi/multi_adamw_codes.cu", "multi_adamw_codes", template="STATE RESIDENT", max_registers=128,
    args="table:ptr lr_by:ptr grad_scale:ptr found_inf:ptr tensors:i64 lists:i64 shift:i64 seed:i64 stochastic:i64 "
    "lr:f64 log_beta1:f64 log_beta2:f64 rest1:f64 rest2:f64 eps:f64 decay:f64 sign:f64",
    variants=list(_RESIDENT.items()),
)  # fmt: skip
KERNELS = (_CODES,)


class _Table(Table):
    """A table that knows how its moments are kept."""

    def __init__(self, lists: Any, device: int) -> None:
        self.state = _STATES[lists[2][0].dtype]
        numbers = _NOT_ELEMENTS[: 4 if self.state else 2]
        super().__init__(lists, device, scalars=numbers)


def _check(lists: multi_adamw.Lists) -> None:
    weights, grads, firsts, seconds, steps, origins, *others = lists
    check_one(weights, "weights")
    check_together("grads", grads, "weights", weights)
    kind = firsts[0].dtype if len(firsts) else torch.float32
    if kind not in _STATES:
        raise ArgumentError(f"exp_avgs are {kind}; expected float32, uint8 or float8_e4m3fn")
    check_together("exp_avgs", firsts, "weights", weights, (kind,))
    check_together("exp_avg_sqs", seconds, "weights", weights, (kind,))
    given = [("steps", steps, torch.float32, 1), ("origins", origins, torch.int64, 2)]
    copies = others
    if kind != torch.float32:
        if len(others) < 2:
            raise ArgumentError(f"scales are absent; expected two lists of them, because exp_avgs are {kind}")
        copies = others[2:]
        given += [("scales1", others[0], torch.float32, None), ("scales2", others[1], torch.float32, None)]
    if copies:
        check_together("copies", copies[0], "weights", weights, FLOAT_DTYPES[:2])
    for name, tensors, dtype, count in given:
        if len(tensors) != len(weights):
            raise ArgumentError(f"{name} has {len(tensors)} tensors; expected {len(weights)}, as many as weights")
        check_list(name, tensors, (dtype,), weights[0].device)
        for i, (t, w) in enumerate(zip(tensors, weights, strict=True)):
            expected = dynamic_codes.blocks_of(w.numel()) if count is None else count
            if t.numel() != expected:
                raise ArgumentError(f"{name}[{i}] has {t.numel()} elements; expected {expected}")


def _numbers(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool, seed: int, stochastic: bool
) -> tuple:
    numbers = multi_adamw._numbers(lr, beta1, beta2, eps, weight_decay, maximize)
    return *numbers, seed, int(stochastic)


def _plan(table: _Table) -> Steps:
    advance = multi_adamw._ADVANCE.bind((THREADS,), table.device, -(-table.tensors // THREADS), THREADS)
    steps = [Step(advance, "table", "found_inf", table.tensors, table.lists)]
    if table.chunks:
        variant = (table.state, _RESIDENT[table.state])
        codes = _CODES.bind(variant, table.device, table.chunks, THREADS, overlap=True)
        sizes = table.tensors, table.lists, table.shift
        rest = ("random_seed", "stochastically", *multi_adamw._NUMBERS.split())
        steps.append(Step(codes, "table", "lr_by", "grad_scale", "found_inf", *sizes, *rest))
    return Steps(*steps)


def _reference(
    weights, grads, exp_avgs, exp_avg_sqs, steps, origins, scales1, scales2, copies, lr_by, grad_scale, found_inf, lr,
    beta1, beta2, eps, weight_decay, maximize, seed, stochastic,
) -> None:  # fmt: skip
    with torch.no_grad():
        if found_inf is not None and bool(found_inf):
            return
        coded = len(scales1) > 0
        for i, w in enumerate(weights):
            m, v = exp_avgs[i], exp_avg_sqs[i]
            dense = [dynamic_codes.in_memory(t).reshape(-1) for t in (w, grads[i], m, v)]
            full = dense[0].float()
            first, second = dense[2], dense[3]
            if coded:
                first = dynamic_codes.decode(first, scales1[i], True)
                second = dynamic_codes.decode(second, scales2[i], False)
            else:
                first, second = first.clone(), second.clone()
            multi_adamw._reference(
                [full], [dense[1]], [first], [second], [steps[i]], [], lr_by, grad_scale, None, lr, beta1, beta2, eps,
                weight_decay, maximize,
            )  # fmt: skip
            values = [(m, first), (v, second)]
            if coded:
                values = []
                for codes, new, scale, signed in ((m, first, scales1[i], True), (v, second, scales2[i], False)):
                    encoded, scales = dynamic_codes.encode(new, _KINDS[m.dtype], signed)
                    scale.copy_(scales)
                    values.append((codes, encoded))
            low = full
            if stochastic and w.dtype == torch.bfloat16:
                stream, first_place = origins[i].tolist()
                bits = dynamic_codes.random_bits(seed, stream, int(steps[i]), first_place, w.numel())
                low = dynamic_codes.round_stochastically(full, bits)
            for to, new in (*values, (w, low), *([(copies[i], full)] if len(copies) else [])):
                dynamic_codes.fill_memory(to, new)


STEP = Operator(
    "multi_adamw_codes_",
    (
        Tensors("weights", written=True), Tensors("grads"), Tensors("exp_avgs", written=True, counted=False),
        Tensors("exp_avg_sqs", written=True, counted=False), Tensors("steps", written=True, counted=False),
        Tensors("origins"), Tensors("scales1", written=True, counted=False, optional=True),
        Tensors("scales2", written=True, counted=False, optional=True),
        Tensors("copies", written=True, optional=True), Number("lr_by", called="lr"), Number("grad_scale"),
        Number("found_inf"),
    ),
    options="float lr, float beta1, float beta2, float eps, float weight_decay, bool maximize, int seed, "
    "bool stochastic",
    numbers="lr beta1 beta2 eps weight_decay maximize seed stochastic",
    derived=(multi_adamw._NUMBERS + " random_seed stochastically", _numbers), results="",
    tables=Tables(_Table, _check), plan=_plan, reference=_reference,
)  # fmt: skip
