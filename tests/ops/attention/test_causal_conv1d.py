"""causal_conv1d: values and gradients against float64, states, packed sequences, steps, layouts, errors."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits
from torch import Tensor
from torch.nn import functional

from rtkernels import causal_conv1d, causal_conv1d_step

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {BF16: 2.0**-7, FP16: 2.0**-10, FP32: 1e-5}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = FP32, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact(
    x: Tensor, weight: Tensor, bias: Tensor, states: Tensor, ends: list[int], silu: bool
) -> tuple[Tensor, Tensor]:
    """Sequence by sequence of packed tokens, in float64."""
    taps, columns, finals = weight.shape[1], states.shape[2], []
    outs = [x.new_zeros(ends[0], x.shape[1])]
    for b, (first, end) in enumerate(pairwise(ends)):
        rows = torch.cat((x.new_zeros(taps, x.shape[1]), states[b].t(), x[first:end]))
        begin, length = rows.shape[0] - (end - first), end - first
        z = sum(rows[begin - taps + 1 + j : begin - taps + 1 + j + length] * weight[:, j] for j in range(taps)) + bias
        outs.append(functional.silu(z) if silu else z)
        finals.append(rows[rows.shape[0] - columns :].t())
    return torch.cat((*outs, x.new_zeros(x.shape[0] - ends[-1], x.shape[1]))), torch.stack(finals)


# rows, channels, taps, columns of states, ends of sequences (None: one batch of two), type, silu
CASES = {
    "vectors": (150, 40, 4, 4, [0, 3, 3, 4, 70, 146], BF16, True),
    "odd": (37, 7, 3, 2, [0, 1, 37], FP16, False),
    "fp32": (20, 24, 2, 2, [0, 5, 18], FP32, True),
    "batch": (34, 16, 4, 3, None, FP32, True),
    "short": (4, 8, 4, 4, [0, 1, 2, 4], FP32, False),
    "five taps": (45, 10, 5, 5, [0, 1, 2, 19, 40], BF16, False),
    "six taps": (53, 3, 6, 5, [0, 4, 4, 53], FP16, True),
    "seven taps": (40, 70, 7, 7, None, FP32, True),
    "eight taps": (150, 12, 8, 7, [0, 6, 13, 14, 148], FP32, True),
    "eight taps, few rows": (12, 6, 8, 8, [1, 2, 5, 12], FP32, False),
}


@at()
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    check(name, place)


def check(name: str, place: str) -> tuple[Tensor, ...]:
    rows, channels, taps, columns, ends, dtype, silu = CASES[name]
    packed, given_ends = ends is not None, ends or [0, rows // 2, rows]
    with running_on(place) as device:
        shapes = ((rows, channels), (channels, taps), (channels,), (len(given_ends) - 1, channels, columns))
        tensors = [random(*shape, seed=i, dtype=dtype, device=device) for i, shape in enumerate(shapes)]
        grads = [random(*shapes[0], seed=7).to(dtype), random(*shapes[3], seed=8).to(dtype)]

        def ours(x: Tensor, weight: Tensor, bias: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
            cu = torch.tensor(given_ends, dtype=torch.int32, device=device) if packed else None
            activation = "silu" if silu else None
            y, final = causal_conv1d(
                x if packed else x.view(2, -1, channels), weight, bias, activation=activation, initial_state=states,
                cu_seqlens=cu, return_state=True,
            )  # fmt: skip
            return y.view(rows, channels), final

        results = []
        for function, kind in ((ours, dtype), (lambda *a: exact(*a, given_ends, silu), torch.float64)):
            leaves = [t.detach().to(kind).clone().requires_grad_() for t in tensors]
            with poisoned():
                found = function(*leaves)
                incoming = [g.to(device).to(t.dtype) for g, t in zip(grads, found, strict=True)]
                results.append((*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)))
        for what, got, want in zip(("y", "state", "dx", "dweight", "dbias", "dstate"), *results, strict=True):
            assert_near(got, want, TOLERANCE[dtype], f"{name}, {what}")
    return results[0]


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    check("fp32", "sm_90")
    test_steps_are_the_whole("sm_90")


@at()
def test_steps_are_the_whole(place: str) -> None:
    with running_on(place) as device:
        for taps, columns in ((4, 3), (4, 4), (5, 4), (6, 6), (7, 7), (8, 7), (8, 8)):
            x, bias = random(2, 5, 24, device=device), random(24, device=device)
            weight = random(24, taps, seed=1, device=device)
            state = random(2, 24, columns, seed=3, device=device)
            want, final = causal_conv1d(x, weight, bias, initial_state=state, return_state=True)
            got = torch.stack([causal_conv1d_step(x[:, t], weight, bias, state) for t in range(5)], 1)
            assert_near(got, want.double(), 1e-6)
            assert torch.equal(state, final)


@at("cpu", "sm_90", "cuda")
def test_views_of_models(place: str) -> None:
    """[batch, channels, length] views of projections, slices of wider rows, and fp32 weights."""
    with running_on(place) as device:
        wide, weight = random(2, 9, 48, dtype=BF16, device=device), random(16, 4, device=device)
        want = causal_conv1d(wide[..., 16:32].contiguous(), weight)
        assert_equal_bits(causal_conv1d(wide[..., 16:32], weight), want)
        by_channels = wide[..., 16:32].mT.contiguous()
        assert_equal_bits(causal_conv1d(by_channels.mT, weight), want)


@at()
def test_empty(place: str) -> None:
    with running_on(place) as device:
        weight, state = torch.ones(8, 4, device=device).requires_grad_(), random(2, 8, 4, device=device)
        y, final = causal_conv1d(torch.ones(2, 0, 8, device=device), weight, initial_state=state, return_state=True)
        assert y.shape == (2, 0, 8) and torch.equal(final, state)
        y.sum().backward()
        assert not weight.grad.any()


@at("cpu", "sm_80", "cuda")
def test_no_channels(place: str) -> None:
    with running_on(place) as device:
        x, weight, bias = (torch.zeros(s, device=device, requires_grad=True) for s in ((2, 5, 0), (0, 4), (0,)))
        y = causal_conv1d(x, weight, bias)
        assert [g.shape for g in torch.autograd.grad(y.sum(), (x, weight, bias))] == [(2, 5, 0), (0, 4), (0,)]


@at("sm_90", "cuda")
def test_equal_bits_twice(place: str) -> None:
    assert_equal_bits(check("vectors", place), check("vectors", place))


def test_compiled() -> None:
    x, weight = random(2, 5, 8).requires_grad_(), random(8, 4)
    want = causal_conv1d(x, weight)
    got = torch.compile(lambda x: causal_conv1d(x, weight), fullgraph=True, backend="aot_eager")(x)
    assert_equal_bits(got, want)
    assert_equal_bits(torch.autograd.grad(got.sum(), x)[0], torch.autograd.grad(want.sum(), x)[0])


_X, _W = torch.ones(2, 5, 8), torch.ones(8, 4)
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "dimensions": (lambda: causal_conv1d(_X[0], _W), r"x has shape \(5, 8\); expected 3 dimensions"),
        "taps": (lambda: causal_conv1d(_X, torch.ones(8, 9)), r"shape \(8, 9\); expected \(8, taps\).* 2 to 8"),
        "bias": (lambda: causal_conv1d(_X, _W, torch.ones(7)), r"bias has shape \(7,\); expected \(8,\)"),
        "state": (
            lambda: causal_conv1d(_X, _W, initial_state=torch.ones(2, 8, 2)),
            r"initial_state has shape \(2, 8, 2\); expected \(2, 8, 4\)",
        ),
        "activation": (
            lambda: causal_conv1d(_X, _W, activation="gelu"),
            "activation is 'gelu'; expected 'silu' or None",
        ),
        "cu_seqlens": (
            lambda: causal_conv1d(_X[0], _W, cu_seqlens=torch.tensor([0, 5])),
            "cu_seqlens is torch.int64",
        ),
        "step": (
            lambda: causal_conv1d_step(_X[:, 0], _W, None, torch.ones(2, 8, 5)),
            r"state has shape \(2, 8, 5\); expected \(2, 8, 4\) or \(2, 8, 3\)",
        ),
    }
)
