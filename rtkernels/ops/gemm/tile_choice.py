"""Tiles of the wgmma products, as plain data: which ones exist, and which one a product gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

BOX = 64 * 128  # bytes of a box of results in shared memory
ROW = 128  # bytes of k in a stage, of every row of a tile
MAX_GROUPS = 512
_SHARING_STEPS = 12  # blocks of k that take as long as what blocks write for each other (H200)
NO_SCALES, ROW_SCALES, COLUMN_SCALES = 0, 1, 2  # in the loop; of cuda_src/gemm/gemm_sm90.cu


class Tile(NamedTuple):
    """The tile that a block computes at a time.

    ``consumers`` warpgroups have ``waves`` times 64 rows each of ``cols`` columns; ``stages`` hold 128 bytes of k of
    both operands, and every warpgroup has ``slots`` boxes for results that are being stored.
    """

    consumers: int
    waves: int
    cols: int
    stages: int
    slots: int

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return 64 * self.consumers * self.waves

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup of producers."""
        return 128 * (self.consumers + 1)

    def shared(self, scales: int, groups: int) -> int:
        """Return the dynamic shared memory of a block in bytes; the last 1024 are for alignment."""
        floats = 0 if scales == NO_SCALES else self.rows + (self.cols if scales == COLUMN_SCALES else 32)
        stage = (self.rows + self.cols) * ROW + 4 * floats + 16
        table = 12 * (groups + 1) if groups else 0
        return self.stages * stage + self.consumers * (self.slots * BOX + 8 * self.cols) + table + 1024


LARGE = Tile(2, 1, 256, 3, 4)
COLS_224 = Tile(2, 1, 224, 3, 4)
COLS_192 = Tile(2, 1, 192, 4, 3)
SMALL = Tile(2, 1, 128, 5, 2)
ONE_WARPGROUP = Tile(1, 1, 128, 6, 2)
TILES = {  # by what is in the loop
    NO_SCALES: (LARGE, COLS_224, COLS_192, SMALL, ONE_WARPGROUP),
    ROW_SCALES: (LARGE, COLS_224, COLS_192, SMALL, ONE_WARPGROUP),
    COLUMN_SCALES: (LARGE, SMALL),
}
BETWEEN = (COLS_224, COLS_192)  # for dense results of which others would leave many SMs without work in the last round
# Times of a tile's element, relative to those of the large tile.
_SLOWER = {
    NO_SCALES: {LARGE: 1.0, COLS_224: 1.03, COLS_192: 1.06, SMALL: 1.12, ONE_WARPGROUP: 1.5},
    ROW_SCALES: {LARGE: 1.0, COLS_224: 1.06, COLS_192: 1.09, SMALL: 1.12, ONE_WARPGROUP: 1.5},
    COLUMN_SCALES: {LARGE: 1.0, SMALL: 1.12},
}
PLAIN, QUANTIZED, GATED = 0, 1, 2  # how results are finished; the last two in registers, by tiles of 256 columns


def tile_count(tile: Tile, m: int, n: int) -> int:
    """Return how many tiles a dense result has."""
    return -(-m // tile.rows) * -(-n // tile.cols)


def _shared_waves(tile: Tile, m: int, n: int, k: int, scales: int, sms: int) -> float | None:
    """Return the cost of sharing tiles along k, in tiles of the busiest block; None if sharing gains nothing.

    One to eight blocks have a tile; what they write for each other takes time as well.
    """
    whole, rest = divmod(tile_count(tile, m, n), sms)
    if scales != COLUMN_SCALES or tile != LARGE or 8 * rest < sms or k >= 1 << 23:
        return None
    cost = whole + rest / sms + _SHARING_STEPS / max(k // ROW, 1)
    return cost if cost < whole + 1 else None


def shares_tiles(tile: Tile, m: int, n: int, k: int, scales: int, sms: int) -> bool:
    """Return True if blocks share the tiles of the last round along k, in which SMs would have no work."""
    return _shared_waves(tile, m, n, k, scales, sms) is not None


def choose(
    m: int, n: int, k: int, scales: int, finish: int, sms: int, groups: bool = False, tiles: Sequence[Tile] = ()
) -> Tile:
    """Return the tile for a product: a large one, unless it leaves SMs without work.

    ``m`` is the number of rows of one group, or what is known of it; ``tiles`` are those that can compute the product
    (default: all).
    """
    if finish != PLAIN:
        return LARGE

    def cost(tile: Tile) -> float:
        """Work of the busiest SM, and how much slower another tile is than a large one."""
        waves: float | None = None if groups else _shared_waves(tile, m, n, k, scales, sms)
        if waves is None:
            waves = -(-tile_count(tile, m, n) // sms)
        return waves * tile.rows * tile.cols * _SLOWER[scales][tile]

    return min(tiles or TILES[scales], key=cost)
