"""The layers of `python -m bench.measure.fp8_layer`: all ways give the same results, but for the noise of fp8."""

from __future__ import annotations

import pytest
import torch
from support.compare import relative_error

from bench.measure import fp8_layer
from bench.measure.layer import step


@pytest.mark.parametrize("kind", fp8_layer.LAYERS)
def test_ways_agree(kind: str) -> None:
    torch.manual_seed(0)
    sizes = {"tokens": 48, "hidden": 64, "ffn": 96, "experts": 4, "top_k": 2}
    layers, ways = fp8_layer.LAYERS[kind][0](sizes, "cpu")
    leaf = torch.randn(48, 64).bfloat16().requires_grad_()
    dy = torch.randn(48, 96 if kind == "linear" else 64).bfloat16()
    found = {}
    for name, run in ways.items():
        found[name] = [step(run, layers[name], leaf, dy), leaf.grad]
    assert set(found) >= {"fp8", "fixed", "bf16"}
    for name, results in found.items():
        for got, wanted in zip(results, found["bf16"], strict=True):
            assert relative_error(got, wanted) < 0.1, name
