"""Level 3 of batch invariance: sums over rows start from ``main_grad``; micro-batches leave the bits of one batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels import ArgumentError

rtk = rtkernels
ROWS = 384
Call = Callable[..., Tensor]


def _numbers(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _ids(rows: int, vocabulary: int) -> Tensor:
    ids = torch.randint(vocabulary, (rows,), generator=torch.Generator().manual_seed(3))
    ids[::3] = 1  # one id has more tokens than the others
    return ids


def _linear(x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


# The parameters of a call, and the call.
CALLS: dict[str, tuple[Callable[[], list[Tensor]], Call]] = {
    "linear": (lambda: [_numbers(40, 64, seed=1), _numbers(40, seed=2)], _linear),
    "linear, odd": (
        lambda: [_numbers(33, 64, seed=1)], lambda x, ids, w: torch.nn.functional.linear(x, w)
    ),
    "linear, fp32": (
        lambda: [_numbers(40, 64, seed=1, dtype=torch.float32)],
        lambda x, ids, w: torch.nn.functional.linear(x.float(), w),
    ),
    "linear, autocast": (
        lambda: [_numbers(40, 64, seed=1, dtype=torch.float32)],
        lambda x, ids, w: _under_autocast(x, w),
    ),
    "rms_norm": (lambda: [_numbers(64, seed=1)], lambda x, ids, w: rtk.rms_norm(x, w)),
    "rms_norm, odd": (
        lambda: [_numbers(63, seed=1)], lambda x, ids, w: rtk.rms_norm(x[:, :63], w, residual=x[:, :63])[0]
    ),
    "layer_norm": (
        lambda: [_numbers(64, seed=1), _numbers(64, seed=2)], lambda x, ids, w, b: rtk.layer_norm(x, w, b)
    ),
    "router_gemm": (
        lambda: [_numbers(16, 64, seed=1, dtype=torch.float32)], lambda x, ids, w: rtk.router_gemm(x, w)
    ),
    "embedding": (lambda: [_numbers(50, 64, seed=1)], lambda x, ids, w: rtk.embedding(ids, w)),
    "torch's embedding": (
        lambda: [_numbers(50, 64, seed=1)], lambda x, ids, w: torch.nn.functional.embedding(ids, w, 0)
    ),
    "linear_logprob": (
        lambda: [_numbers(300, 64, seed=1)],
        lambda x, ids, w: torch.stack(rtk.linear_logprob(x, w, ids, return_entropy=True), -1),
    ),
    "linear_logprob, logits": (
        lambda: [_numbers(300, 64, seed=1), _numbers(300, seed=2)],
        lambda x, ids, w, b: rtk.linear_logprob(x, w, ids, bias=b, save="logits"),
    ),
    "linear_cross_entropy": (
        lambda: [_numbers(300, 64, seed=1)],
        lambda x, ids, w: rtk.linear_cross_entropy(x, w, ids, reduction="sum"),
    ),
    "linear_cross_entropy, rows": (
        lambda: [_numbers(300, 64, seed=1), _numbers(300, seed=2)],
        lambda x, ids, w, b: rtk.linear_cross_entropy(x, w, ids, bias=b, reduction="none", chunk_rows=100),
    ),
}  # fmt: skip


def _under_autocast(x: Tensor, weight: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return torch.nn.functional.linear(x, weight)


def _totals(name: str, device: Any, rows: list[int]) -> list[Tensor]:
    """Return the main_grads of a call's parameters, which start from random numbers, after micro-batches of `rows`."""
    make, call = CALLS[name]
    weights = [w.to(device).requires_grad_() for w in make()]
    for i, weight in enumerate(weights):
        weight.main_grad = 0.1 * _numbers(*weight.shape, dtype=torch.float32, seed=20 + i).to(device)
    x, ids, first = _numbers(ROWS, 64, seed=9).to(device), _ids(ROWS, 50).to(device), 0
    for count in rows:
        part = slice(first, first + count)
        y = call(x[part].clone().requires_grad_(), ids[part], *weights)
        factors = _numbers(ROWS, *y.shape[1:], dtype=y.dtype, seed=11).to(device)[part] if y.dim() else 1.0
        (y * factors).sum().backward()
        first += count
    assert all(weight.grad is None for weight in weights)
    return [weight.main_grad for weight in weights]


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", CALLS)
def test_micro_batches_leave_the_bits_of_one_batch(name: str, place: str) -> None:
    with running_on(place) as device, rtkernels.batch_invariant(3):
        whole = _totals(name, device, [ROWS])
        for rows in ([128, 256], [256, 128], [128, 128, 128]):
            for one, other in zip(whole, _totals(name, device, rows), strict=True):
                assert torch.equal(one, other), rows


@at("sm_80", "sm_90")
@pytest.mark.parametrize("name", CALLS)
def test_main_grad_has_the_gradient(name: str, place: str) -> None:
    make, call = CALLS[name]
    with running_on(place) as device:
        with rtkernels.batch_invariant(3):
            totals = _totals(name, device, [ROWS])
        weights = [w.to(device).requires_grad_() for w in make()]
        y = call(_numbers(ROWS, 64, seed=9).to(device).requires_grad_(), _ids(ROWS, 50).to(device), *weights)
        factors = _numbers(ROWS, *y.shape[1:], dtype=y.dtype, seed=11).to(device) if y.dim() else 1.0
        (y * factors).sum().backward()
        for i, (weight, total) in enumerate(zip(weights, totals, strict=True)):
            before = 0.1 * _numbers(*weight.shape, dtype=torch.float32, seed=20 + i).to(device)
            gradient = weight.grad.float()
            assert (total - before - gradient).abs().max() <= 2e-2 * gradient.abs().max()


