"""Cross entropy with class weights and of probabilities: against torch in fp64, everywhere it can run."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.compare import running_on
from support.places import at, short

import rtkernels
from rtkernels.errors import ArgumentError

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def make(device: str, dtype: torch.dtype, rows: int = 7, cols: int = 40, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(rows, cols, generator=g) * 3).to(dtype)
    labels = torch.randint(cols, (rows,), generator=g)
    if rows > 2:
        labels[1] = -100
    weight = torch.rand(cols, generator=g) + 0.1
    target = torch.randn(rows, cols, generator=g).softmax(-1)
    return [t.to(device) for t in (x, labels, weight, target)]


def compare(x, labels, weight, smoothing, reduction, **options) -> None:
    leaf = x.detach().requires_grad_()
    loss = rtkernels.cross_entropy(
        leaf, labels, weight=weight, label_smoothing=smoothing, reduction=reduction, **options
    )
    scale = torch.randn(loss.shape, device=x.device)
    (grad,) = torch.autograd.grad((loss * scale).sum(), leaf)
    wide = x.detach().cpu().double().requires_grad_()
    target = labels.cpu() if not labels.is_floating_point() else labels.cpu().double()
    exact = F.cross_entropy(
        wide, target, weight=None if weight is None else weight.cpu().double(), label_smoothing=smoothing,
        reduction=reduction,
    )  # fmt: skip
    (wanted,) = torch.autograd.grad((exact * scale.cpu()).sum(), wide)
    assert loss.dtype == torch.float32 and grad.dtype == x.dtype and loss.shape == exact.shape
    torch.testing.assert_close(loss.detach().cpu().double(), exact.detach(), rtol=2e-6, atol=2e-6)
    bound = TOLERANCE[x.dtype]
    torch.testing.assert_close(grad.cpu().double(), wanted, rtol=bound, atol=bound * float(wanted.abs().amax()))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=short)
@at("cpu", "sm_80", "sm_90", "cuda")
def test_against_torch(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for rows, cols in ((7, 40), (3, 41), (1, 1), (2, 2056)):
            x, labels, weight, target = make(device, dtype, rows, cols)
            for smoothing, reduction in itertools.product((0.0, 0.2), ("mean", "sum", "none")):
                if reduction != "mean" and cols != 40:
                    continue
                compare(x, labels, weight, smoothing, reduction)
                compare(x, target, None, smoothing, reduction)
                compare(x, target.to(dtype), weight, smoothing, reduction)


@at("cpu", "sm_80", "cuda")
def test_layouts_and_shapes(place: str) -> None:
    with running_on(place) as device:
        x, labels, weight, target = make(device, torch.float32, 12, 40)
        shaped = rtkernels.cross_entropy(
            x.view(3, 4, 40), labels.view(3, 4).int(), weight=weight.double(), label_smoothing=0.1, reduction="none"
        )
        flat = rtkernels.cross_entropy(x, labels, weight=weight, label_smoothing=0.1, reduction="none")
        assert torch.equal(shaped.flatten(), flat)
        compare(x.t().contiguous().t(), labels, weight, 0.1, "mean")
        compare(x[:, ::2], target[:, ::2], weight[::2].contiguous(), 0.1, "mean")
        compare(x[:, 1:39], target[:, 1:39], weight[1:39], 0.1, "mean")
        assert rtkernels.cross_entropy(x[:0], target[:0]).item() == 0
        assert rtkernels.cross_entropy(x[:0], labels[:0], weight=weight, label_smoothing=0.1).item() == 0
        ignored = torch.full_like(labels, -100)
        assert rtkernels.cross_entropy(x, ignored, weight=weight, label_smoothing=0.1).item() == 0
        assert rtkernels.cross_entropy(x, ignored, weight=weight).item() == 0
        compare(x + 1e4, target, weight, 0.1, "mean")  # an offset costs nothing


@at("cpu", "sm_80")
def test_more_options(place: str) -> None:
    with running_on(place) as device:
        x, labels, weight, target = make(device, torch.float32)
        _, lse = rtkernels.cross_entropy(x, target, return_lse=True)
        torch.testing.assert_close(lse, x.logsumexp(-1))
        for options in ({}, {"label_smoothing": 0.1}):
            _, lse = rtkernels.cross_entropy(x, labels, weight=weight, return_lse=True, **options)
            kept = labels != -100
            torch.testing.assert_close(lse[kept], x.logsumexp(-1)[kept])
            capped = rtkernels.cross_entropy(x, labels, weight=weight, softcap=2.0, **options)
            torch.testing.assert_close(capped, F.cross_entropy(2 * (x / 2).tanh(), labels, weight=weight, **options))
        capped = rtkernels.cross_entropy(x.requires_grad_(), target, softcap=2.0)
        (grad,) = torch.autograd.grad(capped, x)
        (wanted,) = torch.autograd.grad(F.cross_entropy(2 * (x / 2).tanh(), target), x)
        torch.testing.assert_close(grad, wanted)
        one_pass = rtkernels.cross_entropy(x * 1, labels, weight=weight, one_pass=True)
        (grad,) = torch.autograd.grad(one_pass, x)
        (wanted,) = torch.autograd.grad(F.cross_entropy(x, labels, weight=weight), x)
        torch.testing.assert_close(grad, wanted)


@at("cpu", "sm_80")
def test_special_values(place: str) -> None:
    with running_on(place):
        x, labels, weight, target = make("cpu", torch.float32)
        x[0, 3], x[2, 5], x[3] = float("nan"), float("inf"), -float("inf")
        for given, w, e in ((target, None, 0.0), (target, weight, 0.1), (labels, weight, 0.1)):
            ours = rtkernels.cross_entropy(x, given, weight=w, label_smoothing=e, reduction="none")
            theirs = F.cross_entropy(x, given, weight=w, label_smoothing=e, reduction="none")
            torch.testing.assert_close(ours[4:], theirs[4:])
            assert not ours[[0, 2, 3]].isfinite().any() and not theirs[[0, 2, 3]].isfinite().any()
        hidden = torch.randn(2, 8)
        hidden[:, 2] = -float("inf")
        p = torch.full((2, 8), 1 / 8)
        assert torch.equal(rtkernels.cross_entropy(hidden, p), F.cross_entropy(hidden, p))


def test_refused() -> None:
    x, labels, weight, target = make("cpu", torch.float32)
    for options, message in (
        ({"labels": labels, "weight": weight[:3]}, "weight has shape"),
        ({"labels": labels, "weight": 3.0}, "weight is float; expected a floating tensor"),
        ({"labels": labels, "weight": weight.long()}, "weight is torch.int64"),
        ({"labels": labels, "weight": weight.clone().requires_grad_()}, "weight requires a gradient"),
        ({"labels": labels, "weight": weight, "z_loss": 0.1}, "z_loss is given with weight"),
        ({"labels": labels, "weight": weight, "return_accuracy": True}, "return_accuracy is given with weight"),
        ({"labels": labels, "weight": weight, "one_pass": True, "label_smoothing": 0.1}, "and label_smoothing"),
        ({"labels": target, "one_pass": True}, "one_pass is given with probabilities"),
        ({"labels": target, "ignore_index": 3}, "ignore_index is 3 with probabilities"),
        ({"labels": target[:, :3]}, "labels has shape"),
        ({"labels": target.double()}, "labels has dtype"),
        ({"labels": target.clone().requires_grad_()}, "labels requires a gradient"),
        ({"labels": target, "label_smoothing": 2.0}, "label_smoothing is 2.0"),
        ({"labels": labels + 100, "weight": weight, "label_smoothing": 0.1}, "labels has"),
        ({"labels": labels + 100, "weight": weight}, "labels has"),
    ):
        with pytest.raises(ArgumentError, match=message):
            rtkernels.cross_entropy(x, **options)


def test_compiles() -> None:
    x, labels, weight, target = make("cpu", torch.float32)
    compiled = torch.compile(rtkernels.cross_entropy, backend="aot_eager", fullgraph=True)
    for options in ({"labels": target}, {"labels": labels, "weight": weight, "label_smoothing": 0.1}):
        leaf = x.clone().requires_grad_()
        compiled(leaf, **options).backward()
        torch.testing.assert_close(leaf.grad, torch.autograd.grad(
            rtkernels.cross_entropy(other := x.clone().requires_grad_(), **options), other)[0])  # fmt: skip
