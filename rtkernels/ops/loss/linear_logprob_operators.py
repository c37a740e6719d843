"""Log-probabilities from hidden states in slabs of the vocabulary: torch's GEMMs around the kernels of `logprob.cu`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss import logprob_reference as reference
from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product, slab_columns
from rtkernels.ops.loss.logprob_reference import PARTS as PART_ROWS
from rtkernels.ops.loss.logprob_reference import Incoming, Scores
from rtkernels.runtime.checks import check_dtype, check_same, check_shape, token
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import nothing, row_stride
from rtkernels.runtime.operator.declared import Argument, Dense, DenseFloat, InPlace, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps

CHUNK_BYTES = 256 << 20  # logits of a slab by default, about
_INVARIANT_COLUMNS = 1 << 14  # of a slab, with batch invariance
_STEP = 128  # columns: given chunk_bytes are rounded down to so many
_PAD = 8  # elements: rows of logits begin at multiples of 16 bytes


class Options(NamedTuple):
    """The options that products and row kernels need."""

    ignore_index: int
    logit_scale: float
    softcap: float
    temperature: float
    fp32_logits: bool
    chunk_bytes: int
    first: int
    vocabulary: int


def padded(columns: int) -> int:
    """Return the distance between rows of so many logits."""
    return -(-columns // _PAD) * _PAD


def columns_of_slab(rows: int, vocabulary: int, itemsize: int, chunk_bytes: int, device: int) -> int:
    """Return the columns of a slab: as many as `chunk_bytes` hold, or for 0 about CHUNK_BYTES, in whole waves."""
    if level():  # whatever chunk_bytes are: the columns of a slab decide how rows are summed up
        return min(_INVARIANT_COLUMNS, vocabulary)
    a_column = max(rows, 1) * itemsize
    if chunk_bytes:
        columns = max(_STEP, chunk_bytes // a_column // _STEP * _STEP)
    else:
        wave = slab_columns(device)
        columns = max(1, round(CHUNK_BYTES / (a_column * wave))) * wave
    return min(columns, vocabulary)


class Head:
    """The linear layer: slabs of its logits."""

    def __init__(self, states: Tensor, weight: Tensor, bias: Tensor | None, options: Options) -> None:
        self.states, self.weight, self.bias = states, weight, bias
        self.dtype = torch.float32 if options.fp32_logits else states.dtype
        self.columns = columns_of_slab(
            len(states), len(weight), self.dtype.itemsize, options.chunk_bytes, weight.get_device()
        )

    def memory(self, columns: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return memory for logits of so many columns."""
        shape = len(self.states), padded(columns)
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.states.device)

    def slabs(self) -> Iterator[tuple[int, int]]:
        """Yield the first column of each slab, and the one behind its last."""
        for first in range(0, len(self.weight), self.columns):
            yield first, min(first + self.columns, len(self.weight))

    def logits(self, first: int, end: int, memory: Tensor) -> Tensor:
        """Compute logits of some columns, in the first columns of `memory`."""
        out, some = memory[:, : end - first], self.weight[first:end].t()
        bias = None if self.bias is None else self.bias[first:end]
        if self.dtype != self.states.dtype:
            add_product(out, self.states, some, True)
            return out if bias is None else out.add_(bias)
        return torch.mm(self.states, some, out=out) if bias is None else torch.addmm(bias, self.states, some, out=out)


class Functions(NamedTuple):
    """What is done to rows of logits: by kernels, or in plain torch."""

    add_parts: Callable[..., None]
    terms: Callable[..., Any]
    gradient: Callable[..., None]


