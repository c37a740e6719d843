"""Linear layer and cross entropy in chunks of rows or slabs of the vocabulary: with kernels and in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm.weight_gradient import add_product_
from rtkernels.ops.loss import cross_entropy_operators as rows_ops
from rtkernels.ops.loss import cross_entropy_reduce as reduction_ops
from rtkernels.ops.loss import linear_cross_entropy_slabs as slabs
from rtkernels.ops.loss import reference
from rtkernels.ops.loss.cross_entropy_plan import MEAN, NONE, check_options
from rtkernels.ops.loss.label_report import report
from rtkernels.ops.shared.block_sum import add_rows_
from rtkernels.runtime.checks import check_same
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.declared import Argument, Meta, Operator
from rtkernels.runtime.operator.main_grad import Start
from rtkernels.runtime.operator.plan import Memory, Steps

# ---- chunks of rows: torch's GEMMs around the kernels of cross_entropy ----------------------------------------------


_SMALL = 256 << 20  # bytes of logits that nobody minds: below, more chunks would only cost time
_TILE_ROWS = 128
_ROUNDINGS = 4  # at most, of a 16-bit sum of the weight's gradient that nobody asked to round once


def default_chunk_rows(rows: int, hidden: int, vocabulary: int, itemsize: int = 2) -> int:
    """Return the rows of a chunk whose logits are of about the size of the weight, or small; all chunks about alike.

    By then the products take 18 times as long as adding a chunk's gradient of the weight to fp32 sums. Without that
    gradient, `hidden` is 0: small chunks cost nothing.
    """
    return _alike(rows, max(hidden, _SMALL // (vocabulary * itemsize), 1))


def rounding_chunk_rows(rows: int, hidden: int, vocabulary: int, itemsize: int = 2) -> int:
    """Return the rows of at most four chunks, whose logits take half of the weight's memory or more.

    Their gradients of the weight are added in its own dtype. 0 if there are so many rows that sums in fp32, with chunks
    of :func:`default_chunk_rows`, need no more memory.
    """
    limit = max(hidden // 2, -(-rows // _ROUNDINGS), _SMALL // (vocabulary * itemsize), 1)
    return 0 if limit > 2 * hidden and rows > limit else _alike(rows, limit)


def _alike(rows: int, limit: int) -> int:
    """Return the rows of chunks that are about alike, in whole tiles, and little larger than `limit`."""
    if rows <= limit:
        return max(1, rows)
    alike = -(-rows // -(-rows // limit))
    return min(rows, -(-alike // _TILE_ROWS) * _TILE_ROWS)


def scaled(grads: tuple[Tensor, ...], needs: tuple[bool, ...], dloss: Tensor) -> tuple[Tensor, ...]:
    """Multiply the gradients that a forward pass made, where they are needed, by that of the loss; return them."""
    for grad, needed in zip(grads, needs, strict=True):
        if needed:
            rows_ops.SCALE(grad if grad.dim() > 1 else grad.unsqueeze(0), dloss)
    return grads


def check_inputs(hidden: Meta, weight: Meta, labels: Meta, bias: Meta | None, chunk_rows: int) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    if weight.dim() != 2 or weight.shape[0] == 0:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; expected [vocabulary, hidden size]")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"hidden has shape {tuple(hidden.shape)}; expected [..., {weight.shape[1]}], the hidden size of weight"
        )
    check_same("weight", weight.dtype, hidden.dtype, "dtype", of="hidden")
    if bias is not None:
        check_same("bias", bias.dtype, hidden.dtype, "dtype", of="hidden")
        check_same("bias", tuple(bias.shape), (weight.shape[0],), "shape", of="weight's rows")
    if chunk_rows < 0:
        raise ArgumentError(f"chunk_rows is {chunk_rows}; expected at least 1, or 0 for the rule")
    logits = hidden._replace(shape=torch.Size((*hidden.shape[:-1], weight.shape[0])), stride=())
    rows_ops.check(logits, labels, "hidden @ weight.T")


def _check_fwd(hidden, weight, labels, bias, label_smoothing, z_loss, softcap, reduction, chunk_rows) -> None:
    check_options(label_smoothing, z_loss, softcap, reduction)
    check_inputs(hidden, weight, labels, bias, chunk_rows)


def _check_bwd(dloss, hidden, weight, labels, bias, chunk_rows) -> None:
    check_inputs(hidden, weight, labels, bias, chunk_rows)
    check_same("dloss", dloss.shape, labels.shape, "shape", of="labels")


class WeightSums:
    """Sums of the gradients of weight and bias over the chunks."""

    def __init__(self, weight: Tensor, bias: Tensor | None, in_fp32: bool, need_weight: bool, need_bias: bool) -> None:
        self._target, self._bias_dtype = weight, None if bias is None else bias.dtype
        self._in_fp32 = in_fp32 and weight.dtype != torch.float32
        self.weight: Tensor | None = None
        if need_weight:
            dtype = torch.float32 if self._in_fp32 else weight.dtype
            self.weight = torch.empty(weight.shape, dtype=dtype, device=weight.device)
        self.bias: Tensor | None = None
        if need_bias:
            self.bias = torch.zeros(weight.shape[0], dtype=torch.float32, device=weight.device)
        self._first = True

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        if self.weight is not None:
            if self._in_fp32:
                slabs.add_product(self.weight, dlogits.t(), hidden, self._first)
            elif self._first:
                torch.mm(dlogits.t(), hidden, out=self.weight)
            else:
                self.weight.addmm_(dlogits.t(), hidden)
        if self.bias is not None:
            self.bias += dlogits.sum(0, dtype=torch.float32)
        self._first = False

    def results(self) -> tuple[Tensor, Tensor]:
        weight, bias = self.weight, self.bias
        if self._first:  # no rows
            weight = None if weight is None else weight.zero_()
        return (
            nothing(self._target) if weight is None else weight.to(self._target.dtype),
            nothing(self._target) if bias is None else bias.to(self._bias_dtype),
        )


class MainGrads(WeightSums):
    """Sums that start from the main_grad of weight or bias, if it has one: their accumulators do (level 3)."""

    def __init__(self, starts: Sequence[Start | None], *given: Any) -> None:
        self.starts = starts
        weight, bias, in_fp32, need_weight, need_bias = given
        of_weight, of_bias = (start is None for start in starts)
        super().__init__(weight, bias, in_fp32, need_weight and of_weight, need_bias and of_bias)

    def add(self, dlogits: Tensor, hidden: Tensor) -> None:
        super().add(dlogits, hidden)
        start, start_bias = self.starts
        if start is not None:
            add_product_(start.total, dlogits, hidden)
        if start_bias is not None:
            add_rows_(start_bias.total, dlogits)


def chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, chunk_rows: int
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield rows, their hidden states and their logits; the logits all lie in the same memory."""
    rows = hidden.shape[0]
    memory = torch.empty(min(chunk_rows, rows), weight.shape[0], dtype=hidden.dtype, device=hidden.device)
    for start in range(0, rows, chunk_rows):
        part = slice(start, min(start + chunk_rows, rows))
        states = hidden[part]
        logits = memory[: states.shape[0]]
        if bias is None:
            torch.mm(states, weight.t(), out=logits)
        else:
            torch.addmm(bias, states, weight.t(), out=logits)
        yield part, states, logits


