"""Normalisation to fp8 on sm_90: tiles loaded by TMA, x read once, and what only a GPU shows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.compare import assert_close, running_on
from support.norm_fp8_cases import (
    EPS,
    LAYOUTS,
    Inputs,
    Normal,
    NormFp8,
    check,
    compare,
    expected,
    make,
    rms_norm_fp8,
    spaced,
)
from support.places import DTYPES, ORDERS, emulated, short
from support.ways import captured

import rtkernels
from rtkernels.emulator import _launch
from rtkernels.errors import ResidencyError
from rtkernels.ops.norm import norm_fp8_operators as operators
from rtkernels.ops.norm import norm_fp8_ring_plan as ring
from rtkernels.runtime.launch import memory
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.plans import Plans

# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("cols", (1536, 2048, 4096, 5120, 7168, 8192, 16384))
def test_bench_shapes(cols: int) -> None:
    generator = torch.Generator("cuda").manual_seed(cols)
    x, residual = (torch.randn(1000, cols, generator=generator, device="cuda").bfloat16() for _ in range(2))
    weight = torch.randn(cols, generator=generator, device="cuda").bfloat16()
    inputs = Inputs(x, weight)
    with running_on("cuda"):
        for layout in LAYOUTS:
            compare(check(inputs, layout, column=True), check(inputs, layout, column=True))
            check(replace(inputs, residual=residual), layout, pow2=True, keep=True)


RING_CASES: dict[str, Callable[[Normal], Inputs]] = {
    "tiles": lambda n: Inputs(n(4096, 512), n(512)),
    "parts": lambda n: Inputs(n(272, 136), n(136), offset=1.0),
    "pairs": lambda n: Inputs(n(400, 1272), n(1272)),  # of tiles, so that scales of neighbours are written together
    "few_rows": lambda n: Inputs(n(16, 4104), n(4104).float()),
    "strided": lambda n: Inputs(spaced(n, 1040, 640, every=2, pad=8)),
    "many": lambda n: Inputs(n(20_000, 1032), n(1032)),
}


def _both_and_transposed(inputs: Inputs, first: NormFp8, **options: Any) -> None:
    """Recompute the codes of `first` from its 1/rms, by rows and transposed, or transposed."""
    for layout, scale_layout in (("both", "row"), ("both", "column"), ("transposed", "row")):
        tensors = {"weight": inputs.weight, "offset": inputs.offset, "rstd": first.rstd}
        again = rms_norm_fp8(inputs.x, layout=layout, scale_layout=scale_layout, **tensors, **options)
        q, scale = (first.q, first.scale) if layout == "both" else (None, None)
        if scale_layout == "column":
            scale = scale.t().contiguous()
        compare(again, NormFp8(q, scale, first.q_t, first.scale_t))


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_recomputing_by_tensor_copies(order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    for case in ("parts", "pairs"):
        inputs = make(case, torch.bfloat16, "cpu", RING_CASES)
        inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
        with rtkernels.emulate("sm_80"):
            first = rms_norm_fp8(inputs.x, inputs.weight, layout="both", offset=inputs.offset)
        Plans.forget_all()
        with rtkernels.emulate("sm_90", order=order):
            _both_and_transposed(inputs, first)
        Plans.forget_all()
    assert "norm_fp8_ring" in {entry for _, entry in rtkernels.emulator.launched()}


@emulated
def test_sums_by_tensor_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    with running_on("sm_90") as device:
        inputs = make("parts", torch.bfloat16, device, RING_CASES)
        check(replace(inputs, residual=inputs.x.flip(0)), "both")
    assert all("map_" in plan.source for plan in operators.FORWARD._plans.values())
    Plans.forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("case", RING_CASES)
def test_recomputing_with_the_copy_engine(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, dtype, "cuda", RING_CASES)
    inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
    options = {"pow2_scale": case == "parts"}
    monkeypatch.setattr(ring, "_MIN_BYTES", 1 << 60)
    Plans.forget_all()
    first = rms_norm_fp8(inputs.x, inputs.weight, layout="both", offset=inputs.offset, **options)
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    for _ in range(2):
        _both_and_transposed(inputs, first, **options)
    with running_on("cuda"):
        for layout in ("both", "transposed"):
            check(replace(make(case, dtype, "cuda", RING_CASES), residual=torch.ones_like(inputs.x)), layout)
    if ring.RING.supports(device_info(inputs.x.get_device()).target):
        assert all("map_" in plan.source for plan in operators.FORWARD._plans.values())
    Plans.forget_all()


def check_odd(inputs: Inputs, eps: float = EPS) -> None:
    """1/rms as in fp64 where it is finite, and exact codes for that 1/rms."""
    got = rms_norm_fp8(inputs.x, inputs.weight, eps=eps, layout="both")
    exact = torch.rsqrt(inputs.x.double().square().mean(-1) + eps)
    assert_close(got.rstd, exact, c=12, what="rstd")
    compare(got, expected(inputs.x, inputs, got.rstd, "both", False, "row", False))


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_reading_once_emulated(order: str | int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    Plans.forget_all()
    g = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(*shape, generator=g).bfloat16() for shape in ((144, 520), (520,)))
    with rtkernels.emulate("sm_90", order=order):
        for pow2 in (False, True):  # three blocks, two pairs of tiles each
            check(Inputs(x, weight, offset=0.5), "both", pow2=pow2, column=pow2)
        # Some rows with sums that do not fit into integers; then the same memory for fewer rows.
        x[1], x[2, 3], x[3, 4], x[130] = x[1] * 1e12, math.inf, math.nan, 0.0
        check_odd(Inputs(x, weight))
        check_odd(Inputs(x[:128] * 1e-9, weight), eps=0.0)
        check(Inputs(x[16:], weight), "both")
    assert memory._kept and all(not zeros.any() for zeros in memory._kept.values())
    assert "norm_fp8_single_read" in {entry for _, entry in rtkernels.emulator.launched()}
    Plans.forget_all()


@emulated
def test_fewer_sms_than_blocks_that_wait_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of three pairs of tiles: three blocks at least, or statistics first and then tiles."""
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    x = torch.randn(144, 520, generator=torch.Generator().manual_seed(0)).bfloat16()
    for room, once in ((4, True), (3, True), (2, False), (0, False)):
        monkeypatch.setattr(ring.SINGLE_READ, "max_resident_blocks", lambda *args, room=room: room)
        Plans.forget_all()
        with rtkernels.emulate("sm_90"):
            check(Inputs(x), "both")
        (plan,) = operators.FORWARD._plans.values()
        assert ("kept_zeros" in plan.source) == once, room
    Plans.forget_all()


