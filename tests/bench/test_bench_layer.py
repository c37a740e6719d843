"""The layer of `python -m bench.measure.layer`: all ways give the same results."""

from __future__ import annotations

import torch

from bench.measure import layer


def test_ways_agree() -> None:
    torch.manual_seed(0)
    shape = layer.Shape(batch=2, length=6, hidden=32, ffn=48, heads=4, kv_heads=2, head_dim=16)
    module = layer.Layer(shape, "cpu", torch.float32)
    leaf, dy = torch.randn(2, 6, 32, requires_grad=True), torch.randn(2, 6, 32)
    wanted = layer.gradients(layer.plain, module, leaf, dy)
    for name in ("rtkernels", "reuse"):
        got = layer.gradients(layer.WAYS[name](), module, leaf, dy)
        assert got.keys() == wanted.keys() and len(wanted) == 10
        for key, t in got.items():
            assert layer.relative(t, wanted[key]) < 1e-5, (name, key)
