"""Divergence of two heads from hidden states: values and gradients against float64, special values, bad input."""

from __future__ import annotations

import importlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, running_on
from support.places import DTYPES, at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_divergence_operators as operators

linear_divergence = rtkernels.linear_divergence


def make(dtype: torch.dtype, device: str, vocabulary: int = 303, rows: tuple[int, ...] = (2, 5)) -> list[Tensor]:
    """Student and teacher: hidden states and weights; then the student's bias, the teacher's, and labels."""
    g = torch.Generator().manual_seed(vocabulary)
    shapes = ((*rows, 16), (vocabulary, 16), (*rows, 24), (vocabulary, 24), (vocabulary,), (vocabulary,))
    tensors = [(torch.randn(*s, generator=g) * 0.5).to(dtype).to(device) for s in shapes]
    labels = torch.zeros(rows, dtype=torch.int64)
    labels.view(-1)[1] = -100
    return [*tensors, labels.to(device)]


def exact(tensors: list[Tensor], beta: float, temperature: float) -> Tensor:
    """The divergence of each row, in the dtype of the inputs."""
    student, head, teacher, teacher_head, bias, teacher_bias, labels = tensors
    log_q = (F.linear(student, head, bias) / temperature).log_softmax(-1)
    log_p = (F.linear(teacher, teacher_head, teacher_bias) / temperature).log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    if beta == 0.0:
        terms = torch.where(p == 0, 0.0, p * (log_p - log_q))
    elif beta == 1.0:
        terms = torch.where(q == 0, 0.0, q * (log_q - log_p))
    else:
        log_m = (beta * p + (1 - beta) * q).log()
        terms = beta * torch.where(p == 0, 0.0, p * (log_p - log_m))
        terms = terms + (1 - beta) * torch.where(q == 0, 0.0, q * (log_q - log_m))
    return terms.sum(-1).masked_fill(labels == -100, 0.0)


def check(
    tensors: list[Tensor], beta: float, temperature: float, needs: tuple[int, ...] = (0, 1, 4), **options: Any
) -> None:
    """Compare result and gradients with fp64, from the same rounded inputs."""
    *values, labels = tensors
    leaves = [t.detach().clone().requires_grad_(i in needs) for i, t in enumerate(values)]
    loss = linear_divergence(
        *leaves[:4], beta=beta, temperature=temperature, student_bias=leaves[4], teacher_bias=leaves[5], labels=labels,
        **options,
    )  # fmt: skip
    g = torch.linspace(-1.0, 2.0, loss.numel(), device=loss.device).view(loss.shape)
    loss.backward(g)
    wide = [t.detach().double().requires_grad_(i in needs) for i, t in enumerate(values)]
    wanted = exact([*wide, labels], beta, temperature)
    wanted.backward(g.double())
    dtype = values[0].dtype
    assert loss.dtype == torch.float32 and loss.shape == values[0].shape[:-1]
    assert (loss.double() - wanted).abs().max() <= 3e-6 * wanted.abs().max()
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 0.01, torch.float16: 2e-3}[dtype]
    for i in needs:
        assert leaves[i].grad.dtype == dtype
        assert (leaves[i].grad.double() - wide[i].grad).norm() <= tolerance * wide[i].grad.norm()


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@at()
def test_agrees_with_float64(place: str, dtype: torch.dtype, beta: float) -> None:
    with running_on(place) as device:
        tensors = make(dtype, device)
        check(tensors, beta, 1.0)
        check(tensors, beta, 2.0, chunk_bytes=1)
        check(make(dtype, device, 5, (3,)), beta, 0.7)


@pytest.mark.parametrize("beta", (0.0, 0.3, 1.0))
@pytest.mark.parametrize("save", ("stats", "gradients"))
@at("cpu", "sm_90", "cuda")
def test_either_way_of_saving_agrees_with_float64(place: str, save: str, beta: float) -> None:
    """With chunks of rows whose last is smaller; the head trained, or its hidden states only."""
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            tensors = make(dtype, device, 99, (3, 17))
            check(tensors, beta, 1.5, save=save, chunk_bytes=1)
            check(tensors, beta, 1.0, save=save, needs=(0,))


def test_gradients_that_are_kept_serve_several_backward_passes() -> None:
    """They are of the sum of all rows, so incoming gradients come later; NaN of an ignored row does not count."""
    student, head, teacher, teacher_head, bias, _, labels = make(torch.bfloat16, "cpu")
    leaves = student.clone().requires_grad_(), head.clone().requires_grad_(), bias.clone().requires_grad_()
    loss = linear_divergence(
        *leaves[:2], teacher, teacher_head, beta=0.5, student_bias=leaves[2], labels=labels, save="gradients"
    )
    g = torch.full_like(loss, 2.0**-13)
    once = torch.autograd.grad(loss, leaves, g, retain_graph=True)
    assert all(grad.any() for grad in once)
    g[labels == -100] = torch.nan
    for first, second in zip(once, torch.autograd.grad(loss, leaves, g, retain_graph=True), strict=True):
        assert_same_bits(first, second)
    # A factor that all rows have is taken out before anything is rounded.
    for first, second in zip(once, torch.autograd.grad(loss, leaves, torch.ones_like(loss)), strict=True):
        assert_same_bits(first, second * 2.0**-13)
    assert not any(grad.any() for grad in _gradients_of_zero(leaves, teacher, teacher_head))


