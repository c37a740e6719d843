"""The backward of gated activations with fp8 results."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.glu_cases import plain_glu
from support.glu_fp8_cases import (
    BACKWARD_CASES,
    Inputs,
    check,
    check_backward,
    counts,
    glu_fp8,
    glu_fp8_backward,
    make_backward,
)
from support.places import DTYPES, at, emulated, order_test, short

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.act import glu_fp8_plan as plans
from rtkernels.runtime.launch.plans import Plans


@pytest.mark.parametrize("case", BACKWARD_CASES)
@at("cpu", "sm_90", "cuda")
def test_backward_layouts(place: str, case: str) -> None:
    with running_on(place) as device:
        inputs = make_backward(case, torch.bfloat16, device)
        whole = check_backward(inputs, scales="column")
        rows = check_backward(inputs, layout="row", scales="column", keep="fp8")
        columns = check_backward(inputs, layout="transposed", keep="fp8")
        dense = check_backward(inputs, keep="dense")
        check_backward(inputs, pow2=True, keep="fp8")
        of_whole = ((rows[:2], whole[:2]), (columns[2:4], whole[2:4]), (dense[4:5], whole[4:5]))
        if dense.dx.shape[-1] % 256:
            of_whole = of_whole[:1]  # a group across the halves takes another kernel, which rounds differently
        for part, of in of_whole:
            for a, b in zip(part, of, strict=True):
                assert_same_bits(a, b)
        for other in (rows, columns, dense):
            if whole.dweight is not None and len(of_whole) > 1:
                assert_same_bits(other.dweight, whole.dweight)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("act", ("silu", "swiglu_oai", "sigmoid"))
@at("cpu", "sm_90", "cuda")
def test_backward_groups_across_the_halves(place: str, act: str, dtype: torch.dtype) -> None:
    """Columns of the gradient are grouped as by quantize_fp8: 2 * 136 of them are two groups of 128 and one of 16."""
    with running_on(place) as device:
        for case in ("tail_experts", "tail_of_3"):
            check_backward(make_backward(case, dtype, device), act, scales="column")
        inputs = make_backward("tail_of_8", dtype, device)
        got = check_backward(inputs, act)
        assert got.scale.shape == (131, 3)
        if dtype == torch.float32:
            wanted = rtkernels.quantize_fp8(got.dx, granularity="group")
            assert_same_bits(got.q, wanted[0])
            assert_same_bits(got.scale, wanted[1])


@at("cpu", "sm_90", "cuda")
def test_dy_of_any_strides(place: str) -> None:
    with running_on(place) as device:
        inputs = make_backward("two_tiles", torch.bfloat16, device)
        wide = torch.randn(10, 300, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
        for dy in (wide[::2, 3:259], wide[::2, 8:264], wide[:1, :256].expand(5, -1), wide.t()[:256, ::2].t()):
            check_backward(inputs, dy=dy)


def shrunk(monkeypatch: pytest.MonkeyPatch, shared: int, sms: int = 4) -> None:
    """Plan for a device with so much shared memory."""
    info = plans.device_info(-1)
    small = type(info)(info.name, info.target, sms, shared)
    monkeypatch.setattr(plans, "device_info", lambda device: small)
    Plans.forget_all()


@emulated
@pytest.mark.parametrize("stages", (0, 1, 2))
def test_any_shared_memory(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """With room for that many tiles of all inputs; without, the generic kernel takes over."""
    least = 2**16
    for inputs, run in ((2, check), (3, check_backward)):
        with monkeypatch.context() as patch, running_on("sm_90") as device:
            shrunk(patch, plans._STATIC_SHARED + 400 + (stages * inputs * 2**15 or least))
            run(make_backward("experts", torch.bfloat16, device))
    Plans.forget_all()


@emulated
def test_many_tiles_for_one_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """More tiles than a block computes positions for at a time."""
    x, numbers = torch.randn(76, 2 * 8, generator=torch.Generator().manual_seed(0)), torch.ones(70, dtype=torch.int64)
    numbers[::11] = 2
    numbers[0] = 1
    with running_on("sm_90") as device:
        shrunk(monkeypatch, plans._STATIC_SHARED + 4 * 2**15 + 1000, sms=1)
        inputs = Inputs(x.bfloat16().to(device), counts=numbers.to(device))
        check(inputs, scales="column")
        check(inputs, "relu", layout="row")
        check_backward(inputs, layout="transposed")
    Plans.forget_all()


@emulated
def test_one_tile_per_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with so many tiles per block that the backward launches one block per tile."""
    with monkeypatch.context() as patch, running_on("sm_90") as device:
        patch.setattr(plans, "_MANY_TILES", 0)
        for case in ("two_tiles", "experts"):
            Plans.forget_all()
            inputs = make_backward(case, torch.bfloat16, device)
            check(inputs)
            check_backward(inputs)
    Plans.forget_all()


@at("cpu", "sm_90")
def test_counts_can_be_checked(place: str) -> None:
    x, dy = torch.ones(20, 2 * 128), torch.ones(20, 128)
    with running_on(place):
        for wide in (x, x.bfloat16()):
            glu_fp8(wide, counts=counts(3, 17), check_counts=True)
            for wrong in (counts(3, 16), counts(21, dtype=torch.int32), counts(-1, 21)):
                with pytest.raises((ArgumentError, rtkernels.emulator.EmulatorError), match=r"add up|trap"):
                    glu_fp8(wide, counts=wrong, check_counts=True)
                with pytest.raises((ArgumentError, rtkernels.emulator.EmulatorError), match=r"add up|trap"):
                    glu_fp8_backward(dy.to(wide.dtype), wide, counts=wrong, check_counts=True)


test_backward_thread_order_does_not_matter = order_test(
    lambda case: check_backward(make_backward(case, torch.bfloat16, "cpu")), "experts", "unaligned"
)


def test_through_autograd() -> None:
    """The documented way to train: a Function whose backward calls glu_fp8_backward."""

    class Layer(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, down):
            ctx.save_for_backward(x, down)
            y = glu_fp8(x)
            return rtkernels.dequantize_fp8(y.q, y.scale, granularity="group", dtype=x.dtype) @ down

        @staticmethod
        def backward(ctx, dz):
            x, down = ctx.saved_tensors
            return glu_fp8_backward(dz @ down.t(), x, keep="dense").dx, None

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2 * 128, generator=generator, requires_grad=True)
    down = torch.randn(128, 8, generator=generator)
    Layer.apply(x, down).sum().backward()
    wanted = x.detach().clone().requires_grad_()
    (plain_glu(wanted, None, None, "silu") @ down).sum().backward()
    torch.testing.assert_close(x.grad, wanted.grad)
