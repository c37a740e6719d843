"""The pipeline of ``common/pipeline.cuh`` alone: rows pass through it in order, and its wrong uses are reported."""

from __future__ import annotations

import pytest
import torch
from support import device_probe
from support.compare import running_on
from support.places import at, emulated

import rtkernels
from rtkernels.emulator import EmulatorError

ORDERS = ("forward", "reverse", 0, 1)
ROW = 128
FAULTS = {
    "no barrier after init": 1, "no acquire": 2, "no wait": 3, "release before read": 4, "no release": 5,
    "release twice": 6, "too few bytes": 7, "write without fence": 8, "write with fence": 9, "no commit": 10,
    "release without syncwarp": 11, "no drain": 12,
}  # fmt: skip


def doubled(
    stages: int, bulk: bool, rows: int, *, consumers: int = 2, grid: int = 1, fault: int = 0, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a probe's results for random rows, and the expected ones."""
    x = torch.randn(max(rows, 1), ROW).to(device)
    y = torch.full_like(x, float("nan"))
    block = 32 * (1 + consumers)
    device_probe.launch(device_probe.PIPELINE, (stages, bulk), x.device, grid, block, x, y, rows, fault)
    return y[:rows].cpu(), (2 * x)[:rows].cpu()


@at("sm_90", "cuda")
@pytest.mark.parametrize("bulk", (False, True))
@pytest.mark.parametrize("stages", device_probe.STAGES)
def test_rows_pass_through(place: str, stages: int, bulk: bool) -> None:
    with running_on(place) as device:
        for rows, consumers, grid in ((0, 1, 1), (1, 2, 1), (stages, 1, 1), (2 * stages + 1, 3, 1), (29, 2, 3)):
            got, expected = doubled(stages, bulk, rows, consumers=consumers, grid=grid, device=device)
            assert torch.equal(got, expected), (rows, consumers, grid)


@emulated
@pytest.mark.parametrize("bulk", (False, True))
def test_in_every_order(bulk: bool) -> None:
    for order in ORDERS:
        with rtkernels.emulate("sm_90", order=order):
            got, expected = doubled(3, bulk, 11, consumers=3)
            assert torch.equal(got, expected), order


@emulated
@pytest.mark.parametrize(
    ("name", "bulk", "kinds"),
    [
        ("no barrier after init", True, ("race", "uninitialised_shared")),
        ("no barrier after init", False, ("race", "uninitialised_shared")),
        ("no acquire", True, ("race", "divergent_barrier")),
        ("no acquire", False, ("race", "divergent_barrier")),
        ("no wait", True, ("race", "uninitialised_shared")),
        ("no wait", False, ("race", "uninitialised_shared")),
        ("release before read", True, ("race", "uninitialised_shared")),
        ("release before read", False, ("race",)),
        ("no release", True, ("divergent_barrier",)),
        ("no release", False, ("divergent_barrier",)),
        ("release twice", True, ("race", "divergent_barrier", "uninitialised_shared")),
        ("release twice", False, ("race", "divergent_barrier", "absent_lanes")),
        ("too few bytes", True, ("race", "divergent_barrier", "uninitialised_shared")),
        ("write without fence", True, ("missing_fence",)),
        ("no commit", False, ("divergent_barrier",)),
        ("release without syncwarp", True, ("race",)),
        ("release without syncwarp", False, ("race",)),
        ("no drain", True, ("race",)),
        ("no drain", False, ("race",)),
    ],
)
def test_wrong_uses_are_reported(name: str, bulk: bool, kinds: tuple[str, ...]) -> None:
    for order in ORDERS:
        with rtkernels.emulate("sm_90", order=order), pytest.raises(EmulatorError) as caught:
            doubled(2, bulk, 7, fault=FAULTS[name])
        assert caught.value.kind in kinds, (order, str(caught.value))


@emulated
def test_consumers_that_fence_may_write_to_a_stage() -> None:
    for order in ORDERS:
        with rtkernels.emulate("sm_90", order=order):
            got, expected = doubled(2, True, 7, fault=FAULTS["write with fence"])
        assert torch.equal(got, expected)


@emulated
@pytest.mark.parametrize("stages", device_probe.STAGES)
def test_several_uses_at_a_time(stages: int) -> None:
    """A step over n uses ends where n single steps do."""
    with rtkernels.emulate("sm_90"):
        for first in (0, 1, 5):
            for uses in range(3 * stages + 1):
                y = torch.full((2,), -1, dtype=torch.int64)
                device_probe.launch(device_probe.PIPELINE_STATE, (stages,), y.device, 1, 1, y, first, uses)
                assert y.tolist() == [(first + uses) % stages, (first + uses) // stages % 2], (first, uses)
