"""Gated linear units: numerics at every place they can run, gradients, errors, compilation, and the GPU's own ways."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_close, assert_no_worse, running_on
from support.glu_cases import ACTS, CASES, check, glu, make, plain_glu
from support.places import DTYPES, PLACES, at, emulated, short

import rtkernels
from rtkernels.ops.act import glu_plan


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_layout(place: str, case: str) -> None:
    with running_on(place) as device:
        check(make(case, torch.bfloat16, device), "silu")


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(
    ("place", "act"),
    # No instruction of this op depends on the feature set: one activation is enough for sm_80.
    [pytest.param(p, a, marks=PLACES[p]) for p in PLACES for a in ACTS if p != "sm_80" or a == "silu"],
)
def test_every_activation(place: str, act: str, dtype: torch.dtype) -> None:
    cases = ("merged", "odd", "weight", "weight_odd")
    with running_on(place) as device:
        for case in cases:
            check(make(case, dtype, device), act)


@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_no_worse_than_torch(place: str, act: str) -> None:
    with running_on(place) as device:
        for dtype in DTYPES:
            generator = torch.Generator().manual_seed(1)
            x = torch.randn(64, 2 * 256, generator=generator).to(dtype).to(device)
            dy = torch.randn(64, 256, generator=generator).to(dtype).to(device)
            results = []
            for run, like in ((glu, x), (plain_glu, x), (plain_glu, x.double())):
                leaf = like.detach().requires_grad_()
                y = run(leaf, act=act) if run is glu else run(leaf, None, None, act)
                y.backward(dy.to(like.dtype))
                results.append((y.detach(), leaf.grad))
            for what, ours, theirs, exact in zip(("y", "dx"), *results, strict=True):
                assert_no_worse(ours, theirs, exact, what=f"{what} {dtype}")


@pytest.mark.parametrize("act", ACTS)
@at("cpu", "sm_90", "cuda")
def test_nan_and_infinity_as_torch(place: str, act: str) -> None:
    special = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0, 300.0, -300.0, 1e4, -1e4, 1.0, -1.0, 0.5] * 2)
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            gate = special[:16].to(dtype).to(device)
            ours, theirs = gate.clone().requires_grad_(), gate.double().requires_grad_()  # torch rounds at every step
            one = torch.ones_like(gate)
            y, wanted = glu(ours, one * 0 if act == "swiglu_oai" else one, act=act), ACTS[act](theirs)
            y.backward(one)
            wanted.backward(one.double())
            for got, other in ((y, wanted), (ours.grad, theirs.grad)):
                assert_close(got.detach(), other.detach().double(), c=4.0, what=f"{act} {dtype}")


@at("cpu", "sm_90", "cuda")
def test_gradient_at_the_limits_of_swiglu_oai(place: str) -> None:
    """Inputs exactly at a limit keep their gradient, whatever torch's clamp does there; those beyond have none."""
    inside = torch.tensor([7.0, -7.0, 6.96875])  # the neighbours of 7 in bf16 are 1/32 away
    beyond = torch.tensor([7.03125, -7.03125, torch.inf])
    limits = torch.cat((inside, beyond))
    with running_on(place) as device:
        for dtype in (torch.float32, torch.bfloat16):
            gate = torch.tensor([7.0, 7.03125], device=device, dtype=dtype).requires_grad_()
            glu(gate, torch.zeros_like(gate), act="swiglu_oai").sum().backward()
            s = 1 / (1 + math.exp(-1.702 * 7))
            wanted = torch.tensor([s + 1.702 * 7 * s * (1 - s), 0.0], dtype=torch.float64)
            assert_close(gate.grad, wanted, c=64.0, what=f"gate {dtype}")

            up = limits.clone().to(device, dtype).requires_grad_()
            glu(torch.full_like(up, 7.0), up, act="swiglu_oai").sum().backward()
            value = torch.full_like(inside, 7 * s, dtype=torch.float64)
            assert_close(up.grad, torch.cat((value, torch.zeros_like(value))), c=64.0, what=f"up {dtype}")


LIMITED = [("silu", 10.0), ("silu", 1.3), ("swiglu_oai", 2.5), ("silu", math.inf), ("swiglu_oai", math.inf)]


@pytest.mark.parametrize(("act", "limit"), LIMITED)
@pytest.mark.parametrize("case", ("merged", "odd", "weight", "weight_odd", "separate", "separate_odd", "unaligned"))
@at()
def test_limits(place: str, case: str, act: str, limit: float) -> None:
    with running_on(place) as device:
        for dtype in DTYPES if case in ("merged", "weight_odd") else (torch.bfloat16,):
            inputs = make(case, dtype, device)
            check(inputs, act, limit)
            if limit == math.inf and act == "silu":
                assert torch.equal(glu(inputs.x, inputs.up, limit=limit), glu(inputs.x, inputs.up))


