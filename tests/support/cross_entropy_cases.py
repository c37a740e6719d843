"""Inputs of cross entropy, and what its results must be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import rtkernels
from support.compare import ROUNDOFF, assert_close

cross_entropy = rtkernels.cross_entropy
MODES = {
    "two_pass": {},
    "one_pass": {"one_pass": True},
    "in_place": {"in_place": True},
    "one_pass_in_place": {"one_pass": True, "in_place": True},
}


@dataclass
class Inputs:
    logits: Tensor
    labels: Tensor
    options: dict[str, Any] = field(default_factory=dict)


Normal = Callable[..., Tensor]


def plain_case(rows: int, cols: int, **options: Any) -> Callable[[Normal], Inputs]:
    def build(normal: Normal) -> Inputs:
        logits = normal(rows, cols)
        return Inputs(logits, labels_of(logits), options)

    return build


def labels_of(logits: Tensor, dtype: torch.dtype = torch.int64) -> Tensor:
    """Labels over all of the vocabulary, its ends included; every third row but the first is ignored."""
    cols, shape = logits.shape[-1], logits.shape[:-1]
    rows = torch.Size(shape).numel()
    labels = (torch.arange(rows) * 7919 + cols - 1) % cols
    labels[1::3] = -100
    if rows > 2:
        labels[2] = 0
    return labels.view(shape).to(dtype).to(logits.device)


def view_case(take: Callable[[Normal], Tensor], dtype: torch.dtype = torch.int64) -> Callable[[Normal], Inputs]:
    def build(normal: Normal) -> Inputs:
        logits = take(normal)
        return Inputs(logits, labels_of(logits, dtype))

    return build


CASES: dict[str, Callable[[Normal], Inputs]] = {
    "plain": plain_case(5, 64),
    "one_element": plain_case(1, 1),
    "few_columns": plain_case(7, 3),
    "odd": plain_case(5, 33),
    "odd_wide": plain_case(4, 1027),
    "thousand": plain_case(9, 1000),
    "several_warps": plain_case(5, 5000),
    "long": plain_case(9, 20000),
    "long_odd": plain_case(6, 18003),
    "beyond": plain_case(3, 165003),
    "many_rows": plain_case(530, 24),
    "three_dimensions": view_case(lambda n: n(2, 3, 40)),
    "one_dimension": view_case(lambda n: n(40)),
    "labels_int32": view_case(lambda n: n(6, 40), torch.int32),
    "strided_rows": view_case(lambda n: n(10, 80)[::2, :64]),
    "unaligned": view_case(lambda n: n(5, 72)[:, 3:67]),
    "unaligned_long": view_case(lambda n: n(5, 18003)[:, 1:]),
    "transposed": view_case(lambda n: n(48, 6).t()),
    "expanded": view_case(lambda n: n(1, 64).expand(4, -1)),
    "smoothing": plain_case(6, 200, label_smoothing=0.2),
    "smoothing_long": plain_case(5, 18003, label_smoothing=0.2, z_loss=0.01),
    "smoothing_all": plain_case(5, 77, label_smoothing=1.0),
    "z_loss": plain_case(6, 200, z_loss=0.1),
    "softcap": plain_case(6, 200, softcap=2.5),
    "softcap_everything": plain_case(5, 1027, softcap=2.5, z_loss=0.1, label_smoothing=0.1),
    "other_ignore_index": plain_case(6, 64, ignore_index=0),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def normal(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).to(dtype).to(device)

    inputs = CASES[case](normal)
    if inputs.options.get("ignore_index") == 0:
        inputs.labels[inputs.labels == -100] = 0
    return inputs


def exact(inputs: Inputs, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, log-sum-exp and accuracy in fp64, from torch's functions."""
    options, labels = inputs.options, inputs.labels.reshape(-1).long()
    z = inputs.logits.double().reshape(-1, inputs.logits.shape[-1])
    if cap := options.get("softcap"):
        z = cap * torch.tanh(z / cap)
    ignore = options.get("ignore_index", -100)
    counts = labels != ignore
    loss = F.cross_entropy(
        z, labels, ignore_index=ignore, label_smoothing=options.get("label_smoothing", 0.0), reduction="none"
    )
    lse = torch.where(counts, z.logsumexp(-1), 0.0)
    loss = loss + options.get("z_loss", 0.0) * lse.square()
    hits = ((z.argmax(-1) == labels) & counts).double()
    if reduction == "none":
        return tuple(t.view(inputs.labels.shape) for t in (loss, lse, hits))
    divisor = counts.sum() if reduction == "mean" else 1
    return loss.sum() / divisor, lse.view(inputs.labels.shape), hits.sum() / divisor


def check(inputs: Inputs, reduction: str, mode: str, g: float = 1.0) -> tuple[Tensor, Tensor]:
    """Run forward and backward, hold every element to its error budget; return loss and gradient."""
    leaf = inputs.logits.detach().requires_grad_()
    # In place needs memory of its own; the layout is kept where it is not a view of overlapping rows.
    middle = leaf.clone(memory_format=torch.preserve_format) if "in_place" in mode else leaf
    options = {**inputs.options, **MODES[mode], "reduction": reduction}
    loss, lse, accuracy = cross_entropy(middle, inputs.labels, **options, return_lse=True, return_accuracy=True)
    assert loss.dtype == lse.dtype == accuracy.dtype == torch.float32 and not lse.requires_grad
    dloss = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).view(loss.shape) if loss.dim() else None
    if dloss is None:
        dloss = torch.full_like(loss, g)
    loss.backward(dloss)
    if mode != "two_pass":
        with torch.no_grad():
            plain = cross_entropy(inputs.logits, inputs.labels, **inputs.options, reduction=reduction)
        if inputs.logits.shape[-1] < 16000:  # longer rows are summed up in another order
            torch.testing.assert_close(plain, loss.detach(), rtol=1e-6, atol=1e-6)

    reference = Inputs(inputs.logits.detach().double().requires_grad_(), inputs.labels, inputs.options)
    wanted, wanted_lse, wanted_accuracy = exact(reference, reduction)
    wanted.backward(dloss.double())
    size = inputs.logits.double().abs().max() + 10
    few = 20 if inputs.options else 8
    z_size = 1 + 2 * inputs.options.get("z_loss", 0.0) * size
    rows = inputs.labels.numel() if reduction == "sum" else 1
    assert_close(loss.detach(), wanted.detach(), scale=rows * size * z_size, c=few, what="loss")
    assert_close(lse, wanted_lse.detach(), scale=size, c=few, what="lse")
    assert_close(accuracy, wanted_accuracy, c=2, what="accuracy")

    grad, dtype = leaf.grad, inputs.logits.dtype
    assert grad.dtype == dtype
    weight = dloss.double().abs()
    if reduction == "mean":
        weight = weight / max(1, int((inputs.labels != inputs.options.get("ignore_index", -100)).sum()))
    roundings = 2 if "one_pass" in mode and (reduction == "none" or g != 1) else 1
    slack = 40 * few * ROUNDOFF[torch.float32] / ROUNDOFF[dtype]
    magnitude = reference.logits.grad.abs()
    terms = magnitude * (1 + size) + (weight.unsqueeze(-1) if weight.dim() else weight) * 2**-8
    assert_close(grad, reference.logits.grad, scale=magnitude + slack * terms, c=1.01 * roundings, what="dlogits")
    return loss.detach(), grad
