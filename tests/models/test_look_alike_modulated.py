"""Modules that look like adaptive norms of diffusion transformers: real ones are replaced, others left alone."""

from __future__ import annotations

import pytest
import torch
from support.look_alikes import WIDTH, patched
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")


class Zero(nn.Module):
    parts = 6

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.silu = None, nn.SiLU()
        self.linear = nn.Linear(24, self.parts * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, timestep=None, class_labels=None, hidden_dtype=None, emb=None):
        shift, scale, *gates = self.linear(self.silu(emb)).chunk(self.parts, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], *gates


class Single(Zero):
    parts = 3

    def forward(self, x: Tensor, emb=None):
        return super().forward(x, emb=emb)


class Continuous(Zero):
    parts = 2

    def forward(self, x: Tensor, conditioning_embedding: Tensor):
        emb = self.linear(self.silu(conditioning_embedding).to(x.dtype))
        scale, shift = torch.chunk(emb, 2, dim=1)
        return self.norm(x) * (1 + scale)[:, None, :] + shift[:, None, :]


class WithoutOne(Continuous):
    def forward(self, x: Tensor, conditioning_embedding: Tensor):
        scale, shift = self.linear(self.silu(conditioning_embedding)).chunk(2, dim=1)
        return self.norm(x) * scale[:, None] + shift[:, None]


class WithoutSilu(Continuous):
    def forward(self, x: Tensor, conditioning_embedding: Tensor):
        scale, shift = self.linear(conditioning_embedding).chunk(2, dim=1)
        return self.norm(x) * (1 + scale)[:, None] + shift[:, None]


class OtherGates(Single):
    def forward(self, x: Tensor, emb=None):
        shift, scale, gate = self.linear(self.silu(emb)).chunk(3, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], gate.tanh()


def call(module: nn.Module, x: Tensor, c: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, c)]
    name = "conditioning_embedding" if isinstance(module, Continuous) else "emb"
    found = module(leaves[0], **{name: leaves[1]})
    found = found if isinstance(found, tuple) else (found,)
    total = sum(
        (t * torch.randn(t.shape, generator=torch.Generator().manual_seed(i))).sum() for i, t in enumerate(found)
    )
    return [*found, *torch.autograd.grad(total, (*leaves, *module.parameters()))]


@pytest.mark.parametrize("cls", [Zero, Single, Continuous])
def test_adaptive_norm(cls: type[nn.Module]) -> None:
    torch.manual_seed(0)
    module, x, c = cls(), torch.randn(2, 5, WIDTH), torch.randn(2, 24)
    wanted = call(module, x, c)
    report = patched(module)
    assert next(s.name for s in report.sites if s.kind == "norm" and s.reason is None) == "0", report
    for got, want in zip(call(module, x, c), wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    with pytest.raises(TypeError):  # the model's own error
        module()


@pytest.mark.parametrize("cls", [WithoutOne, WithoutSilu, OtherGates])
def test_look_alike(cls: type[nn.Module]) -> None:
    report = patched(cls())
    (site,) = [s for s in report.sites if s.name == "0"]
    assert site.reason is not None and "none of our ops" in site.reason, report
