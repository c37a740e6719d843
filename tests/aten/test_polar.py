"""Complex numbers from magnitudes and angles on our pointwise kernels."""

from __future__ import annotations

import torch
from support.overrides import compare, views
from support.places import at, emulated


@emulated
@at("sm_80", "sm_90", "cuda")
def test_polar(place: str) -> None:
    """Magnitudes and angles of any strides, with NaN and infinities; other dtypes are torch's."""
    for x in views(torch.float32):
        y = torch.linspace(-7, 7, x.numel()).view(x.shape[::-1]).permute(tuple(range(x.dim()))[::-1])
        compare(place, "polar", torch.polar, x, y)
        if 0 not in x.stride():
            compare(place, "polar", lambda x, y: torch.polar(x, y, out=torch.polar(y, x)), x, y)
    compare(place, "polar", torch.polar, torch.randn(5, 1, 7), torch.randn(3, 1))
    compare(place, "polar", torch.polar, torch.randn(9).double(), torch.randn(9).double(), ours=False)


@emulated
@at("sm_90", "cuda")
def test_gradients_of_polar(place: str) -> None:
    def gradients(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, y = x.detach().requires_grad_(), y.detach().requires_grad_()
        return torch.autograd.grad(torch.view_as_real(torch.polar(x, y)).square().sum(-1).sum() + y.sum(), (x, y))

    compare(place, "polar", gradients, torch.randn(5, 7), torch.randn(5, 7))
