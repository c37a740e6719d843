"""The normalisations with caller-provided memory (``out``) and with statistics as inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError

EPS = 1e-5


@dataclass
class Norm:
    """One of the two ops and what differs between them."""

    call: Callable[..., Any]
    wanted: str  # the option that returns statistics
    names: tuple[str, ...]  # of the statistics, in their order
    centred: bool

    def parameters(self, weight: Tensor | None) -> tuple[Tensor | None, ...]:
        return (weight, weight) if self.centred else (weight,)

    def statistics(self, h: Tensor) -> tuple[Tensor, ...]:
        h = h.double()
        if self.centred:
            return torch.rsqrt((h - h.mean(-1, keepdim=True)).square().mean(-1) + EPS), h.mean(-1)
        return (torch.rsqrt(h.square().mean(-1) + EPS),)


NORMS = {
    "rms": Norm(rtkernels.rms_norm, "return_rstd", ("rstd",), False),
    "layer": Norm(rtkernels.layer_norm, "return_statistics", ("rstd", "mean"), True),
}
norms = pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)

# x, weight, residual
CASES: dict[str, Callable[[Callable[..., Tensor]], tuple[Tensor | None, ...]]] = {
    "row": lambda n: (n(3, 2048), n(2048), None),
    "plain": lambda n: (n(2, 3, 40), None, None),
    "odd": lambda n: (n(5, 33), n(33), None),
    "fp32": lambda n: (n(4, 264), n(264).float(), None),
    "residual": lambda n: (n(5, 256), n(256), n(5, 256)),
    "residual_odd": lambda n: (n(3, 77), n(77), n(3, 77)),
    "widest": lambda n: (n(2, 20480), n(20480), None),
    "transposed": lambda n: (n(64, 6).t(), n(64), None),
    "no_rows": lambda n: (n(0, 16), n(16), None),
}


def make(case: str, device: str) -> tuple[Tensor | None, ...]:
    """Build the tensors of a case: the same numbers on every device."""
    generator = torch.Generator().manual_seed(sum(map(ord, case)))
    return CASES[case](lambda *shape: torch.randn(*shape, generator=generator).bfloat16().to(device))


def first_of(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- out ------------------------------------------------------------------------------------------------------------


@norms
@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_90", "cuda")
def test_out(place: str, case: str, norm: Norm) -> None:
    with running_on(place) as device:
        x, weight, residual = make(case, device)
        parameters, options = norm.parameters(weight), {"eps": EPS, "offset": 1.0}
        want = norm.call(x, *parameters, residual=residual, **options)
        padded = torch.empty((*x.shape[:-1], x.shape[-1] + 3), dtype=x.dtype, device=device)
        for out in (torch.empty(x.shape, dtype=x.dtype, device=device), padded[..., 1:-2]):
            got = norm.call(x, *parameters, residual=residual, **options, out=out)
            assert first_of(got) is out
            assert_same_bits(out.contiguous(), first_of(want), "y")
            if residual is not None:
                assert_same_bits(got[1], want[1], "sum")
        own = x.contiguous().clone()
        assert first_of(norm.call(own, *parameters, residual=residual, **options, out=own)) is own
        assert_same_bits(own, first_of(want), "over x")
        if residual is not None:
            own = residual.clone()
            norm.call(x, *parameters, residual=own, **options, out=own)
            assert_same_bits(own, want[0], "over the residual")


@norms
def test_out_counts_as_a_change(norm: Norm) -> None:
    x, out = torch.randn(4, 8), torch.empty(4, 8)
    before = out._version
    norm.call(x, out=out)
    assert out._version > before


@norms
def test_out_array(norm: Norm) -> None:
    x, out = np.ones((3, 8), "f4"), np.zeros((3, 8), "f4")
    got = norm.call(x, out=out)
    np.testing.assert_array_equal(got, norm.call(torch.ones(3, 8)).numpy())
    np.testing.assert_array_equal(out, got)


# ---- statistics -----------------------------------------------------------------------------------------------------


@norms
@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_90", "cuda")
def test_statistics(place: str, case: str, norm: Norm) -> None:
    with running_on(place) as device:
        x, weight, residual = make(case, device)
        parameters, options = norm.parameters(weight), {"eps": EPS, "offset": 1.0}
        want = norm.call(x, *parameters, residual=residual, **options)
        y, *rest = norm.call(x, *parameters, residual=residual, **options, **{norm.wanted: True})
        statistics = dict(zip(norm.names, rest[-len(norm.names) :], strict=True))
        assert len(rest) == len(norm.names) + (residual is not None)
        torch.testing.assert_close(y, first_of(want), rtol=2**-7, atol=1e-6)
        h = x if residual is None else want[1]
        for (name, got), exact in zip(statistics.items(), norm.statistics(h), strict=True):
            assert got.shape == x.shape[:-1] and got.dtype == torch.float32
            torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5, msg=name)
        again = norm.call(h, *parameters, **options, **statistics)
        assert_same_bits(again, y, "with given statistics")
        both = norm.call(h, *parameters, **options, **statistics, **{norm.wanted: True})
        assert all(a is b for a, b in zip(both[1:], statistics.values(), strict=True))


@norms
@pytest.mark.parametrize("case", CASES)
@at("cpu", "sm_80", "sm_90", "cuda")
def test_statistics_in_given_memory(place: str, case: str, norm: Norm) -> None:
    with running_on(place) as device:
        x, weight, residual = make(case, device)
        call = functools.partial(norm.call, x, *norm.parameters(weight), eps=EPS, residual=residual)
        want = call(**{norm.wanted: True})
        out = tuple(torch.full_like(t, torch.nan) for t in want)
        for _ in range(3):  # computed, recorded, replayed
            got = call(**{norm.wanted: True}, out=out)
            assert all(a is b for a, b in zip(got, out, strict=True))
            for a, b in zip(out, want, strict=True):
                assert_same_bits(a, b, "in given memory")
                a.fill_(torch.nan)
        y, *rest = call(**{norm.wanted: True}, out=out[0])  # the first result only
        assert y is out[0] and not any(a is b for a, b in zip(rest, out[1:], strict=True))
        assert_same_bits(y, want[0], "y alone")
        last = call(**{norm.wanted: True}, out=(*[None] * (len(want) - 1), out[-1]))
        assert last[-1] is out[-1]
        assert_same_bits(out[-1], want[-1], "the last alone")


@norms
@at("cpu", "sm_80", "sm_90", "cuda")
def test_out_with_given_statistics(place: str, norm: Norm) -> None:
    with running_on(place) as device:
        x, weight, _ = make("row", device)
        call = functools.partial(norm.call, eps=EPS)
        y, *rest = call(x, *norm.parameters(weight), **{norm.wanted: True})
        statistics = dict(zip(norm.names, rest, strict=True))
        out = torch.full_like(y, torch.nan)
        assert call(x, *norm.parameters(weight), **statistics, out=out) is out
        assert_same_bits(out, y, "given statistics")
        own = x.clone()
        assert call(own, *norm.parameters(weight), **statistics, out=own) is own
        assert_same_bits(own, y, "over x")
        with pytest.raises(ArgumentError, match=r"out\[1\] shares memory with rstd"):
            call(x, *norm.parameters(weight), **statistics, **{norm.wanted: True}, out=(out, statistics["rstd"]))


@norms
@at("cpu", "sm_90", "cuda")
def test_statistics_gradients(place: str, norm: Norm) -> None:
    with running_on(place) as device:
        x, weight, residual = make("residual", device)
        found, statistics = [], {}
        for way in ("plain", "returned", "given"):
            own_x, own_residual, *parameters = leaves = [
                t.detach().clone().requires_grad_() for t in (x, residual, *norm.parameters(weight))
            ]
            if way == "plain":
                y, total = norm.call(own_x, *parameters, eps=EPS, residual=own_residual)
            elif way == "returned":
                options = {norm.wanted: True, "residual": own_residual}
                y, total, *result = norm.call(own_x, *parameters, eps=EPS, **options)
                assert not any(t.requires_grad for t in result)
                statistics = dict(zip(norm.names, result, strict=True))
            else:
                total = own_x + own_residual
                y = norm.call(total, *parameters, eps=EPS, **statistics)
            torch.autograd.backward((y, total), (x * 3, x * 5))
            found.append([t.grad for t in leaves])
        for a, b, c in zip(*found, strict=True):
            assert_same_bits(b, a, "gradient with returned statistics")
            torch.testing.assert_close(c, a, rtol=2**-6, atol=2**-4)  # two gradients, rounded before they are added


@norms
def test_compile(norm: Norm) -> None:
    def block(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        out = torch.empty_like(x)
        with torch.no_grad():
            norm.call(x * 2, weight, out=out)
        return out, *norm.call(x, weight, **{norm.wanted: True})

    x, weight = torch.randn(4, 16), torch.randn(16, requires_grad=True)
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight), block(x, weight))


# ---- errors ---------------------------------------------------------------------------------------------------------

X = torch.ones(5, 8)
MEAN = {"rms": {}, "layer": {"mean": torch.ones(4)}}
BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "shape": (lambda f: f(X, out=torch.empty(5, 7)), r"out has shape \(5, 7\); expected \(5, 8\)"),
    "dtype": (lambda f: f(X, out=X.half()), "out has dtype float16; expected float32"),
    "expanded": (lambda f: f(X, out=torch.empty(8).expand(5, 8)), "expected memory of its own for every element"),
    "overlap": (lambda f: f(X[:4], out=X[1:]), "out shares memory with x; expected its own"),
    "overlap residual": (lambda f: f(X[:4] * 1, residual=X[:4], out=X[1:]), "out shares memory with residual"),
    "overlap weight": (lambda f: f(X[:4] * 1, X[2], out=X[:4]), "out shares memory with weight"),
    "gradient": (lambda f: f(X, torch.ones(8, requires_grad=True), out=X * 1), "norm with out= is not differentiable"),
}


@norms
@pytest.mark.parametrize("name", BAD)
@at("cpu", "sm_90")
def test_errors(place: str, name: str, norm: Norm) -> None:
    call, message = BAD[name]
    with running_on(place), pytest.raises(ArgumentError, match=message):
        call(norm.call)


@pytest.mark.parametrize("name", NORMS)
def test_statistics_errors(name: str) -> None:
    call, mean, x = NORMS[name].call, MEAN[name], X[:4]
    with pytest.raises(ArgumentError, match=r"rstd has shape \(5,\); expected \(4,\), one per row of x"):
        call(x, rstd=torch.ones(5), **mean)
    with pytest.raises(ArgumentError, match="rstd cannot be combined with residual: pass the sum"):
        call(x, rstd=torch.ones(4), residual=x, **mean)
    with pytest.raises(ArgumentError, match="rstd has dtype float16"):
        call(x, rstd=torch.ones(4).half(), **mean)
    if mean:
        with pytest.raises(ArgumentError, match="mean and rstd must be given together"):
            call(x, rstd=torch.ones(4))
