"""The model that chooses tiles, parts of k and copies, against times measured on an H200 (docs/decisions/gemm.md)."""

from __future__ import annotations

import pytest
import torch

from rtkernels import explain, scaled_mm
from rtkernels.ops.gemm import tile_choice
from rtkernels.ops.gemm.tile_choice import (
    COLUMN_SCALES,
    LARGE,
    NO_SCALES,
    ONE_WARPGROUP,
    PLAIN,
    ROW_SCALES,
    SMALL,
    Choice,
    Size,
    choose,
    cycles,
    loads,
    sharing_limit,
)
from rtkernels.runtime.launch import tensor_map

SMS = 132
CLOCK = 1700  # cycles per us, as the model counts them
PINGPONG, COLS_224, COLS_192 = tile_choice.PINGPONG, tile_choice.COLS_224, tile_choice.COLS_192
# m, n, k, bytes of an element, scales in the loop: us of tiles, and of blocks that share k.
MEASURED = (
    (4096, 4096, 960, 2, NO_SCALES, {(LARGE, 0): 52.1, (SMALL, 0): 55.4}),
    (4096, 4096, 1000, 2, NO_SCALES, {(LARGE, 0): 66.4}),
    (4096, 4096, 1008, 2, NO_SCALES, {(LARGE, 0): 55.7, (COLS_224, 0): 62.8, (SMALL, 0): 64.0, (PINGPONG, 0): 63.8}),
    (4096, 4096, 1024, 2, NO_SCALES, {(LARGE, 0): 54.0, (COLS_224, 0): 60.0, (SMALL, 0): 57.2, (PINGPONG, 0): 52.0}),
    (5003, 2624, 1344, 2, NO_SCALES,
     {(LARGE, 0): 66.0, (COLS_224, 0): 60.8, (COLS_192, 0): 62.8, (SMALL, 0): 62.9, (PINGPONG, 0): 58.4}),
    (5003, 2624, 1344, 1, NO_SCALES,
     {(LARGE, 0): 45.6, (COLS_224, 0): 42.6, (COLS_192, 0): 43.8, (SMALL, 0): 45.1, (PINGPONG, 0): 38.3}),
    (5003, 2624, 1344, 1, ROW_SCALES, {(LARGE, 0): 50.2, (COLS_224, 0): 46.7, (COLS_192, 0): 50.3, (SMALL, 0): 51.4}),
    (737, 7104, 2960, 2, NO_SCALES, {(COLS_192, 0): 54.6, (COLS_224, 0): 69.4, (SMALL, 0): 62.7, (LARGE, SMS): 66.2}),
    (9616, 3896, 928, 2, NO_SCALES, {(LARGE, 0): 125.1, (COLS_192, 0): 123.3, (PINGPONG, 0): 125.5}),
    (300, 300, 16384, 2, NO_SCALES, {(ONE_WARPGROUP, 90): 27.4, (SMALL, 63): 31.6, (LARGE, 48): 47.1}),
    (53, 920, 7104, 1, NO_SCALES, {(ONE_WARPGROUP, 24): 15.1, (SMALL, 24): 18.0}),
    (8192, 7168, 2048, 2, NO_SCALES, {(LARGE, 0): 319.2, (SMALL, 0): 341.1, (PINGPONG, 0): 318.4}),
    (8192, 4096, 4096, 2, NO_SCALES, {(LARGE, 0): 357.4, (SMALL, 0): 378.2, (PINGPONG, 0): 370.9}),
    (8192, 4096, 4096, 1, ROW_SCALES, {(LARGE, 0): 224.0}),
    (6206, 7904, 4904, 2, NO_SCALES, {(LARGE, 0): 840.8, (COLS_224, 0): 902.4, (SMALL, 0): 1119.2}),
    (10155, 864, 1384, 2, NO_SCALES, {(LARGE, 0): 68.8, (COLS_224, 0): 61.6, (COLS_192, 0): 66.3, (SMALL, 0): 72.3}),
    (2444, 6248, 1192, 2, NO_SCALES, {(LARGE, 0): 82.7, (COLS_224, 0): 90.6, (COLS_192, 0): 85.4, (SMALL, 0): 103.3}),
    (538, 8288, 696, 2, NO_SCALES, {(LARGE, 0): 26.1, (COLS_224, 0): 24.9, (PINGPONG, 0): 26.6, (SMALL, 0): 26.7}),
    (177, 11912, 9224, 2, NO_SCALES, {(LARGE, 0): 124.9, (COLS_224, 0): 129.3, (COLS_192, 0): 127.4}),
    (128, 4096, 14336, 2, NO_SCALES, {(ONE_WARPGROUP, 128): 46.4, (SMALL, 128): 49.0, (SMALL, 96): 48.9}),
    (1536, 1536, 16384, 1, COLUMN_SCALES, {(LARGE, 0): 136.0, (SMALL, 0): 147.0, (LARGE, SMS): 95.0}),
    (2560, 1536, 16384, 1, COLUMN_SCALES, {(LARGE, 0): 138.0, (SMALL, 0): 149.0, (LARGE, SMS): 158.0}),
    (9216, 1536, 16384, 1, COLUMN_SCALES, {(LARGE, 0): 533.0, (SMALL, 0): 515.0, (LARGE, SMS): 456.0}),
)  # fmt: skip


