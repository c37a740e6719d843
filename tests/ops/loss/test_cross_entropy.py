"""Cross entropy: numerics at every place it can run, all modes, bad input, the GPU's own ways."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, running_on
from support.cross_entropy_cases import CASES, MODES, check, cross_entropy, make
from support.places import at, short

from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import cross_entropy_operators as ops
from rtkernels.ops.loss import cross_entropy_plan as plans
from rtkernels.runtime.launch.plans import Plans


@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_90", "cuda")
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make(case, torch.bfloat16, device)
        for mode in MODES:
            check(inputs, "mean", mode, g=1.0 if mode != "one_pass" else 0.37)


@pytest.mark.parametrize("reduction", ("none", "sum"))
@at("cpu", "sm_90", "cuda")
def test_every_reduction(place: str, reduction: str) -> None:
    with running_on(place) as device:
        for case, mode in itertools.product(("plain", "odd", "long_odd", "three_dimensions", "softcap"), MODES):
            check(make(case, torch.bfloat16, device), reduction, mode)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@at("cpu", "sm_80", "cuda")
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    cases = ("plain", "odd_wide", "long_odd", "softcap_everything", "smoothing_long", "unaligned")
    with running_on(place) as device:
        for case, mode in itertools.product(cases, ("two_pass", "one_pass")):
            check(make(case, dtype, device), "mean", mode)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        for case, mode in itertools.product(("plain", "thousand", "long_odd", "one_element"), ("two_pass", "one_pass")):
            check(make(case, torch.bfloat16, device), "mean", mode)
        x = torch.randn(3, 40, device=device, requires_grad=True)
        cross_entropy(x, torch.rand(3, 40, device=device).softmax(-1)).backward()


@pytest.fixture(params=("few", "many"))
def rows_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small tensors go to the kernel for few rows, or to those for many."""
    if request.param == "many":
        monkeypatch.setattr(plans, "few_rows_blocks", lambda *shape: 0)
    Plans.forget_all()
    yield
    Plans.forget_all()


@pytest.mark.parametrize("cols", (40, 33, 17003))
@pytest.mark.usefixtures("rows_as")
@at("cpu", "sm_90", "cuda")
def test_special_values(place: str, cols: int) -> None:
    """NaN and infinities as in torch, in fp64 from the same logits."""
    with running_on(place) as device:
        x = torch.randn(8, cols).bfloat16()
        x[0, 5] = torch.nan
        x[1, 6] = torch.inf
        x[2] = -torch.inf
        x[3, 1:] = -torch.inf  # the label's score is the only one
        x[4, :20] = -torch.inf  # the label is among them: infinite loss
        x[5] = torch.finfo(torch.bfloat16).max
        x[6] = torch.finfo(torch.bfloat16).min
        x[7] *= 1e4
        labels = torch.tensor([1, 2, 3, 0, 4, 5, 6, 7])
        leaf = x.double().requires_grad_()
        wanted = F.cross_entropy(leaf, labels, reduction="none")
        wanted.sum().backward()
        for mode in ("two_pass", "one_pass"):
            mine = x.clone().to(device).requires_grad_()
            loss = cross_entropy(mine, labels.to(device), reduction="none", **MODES[mode])
            loss.sum().backward()
            torch.testing.assert_close(
                loss.detach().cpu().double(), wanted.detach(), equal_nan=True, rtol=1e-5, atol=1e-3
            )
            finite = [0, 2, 3, 4, 5, 6, 7]  # torch's NaN rows are NaN throughout; so are ours, +inf included
            torch.testing.assert_close(
                mine.grad.cpu().double()[finite], leaf.grad[finite], equal_nan=True, rtol=2**-7, atol=1e-6
            )
            assert mine.grad[1].isnan().any()