class _Functions(NamedTuple):
    """What is done to the logits of a chunk and to the numbers of all rows: by kernels, or in plain torch."""

    whole: Callable[..., tuple[Tensor, ...]]
    rows: Callable[..., Tensor]
    gradient: Callable[..., Tensor]
    row_gradient: Callable[..., None]
    count: Callable[..., Tensor]
    reduce: Callable[..., tuple[Tensor, Tensor]]
    of_slabs: slabs.Functions


def _by_rule(chunk_rows: int, in_fp32: bool, rows: int, weight: Tensor, need_weight: bool) -> tuple[int, bool]:
    """Return how many rows make a chunk and whether weight gradients are added in fp32; as given, or by the rule."""
    if chunk_rows:
        return chunk_rows, in_fp32
    vocabulary, size = weight.shape
    itemsize = weight.element_size()
    if need_weight and not in_fp32 and not level() and (found := rounding_chunk_rows(rows, size, vocabulary, itemsize)):
        return found, False
    chunk_rows = default_chunk_rows(rows, size if need_weight else 0, vocabulary, itemsize)
    return chunk_rows, chunk_rows < rows


def _forward(
    functions: _Functions, hidden, weight, labels, bias, ignore_index, label_smoothing, z_loss, softcap, reduction,
    accuracy, lse, chunk_rows, fp32_weight_grad, need_hidden, need_weight, need_bias,
):  # fmt: skip
    """The operator ``linear_cross_entropy_fwd``."""
    needs, options = (need_hidden, need_weight, need_bias), (ignore_index, label_smoothing, z_loss, softcap)
    states, flat = hidden.reshape(labels.numel(), hidden.shape[-1]), labels.reshape(-1).contiguous()
    rows, shape = flat.numel(), labels.shape
    wants_gradient = any(needs)
    if need_weight and chunk_rows == 0 and slabs.suits(rows, weight, _SMALL, fp32_weight_grad):
        found = slabs.run(functions.of_slabs, states, weight, flat, bias, None, options, reduction, needs)
        result_shape = shape if reduction == NONE else ()
        return (
            found.loss.view(result_shape),
            found.accuracy.view(result_shape) if accuracy else nothing(found.loss),
            found.lse.view(shape) if lse else nothing(found.loss),
            found.dhidden.view(hidden.shape) if need_hidden else found.dhidden,
            found.dweight,
            found.dbias,
        )
    chunk_rows, in_fp32 = _by_rule(chunk_rows, fp32_weight_grad, rows, weight, need_weight)
    if not wants_gradient and 0 < rows <= chunk_rows and reduction != NONE:  # one chunk: its kernel adds up the rows
        ((_, _, logits),) = chunks(states, weight, bias, chunk_rows)
        loss, hits, stats, _ = functions.whole(logits, flat, *options, reduction, accuracy)
        total = stats.sum(0).view(shape) if lse else nothing(loss)
        return loss, hits if accuracy else nothing(loss), total, *(nothing(loss) for _ in needs)
    losses = torch.empty(rows, dtype=torch.float32, device=hidden.device)
    correct, totals = (torch.empty_like(losses) if wanted else None for wanted in (accuracy, lse))
    factor = functions.count(flat, ignore_index) if wants_gradient and reduction == MEAN else None
    dhidden = torch.empty(states.shape, dtype=hidden.dtype, device=hidden.device) if need_hidden else None
    sums = WeightSums(weight, bias, in_fp32, need_weight, need_bias)
    of_chunk = functions.gradient if wants_gradient else functions.rows
    for part, some, logits in chunks(states, weight, bias, chunk_rows):
        numbers = (losses[part], None if correct is None else correct[part])
        stats = of_chunk(logits, flat[part], *numbers, factor, options)
        if totals is not None:
            torch.sum(stats, 0, out=totals[part])
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[part])
        sums.add(logits, some)
    logits = None  # before the fp32 sums of the weight's gradient are rounded into new memory
    if reduction == NONE:
        loss, hits = losses.view(shape), nothing(losses) if correct is None else correct.view(shape)
    else:
        loss, hits = functions.reduce(losses, correct, flat, ignore_index, reduction)
    return (
        loss,
        hits,
        nothing(losses) if totals is None else totals.view(shape),
        nothing(losses) if dhidden is None else dhidden.view(hidden.shape),
        *sums.results(),
    )


