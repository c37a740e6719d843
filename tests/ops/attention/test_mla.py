"""mla_attention: values and gradients against float64, clipped products, packed sequences."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.attention_exact import assert_near, exact_attention
from support.compare import poisoned, running_on
from support.places import at, error_tests
from torch import Tensor

from rtkernels import attention, attention_varlen, mla_attention

BF16 = torch.bfloat16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def expanded(batch: int, lq: int, lkv: int, heads: int, device: str) -> list[Tensor]:
    shapes = ((batch, lq, heads, 192), (batch, lkv, heads, 192), (batch, lkv, heads, 128))
    return [random(*shape, seed=i, device=device) for i, shape in enumerate(shapes)]


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("clip", [None, 6.0])
def test_training(clip: float | None, place: str) -> None:
    with running_on(place) as device:
        given = expanded(1, 19, 35, 2, device)
        g = random(1, 19, 2, 128, seed=7, device=device)
        results = []
        for exact in (False, True):
            leaves = [t.clone().requires_grad_() for t in given]
            if exact:
                out, _ = exact_attention(*leaves, scale=128**-0.5, causal=True, clip=clip and clip * 128**-0.5)
            else:
                with poisoned():
                    out = mla_attention(*leaves, scale=128**-0.5, clip_value=clip)
            results.append((out, *torch.autograd.grad(out, leaves, g.to(out.dtype))))
        for name, got, exact in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert_near(got, exact, 2.0**-6, name)


@at("sm_90", "cuda")
def test_clipped_products_by_wgmma(place: str) -> None:
    """The cut-off in the kernels of sm_90: narrower heads, whose backward they have."""
    with running_on(place) as device:
        given = [t[..., :64].contiguous() for t in expanded(1, 9, 35, 1, device)]
        results = []
        for exact in (False, True):
            leaves = [t.clone().requires_grad_() for t in given]
            if exact:
                out, _ = exact_attention(*leaves, clip=4.0 * 0.125)
            else:
                out = mla_attention(*leaves, clip_value=4.0, causal=False, backend="sm90")
            results.append((out, *torch.autograd.grad(out, leaves, torch.ones_like(out))))
        for name, got, exact in zip(("out", "dq", "dk", "dv"), *results, strict=True):
            assert_near(got, exact, 2.0**-6, name)


def test_is_attention_without_a_clip() -> None:
    q, k, v = expanded(2, 5, 7, 2, "cpu")
    assert torch.equal(mla_attention(q, k, v), attention(q, k, v, causal=True))
    first = mla_attention(*(t.transpose(1, 2) for t in (q, k, v)), layout="bhld")
    assert torch.equal(first.transpose(1, 2), attention(q, k, v, causal=True))
    ends = torch.tensor([0, 3, 5], dtype=torch.int32)
    packed = [t[0, :5] for t in (q, k, v)]
    expected = attention_varlen(*packed, ends, ends.clone(), 3, 3, causal=True)
    assert torch.equal(mla_attention(*packed, cu_seqlens_q=ends, max_seqlen_q=3), expected)
    assert torch.equal(mla_attention(*packed, cu_seqlens_q=ends), expected)


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        q, k, v = expanded(1, 3, 3, 1, "cpu")
        mla_attention(**({"q": q, "k": k, "v": v} | changes))

    return call, message


BAD = {
    "clip": bad("clip_value is 0.0; expected a positive number, or None", clip_value=0.0),
    "dims": bad("q has shape .*3 dimensions", cu_seqlens_q=torch.tensor([0, 3], dtype=torch.int32)),
    "layout": bad("layout is 'lbhd'", layout="lbhd"),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)
