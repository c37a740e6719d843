"""Linear layer with cross entropy: the same numbers as torch's two steps, gradients, memory, bad input."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_same_bits, running_on
from support.places import at
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.errors import ArgumentError
from rtkernels.ops.loss import linear_cross_entropy as module
from rtkernels.ops.loss import linear_cross_entropy_operators as linear
from rtkernels.ops.loss import linear_cross_entropy_slabs as slabs

linear_cross_entropy = rtkernels.linear_cross_entropy
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.2, "z_loss": 0.01},
    "softcap": {"softcap": 2.0},
}


def make(dtype: torch.dtype, device: str, vocabulary: int = 1003, rows: tuple[int, ...] = (2, 5)) -> tuple[Tensor, ...]:
    """Hidden states, weight, bias, labels: the same numbers on every device, one row ignored."""
    generator = torch.Generator().manual_seed(vocabulary)
    shapes = ((*rows, 16), (vocabulary, 16), (vocabulary,))
    hidden, weight, bias = ((torch.randn(*s, generator=generator) * 0.5).to(dtype).to(device) for s in shapes)
    labels = torch.randint(0, vocabulary, rows, generator=generator)
    labels.view(-1)[1] = -100
    return hidden, weight, bias, labels.to(device)


def exact(leaves: list[Tensor | None], labels: Tensor, reduction: str, options: dict[str, Any]) -> Tensor:
    """The loss in fp64."""
    z = F.linear(*leaves).flatten(0, -2)
    if cap := options.get("softcap"):
        z = cap * torch.tanh(z / cap)
    flat = labels.flatten()
    loss = F.cross_entropy(z, flat, reduction="none", label_smoothing=options.get("label_smoothing", 0.0))
    loss = loss + options.get("z_loss", 0.0) * torch.where(flat == -100, 0.0, z.logsumexp(-1)).square()
    if reduction == "none":
        return loss.view(labels.shape)
    return loss.sum() / ((flat != -100).sum() if reduction == "mean" else 1)


def check(tensors: tuple[Tensor, ...], reduction: str, with_bias: bool, g: float, **options: Any) -> list[Tensor]:
    """Run forward and backward and compare with fp64; return loss and gradients."""
    *values, labels = tensors
    values = values if with_bias else values[:2]
    dtype = values[0].dtype
    leaves = [v.detach().clone().requires_grad_() for v in values]
    extra = {k: options.pop(k) for k in ("chunk_rows", "fp32_weight_grad") if k in options}
    bias = leaves[2] if with_bias else None
    loss = linear_cross_entropy(leaves[0], leaves[1], labels, bias=bias, reduction=reduction, **options, **extra)
    dloss = torch.linspace(0.5, 1.5, loss.numel(), device=loss.device).view(loss.shape) if loss.dim() else None
    loss.backward(torch.full_like(loss, g) if dloss is None else dloss)

    wide = [v.double().requires_grad_() for v in values]
    wanted = exact(wide if with_bias else [*wide, None], labels, reduction, options)
    wanted.backward(torch.full_like(wanted, g) if dloss is None else dloss.double())
    # Logits and their gradient are rounded to the dtype, then summed up by the GEMM.
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.03, torch.float16: 4e-3}[dtype]
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.detach().double(), wanted.detach(), rtol=tolerance, atol=tolerance)
    for leaf, other in zip(leaves, wide, strict=True):
        assert leaf.grad.dtype == dtype and leaf.grad.shape == leaf.shape
        error = (leaf.grad.double() - other.grad).norm() / other.grad.norm()
        assert error < tolerance, error
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@at("cpu", "sm_90", "cuda")
def test_agrees_with_two_steps(place: str, reduction: str) -> None:
    with running_on(place) as device:
        tensors = make(torch.bfloat16, device)
        for name, with_bias in itertools.product(OPTIONS, (False, True)):
            check(tensors, reduction, with_bias, g=1.0 if with_bias else 0.3, chunk_rows=4, **OPTIONS[name])
        check(tensors, reduction, False, 1.0)  # chunks by rule
        check(tensors, reduction, False, 1.0, chunk_rows=3, fp32_weight_grad=True)
        check(make(torch.bfloat16, device, 20000, (3,)), reduction, False, 1.0)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32))
@at("cpu", "cuda")
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for options in OPTIONS.values():
            check(make(dtype, device), "mean", True, 1.0, chunk_rows=4, **options)


@at("cpu", "sm_90", "cuda")
def test_extra_results_and_no_gradient(place: str) -> None:
    with running_on(place) as device:
        both = {"return_lse": True, "return_accuracy": True}
        hidden, weight, bias, labels = make(torch.bfloat16, device)
        for reduction, needs in itertools.product(("mean", "none"), (False, True)):
            states = hidden.clone().requires_grad_(needs)
            loss, lse, accuracy = linear_cross_entropy(
                states,
                weight,
                labels,
                bias=bias,
                reduction=reduction,
                return_lse=True,
                return_accuracy=True,
                chunk_rows=3,
            )
            wanted = rtkernels.cross_entropy(F.linear(hidden, weight, bias), labels, reduction=reduction, **both)
            for got, one in zip((loss, lse, accuracy), wanted, strict=True):
                torch.testing.assert_close(got.detach(), one, rtol=1e-5, atol=1e-5)
            assert loss.requires_grad == needs


@at("cpu", "sm_90", "cuda")
def test_only_the_gradients_that_are_needed(place: str) -> None:
    with running_on(place) as device:
        for needed in range(3):
            *leaves, labels = make(torch.bfloat16, device)
            leaves[needed].requires_grad_()
            linear_cross_entropy(leaves[0], leaves[1], labels, bias=leaves[2]).backward()
            assert [leaf.grad is not None for leaf in leaves] == [i == needed for i in range(3)]


@at("cpu", "sm_90", "cuda")
def test_nothing_counts(place: str) -> None:
    with running_on(place) as device:
        for rows in ((0,), (3,)):
            hidden, weight, _, _ = make(torch.bfloat16, device, rows=(5,))
            states, weight = hidden[: rows[0]].requires_grad_(), weight.requires_grad_()
            loss = linear_cross_entropy(states, weight, torch.full(rows, -100, device=device))
            loss.backward()
            assert loss == 0 and (weight.grad == 0).all() and (states.grad is None or (states.grad == 0).all())


def test_chunk_rule() -> None:
    rule = linear.default_chunk_rows
    assert rule(32768, 4096, 151936) == 4096
    assert rule(9000, 4096, 151936) == 3072  # about equal, in whole tiles
    assert rule(8192, 0, 151936) == 896  # without a gradient of the weight
    assert rule(16384, 256, 32000) == 4096  # 256 MiB of logits whatever the hidden size
    assert rule(5, 4096, 32) == 5
    assert rule(1, 16, 151936) == 1
    assert rule(0, 16, 151936) == 1
    weight = torch.empty(151936, 4096, dtype=torch.bfloat16, device="meta")
    small = 256 << 20
    assert [slabs.suits(rows, weight, small, True) for rows in (100, 8192, 8193)] == [False, True, False]
    assert [slabs.suits(rows, weight, small, False) for rows in (100, 6144, 6145)] == [False, True, False]
    assert not slabs.suits(4096, weight.float(), small, True)


def test_rule_of_few_chunks() -> None:
    rule = linear.rounding_chunk_rows
    assert rule(8192, 4096, 151936) == 2048
    assert rule(16384, 4096, 151936) == 4096 and rule(32768, 4096, 151936) == 8192
    assert rule(32769, 4096, 151936) == 0  # sums in fp32 take no more memory
    assert rule(6200, 4096, 151936) == 1664  # four, about equal, in whole tiles
    assert rule(16384, 1536, 151936) == 0 and rule(8192, 1536, 151936) == 2048
    assert rule(5, 4096, 32) == 5 and rule(0, 16, 32) == 1
    assert rule(1 << 20, 16, 32) == 1 << 20  # small logits, one chunk
    assert rule(1 << 23, 16, 32) == 0
    for rows, size in itertools.product((1, 900, 4097, 9999, 70000), (64, 1024, 4096)):
        chunk = rule(rows, size, 151936)
        assert chunk == 0 or -(-rows // chunk) <= 4


def test_at_most_four_roundings_unless_one_is_asked_for(nothing_is_small: None) -> None:
    """The gradient of the weight alone, by chunks of rows and rounded once, beside torch's."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(n, 128, generator=generator).bfloat16() for n in (512, 3000))
    labels = torch.randint(0, 3000, (512,), generator=generator)

    def error(loss: Callable[[Tensor], Tensor], spread: float) -> float:
        leaf = (weight * (spread / 128**0.5)).requires_grad_()
        loss(leaf).backward()
        wide = leaf.detach().double().requires_grad_()
        F.cross_entropy(hidden.double() @ wide.t(), labels).backward()
        return float((leaf.grad - wide.grad).norm() / wide.grad.norm())

    def ours(leaf: Tensor, **options: Any) -> Tensor:
        return linear_cross_entropy(hidden, leaf, labels, **options)

    for spread, most in ((1.0, 1.65), (5.0, 1.1)):
        once = error(lambda leaf: ours(leaf, fp32_weight_grad=True), spread)
        theirs = error(lambda leaf: F.cross_entropy((hidden @ leaf.t()).float(), labels), spread)
        assert once < 1.02 * theirs
        assert once < error(ours, spread) < most * once


