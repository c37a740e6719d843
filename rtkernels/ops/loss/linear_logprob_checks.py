"""What the operators of log-probabilities from hidden states accept."""

from __future__ import annotations

import torch

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss.linear_logprob_head import candidates, padded
from rtkernels.ops.loss.logprob_reference import PARTS as PART_ROWS
from rtkernels.runtime.checks import check_dtype, check_same, check_shape, token
from rtkernels.runtime.layout import row_stride
from rtkernels.runtime.operator.declared import Meta


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


def check_saved(
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


def check_finish(parts, targets, ids, vocabulary, k) -> None:
    check_dtype("ids", ids.dtype)
    rows = ids.numel() // max(k, 1)
    if k < 1 or rows * k != ids.numel():
        raise ArgumentError(f"k is {k}; expected the ids of a row, {ids.numel()} in all")
    check_shape("parts", parts.shape, (*parts.shape[:1], PART_ROWS, rows), "[n, 6, rows]")
    check_shape("targets", targets.shape, (*parts.shape[:1], k, rows), "[n, k, rows]")
    if vocabulary < 1:
        raise ArgumentError(f"vocabulary is {vocabulary}; expected at least 1")
