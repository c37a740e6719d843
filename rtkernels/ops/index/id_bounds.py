"""Bounds of equal ids in a sorted list."""

from __future__ import annotations

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.runtime.call.public import public
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.declared import Dense, Meta, Operator
from rtkernels.runtime.operator.plan import Memory, Step, Steps

_THREADS = 256
_SLICE = 4096  # elements of a block, as in id_bounds.cu
_IDS = {torch.int32: "i32", torch.int64: "i64"}
_COUNT = Kernel(
    "index/id_bounds.cu", "id_bounds_count", template="I", args="ids:ptr counts:ptr n:i64",
    variants=[("i32",), ("i64",)], max_registers=64,
)  # fmt: skip
_PLACE = Kernel(
    "index/id_bounds.cu", "id_bounds_place", template="I", args="ids:ptr counts:ptr bounds:ptr n:i64",
    variants=[("i32",), ("i64",)], max_registers=64,
)  # fmt: skip
KERNELS = (_COUNT, _PLACE)


def _check(ids: Meta) -> None:
    if ids.dtype not in _IDS:
        raise ArgumentError(f"ids is {str(ids.dtype).removeprefix('torch.')}; expected a tensor of int32 or int64")
    if ids.numel() >= 2**31 - 1:
        raise ArgumentError(f"ids has {ids.numel()} elements; expected fewer than 2**31 - 1")


def _plan(ids: Meta, device: int) -> Steps:
    n, variant = ids.numel(), (_IDS[ids.dtype],)
    slices = n // _SLICE + 1
    place = _PLACE.bind(variant, device, slices, _THREADS)
    if slices == 1:
        return Steps(Step(place, "ids", 0, "bounds", n))
    count = Step(_COUNT.bind(variant, device, slices, _THREADS), "ids", "counts", n)
    scratch = {"counts": Memory((slices,), torch.int32)}
    return Steps(count, Step(place, "ids", "counts", "bounds", n), scratch=scratch)


def _reference(ids: Tensor) -> Tensor:
    flat = ids.reshape(-1)
    count = flat.numel()
    bounds = torch.full((count + 1,), count, dtype=torch.int32, device=ids.device)
    if count == 0:
        return bounds
    steps = torch.zeros(count, dtype=torch.bool, device=ids.device)
    torch.ne(flat[1:], flat[:-1], out=steps[1:])
    numbers = torch.arange(count, dtype=torch.int32, device=ids.device)
    return bounds.scatter_reduce_(0, steps.cumsum(0), numbers, "amin")  # the first number of each stretch


BOUNDS = Operator(
    "id_bounds", (Dense("ids", None),), results="bounds", plan=_plan, reference=_reference, check=_check,
    outputs=lambda ids: (Memory((ids.numel() + 1,), torch.int32),),
)  # fmt: skip


@public
def id_bounds(ids: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Return where each run of equal ids begins in a sorted list, followed by the length of the list.

    ``bounds[i] .. bounds[i + 1]`` is the i-th run. Entries after the last run are ``len(ids)``, so the number of
    smaller entries is the number of distinct ids. The call does not synchronise.

    Args:
        ids: int32 or int64, sorted; flattened.
        out: Tensor to write the result to, with its shape, dtype and strides.

    Returns:
        int32 ``[ids.numel() + 1]``.
    """
    if not isinstance(ids, Tensor):
        raise ArgumentError(f"ids is a {type(ids).__name__}; expected a tensor of int32 or int64")
    return BOUNDS.call(ids)