@pytest.mark.parametrize("act", ("silu", "swiglu_oai"))
@pytest.mark.parametrize("odd", (False, True))
@at("cpu", "sm_90", "cuda")
def test_gradients_at_and_beyond_a_limit(place: str, odd: bool, act: str) -> None:
    """As torch.clamp's: a number at a limit keeps its gradient, one beyond has none; NaN stays NaN."""
    numbers = torch.tensor([10.0, 10.0625, 9.9375, -10.0, -10.0625, 0.0, torch.inf, -torch.inf])
    with running_on(place) as device:
        for dtype in DTYPES:
            gate = torch.cat((numbers, numbers[:1])).to(device, dtype)[: 9 if odd else 8].requires_grad_()
            up = gate.detach().flip(0).clone().requires_grad_()
            copies = [t.detach().double().cpu().requires_grad_() for t in (gate, up)]
            y, want = glu(gate, up, act=act, limit=10.0), plain_glu(*copies, None, act, 10.0)
            y.backward(torch.ones_like(y))
            want.backward(torch.ones_like(want))
            finite = [torch.isfinite(t.grad) & torch.isfinite(want) for t in copies]
            for got, other, keep in zip((gate.grad, up.grad), copies, finite, strict=True):
                assert_close(got[keep.to(device)], other.grad[keep], c=64.0, what=f"{act} {dtype}")
            assert not up.grad[(up.detach().abs() > 10.0) & finite[1].to(device)].any()
            assert not gate.grad[gate.detach() > 10.0].any()
            spoiled = glu(torch.tensor([torch.nan, 1.0]).to(device, dtype), limit=10.0, act=act)
            assert spoiled.isnan().all()


def test_limits_of_other_activations_are_refused() -> None:
    x = torch.ones(2, 4)
    for options, text in (
        ({"act": "relu", "limit": 7.0}, "limit is 7.0 with act 'relu'; expected None, or act 'silu' or 'swiglu_oai'"),
        ({"limit": 0.0}, "limit is 0.0; expected a number above 0, or None"),
        ({"limit": -1}, "limit is -1; expected a number above 0, or None"),
        ({"limit": math.nan}, "limit is nan"),
        ({"limit": "10"}, "limit is '10'"),
        ({"limit": 10.0, "layout": "interleaved"}, "limit is 10.0; expected None with layout"),
        ({"limit": 10.0, "out": torch.empty(2, 2)}, "limit is 10.0; expected None with layout"),
    ):
        with pytest.raises(rtkernels.ArgumentError, match=text):
            glu(x, **options)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    for case in ("merged", "weight", "odd"):
        with running_on("sm_90") as device:
            check(make(case, torch.bfloat16, device), "silu")


# ---- launch geometry ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", (1, 2, 3, 511, 65536, 10**6, 2**31 + 7))
@pytest.mark.parametrize("vectors", (1, 2, 3, 31, 32, 33, 176, 256, 257, 511, 512, 1792, 10**8))
@pytest.mark.parametrize("per_thread", (1, 2, 4))
def test_tile_covers_everything_once(rows: int, vectors: int, per_thread: int) -> None:
    (strips, high, deep), block, bits = glu_plan._tile(rows, vectors, per_thread)
    lanes, rows_at_once = (block, 1) if bits == 31 else (1 << bits, block >> bits)
    assert block % 32 == 0 and block <= 256 and lanes * rows_at_once == block
    assert strips < 2**31 and high <= 65535 and deep <= 65535
    assert (strips - 1) * lanes < vectors <= strips * lanes
    covered = high * deep * rows_at_once * per_thread
    assert rows <= covered < rows + (deep + 1) * rows_at_once * per_thread


# ---- autograd -------------------------------------------------------------------------------------------------------


@emulated
def test_rows_of_blocks_in_z() -> None:
    """Launchers use the third dimension of the grid from 65536 row blocks on: here the kernel by itself."""
    x, up, y = torch.randn(60, 16), torch.randn(60, 16), torch.full((60, 16), torch.nan)
    with rtkernels.emulate():
        run = rtkernels.emulator.on_host(glu_plan._FWD, ("fp32", "Silu", 4, 2))
        run((1, 2, 2), 32, (x, up, 0, y, 60, 16, 16, 16, 0, 2, math.inf))  # 16 rows for each block
    assert_close(y, F.silu(x.double()) * up.double(), c=8)


def test_only_the_gradients_that_are_wanted() -> None:
    x, up, weight = torch.randn(4, 8), torch.randn(4, 8, requires_grad=True), torch.randn(4)
    glu(x, up, weight=weight).sum().backward()
    assert x.grad is None and weight.grad is None
    torch.testing.assert_close(up.grad, F.silu(x) * weight.unsqueeze(-1))
    weight.requires_grad_()
    (grad,) = torch.autograd.grad(glu(x, up.detach(), weight=weight).sum(), weight)
    torch.testing.assert_close(grad, (F.silu(x) * up).sum(-1).detach())


def test_second_order_is_refused() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    (first,) = torch.autograd.grad(glu(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()
