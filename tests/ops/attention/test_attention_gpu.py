"""Attention on a GPU, at sizes too slow for the emulator: tile edges, shared heads, errors compared with torch's."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.attention_exact import assert_near
from support.ways import assert_compiles, assert_equal_bits, captured
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.rows.attention.lightning import _chunked
from rtkernels import attention, attention_varlen, lightning_attention, mla_attention

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
UNIT = 2.0**-6


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(BF16)


def leaves_of(batch: int, lq: int, lkv: int, heads: int, heads_kv: int, width: int, width_v: int = 0) -> list[Tensor]:
    shapes = ((batch, lq, heads, width), (batch, lkv, heads_kv, width), (batch, lkv, heads_kv, width_v or width))
    return [normal(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
    """In float64, without loops; `seen`: [queries, keys]."""
    group = q.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2) for t in (q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)))
    s = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf")).masked_fill(~seen.any(1, keepdim=True), 0.0)
    p = s.softmax(-1) if seen is None else s.softmax(-1).masked_fill(~seen.any(1, keepdim=True), 0.0)
    return (p @ v).transpose(1, 2)


def seen_keys(lq: int, lkv: int, left: int | None, right: int | None) -> Tensor:
    i, j = torch.arange(lq, device="cuda").view(-1, 1) + lkv - lq, torch.arange(lkv, device="cuda")
    seen = torch.ones(lq, lkv, dtype=torch.bool, device="cuda")
    if left is not None:
        seen &= j >= i - left
    return seen if right is None else seen & (j <= i + right)


def check(leaves: list[Tensor], seen: Tensor | None, **options: Any) -> None:
    out = attention(*leaves, **options)
    g = normal(*out.shape, seed=9)
    got = torch.autograd.grad(out, leaves, g)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want = exact(*doubles, seen)
    assert_near(out, want, UNIT, "out")
    for name, a, b in zip(("dq", "dk", "dv"), got, torch.autograd.grad(want, doubles, g.double()), strict=True):
        assert_near(a, b, UNIT, name)


@pytest.mark.parametrize("backend", ["auto", "mma"])
@pytest.mark.parametrize("group", range(1, 17))
def test_heads_that_share_keys(group: int, backend: str) -> None:
    check(leaves_of(1, 70, 190, group, 1, 64), seen_keys(70, 190, None, 0), causal=True, backend=backend)


EDGES = (63, 64, 65, 127, 128, 129, 175, 176, 177, 352, 353)


@pytest.mark.parametrize("backend", ["auto", "mma"])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("lkv", EDGES)
def test_masks_at_the_edges_of_tiles(lkv: int, width: int, backend: str) -> None:
    for lq in (1, 129, lkv):
        leaves = leaves_of(1, lq, lkv, 2, 1, width)
        for window in (None, (63, 0), (64, 64)):
            left, right = (None, 0) if window is None else window
            options = {"causal": True} if window is None else {"window": window}
            check(leaves, seen_keys(lq, lkv, left, right), **options, backend=backend)


@pytest.mark.parametrize("widths", [(8,), (72,), (80,), (96,), (128, 64), (192, 128), (192,), (256,)], ids=str)
def test_widths(widths: tuple[int, ...]) -> None:
    check(leaves_of(2, 130, 300, 4, 2, *widths), seen_keys(130, 300, None, 0), causal=True)


@pytest.mark.parametrize("widths", [(192, 128), (192,), (256,)], ids=str)
@pytest.mark.parametrize("lkv", (63, 129, 352))
def test_masks_at_the_edges_of_tiles_of_large_heads(lkv: int, widths: tuple[int, ...]) -> None:
    for lq in (1, 97, lkv):
        leaves = leaves_of(1, lq, lkv, 2, 1, *widths)
        for window in (None, (63, 0), (64, 64)):
            left, right = (None, 0) if window is None else window
            options = {"causal": True} if window is None else {"window": window}
            check(leaves, seen_keys(lq, lkv, left, right), **options)
        check(leaves, None)


@pytest.mark.parametrize("backend", ["sm90", "mma"])
@pytest.mark.parametrize("width", [64, 96, 128, 256])
def test_a_limit_for_each_query(width: int, backend: str) -> None:
    if backend == "sm90" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs wgmma")
    limit = torch.randint(0, 301, (300,), generator=torch.Generator().manual_seed(1)).int().cuda()
    seen = seen_keys(300, 300, None, 0) & (torch.arange(300, device="cuda") < limit.view(-1, 1))
    check(leaves_of(2, 300, 300, 4, 2, width), seen, causal=True, kv_limit=limit, backend=backend)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("width", [64, 128, 256])
def test_errors_are_those_of_torch(width: int, causal: bool) -> None:
    """Root mean squares of the errors of the result and of each gradient, compared with torch's fused kernels."""
    leaves = leaves_of(1, 1024, 1024, 4, 4, width)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want = exact(*doubles, seen_keys(1024, 1024, None, 0) if causal else None)
    g = normal(*want.shape, seed=9)
    want = (want, *torch.autograd.grad(want, doubles, g.double()))
    errors = []
    for ours in (True, False):
        if ours:
            out = attention(*leaves, causal=causal)
        else:
            with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
                out = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in leaves), is_causal=causal).transpose(
                    1, 2
                )
        got = (out, *torch.autograd.grad(out, leaves, g))
        errors.append([(a.double() - b).square().mean().sqrt().item() for a, b in zip(got, want, strict=True)])
    for name, mine, theirs in zip(("out", "dq", "dk", "dv"), *errors, strict=True):
        assert mine <= 1.05 * theirs, f"{name}: {mine:.3g}, torch's {theirs:.3g}"


