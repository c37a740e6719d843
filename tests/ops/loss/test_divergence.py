"""KL and Jensen-Shannon divergences: numerics at every place they can run, gradients, reductions, errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.places import at, error_tests, order_test, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.loss import divergence as module

kl_div, jsd = rtkernels.kl_div, rtkernels.jsd
LOSSES = ("kl", "kl_log", "jsd_0", "jsd_0.1", "jsd_0.5", "jsd_1")
REDUCTIONS = ("batchmean", "mean", "sum", "none")


# ---- inputs: one list for every place -------------------------------------------------------------------------------


@dataclass
class Inputs:
    x: Tensor
    target: Tensor
    labels: Tensor | None = None


Logs = Callable[..., Tensor]


def _labels(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


CASES: dict[str, Callable[[Logs], Inputs]] = {
    "plain": lambda n: Inputs(n(5, 64), n(5, 64)),
    "three_dimensions": lambda n: Inputs(n(2, 3, 40), n(2, 3, 40)),
    "one_dimension": lambda n: Inputs(n(24), n(24)),
    "one_column": lambda n: Inputs(n(37, 1), n(37, 1)),
    "odd": lambda n: Inputs(n(3, 33), n(3, 33)),
    "one_warp": lambda n: Inputs(n(9, 512), n(9, 512)),
    "several_warps": lambda n: Inputs(n(3, 5000), n(3, 5000)),
    "loop": lambda n: Inputs(n(2, 10_008), n(2, 10_008)),
    "odd_wide": lambda n: Inputs(n(2, 1027), n(2, 1027)),
    "many_short_rows": lambda n: Inputs(n(530, 8), n(530, 8)),
    "strided_rows": lambda n: Inputs(n(10, 80)[::2, :64], n(5, 72)[:, 8:]),
    "unaligned": lambda n: Inputs(n(5, 64), n(5, 65)[:, 1:]),
    "transposed": lambda n: Inputs(n(48, 6).t(), n(6, 48)),
    "expanded": lambda n: Inputs(n(4, 48), n(1, 48).expand(4, 48)),
    "same": lambda n: (lambda a: Inputs(a, a.clone()))(n(4, 48)),
    "labels": lambda n: Inputs(n(5, 64), n(5, 64), _labels(3, -100, 0, -100, 7)),
    "labels_int32": lambda n: Inputs(n(2, 2, 65), n(2, 2, 65), _labels(3, -100, 0, -1, dtype=torch.int32).view(2, 2)),
    "labels_strided": lambda n: Inputs(n(2, 64), n(2, 64), _labels(-100, 1, 2, 3)[::2]),
    "all_ignored": lambda n: Inputs(n(2, 64), n(2, 64), _labels(-100, -100)),
    "no_rows": lambda n: Inputs(n(0, 16), n(0, 16)),
    "no_columns": lambda n: Inputs(n(4, 0), n(4, 0)),
}


def make(case: str, dtype: torch.dtype, device: str) -> Inputs:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))

    def logs(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=generator) * 2).log_softmax(-1).to(dtype).to(device)

    inputs = CASES[case](logs)
    if inputs.labels is not None:
        inputs.labels = inputs.labels.to(device)
    return inputs


def run(loss: str, x: Tensor, target: Tensor, **options: Any) -> Tensor:
    """Call the function a loss is named after; targets are given as logarithms."""
    if loss == "kl":
        return kl_div(x, target, **options)
    if loss == "kl_log":
        return kl_div(x, target, log_target=True, **options)
    return jsd(x, target, beta=float(loss.removeprefix("jsd_")), **options)


def exact(loss: str, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Terms, and gradients of their sum, in fp64 by the plain formulas and torch's own autograd."""
    x, t = x.detach().double().requires_grad_(), t.detach().double().requires_grad_()
    p, q = t.exp(), x.exp()
    if loss in ("kl", "kl_log", "jsd_0"):
        terms = torch.nn.functional.kl_div(x, t, reduction="none", log_target=loss != "kl")
    elif loss == "jsd_1":
        terms = torch.nn.functional.kl_div(t, x, reduction="none", log_target=True)
    else:
        beta = float(loss.removeprefix("jsd_"))
        m = (beta * p + (1 - beta) * q).log()
        terms = beta * p * (t - m) + (1 - beta) * q * (x - m)
    grads = torch.autograd.grad(terms.sum(), (x, t))
    return terms.detach(), *grads