@emulated
def test_a_launch_that_is_not_resident_is_made_in_two_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver has the last word: a refused launch is not tried again on that device."""
    tried = []

    def refused(*args: Any) -> None:
        tried.append(args)
        raise ResidencyError("3 blocks of 640 threads must run at the same time")

    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    monkeypatch.setattr(ring, "_refused", set())
    monkeypatch.setattr(ring.SINGLE_READ, "bind", lambda *args, **options: refused)
    x = torch.randn(144, 520, generator=torch.Generator().manual_seed(0)).bfloat16()
    Plans.forget_all()
    with rtkernels.emulate("sm_90"):
        for _ in range(2):
            check(Inputs(x), "both")
        check(Inputs(x[:128]), "both")  # another plan
    assert len(tried) == 1 and ring._refused == {-1}
    Plans.forget_all()


@pytest.mark.gpu
def test_the_driver_refuses_and_two_passes_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2048, 4096, device="cuda").bfloat16()
    if not ring.SINGLE_READ.supports(device_info(x.get_device()).target):
        pytest.skip("for GPUs with TMA")
    monkeypatch.setattr(ring, "_refused", set())
    Plans.forget_all()
    first = check(Inputs(x), "both")
    room = ring.SINGLE_READ.max_resident_blocks(("bf16",), 0, ring._THREADS, ring._SINGLE_READ_SHARED)
    monkeypatch.setattr(ring, "single_read_blocks", lambda matrix: room + 1)
    Plans.forget_all()
    second = check(Inputs(x), "both")
    assert ring._refused == {x.get_device()}
    assert_close(second.rstd, first.rstd.double(), c=12, what="rstd")
    Plans.forget_all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=short)
@pytest.mark.parametrize("case", [case for case in RING_CASES if case != "parts"])
def test_reading_once(case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = make(case, dtype, "cuda", RING_CASES)
    if not ring.SINGLE_READ.supports(device_info(inputs.x.get_device()).target):
        pytest.skip("for GPUs with TMA")
    monkeypatch.setattr(ring, "_MIN_BYTES", 0)
    Plans.forget_all()
    with running_on("cuda"):
        first = check(inputs, "both")
        check(inputs, "both", pow2=True, column=True)
        for stream in (torch.cuda.Stream(), torch.cuda.Stream()):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                again = [rms_norm_fp8(inputs.x, inputs.weight, eps=EPS, layout="both") for _ in range(20)]
            torch.cuda.synchronize()
            for one in again[::19]:
                compare(one, first)
    assert all("kept_zeros" in plan.source for plan in operators.FORWARD._plans.values())
    inputs.x[3, 5], inputs.x[7, 9], inputs.x[-1] = math.inf, math.nan, 0.0
    first = rms_norm_fp8(inputs.x, inputs.weight, eps=EPS, layout="both")
    assert first.rstd[3] == 0 and first.rstd[7].isnan() and abs(first.rstd[-1] * EPS**0.5 - 1) < 1e-6
    _both_and_transposed(inputs, first)
    Plans.forget_all()


@pytest.mark.gpu
def test_reading_once_in_the_widest_strips() -> None:
    """Rows of as many pairs of tiles as blocks can add to a sum, and each of them odd: the count must not suffer."""
    x = torch.randn(256, 32768, device="cuda").bfloat16()
    Plans.forget_all()
    x[1], x[2, ::256], x[3] = math.inf, math.nan, x[3] * 1e15
    first = rms_norm_fp8(x, layout="both", eps=EPS)
    if ring.SINGLE_READ.supports(device_info(x.get_device()).target):
        assert all("kept_zeros" in plan.source for plan in operators.FORWARD._plans.values())
    assert first.rstd[1] == 0 and first.rstd[2].isnan()
    exact = torch.rsqrt(x.double().square().mean(-1) + EPS)
    assert_close(first.rstd[3:], exact[3:], c=30, what="rstd")
    _both_and_transposed(Inputs(x), first)


@pytest.mark.gpu
def test_cuda_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    for least in (ring._MIN_BYTES, 0):
        monkeypatch.setattr(ring, "_MIN_BYTES", least)
        Plans.forget_all()
        _check_cuda_graph()
    Plans.forget_all()


def _check_cuda_graph() -> None:
    x, weight = torch.randn(256, 2048, device="cuda").bfloat16(), torch.randn(2048, device="cuda").bfloat16()
    replay = captured(lambda: rms_norm_fp8(x, weight, layout="both"))
    x.copy_(torch.randn_like(x))
    compare(replay(), rms_norm_fp8(x, weight, layout="both"))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("shape", ((70_000, 2**15), (2**24 + 5, 136)), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_beyond_two_to_the_31(shape: tuple[int, int], layout: str) -> None:
    elements = torch.Size(shape).numel()
    if torch.cuda.mem_get_info()[0] < 5 * elements:
        pytest.skip("not enough free GPU memory")
    x = torch.ones(shape, device="cuda", dtype=torch.bfloat16)
    x[-1].normal_()
    got = rms_norm_fp8(x, eps=0.0, layout=layout)
    want = rms_norm_fp8(x[-1:], eps=0.0, layout="row")
    torch.testing.assert_close(got.rstd[-1], want.rstd[0])  # kernels add up in different orders
    assert got.rstd[0] == 1
    if got.q is not None:
        assert (got.q[-1].view(torch.uint8) == want.q[0].view(torch.uint8)).float().mean() > 0.99
        assert (got.q[:-1].view(torch.uint8) == 0x7E).all()
    if got.q_t is not None:
        assert (got.q_t[:, :128].view(torch.uint8) == 0x7E).all()
        assert (got.scale_t[0] == want.scale.new_tensor(1.0) / 448).all()
