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