@pytest.fixture
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests exercise the handling of large tensors, with small ones."""
    monkeypatch.setattr(linear, "_SMALL", 0)
    monkeypatch.setattr(slabs, "slab_columns", lambda device: 128)


@pytest.mark.parametrize("reduction", ("mean", "sum", "none"))
@at("cpu", "sm_90", "cuda")
def test_slabs_of_the_vocabulary(place: str, reduction: str, nothing_is_small: None) -> None:
    with running_on(place) as device:
        tensors = make(torch.bfloat16, device, 300)
        for name, with_bias in itertools.product(OPTIONS, (False, True)):
            check(tensors, reduction, with_bias, g=1.0 if with_bias else 0.3, **OPTIONS[name])
        check(make(torch.float16, device, 256), reduction, True, 1.0)
        assert {slab.is_kept for slab in slabs.plan(32, 300, 16, 128)} == {True, False}
        for with_bias, once in itertools.product((False, True), repeat=2):  # once: some logits are computed twice
            given = {**OPTIONS[name], "fp32_weight_grad": once}
            check(make(torch.bfloat16, device, 300, (2, 16)), reduction, with_bias, 1.0, **given)
        *values, wrong = make(torch.bfloat16, device, 300)
        wrong[0, 0] = 300
        with pytest.raises(ArgumentError, match="labels has 300 in row 0"):
            linear_cross_entropy(values[0], values[1].requires_grad_(), wrong.int()).backward()
            rtkernels.check_labels()
        for once in (False, True):  # more rows: chunks, added in 16 bits and in fp32
            check(make(torch.bfloat16, device, 300, (2, 25)), reduction, False, 1.0, fp32_weight_grad=once)
        check(make(torch.bfloat16, device, 300, (10, 20)), reduction, False, 1.0)  # many rows: in fp32
        hidden, weight, bias, labels = tensors
        both = {"return_lse": True, "return_accuracy": True, "reduction": reduction}
        got = linear_cross_entropy(hidden, weight.requires_grad_(), labels, bias=bias, **both)
        wanted = linear_cross_entropy(hidden, weight, labels, bias=bias, chunk_rows=3, **both)
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("small", (0, linear._SMALL))
@at("cpu", "cuda")
def test_gradient_of_the_weight_is_rounded_once(
    place: str, small: int, nothing_is_small: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As close to exact as torch's two steps, for any number of rows and any method."""
    monkeypatch.setattr(linear, "_SMALL", small)
    with running_on(place) as device:
        for rows in (30, 1000):
            hidden, weight, _, labels = make(torch.bfloat16, device, 331, (rows,))
            exactly = _gradients(_two_steps, hidden.double(), weight.double(), labels)
            theirs = _gradients(_two_steps, hidden, weight, labels)
            ours = _gradients(linear_cross_entropy, hidden, weight, labels)
            for right, one, other in zip(exactly, ours, theirs, strict=True):
                assert (one - right).norm() <= 1.05 * (other - right).norm()