def flat_rows(hidden: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return states ``[rows, hidden size]`` and ids ``[rows, k]``."""
    states = hidden.reshape(-1, hidden.shape[-1])
    k = ids.shape[-1] if ids.dim() == hidden.dim() else 1
    return states, ids.reshape(len(states), k).contiguous()


def row_memory(states: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return memory for the parts of rows and for the scores of their ids."""
    shape = {"dtype": torch.float32, "device": states.device}
    return torch.empty(PART_ROWS, len(ids), **shape), torch.empty(ids.shape[1], len(ids), **shape)


def candidates(hidden: Any, ids: Any) -> int:
    """Return how many ids a row has."""
    return ids.shape[-1] if ids.dim() == hidden.dim() else 1


def _parts(
    functions: Functions, hidden, weight, ids, bias, temperatures, ignore_index, logit_scale, softcap, temperature,
    fp32_logits, chunk_bytes, first, vocabulary, keep_logits, wanted,
):  # fmt: skip
    """The operator ``linear_logprob_parts``."""
    options = Options(
        ignore_index, logit_scale, softcap, temperature, fp32_logits, chunk_bytes, first, vocabulary
    )  # fmt: skip
    states, flat = flat_rows(hidden, ids)
    head = Head(states, weight, bias, options)
    parts, targets = row_memory(states, flat)
    kept = head.memory(len(weight)) if keep_logits else None
    memory = head.memory(head.columns) if kept is None else None
    whole = keep_logits and not level()
    for start, end in [(0, len(weight))] if whole else head.slabs():
        logits = head.logits(start, end, memory if kept is None else kept[:, start:])
        functions.add_parts(logits, flat, temperatures, parts, targets, options, wanted, start)
    return parts, targets, nothing(parts) if kept is None else kept


def _backward(
    functions: Functions, hidden, weight, ids, bias, temperatures, dlogprob, dentropy, dlse, dsquares, dmean, stats,
    entropy, log_sum_sq, targets, ignore_index, logit_scale, softcap, temperature, fp32_logits, chunk_bytes, first,
    vocabulary, need_hidden, need_weight, need_bias, fp32_hidden_grad, logits=None,
):  # fmt: skip
    """The operators ``linear_logprob_bwd`` and ``_bwd_saved``: with `logits` of all columns, which are overwritten."""
    kept = None if logits is None else logits[:, : len(weight)]
    options = Options(
        ignore_index, logit_scale, softcap, temperature, fp32_logits, chunk_bytes, first, vocabulary
    )  # fmt: skip
    states, flat = flat_rows(hidden, ids)
    head = Head(states, weight, bias, options)
    incoming = Incoming(dlogprob, dentropy, dlse, dsquares, dmean)
    terms = functions.terms(flat, incoming, stats, entropy, log_sum_sq, options)
    in_place = head.dtype == hidden.dtype
    whole = kept is not None and in_place and not level()
    slabs = [(0, len(weight))] if whole else list(head.slabs())
    memory = head.memory(head.columns) if kept is None else None
    gradients = None if in_place else head.memory(head.columns, hidden.dtype)
    dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device) if need_weight else nothing(states)
    sum_dtype = torch.float32 if fp32_hidden_grad or len(slabs) > 1 else hidden.dtype
    dhidden = torch.empty(states.shape, dtype=sum_dtype, device=states.device) if need_hidden else nothing(states)
    dbias = []
    for start, end in slabs:
        some = kept[:, start:end] if kept is not None else head.logits(start, end, memory)
        out = some if gradients is None else gradients[:, : end - start]
        functions.gradient(some, out, flat, temperatures, terms, targets, dlogprob, options, start)
        if need_hidden:
            if sum_dtype == torch.float32:
                add_product(dhidden, out, weight[start:end], start == 0)
            else:
                torch.mm(out, weight, out=dhidden)
        if need_weight:
            torch.mm(out.t(), states, out=dweight[start:end])
        if need_bias:
            dbias.append(out.sum(0, dtype=torch.float32))
    if need_hidden:
        dhidden = (dhidden if fp32_hidden_grad else dhidden.to(hidden.dtype)).view(hidden.shape)
    return dhidden, dweight, torch.cat(dbias).to(bias.dtype) if need_bias else nothing(states)


# ---- checks ---------------------------------------------------------------------------------------------------------


