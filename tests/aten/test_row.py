"""Softmax, norms and losses of aten on our kernels, with gradients; rows of nothing but -inf as torch has them."""

from __future__ import annotations

import itertools

import pytest
import torch
from support.overrides import compare, device_of, taken
from support.places import at, emulated

import rtkernels
from rtkernels.aten import row
from rtkernels.emulator import EmulatorError
from rtkernels.ops.reduce import nll_loss, row_norm, weight_norm

PLACES = ("sm_90", "cuda")


@emulated
@at(*PLACES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax(place: str, dtype: torch.dtype, function) -> None:
    def both(x: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        y = function(x, -1)
        y.backward(dy)
        return y.detach(), x.grad

    inf, nan = torch.inf, torch.nan
    special = torch.tensor([[1.0, -inf, 2.0], [-inf, -inf, -inf], [inf, 1.0, 2.0], [nan, 1.0, 2.0]])
    tolerance = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for x in (torch.randn(3, 40), torch.randn(5, 1), torch.randn(2, 7, 16), torch.randn(4, 6)[:, ::2], special):
        compare(place, "row", both, x.to(dtype), torch.randn(x.shape).to(dtype), **tolerance)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("function", [torch.softmax, torch.log_softmax])
def test_softmax_of_other_dimensions(place: str, function) -> None:
    def both(x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        results = []
        for dim in range(x.dim() - 1):
            given = x.detach().clone().requires_grad_()
            y = function(given, dim)
            y.backward(dy)
            results += [y.detach(), given.grad]
        return results

    special = torch.randn(4, 3)
    special[:, 0], special[1, 1], special[2, 2] = -torch.inf, -torch.inf, torch.nan
    for x in (torch.randn(3, 5), torch.randn(2, 19, 8), torch.randn(3, 1, 7), torch.randn(2, 3, 4, 36), special):
        compare(place, "row", both, x, torch.randn(x.shape), rtol=1e-5, atol=1e-5)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    ("shape", "over"),
    [((3, 40), 1), ((5, 1), 1), ((2, 7, 6), 2), ((300, 40), 1), ((5, 9000), 1), ((4, 5, 33), 1)],
    ids=str,
)
@pytest.mark.parametrize("affine", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_layer_norm(place: str, shape: tuple[int, ...], over: int, affine: bool) -> None:
    def both(x: torch.Tensor, dy: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        given = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
        y = torch.nn.functional.layer_norm(given[0], shape[-over:], *given[1:])
        y.backward(dy)
        return [y.detach(), *(t.grad for t in given)]

    torch.manual_seed(0)
    parameters = [torch.randn(shape[-over:]) for _ in range(2)] if affine else []
    compare(place, "row", both, torch.randn(shape) + 3, torch.randn(shape), *parameters, rtol=1e-4, atol=1e-4)


@at("sm_80", "cuda")
def test_gradients_of_layer_norm_that_nobody_wants_are_none(place: str) -> None:
    for wanted in itertools.product((True, False), repeat=3):
        with torch.device(device_of(place)), taken(place, "native_layer_norm_backward"):
            given = torch.randn(6, 40), torch.randn(6, 40), [40], torch.randn(6, 1), torch.rand(6, 1)
            for _ in range(2):
                result = torch.ops.aten.native_layer_norm_backward(*given, torch.randn(40), torch.randn(40), wanted)
                assert tuple(gradient is not None for gradient in result) == wanted


@emulated
@at(*PLACES)
@pytest.mark.parametrize("shape", [(3, 40), (5, 1), (2, 7, 33)], ids=str)
def test_rms_norm(place: str, shape: tuple[int, ...]) -> None:
    """Called through its handlers: a torch without CUDA has no operator for them."""
    device, over = device_of(place), shape[-1:]
    given = [torch.randn(size, device=device, requires_grad=True) for size in (shape, over)]
    want = torch.nn.functional.rms_norm(given[0], over, given[1], 1e-5)
    dy = torch.randn(shape, device=device)
    expected = torch.autograd.grad(want, given, dy)
    x, weight = (t.detach() for t in given)
    with taken(place, "row"):
        y, rstd = row._rms_norm(x, over, weight, 1e-5)
        grads = row._rms_norm_backward(dy, x, over, rstd, weight, [True, True])
    for a, b in zip((y, *grads), (want, *expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layer_norm_of_halves_keeps_fp32_statistics(dtype: torch.dtype) -> None:
    x, weight, bias = torch.randn(33, 1000, device="cuda").to(dtype), *torch.randn(2, 1000, device="cuda").to(dtype)
    compare("cuda", "row", lambda x, w, b: torch.native_layer_norm(x, (1000,), w, b, 1e-5), x, weight, bias)


@emulated
@at(*PLACES)
@pytest.mark.parametrize(
    ("shape", "groups"),
    # Channels that end inside of a vector; one element each; rows in two slices.
    [((2, 6, 3, 2), 3), ((3, 4), 2), ((1, 3, 19, 29), 1), pytest.param((1, 4, 60, 70), 2, marks=pytest.mark.slow)],
    ids=str,
)
@pytest.mark.parametrize("affine", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_group_norm(place: str, shape: tuple[int, ...], groups: int, affine: bool) -> None:
    def both(x: torch.Tensor, dy: torch.Tensor, *parameters: torch.Tensor) -> list[torch.Tensor]:
        given = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
        y = torch.nn.functional.group_norm(given[0], groups, *given[1:])
        y.backward(dy)
        return [y.detach(), *(t.grad for t in given)]

    torch.manual_seed(0)
    parameters = [torch.randn(shape[1]) for _ in range(2)] if affine else []
    compare(place, "row", both, torch.randn(shape) + 3, torch.randn(shape), *parameters, rtol=1e-4, atol=1e-4)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_nll_loss(place: str, reduction: str, weighted: bool) -> None:
    def both(x: torch.Tensor, target: torch.Tensor, *weight: torch.Tensor) -> list[torch.Tensor]:
        x = x.detach().clone().requires_grad_()
        loss = torch.nn.functional.nll_loss(x, target, *weight, ignore_index=2, reduction=reduction)
        loss.backward(torch.full_like(loss, 1.5))
        return [loss.detach(), x.grad]

    torch.manual_seed(0)
    for shape in ((5, 8), (7, 7), (2, 4, 3, 5), (1, 70, 8, 8), (2, 3, 9, 120), (5000, 3)):
        places = shape[:1] + shape[2:]
        target = torch.randint(0, shape[1], places)
        weight = [torch.rand(shape[1])] if weighted else []
        compare(place, "row", both, torch.randn(shape), target, *weight, rtol=1e-5, atol=1e-5)
    ignored = torch.full((3,), 2)
    compare(place, "row", both, torch.randn(3, 4), ignored, *([torch.rand(4)] if weighted else []))


@emulated
@at(*PLACES)
def test_nll_loss_of_other_strides(place: str) -> None:
    for x in (torch.randn(2, 3, 5, 4).permute(0, 3, 1, 2), torch.randn(6, 5).t(), torch.randn(4, 6)[:, ::2]):
        target = torch.randint(0, x.shape[1], x.shape[:1] + x.shape[2:])
        compare(place, "row", torch.nn.functional.nll_loss, x, target, rtol=1e-5, atol=1e-5)


@emulated
def test_a_target_outside_of_the_classes_stops_the_kernel() -> None:
    with rtkernels.emulate("sm_90"), pytest.raises(EmulatorError) as raised:
        nll_loss.nll_loss(torch.randn(3, 4, 1), torch.tensor([[0], [4], [1]]), None, -100, 1)
    assert raised.value.kind == "trap"


@emulated
def test_the_gradient_of_nll_loss_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The 64-bit divisions that the kernel uses for 2^31 elements and more."""
    monkeypatch.setattr(nll_loss, "divisor", lambda n: 0)
    x, target = torch.randn(6, 8, requires_grad=True), torch.randint(0, 8, (6,))
    dy = torch.randn(6)
    torch.nn.functional.nll_loss(x, target, reduction="none").backward(dy)
    with rtkernels.emulate("sm_90"):
        dx = nll_loss.nll_loss_grad(dy, target, None, torch.zeros(()), 8, 1, -100, 0)
    torch.testing.assert_close(dx.view(6, 8), x.grad)


def _close(got: torch.Tensor, want: torch.Tensor, terms: int = 1) -> None:
    step = {torch.bfloat16: 2**-8, torch.float16: 2**-11, torch.float32: 2**-19}[got.dtype]
    torch.testing.assert_close(got.double().view(want.shape), want, rtol=step, atol=terms**0.5 * 2**-18)


@emulated
@at("sm_80", "sm_90")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("rows", "cols", "off"), [(300, 40, 0), (300, 40, 1), (7, 4104, 0), (3, 1031, 0), (70, 264, 8)]
)
def test_norms_of_16_bits_and_odd_addresses(place: str, dtype: torch.dtype, rows: int, cols: int, off: int) -> None:
    """Vectors and single elements, groups of lanes and blocks, and several slices of rows for the parameters."""
    torch.manual_seed(0)
    x, dy, w, b, g = (torch.randn(n + 16).to(dtype)[off:] for n in (*[rows * cols] * 2, cols, cols, rows))
    x, dy = (t[: rows * cols].view(rows, cols) for t in (x, dy))
    w, b, g = w[:cols], b[:cols], g[:rows]
    with rtkernels.emulate(place):
        for centered in (True, False):
            y, mean, rstd = row_norm.FORWARD(x, w, b if centered else None, 1, centered, 1e-5)
            statistics = (mean if centered else None, rstd)
            dx = row_norm.BACKWARD(dy, x, w, *statistics, 1)
            dw, db = row_norm.PARAMETERS(dy, x, *statistics, 1, centered)
            middle = x.double().mean(1, keepdim=True) if centered else 0.0
            inverse = ((x.double() - middle).square().mean(1, keepdim=True) + 1e-5).rsqrt()
            z, grads = (x.double() - middle) * inverse, dy.double() * w.double()
            _close(y, z * w.double() + (b.double() if centered else 0.0))
            _close(rstd, inverse)
            taken_away = grads.mean(1, keepdim=True) if centered else 0.0
            _close(dx, inverse * (grads - taken_away - z * (grads * z).mean(1, keepdim=True)), 16)
            _close(dw, (dy.double() * z).sum(0), 64 * rows)
            if centered:
                _close(db, dy.double().sum(0), 64 * rows)
        result, norms = weight_norm.weight_norm(x, g)
        dv, dg = weight_norm.weight_norm_grads(dy, x, g, norms)
    length, along = x.double().norm(dim=1, keepdim=True), (dy.double() * x.double()).sum(1, keepdim=True)
    _close(norms, length)
    _close(result, x.double() * g.double()[:, None] / length)
    _close(dg, along / length, cols)
    _close(dv, g.double()[:, None] * (dy.double() / length - x.double() * along / length**3), 16)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("shape", [(5, 7), (3, 4, 6), (2, 9000)], ids=str)
def test_weight_norm(place: str, shape: tuple[int, ...]) -> None:
    def both(v: torch.Tensor, g: torch.Tensor, dw: torch.Tensor) -> list[torch.Tensor]:
        given = [t.detach().clone().requires_grad_() for t in (v, g)]
        w, norms = torch.ops.aten._weight_norm_interface(*given, 0)
        w.backward(dw)
        return [w.detach(), norms, *(t.grad for t in given)]

    g = torch.randn(shape[0], *[1] * (len(shape) - 1))
    compare(place, "row", both, torch.randn(shape), g, torch.randn(shape), rtol=1e-4, atol=1e-5)


@emulated
@at(*PLACES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(
    ("shape", "channels_last"),
    # Channels innermost; vectors over several channels; slices of the batch; channels that end inside of a vector.
    [((9, 6), False), ((2, 3, 5), False), ((300, 2, 16), False), ((2, 40, 3, 4), True), ((700, 5), False)],
    ids=str,
)
def test_batch_norm(place: str, shape: tuple[int, ...], channels_last: bool, affine: bool, training: bool) -> None:
    def both(x, dy, mean, var, *parameters: torch.Tensor) -> list[torch.Tensor]:
        given = [t.detach().clone().requires_grad_() for t in (x, *parameters)]
        mean, var = mean.clone(), var.clone()
        with torch.backends.cudnn.flags(enabled=False):
            y = torch.nn.functional.batch_norm(given[0], mean, var, *given[1:], training=training, momentum=0.3)
            y.backward(dy)
        return [y.detach(), mean, var, *(t.grad for t in given)]

    torch.manual_seed(0)
    x, dy = torch.randn(shape) * 2 + 3, torch.randn(shape)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    statistics = torch.randn(shape[1]), torch.rand(shape[1]) + 0.1
    parameters = [torch.randn(shape[1]) for _ in range(2)] if affine else []
    compare(place, "row", both, x, dy, *statistics, *parameters, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", ["same", "float"])
@pytest.mark.parametrize("shape", [(4, 33, 7, 9), (257, 129), (2, 64, 32, 32)], ids=str)
def test_batch_norm_of_halves(dtype: torch.dtype, parameters: str, shape: tuple[int, ...]) -> None:
    """Torch's own sums of products are less exact: the reference is in fp64, of the same rounded operands."""

    def both(x, dy, *rest: torch.Tensor) -> list[torch.Tensor]:
        x, (weight, bias) = x.detach().clone().requires_grad_(), [t.detach().clone().requires_grad_() for t in rest[:2]]
        mean, var = (t.clone() for t in rest[2:])
        with torch.backends.cudnn.flags(enabled=False):
            y = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True)
            y.backward(dy)
        return [y.detach(), mean, var, x.grad, weight.grad, bias.grad]

    x, dy = (torch.randn(shape, device="cuda").to(dtype) for _ in range(2))
    rest = [torch.rand(shape[1], device="cuda").to(dtype if parameters == "same" else torch.float32) for _ in range(4)]
    exact = both(*(t.double() for t in (x, dy, *rest)))
    with taken("cuda", "row"):
        got = both(x, dy, *rest)
    rounding = 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    for a, b in zip(got, exact, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1.05 * rounding, atol=2e-3 * float(b.abs().max()))