def _gradients_of_zero(leaves: tuple[Tensor, ...], teacher: Tensor, teacher_head: Tensor) -> tuple[Tensor, ...]:
    loss = linear_divergence(*leaves[:2], teacher, teacher_head, student_bias=leaves[2], save="gradients")
    return torch.autograd.grad(loss, leaves, torch.zeros_like(loss))


@pytest.mark.parametrize("save", ("stats", "gradients"))
@pytest.mark.parametrize("needs", ((0,), (1,), (4,), (0, 1, 4)))
def test_there_is_no_second_derivative(needs: tuple[int, ...], save: str) -> None:
    """Of any input, whatever else requires a gradient: each raises, and none is taken for 0."""
    tensors = make(torch.float32, "cpu", 7)
    for i in needs:
        leaves = [t.clone().requires_grad_(j in needs) for j, t in enumerate(tensors[:5])]
        loss = linear_divergence(*leaves[:4], beta=0.5, student_bias=leaves[4], save=save).sum()
        (first,) = torch.autograd.grad(loss, leaves[i], create_graph=True)
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(first.square().sum(), leaves[i], allow_unused=True)


def test_kept_gradients_are_multiplied_from_aligned_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, begins = make(torch.bfloat16, "cpu", 700, (3,)), []
    monkeypatch.setattr(operators, "CHUNK_BYTES", 4 * 16 * 333)  # of fp32 sums: 333 rows of the weight

    def product(sums: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
        begins.append(a.storage_offset())
        add_product(sums, a, b, first)

    add_product = operators.add_product
    monkeypatch.setattr(operators, "add_product", product)
    check(tensors, 0.5, 1.0, needs=(1,), save="gradients")
    assert begins[-3:] == [0, 256, 512]


def test_what_is_kept_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("rtkernels.ops.loss.linear_divergence")
    seen = []
    monkeypatch.setattr(module, "FORWARD", lambda *given: seen.append(given[-1]) or forward(*given))
    forward = importlib.import_module("rtkernels.ops.loss.linear_divergence_operators").FORWARD

    def kept(dtype: torch.dtype, rows: int, trains_head: bool = True, level: int = 0, **options: Any) -> int:
        student, head, teacher, teacher_head, *_ = make(dtype, "cpu", 9, (rows,))
        with rtkernels.batch_invariant(level):
            linear_divergence(
                student.requires_grad_(), head.requires_grad_(trains_head), teacher, teacher_head, **options
            )
        return seen[-1]

    bf16 = torch.bfloat16
    assert [kept(bf16, 32), kept(bf16, 33), kept(bf16, 33, False)] == [1, 0, 2]
    assert [kept(bf16, 32, save="stats"), kept(bf16, 33, save="gradients")] == [0, 1]
    assert [kept(torch.float16, 2), kept(torch.float16, 2, False), kept(bf16, 2, level=2)] == [0, 0, 0]
    assert kept(bf16, 2, level=2, save="gradients") == 1


def test_chunks_of_rows() -> None:
    chunks = operators.chunks_of_rows
    assert chunks(0, 10, 0) == [] and chunks(7, 10, 0) == [(0, 7)]
    assert chunks(40, 1000, 1) == [(0, 16), (16, 32), (32, 40)]
    for rows in (128, 500, 8191, 8192, 8200):
        found = chunks(rows, 151936, 4 * 151936 * 512)
        assert found[0][0] == 0 and found[-1][1] == rows
        assert all(a[1] == b[0] for a, b in itertools.pairwise(found))
        assert all((end - first) % 128 == 0 and end - first <= 512 for first, end in found[:-1])


@at("cpu", "sm_90", "cuda")
def test_special_values(place: str) -> None:
    """Columns that a distribution gives no probability, equal distributions, and no rows."""
    with running_on(place) as device:
        student, head, teacher, teacher_head, bias, _, labels = make(torch.float32, device)
        for beta in (0.0, 0.5, 1.0):
            same = linear_divergence(student, head, student, head, beta=beta)
            assert same.abs().max() < 1e-6
            empty = linear_divergence(student[:0], head, teacher[:0], teacher_head, beta=beta)
            assert empty.shape == (0, 5)
        cut = bias.clone()
        cut[:100] = -torch.inf
        for beta, biases in ((0.0, {"teacher_bias": cut}), (1.0, {"student_bias": cut}), (0.5, {"student_bias": cut})):
            given = [
                student,
                head,
                teacher,
                teacher_head,
                biases.get("student_bias"),
                biases.get("teacher_bias"),
                labels,
            ]
            got = linear_divergence(*given[:4], beta=beta, labels=labels, chunk_bytes=1, **biases)
            wide = [t if t is None or not t.is_floating_point() else t.double() for t in given]
            torch.testing.assert_close(got.double(), exact(wide, beta, 1.0), rtol=1e-5, atol=1e-6)
        assert linear_divergence(student, head, teacher, teacher_head, student_bias=cut).isinf().all()


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("save", ("stats", "gradients"))
def test_nan_reaches_gradients_as_in_torch(save: str, place: str) -> None:
    """A row with NaN has NaN gradients, also if its incoming gradient is 0; a row that does not count has none."""
    with running_on(place) as device:
        student, head, teacher, teacher_head, *_ = make(torch.float32, device, rows=(3,))
        student[1, 0] = torch.nan
        for beta in (0.0, 0.5, 1.0):
            for label in (0, -100):
                leaf = student.clone().requires_grad_()
                labels = torch.tensor([0, label, 0], device=device)
                loss = linear_divergence(leaf, head, teacher, teacher_head, beta=beta, labels=labels, save=save)
                loss.backward(torch.tensor([1.0, 0.0, 0.0], device=device))
                found = leaf.grad[1]
                assert found.isnan().all() if label == 0 else not found.any()
                assert leaf.grad[0].isfinite().all() and not leaf.grad[2].any()


@at("cpu", "sm_90")
def test_no_rows_have_zero_gradients(place: str) -> None:
    with running_on(place) as device:
        student, head, teacher, teacher_head, *_ = make(torch.bfloat16, device)
        leaf, states = head.clone().requires_grad_(), student[:0].clone().requires_grad_()
        linear_divergence(states, leaf, teacher[:0], teacher_head).sum().backward()
        assert not leaf.grad.any() and states.grad.shape == states.shape


@at("cpu", "sm_90")
def test_states_without_elements(place: str) -> None:
    """Logits are then the bias."""
    with running_on(place) as device:
        _, _, teacher, teacher_head, bias, teacher_bias, labels = make(torch.float32, device)
        student, head = (torch.empty(*t.shape[:-1], 0, device=device) for t in (teacher, teacher_head))
        check([student, head, teacher, teacher_head, bias, teacher_bias, labels], 0.0, 1.0, needs=(4,))
        got = linear_divergence(student, head, teacher, teacher_head, student_bias=bias)
        assert got.shape == student.shape[:-1] and got.isfinite().all()


def test_every_run_gives_the_same_bits_and_compiles() -> None:
    student, head, teacher, teacher_head, *_, labels = make(torch.float32, "cpu")

    def step(states: Tensor, weight: Tensor) -> Tensor:
        return linear_divergence(states, weight, teacher, teacher_head, beta=0.5, temperature=2.0, labels=labels)

    runs = []
    for function in (step, step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = student.clone().requires_grad_(), head.clone().requires_grad_()
        loss = function(*leaves)
        loss.sum().backward()
        runs.append((loss.detach(), *(leaf.grad for leaf in leaves)))
    for first, second in itertools.product(runs[:1], runs[1:]):
        for got, one in zip(first, second, strict=True):
            assert_same_bits(got, one)


def test_bad_arguments() -> None:
    student, head, teacher, teacher_head, bias, _, labels = make(torch.float32, "cpu")
    cases: list[tuple[str, dict[str, Any]]] = [
        ("student_weight has shape", {"student_weight": head[0]}),
        ("teacher_hidden has shape", {"teacher_hidden": teacher[..., :3]}),
        ("teacher_weight has dtype", {"teacher_weight": teacher_head.half()}),
        ("teacher_weight has rows", {"teacher_weight": teacher_head[:7]}),
        ("teacher_hidden has rows", {"teacher_hidden": teacher[:1]}),
        ("student_bias has shape", {"student_bias": bias[:3]}),
        ("teacher_bias has dtype", {"teacher_bias": bias.half()}),
        ("labels has dtype", {"labels": labels.float()}), ("labels has shape", {"labels": labels[0]}),
        ("beta is 2", {"beta": 2.0}), ("temperature is 0", {"temperature": 0.0}),
        ("chunk_bytes is", {"chunk_bytes": 0}), ("save is 'logits'", {"save": "logits"}),
        ("save is 'gradients' with a group", {"save": "gradients", "group": object()}),
    ]  # fmt: skip
    given = {
        "student_hidden": student, "student_weight": head, "teacher_hidden": teacher, "teacher_weight": teacher_head,
    }  # fmt: skip
    for message, wrong in cases:
        with pytest.raises(ArgumentError, match=message):
            linear_divergence(**(given | wrong))
    halves = {name: t.half().requires_grad_() for name, t in given.items()}
    with pytest.raises(ArgumentError, match="student_hidden has dtype float16"):
        linear_divergence(**halves, save="gradients")
