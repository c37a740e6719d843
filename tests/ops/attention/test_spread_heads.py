"""Gradients of attention by mma.sync where few heads of keys are repeated, so that all SMs have work."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at

from rtkernels import attention, attention_varlen
from rtkernels.ops.attention import attention as module
from rtkernels.ops.attention import spread_heads
from rtkernels.ops.attention.problem import Attention, Strides
from rtkernels.ops.attention.spread_heads import copies_of_heads
from rtkernels.runtime.launch.plans import Plans

_ANY = Strides(0, 0, 0)


def _problem(batch: int, length: int, heads_q: int, heads_kv: int) -> Attention:
    return Attention(batch, heads_q, heads_kv, length, length, 64, 64, "bf16", _ANY, _ANY, _ANY, _ANY, 1.0)


@pytest.fixture(autouse=True)
def _plans_of_this_test():
    yield
    Plans.forget_all()


@pytest.mark.parametrize(
    ("problem", "copies"),
    [
        (_problem(1, 292, 42, 1), 42),
        (_problem(6, 546, 28, 2), 7),
        (_problem(1, 16384, 16, 2), 1),  # enough tiles of keys
        (_problem(2, 4096, 32, 32), 1),  # nothing is shared
        (_problem(3, 18, 6, 2), 1),  # too little work
        (_problem(1, 292, 42, 1)._replace(wants="q"), 1),
    ],
)
def test_how_often_heads_are_repeated(problem: Attention, copies: int) -> None:
    assert copies_of_heads(problem, 132) == copies


def _gradients(call, tensors, dout):
    leaves = [t.detach().requires_grad_() for t in tensors]
    out = call(*leaves)
    return out, torch.autograd.grad(out, leaves, dout)


def _exact(q, k, v, dout, causal: bool):
    leaves = [t.detach().cpu().double().requires_grad_() for t in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    heads = [leaves[0], *(t.repeat_interleave(group, 2) for t in leaves[1:])]
    out = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2) for t in heads), is_causal=causal)
    return torch.autograd.grad(out.transpose(1, 2), leaves, dout.cpu().double())


@at("sm_80", "cuda")
@pytest.mark.parametrize("layout", ("blhd", "bhld"))
def test_gradients(place: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    with running_on(place) as device:
        q, dout = (torch.randn(1, 20, 4, 64).to(device, torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(1, 20, 1, 64).to(device, torch.bfloat16) for _ in range(2))
        ran = []
        monkeypatch.setattr(spread_heads, "_ENOUGH_STEPS", 4)
        monkeypatch.setattr(module, "copies_of_heads", lambda *given: ran.append(copies_of_heads(*given)) or ran[-1])
        Plans.forget_all()

        def call(*tensors):
            if layout == "blhd":
                return attention(*tensors, causal=True, backend="mma")
            turned = (t.transpose(1, 2) for t in tensors)
            return attention(*turned, causal=True, layout="bhld", backend="mma").transpose(1, 2)

        _, grads = _gradients(call, (q, k, v), dout)
        assert max(ran) > 1
        for got, wanted in zip(grads, _exact(q, k, v, dout, True), strict=True):
            error = (got.cpu().double() - wanted).norm() / wanted.norm()
            assert got.shape == wanted.shape and error < 4e-3
        again = _gradients(call, (q, k, v), dout)[1]
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))


@at("sm_80", "cuda")
def test_packed(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spread_heads, "_ENOUGH_STEPS", 4)
    Plans.forget_all()
    torch.manual_seed(0)
    ends = torch.tensor([0, 17, 20], dtype=torch.int32)
    with running_on(place) as device:
        q, dout = (torch.randn(23, 4, 64).to(device, torch.bfloat16) for _ in range(2))
        k, v = (torch.randn(23, 1, 64).to(device, torch.bfloat16) for _ in range(2))
        limits = ends.to(device)
        _, grads = _gradients(
            lambda *t: attention_varlen(*t, limits, limits, 17, 17, causal=True, backend="mma"),
            (q, k, v), dout,
        )  # fmt: skip
        for begin, end in ((0, 17), (17, 20)):
            part = [t[None, begin:end] for t in (q, k, v, dout)]
            for got, wanted in zip(grads, _exact(*part, True), strict=True):
                got = got[None, begin:end].cpu().double()
                assert (got - wanted).norm() / wanted.norm() < 5e-3
        assert all((grad[20:] == 0).all() for grad in grads)
