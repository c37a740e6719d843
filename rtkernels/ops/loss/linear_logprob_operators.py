"""Log-probabilities from hidden states in slabs of the vocabulary: torch's GEMMs around the kernels of `logprob.cu`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rtkernels.ops.gemm.weight_gradient import add_product_
from rtkernels.ops.loss import linear_logprob_tiles as tiles
from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss import logprob_reference as reference
from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product
from rtkernels.ops.loss.linear_logprob_checks import check, check_bwd, check_finish, check_saved
from rtkernels.ops.loss.linear_logprob_head import (
    Head,
    Options,
    candidates,
    flat_rows,
    padded,
    rounded_product,
    row_memory,
)
from rtkernels.ops.loss.logprob_reference import PARTS as PART_ROWS
from rtkernels.ops.loss.logprob_reference import Incoming, Scores
from rtkernels.ops.shared.block_sum import add_rows_
from rtkernels.runtime.invariance import level
from rtkernels.runtime.layout import nothing
from rtkernels.runtime.operator.declared import Argument, Dense, DenseFloat, InPlace, Meta, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps


class Functions(NamedTuple):
    """What is done to rows of logits: by kernels, or in plain torch."""

    add_parts: Callable[..., None]
    terms: Callable[..., Any]
    gradient: Callable[..., None]


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
    vocabulary, need_hidden, need_weight, need_bias, fp32_hidden_grad, logits=None, starts=(None, None),
):  # fmt: skip
    """The operators ``linear_logprob_bwd`` and ``_bwd_saved``: with `logits` of all columns, which are overwritten.

    `starts`: of the gradients of weight and bias, which are then added to them and not returned.
    """
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
    start, start_bias = starts
    dweight = nothing(states)
    if need_weight and start is None:
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    sum_dtype = torch.float32 if fp32_hidden_grad or len(slabs) > 1 else hidden.dtype
    dhidden = torch.empty(states.shape, dtype=sum_dtype, device=states.device) if need_hidden else nothing(states)
    dbias = []
    for first_column, end in slabs:
        some = kept[:, first_column:end] if kept is not None else head.logits(first_column, end, memory)
        out = some if gradients is None else gradients[:, : end - first_column]
        functions.gradient(some, out, flat, temperatures, terms, targets, dlogprob, options, first_column)
        if need_hidden:
            if sum_dtype == torch.float32:
                add_product(dhidden, out, weight[first_column:end], first_column == 0)
            else:
                rounded_product(dhidden, out, weight)
        if start is not None:
            add_product_(start.total[first_column:end], out, states)
        elif need_weight:
            rounded_product(dweight[first_column:end], out.t(), states)
        if start_bias is not None:
            add_rows_(start_bias.total[first_column:end], out)
        elif need_bias:
            dbias.append(out.sum(0, dtype=torch.float32))
    if need_hidden:
        dhidden = (dhidden if fp32_hidden_grad else dhidden.to(hidden.dtype)).view(hidden.shape)
    return dhidden, dweight, torch.cat(dbias).to(bias.dtype) if dbias else nothing(states)


def add_gradients(starts, *args) -> Tensor:
    """Add the gradients of weight and bias to `starts`, and return that of hidden; arguments as of the operators."""
    *tensors_and_options, logits = args
    return _backward(KERNELS, *tensors_and_options, logits, starts)


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


def _launch_parts(compute, hidden, *others):
    plans.raise_if_bad(hidden)
    results = compute(hidden, *others)
    if hidden.get_device() < 0:  # the emulator has finished by then
        plans.raise_if_bad(hidden)
    return results


def _plan_parts(
    hidden, weight, ids, bias, temperatures, logit_scale, softcap, keep_logits, wanted, device
) -> Any:  # fmt: skip
    if hidden.rows == 0:
        return IN_TORCH
    given = hidden, weight, ids, bias, temperatures, logit_scale, softcap, keep_logits, wanted
    compute = tiles.parts if tiles.suits(*given, device) else partial(_parts, KERNELS)
    return Steps(instead=partial(_launch_parts, compute))


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
    plan=_plan_parts, reference=partial(_parts, PLAIN), plans_empty=True,
)  # fmt: skip
FINISH = Operator(
    "linear_logprob_finish", (Dense("parts"), Dense("targets"), Dense("ids", None)),
    options="int ignore_index, int vocabulary, int k, int wanted",
    results="logprob entropy lse log_sum_sq mean_logit top1 stats", outputs=_outputs_finish, check=check_finish,
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
    results="dhidden dweight dbias", outputs=_gradients, check=check_saved,
    plan=lambda hidden: Steps(instead=partial(_backward, KERNELS)) if hidden.rows else IN_TORCH,
    reference=partial(_backward, PLAIN), plans_empty=True,
)  # fmt: skip
