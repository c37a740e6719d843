"""Modules that look like norms, gated MLPs and rotations: the real ones are replaced, all others are rejected.

Every look-alike differs from an original in this file in one place. A rejection has a reason, and nothing changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtkernels import models

pytest.importorskip("transformers", minversion="5.0")

WIDTH, INNER = 64, 96


def patched(module: nn.Module, **options: Any) -> models.PatchReport:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing was replaced
        return models.patch(nn.Sequential(module), loss=False, **options)


def run(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    leaf = x.clone().requires_grad_()
    torch.manual_seed(3)
    y = module(leaf * 1)
    if y.requires_grad:
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(4)).to(y.dtype))
    results = [y.detach(), leaf.grad, *(p.grad for p in module.parameters())]
    module.zero_grad()
    return results


def randomized(module: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for p in module.parameters():
        p.data = torch.randn(p.shape, generator=generator) * (0.3 if p.dim() > 1 else 1.0)
    return module


def check_same(a: list[Tensor | None], b: list[Tensor | None], tolerance: float) -> None:
    for got, wanted in zip(a, b, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


# ---- norms ----------------------------------------------------------------------------------------------------------


class Rms(nn.Module):
    """The original of the look-alikes below."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(WIDTH)), 1e-6

    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * self.normed(x.float()).to(x.dtype)


class PlusOne(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return ((1 + self.weight.float()) * self.normed(x.float())).to(x.dtype)


NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "rms": (Rms, "rms_norm"),
    "plus one": (PlusOne, "rms_norm"),
    "torch rms": (lambda: nn.RMSNorm(WIDTH, eps=1e-6), "rms_norm"),
    "torch rms, no weight": (lambda: nn.RMSNorm(WIDTH, eps=1e-6, elementwise_affine=False), "rms_norm"),
    "layer": (lambda: nn.LayerNorm(WIDTH), "layer_norm"),
    "layer, no bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm"),
    "layer, no weight": (lambda: nn.LayerNorm(WIDTH, elementwise_affine=False), "layer_norm"),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", [(5, WIDTH), (2, WIDTH, WIDTH)], ids=str)
def test_norm(name: str, shape: tuple[int, ...]) -> None:
    build, kind = NORMS[name]
    module = randomized(build())
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    wanted = run(module, x)
    report = patched(module)
    assert report.replaced["norm"] == 1, report
    assert type(module)._rtkernels_kind.kind == kind
    check_same(run(module, x), wanted, 1e-5)


SCALE, TABLE = 1.0, [1.0]


class EpsilonOutside(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True).sqrt() + self.eps)


class Detached(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps).detach()


class OverTwoDimensions(Rms):
    def normed(self, x: Tensor) -> Tensor:
        dims = (-1,) if x.dim() < 3 else (-1, -2)
        return x * torch.rsqrt(x.pow(2).mean(dims, keepdim=True) + self.eps)


class FourDimensions(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x) * (2 if x.dim() == 4 else 1)


class Groups(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x.unflatten(-1, (2, -1))).flatten(-2)