@pytest.mark.parametrize("backend", ["auto", "mma"])
@pytest.mark.parametrize("causal", [False, True])
def test_results_repeat_bit_by_bit(causal: bool, backend: str) -> None:
    leaves = leaves_of(2, 1500, 1700, 8, 4, 128)

    def run() -> tuple[Tensor, ...]:
        out = attention(*leaves, causal=causal, backend=backend)
        return out, *torch.autograd.grad(out, leaves, torch.ones_like(out))

    first = run()
    for _ in range(4):
        assert_equal_bits(run(), first)


@pytest.mark.parametrize("backend", ["auto", "mma"])
def test_one_graph_serves_the_gradients_of_all_lengths(backend: str) -> None:
    leaves = leaves_of(3, 150, 300, 4, 2, 128)
    lengths = torch.tensor([300, 1, 0], dtype=torch.int32, device="cuda")
    g = normal(3, 150, 4, 128, seed=9)

    def run() -> tuple[Tensor, ...]:
        out = attention(*leaves, causal=True, seqused_k=lengths, backend=backend)
        return out, *torch.autograd.grad(out, leaves, g)

    replay = captured(run)
    for values in ((300, 1, 0), (17, 300, 129)):
        lengths.copy_(torch.tensor(values))
        replayed = tuple(t.clone() for t in replay())
        assert_equal_bits(replayed, run())


def test_compiles_without_graph_breaks() -> None:
    inputs = [[t.detach() for t in leaves_of(1, 70, lkv, 4, 2, 64)] for lkv in (130, 90)]
    assert_compiles(lambda q, k, v: attention(q, k, v, causal=True).float(), inputs)


@pytest.mark.parametrize("clip", [None, 5.0])
def test_packed_latent_attention(clip: float | None) -> None:
    ends = [0, 70, 70, 300, 301]
    cu = torch.tensor(ends, dtype=torch.int32, device="cuda")
    q, k, v = (normal(310, 4, w, seed=i).requires_grad_() for i, w in enumerate((192, 192, 128)))
    out = mla_attention(q, k, v, cu_seqlens_q=cu, max_seqlen_q=230, clip_value=clip)
    g = normal(*out.shape, seed=9)
    got = torch.autograd.grad(out, (q, k, v), g)
    assert not out[301:].any() and not any(t[301:].any() for t in got)
    for begin, end in pairwise(ends):
        rows = [t.detach()[None, begin:end].clone().requires_grad_() for t in (q, k, v)]
        want = mla_attention(*rows, clip_value=clip)
        assert_near(out[begin:end], want[0], UNIT, "out")
        if end > begin:
            for name, a, b in zip(
                ("dq", "dk", "dv"), got, torch.autograd.grad(want, rows, g[None, begin:end]), strict=True
            ):
                assert_near(a[begin:end], b[0], UNIT, name)


def test_gradients_of_sinks_of_packed_sequences_leave_scratch_out() -> None:
    """Scratch between sequences is uninitialised: here it holds numbers, not NaN."""
    cu = torch.tensor([0, 2, 5, 130], dtype=torch.int32, device="cuda")
    q, k, v = (normal(130, 2, 64, seed=i) for i in range(3))
    sinks = torch.zeros(2, device="cuda", requires_grad=True)
    results = []
    for value in (0.5, float("nan")):
        before = [torch.full((1 << 18,), value, device="cuda") for _ in range(8)]
        torch.cuda.synchronize()
        del before
        out = attention_varlen(q, k, v, cu, cu.clone(), 125, 125, causal=True, sinks=sinks)
        results.append(torch.autograd.grad(out, sinks, torch.ones_like(out)))
    assert_equal_bits(*results)


def test_linear_attention_of_whole_models() -> None:
    """The heads of linghe's benchmark, a quarter of its length, with gradients."""
    leaves = [normal(2, 1024, 64, 128, seed=i).requires_grad_() for i in range(3)]
    decay = 0.5 ** torch.linspace(1, 8, 64, device="cuda")
    out = lightning_attention(*leaves, decay)
    g = normal(*out.shape, seed=9)
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    want = _chunked(*doubles, decay.double())
    assert_near(out, want, UNIT, "out")
    wanted = torch.autograd.grad(want, doubles, g.double())
    for name, a, b in zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, g), wanted, strict=True):
        assert_near(a, b, UNIT, name)
