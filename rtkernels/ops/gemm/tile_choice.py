"""Tiles of the wgmma products, as plain data: which ones exist, and which one a product gets. No device code, no torch."""

from __future__ import annotations

from typing import NamedTuple

BOX = 64 * 128  # bytes of a box of results in shared memory
ROW = 128  # bytes of k in a stage, of every row of a tile
MAX_GROUPS = 512
NO_SCALES, ROW_SCALES, COLUMN_SCALES = 0, 1, 2  # in the loop; of cuda_src/gemm/gemm_sm90.cu


class Tile(NamedTuple):
    """What a block makes at a time.

    ``consumers`` warpgroups have ``waves`` times 64 rows each of ``cols`` columns; ``stages`` hold 128 bytes of k of
    both operands, and every warpgroup has ``slots`` boxes for results on their way out.
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


# By what is in the loop. The first is the usual one.
TILES = {
    NO_SCALES: (Tile(2, 1, 256, 3, 4), Tile(2, 1, 256, 4, 1), Tile(2, 2, 128, 3, 4), Tile(2, 1, 128, 5, 2),
                Tile(1, 1, 128, 6, 2)),
    ROW_SCALES: (Tile(2, 2, 128, 3, 4), Tile(2, 2, 128, 4, 1), Tile(2, 1, 128, 5, 2), Tile(1, 1, 128, 6, 2),
                 Tile(2, 1, 256, 3, 4)),
    COLUMN_SCALES: (Tile(2, 2, 128, 3, 4), Tile(2, 1, 128, 5, 2)),
}  # fmt: skip
PLAIN, QUANTIZED, GATED = 0, 1, 2  # how results are finished; the last two in registers, by tiles of 256 columns
REGISTER_TILE = Tile(2, 1, 256, 3, 4)
SMALL = {NO_SCALES: Tile(2, 1, 128, 5, 2), ROW_SCALES: Tile(2, 1, 128, 5, 2), COLUMN_SCALES: Tile(2, 1, 128, 5, 2)}
ONE_WARPGROUP = Tile(1, 1, 128, 6, 2)


def tile_count(tile: Tile, m: int, n: int) -> int:
    """Return how many tiles a dense result has."""
    return -(-m // tile.rows) * -(-n // tile.cols)


def choose(m: int, n: int, k: int, scales: int, finish: int, multiprocessors: int) -> Tile:
    """Return the tile for a product: a large one, unless it leaves multiprocessors without work.

    ``m`` is the number of rows of one group, or what is known of it.
    """
    if finish != PLAIN:
        return REGISTER_TILE
    tiles = (TILES[scales][0], SMALL[scales])
    if ONE_WARPGROUP in TILES[scales]:
        tiles += (ONE_WARPGROUP,)

    def cost(tile: Tile) -> float:
        """Time, in units of a multiprocessor's work: waves of tiles, each with an epilogue worth 1.5 KB of k."""
        waves = -(-tile_count(tile, m, n) // multiprocessors)
        rate = {256 * 128: 1.0, 128 * 128: 1.08, 64 * 128: 1.4}[tile.rows * tile.cols]
        return waves * tile.rows * tile.cols * rate

    return min(tiles, key=cost)
