"""SwiGLU to fp8 with inputs loaded by TMA (sm_90): the bits of the kernels that run everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from support.compare import assert_same_bits
from support.places import ORDERS, emulated
from torch import Tensor

import rtkernels
from rtkernels.emulator import _launch
from rtkernels.ops.act import glu_fp8_plan as plans
from rtkernels.ops.shared import tile_stream as stream
from rtkernels.runtime.launch.plans import Plans

# Rows, columns, rows of experts, options of the inputs.
CASES = {
    "one_tile": (128, 128, None, ""),
    "one_row": (1, 128, None, ""),
    "ragged": (300, 256, None, "weight"),
    "narrow": (200, 136, None, "transposed"),
    "odd_rows": (333, 640, None, "up"),
    "not_finite": (272, 256, None, "weight not_finite"),
    "half": (1000, 384, None, "weight fp16"),
    "experts": (500, 384, (0, 37, 130, 0, 5, 128, 200), "weight"),
    "experts_of_16": (1696, 256, (16, 0, 144, 16, 512, 1008), "weight not_finite"),
    "too_few": (400, 128, (100, 130), "weight"),
    "many": (20000, 512, (100,) * 200, "weight"),
    "many_turns": (24, 4736, None, "weight"),
    "many_tiles": (16384, 1024, None, ""),
}


@contextmanager
def kernels(patch: pytest.MonkeyPatch, *, streams: bool, draws: bool = False) -> Iterator[None]:
    with patch.context() as inner:
        if not streams:
            inner.setattr(plans, "supported", lambda *_: False)
        inner.setattr(stream, "_DRAW_TILES_PER_BLOCK", 0 if draws else 2**31)
        Plans.forget_all()
        yield
    Plans.forget_all()


def calls(case: str, device: str = "cuda") -> tuple[Callable[[], tuple], Callable[[], tuple]]:
    rows, cols, numbers, options = CASES[case]
    generator = torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        wide = torch.randn(*shape, device=device, generator=generator) * 2
        return wide.to(torch.float16 if "fp16" in options else torch.bfloat16)

    x, dy, up = normal(rows, 2 * cols), normal(rows, cols), None
    if "not_finite" in options:
        x.view(-1)[::977], x.view(-1)[::1013], dy.view(-1)[5::3001] = float("inf"), float("nan"), float("-inf")
    if "up" in options:
        x, up = x[:, :cols], normal(rows, cols + 16)[:, 8 : 8 + cols]
    weight = torch.randn(rows, device=device, generator=generator) if "weight" in options else None
    counts = None if numbers is None else torch.tensor(numbers, device=device)
    layout = "transposed" if "transposed" in options else "both"
    common = {"weight": weight, "counts": counts, "layout": layout, "pow2_scale": rows % 2 == 0}

    def forward() -> tuple:
        return rtkernels.glu_fp8(x, up, **common, scale_layout="row")

    def backward() -> tuple:
        scales = "row" if layout == "transposed" else "column"
        return rtkernels.glu_fp8_backward(dy, x, up, **common, scale_layout=scales, keep="both")

    return forward, backward


def assert_same(got: tuple, wanted: tuple, rows: int) -> None:
    """Compare what belongs to the first `rows` rows."""
    for name, a, b in zip(wanted._fields, got, wanted, strict=True):
        if b is not None:
            part = slice(rows) if name in ("q", "dx", "dweight") else slice(None)
            assert_same_bits(a[part], b[part])


def test_few_tiles_are_shared_out_evenly() -> None:
    for tiles, blocks in ((7, 7), (140, 132), (256, 128), (512, 128), (528, 132), (1024, 132)):
        assert stream.blocks_for(tiles, 132) == blocks


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_same_bits_in_the_emulator(monkeypatch: pytest.MonkeyPatch, order: str | int) -> None:
    """Late copies, warps in any order: barriers alone order the data that passes between warps."""
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    for case in ("one_row", "ragged", "experts"):
        for call in calls(case, "cpu"):
            with rtkernels.emulate("sm_80"):
                wanted = call()
            for draws in (False, True):
                with kernels(monkeypatch, streams=True, draws=draws), rtkernels.emulate("sm_90", order=order):
                    got = call()
                assert_same(got, wanted, CASES[case][0])
    assert {"glu_fp8_fwd_stream", "glu_fp8_bwd_stream"} <= {entry for _, entry in rtkernels.emulator.launched()}


@emulated
@pytest.mark.parametrize("draws", (False, True))
def test_many_turns_of_a_block_in_the_emulator(monkeypatch: pytest.MonkeyPatch, draws: bool) -> None:
    """More tiles than positions are kept."""
    for call in calls("many_turns", "cpu"):
        with rtkernels.emulate("sm_80"):
            wanted = call()
        with kernels(monkeypatch, streams=True, draws=draws), rtkernels.emulate("sm_90", order=1):
            assert_same(call(), wanted, CASES["many_turns"][0])


@pytest.mark.gpu
@pytest.mark.parametrize("draws", (False, True))
@pytest.mark.parametrize("case", CASES)
def test_same_bits(monkeypatch: pytest.MonkeyPatch, case: str, draws: bool) -> None:
    rows, _, numbers, _ = CASES[case]
    for call in calls(case):
        with kernels(monkeypatch, streams=False):
            wanted = call()
        with kernels(monkeypatch, streams=True, draws=draws):
            for _ in range(3):
                got = call()
        if case == "too_few":  # the rest belongs to no expert
            assert_same_bits(got.q[: sum(numbers)], wanted.q[: sum(numbers)])
            assert_same_bits(got.scale_t, wanted.scale_t)
        else:
            assert_same(got, wanted, rows)


@pytest.mark.gpu
def test_graphs_and_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Concurrent calls use different counters; a graph clears its own."""
    forward, backward = calls("many")
    with kernels(monkeypatch, streams=True, draws=True):
        wanted = forward(), backward()
        torch.cuda.synchronize()
        graph, others = torch.cuda.CUDAGraph(), [torch.cuda.Stream() for _ in range(2)]
        with torch.cuda.graph(graph):
            captured = forward(), backward()
        for _ in range(3):
            graph.replay()
            results = []
            for other in others:
                with torch.cuda.stream(other):
                    results.append((forward(), backward()))
            torch.cuda.synchronize()
            for got in (captured, *results):
                for a, b in zip(got, wanted, strict=True):
                    assert_same(a, b, CASES["many"][0])
