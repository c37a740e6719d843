"""Products of aten on our kernels: strides, what is added, what stays torch's."""

from __future__ import annotations

import pytest
import torch
from support.overrides import compare
from support.places import at, emulated

from rtkernels.aten import product
from rtkernels.aten.table import NotHandled

PLACES = ("sm_80", "sm_90", "cuda")


@emulated
@at(*PLACES)
@pytest.mark.parametrize(("m", "n", "k"), [(5, 24, 40), (1, 7, 9), (130, 16, 72)])
def test_products(m: int, n: int, k: int, place: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(m, k).bfloat16(), torch.randn(k, n).bfloat16()
    close = {"rtol": 2**-7, "atol": 2**-5}
    for left in (a, a.t().contiguous().t(), torch.stack([a, a], 2)[:, :, 0]):
        for right in (b, b.t().contiguous().t()):
            compare(place, "gemm", torch.mm, left, right, **close)
    for added in (torch.randn(n), torch.randn(1, n), torch.randn(m, n)):
        compare(place, "gemm", torch.addmm, added.bfloat16(), a, b, **close)
    compare(
        place,
        "gemm",
        lambda c, a, b: torch.addmm(c, a, b, beta=0),
        torch.full((n,), torch.nan).bfloat16(),
        a,
        b,
        **close,
    )
    compare(place, "gemm", torch.mv, a, b[:, 0], **close)


@emulated
@at("sm_90", "cuda")
def test_gradients_of_a_linear_layer(place: str) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
        leaves = [t.detach().clone().requires_grad_() for t in (x, weight, bias)]
        torch.nn.functional.linear(*leaves).backward(dy)
        return [t.grad for t in leaves]

    torch.manual_seed(0)
    given = torch.randn(6, 32), torch.randn(16, 32), torch.randn(16), torch.randn(6, 16)
    compare(place, "gemm", step, *(t.bfloat16() for t in given), rtol=2**-6, atol=2**-4)


def test_what_stays_with_torch() -> None:
    a, b = torch.randn(3, 8).bfloat16(), torch.randn(8, 4).bfloat16()
    for call in (
        lambda: product._mm(a.float(), b.float()), lambda: product._mm(a, b.half()), lambda: product._mm(a[:0], b),
        lambda: product._mm(a, b[:4]), lambda: product._addmm(b[0], a, b, alpha=2),
        lambda: product._addmm(a[:, :1], a, b), lambda: product._addmm(b[0].float(), a, b),
    ):  # fmt: skip
        assert isinstance(call(), NotHandled)
