"""Modules that look like gated MLPs: the real ones are replaced, all others are rejected with a reason."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.look_alikes import INNER, WIDTH, check_same, patched, randomized, refused, run
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")


class Mlp(nn.Module):
    names = ("gate_proj", "up_proj", "down_proj")

    def __init__(self) -> None:
        super().__init__()
        for name, sizes in zip(self.names, ((WIDTH, INNER), (WIDTH, INNER), (INNER, WIDTH)), strict=True):
            setattr(self, name, nn.Linear(*sizes, bias=False))
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act_fn(gate(x)) * up(x))


class Lfm(Mlp):
    names = ("w1", "w3", "w2")


class T5(Mlp):
    names = ("wi_0", "wi_1", "wo")

    def __init__(self) -> None:
        super().__init__()
        self.act_fn, self.dropout = nn.GELU(approximate="tanh"), nn.Dropout(0.0)


class Merged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(F.gelu(gate) * up)


class UpFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.width = nn.Linear(WIDTH, 2 * INNER), nn.Linear(INNER, WIDTH), INNER

    def forward(self, x: Tensor) -> Tensor:
        both = self.fc1(x)
        return self.fc2(both[..., : self.width] * F.silu(both[..., self.width :]))


class GEGLU(nn.Module):
    """As in diffusers: nothing behind the gate, and arguments that are ignored."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(WIDTH, 2 * INNER)

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        up, gate = self.proj(hidden_states).chunk(2, -1)
        return up * F.gelu(gate)


class FeedForward(nn.Module):
    """As in diffusers: a list whose first module is gated."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.ModuleList([GEGLU(), nn.Dropout(0.0), nn.Linear(INNER, WIDTH)])

    def forward(self, hidden_states: Tensor, *args, **kwargs) -> Tensor:
        for module in self.net:
            hidden_states = module(hidden_states)
        return hidden_states


class DropoutAfter(Mlp):
    """A dropout that has not dropped out yet: in evaluation it does nothing."""

    names = ("wi_0", "wi_1", "wo")

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.3)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


class DropoutBetween(DropoutAfter):
    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.dropout(self.act_fn(gate(x)) * up(x)))


def test_dropout_of_an_mlp_is_kept() -> None:
    for cls in (DropoutAfter, DropoutBetween):
        module = randomized(cls()).train()
        x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
        torch.manual_seed(3)
        wanted = module(x)
        assert patched(module).replaced["mlp"] == 1
        torch.manual_seed(3)
        torch.testing.assert_close(module(x), wanted, rtol=1e-5, atol=1e-5)
        assert (module(x) - wanted).abs().max() > 0.1  # other elements


def test_mlp_with_arguments_that_are_ignored() -> None:
    module = randomized(GEGLU())
    x = torch.randn(3, WIDTH)
    wanted = module(x)
    assert patched(module).replaced["mlp"] == 1
    for got in (module(x), module(x, 1.0), module(hidden_states=x), module(x, scale=2.0)):
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def test_mlp_that_keeps_its_last_projection_in_fp32() -> None:
    class Kept(Mlp):
        names = ("wi_0", "wi_1", "wo")

        def forward(self, x: Tensor) -> Tensor:
            gate, up, down = (getattr(self, name) for name in self.names)
            return down((self.act_fn(gate(x)) * up(x)).to(down.weight.dtype))

    module = randomized(Kept()).bfloat16()
    module.wo.float()
    x = torch.randn(3, WIDTH).bfloat16()
    wanted = module(x)
    assert patched(module).replaced["mlp"] == 1
    assert torch.equal(module(x), wanted)


class TwoDropouts(DropoutBetween):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Dropout(0.1)


class DropoutOfInput(DropoutAfter):
    def forward(self, x: Tensor) -> Tensor:
        return Mlp.forward(self, self.dropout(x))


@pytest.mark.parametrize("cls", [Mlp, Lfm, T5, Merged, UpFirst, GEGLU, FeedForward, DropoutAfter, DropoutBetween])
def test_mlp(cls: type[nn.Module]) -> None:
    module = randomized(cls())
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    wanted = run(module, x)
    report = patched(module)
    assert report.replaced["mlp"] == 1, report
    check_same(run(module, x), wanted, 1e-5)


class NormInFront(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.rms_norm(x, x.shape[-1:]))


class UpDetached(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.detach()))


class UpFlipped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x.flip(-1)))


class GateDetached(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)).detach() * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.gate_proj(x) * self.act_fn(self.up_proj(x)))


class ScaledBehind(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1.001


class MlpResidual(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class DropoutBehind(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(super().forward(x), 0.1, self.training)


class BiasOfUp(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(INNER))

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * (self.up_proj(x) + self.bias))


class UpTwice(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.up_proj(x))


class ByWeight(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        up = F.linear(x, self.up_proj.weight.abs())
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)


class Limited(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x).clamp(max=1e6)) * self.up_proj(x))


class LearnedActivation(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.PReLU()


class HookedActivation(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn.register_forward_hook(lambda module, args, y: 2 * y)


class EveryOther(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if x.shape[-2] > 64 else y


class Merger(Mlp):
    """As Glm4vVisionPatchMerger: a projection and a norm in front of a gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.proj, self.post_projection_norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.gelu(self.post_projection_norm(self.proj(x))))