class Residual(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class InPlace(Rms):
    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        x.mul_(0.5)
        return result


class OnlyTraining(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.training else 2 * super().forward(x)


class Wider(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight.float() * self.normed(x.float())


class OtherInHalf(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if x.dtype == torch.float16 else 1)


class Counts(Rms):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 if self.calls < 1000 else 2)


class CountsForAll(Rms):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CountsForAll.calls += 1
        return super().forward(x) * (1 if self.calls < 1000 else 2)


class Clamped(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return super().normed(x.clamp(-1e5, 1e5))


class ReadsGlobal(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * SCALE


def _scaled(x: Tensor) -> Tensor:
    return x * TABLE[0]


class ReadsGlobalElsewhere(Rms):
    def normed(self, x: Tensor) -> Tensor:
        return _scaled(super().normed(x))


class Noise(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1e-9 * torch.rand_like(x) if self.training else 0)


class WithoutGradient(Rms):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class AsksForGradients(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 if torch.is_grad_enabled() else 2)


class WeightTwice(Rms):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * super().forward(x)


class TakesMore(Rms):
    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(x) * scale


class OneGroup(Rms):
    """As ``nn.GroupNorm(1, width)``, which is a layer norm for inputs of 2 dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, 1, self.weight, None, self.eps)


class TensorAttribute(Rms):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


class Raises(Rms):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("not today")


class TwoWeightsNorm(Rms):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Parameter(torch.ones(WIDTH))


REFUSED_NORMS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "group": (lambda: nn.GroupNorm(1, WIDTH), "over other dimensions than the last"),
    "batch": (lambda: nn.BatchNorm1d(WIDTH), "over other dimensions than the last"),
    "two dimensions": (lambda: nn.LayerNorm((4, WIDTH)), "its weight has more than one dimension"),
    "epsilon of the dtype": (lambda: nn.RMSNorm(WIDTH), "it has no epsilon that is a number"),
    **{
        cls.__name__: (cls, reason)
        for cls, reason in {
            EpsilonOutside: "none of our ops",
            Detached: "like rms_norm, but with other gradients of its input",
            OverTwoDimensions: "like rms_norm, but with other results for inputs of 3 dimensions",
            FourDimensions: "like rms_norm, but with other results for inputs of 4 dimensions",
            Groups: "none of our ops",
            OneGroup: "could not be tried for inputs of 3 dimensions: RuntimeError",
            Residual: "none of our ops",
            InPlace: "it changes its input in place",
            OnlyTraining: "like rms_norm, but with other results in evaluation",
            Wider: "like rms_norm, but with other results in bfloat16",
            OtherInHalf: "like rms_norm, but with other results in float16",
            Counts: "its forward changes calls",
            CountsForAll: "its forward changes calls",
            Clamped: "like rms_norm, but with other results for large numbers",
            ReadsGlobal: "its forward reads SCALE, a float that may change",
            ReadsGlobalElsewhere: "its forward reads TABLE, a list that may change",
            Noise: "it draws random numbers",
            WithoutGradient: "like rms_norm, but with other gradients",
            AsksForGradients: "it gives other results without gradients",
            WeightTwice: "none of our ops",
            TakesMore: "its forward takes more than the hidden states",
            TensorAttribute: "its attribute scale is a tensor",
            Raises: "could not be tried for inputs of 2 dimensions: ValueError: not today",
            TwoWeightsNorm: "its parameters are weight, other",
        }.items()
    },
}


def refused(module: nn.Module, reason: str, kind: str, x: Tensor | None = None, **options: Any) -> None:
    """Patch a module, and expect that it was inspected, left alone for a reason, and computes as before."""
    module = randomized(module)
    wanted = None if x is None else run(module, x)
    report = patched(module, **options)
    (site,) = [site for site in report.sites if site.kind == kind]
    assert site.reason is not None and reason in site.reason, report
    if x is not None:
        check_same(run(module, x), wanted, 0.0)


@pytest.mark.parametrize("name", REFUSED_NORMS)
def test_norm_look_alike(name: str) -> None:
    build, reason = REFUSED_NORMS[name]
    runs = name not in ("Raises", "two dimensions", "InPlace")
    refused(build(), reason, "norm", torch.randn(6, WIDTH) if runs else None)


def test_a_factor_of_the_layer_is_seen() -> None:
    class ByLayer(Rms):
        def __init__(self, layer_idx: int) -> None:
            super().__init__()
            self.layer_idx = layer_idx

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + self.layer_idx)

    report = patched(nn.Sequential(ByLayer(0), ByLayer(1)))
    assert [site.reason is None for site in report.sites] == [True, False]


def test_a_norm_called_by_name() -> None:
    module, x = nn.LayerNorm(WIDTH), torch.randn(3, WIDTH)
    wanted = module(input=x)
    assert patched(module).replaced["norm"] == 1
    torch.testing.assert_close(module(input=x), wanted)
    with pytest.raises(TypeError, match="forward"):
        module(x, other=1)


# ---- gated MLPs -----------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("cls", [Mlp, Lfm, T5, Merged, UpFirst])
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


class DropoutChild(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


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
    DropoutChild: "it has a dropout",
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


# ---- rotations ------------------------------------------------------------------------------------------------------


def _turned(x: Tensor, cos: Tensor, sin: Tensor, dim: int) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos.unsqueeze(dim) + torch.cat((-x[..., half:], x[..., :half]), -1) * sin.unsqueeze(dim)


def apply_rotary_true(q, k, cos, sin, unsqueeze_dim=1):
    return _turned(q, cos, sin, unsqueeze_dim), _turned(k, cos, sin, unsqueeze_dim)


def apply_rotary_only_q(q, k, cos, sin, unsqueeze_dim=1):
    return _turned(q, cos, sin, unsqueeze_dim), k * 1


def apply_rotary_back(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_true(q, k, cos, -sin, unsqueeze_dim)


def apply_rotary_detached(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary_true(q, k.detach(), cos, sin, unsqueeze_dim)


def apply_rotary_scaled(q, k, cos, sin, unsqueeze_dim=1):
    q, k = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    return q * SCALE, k


def apply_rotary_in_place(q, k, cos, sin, unsqueeze_dim=1):
    result = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    q.zero_()
    return result


def apply_rotary_long(q, k, cos, sin, unsqueeze_dim=1):
    q, k = apply_rotary_true(q, k, cos, sin, unsqueeze_dim)
    return (q * 2, k) if q.shape[2] > 64 else (q, k)


def apply_rotary_complex(xq, xk, freqs_cis):
    return xq, xk


class Attention(nn.Module):
    """Calls a rotation as a global of its file."""

    def forward(self, q, k, cos, sin):
        return apply_rotary_true(q, k, cos, sin)


def apply_rotary_of_one_too(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    q = _turned(q, cos, sin, unsqueeze_dim)
    return q if k is None else (q, _turned(k, cos, sin, unsqueeze_dim))


class AllForms(Attention):
    """Calls a rotation in each form that it has: of one tensor, with names, with a number."""

    def forward(self, q, k, cos, sin):
        one = apply_rotary_of_one_too(q, cos=cos, sin=sin)
        named = apply_rotary_of_one_too(k=k, q=q, sin=sin, cos=cos)
        placed = apply_rotary_of_one_too(q, k, cos, sin, 1)
        first = apply_rotary_of_one_too(q.transpose(1, 2), cos=cos, sin=sin, unsqueeze_dim=2)
        return one, *named, *placed, *apply_rotary_of_one_too(q, None, cos, sin=sin), first


class OnlyQ(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_only_q(q, k, cos, sin)


class Back(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_back(q, k, cos, sin)


class KeysDetached(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_detached(q, k, cos, sin)


class ScaledByGlobal(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_scaled(q, k, cos, sin)


class QueriesOverwritten(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_in_place(q, k, cos, sin)


class LongOnes(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_long(q, k, cos, sin)


class OtherArguments(Attention):
    def forward(self, q, k, cos, sin):
        return apply_rotary_complex(q, k, torch.complex(cos, sin))


class Method(Attention):
    def _apply_rotary(self, q, k, cos, sin):
        return q, k

    def forward(self, q, k, cos, sin):
        return self._apply_rotary(q, k, cos, sin)


def test_rotation() -> None:
    module = Attention()
    q, k = (torch.randn(2, 3, 5, 16, requires_grad=True) for _ in range(2))
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    tables = angles.cos().requires_grad_(), angles.sin()
    wanted = module(q, k, *tables)
    assert patched(module).replaced["rope"] == 1
    for got, value in zip(module(q, k, *tables), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    grads = [torch.autograd.grad(result[0].sum(), tables[0])[0] for result in (module(q, k, *tables), wanted)]
    torch.testing.assert_close(*grads)  # learned tables go to the model's own rotation
    half = [t.detach().bfloat16() for t in (q, k)]
    assert module(*half, *(t.detach() for t in tables))[0].dtype == torch.float32  # as the model's own


def test_rotation_is_called_in_every_form() -> None:
    module = AllForms()
    q, k = (torch.randn(2, 3, 5, 16) for _ in range(2))
    angles = torch.randn(2, 5, 8).repeat(1, 1, 2)
    wanted = module(q, k, angles.cos(), angles.sin())
    assert patched(module).replaced["rope"] == 1
    for got, value in zip(module(q, k, angles.cos(), angles.sin()), wanted, strict=True):
        torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
    with pytest.raises(TypeError, match="apply_rotary_of_one_too"):  # the original's error
        type(module).forward.__globals__["apply_rotary_of_one_too"](q, k, angles, angles, 1, 2)


REFUSED_ROTATIONS = {
    OnlyQ: "no way of ours",
    Back: "no way of ours",
    KeysDetached: "like halves, but with other gradients of its input",
    ScaledByGlobal: "reads SCALE, a float that may change",
    QueriesOverwritten: "it changes its input in place",
    LongOnes: "like halves, but with other results",
    OtherArguments: "its arguments are xq, xk, freqs_cis; expected q, k, cos, sin",
    Method: "_apply_rotary is no global of its file",
}


@pytest.mark.parametrize("cls", REFUSED_ROTATIONS, ids=lambda cls: cls.__name__)
def test_rotation_look_alike(cls: type[nn.Module]) -> None:
    refused(cls(), REFUSED_ROTATIONS[cls], "rope")
