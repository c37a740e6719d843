"""sparse_mla: against float64 over the chosen keys, of latents in 16 bits and in 656 bytes."""

from __future__ import annotations

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at, error_tests
from torch import Tensor

import rtkernels
from rtkernels import sparse_mla
from rtkernels.errors import ArgumentError
from rtkernels.ops.attention import sparse_mla_gradient

BF16, FP16 = torch.bfloat16, torch.float16


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(latents: Tensor) -> tuple[Tensor, Tensor]:
    """Return latents [keys, 576] in 656 bytes, and their values as float64."""
    parts = latents[:, :512].float().unflatten(1, (4, 128))
    scales = parts.abs().amax(-1).clamp(min=1e-4) / 448
    codes = (parts / scales.unsqueeze(-1)).to(torch.float8_e4m3fn)
    rotated = latents[:, 512:].bfloat16()
    rows = [
        codes.flatten(1).view(torch.uint8),
        scales.contiguous().view(torch.uint8),
        rotated.contiguous().view(torch.uint8),
    ]
    exact = (codes.double() * scales.double().unsqueeze(-1)).flatten(1)
    return torch.cat(rows, 1), torch.cat((exact, rotated.double()), 1)


def exact(q, latents, indices, value_width, scale, positions=None, sinks=None) -> tuple[Tensor, Tensor]:
    outs, logs = [], []
    for t in range(q.shape[0]):
        last = latents.shape[0] - 1 if positions is None else min(int(positions[t]), latents.shape[0] - 1)
        rows = latents[[i for i in indices[t].tolist() if 0 <= i <= last]].double()
        scores = scale * q[t].double() @ rows.mT
        if sinks is not None:
            scores = torch.cat((scores, sinks.double().unsqueeze(1)), 1)
        logs.append(scores.logsumexp(1))
        if scores.shape[1] == 0:
            outs.append(torch.zeros(q.shape[1], value_width, dtype=torch.float64))
            continue
        outs.append(torch.exp(scores - logs[-1].unsqueeze(1))[:, : len(rows)] @ rows[:, :value_width])
    return torch.stack(outs), torch.stack(logs)


