"""Attention of a chunk over a prefix and itself: layouts, edges of tiles, rotation."""

from __future__ import annotations

import pytest
import torch

import rtkernels
from rtkernels.ops.attention.chunk_attention import FORWARD

BF16, FP16 = torch.bfloat16, torch.float16


def case(batch: int, tokens: int, prefix: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype = BF16):
    """Return arguments and the exact result, q and k rounded behind the rotation."""
    g = torch.Generator().manual_seed(tokens + prefix)
    qkv = torch.randn(batch, tokens, (heads + 2 * kv_heads) * width, generator=g).to(dtype)
    k, v = (torch.randn(batch, prefix + 3, kv_heads, width, generator=g).to(dtype) for _ in range(2))
    cos, sin = rtkernels.rope_table(prefix + tokens + 1, width)
    q, k_new, v_new = qkv.view(batch, tokens, -1, width).split([heads, kv_heads, kv_heads], 2)

    def rotated(t: torch.Tensor) -> torch.Tensor:
        low, high = t.double().chunk(2, -1)
        c, s = (table[prefix : prefix + tokens, None].double() for table in (cos, sin))
        return torch.cat([low * c - high * s, high * c + low * s], -1).to(dtype).double()

    keys = torch.cat([k[:, :prefix].double(), rotated(k_new)], 1).repeat_interleave(heads // kv_heads, 2)
    values = torch.cat([v[:, :prefix], v_new], 1).double().repeat_interleave(heads // kv_heads, 2)
    scores = torch.einsum("bqhd,bkhd->bhqk", rotated(q), keys) * width**-0.5
    exact = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)
    return (qkv, k, v, (cos, sin)), prefix, exact


def check(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    assert out.dtype == dtype and not out.isnan().any()
    error = (out.double() - exact).abs().max() / exact.abs().max()
    assert error < (1e-2 if dtype == BF16 else 2e-3), error


CASES = [
    (1, 10, 54, 8, 1, 256),
    (2, 3, 37, 4, 2, 128),
    (1, 1, 0, 2, 1, 128),
    (1, 7, 16, 2, 2, 256),
    (1, 17, 129, 1, 1, 128),
]


@pytest.mark.parametrize("place", ("cpu", "sm_80", "sm_90", pytest.param("cuda", marks=pytest.mark.gpu)))
@pytest.mark.parametrize("sizes", CASES, ids=str)
def test_values(sizes: tuple[int, ...], place: str) -> None:
    for dtype, constant in ((BF16, False), (FP16, True)):
        arguments, prefix, exact = case(*sizes, dtype)
        options = {"prefix": prefix, "constant": constant}
        if place == "cuda":
            moved = [t.cuda() if isinstance(t, torch.Tensor) else tuple(a.cuda() for a in t) for t in arguments]
            before = [t.clone() for t in moved[:3]]
            out = rtkernels.chunk_attention(*moved, **options).cpu()
            assert all(torch.equal(a, b) for a, b in zip(before, moved[:3], strict=True))
        elif place == "cpu":
            out = rtkernels.chunk_attention(*arguments, **options)
        else:
            with rtkernels.emulate(place):
                out = rtkernels.chunk_attention(*arguments, **options)
        check(out, exact, dtype)


def test_strides_and_no_batch() -> None:
    (qkv, k, v, rope), prefix, exact = case(1, 5, 20, 4, 1, 128)
    both = torch.stack([k, v], 3)  # keys and values of a position together
    wide = torch.cat([qkv, torch.full_like(qkv[..., :8], torch.nan)], -1)[..., : qkv.shape[-1]]
    with rtkernels.emulate("sm_90"):
        out = rtkernels.chunk_attention(wide[0], both[0, :, :, 0], both[0, :, :, 1], rope, prefix=prefix)
        check(out, exact[0], BF16)
        odd = torch.zeros(1, 23, 1, 132, dtype=BF16)  # rows that are not aligned run in torch
        odd[..., :128] = k
        check(rtkernels.chunk_attention(qkv, odd[..., :128], v, rope, prefix=prefix), exact, BF16)
        even = rtkernels.chunk_attention(qkv, k, v, rope, prefix=prefix, scale=1e-9)
    mean = torch.cat([v[:, :prefix], qkv.view(1, 5, -1, 128)[:, :, 5:]], 1).double().mean(1, keepdim=True)
    check(even, mean.expand(1, 5, 4, 128), BF16)


def test_heads_without_elements_are_refused() -> None:
    qkv, cache, rope = torch.zeros(1, 5, 0, dtype=BF16), torch.zeros(1, 23, 1, 0, dtype=BF16), torch.zeros(25, 0)
    with pytest.raises(rtkernels.ArgumentError, match=r"k_cache has shape .*; expected .*width"):
        rtkernels.chunk_attention(qkv, cache, cache, (rope, rope), prefix=20)


def test_the_order_of_blocks_makes_no_difference() -> None:
    arguments, prefix, _ = case(1, 10, 150, 4, 1, 128)
    found = []
    for order in ("forward", "reverse", 3):
        with rtkernels.emulate("sm_90", order=order):
            found.append(rtkernels.chunk_attention(*arguments, prefix=prefix, constant=True))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_refused_arguments() -> None:
    (qkv, k, v, rope), prefix, _ = case(1, 5, 20, 4, 1, 128)
    for message, changed in (
        ("prefix is 24", {"prefix": 24}),
        ("qkv has 700 columns", {"qkv": qkv[..., :700]}),
        ("has shape \\(22, 64\\)", {"rope": tuple(t[:22] for t in rope)}),
        ("v_cache has shape", {"v_cache": v[:, :9]}),
        ("k_cache has dtype", {"k_cache": k.half()}),
        ("rope is a", {"rope": rope[0]}),
        ("not differentiable", {"qkv": qkv.clone().requires_grad_()}),
    ):
        given = {"qkv": qkv, "k_cache": k, "v_cache": v, "rope": rope, "prefix": prefix} | changed
        with pytest.raises(rtkernels.ArgumentError, match=message):
            rtkernels.chunk_attention(**given)


def emulated_coverage() -> None:
    with rtkernels.emulate("sm_90"):
        for dtype in (BF16, FP16):
            for width in (128, 256):
                (qkv, k, v, rope), prefix, _ = case(1, 2, 3, 1, 1, width, dtype)
                FORWARD.call(qkv, k, v, *rope, prefix, 0.1, False)
