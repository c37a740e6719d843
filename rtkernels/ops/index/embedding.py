"""Embedding look-up and its gradient: dense, or added to an existing one, for all of a vocabulary or a range of it."""

from __future__ import annotations

import torch
from torch import Tensor, is_grad_enabled

from rtkernels import interop
from rtkernels.errors import ArgumentError
from rtkernels.ops.index import embedding_order as order
from rtkernels.ops.index.embedding_order import ordered
from rtkernels.ops.index.embedding_plan import (
    FWD_PLANS,
    KERNELS,
    SORT_PLANS,
    SUM_PLANS,
    check_bwd,
    check_fwd,
    check_main_grad,
)
from rtkernels.runtime.layout import address, metadata, rowed
from rtkernels.runtime.operator.arguments import an_integer
from rtkernels.runtime.operator.autograd import detached, needs_grad, once_differentiable, refuse_gradients
from rtkernels.runtime.operator.operator import MutatingOp, TorchOp
from rtkernels.runtime.operator.registry import Op

NO_PADDING = -1  # as an operator argument; ids below 0 have no row anyway

# ---- launchers ------------------------------------------------------------------------------------------------------


def _launch_fwd(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    source = weight.data_ptr()
    plan = FWD_PLANS[metadata(ids), metadata(weight), source & 15]
    if plan is None:
        return _launch_fwd(rowed(weight), ids.contiguous(), start)
    launch, before, after, allocate, layout = plan
    y = allocate(*layout)
    if launch is not None:
        launch(ids.data_ptr(), source, y.data_ptr(), *before, start, *after)
    return y


def _launch_bwd(dy: Tensor, ids: Tensor, rows: int, start: int, padding: int) -> Tensor:
    check_bwd(metadata(dy), metadata(ids), rows)
    if dy.numel() == 0 or rows == 0:
        return torch.zeros((rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    grad = torch.empty((rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    sum_rows(grad, dy, ids, start, padding, False)
    return grad


def _launch_add(main_grad: Tensor, dy: Tensor, ids: Tensor, start: int, padding: int) -> None:
    _check_add(main_grad, dy, ids)
    if dy.numel() and main_grad.numel():
        sum_rows(main_grad, dy, ids, start, padding, True)
    _count_version(main_grad)


def sum_rows(
    grad: Tensor, dy: Tensor, ids: Tensor, start: int, padding: int, accumulate: bool, weights: Tensor | None = None
) -> None:
    """Write (or add) the sums of dy's rows to grad: kernels sort the tokens and write zeros, one adds up.

    `weights`, dense fp32 with one number for each token, multiplies them. Unless it accumulates, grad must be dense.
    """
    dy, ids = rowed(dy), ids.contiguous()
    dy_address, grad_address = dy.data_ptr(), grad.data_ptr()
    plan = SUM_PLANS[metadata(dy), metadata(grad), (dy_address | grad_address) & 15, accumulate]
    if plan is None:
        return sum_rows(grad, dy.float(), ids, start, padding, accumulate, weights)
    launch, sizes, (new_list, list_layout), (new_counters, counters_layout), (new_pieces, pieces_layout) = plan
    tokens, rows = sizes[0], grad.shape[0]
    fill = 0 if accumulate else grad.numel() * grad.element_size()
    sort = SORT_PLANS[tokens, rows, fill, dy.get_device()]
    counters, pieces = new_counters(*counters_layout), new_pieces(*pieces_layout)
    if sort is None:
        entries = ordered(ids, counters, None if accumulate else grad, rows, start, padding)
    else:
        launch_sort, key_bits, bin_bits = sort
        entries = new_list(*list_layout)
        launch_sort(
            ids.data_ptr(),
            entries.data_ptr(),
            counters.data_ptr(),
            0 if accumulate else grad_address,
            tokens,
            rows,
            start,
            padding,
            int(ids.dtype == torch.int64),
            key_bits,
            bin_bits,
            counters.numel(),
            fill,
        )
    launch(
        dy_address,
        grad_address,
        entries.data_ptr(),
        pieces.data_ptr(),
        counters.data_ptr(),
        address(weights),
        *sizes,
        int(accumulate),
    )


def _count_version(t: Tensor) -> None:
    """Tell autograd that a tensor was overwritten."""
    if not t.is_inference():
        torch.autograd.graph.increment_version(t)


def _check_add(main_grad: Tensor, dy: Tensor, ids: Tensor) -> None:
    check_bwd(metadata(dy), metadata(ids), main_grad.shape[0] if main_grad.dim() else 0)
    check_main_grad(metadata(main_grad), dy.shape[-1], dy.get_device(), "dy")


# ---- the same in plain torch ----------------------------------------------------------------------------------------


def _local(ids: Tensor, rows: int, start: int, padding: int = NO_PADDING) -> tuple[Tensor, Tensor]:
    """Return the row of every token, and which ones have a row."""
    wide = ids.long()
    local = wide - start
    return local, (local >= 0) & (local < rows) & (wide != padding)


def _reference_fwd(weight: Tensor, ids: Tensor, start: int) -> Tensor:
    check_fwd(metadata(ids), metadata(weight))
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
    return touched, sums.index_add_(0, place, dy.reshape(-1, dy.shape[-1])[valid].float())


def _reference_bwd(dy: Tensor, ids: Tensor, rows: int, start: int, padding: int) -> Tensor:
    check_bwd(metadata(dy), metadata(ids), rows)
    grad = torch.zeros((rows, dy.shape[-1]), dtype=dy.dtype, device=dy.device)
    if dy.numel() and rows:
        touched, sums = _sums(dy, ids, rows, start, padding)
        grad[touched] = sums.to(dy.dtype)
    return grad


def _reference_add(main_grad: Tensor, dy: Tensor, ids: Tensor, start: int, padding: int) -> None:
    _check_add(main_grad, dy, ids)
    if dy.numel() and main_grad.numel():
        touched, sums = _sums(dy, ids, main_grad.shape[0], start, padding)
        main_grad[touched] = (main_grad[touched].float() + sums).to(main_grad.dtype)


def _fake_fwd(weight, ids, start):
    return weight.new_empty((*ids.shape, weight.shape[-1]))


def _fake_bwd(dy, ids, rows, start, padding):
    return dy.new_empty((rows, dy.shape[-1]))


def _fake_add(main_grad, dy, ids, start, padding):
    return None


FORWARD = TorchOp(
    "embedding_fwd(Tensor weight, Tensor ids, int start) -> Tensor",
    launch=_launch_fwd,
    reference=_reference_fwd,
    fake=_fake_fwd,
)
BACKWARD = TorchOp(
    "embedding_bwd(Tensor dy, Tensor ids, SymInt rows, int start, int padding) -> Tensor",
    launch=_launch_bwd,
    reference=_reference_bwd,
    fake=_fake_bwd,
)
ADD = MutatingOp(
    "embedding_bwd_into(Tensor(a!) main_grad, Tensor dy, Tensor ids, int start, int padding) -> ()",
    launch=_launch_add,
    reference=_reference_add,
    fake=_fake_add,
)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, start, padding, main_grad):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(ids)
        ctx.rows, ctx.start, ctx.padding = weight.shape[0], start, padding
        ctx.main_grad = main_grad  # not saved: later micro-batches may have changed it, which is the point
        return FORWARD(weight, ids, start)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy):
        if dy is None:
            return None, None, None, None, None
        (ids,) = ctx.saved_tensors
        if ctx.main_grad is not None:
            ADD(ctx.main_grad, dy, ids, ctx.start, ctx.padding)
            return None, None, None, None, None
        return BACKWARD(dy, ids, ctx.rows, ctx.start, ctx.padding), None, None, None, None


def _padding(padding_idx: int | None, rows: int, vocab_start: int) -> int:
    if an_integer("vocab_start", vocab_start) < 0:
        raise ArgumentError(f"vocab_start is {vocab_start}; expected 0 or more")
    if padding_idx is None:
        return NO_PADDING
    if an_integer("padding_idx", padding_idx) >= 0:
        return padding_idx
    if vocab_start or padding_idx < -rows:
        raise ArgumentError(
            f"padding_idx is {padding_idx}; expected 0 or more, or -{rows} to -1 for a whole vocabulary of {rows}"
        )
    return padding_idx + rows


def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    vocab_start: int = 0,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Return ``weight[ids - vocab_start]``: one row of the table for each token.

    Ids outside of the table (negative ones too) give zeros and get no gradient, without an error: with a vocabulary
    split over processes the sum over all of them is the whole look-up. The gradient is deterministic: a row's tokens
    are added in fp32 in a fixed order and rounded once, without atomics, however many they are. Differentiable once in
    weight.

    Args:
        ids: int32 or int64, any shape. May be any object with ``__dlpack__``; the result is then of its kind.
        weight: [rows, columns], bfloat16, float16 or float32; a copy is made unless its rows are unit-stride.
        padding_idx: This id gets no gradient; its row is looked up like any other, as in torch. Counts as `ids` do;
            negative from the end of a whole vocabulary.
        vocab_start: The id of weight's first row: the table holds ids vocab_start to vocab_start + rows - 1.
        main_grad: [rows, columns], bfloat16, float16 or float32, unit-stride rows. Backward then *adds* to it in place
            (in fp32, one rounding) and gives weight no gradient of its own: ``weight.grad`` stays as it is.

    Returns:
        Dense ``[*ids.shape, columns]`` of weight's dtype.
    """
    if not isinstance(ids, Tensor):
        return interop.call(
            embedding, ids, weight, padding_idx=padding_idx, vocab_start=vocab_start, main_grad=main_grad
        )
    if not isinstance(weight, Tensor):
        raise ArgumentError(f"weight is a {type(weight).__name__}; expected a torch.Tensor, as ids is one")
    padding = _padding(padding_idx, weight.shape[0] if weight.dim() else 0, vocab_start)
    if main_grad is not None:
        if main_grad.shape != weight.shape:
            raise ArgumentError(
                f"main_grad has shape {tuple(main_grad.shape)}; expected {tuple(weight.shape)}, that of weight"
            )
        check_main_grad(metadata(main_grad), weight.shape[-1], weight.get_device(), "weight")
    if is_grad_enabled() and needs_grad(weight):
        return _Embedding.apply(weight, ids, vocab_start, padding, main_grad)
    return FORWARD(weight, ids, vocab_start)


def embedding_grad_(
    main_grad: Tensor, ids: Tensor, dy: Tensor, *, padding_idx: int | None = None, vocab_start: int = 0
) -> Tensor:
    """Add the gradient of an embedding to an existing one, in place: ``main_grad[id] += dy`` for every token.

    Deterministic, in fp32 with one rounding per row. Rows without tokens are neither read nor written. Not
    differentiable: a main_grad that requires grad is refused unless under ``torch.no_grad()``.

    Args:
        main_grad: [rows, columns], bfloat16, float16 or float32, unit-stride rows.
        ids: int32 or int64, any shape.
        dy: [*ids.shape, columns], bfloat16, float16 or float32; any strides (a copy is made unless rows are unit-stride
            and evenly spaced).
        padding_idx: Tokens with this id are left out.
        vocab_start: The id of main_grad's first row; ids outside of it are left out.

    Returns:
        main_grad.
    """
    if not isinstance(main_grad, Tensor):
        return interop.call(embedding_grad_, main_grad, ids, dy, padding_idx=padding_idx, vocab_start=vocab_start)
    padding = _padding(padding_idx, main_grad.shape[0] if main_grad.dim() else 0, vocab_start)
    refuse_gradients("embedding_grad_", (main_grad,))
    ADD(main_grad, *detached(dy), ids, vocab_start, padding)
    return main_grad


OP = Op(
    "embedding",
    public=("embedding", "embedding_grad_"),
    kernels=(*KERNELS, *order.KERNELS),
    torch_ops=(FORWARD, BACKWARD, ADD),
)
