"""Divergence from a teacher that names its likeliest tokens: values and gradients, TRL's code, bad input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import DTYPES, at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

linear_divergence = rtkernels.linear_divergence
VOCABULARY, K = 303, 6


def make(dtype: torch.dtype, device: str, k: int = K) -> dict[str, Tensor]:
    """A student, and a teacher's tokens and their log-probabilities; one entry and one row do not count."""
    g = torch.Generator().manual_seed(k)
    hidden, weight, bias = (
        (torch.randn(*s, generator=g) * 0.5).to(dtype) for s in ((2, 5, 16), (VOCABULARY, 16), (VOCABULARY,))
    )
    logprobs, ids = torch.randn(2, 5, VOCABULARY, generator=g).mul(3).log_softmax(-1).topk(k)
    if k > 1:
        logprobs[0, 0, -1], ids[0, 0, -1] = -torch.inf, -1
    logprobs[1, 2] = -torch.inf
    labels = torch.zeros(2, 5, dtype=torch.int64)
    labels[0, 1] = -100
    tensors = {
        "student_hidden": hidden, "student_weight": weight, "student_bias": bias, "teacher_ids": ids,
        "teacher_logprobs": logprobs, "labels": labels,
    }  # fmt: skip
    return {name: t.to(device) for name, t in tensors.items()}


def exact(
    hidden: Tensor, weight: Tensor, bias: Tensor, given: dict[str, Tensor], beta: float, temperature: float, tail: bool
) -> Tensor:
    """The divergence of each row, row by row in float64."""
    z = (hidden @ weight.t() + bias) / temperature
    rows = []
    for row in range(10):
        log_q, log_p = (
            t.reshape(10, -1)[row].double() for t in (z.log_softmax(-1), given["teacher_logprobs"])
        )  # fmt: skip
        inside = log_p > -torch.inf
        if given["labels"].view(-1)[row] == -100 or not inside.any():
            rows.append(z.new_zeros(()))
            continue
        q, p = log_q[given["teacher_ids"].reshape(10, -1)[row][inside]].exp(), log_p[inside].exp()
        if tail:
            q, p = (torch.cat((x, 1 - x.sum(keepdim=True, dim=0))) for x in (q, p))
        else:
            q, p = q / q.sum(), p / p.sum()
        m = q if beta == 0 else p if beta == 1 else beta * p + (1 - beta) * q
        of_p, of_q = (p * (p / m).log()).sum(), (q * (q / m).log()).sum()
        rows.append(of_p if beta == 0 else of_q if beta == 1 else beta * of_p + (1 - beta) * of_q)
    return torch.stack(rows).view(2, 5)


@pytest.mark.parametrize("tail", (True, False))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@at("cpu", "sm_90", "cuda")
def test_agrees_with_float64(place: str, dtype: torch.dtype, tail: bool) -> None:
    with running_on(place) as device:
        for beta, temperature, k in ((0.0, 1.0, K), (0.3, 2.0, 1), (1.0, 0.7, K)):
            given = make(dtype, device, k)
            names = ("student_hidden", "student_weight", "student_bias")
            leaves = [given[name].detach().clone().requires_grad_() for name in names]
            loss = linear_divergence(
                **(given | dict(zip(names, leaves, strict=True))), beta=beta, temperature=temperature, tail=tail
            )
            wide = [given[name].double().requires_grad_() for name in names]
            wanted = exact(*wide, given, beta, temperature, tail)
            assert loss.dtype == torch.float32 and loss.shape == (2, 5)
            torch.testing.assert_close(loss.double(), wanted, rtol=2e-5, atol=2e-6)
            if k == 1 and not tail:
                continue  # one class: no gradient but that of rounding
            g = torch.linspace(-1.0, 2.0, 10, device=device).view(2, 5)
            loss.backward(g)
            wanted.backward(g.double())
            tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.01, torch.float16: 2e-3}[dtype]
            for leaf, other in zip(leaves, wide, strict=True):
                assert leaf.grad.dtype == dtype
                assert (leaf.grad.double() - other.grad).norm() <= tolerance * other.grad.norm()


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("tail", (True, False))
def test_equals_trl(beta: float, tail: bool) -> None:
    module = pytest.importorskip("trl.experimental.server_distillation.server_distillation_trainer")
    given = make(torch.float32, "cpu")
    given["teacher_logprobs"][1, 2] = given["teacher_logprobs"][1, 1]  # TRL's gradients are NaN without any token
    hidden = given["student_hidden"].clone().requires_grad_()
    ours = linear_divergence(**(given | {"student_hidden": hidden}), beta=beta, tail=tail)
    (mine,) = torch.autograd.grad(ours.sum(), hidden)
    log_q = (hidden @ given["student_weight"].t() + given["student_bias"]).log_softmax(-1)
    support = given["teacher_logprobs"] > -torch.inf
    q = log_q.gather(-1, given["teacher_ids"].clamp(min=0)).masked_fill(~support, -torch.inf)
    p = given["teacher_logprobs"]
    if tail:
        (q, inside), (p, _) = module._add_tail_bucket(q, support), module._add_tail_bucket(p, support)
    else:
        q, p, inside = q - q.logsumexp(-1, keepdim=True), p - p.logsumexp(-1, keepdim=True), support
    theirs = module._jsd_divergence(q, p, beta, inside).sum(-1).masked_fill(given["labels"] == -100, 0.0)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    (other,) = torch.autograd.grad(theirs.sum(), hidden)
    if other.isfinite().all():  # not beside entries of -inf, in some of its forms
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-6)
    assert mine.isfinite().all()


def test_compiles_whole() -> None:
    given = make(torch.float32, "cpu")

    def step(hidden: Tensor) -> Tensor:
        return linear_divergence(**(given | {"student_hidden": hidden}), beta=0.3)

    runs = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        hidden = given["student_hidden"].clone().requires_grad_()
        loss = function(hidden)
        loss.sum().backward()
        runs.append((loss.detach(), hidden.grad))
    for first, second in zip(*runs, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-6, atol=1e-7)


def test_bad_arguments() -> None:
    given = make(torch.float32, "cpu")
    ids, logprobs, hidden = given["teacher_ids"], given["teacher_logprobs"], given["student_hidden"]
    cases: list[tuple[str, dict[str, Any]]] = [
        ("teacher_ids has shape", {"teacher_ids": ids[0]}), ("teacher_ids has shape", {"teacher_ids": ids[..., :0]}),
        ("teacher_ids has dtype", {"teacher_ids": ids.float()}),
        ("teacher_logprobs has shape", {"teacher_logprobs": logprobs[..., :2]}),
        ("teacher_logprobs has dtype", {"teacher_logprobs": ids}),
        ("teacher_logprobs is None", {"teacher_logprobs": None}),
        ("teacher_ids is None", {"teacher_ids": None}), ("teacher_hidden is given", {"teacher_hidden": hidden}),
        ("teacher_hidden is None", {"teacher_ids": None, "teacher_logprobs": None}), ("beta is 2", {"beta": 2.0}),
        ("labels has shape", {"labels": given["labels"][0]}), ("labels has dtype", {"labels": hidden[..., 0]}),
        ("temperature is 0", {"temperature": 0.0}), ("without a group", {"vocab_size": 303}),
        ("ids has 303 in place", {"teacher_ids": ids.clone().fill_(303)}),
    ]  # fmt: skip
    for message, wrong in cases:
        with pytest.raises(ArgumentError, match=message):
            linear_divergence(**(given | wrong))