def check_inputs(hidden: Meta, weight: Meta, ids: Meta, bias: Meta | None, temperatures: Meta | None) -> None:
    """Raise an ArgumentError for arguments that do not fit together."""
    token("hidden", hidden.dtype)
    if weight.dim() != 2 or not 0 < weight.shape[0] < 2**31:
        raise ArgumentError(f"weight has shape {tuple(weight.shape)}; expected [vocabulary, hidden size]")
    if hidden.dim() == 0 or hidden.shape[-1] != weight.shape[1]:
        raise ArgumentError(
            f"hidden has shape {tuple(hidden.shape)}; expected [..., {weight.shape[1]}], the hidden size of weight"
        )
    check_same("weight", weight.dtype, hidden.dtype, "dtype", of="hidden")
    if bias is not None:
        check_same("bias", bias.dtype, hidden.dtype, "dtype", of="hidden")
        check_same("bias", tuple(bias.shape), (weight.shape[0],), "shape", of="weight's rows")
    check_dtype("ids", ids.dtype)
    rows = tuple(hidden.shape[:-1])
    if ids.dim() == hidden.dim():
        if ids.shape[-1] == 0 or tuple(ids.shape[:-1]) != rows:
            raise ArgumentError(
                f"ids has shape {tuple(ids.shape)}; expected {rows}, or {(*rows, 'k')} with k of at least 1"
            )
    else:
        check_shape("ids", ids.shape, rows, "that of hidden without its last one")
    if temperatures is not None:
        check_same("temperature", temperatures.dtype, torch.float32, "dtype", of="a temperature for each row")
        check_shape("temperature", temperatures.shape, rows, "that of hidden without its last one")


def check_numbers(logit_scale: float, softcap: float, temperature: float, chunk_bytes: int) -> None:
    """Raise an ArgumentError for numbers that make no scores."""
    if not abs(logit_scale) < float("inf"):
        raise ArgumentError(f"logit_scale is {logit_scale}; expected a finite number")
    if not 0.0 <= softcap < float("inf"):
        raise ArgumentError(f"softcap is {softcap}; expected a positive number, or None")
    if not 0.0 < temperature < float("inf"):
        raise ArgumentError(f"temperature is {temperature}; expected a positive number, or one for each row")
    if chunk_bytes < 0:
        raise ArgumentError(f"chunk_bytes is {chunk_bytes}; expected at least 1, or None")


def check(
    hidden, weight, ids, bias, temperatures, logit_scale, softcap, temperature, chunk_bytes, first, vocabulary
) -> None:
    check_numbers(logit_scale, softcap, temperature, chunk_bytes)
    check_inputs(hidden, weight, ids, bias, temperatures)
    if not 0 <= first <= vocabulary - weight.shape[0]:
        raise ArgumentError(f"first is {first}; expected {weight.shape[0]} columns from there in {vocabulary}")


def check_bwd(
    dlogprob, dentropy, dlse, dsquares, dmean, hidden, weight, ids, bias, temperatures, stats, entropy, log_sum_sq,
    targets, logit_scale, softcap, temperature, chunk_bytes, first, vocabulary,
) -> None:  # fmt: skip
    check(hidden, weight, ids, bias, temperatures, logit_scale, softcap, temperature, chunk_bytes, first, vocabulary)
    rows, k = hidden.rows, candidates(hidden, ids)
    check_shape("stats", stats.shape, (2, rows), "[2, rows]")
    check_shape("targets", targets.shape, (k, rows), "[k, rows]")
    if dlogprob is not None:
        check_shape("dlogprob", dlogprob.shape, ids.shape, "that of ids")
    named = {"dentropy": dentropy, "dlse": dlse, "dsquares": dsquares, "dmean": dmean}
    for name, given in (named | {"entropy": entropy, "log_sum_sq": log_sum_sq}).items():
        if given is not None:
            check_shape(name, given.shape, hidden.shape[:-1], "that of hidden without its last one")
    for name, given, needed in (("entropy", entropy, dentropy), ("log_sum_sq", log_sum_sq, dsquares)):
        if needed is not None and given is None:
            raise ArgumentError(f"{name} is None; expected that of the forward pass, for its gradient")


def _check_saved(
    logits, dlogprob, dentropy, dlse, dsquares, dmean, hidden, weight, ids, bias, temperatures, stats, entropy,
    log_sum_sq, targets, logit_scale, softcap, temperature, chunk_bytes, first, vocabulary, fp32_logits,
) -> None:  # fmt: skip
    incoming, tensors = (dlogprob, dentropy, dlse, dsquares, dmean), (hidden, weight, ids, bias, temperatures)
    saved, numbers = (stats, entropy, log_sum_sq, targets), (logit_scale, softcap, temperature)
    check_bwd(*incoming, *tensors, *saved, *numbers, chunk_bytes, first, vocabulary)
    check_shape("logits", logits.shape, (hidden.rows, padded(weight.shape[0])), "those of the forward pass")
    if row_stride(logits.shape, logits.stride) is None:
        raise ArgumentError(f"logits has strides {tuple(logits.stride)}; expected rows with unit stride")
    wanted = torch.float32 if fp32_logits else hidden.dtype
    check_same("logits", logits.dtype, wanted, "dtype", of="the forward pass")