def _two_steps(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(hidden, weight)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), labels)


def _gradients(loss_of: Callable[..., Tensor], hidden: Tensor, weight: Tensor, labels: Tensor) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in (hidden, weight)]
    loss_of(*leaves, labels).backward()
    return [leaf.grad.double() for leaf in leaves]


def test_autocast() -> None:
    hidden, weight, _, labels = make(torch.float32, "cpu")
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        linear_cross_entropy(hidden.bfloat16(), weight, labels).backward()
    assert weight.grad.dtype == torch.float32


def test_second_backward_and_second_order_are_refused() -> None:
    hidden, weight, _, labels = make(torch.float32, "cpu")
    hidden.requires_grad_()
    loss = linear_cross_entropy(hidden, weight, labels)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (first,) = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels).square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


H, W, LABELS = torch.randn(4, 8).bfloat16(), torch.randn(20, 8).bfloat16(), torch.arange(4)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: linear_cross_entropy(H.double(), W, LABELS), "hidden has dtype float64; expected one of"),
    "weight dtype": (lambda: linear_cross_entropy(H, W.half(), LABELS), "weight has dtype float16; expected bfloat16"),
    "weight shape": (lambda: linear_cross_entropy(H, W[0], LABELS), r"weight has shape \(8,\); expected \[vocabulary"),
    "hidden shape": (
        lambda: linear_cross_entropy(H[:, :4], W, LABELS),
        r"hidden has shape \(4, 4\); expected \[..., 8\]",
    ),
    "bias shape": (
        lambda: linear_cross_entropy(H, W, LABELS, bias=W[:3, 0]),
        r"bias has shape \(3,\); expected",
    ),
    "labels shape": (lambda: linear_cross_entropy(H, W, LABELS[:2]), r"labels has shape \(2,\); expected \(4,\)"),
    "labels dtype": (lambda: linear_cross_entropy(H, W, LABELS.float()), "labels has dtype float32; expected one of"),
    "bad label": (lambda: linear_cross_entropy(H, W, LABELS + 17), "labels has 20 in row "),
    "bad label with gradient": (
        lambda: linear_cross_entropy(H.clone().requires_grad_(), W, LABELS + 17),
        "labels has 20 in row ",
    ),
    "chunk": (
        lambda: linear_cross_entropy(H, W, LABELS, chunk_rows=0),
        "chunk_rows is 0; expected at least 1",
    ),
    "reduction": (lambda: linear_cross_entropy(H, W, LABELS, reduction=""), "reduction is ''; expected one of 'none'"),
    "softcap": (lambda: linear_cross_entropy(H, W, LABELS, softcap=-1), "softcap is -1; expected a positive number"),
    "smoothing": (lambda: linear_cross_entropy(H, W, LABELS, label_smoothing=2.0), "label_smoothing is 2.0; expected"),
    "not a tensor": (lambda: linear_cross_entropy([1.0], W, LABELS), "expected a torch.Tensor or an array"),
}


