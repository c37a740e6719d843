"""Compiled graphs that overwrite their inputs, or have symbols for numbers: the same results as without compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import rtkernels
from contracts.test_arguments import OVERWRITING

_DIFFERENTIABLE = [name for name, (_, _, differentiable) in OVERWRITING.items() if differentiable]


def _tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for item in result for t in _tensors(item)]


def _outcome(call: Callable[..., Any], shape: tuple[int, ...]) -> list[Tensor]:
    """Return results of a call that overwrites its tensor, and the gradients through them and through the tensor."""
    leaf = torch.linspace(-1, 1, torch.Size(shape).numel()).view(shape).requires_grad_()
    x = leaf * 1
    torch.manual_seed(0)  # calls make other tensors
    results = [t for t in _tensors(call(x)) if t.requires_grad]
    incoming = [torch.linspace(-2, 1, t.numel()).view(t.shape) for t in (*results, x)]
    through_results = torch.autograd.grad(results, leaf, incoming[:-1], retain_graph=True)
    return [*(t.detach() for t in results), *through_results, *torch.autograd.grad(x, leaf, incoming[-1:])]


@pytest.mark.parametrize("name", [name for name in _DIFFERENTIABLE if name != "cross_entropy"])  # writes no result
def test_gradients_of_inputs_that_a_graph_overwrites(name: str) -> None:
    shape, call, _ = OVERWRITING[name]
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_outcome(compiled, shape), _outcome(call, shape))


def test_factors_of_an_input_that_a_graph_adds_to() -> None:
    def call(x: Tensor) -> Tensor:
        return rtkernels.add_(x, torch.ones(4, 8), alpha=2.0, beta=0.25)

    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(_outcome(compiled, (4, 8)), _outcome(call, (4, 8)))


def _delta_rule(x: Tensor, number: float) -> Tensor:
    heads = x.bfloat16().view(1, 4, 2, 16)
    gates = x.view(1, 4, 2, 16)[..., 0]
    return rtkernels.gated_delta_rule(
        heads, heads, heads, gates, gates, A_log=torch.zeros(2), beta_sigmoid=True, beta_scale=number
    )


SYMBOLS: dict[str, Callable[[Tensor, float], Any]] = {
    "quant.scale": lambda x, number: rtkernels.rms_norm(
        x, quant=rtkernels.Quant(torch.float8_e4m3fn, scale=number, floor=number / 2)
    )[0].float(),
    "beta_scale": _delta_rule,
}


@pytest.mark.parametrize("name", SYMBOLS)
def test_numbers_that_are_symbols(name: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(SYMBOLS[name], fullgraph=True, backend="aot_eager", dynamic=True)
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for number in (0.5, 0.75, 2.0):
        torch.testing.assert_close(compiled(x, number), SYMBOLS[name](x, number))
