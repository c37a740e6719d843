"""Embedding look-up and its gradient: dense, or added to an existing one, for all of a vocabulary or a range of it."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, is_grad_enabled

from rtkernels.errors import ArgumentError
from rtkernels.ops.index.embedding_parallel import looked_up_over
from rtkernels.ops.index.embedding_plan import (
    KERNELS,
    check_add,
    check_bwd,
    check_fwd,
    check_main_grad,
    plan_add,
    plan_bwd,
    plan_fwd,
)
from rtkernels.runtime.call.public import public
from rtkernels.runtime.layout import as_rows, metadata
from rtkernels.runtime.operator.arguments import check_integer
from rtkernels.runtime.operator.autograd import applied, detached, needs_grad, once_differentiable
from rtkernels.runtime.operator.declared import Dense, InPlace, Operator, Rows
from rtkernels.runtime.operator.main_grad import Start, start_of
from rtkernels.runtime.operator.plan import Memory
from rtkernels.runtime.operator.registry import Op
from rtkernels.runtime.operator.sharding import Way, shard

NO_PADDING = -1  # as an operator argument; ids below 0 have no row anyway

# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _local(ids: Tensor, rows: int, start: int, padding: int = NO_PADDING) -> tuple[Tensor, Tensor]:
    """Return the row of every token, and which ones have a row."""
    ids = ids.long()
    local = ids - start
    return local, (local >= 0) & (local < rows) & (ids != padding)


def _reference_fwd(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    rows, cols = weight.shape
    if rows == 0 or ids.numel() == 0:
        return torch.zeros((*ids.shape, cols), dtype=weight.dtype, device=weight.device)
    local, valid = _local(ids, rows, start)
    return torch.where(valid.unsqueeze(-1), weight[local.clamp(0, rows - 1)], 0.0).contiguous()


def _sums(dy: Tensor, ids: Tensor, rows: int, start: int, padding: int) -> tuple[Tensor, Tensor]:
    """Return the rows that have tokens, and the fp32 sum of each."""
    local, valid = _local(ids.reshape(-1), rows, start, padding)
    touched, place = local[valid].unique(return_inverse=True)
    sums = torch.zeros((len(touched), dy.shape[-1]), dtype=torch.float32, device=dy.device)
    return touched, sums.index_add_(0, place, as_rows(dy)[valid].float())


def _reference_bwd(dy: Tensor, ids: Tensor, rows: int, start: int, padding: int) -> Tensor:
    grad = torch.zeros((rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    if dy.numel() and rows:
        touched, sums = _sums(dy, ids, rows, start, padding)
        grad[touched] = sums.to(dy.dtype)
    return grad


def _reference_add(main_grad: Tensor, dy: Tensor, ids: Tensor, start: int, padding: int) -> None:
    if dy.numel() and main_grad.numel():
        touched, sums = _sums(dy, ids, main_grad.shape[0], start, padding)
        main_grad[touched] = (main_grad[touched].float() + sums).to(main_grad.dtype)


FORWARD = Operator(
    "embedding_fwd", (Rows("weight"), Dense("ids", None)), options="int start", results="y",
    outputs=lambda weight, ids, start: (Memory((*ids.shape, weight.shape[-1]), weight.dtype),),
    plan=plan_fwd, reference=_reference_fwd, check=check_fwd,
)  # fmt: skip
BACKWARD = Operator(
    "embedding_bwd", (Rows("dy"), Dense("ids", None)), options="SymInt rows, int start, int padding", results="grad",
    outputs=lambda dy, rows: (Memory((rows, dy.shape[-1]), dy.dtype),),
    plan=plan_bwd, reference=_reference_bwd, check=check_bwd,
)  # fmt: skip
ADD = Operator(
    "embedding_bwd_into", (InPlace("main_grad", None), Rows("dy"), Dense("ids", None)),
    options="int start, int padding", results="", plan=plan_add, reference=_reference_add, check=check_add,
)  # fmt: skip


def _shards(args: dict[str, Any]) -> Iterator[Way]:
    """Tokens are independent of one another, and so are columns. (The first id of a range of rows is an argument.)"""
    from torch.distributed.tensor import Partial, Shard

    last = len(args["ids"].shape)
    for dim in range(last):
        yield [Partial() if "dy" in args else Shard(dim)], {"dy": Shard(dim), "ids": Shard(dim)}
    yield [Shard(1 if "dy" in args else last)], {"weight": Shard(1), "dy": Shard(last)}


shard(FORWARD, _shards)
shard(BACKWARD, _shards)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, start, padding, main_grad):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.start, ctx.padding = weight.shape[0], start, padding
        ctx.main_grad = main_grad  # not saved: later micro-batches may have changed it, which is the point
        return FORWARD.call(weight, ids, start)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        if isinstance(ctx.main_grad, Start):
            ADD(ctx.main_grad.total, dy, ids, ctx.start, ctx.padding)
            return ctx.main_grad.added(), None, None, None, None
        if ctx.main_grad is not None:
            ADD(ctx.main_grad, dy, ids, ctx.start, ctx.padding)
            return None, None, None, None, None
        return BACKWARD.call(dy, ids, ctx.rows, ctx.start, ctx.padding), None, None, None, None


_differentiable = applied(_Embedding)


def _padding(padding_idx: int | None, rows: int, vocab_start: int) -> int:
    if check_integer("vocab_start", vocab_start) < 0:
        raise ArgumentError(f"vocab_start is {vocab_start}; expected 0 or more")
    if padding_idx is None:
        return NO_PADDING
    if check_integer("padding_idx", padding_idx) >= 0:
        return padding_idx
    if vocab_start or padding_idx < -rows:
        raise ArgumentError(
            f"padding_idx is {padding_idx}; expected 0 or more, or -{rows} to -1 for a whole vocabulary of {rows}"
        )
    return padding_idx + rows


def looked_up(weight: Tensor, ids: Tensor, padding_idx: int | None, start: Start) -> Tensor:
    """Return ``embedding(ids, weight)`` whose gradient is added to `start`."""
    padding = NO_PADDING if padding_idx is None else padding_idx
    return _differentiable(weight, ids, 0, padding, start)


@public(tensors="weight")
def embedding(
    ids: Tensor, weight: Tensor, *, padding_idx: int | None = None, vocab_start: int = 0,
    main_grad: Tensor | None = None, group: Any = None, same_ids: bool = True,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Return ``weight[ids - vocab_start]``: one row of the table for each token.

    Ids outside the table, including negative ones, give zeros and no gradient, and are not an error: if the vocabulary
    is split over processes, the sum over all processes is the whole look-up. The gradient is deterministic: the tokens
    of a row are summed in fp32 in a fixed order without atomics, and rounded once. Differentiable once in weight.

    Args:
        ids: int32 or int64, any shape. Any object with ``__dlpack__`` is accepted; results are then of the same kind.
        weight: [rows, columns], bfloat16, float16 or float32; copied unless rows are unit-stride.
        padding_idx: This id gets no gradient; its row is looked up like any other, as in torch. Numbered like `ids`;
            negative numbers count from the end of a whole vocabulary.
        vocab_start: The id of weight's first row: the table has ids vocab_start to vocab_start + rows - 1.
        main_grad: [rows, columns], bfloat16, float16 or float32, unit-stride rows. The backward pass then *adds* the
            gradient to it in place (in fp32, one rounding), and ``weight.grad`` does not change.
        group: A process group over which the vocabulary is split: every member has the rows from its vocab_start on and
            gets the whole look-up of its ids, with one ``torch.distributed`` collective.
        same_ids: True if all members of the group have the same ids (tensor parallelism). False if each has its own
            ids, the same number (sequence parallelism); ids are then gathered, looked up, and the sums scattered.
        out: Tensor to write the result to, with its shape, dtype and strides. Not with gradients.

    Returns:
        A contiguous tensor ``[*ids.shape, columns]`` in weight's dtype.
    """
    if group is not None:
        local = functools.partial(
            embedding, weight=weight, padding_idx=padding_idx, vocab_start=vocab_start, main_grad=main_grad
        )
        return looked_up_over(group, local, ids, same_ids)
    padding = _padding(padding_idx, weight.shape[0] if weight.dim() else 0, vocab_start)
    if main_grad is not None:
        if main_grad.shape != weight.shape:
            raise ArgumentError(
                f"main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}, that of weight"
            )
        check_main_grad(metadata(main_grad), weight.shape[-1], weight.get_device(), "weight")
    if is_grad_enabled() and needs_grad(weight):
        if main_grad is None:
            main_grad = start_of(weight, "an embedding")
        return _differentiable(weight, ids, vocab_start, padding, main_grad)
    return FORWARD.call(weight, ids, vocab_start)