@pytest.mark.parametrize("name", BAD)
@at("cpu", "sm_90")
def test_error_messages(place: str, name: str) -> None:
    call, message = BAD[name]
    with running_on(place), pytest.raises(ArgumentError, match=message):
        call()


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    def block(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return (
            linear_cross_entropy(hidden * 2, weight, labels, z_loss=0.01)
            + linear_cross_entropy(hidden + 1, weight, labels, reduction="none").sum()
        )

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    hidden, weight, _, labels = make(torch.float32, place)
    results = []
    for function in (compiled, block):
        leaves = [t.clone().requires_grad_() for t in (hidden, weight)]
        loss = function(*leaves, labels)
        (loss * 1.5).backward()
        results.append([loss.detach(), *(leaf.grad for leaf in leaves)])
    torch.testing.assert_close(*results)


def test_bench_row_agrees_with_torch() -> None:
    hidden, weight, _, labels = make(torch.float32, "cpu", rows=(6,))
    (row,) = rows_of(module.OP.name)
    inputs = {"hidden": hidden, "weight": weight, "labels": labels}
    torch.testing.assert_close(row.ours(**inputs), row.torch(**inputs), rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", (2048, 4096))
def test_memory_next_to_gradients(rows: int) -> None:
    size, vocabulary = 1024, 100352
    hidden = torch.randn(rows, size, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(vocabulary, size, device="cuda", dtype=torch.bfloat16) / 32).requires_grad_()
    labels = torch.randint(0, vocabulary, (rows,), device="cuda")

    def peak(**options: Any) -> int:
        linear_cross_entropy(hidden, weight, labels, **options).backward()
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        linear_cross_entropy(hidden, weight, labels, **options).backward()
        return torch.cuda.max_memory_allocated() - before

    of_weight, of_hidden, little = 2 * vocabulary * size, 2 * rows * size, 2**21
    assert peak(chunk_rows=256) <= 256 * vocabulary * 2 + of_weight + of_hidden + little
    assert peak() <= (33 / 16 if rows <= 2 * size else 3) * of_weight + 2 * of_hidden + little


@pytest.mark.gpu
def test_equal_bits_twice() -> None:
    tensors = make(torch.bfloat16, "cuda", 20001, (300,))
    first, second = (check(tensors, "mean", False, 1.0) for _ in range(2))
    for a, b in zip(first, second, strict=True):
        assert_same_bits(a, b)
