"""The kernel of decoding steps as a backend of products: any number of rows, parts of k that differ."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at

import rtkernels
from rtkernels import explain, scaled_mm
from rtkernels.ops.gemm import decode_plan


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("m, n, k", ((1, 33, 136), (5, 100, 1032), (8, 24, 2056), (16, 24, 2056)))
def test_products(monkeypatch: pytest.MonkeyPatch, place: str, m: int, n: int, k: int) -> None:
    """With as many SMs as an H200 has, two blocks share k, the second of which may have a step less."""
    if place == "sm_80" and m * k > 32000:
        pytest.skip("too little shared memory")
    shape = decode_plan._shape
    monkeypatch.setattr(decode_plan, "_shape", lambda p, target, sms, normed: shape(p, target, 132, normed))
    torch.manual_seed(0)
    with running_on(place) as device:
        a, b = (torch.randn(rows, k, device=device).bfloat16() for rows in (m, n))
        bias = torch.randn(n, device=device)
        got = scaled_mm(a, b, bias=bias, act="relu", out_dtype=torch.float32, backend="decode")
        exact = (a.double() @ b.double().t() + bias.double()).relu()
        magnitude = a.double().abs() @ b.double().abs().t() + bias.double().abs()
        assert ((got.double() - exact).abs() <= 2.0**-18 * magnitude).all()


@pytest.mark.parametrize("m, backend", ((1, "decode"), (8, "decode"), (9, "skinny")))
def test_the_choice(m: int, backend: str) -> None:
    a, b = (torch.empty(rows, 4096, dtype=torch.bfloat16, device="meta") for rows in (m, 4096))
    assert explain(scaled_mm, a, b, target="9.0").backend == backend
    assert explain(rtkernels.gated_mm, a, b, target="9.0").backend != "decode"
