"""Losses without a valid row: 0, with gradients of 0 (docs/numerics.md), where torch's mean is NaN."""

from __future__ import annotations

import pytest
import torch
from support.compare import poisoned, running_on
from support.places import at

import rtkernels

LABELS = torch.full((5,), -100)


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("one_pass", [False, True])
def test_cross_entropy(reduction: str, one_pass: bool, place: str) -> None:
    with running_on(place) as device, poisoned():
        logits = torch.randn(5, 40).to(device).requires_grad_()
        loss = rtkernels.cross_entropy(logits, LABELS.to(device), reduction=reduction, one_pass=one_pass)
        loss.backward()
        assert loss.item() == 0.0
        assert torch.equal(logits.grad, torch.zeros_like(logits))


@at("cpu", "sm_80", "cuda")
def test_linear_cross_entropy(place: str) -> None:
    with running_on(place) as device, poisoned():
        hidden, weight = (torch.randn(n, 64).to(device).requires_grad_() for n in (5, 40))
        loss = rtkernels.linear_cross_entropy(hidden, weight, LABELS.to(device))
        loss.backward()
        assert loss.item() == 0.0
        for tensor in (hidden, weight):
            assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_torch_gives_nan() -> None:
    """What the table of differences says about torch."""
    assert torch.nn.functional.cross_entropy(torch.randn(5, 40), LABELS).isnan()
