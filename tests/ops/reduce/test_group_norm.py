"""Group normalisation: values and gradients at every layout, with and without silu, errors, and compilation."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.compare import ROUNDOFF, assert_close, assert_no_worse, assert_same_bits, running_on
from support.places import DTYPES, at, short
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.reduce import group_norm_plan

# Shape of x and number of groups: whole vectors, channels that end inside of one, one element in each, several slices.
SHAPES = {
    "image": ((2, 8, 4, 4), 4),
    "odd": ((2, 6, 3, 3), 3),
    "no pixels": ((3, 8), 2),
    "sequence": ((1, 4, 37), 1),
    "every channel": ((2, 4, 5, 8), 4),
    "slices": ((1, 2, 72, 64), 1),
    "empty": ((0, 4, 3), 2),
}
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "dense": lambda x: x,
    "transposed": lambda x: x.transpose(-1, -2).contiguous().transpose(-1, -2),
    "misaligned": lambda x: torch.cat([x.flatten()[:1], x.flatten()])[1:].view(x.shape),
    "expanded": lambda x: x[:1].expand_as(x),
}


def make(shape: tuple[int, ...], dtype: torch.dtype, device: str, parameters: str) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    w, b = (torch.randn(shape[1], generator=generator) for _ in range(2))
    kind = torch.float32 if "fp32" in parameters else dtype
    return {
        "x": (3 * x + 5).to(dtype).to(device), "dy": dy.to(dtype).to(device),
        "weight": None if "no weight" in parameters else w.to(kind).to(device),
        "bias": None if "no bias" in parameters else b.to(kind).to(device),
    }  # fmt: skip


def exact(x: Tensor, dy: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, act: str | None):
    """Return y and the gradients in float64."""
    leaves = [None if t is None else t.detach().double().requires_grad_() for t in (x, weight, bias)]
    ones = torch.ones(x.shape[1], dtype=torch.float64, device=x.device)  # torch has no gradient of a bias alone
    y = F.group_norm(leaves[0], groups, ones if weight is None else leaves[1], leaves[2])
    y = y if act is None else F.silu(y)
    y.backward(dy.double())
    return y.detach(), *(None if t is None else t.grad for t in leaves)


def check(given: dict[str, Any], groups: int, act: str | None) -> None:
    leaves = [None if t is None else t.detach().requires_grad_() for t in (given["x"], given["weight"], given["bias"])]
    y = rtkernels.group_norm(*leaves, groups=groups, act=act)
    assert y.is_contiguous() and y.dtype == given["x"].dtype
    y.backward(given["dy"])
    assert_same_bits(
        rtkernels.group_norm(*(None if t is None else t.detach() for t in leaves), groups=groups, act=act), y
    )
    wanted = exact(**given, groups=groups, act=act)
    for what, got, want in zip(
        ("y", "dx", "dweight", "dbias"),
        (y.detach(), *(t if t is None else t.grad for t in leaves)),
        wanted,
        strict=True,
    ):
        if want is not None and want.numel():
            # One rounding, and a few of fp32 (2^-20 behind the fast exponential of 16-bit types) of the largest term.
            fast = 2.0**-18 if given["x"].dtype != torch.float32 else 2.0**-20
            slack = fast / ROUNDOFF[got.dtype] * (8 + want.abs().amax())
            assert_close(got, want, c=1.05, scale=want.abs() + slack, what=what)


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_slices_of_many_vectors(dtype: torch.dtype, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row in one slice, as where rows are many: threads have several vectors, some of them one more than others."""
    monkeypatch.setattr(group_norm_plan, "device_info", lambda device: SimpleNamespace(sm_count=1))
    with running_on(place) as device:
        given = make((4, 2, 73, 64), dtype, device, "")
        x = given["x"].requires_grad_()
        y = rtkernels.group_norm(x, given["weight"], given["bias"], groups=1, act="silu")
        y.backward(given["dy"])
        for got, want in zip((y.detach(), x.grad), exact(**given, groups=1, act="silu"), strict=False):
            fast = 2.0**-18 if dtype != torch.float32 else 2.0**-20
            assert_close(got, want, c=1.05, scale=want.abs() + fast / ROUNDOFF[dtype] * (8 + want.abs().amax()))


@at("sm_80", "sm_90", "cuda")
def test_sums_over_long_planes(place: str) -> None:
    """Sums of 9600 fp32 terms per channel: measured against their magnitudes, as gradients are what is left of them.

    The largest part of the error is the rounded mean (5), times the sum of dy. In this case torch on the CPU, in fp32,
    is off by four times as much.
    """
    with running_on(place) as device:
        given = make((1, 2, 100, 96), torch.float32, device, "")
        leaves = [given[name].requires_grad_() for name in ("x", "weight", "bias")]
        rtkernels.group_norm(*leaves, groups=1, act="silu").backward(given["dy"])
        wanted = exact(**given, groups=1, act="silu")[2:]
        x, w, b = (t.detach().double() for t in leaves)
        z = F.group_norm(x, 1)
        before_act = z * w.view(-1, 1, 1) + b.view(-1, 1, 1)
        gate = before_act.sigmoid()
        g = given["dy"].double() * (gate + before_act * gate * (1 - gate))
        for got, want, terms in zip((t.grad for t in leaves[1:]), wanted, (g * z, g), strict=True):
            assert_close(got, want, c=0.25, scale=terms.abs().sum((0, 2, 3)))


