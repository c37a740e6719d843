"""Steps on moments of any kind, or on 16-bit weights without an fp32 copy: lists, checks and the kernel's record.

Behind ``rtkernels.optim.AdamW`` (``multi_adamw_codes.py``) and ``rtkernels.optim.Lion`` (``multi_lion.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes, multi_adamw
from rtkernels.ops.multi.multi_tables import THREADS, Table, check_one, check_together
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import Tables, check_list
from rtkernels.runtime.layout import FLOAT_DTYPES
from rtkernels.runtime.operator.plan import Step, Steps

# As in cuda_src/multi/lane_moments.cuh and multi_moments.cu.
STATES = {torch.float32: 0, torch.uint8: 1, torch.float8_e4m3fn: 2, torch.int8: 3, torch.bfloat16: 4}
ADAMW, LION = 0, 1
_RESIDENT = {(ADAMW, 0): 3, (ADAMW, 1): 3, (ADAMW, 2): 3, (ADAMW, 3): 3, (LION, 0): 2, (LION, 1): 3, (LION, 4): 3}

KERNEL = Kernel(
    "multi/multi_moments.cu", "multi_moments", template="RULE STATE RESIDENT", max_registers=128,
    args="table:ptr lr_by:ptr grad_scale:ptr found_inf:ptr tensors:i64 lists:i64 shift:i64 seed:i64 stochastic:i64 "
    "lr:f64 log_beta1:f64 log_beta2:f64 rest1:f64 rest2:f64 eps:f64 decay:f64 sign:f64",
    variants=[(*which, resident) for which, resident in _RESIDENT.items()],
)  # fmt: skip
KERNELS = (KERNEL,)


class MomentTable(Table):
    """A table that knows how its moments are kept: a list per moment, a count and an origin per tensor, scales."""

    def __init__(self, rule: int, lists: Any, device: int) -> None:
        self.rule, self.state = rule, STATES[lists[2][0].dtype]
        moments = 1 if rule == LION else 2
        others = list(range(2 + moments, 4 + moments))  # of which elements are not those of weights
        if lists[2][0].dtype in dynamic_codes.KIND_OF:
            others += range(4 + moments, 4 + 2 * moments)
        super().__init__(lists, device, scalars=others)


def tables(rule: int) -> Tables:
    """Return the tables of a rule's operator."""
    return Tables(lambda lists, device: MomentTable(rule, lists, device), lambda lists: _check(rule, lists))


def _check(rule: int, lists: Sequence[Sequence[Tensor]]) -> None:
    one = rule == LION
    weights, grads, *rest = lists
    names = ("exp_avgs",) if one else ("exp_avgs", "exp_avg_sqs")
    moments, rest = rest[: len(names)], rest[len(names) :]
    origins, steps = rest[:2] if one else rest[1::-1]
    others = rest[2:]
    check_one(weights, "weights")
    check_together("grads", grads, "weights", weights)
    dtype = moments[0][0].dtype if len(moments[0]) else torch.float32
    known = [d for d, state in STATES.items() if (rule, state) in _RESIDENT]
    if dtype not in known:
        raise ArgumentError(f"exp_avgs are {dtype}; expected {', '.join(map(str, known))}")
    kind = dynamic_codes.KIND_OF.get(dtype)
    for name, tensors in zip(names, moments, strict=True):
        if kind == "4bit":
            _check_counts(name, tensors, dtype, weights, [dynamic_codes.codes_of(w.numel(), kind) for w in weights])
        else:
            check_together(name, tensors, "weights", weights, (dtype,))
    copies = others
    if kind is not None:
        if len(others) < len(names):
            lacking = "a list" if one else "two lists"
            raise ArgumentError(f"scales are absent; expected {lacking} of them, because exp_avgs are {dtype}")
        copies = others[len(names) :]
        blocks = [dynamic_codes.blocks_of(w.numel(), kind) for w in weights]
        for i in range(len(names)):
            _check_counts("scales" if one else f"scales{i + 1}", others[i], torch.float32, weights, blocks)
    if copies:
        check_together("copies", copies[0], "weights", weights, FLOAT_DTYPES[:2])
    _check_counts("steps", steps, torch.float32, weights, [1] * len(weights))
    _check_counts("origins", origins, torch.int64, weights, [2] * len(weights))


def _check_counts(
    name: str, tensors: Sequence[Tensor], dtype: torch.dtype, weights: Sequence[Tensor], counts: Sequence[int]
) -> None:
    if len(tensors) != len(weights):
        raise ArgumentError(f"{name} has {len(tensors)} tensors; expected {len(weights)}, as many as weights")
    if not len(tensors):
        return
    check_list(name, tensors, (dtype,), weights[0].device)
    for i, (t, count) in enumerate(zip(tensors, counts, strict=True)):
        if t.numel() != count:
            raise ArgumentError(f"{name}[{i}] has {t.numel()} elements; expected {count}")


def plan(table: MomentTable) -> Steps:
    """Return the launches of a step."""
    advance = multi_adamw._ADVANCE.bind((THREADS,), table.device, -(-table.tensors // THREADS), THREADS)
    steps = [Step(advance, "table", "found_inf", table.tensors, table.lists)]
    if table.chunks:
        variant = (table.rule, table.state, _RESIDENT[table.rule, table.state])
        launch = KERNEL.bind(variant, table.device, table.chunks, THREADS, overlap=True)
        sizes = table.tensors, table.lists, table.shift
        rest = ("random_seed", "stochastically", *multi_adamw._NUMBERS.split())
        steps.append(Step(launch, "table", "lr_by", "grad_scale", "found_inf", *sizes, *rest))
    return Steps(*steps)


def numbers(
    lr: float, beta1: float, beta2: float, eps: float, weight_decay: float, maximize: bool, seed: int, stochastic: bool
) -> tuple:
    """Return what the kernel is given, in the order of ``DERIVED``."""
    given = multi_adamw._numbers(lr, beta1, beta2, eps, weight_decay, maximize)
    return *given, seed, int(stochastic)


DERIVED = multi_adamw._NUMBERS + " random_seed stochastically"


def decoded(moment: Tensor, scale: Tensor | None, signed: bool, count: int) -> Tensor:
    """Return a moment as a new fp32 tensor with one dimension, in the order of memory."""
    flat = dynamic_codes.in_memory(moment).reshape(-1)
    return flat.float().clone() if scale is None else dynamic_codes.decode(flat, scale, signed, count)


def write(
    weight: Tensor, full: Tensor, moments: Sequence[tuple[Tensor, Tensor, Tensor | None, bool]], copy: Tensor | None,
    origin: Tensor, step: Tensor, seed: int, stochastic: bool,
) -> None:  # fmt: skip
    """Write the results of a step of one tensor, in the order of memory; moments: ``(moment, new, scale, signed)``."""
    values = []
    for moment, new, scale, signed in moments:
        if scale is not None:
            new, scales = dynamic_codes.encode(new, dynamic_codes.KIND_OF[moment.dtype], signed)
            scale.copy_(scales.reshape(scale.shape))
        values.append((moment, new))
    low = full
    if stochastic and weight.dtype == torch.bfloat16:
        stream, first = origin.tolist()
        bits = dynamic_codes.random_bits(seed, stream, int(step), first, weight.numel())
        low = dynamic_codes.round_stochastically(full, bits)
    for to, new in (*values, (weight, low), *([] if copy is None else [(copy, full)])):
        dynamic_codes.fill_memory(to, new)