def _check_finish(parts, targets, ids, vocabulary, k) -> None:
    check_dtype("ids", ids.dtype)
    rows = ids.numel() // max(k, 1)
    if k < 1 or rows * k != ids.numel():
        raise ArgumentError(f"k is {k}; expected the ids of a row, {ids.numel()} in all")
    check_shape("parts", parts.shape, (*parts.shape[:1], PART_ROWS, rows), "[n, 6, rows]")
    check_shape("targets", targets.shape, (*parts.shape[:1], k, rows), "[n, k, rows]")
    if vocabulary < 1:
        raise ArgumentError(f"vocabulary is {vocabulary}; expected at least 1")


# ---- in plain torch -------------------------------------------------------------------------------------------------


def _scores(options: Options, temperatures: Tensor | None) -> Scores:
    return Scores(options.logit_scale, options.softcap, options.temperature, temperatures)


def _add_parts_plain(logits, ids, temperatures, parts, targets, options, wanted, start) -> None:
    first = options.first + start
    more, scores = reference.parts(
        logits, ids, _scores(options, temperatures), options.ignore_index, first, options.vocabulary
    )
    parts.copy_(more if start == 0 else reference.folded(torch.stack((parts, more))))
    targets.copy_(scores if start == 0 else torch.maximum(targets, scores))


def _terms_plain(ids, incoming, stats, entropy, log_sum_sq, options) -> Tensor:
    return reference.terms(ids, incoming, stats, entropy, log_sum_sq, options.ignore_index, options.vocabulary)


def _gradient_plain(logits, out, ids, temperatures, terms, targets, dlogprob, options, start) -> None:
    scores, first = _scores(options, temperatures), options.first + start
    numbers = options.ignore_index, first, options.vocabulary, out.dtype
    out.copy_(reference.gradient(logits, ids, terms, dlogprob, scores, *numbers))


def _finish_plain(parts, targets, ids, ignore_index, vocabulary, k, wanted):
    found = reference.finished(parts, targets, ids, ignore_index, vocabulary)
    *of_rows, top1 = found[1:6]
    bits = (plans.ENTROPY, plans.LSE, plans.SQUARES, plans.MEAN)
    return (
        found.logprob.reshape(ids.shape),
        *(t if wanted & bit else nothing(t) for t, bit in zip(of_rows, bits, strict=True)),
        top1 if wanted & plans.TOP1 else nothing(top1),
        found.stats,
    )


PLAIN = Functions(_add_parts_plain, _terms_plain, _gradient_plain)


# ---- with kernels ---------------------------------------------------------------------------------------------------


def _add_parts(logits, ids, temperatures, parts, targets, options, wanted, start) -> None:
    numbers = (*options[1:4], options.first + start, int(start == 0))
    plans.ADD_PARTS(
        logits, ids, temperatures, parts, targets, options.ignore_index, options.vocabulary, wanted, *numbers
    )


def _terms(ids, incoming, stats, entropy, log_sum_sq, options) -> Tensor:
    return plans.MAKE_TERMS(
        ids, *incoming, stats, entropy, log_sum_sq, options.ignore_index, options.vocabulary
    )  # fmt: skip


def _gradient(logits, out, ids, temperatures, terms, targets, dlogprob, options, start) -> None:
    numbers = (options.ignore_index, options.vocabulary, *options[1:4], options.first + start)
    plans.MAKE_GRADIENT(logits, out, ids, temperatures, terms, targets, dlogprob, *numbers)


KERNELS = Functions(_add_parts, _terms, _gradient)


def _launch_parts(hidden, *others):
    plans.raise_if_bad(hidden)
    results = _parts(KERNELS, hidden, *others)
    if hidden.get_device() < 0:  # the emulator has finished by then
        plans.raise_if_bad(hidden)
    return results


