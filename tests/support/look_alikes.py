"""Helpers of the tests with modules that look like norms, gated MLPs and rotations."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from rtkernels import models

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


def refused(module: nn.Module, reason: str, kind: str, x: Tensor | None = None, **options: Any) -> None:
    """Patch a module, and expect that it was inspected, left alone for a reason, and computes as before."""
    module = randomized(module)
    wanted = None if x is None else run(module, x)
    report = patched(module, **options)
    (site,) = [site for site in report.sites if site.kind == kind]
    assert site.reason is not None and reason in site.reason, report
    if x is not None:
        check_same(run(module, x), wanted, 0.0)