@public(no_gradients="main_grad")
def embedding_grad_(
    main_grad: Tensor, ids: Tensor, dy: Tensor, *, padding_idx: int | None = None, vocab_start: int = 0
) -> Tensor:
    """Add the gradient of an embedding to an existing one, in place: ``main_grad[id] += dy`` for every token.

    Deterministic; computed in fp32 with one rounding per row. Rows without tokens are neither read nor written. Not
    differentiable: a main_grad that requires grad is refused unless under ``torch.no_grad()``.

    Args:
        main_grad: [rows, columns], bfloat16, float16 or float32, unit-stride rows.
        ids: int32 or int64, any shape.
        dy: [*ids.shape, columns], bfloat16, float16 or float32; any strides (copied unless rows are unit-stride and
            evenly spaced).
        padding_idx: Tokens with this id are skipped.
        vocab_start: The id of main_grad's first row; other ids are skipped.

    Returns:
        main_grad.
    """
    padding = _padding(padding_idx, main_grad.shape[0] if main_grad.dim() else 0, vocab_start)
    ADD(main_grad, *detached(dy), ids, vocab_start, padding)
    return main_grad


OP = Op("embedding", public=("embedding", "embedding_grad_"), kernels=KERNELS, torch_ops=(FORWARD, BACKWARD, ADD))
