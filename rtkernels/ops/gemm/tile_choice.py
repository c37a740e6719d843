"""Tiles of the wgmma products, as plain data: which ones exist, and which one a product gets."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

BOX = 64 * 128  # bytes of a box of results in shared memory
ROW = 128  # bytes of k in a stage, of every row of a tile
MAX_GROUPS = 512
NO_SCALES, ROW_SCALES, COLUMN_SCALES = 0, 1, 2  # in the loop; of cuda_src/gemm/gemm_sm90.cu


class Tile(NamedTuple):
    """The tile that a block computes at a time.

    ``consumers`` warpgroups have 64 rows each of ``cols`` columns; with more than one of ``waves``, each has a tile of
    its own of as many times 64 rows, and one multiplies while the other one finishes. ``stages`` hold 128 bytes of k of
    both operands, and every warpgroup has ``slots`` boxes for results that are being stored. ``shifted``: rows of
    operands are odd multiples of 8 bytes, every second one of which two warps of the producers move. ``split``: rows of
    b are odd multiples of 16 bytes, even and odd ones of which are loaded separately.
    """

    consumers: int
    waves: int
    cols: int
    stages: int
    slots: int
    shifted: bool = False
    split: bool = False

    @property
    def rows(self) -> int:
        """Rows of the tile."""
        return 64 * (self.consumers if self.waves == 1 else self.waves)

    @property
    def threads(self) -> int:
        """Threads of a block: the consumers and a warpgroup of producers."""
        return 128 * (self.consumers + 1)

    def shared(self, scales: int, groups: int) -> int:
        """Return the dynamic shared memory of a block in bytes; the last 1024 are for alignment."""
        floats = 0 if scales == NO_SCALES else self.rows + (self.cols if scales == COLUMN_SCALES else 32)
        stage = (self.rows + self.cols) * ROW + 4 * floats + 16
        table = 8 * self.stages + 8 * ROW if self.shifted else 12 * (groups + 1) if groups else 0
        return self.stages * stage + self.consumers * (self.slots * BOX + 8 * self.cols) + table + 1024


LARGE = Tile(2, 1, 256, 3, 4)
COLS_224 = Tile(2, 1, 224, 3, 4)
COLS_192 = Tile(2, 1, 192, 4, 3)
SMALL = Tile(2, 1, 128, 5, 2)
ONE_WARPGROUP = Tile(1, 1, 128, 6, 2)
SQUARE = Tile(3, 1, 192, 3, 3)
PINGPONG = Tile(2, 2, 128, 5, 2)
NARROW = Tile(1, 1, 64, 12, 2)  # for few rows: twice as many blocks, so that fewer of them share k
SHIFTED_TILES = (  # of 8-bit operands; two stages at a time must have arrived
    Tile(1, 1, 128, 6, 2, True), Tile(2, 1, 128, 5, 2, True), Tile(2, 1, 192, 4, 3, True), Tile(1, 1, 64, 12, 2, True),
)  # fmt: skip
# Of rows of b that are odd multiples of 16 bytes. 224 columns spill.
SPLIT_TILES = tuple(tile._replace(split=True) for tile in (LARGE, COLS_192, SMALL, ONE_WARPGROUP, NARROW))
TILES = {  # by what is in the loop
    NO_SCALES: (LARGE, SQUARE, COLS_224, COLS_192, SMALL, ONE_WARPGROUP, NARROW, PINGPONG),
    ROW_SCALES: (LARGE, COLS_224, COLS_192, SMALL, ONE_WARPGROUP, NARROW),
    COLUMN_SCALES: (LARGE, SMALL),
}
# For dense results: of which others would leave many SMs without work in the last round; with a short k.
BETWEEN = (COLS_224, COLS_192)
TALL = Tile(3, 1, 128, 4, 2)
# Of bf16 without scales in the loop; others are gated by the first one.
GATED_TILES = (LARGE, SMALL, ONE_WARPGROUP, TALL)
SPLIT_GATED_TILES = tuple(tile._replace(split=True) for tile in (SMALL, TALL))
# Of grouped products, whose sizes are not known: times of a tile's element, relative to those of the large tile.
_SLOWER = {LARGE: 1.0, SMALL: 1.12, ONE_WARPGROUP: 1.5}
PLAIN, QUANTIZED, GATED = 0, 1, 2  # how results are finished; the last two in registers, by tiles of 256 columns


def tile_count(tile: Tile, m: int, n: int) -> int:
    """Return how many tiles a dense result has."""
    return -(-m // tile.rows) * -(-n // tile.cols)


class Size(NamedTuple):
    """What decides how long a dense product takes: rows and columns, and bytes of a row along k.

    ``a_rows``, ``b_rows``: how much longer L2 takes for 128 bytes of a row than if rows began at its lines (``loads``).
    ``a_moved``, ``b_moved``: every second row is moved in shared memory. ``b_split``: `b_rows` of rows that are
    loaded separately.
    """

    m: int
    n: int
    k_bytes: int
    a_rows: float = 1.0
    b_rows: float = 1.0
    a_moved: bool = False
    b_moved: bool = False
    b_split: float = 1.0


class Choice(NamedTuple):
    """A tile, how many blocks share the k of tiles (0 if every tile has one block), and the blocks of the grid.

    ``grid`` is 0 if those that share are all there are. Otherwise all blocks have as many whole tiles, and the first
    ``sharing`` blocks share what is left for the last round.
    """

    tile: Tile
    sharing: int = 0
    grid: int = 0


# Clock cycles of an H200, fitted to times in docs/decisions/gemm.md.
_START = 6860  # until the first stage has arrived
_STEP = {NO_SCALES: 1024, ROW_SCALES: 1156, COLUMN_SCALES: 1860}  # 128 bytes of k of 128 x 256 results
_ALONE = 1.22  # how much longer a single warpgroup takes, which cannot hide what is between its products
_ROW = 2.38  # of 128 bytes from L2, at least
_LINE = (1.26, 0.985)  # of a line of L2, of which they may be in two: of one SM, and what is added if all of them load
_ROWS = {8: 1.685, 16: 1.685, 32: 1.13, 64: 1.13}  # how much longer loads take, by the multiple at which rows begin
_SPLIT = (1.06, 180)  # of split rows: how much longer products take, and what is between two stages of one warpgroup
_MOVED = 4.7  # of each row of a stage of which two warps move every second one
_EPILOGUE = (2295, 4.6)  # of a tile, and of each of its columns
_PINGPONG = 0.94  # how much longer a stage takes in ping-pong, with what _HANDOVER does not count
_HANDOVER = 200  # from the last product of a warpgroup to the first of the other one
_BYTES, _OF_AN_SM = 2300, 83  # that memory delivers in a cycle, at most, and to one SM
_PART = {True: (1180, 56), False: (1835, 62)}  # for sums that a block passes to another one: latency, bytes in a cycle
_LAUNCH = {True: 590, False: 1525}  # by which the launch of blocks that wait for each other takes longer
_HIDDEN = 0.01  # of the work counts even where memory takes longer
_DOUBT = 1.06  # by how much sharing must be faster
_MAX_PARTS = 8  # blocks that share a tile
_MIN_STEPS = 4  # of k, of each of them
_UNEVEN = 30_000  # if blocks have different parts of k, so that they read operands again


def loads(pitch_bytes: int) -> float:
    """Return how much longer L2 takes for 128 bytes of a row if rows are so many bytes apart."""
    return _ROWS.get(math.gcd(pitch_bytes, ROW), 1.0)


def _step(tile: Tile, size: Size, scales: int, busy: float) -> float:
    """Return the cycles of a stage: products, loads or moves, whatever takes longest. `busy`: SMs that load."""
    products = _STEP[scales] * tile.rows * tile.cols / (128 * 256) * (1.0 if tile.consumers > 1 else _ALONE)
    if tile.split:
        products = products * _SPLIT[0] + (0 if tile.consumers > 1 else _SPLIT[1])
    line, b_rows = _LINE[0] + _LINE[1] * busy, size.b_split if tile.split else size.b_rows
    loading = tile.rows * max(_ROW, size.a_rows * line) + tile.cols * max(_ROW, b_rows * line)
    moving = _MOVED * (tile.rows * size.a_moved + tile.cols * size.b_moved)
    return max(products, loading, moving)


def cycles(choice: Choice, size: Size, scales: int, sms: int) -> float:
    """Return how long a dense product takes, as far as tiles decide it."""
    tile, sharing, grid = choice
    tiles, steps = tile_count(tile, size.m, size.n), -(-size.k_bytes // ROW)
    busy = min(1.0, (grid or sharing or tiles) / sms)
    step = _step(tile, size, scales, busy) * (_PINGPONG if tile.waves > 1 else 1.0)
    epilogue = _EPILOGUE[0] + _EPILOGUE[1] * tile.cols
    delivered = min(_BYTES, _OF_AN_SM * sms * busy)
    b_rows = size.b_split if tile.split else size.b_rows
    memory = (size.m * size.a_rows + size.n * b_rows) * size.k_bytes / delivered
    if not sharing:
        each = steps * step
        rounds = -(-tiles // sms)
        work = rounds * (each + epilogue)
        if tile.waves > 1:  # a warpgroup finishes its tile while the other one multiplies
            epilogue = _EPILOGUE[0] + 2 * _EPILOGUE[1] * tile.cols
            work = rounds * max(each + _HANDOVER, (each + epilogue) / 2) + epilogue
        return _START + max(work, memory) + _HIDDEN * work
    whole, rest = divmod(tiles, grid or sharing)
    own = -(-rest * steps // sharing)  # steps of a block
    passed: float = _UNEVEN
    small = tile.cols <= 128 and tile.consumers <= 2  # sums of two blocks are loaded at the same time
    if sharing % rest == 0:
        passed = sharing // rest * (_PART[small][0] + 4 * tile.rows * tile.cols / _PART[small][1])
    work = whole * (steps * step + epilogue) + own * step + epilogue
    return _START + _LAUNCH[small] + max(work, memory) + _HIDDEN * work + passed


def sharing_limit(sharing: int, tiles: int, k_bytes: int, grid: int = 0) -> int:
    """Return how many of `sharing` blocks can have a share of tiles; 0 if some would have none after whole rounds."""
    steps = -(-k_bytes // ROW)
    if grid:
        return min(sharing, tiles % grid * steps)
    if tiles <= sharing:
        return min(sharing, tiles * steps)
    return sharing if sharing and tiles % sharing * steps >= sharing else 0


def _candidates(tile: Tile, size: Size, scales: int, sms: int) -> Iterator[Choice]:
    """Yield a tile with each number of blocks that may share its k."""
    yield Choice(tile)
    tiles, steps = tile_count(tile, size.m, size.n), -(-size.k_bytes // ROW)
    if size.k_bytes >= 1 << 24 or tile.waves > 1:
        return
    for parts in range(2, min(sms // tiles, _MAX_PARTS, steps // _MIN_STEPS) + 1):
        yield Choice(tile, tiles * parts)
    rest = tiles % sms if tiles > sms else 0
    for parts in range(2, min(sms // max(rest, 1), _MAX_PARTS, steps // _MIN_STEPS) + 1 if rest else 0):
        yield Choice(tile, rest * parts, sms)
    if scales == COLUMN_SCALES and 2 * tiles > sms and _MAX_PARTS * (tiles % sms) >= sms and steps >= _MAX_PARTS:
        yield Choice(tile, sms)


def ranked(
    size: Size, scales: int, finish: int, sms: int, tiles: Sequence[Tile] = (), whole: Sequence[Tile] = ()
) -> list[Choice]:
    """Return tiles of a dense product with how many blocks share its k: those that take the fewest `cycles` first.

    ``tiles`` are those that can compute the product (default: all); blocks cannot share those in ``whole``.
    """
    if finish == QUANTIZED or (finish == GATED and scales != NO_SCALES):
        tiles = whole = (LARGE,)
    found = [
        c for t in tiles or TILES[scales] for c in _candidates(t, size, scales, sms) if not (c.sharing and t in whole)
    ]
    return sorted(found, key=lambda choice: cycles(choice, size, scales, sms) * (_DOUBT if choice.sharing else 1.0))


def choose(
    size: Size, scales: int, finish: int, sms: int, tiles: Sequence[Tile] = (), whole: Sequence[Tile] = ()
) -> Choice:
    """Return the first one of `ranked`."""
    return ranked(size, scales, finish, sms, tiles, whole)[0]


def ranked_grouped(m: int, n: int, scales: int, finish: int, sms: int, tiles: Sequence[Tile] = ()) -> list[Tile]:
    """Return tiles of a grouped product; ``m`` is the number of rows of one group, or what is known of it."""
    if finish != PLAIN:
        return [LARGE]
    found = [tile for tile in tiles or TILES[scales] if tile in _SLOWER]
    return sorted(found, key=lambda t: -(-tile_count(t, m, n) // sms) * t.rows * t.cols * _SLOWER[t])
