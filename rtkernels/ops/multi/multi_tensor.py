"""Ops over lists of tensors, one launch for all: norms, zeros, scaling, casting, clipping by the global norm."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import multi_adamw, multi_adamw_codes, multi_lion, multi_moments, multi_muon
from rtkernels.ops.multi import reference as plain
from rtkernels.ops.multi.multi_tables import ONE, THREADS, TWO, Table, check_one
from rtkernels.ops.multi.reference import LARGEST, MAGNITUDES, SQUARES, ZEROS, out_dtype
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.launch.tables import TensorList
from rtkernels.runtime.operator.arguments import check_number
from rtkernels.runtime.operator.autograd import refuse_gradients
from rtkernels.runtime.operator.declared import Number, Operator
from rtkernels.runtime.operator.declared import Tensors as ListOf
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.operator.registry import Op

Tensors = Sequence[Tensor] | Iterable[Tensor]

_KINDS = {2.0: SQUARES, 1.0: MAGNITUDES, math.inf: LARGEST}
_FINISH_WARPS = 32
_LONG_LIST = 64  # chunks
_IN_FLIGHT = 4  # accesses of 16 bytes a thread requests before it works on the first

_REDUCE = Kernel(
    "multi/multi_reduce.cu", "multi_reduce", template="KIND", max_registers=64,
    args="table:ptr partial:ptr tensors:i64 shift:i64", variants=[(kind,) for kind in range(4)],
)  # fmt: skip
_FINISH = Kernel(
    "multi/multi_reduce.cu", "multi_finish", template="KIND", max_registers=64,
    args="table:ptr partial:ptr out:ptr tensors:i64 shift:i64 chunks:i64 raw:i64",
    variants=[(kind,) for kind in range(4)],
)  # fmt: skip
_SCALE = Kernel(
    "multi/multi_scale.cu", "multi_scale", template="IN_FLIGHT", max_registers=64,
    args="table:ptr by:ptr tensors:i64 lists:i64 shift:i64 chunks:i64 scale:f64 max_norm:f64", variants=[(_IN_FLIGHT,)],
)  # fmt: skip


def _overlaps(table: Table) -> bool:
    """Return whether a launch begins before the one before it has ended: the host takes longer for short lists."""
    return table.chunks >= _LONG_LIST


def _reduce_steps(table: Table, kind: int, per_tensor: bool, raw: bool, out: str) -> list[Step]:
    blocks = 1 + (-(-table.tensors // _FINISH_WARPS) if per_tensor else 0)
    finish = _FINISH.bind((kind,), table.device, blocks, 32 * _FINISH_WARPS, overlap=_overlaps(table))
    steps = [Step(finish, "table", "partial", out, table.tensors, table.shift, table.chunks, int(raw))]
    if table.chunks:
        reduce = _REDUCE.bind((kind,), table.device, table.chunks, THREADS)
        steps.insert(0, Step(reduce, "table", "partial", table.tensors, table.shift))
    return steps


def _scale_steps(table: Table, by: str, scale: str | float, limit: str | float, *, overlap: bool = False) -> list[Step]:
    if not table.chunks:
        return []
    # Overlap only behind a kernel of our own: a graph may know no other.
    launch = _SCALE.bind((_IN_FLIGHT,), table.device, table.walkers, THREADS, overlap=overlap)
    return [Step(launch, "table", by, table.tensors, table.lists, table.shift, table.chunks, scale, limit)]


def _partial(table: Table) -> dict[str, Memory]:
    return {"partial": Memory((max(table.chunks, 1),), torch.float64)}


def _plan_reduce(table: Table, kind: int, per_tensor: bool, raw: bool) -> Steps:
    return Steps(*_reduce_steps(table, kind, per_tensor, raw, "out"), scratch=_partial(table))


def _plan_clip(table: Table, kind: int) -> Steps:
    norm = _reduce_steps(table, kind, False, False, "norm")
    scale = _scale_steps(table, "norm", 1.0, "max_norm", overlap=_overlaps(table))
    return Steps(*norm, *scale, scratch=_partial(table))


def _overwritten(op: str, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the tensors of a function that is not differentiable, unless one of them requires a gradient."""
    if is_grad_enabled() and (type(tensors) is not TensorList or tensors.requires_grad):
        refuse_gradients(op, tensors)
    return tensors