def _backward(
    functions: _Functions, dloss, hidden, weight, labels, bias, ignore_index, label_smoothing, z_loss, softcap,
    chunk_rows, fp32_weight_grad, need_hidden, need_weight, need_bias, sums_of=WeightSums,
):  # fmt: skip
    """The operator ``linear_cross_entropy_bwd``: as `_forward`, for a gradient of each row's own."""
    needs, options = (need_hidden, need_weight, need_bias), (ignore_index, label_smoothing, z_loss, softcap)
    flat, g = labels.reshape(-1).contiguous(), dloss.reshape(-1).float()
    states = hidden.reshape(flat.numel(), hidden.shape[-1])
    if need_weight and chunk_rows == 0 and slabs.suits(flat.numel(), weight, _SMALL, fp32_weight_grad):
        found = slabs.run(functions.of_slabs, states, weight, flat, bias, g, options, NONE, needs)
        return found.dhidden.view(hidden.shape) if need_hidden else found.dhidden, found.dweight, found.dbias
    chunk_rows, in_fp32 = _by_rule(chunk_rows, fp32_weight_grad, flat.numel(), weight, need_weight)
    dhidden = torch.empty(states.shape, dtype=hidden.dtype, device=hidden.device) if need_hidden else None
    sums = sums_of(weight, bias, in_fp32, need_weight, need_bias)
    for part, some, logits in chunks(states, weight, bias, chunk_rows):
        functions.row_gradient(logits, flat[part], g[part], options)
        if dhidden is not None:
            torch.mm(logits, weight, out=dhidden[part])
        sums.add(logits, some)
    logits = None
    return nothing(g) if dhidden is None else dhidden.view(hidden.shape), *sums.results()


