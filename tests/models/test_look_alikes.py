"""Modules that look like norms: the real ones are replaced, all others are rejected.

Every look-alike differs from an original in this file in one place. A rejection has a reason, and nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from support.look_alikes import WIDTH, check_same, patched, randomized, refused, run
from torch import Tensor, nn

pytest.importorskip("transformers", minversion="5.0")


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


class WithoutWeight(nn.Module):
    """As OLMo's norm: no parameters, and an epsilon in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (WIDTH,)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5).to(x.dtype)


class NormWithoutWeight(WithoutWeight):
    pass


class NormLikeWithoutWeight(WithoutWeight):
    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x.float(), self.normalized_shape, None, None, eps=1e-5).to(x.dtype) * 1.01


def test_norm_without_parameters() -> None:
    module, x = NormWithoutWeight(), torch.randn(3, WIDTH)
    wanted = run(module, x)
    assert patched(module).replaced["norm"] == 1
    check_same(run(module, x), wanted, 1e-5)
    refused(NormLikeWithoutWeight(), "none of our ops", "norm", x)