def _prepare_one(op: str) -> Callable[..., tuple[Any, ...]]:
    return lambda tensors, *rest: (_overwritten(op, _listed(tensors)), *rest)


def _prepare_copy(outputs: Tensors, inputs: Tensors, *rest: Any) -> tuple[Any, ...]:
    outputs, inputs = _listed(outputs), _listed(inputs)
    if len(outputs) != len(inputs):
        raise ArgumentError(f"inputs has {len(inputs)} tensors; expected {len(outputs)}, as many as outputs")
    _overwritten("multi_copy_", inputs)
    return _overwritten("multi_copy_", outputs), inputs, *rest


_TENSORS = ListOf("tensors", written=True)
_BY = Number("by", called="scale")
REDUCE = Operator(
    "multi_reduce", (ListOf("tensors"),), options="int kind, bool per_tensor, bool raw", results="out",
    outputs=lambda tensors, kind, per_tensor, raw: (
        Memory((1 + (len(tensors) if per_tensor else 0),), out_dtype(kind, raw)),
    ),
    tables=ONE, plan=_plan_reduce, reference=plain.reduce,
)  # fmt: skip
SCALE = Operator(
    "multi_scale_", (_TENSORS, _BY), options="float scale, float max_norm", numbers="scale max_norm", results="",
    tables=ONE, plan=lambda table: Steps(*_scale_steps(table, "by", "scale", "max_norm")), reference=plain.scale_,
    prepare=_prepare_one("multi_scale_"),
)  # fmt: skip
CLIP = Operator(
    "multi_clip_norm_", (_TENSORS,), options="int kind, float max_norm", numbers="max_norm", results="norm",
    outputs=lambda: (Memory((), torch.float32),), tables=ONE, plan=_plan_clip, reference=plain.clip_,
    prepare=_prepare_one("multi_clip_norm_"),
)  # fmt: skip
COPY = Operator(
    "multi_copy_", (ListOf("outputs", written=True), ListOf("inputs"), _BY), options="float scale", numbers="scale",
    results="", tables=TWO, plan=lambda table: Steps(*_scale_steps(table, "by", "scale", -1.0)),
    reference=plain.copy_, prepare=_prepare_copy,
)  # fmt: skip

_reduce, _scale, _clip, _copy = REDUCE.call, SCALE.call, CLIP.call, COPY.call


@public(recent=False)
def tensor_list(tensors: Tensors) -> TensorList:
    """Return a list of tensors with an address table that is built once and needs no look-up afterwards.

    Every ``multi_`` function takes it instead of a list. With a plain list, each call compares the addresses, dtypes
    and shapes of all tensors with those of the last call (about 0.1 µs per tensor); with this list it does not. Do not
    change the memory, shape, dtype (``t.data = ...``, ``set_``, ``resize_``) or ``requires_grad`` of its tensors
    afterwards: such changes are not detected.

    Args:
        tensors: bfloat16, float16 or float32, on one device, each contiguous or a permutation of a contiguous tensor.

    Returns:
        A tuple of the tensors, which it keeps alive.
    """
    result = TensorList(_listed(tensors))
    check_one(result)
    return result


