"""Options that linghe's functions have: directions, group sizes, lists, fp8 gradients, exchanges between processes."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from support.processes import joined, spawn

import rtkernels
from rtkernels.errors import ArgumentError


@at("cpu", "sm_90")
@pytest.mark.parametrize("granularity", ["group", "block"])
def test_group_sizes(granularity: str, place: str) -> None:
    x = torch.randn(64, 192).bfloat16()
    with running_on(place):
        q, scale = rtkernels.quantize_fp8(x, granularity=granularity, group_size=32)
        back = rtkernels.dequantize_fp8(q, scale, granularity=granularity, group_size=32, dtype=torch.float32)
    down = 32 if granularity == "block" else 1
    amax = x.float().view(64 // down, down, 6, 32).abs().amax((1, 3))
    torch.testing.assert_close(scale, amax / 448)
    wanted = (x.float() / scale.repeat_interleave(down, 0).repeat_interleave(32, 1)).to(torch.float8_e4m3fn).float()
    assert (q.float() - wanted).abs().max() <= 32  # the neighbouring code where the quotient is between two
    torch.testing.assert_close(back, x.float(), rtol=2**-3.9, atol=1e-3)
    with pytest.raises(ArgumentError, match="group_size is 100; expected a divisor"):
        rtkernels.quantize_fp8(x, granularity=granularity, group_size=100)
    with pytest.raises(ArgumentError, match="group_size is 64; expected 128 unless"):
        rtkernels.quantize_fp8(x, granularity="row", group_size=64)


def test_directions_of_smooth_factors() -> None:
    x, smooth, rows = torch.randn(6, 256), torch.rand(256) + 0.5, torch.rand(6) + 0.5
    one = rtkernels.glu_smooth_fp8(x, smooth[:128], divide=False)
    other = rtkernels.glu_smooth_fp8(x, 1 / smooth[:128])
    assert_same_bits(one.q, other.q)
    got = rtkernels.glu_smooth_fp8_backward(x[:, :128], x, smooth, row_factor=rows, layout="both", divide=True)
    wanted = rtkernels.glu_smooth_fp8_backward(x[:, :128], x, 1 / smooth, row_factor=1 / rows, layout="both")
    assert_same_bits(got.q, wanted.q)
    assert_same_bits(got.q_t, wanted.q_t)
    channel = {"granularity": "channel", "pad_to": 32}
    got = rtkernels.quantize_fp8_smooth(x, row_factor=rows, divide_rows=True, **channel)
    assert_same_bits(got.q, rtkernels.quantize_fp8_smooth(x, row_factor=1 / rows, **channel).q)


@at("cpu", "sm_90")
def test_maxima_of_experts(place: str) -> None:
    x, counts = torch.randn(7, 128), torch.tensor([2, 0, 5])
    x[1, 3] = math.inf
    with running_on(place):
        found = rtkernels.quantize_fp8_smooth(x, torch.ones(3, 128), counts=counts, with_amax=True)
    kept = torch.where(x.isfinite(), x, 0.0).abs()
    assert torch.equal(found.amax, torch.stack([kept[:2].amax(0), torch.zeros(128), kept[2:].amax(0)]))


def test_sums_of_squares_floors_and_limits() -> None:
    xs = [torch.tensor([3.0, -4.0]), torch.tensor([[12.0]])]
    assert rtkernels.multi_norm(xs, root=False) == 169
    assert rtkernels.multi_norm(xs, root=False, per_tensor=True)[1].tolist() == [25, 144]
    assert rtkernels.column_absmax(torch.zeros(3, 2), floor=0.25).tolist() == [0.25, 0.25]
    xs.append(torch.tensor([math.nan, -math.inf]))
    rtkernels.multi_clip_(xs, 3.5)
    assert xs[0].tolist() == [3.0, -3.5] and xs[1].item() == 3.5 and xs[2][0].isnan() and xs[2][1] == -3.5
    with pytest.raises(ArgumentError, match="limit is -1"):
        rtkernels.multi_clip_(xs, -1.0)


@at("cpu", "sm_80", "cuda")
def test_bounds_of_equal_ids(place: str) -> None:
    g = torch.Generator().manual_seed(2)
    lists = [torch.tensor(ids, dtype=torch.int64) for ids in ([4, 4, 7, 9, 9, 9], [1], [], [2, 2], [-5, 2**40])]
    for n in (31, 4095, 4096, 4097, 13000):
        lists += [
            torch.arange(n),
            torch.zeros(n, dtype=torch.int64),
            torch.randint(n // 3, (n,), generator=g).sort().values,
        ]
    with running_on(place) as device:
        for ids in (t for listed in lists for t in (listed, listed.int())):
            found = rtkernels.id_bounds(ids.to(device)).cpu()
            begins = torch.cat([torch.ones(len(ids[:1]), dtype=torch.bool), ids[1:] != ids[:-1]]).nonzero()[:, 0].int()
            assert found.dtype == torch.int32 and len(found) == len(ids) + 1
            assert torch.equal(found[: len(begins)], begins) and (found[len(begins) :] == len(ids)).all()
        strided = torch.arange(40).view(20, 2)[:, 0]
        assert torch.equal(rtkernels.id_bounds(strided.to(device)).cpu(), torch.arange(21, dtype=torch.int32))
    with pytest.raises(ArgumentError, match="ids is float32"):
        rtkernels.id_bounds(torch.zeros(3))


@at("cpu", "sm_80")
def test_lists_of_matrices(place: str) -> None:
    stack = torch.randn(3, 20, 33)
    with running_on(place):
        for xs in (list(stack), [stack[2], stack[0]], [torch.randn(2, 5), torch.randn(7, 3)], []):
            for x, y in zip(xs, rtkernels.transpose(xs), strict=True):
                assert torch.equal(y, x.t()) and y.is_contiguous()
        out = [torch.empty(33, 20) for _ in range(3)]
        assert all(a is b for a, b in zip(rtkernels.transpose(list(stack), out=out), out, strict=True))


@at("cpu", "sm_80")
def test_add_has_gradients(place: str) -> None:
    x, y = torch.randn(4, 8, requires_grad=True), torch.randn(4, 8, requires_grad=True)
    with running_on(place):
        total = x * 1
        assert rtkernels.add_(total, y, alpha=2.0, beta=3.0) is total
        total.sum().backward()
    assert x.grad.eq(3).all() and y.grad.eq(2).all()
    torch.testing.assert_close(total, 3 * x + 2 * y)


def test_grad_scaling() -> None:
    x = torch.randn(2, 5, requires_grad=True)
    y = rtkernels.nn.GradScaling(0.2)(x)
    assert torch.equal(y, x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, (5 - torch.arange(5.0)).pow(-0.2).expand(2, 5))


def test_lengths_of_k_and_v() -> None:
    qkv, angles = torch.randn(6, 4 * 64, requires_grad=True), torch.arange(96.0).view(6, 16) / 7
    q_ends, kv_ends = (torch.tensor(e, dtype=torch.int32) for e in ([0, 2, 6], [0, 5, 6]))
    call = {"q_heads": 2, "kv_heads": 1, "rotary": 32}
    args = (qkv, None, None, angles.cos(), angles.sin())
    q, k, v = rtkernels.qk_norm_rope(*args, **call, cu_seqlens=q_ends, cu_seqlens_kv=kv_ends)
    assert torch.equal(q, rtkernels.qk_norm_rope(*args, **call, cu_seqlens=q_ends)[0])
    assert torch.equal(k, rtkernels.qk_norm_rope(*args, **call, cu_seqlens=kv_ends)[1])
    (q.sum() + k.sum() + v.sum()).backward()
    assert qkv.grad.isfinite().all() and qkv.grad.count_nonzero() > qkv.numel() // 2


def test_gradients_that_leave_as_fp8() -> None:
    x = torch.randn(5, 256, requires_grad=True)
    weight = torch.rand(5, requires_grad=True)
    seen = []
    inner = x * 1
    inner.register_hook(lambda g: seen.append((g, rtkernels.nn.fp8_gradient(g))))
    y, codes = rtkernels.nn.glu_with_fp8_gradient(inner, weight=weight, layout="both")
    assert_same_bits(codes.q, rtkernels.glu_fp8(x, weight=weight, layout="both").q)
    dy = torch.randn(5, 128)
    y.backward(dy)
    wanted = rtkernels.glu_fp8_backward(dy, x, weight=weight)
    gradient, found = seen[0]
    assert gradient.isnan().all() and gradient.untyped_storage().nbytes() == 4
    assert_same_bits(found.q, wanted.q)
    assert_same_bits(found.q_t, wanted.q_t)
    assert torch.equal(weight.grad, wanted.dweight)
    seen.clear()
    index = rtkernels.moe_index(torch.tensor([[0], [1], [0], [1], [1]]), 2, rows=64)
    rows = rtkernels.moe_permute(x.detach(), index).requires_grad_() * 1
    rows.register_hook(lambda g: seen.append(rtkernels.nn.fp8_gradient(g)))
    out = rtkernels.nn.unpermute_with_fp8_gradient(rows, index, layout="row")
    assert torch.equal(out, rtkernels.moe_unpermute(rows, index))
    out.backward(x.detach())
    assert_same_bits(seen[0].q, rtkernels.moe_permute_fp8(x, index, layout="row").q)


def _member(rank: int, path: str) -> None:
    with joined(rank, path):
        table = torch.arange(40.0).view(10, 4)
        shard = table[5 * rank : 5 * rank + 5].clone().requires_grad_()
        call = {"vocab_start": 5 * rank, "group": torch.distributed.group.WORLD}
        ids = torch.tensor([[1, 7], [7, 9]])
        rtkernels.embedding(ids, shard, **call).sum().backward()
        counts = torch.bincount(ids.view(-1), minlength=10).float()
        assert torch.equal(shard.grad, counts[5 * rank : 5 * rank + 5, None].expand(5, 4))
        assert torch.equal(rtkernels.embedding(ids, shard.detach(), **call), table[ids])
        own = ids[rank]
        assert torch.equal(rtkernels.embedding(own, shard.detach(), **call, same_ids=False), table[own])
        shard.grad = None
        rtkernels.embedding(own, shard, **call, same_ids=False).sum().backward()
        assert torch.equal(shard.grad, counts[5 * rank : 5 * rank + 5, None].expand(5, 4))
        _lightning_member(rank)


def _lightning_member(rank: int) -> None:
    g = torch.Generator().manual_seed(0)
    whole = [torch.randn(2, 12, 2, 16, generator=g).bfloat16().requires_grad_() for _ in range(3)]
    decay, dy = torch.tensor([0.1, 0.5]), torch.randn(2, 12, 2, 16, generator=g).bfloat16()
    wanted, last = rtkernels.lightning_attention(*whole, decay, return_state=True)
    wanted.backward(dy)
    quarters = [[*range(3 * i, 3 * i + 3)] for i in range(4)]
    call = {"group": torch.distributed.group.WORLD, "return_state": True}
    for zigzag in (False, True):
        rows = quarters[rank] + quarters[3 - rank] if zigzag else quarters[2 * rank] + quarters[2 * rank + 1]
        own = [t.detach()[:, rows].clone().requires_grad_() for t in whole]
        got, state = rtkernels.lightning_attention(*own, decay, zigzag=zigzag, **call)
        got.backward(dy[:, rows])
        torch.testing.assert_close(got, wanted[:, rows], rtol=0.02, atol=0.02)
        if 11 in rows:
            torch.testing.assert_close(state, last, rtol=1e-3, atol=1e-3)
        for mine, all_ in zip(own, whole, strict=True):
            torch.testing.assert_close(mine.grad, all_.grad[:, rows], rtol=0.03, atol=0.03)
    with pytest.raises(ArgumentError, match=r"q has shape \(2, 5, 2, 16\); expected .* an even length for zigzag"):
        rtkernels.lightning_attention(*(t[:, :5] for t in own), decay, zigzag=True, **call)
    with pytest.raises(ArgumentError, match="zigzag is None; expected False if rank r"):
        rtkernels.lightning_attention(*own, decay, **call)
    with pytest.raises(ArgumentError, match="zigzag is True and group is None"):
        rtkernels.lightning_attention(*own, decay, zigzag=True)
    with pytest.raises(ArgumentError, match="group is given; expected neither initial_state nor cu_seqlens"):
        rtkernels.lightning_attention(*own, decay, initial_state=state, **call)


@pytest.mark.slow
def test_embedding_and_linear_attention_over_processes(tmp_path: Path) -> None:
    spawn(_member, tmp_path)


def test_tensors_of_transformer_engine() -> None:
    pytest.importorskip("transformer_engine.pytorch")
    from rtkernels.compat import transformer_engine

    x = torch.randn(128, 256)
    codes = rtkernels.quantize_fp8(x, granularity="group", layout="both", scale_layout="column")
    assert transformer_engine.blockwise(codes, x.bfloat16()).shape == x.shape
