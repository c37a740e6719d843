"""Which tile and how many splits the forward of the router takes on sm_90a: a cost model in plain numbers.

A cluster of `splits` blocks makes a tile of `rows` tokens by `columns` experts, each block its part of the depth, 64 of
it per stage. All costs are clocks of an SM, with rates fitted to a run on an H200: 46 cases of 4096 to 12289
tokens and 8 to 512 experts, times within 6 % (root mean square), choices at 0.3 % above the fastest one on average
(docs/decisions/router.md).
"""

from __future__ import annotations

from typing import NamedTuple

DEPTH = 64  # of the summed dimension per stage
ROW_BYTES = 2 * DEPTH  # of an operand in a stage
TILES = ((128, 64), (128, 96), (128, 128), (128, 160), (192, 96), (192, 128))  # rows, columns
MAX_SPLITS = 8  # blocks of a cluster
MIN_BLOCKS = 4  # stages of a split: fewer cost more to add up than they save

_SHARED = 227 * 1024 - 1024 - 256  # without alignment and barriers
_MAX_STAGES = 12

_START = 6400  # of a block, before its first product
_TENSOR_CLOCKS = 0.0373  # of a stage, for each element of the tile and each term
_SM_BYTES = 69  # a clock that reach an SM
_L2_BYTES = 5900  # a clock that leave L2
_DRAM_BYTES = 1800  # a clock that leave memory
_STORE_BYTES = 20  # a clock that an SM writes
_EXCHANGE_START = 1450  # clocks before a cluster adds up
_EXCHANGE_BYTES = 11  # a clock that it adds up


class Tile(NamedTuple):
    """How the forward is cut."""

    rows: int
    columns: int
    splits: int
    stages: int  # of a block's ring
    clocks: float  # as the model has it


def _up(a: int, b: int) -> int:
    return -(-a // b)


def box_rows(size: int, tile: int) -> int:
    """Return how many rows a box of an operand has: the tile's, or fewer if there is but one tile."""
    return tile if size > tile else _up(size, 8) * 8


def resident_clusters(sms: int, splits: int) -> int:
    """Return how many clusters run at the same time. Groups of 16 or 18 SMs are not shared by clusters."""
    return max(1, (sms if splits <= 2 else sms * 15 // 16) // splits)


def ring_stages(rows: int, columns: int, terms: int) -> int:
    """Return how many stages fit in shared memory."""
    return min(_MAX_STAGES, _SHARED // (ROW_BYTES * (rows + terms * columns)))


def clocks(size: tuple[int, int, int], terms: int, sms: int, rows: int, columns: int, splits: int) -> float:
    """Return what the model says a forward of `size` (tokens, experts, depth) takes with a tile and splits."""
    tokens, experts, depth = size
    row_tiles, column_tiles, blocks = _up(tokens, rows), _up(experts, columns), _up(_up(depth, DEPTH), splits)
    x_bytes = ROW_BYTES * box_rows(tokens, rows)
    stage_bytes = x_bytes + ROW_BYTES * terms * box_rows(experts, columns)
    result_bytes = 4 * rows * min(columns, experts)
    tiles, resident = row_tiles * column_tiles, resident_clusters(sms, splits)

    def wave(clusters: int) -> float:
        active = clusters * splits
        stage = max(
            _TENSOR_CLOCKS * rows * columns * terms,
            stage_bytes / _SM_BYTES,
            active * stage_bytes / _L2_BYTES,
            active / min(column_tiles, clusters) * x_bytes / _DRAM_BYTES,
        )
        end = result_bytes / splits / _STORE_BYTES
        if splits > 1:
            end += _EXCHANGE_START + result_bytes * (splits - 1) / splits / _EXCHANGE_BYTES
        return _START + blocks * stage + end

    full, rest = divmod(tiles, resident)
    return full * wave(min(resident, tiles)) + (wave(rest) if rest else 0.0)


def forward_tile(size: tuple[int, int, int], terms: int, sms: int) -> Tile:
    """Return the tile that the model finds fastest.

    Args:
        size: Tokens, experts, depth.
        terms: 16-bit matrices whose sum the weight is.
        sms: Number of SMs.
    """
    deepest = max(1, min(MAX_SPLITS, _up(size[2], DEPTH) // MIN_BLOCKS))
    choices = [(*tile, splits) for tile in TILES for splits in range(1, deepest + 1)]
    cost = {choice: clocks(size, terms, sms, *choice) for choice in choices}
    rows, columns, splits = min(choices, key=cost.__getitem__)
    return Tile(rows, columns, splits, ring_stages(rows, columns, terms), cost[rows, columns, splits])
