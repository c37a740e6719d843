"""MLPs and experts that clamp gate and up, and activations by quick GELU: which are replaced, results and gradients."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from rtkernels import models


class Clamped(nn.Module):
    """DeepSeek-V4's MLP, or another one with `gate_of` and `up_of`."""

    def __init__(self, limit: float = 2.0, bias: bool = False) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(40, 56, bias=bias), nn.Linear(40, 56, bias=bias)
        self.down_proj = nn.Linear(56, 40, bias=bias)
        self.act_fn = nn.SiLU()
        self.limit = limit

    def gate_of(self, gate: Tensor) -> Tensor:
        return self.act_fn(gate.clamp(max=self.limit))

    def up_of(self, up: Tensor) -> Tensor:
        return up.clamp(min=-self.limit, max=self.limit)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_of(self.gate_proj(x)) * self.up_of(self.up_proj(x)))


class Oai(Clamped):
    alpha = 1.702

    def gate_of(self, gate: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        return gate * torch.sigmoid(self.alpha * gate)

    def up_of(self, up: Tensor) -> Tensor:
        return super().up_of(up) + 1


class OtherSlope(Oai):
    alpha = 1.5


class ClampedBehind(Clamped):
    def gate_of(self, gate: Tensor) -> Tensor:
        return self.act_fn(gate).clamp(max=self.limit)


class OneSided(Clamped):
    def up_of(self, up: Tensor) -> Tensor:
        return up.clamp(max=self.limit)


class BothSided(Clamped):
    def gate_of(self, gate: Tensor) -> Tensor:
        return self.act_fn(gate.clamp(-self.limit, self.limit))


class Unused(Clamped):
    """The attribute is there, and nothing is clamped."""

    def gate_of(self, gate: Tensor) -> Tensor:
        return self.act_fn(gate)

    def up_of(self, up: Tensor) -> Tensor:
        return up


class Holder(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)


def patched(mlp: nn.Module) -> models.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return models.patch(Holder(mlp))


def clamped(x: Tensor, min: float = -torch.inf, max: float = torch.inf) -> Tensor:
    """Clamp with the gradient of x at a limit, too: torch.clamp's until 2.14; later ones give 0 there."""
    return torch.where(x > max, max, torch.where(x < min, min, x))


def step(mlp: nn.Module, x: Tensor, exact: bool = False) -> list[Tensor]:
    x = x.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if exact:
            patch.setattr(torch.Tensor, "clamp", clamped)
        y = mlp(x)
    y.backward(torch.ones_like(y))
    return [y.detach(), x.grad, *(p.grad for p in mlp.parameters())]


@pytest.mark.parametrize(
    "build",
    [
        Clamped, lambda: Clamped(10.0, bias=True), lambda: Clamped(7), lambda: Oai(7.0), lambda: Oai(3.5), Unused,
        lambda: Unused(float("inf")), lambda: Clamped(float("inf")),
    ],
)  # fmt: skip
def test_replaced(build) -> None:
    torch.manual_seed(0)
    mlp = build()
    x = torch.randn(3, 5, 40) * 20
    for dtype, allowed in ((torch.float32, 2e-6), (torch.bfloat16, 0.02)):
        ours = copy.deepcopy(mlp).to(dtype)
        want = step(copy.deepcopy(ours), x.to(dtype), exact=True)
        assert patched(ours).replaced["mlp"] == 1
        for a, b in zip(step(ours, x.to(dtype)), want, strict=True):
            assert float((a.float() - b.float()).norm()) <= allowed * float(b.float().norm())


def test_the_limit_is_read_at_each_call() -> None:
    mlp, x = Clamped(2.0), torch.randn(2, 40) * 20
    assert patched(mlp).replaced["mlp"] == 1
    mlp.limit = 3.0
    torch.testing.assert_close(mlp(x), Clamped.forward(mlp, x))


@pytest.mark.parametrize("kind", [OtherSlope, ClampedBehind, OneSided, BothSided])
def test_other_clamps_are_left_alone(kind: type[Clamped]) -> None:
    report = patched(kind(2.0))
    assert not report.replaced["mlp"] and [s.reason for s in report.left_alone] == ["it computes none of our ops"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("limit", [10.0, 0.4])
def test_experts(limit: float, dtype: torch.dtype) -> None:
    """Those of DeepSeek-V4 and of MiniMax-M3, which has GPT-OSS's activation and its own limit."""
    pytest.importorskip("transformers", minversion="5.20")
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as deepseek
    from transformers.models.minimax_m3_vl import modeling_minimax_m3_vl as minimax

    config = DeepseekV4Config(hidden_size=32, num_local_experts=4, swiglu_limit=limit)
    config.intermediate_size, config.swiglu_alpha, config.hidden_act = 24, 1.702, "silu"
    chosen = torch.tensor([[0, 2], [1, 3], [2, 0], [3, 1], [0, 1]])
    for kind in (deepseek.DeepseekV4Experts, minimax.MiniMaxM3VLExperts):
        torch.manual_seed(1)
        theirs = kind(config).to(dtype)
        for p in theirs.parameters():
            nn.init.normal_(p, std=0.3)
        ours = copy.deepcopy(theirs)
        report = patched(ours)
        assert report.replaced["experts"] == 1, report
        x, weights = torch.randn(5, 32).to(dtype), torch.rand(5, 2).to(dtype)
        results = []
        for one in (ours, theirs):
            leaf = x.clone().requires_grad_()
            y = one(leaf, chosen, weights)
            y.backward(torch.ones_like(y))
            results.append([y.detach(), leaf.grad, *(p.grad for p in one.parameters())])
        for a, b in zip(*results, strict=True):
            error = float((a.float() - b.float()).norm()) / float(b.float().norm())
            assert error < (2e-6 if dtype == torch.float32 else 0.03)


class Quick(nn.Module):
    """CLIP's MLP."""

    class QuickGELUActivation(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.sigmoid(1.702 * x)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.activation_fn = nn.Linear(24, 40), nn.Linear(40, 24), self.QuickGELUActivation()

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.activation_fn(self.fc1(x)))


class QuickGated(Clamped):
    def gate_of(self, gate: Tensor) -> Tensor:
        return gate * functional.sigmoid(1.702 * gate)

    def up_of(self, up: Tensor) -> Tensor:
        return up


@pytest.mark.parametrize("kind", [Quick, QuickGated])
def test_quick_gelu(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    mlp = kind()
    x = torch.randn(4, mlp(torch.zeros(1, 24 if kind is Quick else 40)).shape[-1])
    want = step(copy.deepcopy(mlp), x)
    assert patched(mlp).replaced["mlp"] == 1
    for a, b in zip(step(mlp, x), want, strict=True):
        torch.testing.assert_close(a, b)
