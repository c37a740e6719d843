"""sage_attention: close to unquantised attention, with its gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import running_on
from support.places import at, error_tests
from torch import Tensor

from rtkernels import attention, sage_attention

BF16 = torch.bfloat16


def given(width: int = 64, device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 40, 4, width), (1, 70, 2, width), (1, 70, 2, width))
    return [(torch.randn(s, generator=generator) + 0.5).to(BF16).to(device) for s in shapes]


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize(
    ("qk", "pv"),
    [
        ("int8", "16"),
        *(pytest.param(*p, marks=pytest.mark.slow) for p in (("int8", "int8"), ("int8", "fp8"), ("fp8", "fp8"))),
    ],
)
def test_near_attention(qk: str, pv: str, place: str) -> None:
    with running_on(place) as device:
        q, k, v = (t.requires_grad_() for t in given(device=device))
        out, lse = sage_attention(q, k, v, causal=True, qk=qk, pv=pv, return_lse=True)
        exact, exact_lse = exact_attention(q, k, v, causal=True)
        assert torch.nn.functional.cosine_similarity(out.double().flatten(), exact.flatten(), 0) > 0.998
        assert_near(lse, exact_lse, 0.03, "lse")
        if (qk, pv) == ("int8", "16"):
            g = torch.ones_like(out)
            got = torch.autograd.grad((out, lse), (q, k, v), (g, torch.ones_like(lse)))
            plain, plain_lse = attention(q, k, v, causal=True, return_lse=True)
            wanted = torch.autograd.grad((plain, plain_lse), (q, k, v), (g, torch.ones_like(lse)))
            for x, y in zip(got, wanted, strict=True):
                assert torch.equal(x, y)


def test_layout_and_granularity() -> None:
    q, k, v = given()
    plain = sage_attention(q, k, v, granularity="block")
    other = sage_attention(*(t.transpose(1, 2) for t in (q, k, v)), granularity="block", layout="bhld")
    assert torch.equal(other.transpose(1, 2), plain)
    assert_near(plain, exact_attention(q, k, v)[0], 0.05)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    first, second = ([t.requires_grad_() for t in given(16)] for _ in range(2))
    sage_attention(*first, causal=True).float().sum().backward()
    block = torch.compile(lambda q, k, v: sage_attention(q, k, v, causal=True), fullgraph=True, backend="aot_eager")
    block(*second).float().sum().backward()
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a.grad, b.grad)


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        q, k, v = given()
        sage_attention(q, k, v, **changes)

    return call, message


BAD = {
    "qk": bad("qk is 'int4'", qk="int4"),
    "pv": bad("pv is 'bf16'", pv="bf16"),
    "layout": bad("layout is 'lbhd'", layout="lbhd"),
    "mixed": bad("v has int8 codes and q float8_e4m3fn", qk="fp8", pv="int8"),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)