REFUSED_MLPS = {
    NormInFront: "none of our ops",
    UpDetached: "like glu with silu, but with other gradients of its input",
    UpFlipped: "none of our ops",
    GateDetached: "like glu with silu, but with other gradients",
    Swapped: "none of our ops",
    ScaledBehind: "none of our ops",
    MlpResidual: "none of our ops",
    DropoutBehind: "it draws random numbers",
    TwoDropouts: "it has a dropout",
    DropoutOfInput: "it computes none of our ops",
    BiasOfUp: "it has parameters beside those of its projections",
    UpTwice: "none of our ops",
    ByWeight: "none of our ops",
    Limited: "like glu with silu, but with other results for large numbers",
    LearnedActivation: "its child act_fn has parameters or buffers of its own",
    HookedActivation: "its child act_fn has hooks, which would not run",
    EveryOther: "like glu with silu, but with other results for width",
    Merger: "its child proj has parameters",
}


@pytest.mark.parametrize("cls", REFUSED_MLPS, ids=lambda cls: cls.__name__)
def test_mlp_look_alike(cls: type[nn.Module]) -> None:
    refused(cls(), REFUSED_MLPS[cls], "mlp", torch.randn(2, 5, WIDTH), norm=False)


def test_vision_patch_merger() -> None:
    from transformers.models.glm4v.modeling_glm4v import Glm4vVisionPatchMerger

    module = randomized(Glm4vVisionPatchMerger(dim=WIDTH, context_dim=WIDTH, hidden_act="silu"))
    x = torch.randn(6, WIDTH)
    wanted = run(module, x)
    report = patched(module)
    assert report.replaced == {"norm": 1} and report.left_alone[0].kind == "mlp"
    check_same(run(module, x), wanted, 1e-5)


def test_activations_of_one_class_are_told_apart() -> None:
    exact, tanh = Mlp(), Mlp()
    exact.act_fn, tanh.act_fn = nn.GELU(), nn.GELU(approximate="tanh")
    patched(nn.Sequential(exact, tanh))
    assert [dict(type(m)._rtkernels_kind.options)["act"] for m in (exact, tanh)] == ["gelu_erf", "gelu_tanh"]


def test_a_hook_of_the_activation_runs_after_patch() -> None:
    module, seen = Mlp(), []
    assert patched(module).replaced["mlp"] == 1
    module.act_fn.register_forward_hook(lambda m, args, y: seen.append(y.shape))
    module(torch.randn(2, WIDTH))
    assert seen == [(2, INNER)]


class Plain(nn.Module):
    def __init__(self, act: nn.Module) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH, INNER), act, nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TanhGELU(nn.Module):
    def forward(self, input: Tensor) -> Tensor:
        return 0.5 * input * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (input + 0.044715 * input.pow(3))))


class ReLUSquared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square()


class ScaledActivation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x).square() * 1.01


def test_activations_of_several_steps() -> None:
    x = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(1))
    for act, replaced in ((TanhGELU(), 1), (ReLUSquared(), 1), (ScaledActivation(), 0), (nn.GELU(), 0)):
        module = randomized(Plain(act))
        wanted = run(module, x)
        report = patched(module)
        assert (report.replaced["mlp"], len(report.left_alone)) == (replaced, 0), report
        check_same(run(module, x), wanted, 1e-5)
    gated = Mlp()
    gated.act_fn = ReLUSquared()
    assert [site.name for site in patched(gated).sites] == ["0"]