def check(inputs: Inputs, loss: str, reduction: str) -> tuple[Tensor, ...]:
    """Run forward and backward and hold every element to its error budget."""
    target = inputs.target.float().exp().to(inputs.x.dtype) if loss == "kl" else inputs.target
    x, t = inputs.x.detach().requires_grad_(), target.detach().requires_grad_(loss != "kl")
    y = run(loss, x, t, reduction=reduction, labels=inputs.labels)
    without = run(loss, x.detach(), t.detach(), reduction=reduction, labels=inputs.labels)
    assert_same_bits(without, y.detach(), "loss without gradients")
    incoming = torch.linspace(-1, 2, max(y.numel(), 1))[: y.numel()].view(y.shape).to(y.dtype).to(y.device)
    y.backward(incoming)

    terms, dx, dt = exact(loss, x, t)
    kept = torch.ones(x.shape[:-1], dtype=torch.bool, device=x.device)
    if inputs.labels is not None:
        kept = inputs.labels != -100
    mask = kept.unsqueeze(-1).double()
    terms, dx, dt = (v * mask for v in (terms, dx, dt))
    rows = int(kept.sum()) if inputs.labels is not None or loss[:3] == "jsd" or x.dim() == 1 else x.shape[0]
    if x.dim() == 1 and loss[:2] == "kl":
        rows = len(x)
    count = {"batchmean": rows, "mean": int(kept.sum()) * x.shape[-1], "sum": 1, "none": 1}[reduction]
    scale = incoming.double() / max(count, 1)

    # What is added up has magnitudes about |p log p|; 16-bit inputs take exponentials and logarithms good to 2^-20.
    fine = 2.0**-24 if x.dtype == torch.float32 else 2.0**-20
    p, q = t.double().abs() if loss == "kl" else t.double().exp(), x.double().exp()
    size = (p + q) * (4 + x.double().abs().clamp_max(60) + t.double().abs().clamp_max(60)) * mask
    slack = 8 * fine / ROUNDOFF[x.dtype]
    if reduction == "none":
        assert y.dtype == x.dtype and y.shape == x.shape and y.is_contiguous()
        assert_close(y, terms, scale=terms.abs() + slack * size, c=1.01, what="loss")
    else:
        assert y.dtype == torch.float32 and y.shape == ()
        budget = (terms.sum().abs() + 8 * fine * 2**24 * size.sum()) / max(count, 1)
        assert_close(y, terms.sum() / max(count, 1), scale=budget, c=1.01, what="loss")
    for name, leaf, wanted in (("dx", x, dx), ("dtarget", t, dt)):
        if leaf.requires_grad:
            budget = (wanted.abs() + slack * size) * scale.abs()
            assert_close(leaf.grad, wanted * scale, scale=budget, c=1.02, what=name)
    return y.detach(), x.grad


@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_90", "cuda")
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        for loss in ("kl", "kl_log", "jsd_0.1"):
            for reduction in ("batchmean", "none"):
                check(make(case, torch.bfloat16, device), loss, reduction)


