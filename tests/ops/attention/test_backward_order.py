"""Orders in which blocks of the wgmma backward take tiles of keys: every one gives the same gradients."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ops.attention.test_attention_sm90 import backward, check_backward, describe, qkv, random, slow

import rtkernels
from rtkernels.ops.attention import sm90_backward_order, sm90_backward_plan
from rtkernels.ops.attention.problem import Attention, Strides
from rtkernels.ops.attention.sm90_backward_order import Order, backward_order, parts_of_heads
from rtkernels.runtime.launch.device import emulate_features

_ANY = Strides(0, 0, 0)


@pytest.fixture(autouse=True)
def emulated():
    with rtkernels.emulate("sm_90"):
        emulate_features(90)  # as an op would, and here is none
        yield


def _problem(batch: int, length: int, heads_q: int, heads_kv: int, width: int, **options: Any) -> Attention:
    strides = (_ANY,) * 4
    return Attention(batch, heads_q, heads_kv, length, length, width, width, "bf16", *strides, 1.0, **options)


@pytest.mark.parametrize(
    ("problem", "parts"),
    [
        (_problem(2, 4096, 32, 32, 128), 1),
        (_problem(2, 4096, 32, 8, 128), 1),  # enough tiles of keys
        (_problem(1, 16384, 16, 2, 128), 1),
        (_problem(3, 1777, 14, 2, 88), 7),
        (_problem(1, 292, 42, 1, 144), 42),
        (_problem(3, 18, 6, 2, 64), 1),  # too little work
        (_problem(1, 292, 42, 1, 144, wants="q"), 1),
        (_problem(1, 292, 42, 1, 96, softcap=2.0), 1),
    ],
)
def test_parts(problem: Attention, parts: int) -> None:
    assert parts_of_heads(problem, 132, 64) == parts


@pytest.mark.parametrize("right", (-1, 0))
@pytest.mark.parametrize(
    "shape", ((1, 16384, 16, 2), (2, 4096, 32, 8), (2, 4096, 32, 32), (3, 40000, 4, 4), (7, 130, 6, 1))
)
def test_blocks_that_wait_for_later_ones_are_all_resident(shape: tuple[int, ...], right: int) -> None:
    order = backward_order(_problem(*shape, 128, right=right), 132, 64)
    assert shape[2] // shape[3] % order.parts == 0
    if order.resident:
        assert 1 < order.together <= 132
    else:
        assert not order.ascending
        assert order.together == 1 or right == 0
    assert not backward_order(_problem(*shape, 128, right=right), 132, 64, in_chunks=False).resident


@pytest.mark.parametrize(
    ("shape", "options", "order"),
    [
        ((1, 70, 300, 4, 2, 64), {}, Order(2, 1, 3, True, True)),
        ((1, 70, 300, 4, 2, 64), {"right": 0}, Order(1, 2, 2, True, True)),
        slow((1, 70, 300, 2, 1, 72), {"left": 100, "right": 3}, Order(2, 4, 1, False, False)),
        slow((1, 70, 200, 2, 1, 96), {"right": 0}, Order(2, 1, 2, False, False)),
        slow((1, 70, 200, 2, 1, 96), {}, Order(2, 2, 1, False, False)),
    ],
)
def test_gradients(shape: Any, options: dict[str, int], order: Order, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_backward_plan, "backward_order", lambda *given: order)
    check_backward(*qkv(*shape), **options)


@pytest.mark.slow
@pytest.mark.parametrize("options", ({}, {"right": 0}))
def test_bits_do_not_depend_on_the_order_of_blocks(options: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_backward_plan, "backward_order", lambda *given: Order(2, 1, 3, True, True))
    q, k, v = qkv(1, 70, 300, 4, 2, 64)
    dout, p = random(1, 70, 4, 64, seed=5), describe(q, k, v, {}, **options)
    want = backward(p, q, k, v, {}, dout, None)
    with rtkernels.emulate("sm_90", order=3):
        got = backward(p, q, k, v, {}, dout, None)
    assert all(torch.equal(got[name], want[name]) for name in ("dq", "dk", "dv"))


@pytest.mark.slow
@pytest.mark.parametrize("width", (64, 144))
def test_packed_sequences(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_backward_order, "parts_of_heads", lambda *given: 2)
    monkeypatch.setattr(sm90_backward_plan, "parts_of_heads", lambda *given, **more: 2)
    cu_q, cu_k = (torch.tensor(c, dtype=torch.int32) for c in ([0, 70, 70, 130, 133], [0, 50, 60, 130, 140]))
    packed = random(133, 4, width), random(140, 2, width, seed=1), random(140, 2, width, seed=2)
    check_backward(*packed, {"cu_q": cu_q, "cu_k": cu_k}, lq=70, lkv=70, right=0)
    lengths = torch.tensor([130, 7], dtype=torch.int32)
    q, k, v = qkv(2, 9, 140, 2, 1, width)
    for b, n in enumerate(lengths.tolist()):
        k[b, n:], v[b, n:] = math.nan, math.inf
    check_backward(q, k, v, {"lengths": lengths}, right=0)


@pytest.mark.slow
@pytest.mark.parametrize("heads_first", (False, True))
@pytest.mark.parametrize("width", (64, 192))
def test_parts_in_either_layout(width: int, heads_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sm90_backward_order, "parts_of_heads", lambda *given: 3)
    monkeypatch.setattr(sm90_backward_plan, "parts_of_heads", lambda *given, **more: 3)
    leaves = [x.requires_grad_() for x in qkv(2, 20, 30, 6, 2, width)]
    exact = [x.detach().double().requires_grad_() for x in leaves]
    layout = "bhld" if heads_first else "blhd"
    given = [x.transpose(1, 2) if heads_first else x for x in leaves]
    out = rtkernels.attention(*given, layout=layout, backend="sm90")
    got = torch.autograd.grad(out, leaves[1:], torch.ones_like(out))
    q, k, v = (x.transpose(1, 2) for x in exact)
    want_out = torch.nn.functional.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
    for g, w in zip(got, torch.autograd.grad(want_out.sum(), exact[1:]), strict=True):
        assert (g.double() - w).abs().max() <= 6 * 2.0**-8 * w.abs().max()