def choice(tokens: int, count: int, keys: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.stack([torch.randperm(keys, generator=generator)[:count] for _ in range(tokens)]).int()


# tokens, heads, keys, count, width, value width, type
CASES = {
    "one": (1, 1, 1, 1, 8, 8, BF16),
    "as models": (2, 33, 80, 70, 576, 512, BF16),
    "narrow": (3, 2, 50, 33, 72, 64, FP16),
    "splits": (1, 16, 300, 290, 576, 512, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values(name: str, place: str) -> None:
    tokens, heads, keys, count, width, value_width, dtype = CASES[name]
    q, kv, indices = (
        random(tokens, heads, width).to(dtype),
        random(keys, width, seed=1).to(dtype),
        choice(tokens, count, keys),
    )
    indices[:, ::7] = -1 if count > 1 else 0
    want = exact(q, kv, indices, value_width, 0.05)
    with running_on(place) as device, poisoned():
        got = sparse_mla(
            *(t.to(device) for t in (q, kv, indices)), scale=0.05, value_width=value_width, return_lse=True
        )
        for a, b, what in zip(got, want, ("out", "lse"), strict=True):
            assert_near(a, b.to(device), 2.0**-7, what)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (BF16, FP16), ids=str)
def test_latents_of_656_bytes(dtype: torch.dtype, place: str) -> None:
    q, indices = random(2, 5, 576).to(dtype), choice(2, 40, 45)
    kv, latents = packed(random(45, 576, seed=1))
    want = exact(q, latents, indices, 512, 0.05)
    with running_on(place) as device, poisoned():
        got = sparse_mla(*(t.to(device) for t in (q, kv, indices)), scale=0.05, return_lse=True)
        for a, b, what in zip(got, want, ("out", "lse"), strict=True):
            assert_near(a, b.to(device), 2.0**-7, what)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_what_does_not_count(place: str) -> None:
    q, kv, indices = random(4, 3, 64).to(BF16), random(40, 64, seed=1).to(BF16), choice(4, 40, 40)
    indices[0] = -1
    indices[1, 5:] = 40
    indices[2, ::2] = 2**31 - 1
    positions, sinks = torch.tensor([9, 60, 12, -1], dtype=torch.int32), random(3, seed=5)
    for sink in (None, sinks):
        want = exact(q, kv, indices, 64, 0.1, positions, sink)
        with running_on(place) as device, poisoned():
            out, lse = sparse_mla(
                *(t.to(device) for t in (q, kv, indices)), scale=0.1, value_width=64, positions=positions.to(device),
                sinks=None if sink is None else sink.to(device), return_lse=True,
            )  # fmt: skip
            assert_near(out, want[0].to(device), 2.0**-7, "out")
            assert not out[0].any() and not out[3].any()
            assert_near(lse[1:3], want[1][1:3].to(device), 2.0**-7, "lse")
            assert bool((lse[0].isinf() if sink is None else lse[0].cpu().sub(sink).abs() < 1e-5).all())


@at("sm_90", "cuda")
@pytest.mark.parametrize("coded", [False, True])
def test_many_tiles_of_a_block(coded: bool, place: str) -> None:
    """Stages are used again, and the second head tile has one row."""
    q, indices = random(1, 65, 576).to(BF16), choice(1, 390, 400)
    indices[0, 130:260] = -1
    kv, latents = packed(random(400, 576, seed=1)) if coded else (random(400, 576, seed=1).to(BF16),) * 2
    want = exact(q, latents, indices, 512, 0.05)
    with running_on(place) as device, poisoned(), rtkernels.batch_invariant():
        got = sparse_mla(*(t.to(device) for t in (q, kv, indices)), scale=0.05, return_lse=True)
        for a, b, what in zip(got, want, ("out", "lse"), strict=True):
            assert_near(a, b.to(device), 2.0**-7, what)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        q, kv = torch.ones(2, 3, 64, device=device, dtype=BF16), torch.ones(5, 64, device=device, dtype=BF16)
        none = torch.zeros(2, 0, dtype=torch.int32, device=device)
        assert not sparse_mla(q, kv, none, value_width=64).any()
        assert sparse_mla(q[:0], kv, none[:0], value_width=64).shape == (0, 3, 64)


# tokens, heads, keys, count, width, value width, type
GRADIENTS = {
    "one": (1, 1, 3, 2, 8, 8, FP16),
    "many": (7, 5, 40, 33, 72, 56, BF16),
    "all of it": (3, 2, 9, 9, 576, 512, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("limited", [False, True])
@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name: str, limited: bool, place: str) -> None:
    """Against autograd in float64: keys that are listed twice, keys that do not count, tokens without keys, sinks."""
    tokens, heads, keys, count, width, value_width, dtype = GRADIENTS[name]
    q, kv = random(tokens, heads, width).to(dtype), random(keys, width, seed=1).to(dtype)
    indices = choice(tokens, count, keys)
    indices[:, ::3] = indices[:, :1].clone()
    indices[0, 1:] = -1
    indices[-1, 1 :: 2] = keys if name == "many" else -1
    positions = (torch.arange(tokens) * 6 - 1).int() if limited else None  # the first token has no keys
    sinks = random(heads, seed=5) if limited else None
    incoming = [random(tokens, heads, value_width, seed=6).to(dtype), random(tokens, heads, seed=7)]
    if limited:
        incoming[1][0] = 0.0
    leaves = [t.double().requires_grad_() for t in (q, kv, *((sinks,) if limited else ()))]
    out, lse = exact(*leaves[:2], indices, value_width, 0.1, positions, *leaves[2:])
    want = torch.autograd.grad((out, lse), leaves, [t.double() for t in incoming])
    with running_on(place) as device, poisoned():
        ours = [t.to(device).requires_grad_() for t in (q, kv, *((sinks,) if limited else ()))]
        options = {"positions": positions.to(device), "sinks": ours[2]} if limited else {}
        found = sparse_mla(
            *ours[:2], indices.to(device), scale=0.1, value_width=value_width, return_lse=True, **options
        )
        got = torch.autograd.grad(found, ours, [t.to(device) for t in incoming])
        again = torch.autograd.grad(
            sparse_mla(*ours[:2], indices.to(device), scale=0.1, value_width=value_width, **options), ours[1],
            incoming[0].to(device),
        )  # fmt: skip
    for what, a, b in zip(("dq", "dkv", "dsinks"), got, want, strict=False):
        assert_near(a, b.to(device), 2.0**-7, what)
    assert again[0].shape == kv.shape and again[0].dtype == dtype


def test_gradients_of_some_tokens_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for elements in (2**26, 2 * 33 * 72):
        monkeypatch.setattr(sparse_mla_gradient, "_ELEMENTS", elements)
        q, kv = (t.to(BF16).requires_grad_() for t in (random(7, 5, 72), random(40, 72, seed=1)))
        out = sparse_mla(q, kv, choice(7, 33, 40), value_width=56)
        results.append(torch.autograd.grad(out.float().square().sum(), (q, kv)))
    for a, b in zip(*results, strict=True):
        assert_near(a, b.double(), 2.0**-7)


@pytest.mark.parametrize("sink", (False, True))
def test_gradients_do_not_see_keys_that_nobody_chose(sink: bool) -> None:
    indices = choice(5, 7, 9) + 1  # never 0, which also stands for no key
    indices[:, 5:], indices[2] = -1, -1
    dout, dlse = random(5, 3, 32, seed=3).to(BF16), random(5, 3, seed=4)

    def gradients(unused: float) -> tuple[Tensor, ...]:
        kv = random(11, 64, seed=1).to(BF16)
        kv[0] = unused
        leaves = [random(5, 3, 64).to(BF16).requires_grad_(), kv.requires_grad_()]
        leaves += [random(3, seed=2).requires_grad_()] if sink else []
        results = sparse_mla(*leaves[:2], indices.int(), value_width=32, sinks=(*leaves, None)[2], return_lse=True)
        return torch.autograd.grad(results, leaves, (dout, dlse))

    for a, b in zip(gradients(torch.nan), gradients(0.0), strict=True):
        assert torch.equal(a, b)


def test_gradients_without_any_key() -> None:
    q, kv, sinks = random(5, 3, 64).to(BF16), random(0, 64).to(BF16), random(3).requires_grad_()
    indices = torch.full((5, 2), -1, dtype=torch.int32)
    _, lse = sparse_mla(q, kv, indices, value_width=32, sinks=sinks, return_lse=True)
    lse.sum().backward()
    assert torch.equal(sinks.grad, torch.full((3,), 5.0))


def test_gradients_that_are_refused() -> None:
    codes, indices = torch.zeros(5, 656, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int32)
    q = torch.ones(2, 3, 576).bfloat16().requires_grad_()
    with pytest.raises(ArgumentError, match="656 bytes is not differentiable"):
        sparse_mla(q, codes, indices)
    with rtkernels.batch_invariant(), pytest.raises(ArgumentError, match="gradient of sparse_mla is not batch-inv"):
        sparse_mla(q, torch.ones(5, 576).bfloat16(), indices)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    test_values("splits", "sm_80")
    test_latents_of_656_bytes(BF16, "sm_80")
    test_latents_of_656_bytes(BF16, "sm_90")


_Q, _KV, _I = torch.ones(2, 3, 64).bfloat16(), torch.ones(5, 64).bfloat16(), torch.zeros(2, 4, dtype=torch.int32)
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "q": (lambda: sparse_mla(_Q[0], _KV, _I), r"q has shape \(3, 64\); expected \[tokens, heads, width\]"),
        "kv": (lambda: sparse_mla(_Q, _KV[:, :32], _I), "kv has width 32; expected 64"),
        "bytes": (lambda: sparse_mla(_Q, torch.zeros(5, 584, dtype=torch.uint8), _I), "expected 656"),
        "indices": (lambda: sparse_mla(_Q, _KV, _I.long()), r"indices is torch.int64 \(2, 4\); expected int32 \[2,"),
        "value width": (lambda: sparse_mla(_Q, _KV, _I), "value_width is 512; expected a multiple of 8 to 64"),
        "positions": (
            lambda: sparse_mla(_Q, _KV, _I, value_width=64, positions=_I[0]),
            r"positions is torch.int32 \(4,\); expected int32 \[2\]",
        ),
        "sinks": (
            lambda: sparse_mla(_Q, _KV, _I, value_width=64, sinks=torch.ones(2)),
            r"sinks has shape \(2,\); expected \(3,\)",
        ),
    }
)