@pytest.mark.parametrize("dtype", (torch.float16, torch.float32), ids=short)
@pytest.mark.parametrize("loss", LOSSES)
@at()
def test_every_loss(place: str, loss: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("plain", "odd", "labels"):
            for reduction in REDUCTIONS:
                check(make(case, dtype, device), loss, reduction)


@pytest.mark.parametrize("loss", LOSSES)
@at("cpu", "sm_90", "cuda")
def test_one_pass(place: str, loss: str) -> None:
    """The same loss and gradient; an incoming gradient is applied afterwards."""
    with running_on(place) as device:
        for case in ("plain", "odd", "labels", "all_ignored", "several_warps", "no_rows"):
            inputs = make(case, torch.bfloat16, device)
            target = inputs.target.float().exp().to(inputs.x.dtype) if loss == "kl" else inputs.target
            results = []
            for one_pass, factor in ((False, 1.0), (True, 1.0), (True, 0.5)):
                x = inputs.x.detach().clone().requires_grad_()
                y = run(loss, x, target, reduction="mean", labels=inputs.labels, one_pass=one_pass)
                (y * factor).backward()
                results.append((y.detach(), x.grad / factor))
            for other in results[1:]:
                for a, b in zip(results[0], other, strict=True):
                    assert_same_bits(a, b)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        check(make("plain", torch.bfloat16, device), "jsd_0.5", "batchmean")


test_thread_order_does_not_matter = order_test(
    lambda case: check(make(case[0], torch.bfloat16, "cpu"), case[1], "mean"),
    *(("several_warps", "jsd_0.5"), ("labels", "kl"), ("many_short_rows", "kl_log")),
)


@at("cpu", "sm_90", "cuda")
def test_no_probability(place: str) -> None:
    """Where one distribution has no mass, or both have none, nothing becomes NaN that has a limit."""
    nothing = -torch.inf
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            x = torch.tensor([[-1.0, nothing, nothing, -200.0]], device=device).to(dtype).requires_grad_()
            t = torch.tensor([[nothing, -1.0, nothing, -200.0]], device=device).to(dtype).requires_grad_()
            kl = kl_div(x, t, log_target=True, reduction="none")
            assert kl[0, 0] == 0 and kl[0, 1] == torch.inf and kl[0, 2] == 0 and kl[0, 3] == 0
            mixed = jsd(x, t, reduction="none")
            mixed.backward(torch.ones_like(mixed))
            wanted = torch.tensor([0.5, 0.5, 0, 0], dtype=torch.float64, device=device) * np.exp(-1) * np.log(2)
            torch.testing.assert_close(mixed[0].double(), wanted, rtol=1e-2, atol=1e-6)
            assert x.grad.isfinite().all() and t.grad.isfinite().all()
            assert x.grad[0, 1] == 0 and t.grad[0, 0] == 0
            zero = torch.tensor([[0.0, 1.0, 0.0, 0.0]], device=device).to(dtype)
            assert kl_div(x.detach().clamp_min(-3), zero, reduction="none")[0].tolist() == [0, 3, 0, 0]
            bad = x.detach().clone()
            bad[0, 0] = torch.nan
            assert jsd(bad, t.detach()).isnan() and kl_div(bad, t.detach().clamp_min(-5), log_target=True).isnan()


@at("cpu", "sm_90", "cuda")
def test_ignored_rows_are_not_looked_at(place: str) -> None:
    with running_on(place) as device:
        for cols in (64, 33):
            x, t = torch.randn(2, 3, cols, device=device).log_softmax(-1).bfloat16()
            labels = torch.tensor([1, 5, 2], device=device)
            losses = []
            for value in (torch.nan, 0.0):
                x[1], t[1] = value, value
                leaf = x.clone().requires_grad_()
                loss = jsd(leaf, t, labels=labels, ignore_index=5)
                loss.backward()
                assert (leaf.grad[1] == 0).all() and leaf.grad.isfinite().all()
                losses.append(loss.detach())
            assert_same_bits(*losses)


def test_small_differences_keep_their_digits() -> None:
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    t = (x + 1e-3 * torch.randn(4, 100, generator=torch.Generator().manual_seed(1))).log_softmax(-1)
    wanted = exact("jsd_0.5", x, t)[0].sum() / 4
    for place in ("cpu", "sm_90") if rtkernels.emulator.unavailable() is None else ("cpu",):
        with running_on(place):
            assert abs(jsd(x, t).double() - wanted) < 0.01 * wanted


@at("cpu", "sm_90", "cuda")
def test_from_logits(place: str) -> None:
    with running_on(place) as device:
        generator = torch.Generator().manual_seed(0)
        x, t = (torch.randn(2, 4, 24, generator=generator) * 3).to(device)
        for temperature in (1.0, 2.5):
            a, b = x.clone().requires_grad_(), x.double().requires_grad_()
            loss = kl_div(a, t, from_logits=True, temperature=temperature)
            logs = (torch.log_softmax(v.double() / temperature, -1) for v in (b, t))
            wanted = torch.nn.functional.kl_div(*logs, reduction="batchmean", log_target=True) * temperature**2
            for v in (loss, wanted):
                v.backward()
            torch.testing.assert_close(loss.double(), wanted, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(a.grad.double(), b.grad, rtol=1e-4, atol=1e-6)
            each = jsd(x, t, from_logits=True, temperature=temperature, reduction="none")
            total = jsd(x, t, from_logits=True, temperature=temperature, reduction="sum")
            torch.testing.assert_close(each.sum(), total)


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides")
def test_agrees_with_torch() -> None:
    x = torch.randn(3, 4, 10).log_softmax(-1)
    t = torch.randn(3, 4, 10).softmax(-1)
    for reduction in REDUCTIONS:
        for shape in ((3, 4, 10), (12, 10), (120,)):
            wanted = torch.nn.functional.kl_div(x.view(shape), t.view(shape), reduction=reduction)
            torch.testing.assert_close(kl_div(x.view(shape), t.view(shape), reduction=reduction), wanted)


def test_gradients_can_be_taken_twice() -> None:
    x, t = torch.randn(2, 3, 16).log_softmax(-1)
    x = x.clone().requires_grad_()
    loss = jsd(x, t)
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(2 * loss, x)
    torch.testing.assert_close(2 * first, second)
    (first,) = torch.autograd.grad(jsd(x, t).square(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.zeros(4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: kl_div(X.double(), X.double()), "input has dtype float64; expected one of bfloat16, float16"),
    "target dtype": (lambda: jsd(X, X.half()), "target has dtype float16; expected float32, that of input"),
    "target shape": (lambda: jsd(X, X[:1]), r"target has shape \(1, 8\); expected \(4, 8\), that of input"),
    "no dimensions": (lambda: kl_div(X[0, 0], X[0, 0]), "input has no dimensions; expected at least one"),
    "logits": (lambda: jsd(X, X.double(), from_logits=True), "target has dtype float64; expected one of bfloat16"),
    "labels": (lambda: jsd(X, X, labels=[1]), "labels is a list; expected a torch.Tensor or None"),
    "labels shape": (
        lambda: jsd(X, X, labels=torch.zeros(8, dtype=torch.int64)),
        r"labels has shape \(8,\); expected \(4,\), that of input without its last one",
    ),
    "labels dtype": (lambda: jsd(X, X, labels=torch.zeros(4)), "labels has dtype float32; expected one of int32"),
    "beta": (lambda: jsd(X, X, beta=1.5), "beta is 1.5; expected 0 to 1"),
    "reduction": (lambda: kl_div(X, X, reduction="average"), "reduction is 'average'; expected one of none, mean"),
    "temperature": (lambda: jsd(X, X, from_logits=True, temperature=0.0), "temperature is 0.0; expected a positive"),
    "temperature of logs": (lambda: jsd(X, X, temperature=2.0), "temperature is 2.0 for log-probabilities; expected 1"),
    "target gradient": (
        lambda: kl_div(X, X.clone().requires_grad_()),
        "target requires grad; expected none, or log_target=True",
    ),
    "grad": (
        lambda: module.BACKWARD(X, X, X, None, torch.zeros(2), 0, 1, 0.0, False),
        "grad has dtype float32 and 32 elements; expected one float32 number",
    ),
    "grad shape": (
        lambda: module.BACKWARD(X[:2], X, X, None, None, 0, 1, 0.0, False),
        r"grad has shape \(2, 8\); expected \(4, 8\), that of input",
    ),
    "not a tensor": (lambda: jsd([0.0], X), "expected a torch.Tensor or an array with __dlpack__"),
}


test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, t: Tensor, labels: Tensor) -> Tensor:
        x, t = x.log_softmax(-1), t.log_softmax(-1)
        return kl_div(x, t, log_target=True) + jsd(x, t, labels=labels) + jsd(x, t, beta=1.0, reduction="none").sum()

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 4):
        x, t = torch.randn(2, rows, 16, device=place)
        labels = torch.arange(rows, device=place)
        grads = []
        for function in (compiled, block):
            leaf = x.clone().requires_grad_()
            function(leaf, t, labels).backward()
            grads.append(leaf.grad)
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.log(np.full((3, 8), 1 / 8, dtype=np.float32))
    loss = jsd(x, x, labels=np.array([1, 2, -100]))
    assert isinstance(loss, np.ndarray) and loss == 0


def test_bench_rows_agree_with_torch() -> None:
    x, t = torch.randn(2, 4, 32).log_softmax(-1)
    for row in rows_of(module.OP.name):
        inputs = {"x": x, "target": t}
        torch.testing.assert_close(row.ours(**inputs), row.torch(**inputs))


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1000, 4096, 32_000, 32_768, 50_257, 151_936))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)
    x, t = (torch.randn(300, cols, generator=generator, device="cuda").log_softmax(-1) for _ in range(2))
    for loss in ("kl_log", "jsd_0.5"):
        for dtype in (torch.bfloat16, torch.float32):
            inputs = Inputs(x.to(dtype), t.to(dtype))
            first, second = (check(inputs, loss, "batchmean") for _ in range(2))
            for a, b in zip(first, second, strict=True):
                assert_same_bits(a, b)


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    rows, cols = 2**16 + 3, 2**15
    if torch.cuda.mem_get_info()[0] < 8 * rows * cols:
        pytest.skip("not enough free GPU memory")
    x = torch.full((rows, cols), -10.0, device="cuda", dtype=torch.bfloat16)
    t = torch.full((rows, cols), -11.0, device="cuda", dtype=torch.bfloat16)
    total = module.FORWARD(x, t, None, -100, 1, 0.0, 1.0 / rows, False)
    wanted = -np.exp(-11.0) * cols
    assert abs(total[0].item() - wanted) < 1e-4 * abs(wanted)
    dx = module.BACKWARD(torch.ones((), device="cuda"), x, t, None, total, -100, 1, 0.0, False)
    assert dx[-1, -1] == dx[0, 0] and dx.isfinite().all()


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x, t = (torch.randn(64, 5000, device="cuda").log_softmax(-1).bfloat16() for _ in range(2))
    labels, one = torch.arange(64, device="cuda") % 5, torch.ones((), device="cuda")

    def compute() -> tuple[Tensor, ...]:
        total = module.FORWARD(x, t, labels, 3, 2, 0.5, 1.0, True)
        return total, module.BACKWARD(one, x, t, labels, total, 3, 2, 0.5, False)

    replay = captured(compute)
    x.copy_(torch.randn(64, 5000, device="cuda").log_softmax(-1))
    labels.copy_(torch.arange(64, device="cuda") % 4)
    assert_equal_bits(replay(), compute())