@pytest.mark.parametrize("m, n, k, size, scales, times", MEASURED)
def test_times(m: int, n: int, k: int, size: int, scales: int, times: dict) -> None:
    """Estimates are near the times, and their order is that of the times, but for 7 %."""
    at = Size(m, n, k * size, loads(k * size), loads(k * size))
    estimates = {key: cycles(Choice(*key), at, scales, SMS) / CLOCK + 1.5 for key in times}
    for key, measured in times.items():
        assert estimates[key] == pytest.approx(measured, rel=0.17)
    assert times[min(estimates, key=estimates.__getitem__)] <= 1.07 * min(times.values())


def test_few_tiles_with_a_long_k_are_shared() -> None:
    chosen = choose(Size(439, 936, 2 * 6264), NO_SCALES, PLAIN, SMS)
    assert chosen.sharing > 100
    for size in (Size(4096, 4096, 8192), Size(439, 936, 128), Size(8, 8, 1 << 24)):
        assert choose(size, NO_SCALES, PLAIN, SMS).sharing == 0
    assert choose(Size(439, 936, 2 * 6264), NO_SCALES, PLAIN, SMS, (LARGE,), (LARGE,)) == Choice(LARGE)


def test_every_block_has_a_share() -> None:
    assert sharing_limit(132, 1, 16) == 1 and sharing_limit(132, 5, 1000) == 40 and sharing_limit(9, 3, 1 << 20) == 9
    assert sharing_limit(0, 7, 1 << 20) == 0
    assert sharing_limit(132, 133, 1 << 10) == 0 and sharing_limit(132, 200, 1 << 10) == 132  # after a whole round


def test_rows_inside_of_sectors_take_longer() -> None:
    assert loads(2000) > loads(2016) >= loads(1984) >= loads(1920) == loads(4096) == 1.0


@pytest.mark.parametrize(
    "m, n, k, told",
    (
        (439, 936, 6264, "128 x 128 tiles, 5 stages, even and odd rows of b separately, 128 blocks share them along k"),
        (439, 936, 6256, "128 x 128 tiles, 5 stages, 128 blocks share them along k"),
        (4096, 4096, 1024, "128 x 128 tiles, 5 stages, in ping-pong"),
        (8192, 4096, 8192, "128 x 256 tiles, 3 stages"),
    ),
)
def test_explained(m: int, n: int, k: int, told: str) -> None:
    a, b = (torch.empty(rows, k, dtype=torch.bfloat16, device="meta") for rows in (m, n))
    assert explain(scaled_mm, a, b, target="9.0").summary == told


@pytest.mark.parametrize("pitch, promoted", ((2000, False), (2016, True), (2048, True)))
def test_rows_inside_of_sectors_are_not_promoted(monkeypatch: pytest.MonkeyPatch, pitch: int, promoted: bool) -> None:
    seen = []
    monkeypatch.setattr(tensor_map, "_encoded_map", lambda *arguments: seen.append(arguments))
    tensor_map.tiled_map(4096, "bf16", (1000, 64, 1), (pitch, 64 * pitch), (64, 64, 1))
    assert seen[0][-1] is promoted
