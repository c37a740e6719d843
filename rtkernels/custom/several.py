"""Several results of the same operands in one launch: ``rtkernels.pointwise`` with several expressions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.elementwise import (
    Number,
    bits_of,
    common_dtype,
    integer_range,
    meta_of,
    output_strides,
    run,
    shares_partly,
)
from rtkernels.aten.functors import ABSENT, FLOATS, NUMBER_ARGUMENTS, TABLE_ARGUMENTS, TOKENS, Functor
from rtkernels.aten.strides import arrange, broadcast, overlaps_itself
from rtkernels.aten.table import OUT_OF_RANGE, OVERLAP, NotHandled
from rtkernels.runtime.call.launches import launch_trace
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.plans import Plans

MAX_RESULTS = 3


class SeveralKernels:
    """The kernels of one unit that write all of its results.

    Args:
        unit: Source.
        variants: A function of a class of layouts (V, G) and a target.
    """

    def __init__(self, unit: str, variants: Callable[[str, Any], Any]) -> None:
        types, pointers = "F0 F1 F2 T O P Q A B D", "r0:ptr r1:ptr r2:ptr a:ptr b:ptr d:ptr"
        self.flat = Kernel(
            unit, "several_flat", template=types, max_registers=128, variants=lambda target: variants("V", target),
            args=f"{pointers} {NUMBER_ARGUMENTS} count:i64 steps:i64 aligned16:i64",
        )  # fmt: skip
        self.strided = Kernel(
            unit, "several_strided", struct=True, template=f"{types} INDEX64", max_registers=128,
            variants=lambda target: variants("G", target),
            args=f"{pointers} {NUMBER_ARGUMENTS} {TABLE_ARGUMENTS} count:i64 dims:i64 steps:i64 vectors:i64",
        )  # fmt: skip

    def all(self) -> tuple[Kernel, ...]:
        return self.flat, self.strided


class _Plan:
    """A launch, its results, and what ``bits_of`` asks."""

    __slots__ = ("common", "dtypes", "inverts", "is_float", "launch", "range", "rounds", "shape", "stride")


_ONE_BY_ONE = NotHandled("results that one launch cannot write")


def _build(
    kernels: SeveralKernels, functors: tuple[Functor, ...], device: int, default: torch.dtype, outs: Any, *metas: Any
) -> _Plan | NotHandled:
    plan = _Plan()
    commons = {common_dtype(functor, metas, default) for functor in functors}
    plan.common = commons.pop()
    if commons or any(plan.common not in functor.dtypes for functor in functors):
        return _ONE_BY_ONE
    plan.dtypes = [functor.result or plan.common for functor in functors]
    if any(dtype not in TOKENS for dtype in (plan.common, *plan.dtypes, *(meta[2] for meta in metas))):
        return _ONE_BY_ONE
    try:
        plan.shape = tuple(torch.broadcast_shapes(*(meta[0] for meta in metas)))
    except RuntimeError:
        return _ONE_BY_ONE
    plan.stride = output_strides(plan.shape, metas) if outs is None else outs[0][1]
    start = 0
    for out, dtype in zip(outs or (), plan.dtypes, strict=False):
        if out[:3] != (plan.shape, plan.stride, dtype) or overlaps_itself(plan.shape, plan.stride):
            return _ONE_BY_ONE
        start |= out[3]
    plan.rounds = plan.inverts = False
    plan.is_float = plan.common in FLOATS
    plan.range = None if plan.is_float else integer_range(plan.common)
    plan.launch = None
    if 0 in plan.shape:
        return plan
    how = arrange(
        plan.shape, [plan.stride, *(broadcast(meta[0], meta[1], plan.shape) for meta in metas)],
        [max(dtype.itemsize for dtype in plan.dtypes), *(meta[2].itemsize for meta in metas)],
        [start, *(meta[3] for meta in metas)], tiles=False,
    )  # fmt: skip
    if how is None:
        return _ONE_BY_ONE
    variant = variant_of(functors, plan.common, plan.dtypes, [meta[2] for meta in metas])
    if how.kind == "V":
        plan.launch = kernels.flat.bind(variant, device, how.grid, 256, ending=how.ending)
    else:
        plan.launch = kernels.strided.bind((*variant, how.index64), device, how.grid, 256, ending=how.ending)
    return plan


def variant_of(
    functors: Sequence[Functor], common: torch.dtype, results: Sequence[torch.dtype], operands: Sequence[torch.dtype]
) -> tuple[str, ...]:
    """Return the template arguments of ``several_flat``."""
    absent = MAX_RESULTS - len(functors)
    return (
        *(functor.name for functor in functors), *[functors[0].name] * absent, TOKENS[common],
        *(TOKENS[dtype] for dtype in results), *[ABSENT] * absent,
        *(TOKENS[dtype] for dtype in operands), *[ABSENT] * (3 - len(operands)),
    )  # fmt: skip


_PLANS = Plans(_build)


def run_several(
    kernels: SeveralKernels,
    functors: tuple[Functor, ...],
    operands: Sequence[Tensor],
    scalars: Sequence[Number],
    named: Sequence[Sequence[bool]],
    outs: Sequence[Tensor] | None = None,
) -> list[Tensor] | NotHandled:
    """Run functors of the same operands and return their results: in one launch, or one by one where that cannot be.

    One launch writes results of one set of strides that are computed in one dtype.

    Args:
        kernels: Of the functors' unit.
        functors: Two or three, each of as many inputs as there are operands.
        operands: Tensors.
        scalars: s0 to s3.
        named: Which of them each functor uses.
        outs: Written instead of new tensors. An operand may be one of them.
    """
    if outs is not None and any(shares_partly(operand, out) for operand in operands for out in outs):
        return OVERLAP
    device = max(operand.get_device() for operand in operands)
    if any(operand.get_device() != device for operand in operands):
        return _one_by_one(functors, operands, scalars, named, outs)
    to = None if outs is None else tuple(map(meta_of, outs))
    plan = _PLANS[(kernels, functors, device, torch.get_default_dtype(), to, *map(meta_of, operands))]
    if type(plan) is NotHandled:
        return _one_by_one(functors, operands, scalars, named, outs)
    bits = [0, 0, 0, *(bits_of(plan, 3 + i, value) for i, value in enumerate(scalars))]
    if None in bits:
        return OUT_OF_RANGE
    results = outs
    if results is None:
        results = [
            torch.empty_strided(plan.shape, plan.stride, dtype=dtype, device=operands[0].device)
            for dtype in plan.dtypes
        ]
    if plan.launch is not None:
        addresses = [tensor.data_ptr() for tensor in results] + [0] * (MAX_RESULTS - len(results))
        addresses += [tensor.data_ptr() for tensor in operands] + [0] * (3 - len(operands))
        plan.launch(*addresses, *bits)
    if (trace := launch_trace()) is not None:
        trace.refuse("several results")
    return list(results)


def _one_by_one(
    functors: tuple[Functor, ...], operands: Sequence[Tensor], scalars: Sequence[Number],
    named: Sequence[Sequence[bool]], outs: Sequence[Tensor] | None,
) -> list[Tensor] | NotHandled:  # fmt: skip
    """Run a kernel for each result; all are computed before one is written to an operand's memory."""
    results = []
    for functor, used in zip(functors, named, strict=True):
        # What a functor does not use need not fit into the dtype that it computes in.
        result = run(functor, operands, [value if uses else 0 for value, uses in zip(scalars, used, strict=True)])
        if type(result) is NotHandled:
            return result
        results.append(result)
    if outs is None:
        return results
    for out, result in zip(outs, results, strict=True):
        out.copy_(result)
    return list(outs)