@public(recent=False)
def multi_norm(
    tensors: Tensors, ord: float = 2.0, *, per_tensor: bool = False, group: Any = None, root: bool = True,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the norm of all elements of all tensors together: l2, l1 or the largest magnitude.

    Elements are squared and added in fp64, so the result is exact to fp32 rounding for any magnitudes and sizes.
    Deterministic. NaN propagates. Not differentiable.

    Args:
        tensors: A list of bfloat16, float16 and float32 tensors, also mixed, on one device; any shapes, also empty;
            each contiguous or a permutation of a contiguous tensor. Or a ``tensor_list``. Or arrays with ``__dlpack__``
            (results are tensors).
        ord: Order of the norm: 2, 1 or ``math.inf``.
        per_tensor: Also return the norm of each tensor.
        group: A process group over which tensors are sharded (``torch.distributed.group.WORLD`` for all): the result is
            the norm over all its members, with one all-reduce of fp64 sums. With per_tensor, every member must have the
            same number of tensors; tensors at the same index are shards of one tensor.
        root: If False, return the sum of squares for ord 2, without the square root.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        0-d fp32 (without a group, on the CPU for an empty list), or a pair of that and fp32 ``[len(tensors)]``.
    """
    tensors = _listed(tensors)
    kind = _kind_of(ord)
    if group is None and root:
        norms = _reduce(tensors, kind, per_tensor, False)
    else:
        sums = _reduce(tensors, kind, per_tensor, True)
        sums = sums if group is None else _over_group(sums, kind, group)
        norms = _finished(sums, kind) if root else sums.float()
    return (norms[0], norms[1:]) if per_tensor else norms.reshape(())


@public(recent=False)
def multi_count_zeros(
    tensors: Tensors, *, per_tensor: bool = False, group: Any = None,
    out: Tensor | tuple[Tensor | None, ...] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:  # fmt: skip
    """Return the number of zeros in all tensors together (of either sign; NaN and subnormals do not count).

    Args:
        tensors: As for ``multi_norm``.
        per_tensor: Also return the number for each tensor.
        group: As for ``multi_norm``: the numbers of all members of a process group are added.
        out: Tensors for the results in order, of their shapes, dtypes and strides (None: allocated). Not with
            gradients.

    Returns:
        0-d int64 (on the CPU for an empty list), or a pair of that and int64 ``[len(tensors)]``.
    """
    out = _reduce(_listed(tensors), ZEROS, per_tensor, False)
    if group is not None:
        out = _where_group_is(out, group)
        torch.distributed.all_reduce(out, group=group)
    return (out[0], out[1:]) if per_tensor else out.reshape(())


@public(recent=False)
def multi_scale_(tensors: Tensors, scale: float | Tensor) -> None:
    """Multiply every element of all tensors by one number, in place; fp32 arithmetic, one rounding.

    Not differentiable: tensors that require grad are refused unless under ``torch.no_grad()``.

    Args:
        tensors: As for ``multi_norm``; no two of them may overlap.
        scale: A number, or one fp32 element on the device of the tensors, read by the kernel without synchronisation.
            With a scale of 0, inf and NaN become NaN.

    Returns:
        Nothing.
    """
    by, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, float(check_number("scale", scale)))
    _scale(tensors, by, number, -1.0)


@public(recent=False)
def multi_copy_(outputs: Tensors, inputs: Tensors, scale: float | Tensor = 1.0) -> None:
    """Write ``inputs[i] * scale``, cast to the dtype of ``outputs[i]``, into ``outputs[i]``, for all tensors of a list.

    fp32 arithmetic and one rounding to nearest even; a plain copy or cast with the default scale. Not differentiable:
    tensors that require grad, inputs too, are refused unless under ``torch.no_grad()``.

    Args:
        outputs: As for ``multi_norm``; overwritten. No two of them may overlap.
        inputs: The same number of tensors, with the same shapes and the same order of dimensions in memory, each in any
            of the three dtypes. They may be the outputs themselves, but must not overlap other outputs.
        scale: As for ``multi_scale_``.

    Returns:
        Nothing.
    """
    by, number = (scale, 1.0) if isinstance(scale, Tensor) else (None, float(check_number("scale", scale)))
    _copy(outputs, inputs, by, number)


@public(recent=False)
def multi_clip_norm_(tensors: Tensors, max_norm: float, ord: float = 2.0, *, group: Any = None) -> Tensor:
    """Scale all tensors in place so that their total norm is at most `max_norm`, without synchronisation.

    They are multiplied by ``max_norm / (norm + 1e-6)`` if that is below 1, as in ``torch.nn.utils.clip_grad_norm_``;
    otherwise they are read once and not written. A norm that is not finite makes them 0 or NaN, as in torch. Not
    differentiable: tensors that require grad are refused unless under ``torch.no_grad()``.

    Args:
        tensors: As for ``multi_norm``; no two of them may overlap.
        max_norm: The largest allowed norm, at least 0.
        ord: Order of the norm: 2, 1 or ``math.inf``.
        group: As for ``multi_norm``: the norm is that over all members of a process group; each scales its own tensors.

    Returns:
        The norm before clipping, 0-d fp32 on the device of the tensors.
    """
    if group is None:
        return _clip(tensors, _kind_of(ord), _largest(max_norm))
    tensors = _overwritten("multi_clip_norm_", _listed(tensors))
    norm = multi_norm(tensors, ord, group=group)
    scale_to_norm_(tensors, norm, max_norm)
    return norm


def scale_to_norm_(tensors: Sequence[Tensor], norm: Tensor, max_norm: float) -> None:
    """Scale tensors whose total norm, over all processes, is `norm`, to at most `max_norm`."""
    _scale(tensors, norm, 1.0, _largest(max_norm))


def norm_over_groups(lists: Sequence[tuple[Sequence[Any], Sequence[Tensor]]], ord: float) -> Tensor:
    """Return the norm of several lists together, each sharded over process groups of its own: 0-d fp32."""
    kind = _kind_of(ord)
    parts = []
    for groups, tensors in lists:
        sums = _reduce(tensors, kind, False, True)
        for group in groups:
            sums = _over_group(sums, kind, group)
        parts.append(sums)
    return _finished(torch.stack(parts).amax(0) if kind == LARGEST else torch.stack(parts).sum(0), kind).reshape(())


def _largest(max_norm: float) -> float:
    max_norm = float(check_number("max_norm", max_norm))
    if not max_norm >= 0:
        raise ArgumentError(f"max_norm is {max_norm}; expected a number of at least 0")
    return max_norm


def _listed(tensors: Tensors) -> Sequence[Tensor]:
    if type(tensors) is TensorList:
        return tensors
    if isinstance(tensors, Tensor):
        raise ArgumentError("tensors is a torch.Tensor; expected a list of tensors")
    if type(tensors) not in (list, tuple):
        if not isinstance(tensors, Iterable):
            raise ArgumentError(f"tensors is a {type(tensors).__name__}; expected a list of tensors")
        tensors = list(tensors)
    if tensors and not isinstance(tensors[0], Tensor):
        tensors = [interop.to_torch(t) if hasattr(t, "__dlpack__") else t for t in tensors]
    return tensors


def _kind_of(ord: float) -> int:
    kind = _KINDS.get(check_number("ord", ord))
    if kind is None:
        raise ArgumentError(f"ord is {ord!r}; expected 1, 2 or math.inf")
    return kind


def _over_group(sums: Tensor, kind: int, group: Any) -> Tensor:
    sums = _where_group_is(sums, group)
    if kind == LARGEST:
        # A reduction by maximum may drop a NaN, so whether there is one travels with the number.
        both = torch.stack([sums.nan_to_num(0.0, math.inf), sums.isnan().double()])
        torch.distributed.all_reduce(both, torch.distributed.ReduceOp.MAX, group=group)
        return torch.where(both[1] > 0, math.nan, both[0])
    torch.distributed.all_reduce(sums, group=group)
    return sums


def _finished(sums: Tensor, kind: int) -> Tensor:
    return (sums.sqrt() if kind == SQUARES else sums).float()


def _where_group_is(out: Tensor, group: Any) -> Tensor:
    """Return the result of an empty list, which is on the CPU, where NCCL can reach it."""
    return out.cuda() if not out.is_cuda and "nccl" in torch.distributed.get_backend(group) else out


OP = Op(
    "multi_tensor",
    public=(
        "tensor_list", "multi_norm", "multi_count_zeros", "multi_scale_", "multi_copy_", "multi_clip_norm_",
        "multi_clip_",
    ),
    kernels=(_REDUCE, _FINISH, _SCALE, *multi_adamw.KERNELS, *multi_moments.KERNELS, *multi_muon.KERNELS),
    torch_ops=(
        REDUCE, SCALE, CLIP, COPY, multi_adamw.STEP, multi_adamw_codes.STEP, multi_lion.STEP, multi_muon.MOMENTUM,
        multi_muon.APPLY,
    ),
)  # fmt: skip