# ---- operators ------------------------------------------------------------------------------------------------------


def row_outputs(hidden: Meta, ids: Meta) -> tuple[Memory, Memory]:
    """Return the parts of rows and the scores of their ids."""
    rows = hidden.rows
    return Memory((PART_ROWS, rows), torch.float32), Memory((candidates(hidden, ids), rows), torch.float32)


def _outputs_parts(hidden, weight, ids, fp32_logits, keep_logits):
    rows = hidden.rows
    dtype = torch.float32 if fp32_logits else hidden.dtype
    return (
        *row_outputs(hidden, ids),
        Memory((rows, padded(weight.shape[0])), dtype) if keep_logits else None,
    )


def _outputs_finish(parts, ids, wanted):
    rows = parts.shape[-1]
    each = Memory((rows,), torch.float32)
    bits = (plans.ENTROPY, plans.LSE, plans.SQUARES, plans.MEAN)
    return (
        Memory(ids.shape, torch.float32),
        *(each if wanted & bit else None for bit in bits),
        Memory((rows,), torch.bool) if wanted & plans.TOP1 else None,
        Memory((2, rows), torch.float32),
    )


def _gradients(hidden, weight, bias, need_hidden, need_weight, need_bias, fp32_hidden_grad):
    of_hidden = torch.float32 if fp32_hidden_grad else hidden.dtype
    return (
        Memory(hidden.shape, of_hidden) if need_hidden else None,
        Memory.like(weight) if need_weight else None,
        Memory.like(bias) if need_bias else None,
    )


TENSORS = (
    Argument("hidden"), Argument("weight", None), Argument("ids", None), Argument("bias", None, optional=True),
    Dense("temperatures", None, optional=True),
)  # fmt: skip
OPTIONS = (
    "int ignore_index, float logit_scale, float softcap, float temperature, bool fp32_logits, int chunk_bytes, "
    "int first, int vocabulary"
)
INCOMING = tuple(
    DenseFloat(name, None, optional=True) for name in ("dlogprob", "dentropy", "dlse", "dsquares", "dmean")
)
_SAVED = (
    Dense("stats", None), Dense("entropy", None, optional=True), Dense("log_sum_sq", None, optional=True),
    Dense("targets", None),
)  # fmt: skip
_NEEDS = "bool need_hidden, bool need_weight, bool need_bias, bool fp32_hidden_grad"
PARTS = Operator(
    "linear_logprob_parts", TENSORS, options=f"{OPTIONS}, bool keep_logits, int wanted",
    results="parts targets logits", outputs=_outputs_parts, check=check,
    plan=lambda hidden: Steps(instead=_launch_parts) if hidden.rows else IN_TORCH, reference=partial(_parts, PLAIN),
    plans_empty=True,
)  # fmt: skip
FINISH = Operator(
    "linear_logprob_finish", (Dense("parts"), Dense("targets"), Dense("ids", None)),
    options="int ignore_index, int vocabulary, int k, int wanted",
    results="logprob entropy lse log_sum_sq mean_logit top1 stats", outputs=_outputs_finish, check=_check_finish,
    plan=plans.plan_finish, reference=_finish_plain,
)  # fmt: skip
BACKWARD = Operator(
    "linear_logprob_bwd", (*TENSORS, *INCOMING, *_SAVED), options=f"{OPTIONS}, {_NEEDS}",
    results="dhidden dweight dbias", outputs=_gradients, check=check_bwd,
    plan=lambda hidden: Steps(instead=partial(_backward, KERNELS)) if hidden.rows else IN_TORCH,
    reference=partial(_backward, PLAIN), plans_empty=True,
)  # fmt: skip
BACKWARD_SAVED = Operator(
    "linear_logprob_bwd_saved",
    (*TENSORS, *INCOMING, *_SAVED, *map(str.strip, f"{OPTIONS}, {_NEEDS}".split(",")), InPlace("logits")),
    results="dhidden dweight dbias", outputs=_gradients, check=_check_saved,
    plan=lambda hidden: Steps(instead=partial(_backward, KERNELS)) if hidden.rows else IN_TORCH,
    reference=partial(_backward, PLAIN), plans_empty=True,
)  # fmt: skip
