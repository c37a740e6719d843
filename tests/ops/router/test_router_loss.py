"""router_z_loss and load_balancing_loss: values and gradients at every place they can run, errors, compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.places import DTYPES, at, error_tests, order_test, short
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.router import router_loss as module

router_z_loss, load_balancing_loss = rtkernels.router_z_loss, rtkernels.load_balancing_loss

SHAPES = {"plain": (40, 256), "odd": (3, 7, 33), "sequences": (4, 5, 60), "few": (2, 9, 8), "wide": (2, 2, 1024)}
SCORES = ("softmax", "sigmoid", None)


def make(name: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits and choices: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = (torch.randn(SHAPES[name], generator=generator) * 2).to(dtype).to(device)
    indices = torch.topk(torch.rand(SHAPES[name], generator=generator), 3).indices.to(device)
    return x, indices


def exact_balance(x: Tensor, indices: Tensor, score: str | None, sequence_dim: int | None) -> Tensor:
    """The loss by its definition, in fp64."""
    experts, k = x.shape[-1], indices.shape[-1]
    s = x
    if score is not None:
        s = torch.softmax(x, -1) if score == "softmax" else torch.sigmoid(x)
        s = s / s.sum(-1, keepdim=True)
    chosen = torch.nn.functional.one_hot(indices, experts).sum(-2).double()
    if sequence_dim is None:
        chosen, s, sequence_dim = chosen.reshape(1, -1, experts), s.reshape(1, -1, experts), 1
    return experts * (chosen.mean(sequence_dim) / k * s.mean(sequence_dim)).sum(-1).mean()


def compare(x: Tensor, ours: Callable[[Tensor], Tensor], exact: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Hold loss and gradient to their budgets; return both."""
    leaf, wide = x.detach().requires_grad_(), x.detach().double().requires_grad_()
    loss, wanted = ours(leaf), exact(wide)
    assert loss.dtype == torch.float32 and loss.shape == ()
    assert_same_bits(ours(x.detach()), loss.detach(), "loss without gradients")
    size = wanted.detach().abs() + x.detach().double().abs().mean()
    assert_close(loss.detach(), wanted.detach(), c=100, scale=size, what="loss")
    (loss * 3).backward()
    (wanted * 3).backward()
    slack = 20 * ROUNDOFF[torch.float32] / ROUNDOFF[x.dtype]
    size = wide.grad.abs() + slack * (wide.grad.abs() + wide.grad.abs().amax())
    assert_close(leaf.grad, wide.grad, c=1.01, scale=size, what="dlogits")
    return loss.detach(), leaf.grad


