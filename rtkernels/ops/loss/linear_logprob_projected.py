"""Log-probabilities with a head that has no gradient: the forward pass projects probabilities through the weight.

With f = dz/dlogit, the gradient of hidden states needs sums over columns of p f w, and for the entropy of p log(p) f w.
They do not depend on incoming gradients, so the forward pass computes them slab by slab, relative to the largest score
so far. The backward pass combines them row by row, and adds the rows of the weight that ids name.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_logprob_operators as linear
from rtkernels.ops.loss import logprob_plan as plans
from rtkernels.ops.loss.linear_cross_entropy_slabs import add_product
from rtkernels.ops.loss.linear_logprob_checks import check, check_bwd
from rtkernels.ops.loss.linear_logprob_head import Head, Options, flat_rows, row_memory
from rtkernels.ops.loss.logprob_reference import CONSTANT, SLOPE, TERMS
from rtkernels.runtime.checks import check_shape
from rtkernels.runtime.operator.declared import Dense, Operator
from rtkernels.runtime.operator.plan import IN_TORCH, Memory, Steps


def _project(
    functions: linear.Functions, hidden, weight, ids, bias, temperatures, ignore_index, logit_scale, softcap,
    temperature, fp32_logits, chunk_bytes, first, vocabulary, wanted,
):  # fmt: skip
    """The operator ``linear_logprob_project``: sums of e^(z - top) f w and of e^(z - top) (z - top) f w."""
    options = Options(ignore_index, logit_scale, softcap, temperature, fp32_logits, chunk_bytes, first, vocabulary)
    states, flat = flat_rows(hidden, ids)
    head, memory = Head(states, weight, bias, options), row_memory(states, flat)
    parts, targets = memory
    kinds = (CONSTANT, SLOPE) if wanted & plans.ENTROPY else (CONSTANT,)
    sums = torch.empty(len(kinds), *states.shape, dtype=torch.float32, device=hidden.device)
    slab = head.memory(head.columns)
    weighted = None if len(kinds) == 1 and head.dtype == hidden.dtype else head.memory(head.columns, hidden.dtype)
    counts = (flat != ignore_index).any(-1)
    old = None
    for start, end in head.slabs():
        logits = head.logits(start, end, slab)
        functions.add_parts(logits, flat, temperatures, parts, targets, options, wanted, start)
        top = torch.where(parts[0] == -torch.inf, 0.0, parts[0])
        if old is not None:
            rise = (top - old).unsqueeze(-1).clamp(min=0.0)  # negative only where sums are 0: no score was finite
            if len(kinds) > 1:
                sums[1].sub_(rise * sums[0])
            sums.mul_((-rise).exp())
        old = top
        out = logits if weighted is None else weighted[:, : end - start]
        for place, kind in enumerate(kinds):
            terms = torch.zeros(TERMS, len(states), dtype=torch.float32, device=hidden.device)
            terms[0], terms[1], terms[kind] = top, torch.where(counts, 0.0, torch.inf), counts
            functions.gradient(logits, out, flat, temperatures, terms, targets, None, options, start)
            add_product(sums[place], out, weight[start:end], start == 0)
    if len(states) == 0:
        sums.zero_()
    return parts, targets, sums


def _backward(
    hidden, weight, ids, temperatures, dlogprob, dentropy, dlse, top, stats, entropy, targets, sums, ignore_index,
    logit_scale, softcap, temperature, first, vocabulary,
):  # fmt: skip
    """The operator ``linear_logprob_bwd_projected``: the gradient of hidden in fp32. `top`: that of sums."""
    states, flat = flat_rows(hidden, ids)
    zero = torch.zeros(len(states), dtype=torch.float32, device=hidden.device)
    d_entropy, d_lse = (zero if g is None else g.reshape(-1) for g in (dentropy, dlse))
    local = flat.long() - first
    valid = (flat != ignore_index) & (flat >= 0) & (flat < vocabulary)
    each = zero.unsqueeze(-1).expand(flat.shape) if dlogprob is None else dlogprob.reshape(flat.shape)
    each = torch.where(valid, each, 0.0)
    counts = (flat != ignore_index).any(-1)
    constant = d_lse - each.sum(-1)
    if dentropy is not None:
        constant = constant - d_entropy * entropy.reshape(-1)
    shift = torch.where(top == -torch.inf, 0.0, top) - stats[0] - stats[1]  # to log-probabilities
    factor = torch.where(counts & (top != -torch.inf), shift.exp(), 0.0)  # -inf: sums are 0
    grads = (factor * (constant - d_entropy * torch.where(factor == 0, 0.0, shift))).unsqueeze(-1) * sums[0]
    if dentropy is not None:
        grads.addcmul_((factor * -d_entropy).unsqueeze(-1), sums[1])
    here = valid & (local >= 0) & (local < weight.shape[0])
    warmth = temperature if temperatures is None else temperatures.reshape(-1)
    for j in range(flat.shape[1]):
        slope = each[:, j] * (logit_scale / warmth)
        if softcap:
            slope = slope * (1 - (torch.where(here[:, j], targets[j], 0.0) * warmth / softcap).square())
        slope = torch.where(here[:, j], slope, 0.0)
        grads.addcmul_(slope.unsqueeze(-1), weight[torch.where(here[:, j], local[:, j], 0)].float())
    return grads.view(hidden.shape)


def _check_bwd(
    hidden, weight, ids, temperatures, dlogprob, dentropy, dlse, top, stats, entropy, targets, sums, first, vocabulary
) -> None:
    numbers = 1.0, 0.0, 1.0, 0  # whatever they are
    incoming, tensors = (dlogprob, dentropy, dlse, None, None), (hidden, weight, ids, None, temperatures)
    check_bwd(*incoming, *tensors, stats, entropy, None, targets, *numbers, first, vocabulary)
    check_shape("top", top.shape, (hidden.rows,), "[rows]")
    kinds = 1 if dentropy is None else 2
    if sums.dim() != 3 or sums.shape[0] < kinds or tuple(sums.shape[1:]) != (hidden.rows, hidden.shape[-1]):
        raise ArgumentError(f"sums has shape {tuple(sums.shape)}; expected {(kinds, hidden.rows, hidden.shape[-1])}")


def _launch(hidden: Tensor, *others):
    plans.raise_if_bad(hidden)
    results = _project(linear.KERNELS, hidden, *others)
    if hidden.get_device() < 0:  # the emulator has finished by then
        plans.raise_if_bad(hidden)
    return results


def _outputs(hidden, ids, wanted):
    rows, kinds = hidden.rows, 2 if wanted & plans.ENTROPY else 1
    return (
        *linear.row_outputs(hidden, ids),
        Memory((kinds, rows, hidden.shape[-1]), torch.float32),
    )


PROJECT = Operator(
    "linear_logprob_project", linear.TENSORS, options=f"{linear.OPTIONS}, int wanted", results="parts targets sums",
    outputs=_outputs, check=check, plans_empty=True,
    plan=lambda hidden: Steps(instead=_launch) if hidden.rows else IN_TORCH,
    reference=partial(_project, linear.PLAIN),
)  # fmt: skip
BACKWARD = Operator(
    "linear_logprob_bwd_projected",
    (*linear.TENSORS[:3], linear.TENSORS[4], *linear.INCOMING[:3], Dense("top"), Dense("stats", None),
     Dense("entropy", None, optional=True), Dense("targets", None), Dense("sums", None)),
    options="int ignore_index, float logit_scale, float softcap, float temperature, int first, int vocabulary",
    results="dhidden", outputs=lambda hidden: (Memory(hidden.shape, torch.float32),),
    plan=lambda: Steps(instead=_backward), reference=_backward, plans_empty=True, check=_check_bwd,
)  # fmt: skip
