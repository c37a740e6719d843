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
        run((1, 2, 2), 32, (x, up, 0, y, 60, 16, 16, 16, 0, 2))  # 16 rows for each block
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