def add_gradients(
    starts: Sequence[Start | None], reduction: int, dloss: Tensor, hidden: Tensor, weight: Tensor, labels: Tensor,
    bias: Tensor | None, options: tuple[Any, ...], chunk_rows: int, needs: Sequence[bool],
) -> list[Tensor | None]:  # fmt: skip
    """Return the gradients of hidden, weight and bias; the last two are added to `starts` if these are given."""
    g = dloss.float()
    if reduction == MEAN:
        g = g * reduction_ops.COUNT(labels.reshape(-1).contiguous(), options[0])
    if reduction != NONE:
        g = g.reshape(()).expand(labels.shape)
    chunk_rows = -(-chunk_rows // _TILE_ROWS) * _TILE_ROWS
    by_operators = _KERNELS._replace(
        row_gradient=partial(_row_gradient, rows_ops.FORWARD, rows_ops.BACKWARD_IN_PLACE)
    )  # fmt: skip
    found = _backward(
        by_operators, g, hidden, weight, labels, bias, *options, chunk_rows, True, *needs,
        sums_of=partial(MainGrads, starts),
    )  # fmt: skip
    return [
        start.added() if start is not None else grad if need else None
        for start, grad, need in zip((None, *starts), found, needs, strict=True)
    ]


# ---- with kernels ---------------------------------------------------------------------------------------------------


def _rows(forward, logits, labels, losses, correct, factor, options):
    loss, hits, stats, _ = forward(logits, labels, *options, NONE, correct is not None)
    losses.copy_(loss)
    if correct is not None:
        correct.copy_(hits)
    return stats


def _row_gradient(forward, backward_in_place, logits, labels, g, options):
    stats = forward(logits, labels, *options, NONE, False)[2]
    backward_in_place(g, logits, labels, stats, None, *options, 0, logits.shape[-1])


def _gradient_launch(logits, labels, losses, correct, factor, options):
    stats = torch.empty(2, labels.numel(), dtype=torch.float32, device=logits.device)
    rows_ops.CHUNK(logits, labels, losses, stats, correct, factor, *options)
    return stats


def _launch_fwd(hidden, *others):
    found = report(hidden.get_device())
    found.raise_if_bad()
    results = _forward(_KERNELS, hidden, *others)
    if hidden.get_device() < 0:
        found.raise_if_bad()
    return results


_KERNELS = _Functions(
    whole=rows_ops.FORWARD.launch,
    rows=partial(_rows, rows_ops.FORWARD.launch),
    gradient=_gradient_launch,
    row_gradient=partial(_row_gradient, rows_ops.FORWARD.launch, rows_ops.BACKWARD_IN_PLACE.launch),
    count=reduction_ops.COUNT,
    reduce=reduction_ops.REDUCE,
    of_slabs=slabs.KERNELS,
)


# ---- in plain torch -------------------------------------------------------------------------------------------------


def _gradient_reference(logits, labels, losses, correct, factor, options):
    stats = _rows(reference.forward, logits, labels, losses, correct, factor, options)
    g = torch.ones(1, dtype=torch.float32, device=logits.device) if factor is None else factor
    logits.copy_(reference.backward(g, logits, labels, stats, None, *options, 0, logits.shape[-1]))
    return stats


def _count_reference(labels, ignore_index):
    return reference.reduced(labels.new_zeros(0, dtype=torch.float32), labels, ignore_index, MEAN)[1]


def _reduce_reference(losses, correct, labels, ignore_index, reduction):
    loss = reference.reduced(losses, labels, ignore_index, reduction)[0]
    hits = nothing(losses) if correct is None else reference.reduced(correct, labels, ignore_index, reduction)[0]
    return loss, hits


_PLAIN = _Functions(
    whole=reference.forward,
    rows=partial(_rows, reference.forward),
    gradient=_gradient_reference,
    row_gradient=partial(_row_gradient, reference.forward, rows_ops.BACKWARD_IN_PLACE.reference),
    count=_count_reference,
    reduce=_reduce_reference,
    of_slabs=slabs.PLAIN,
)


def _gradients(hidden, weight, bias, need_hidden, need_weight, need_bias) -> tuple[Memory | None, ...]:
    needs = (hidden, need_hidden), (weight, need_weight), (bias, need_bias)
    return tuple(Memory.like(t) if need else None for t, need in needs)


def _outputs_fwd(hidden, weight, labels, bias, reduction, accuracy, lse, need_hidden, need_weight, need_bias):
    each = Memory(labels.shape if reduction == NONE else (), torch.float32)
    sums = Memory(labels.shape, torch.float32) if lse else None
    gradients = _gradients(hidden, weight, bias, need_hidden, need_weight, need_bias)
    return each, each if accuracy else None, sums, *gradients


_TENSORS = (
    Argument("hidden"), Argument("weight", None), Argument("labels", None), Argument("bias", None, optional=True),
)  # fmt: skip
_OPTIONS = "int ignore_index, float label_smoothing, float z_loss, float softcap"
_NEEDS = "int chunk_rows, bool fp32_weight_grad, bool need_hidden, bool need_weight, bool need_bias"
# Both are products of torch around the kernels of cross_entropy, so a plan has no launches of its own.
FORWARD = Operator(
    "linear_cross_entropy_fwd", _TENSORS, options=f"{_OPTIONS}, int reduction, bool accuracy, bool lse, {_NEEDS}",
    results="loss hits lse dhidden dweight dbias", outputs=_outputs_fwd, check=_check_fwd,
    plan=lambda: Steps(instead=_launch_fwd), reference=partial(_forward, _PLAIN), plans_empty=True,
)  # fmt: skip
BACKWARD = Operator(
    "linear_cross_entropy_bwd", (Argument("dloss", None), *_TENSORS), options=f"{_OPTIONS}, {_NEEDS}",
    results="dhidden dweight dbias", outputs=_gradients, check=_check_bwd,
    plan=lambda: Steps(instead=partial(_backward, _KERNELS)), reference=partial(_backward, _PLAIN), plans_empty=True,
)  # fmt: skip