def check(name: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Every loss of a case."""
    x, indices = make(name, dtype, device)
    found = [*compare(x, lambda t: router_z_loss(t, 0.5), lambda t: 0.5 * torch.logsumexp(t, -1).square().mean())]
    for score in SCORES:
        for dim in (None, 0, 1) if x.dim() == 3 else (None,):
            found += compare(
                x,
                lambda t, score=score, dim=dim: load_balancing_loss(t, indices, score=score, sequence_dim=dim),
                lambda t, score=score, dim=dim: exact_balance(t, indices, score, dim),
            )
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("name", SHAPES)
@at()
def test_every_case(place: str, name: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        check(name, dtype, device)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        check("few", torch.float32, device)


test_thread_order_does_not_matter = order_test(lambda case: check(case, torch.float32, "cpu"), "plain")


@at("cpu", "sm_90", "cuda")
def test_counts_instead_of_indices(place: str) -> None:
    with running_on(place) as device:
        x, indices = make("sequences", torch.float32, device)
        routing = rtkernels.topk_router(x, 3)
        by_counts = load_balancing_loss(x, counts=routing.counts, k=3, coefficient=0.1)
        assert_same_bits(by_counts, load_balancing_loss(x, routing.indices, coefficient=0.1))
        counts = torch.nn.functional.one_hot(indices, 60).sum((1, 2)).int()
        by_counts = load_balancing_loss(x, counts=counts, k=3, sequence_dim=1)
        assert_same_bits(by_counts, load_balancing_loss(x, indices, sequence_dim=1))


@at("cpu", "sm_90", "cuda")
def test_dropped_choices_are_not_counted(place: str) -> None:
    with running_on(place) as device:
        indices = torch.tensor([[0, -1], [5, 2], [2, 99]], dtype=torch.int32, device=device)
        assert module.COUNTS(indices, 6, -1).tolist() == [1, 0, 2, 0, 0, 1]


@at("cpu", "sm_90", "cuda")
def test_no_tokens(place: str) -> None:
    with running_on(place) as device:
        x = torch.zeros(0, 8, device=device, requires_grad=True)
        indices = torch.zeros(0, 2, dtype=torch.int32, device=device)
        for loss in (router_z_loss(x), load_balancing_loss(x, indices)):
            assert loss == 0
            loss.backward()


@pytest.mark.parametrize("score", ("softmax", "sigmoid"))
@at("cpu", "sm_90", "cuda")
def test_a_token_of_minus_infinity_adds_nothing(place: str, score: str) -> None:
    """As in softmax: its scores are 0, and so is its gradient; it still counts as a token of the mean."""
    with running_on(place) as device:
        for name in SHAPES:
            x, indices = make(name, torch.float32, device)
            x.view(-1, x.shape[-1])[1] = -torch.inf
            leaf = x.clone().requires_grad_()
            loss = load_balancing_loss(leaf, indices, score=score)
            loss.backward()
            others = torch.ones(x.shape[:-1], dtype=torch.bool, device=device)
            others.view(-1)[1] = False
            counts = module.COUNTS(indices, x.shape[-1], -1)
            wanted = load_balancing_loss(x[others], counts=counts, k=indices.shape[-1], score=score)
            share = (others.sum() / others.numel()) ** 2  # f and P are both divided by one token more
            torch.testing.assert_close(loss.detach(), wanted * share, rtol=1e-5, atol=1e-6)
            assert (leaf.grad.view(-1, x.shape[-1])[1] == 0).all() and leaf.grad.isfinite().all()


X, CHOSEN = torch.ones(4, 6, 8), torch.zeros(4, 6, 2, dtype=torch.int32)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: router_z_loss(X.double()), "logits has dtype float64; expected one of bfloat16"),
    "no dimensions": (lambda: router_z_loss(torch.tensor(1.0)), "logits has no dimensions; expected at least one"),
    "score": (
        lambda: load_balancing_loss(X, CHOSEN, score="relu"),
        "score is 'relu'; expected 'softmax', 'sigmoid' or None",
    ),
    "nothing": (lambda: load_balancing_loss(X, k=2), "indices and counts are None; expected one of them"),
    "no k": (
        lambda: load_balancing_loss(X, counts=CHOSEN[0, 0]),
        "k is None; expected a number where no indices are given",
    ),
    "indices shape": (
        lambda: load_balancing_loss(X, CHOSEN[:2]),
        r"indices has leading shape \(2, 6\); expected \(4, 6\)",
    ),
    "indices dtype": (
        lambda: load_balancing_loss(X, CHOSEN.float()),
        "indices has dtype float32; expected one of int32",
    ),
    "counts shape": (
        lambda: load_balancing_loss(X, counts=torch.zeros(8, dtype=torch.int32), k=2, sequence_dim=1),
        r"counts has shape \(8,\); expected \(4, 8\)",
    ),
    "counts dtype": (lambda: load_balancing_loss(X, counts=torch.zeros(8), k=2), "counts has dtype float32; expected"),
    "sequence_dim": (lambda: load_balancing_loss(X, CHOSEN, sequence_dim=2), "sequence_dim is 2 for logits of shape"),
    "not a tensor": (lambda: router_z_loss([1.0]), "expected a torch.Tensor or an array with __dlpack__"),
}
test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(router_z_loss(x).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    def losses(x: Tensor, indices: Tensor) -> Tensor:
        return router_z_loss(x, 0.1) + load_balancing_loss(x, indices, sequence_dim=1)

    compiled = torch.compile(losses, fullgraph=True, backend="aot_eager")
    x, indices = make("sequences", torch.float32, place)
    grads = []
    for function in (compiled, losses):
        leaf = x.clone().requires_grad_()
        function(leaf, indices).backward()
        grads.append(leaf.grad)
    torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.zeros((5, 8), dtype=np.float32)
    np.testing.assert_allclose(router_z_loss(x), np.log(8) ** 2, rtol=1e-6)
    np.testing.assert_allclose(load_balancing_loss(x, np.zeros((5, 2), dtype=np.int64)), 1.0, rtol=1e-6)


def test_bench_rows_agree_with_torch() -> None:
    for row in rows_of(module.OP.name):
        inputs = row.make("cpu", torch.Generator().manual_seed(0))
        torch.testing.assert_close(row.ours(**inputs), row.torch(**inputs), rtol=1e-4, atol=1e-10)


@pytest.mark.gpu
def test_equal_bits_twice_on_many_rows() -> None:
    x = torch.randn(50_000, 256, device="cuda")
    counts = rtkernels.topk_router(x, 8).counts
    results = [(router_z_loss(x), load_balancing_loss(x, counts=counts, k=8)) for _ in range(3)]
    for z, balance in results:
        assert_same_bits(z, results[0][0])
        assert_same_bits(balance, results[0][1])
    torch.testing.assert_close(
        results[0][0].double(), torch.logsumexp(x.double(), -1).square().mean(), rtol=1e-5, atol=0
    )
