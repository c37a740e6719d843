"""The tile schedulers of ``common/tile_scheduler.cuh`` alone: every tile exactly once, in the documented order."""

from __future__ import annotations

import pytest
import torch
from support import device_probe
from support.compare import running_on
from support.device_probe import BAND, DRAWN_BY_BLOCKS, DRAWN_BY_WARPS, STATIC, TILE_M, TILE_N
from support.places import at, emulated

import rtkernels

WARPS = 3
SOURCES = {"static": STATIC, "drawn_by_blocks": DRAWN_BY_BLOCKS, "drawn_by_warps": DRAWN_BY_WARPS}


def walk(
    source: int, rows: int, columns: int, *, ends: list[int] | None = None, grid: int = 1, device: str = "cpu",
    log: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return how often each warp saw each row in each column of tiles, and the group it saw the row in."""
    across = -(-columns // TILE_N)
    cover = torch.zeros(WARPS, max(rows, 1), max(across, 1), dtype=torch.int32, device=device)
    owner = torch.full((WARPS, max(rows, 1)), -1, dtype=torch.int32, device=device)
    counter = torch.zeros(1, dtype=torch.int32, device=device)
    groups = 0 if ends is None else len(ends)
    on_device = None if ends is None else torch.tensor([*ends, 0], dtype=torch.int32, device=device)[:groups]
    if groups == 0:
        on_device = None
    args = (cover, owner, log, on_device, counter, groups, rows, columns)
    variant = source, ends is not None
    shared = 0 if ends is None else 12 * (groups + 1)
    device_probe.launch(device_probe.TILES, variant, cover.device, grid, 32 * WARPS, *args, shared=shared)
    return cover[:, :rows, :across].cpu(), owner[:, :rows].cpu()


def in_bands(tiles_m: int, tiles_n: int) -> list[list[int]]:
    """Return (m, n) of all tiles in order: bands of BAND rows, down the columns of a band."""
    return [
        [m, n]
        for first in range(0, tiles_m, BAND)
        for n in range(tiles_n)
        for m in range(first, min(first + BAND, tiles_m))
    ]


def ends_of(sizes: list[int]) -> list[int]:
    return torch.tensor(sizes).cumsum(0).tolist() if sizes else []


GROUPS = {
    "none": [],
    "one": [37],
    "one_empty": [0],
    "all_empty": [0] * 5,
    "empty_first_middle_last": [0, 0, 5, 16, 0, 0, 17, 33, 0, 1, 0],
    "not_a_multiple_of_the_band": [9 * TILE_M - 1, 3, 6 * TILE_M],
    "512": [(7 * g * g) % 23 if g % 5 else 0 for g in range(512)],
    "512_of_which_one": [0] * 300 + [100] + [0] * 211,
}


@at("sm_90", "cuda")
@pytest.mark.parametrize("name", SOURCES)
def test_every_tile_of_a_matrix_exactly_once(place: str, name: str) -> None:
    with running_on(place) as device:
        for rows, columns, grid in (
            (0, 8, 2), (8, 0, 2), (1, 1, 1), (1, 1, 3), (16, 8, 1), (17, 9, 2), (61, 77, 1), (139, 45, 5), (144, 8, 4),
        ):  # fmt: skip
            cover, owner = walk(SOURCES[name], rows, columns, grid=grid, device=device)
            assert (cover == 1).all(), (rows, columns, grid)
            assert (owner == 0).all() or columns == 0


@at("sm_90", "cuda")
@pytest.mark.parametrize("groups", GROUPS)
@pytest.mark.parametrize("name", SOURCES)
def test_every_tile_of_groups_exactly_once(place: str, name: str, groups: str) -> None:
    sizes = GROUPS[groups]
    belongs = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes, dtype=torch.int64))
    with running_on(place) as device:
        for extra, columns, grid in ((0, 19, 1), (4, 8, 3)):  # rows behind the last group belong to nobody
            rows = sum(sizes)
            cover, owner = walk(SOURCES[name], rows + extra, columns, ends=ends_of(sizes), grid=grid, device=device)
            assert (cover[:, :rows] == 1).all() and (cover[:, rows:] == 0).all()
            assert (owner[:, :rows] == belongs).all()


@at("sm_80", "sm_90")
def test_order_in_bands(place: str) -> None:
    for tiles_m, tiles_n in ((1, 1), (1, 5), (5, 1), (4, 3), (11, 4)):
        log = torch.full((tiles_m * tiles_n, 2), -1, dtype=torch.int32)
        with running_on(place) as device:
            walk(STATIC, tiles_m * TILE_M - 3, tiles_n * TILE_N - 1, device=device, log=log)
        assert log.tolist() == in_bands(tiles_m, tiles_n)


@emulated
def test_order_in_groups() -> None:
    """Each group has bands of its own, one group after the other."""
    sizes = [5 * TILE_M, 0, 1, 9 * TILE_M - 1]
    expected = [place for rows in sizes for place in in_bands(-(-rows // TILE_M), 3)]
    log = torch.full((len(expected), 2), -1, dtype=torch.int32)
    with rtkernels.emulate("sm_90"):
        walk(STATIC, sum(sizes), 3 * TILE_N, ends=ends_of(sizes), log=log)
    assert log.tolist() == expected


@emulated
@pytest.mark.parametrize("source", (STATIC, DRAWN_BY_BLOCKS))
def test_without_mbarriers(source: int) -> None:
    """Warps pass numbers through mbarriers, which need sm_90; the other methods serve older targets too."""
    sizes = GROUPS["empty_first_middle_last"]
    with rtkernels.emulate("sm_80"):
        assert (walk(source, 61, 77, grid=2)[0] == 1).all()
        assert (walk(source, sum(sizes), 20, ends=ends_of(sizes), grid=2)[0] == 1).all()


@emulated
@pytest.mark.parametrize("name", SOURCES)
def test_in_every_order(name: str) -> None:
    for order in ("reverse", 0, 1):
        with rtkernels.emulate("sm_90", order=order):
            cover, _ = walk(SOURCES[name], 139, 45, grid=3)
            assert (cover == 1).all()
            cover, _ = walk(SOURCES[name], 72, 20, ends=ends_of(GROUPS["empty_first_middle_last"]), grid=3)
            assert (cover == 1).all()


@emulated
def test_wrong_ends_stay_inside_the_matrix() -> None:
    for ends in ([-5, 10, 3, 2000, 7], [2**31 - 1], [-(2**31), 40, -1]):
        with rtkernels.emulate("sm_90"):
            _, owner = walk(STATIC, 50, 8, ends=ends)  # the emulator reports out-of-bounds accesses
        assert (owner < len(ends)).all()