@at("cpu", "sm_90", "cuda")
def test_rows_that_do_not_count(place: str) -> None:
    """Their logits are ignored; a mean over no rows is 0."""
    with running_on(place) as device:
        for cols, mode in itertools.product((40, 17003), MODES):
            leaf = torch.full((4, cols), torch.nan, device=device, dtype=torch.bfloat16).requires_grad_()
            labels = torch.full((4,), -100, device=device)
            for reduction in ("mean", "sum"):
                leaf.grad = None
                loss, lse, accuracy = cross_entropy(
                    leaf.clone(), labels, reduction=reduction, return_lse=True, return_accuracy=True, **MODES[mode]
                )
                loss.backward()
                assert loss == 0 and accuracy == 0 and (lse == 0).all() and (leaf.grad == 0).all()
        for reduction in ("mean", "sum", "none"):
            nobody = torch.empty(0, 8, device=device, dtype=torch.bfloat16, requires_grad=True)
            loss = cross_entropy(nobody, torch.empty(0, dtype=torch.int64, device=device), reduction=reduction)
            loss.sum().backward()
            assert nobody.grad.shape == (0, 8) and loss.sum() == 0


@at("cpu", "sm_90", "cuda")
def test_accuracy_counts_the_first_of_equal_logits(place: str) -> None:
    with running_on(place) as device:
        for cols, one_pass in itertools.product((40, 17003), (False, True)):
            x = torch.zeros(4, cols, device=device, dtype=torch.bfloat16)
            x[:, 7], x[:, 20] = 1.0, 1.0
            labels = torch.tensor([7, 20, 0, -100], device=device)
            leaf = x.requires_grad_()
            _, hits = cross_entropy(leaf, labels, reduction="none", return_accuracy=True, one_pass=one_pass)
            assert hits.tolist() == [1.0, 0.0, 0.0, 0.0]
            assert cross_entropy(leaf, labels, return_accuracy=True, one_pass=one_pass)[1].item() == pytest.approx(
                1 / 3
            )


# ---- in place, one pass ---------------------------------------------------------------------------------------------


@at("cpu", "sm_90", "cuda")
def test_in_place_uses_the_memory_of_the_logits(place: str) -> None:
    with running_on(place) as device:
        for cols, one_pass in itertools.product((33, 17003), (False, True)):
            leaf = torch.randn(4, cols, device=device, dtype=torch.bfloat16, requires_grad=True)
            logits = leaf * 1.0
            labels = torch.arange(4, device=device)
            grads = []
            logits.register_hook(lambda grad, grads=grads: grads.append(grad.data_ptr()))
            cross_entropy(logits, labels, one_pass=one_pass, in_place=True).backward()
            assert grads == [logits.data_ptr()]
            assert_same_bits(logits.detach(), leaf.grad)


def test_in_place_is_noticed_by_autograd() -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    logits = leaf * 1.0
    other = logits.square().sum()  # keeps the logits
    cross_entropy(logits, torch.arange(4), one_pass=True, in_place=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        other.backward()
    with pytest.raises(ArgumentError, match="logits is a leaf that requires grad"):
        cross_entropy(leaf, torch.arange(4), in_place=True)


@pytest.mark.parametrize("mode", ("one_pass", "in_place"))
def test_a_second_backward_is_refused(mode: str) -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    loss = cross_entropy(leaf * 1.0, torch.arange(4), **MODES[mode])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@at("sm_90", "cuda")
def test_gradient_one_leaves_the_gradient_alone(place: str) -> None:
    with running_on(place) as device:
        x = torch.randn(3, 100, device=device).bfloat16()
        before = x.clone()
        ops.SCALE(x, torch.ones((), device=device))
        assert_same_bits(x, before)
        ops.SCALE(x, torch.tensor([1.0, 2.0, 0.0], device=device))
        assert_same_bits(x, before * torch.tensor([[1.0], [2.0], [0.0]], device=device).bfloat16())


@pytest.mark.parametrize("one_pass", (False, True))
def test_second_order_is_refused(one_pass: bool) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(cross_entropy(x, torch.arange(4), one_pass=one_pass).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