@at("sm_90")  # fp8 accumulators of mma.sync do not start from a result
def test_fp8(place: str) -> None:
    found = []
    with running_on(place) as device, rtkernels.batch_invariant(3):
        x, dy = (_numbers(ROWS, cols, seed=cols).to(device) for cols in (128, 64))
        for rows in (ROWS, 128):
            weight = _numbers(64, 128, seed=1).to(device).requires_grad_()
            total = 0.1 * _numbers(64, 128, dtype=torch.float32, seed=2).to(device)
            for first in range(0, ROWS, rows):
                part = slice(first, first + rows)
                rtk.fp8_linear(x[part], weight, main_grad=total).backward(dy[part])
            found.append(total)
        assert torch.equal(*found)
        with pytest.raises(ArgumentError, match="batch-invariant"):
            rtk.fp8_linear(x, weight, recipe="row", main_grad=total).sum().backward()


@at("sm_80", "sm_90")
def test_groups_that_are_cut_at_128_rows(place: str) -> None:
    with running_on(place) as device, rtkernels.batch_invariant(3):
        dy, x = (_numbers(512, cols, seed=cols).to(device) for cols in (40, 64))
        ends = torch.tensor([300, 512], dtype=torch.int32, device=device)
        whole = _numbers(2, 40, 64, dtype=torch.float32).to(device)
        parts = whole.clone()
        rtk.grouped_wgrad(dy, x, offs=ends, out=whole)
        first = torch.cat([torch.arange(128), torch.arange(300, 428)]).to(device)
        rest = torch.cat([torch.arange(128, 300), torch.arange(428, 512)]).to(device)
        for rows, end in ((first, 128), (rest, 172)):
            offs = torch.tensor([end, len(rows)], dtype=torch.int32, device=device)
            rtk.grouped_wgrad(dy[rows], x[rows], offs=offs, out=parts)
        assert torch.equal(whole, parts)


@at("sm_80")
def test_parameters_without_main_grad_have_a_gradient_of_autograd(place: str) -> None:
    with running_on(place) as device, rtkernels.batch_invariant(3):
        for name, (make, call) in CALLS.items():
            weights = [w.to(device).requires_grad_() for w in make()]
            y = call(_numbers(ROWS, 64, seed=9).to(device).requires_grad_(), _ids(ROWS, 50).to(device), *weights)
            y.sum().backward()
            assert all(w.grad is not None and w.grad.isfinite().all() for w in weights), name


@at("sm_80")
def test_what_cannot_start_from_a_sum_raises(place: str) -> None:
    x = _numbers(4, 64)
    with running_on(place) as device, rtkernels.batch_invariant(3):
        x = x.to(device)
        weight = torch.nn.Parameter(_numbers(50, 64).to(device))
        weight.main_grad = torch.zeros(50, 64, device=device)
        rtk.embedding(torch.zeros(4, dtype=torch.int64, device=device), weight)
        with pytest.raises(ArgumentError, match="sums alternate"):  # tied to a head
            torch.nn.functional.linear(x, weight)
        other = torch.nn.Parameter(_numbers(50, 64).to(device))
        other.main_grad = torch.zeros(50, 64, device=device, dtype=torch.bfloat16)
        with pytest.raises(ArgumentError, match="main_grad is bfloat16"):
            torch.nn.functional.linear(x, other)
        for out, more in ((other.main_grad, {}), (weight.main_grad, {"bias": x[0]})):
            with pytest.raises(ArgumentError, match="batch-invariant"):
                rtk.scaled_mm(other.detach(), x[:, :].repeat(16, 1), out=out, accumulate=True, **more)


def test_flags_of_trainers_are_set() -> None:
    with rtkernels.emulate("sm_80"), rtkernels.batch_invariant(3):
        weight = torch.nn.Parameter(_numbers(64))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(64), False
        rtk.rms_norm(_numbers(4, 64), weight).sum().backward()
        assert weight.grad_added_to_main_grad and weight.main_grad.any() and not weight.grad.any()


@at("sm_80", "sm_90")
def test_tokens_of_experts(place: str) -> None:
    """Experts get any number of tokens of a micro-batch."""
    from rtkernels.models.experts import _Product, _token_blocks

    generator = torch.Generator().manual_seed(5)
    chosen = torch.rand(ROWS, 5, generator=generator).topk(2).indices
    found = []
    with running_on(place) as device, rtkernels.batch_invariant(3):
        x, factors = (_numbers(ROWS, cols, seed=cols).to(device) for cols in (64, 40))
        for rows in (ROWS, 256, 128):
            weight = torch.nn.Parameter(_numbers(5, 40, 64, seed=1).to(device))
            weight.main_grad = 0.1 * _numbers(5, 40, 64, dtype=torch.float32, seed=2).to(device)
            for first in range(0, ROWS, rows):
                part = slice(first, first + rows)
                index = rtk.moe_index(chosen[part].to(device), 5)
                permuted = rtk.moe_permute(x[part], index)
                y = _Product.apply(permuted, weight, index.offsets[1:], _token_blocks(index))
                (rtk.moe_unpermute(y, index) * factors[part]).sum().backward()
            found.append(weight.main_grad)
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
        exact = 0.1 * _numbers(5, 40, 64, dtype=torch.float32, seed=2).double()
        for expert in range(5):
            mine = (chosen == expert).any(-1)
            exact[expert] += factors.cpu()[mine].double().t() @ x.cpu()[mine].double()
        assert (found[0].cpu() - exact).abs().max() < 1e-3 * exact.abs().max()