@at()
@pytest.mark.parametrize("act", [None, "silu"])
@pytest.mark.parametrize("case", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_values_and_gradients(dtype: torch.dtype, case: str, act: str | None, place: str) -> None:
    shape, groups = SHAPES[case]
    with running_on(place) as device:
        check(make(shape, dtype, device, ""), groups, act)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("parameters", ["fp32", "no weight", "no bias", "no weight, no bias", "fp32, no weight"])
def test_parameters(parameters: str, place: str) -> None:
    with running_on(place) as device:
        for act in (None, "silu"):
            check(make((2, 8, 4, 4), torch.bfloat16, device, parameters), 4, act)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str, place: str) -> None:
    with running_on(place) as device:
        given = make((2, 8, 4, 6), torch.bfloat16, device, "")
        given |= {"x": LAYOUTS[layout](given["x"]), "dy": LAYOUTS[layout](given["dy"])}
        before = given["x"].clone()
        check(given, 2, "silu")
        assert torch.equal(given["x"], before)


@at("cpu", "sm_90", "cuda")
def test_channels_last(place: str) -> None:
    with running_on(place) as device:
        given = make((2, 8, 4, 6), torch.float16, device, "")
        check(given | {"x": given["x"].to(memory_format=torch.channels_last)}, 4, None)


@at("sm_90", "cuda")
def test_no_worse_than_torch(place: str) -> None:
    with running_on(place) as device:
        given = make((2, 32, 8, 8), torch.bfloat16, device, "")
        wanted = exact(**given, groups=8, act="silu")
        results = []
        for ours in (True, False):
            leaves = [given[name].detach().requires_grad_() for name in ("x", "weight", "bias")]
            if ours:
                y = rtkernels.group_norm(*leaves, groups=8, act="silu")
            else:
                y = F.silu(F.group_norm(leaves[0], 8, *leaves[1:]))
            y.backward(given["dy"])
            results.append((y.detach(), *(leaf.grad for leaf in leaves)))
        for what, ours, theirs, want in zip(("y", "dx", "dweight", "dbias"), *results, wanted, strict=True):
            assert_no_worse(ours, theirs, want, what=what)


@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_stay_in_their_group(place: str) -> None:
    with running_on(place) as device:
        for special in (torch.nan, torch.inf, -torch.inf):
            x = torch.randn(2, 8, 4, 4, device=device)
            x[1, 5, 0, 2] = special
            ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
            y, wanted = rtkernels.group_norm(ours, groups=4), F.group_norm(theirs, 4)
            y.sum().backward()
            wanted.sum().backward()
            assert torch.equal(y.isnan(), wanted.isnan()) and y[1, 4:6].isnan().all()
            assert torch.equal(ours.grad.isnan(), theirs.grad.isnan())


@at("cpu", "sm_90", "cuda")
def test_equal_numbers_give_the_bias(place: str) -> None:
    with running_on(place) as device:
        x, bias = torch.full((2, 4, 6, 6), 1000.125, device=device), torch.randn(4, device=device)
        assert torch.equal(rtkernels.group_norm(x, torch.ones(4, device=device), bias, groups=2)[0, :, 3, 3], bias)


@at("cpu", "sm_90", "cuda")
def test_gradients_of_some(place: str) -> None:
    with running_on(place) as device:
        given = make((2, 8, 4, 4), torch.float32, device, "")
        wanted = dict(zip(("y", "x", "weight", "bias"), exact(**given, groups=4, act="silu"), strict=True))
        for name in ("x", "weight", "bias"):
            leaves = {n: given[n].detach().requires_grad_(n == name) for n in ("x", "weight", "bias")}
            rtkernels.group_norm(**leaves, groups=4, act="silu").backward(given["dy"])
            torch.testing.assert_close(leaves[name].grad.double(), wanted[name], rtol=1e-4, atol=1e-4)
            assert all(leaves[n].grad is None for n in leaves if n != name)


def test_results_may_be_given() -> None:
    x, out = torch.randn(2, 4, 3), torch.empty(2, 4, 3)
    assert rtkernels.group_norm(x, groups=2, out=out) is out
    torch.testing.assert_close(out, F.group_norm(x, 2))


def test_torch_compile() -> None:
    x, weight = torch.randn(2, 4, 3, requires_grad=True), torch.randn(4, requires_grad=True)
    run = torch.compile(
        lambda x, w: rtkernels.group_norm(x, w, groups=2, act="silu"), fullgraph=True, backend="aot_eager"
    )
    y, wanted = run(x, weight), F.silu(F.group_norm(x, 2, weight))
    torch.testing.assert_close(y, wanted)
    grads = (torch.autograd.grad(t.sum(), (x, weight)) for t in (y, wanted))
    for got, want in zip(*grads, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


_X = torch.ones(2, 4, 3)


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        ((torch.ones(4),), {"groups": 2}, r"x has shape \(4,\); expected \[batch, channels, ...\]"),
        ((_X,), {"groups": 3}, "groups is 3; expected a divisor of 4, the number of channels"),
        ((_X,), {"groups": 0}, "groups is 0; expected a divisor of 4"),
        ((_X,), {"groups": 2, "act": "gelu"}, "act is 'gelu'; expected None or 'silu'"),
        ((_X.double(),), {"groups": 2}, "x has dtype float64; expected one of bfloat16, float16, float32"),
        ((_X, torch.ones(3)), {"groups": 2}, r"weight has shape \(3,\); expected \(4,\)"),
        ((_X, torch.ones(4).half()), {"groups": 2}, "weight has dtype float16; expected one of float32"),
        ((_X.half(), torch.ones(4), torch.ones(4).half()), {"groups": 2}, "bias has dtype float16"),
    ],
)  # fmt: skip
def test_errors(given: tuple[Tensor, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        rtkernels.group_norm(*given, **options)
