"""Matrix products on sm_90a: wgmma, TMA, a persistent grid (device code: ``cuda_src/gemm/gemm_sm90.cu``).

A backend as ``product`` describes it. The kernel is specialised by types, order of 16-bit operands, tile, what the loop
scales and where results are finished; epilogue, groups and the layout of scales are arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from rtkernels.ops.gemm.mma_kernels import spans_of_rows
from rtkernels.ops.gemm.product import BYTES, FLOAT16, FP8, Groups, Matrix, Product, Scales
from rtkernels.ops.gemm.sm90_limits import (
    ACTS,
    INTEGERS,
    OUTPUTS,
    PAIRS,
    REGISTERS,
    SHIFTED,
    SPLIT,
    TYPES,
    finish_of,
    in_loop,
    is_shifted,
    is_split,
    loop_scales,
)  # fmt: skip
from rtkernels.ops.gemm.sm90_limits import (
    unsupported as unsupported,  # of this backend
)
from rtkernels.ops.gemm.tile_choice import (
    BETWEEN,
    COLUMN_SCALES,
    GATED,
    GATED_TILES,
    LARGE,
    NO_SCALES,
    PLAIN,
    QUANTIZED,
    ROW_SCALES,
    SHIFTED_TILES,
    SMALL,
    SPLIT_GATED_TILES,
    SPLIT_TILES,
    TALL,
    TILES,
    Choice,
    Size,
    Tile,
    cycles,
    loads,
    ranked,
    ranked_grouped,
    sharing_limit,
    tile_count,
)  # fmt: skip
from rtkernels.runtime.invariance import level, starts_from_result
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.launch.kernel import Kernel
from rtkernels.runtime.operator.plan import Boxes, Memory, Offset, Step, Steps, box_strides
from rtkernels.runtime.targets import Target

_USUAL = {("bf16", "bf16"), ("fp16", "fp16"), ("e4m3", "e4m3"), ("int8", "int8")}  # pairs that have all tiles
_GROUPS = {"rows": 1, "labels": 1, "masked": 2, "depth": 3}
_BAND_ROWS = 2048  # rows of tiles that blocks walk together
_GATED_ROWS, _GATED_BYTES = 128, 50 << 20  # of a and b, up to which small tiles of gated products are faster (H200)


def _variants() -> Iterator[tuple[str | int | bool, ...]]:
    for pair in sorted(PAIRS):
        types = tuple(TYPES[t] for t in pair)
        for scales, tiles in TILES.items():
            if pair[0] in FLOAT16 and scales == ROW_SCALES:
                continue
            if pair[0] in INTEGERS and scales != NO_SCALES and pair != ("int8", "int8"):
                continue
            for tile in tiles if pair in _USUAL else (SMALL,):
                if tile in BETWEEN and scales == ROW_SCALES and pair[0] not in FP8:
                    continue
                yield (*types, False, False, *tile, scales, PLAIN)
            if pair in SHIFTED and scales in ((NO_SCALES,) if pair[0] in INTEGERS else (NO_SCALES, ROW_SCALES)):
                for tile in SHIFTED_TILES:
                    yield (*types, False, False, *tile, scales, PLAIN)
            if pair in SPLIT and scales in ((NO_SCALES, ROW_SCALES) if pair[0] in FP8 else (NO_SCALES,)):
                for tile in SPLIT_TILES:
                    yield (*types, False, False, *tile, scales, PLAIN)
                for tile in SPLIT_GATED_TILES if pair[0] == "bf16" else ():
                    yield (*types, False, False, *tile, scales, GATED)
            if pair in REGISTERS and scales != COLUMN_SCALES:
                yield (*types, False, False, *LARGE, scales, QUANTIZED)
                for tile in GATED_TILES if pair[0] in FLOAT16 else (LARGE,):
                    yield (*types, False, False, *tile, scales, GATED)
        if pair[0] in FLOAT16:
            for across in ((False, True), (True, False), (True, True)):
                for tile in (LARGE, SMALL):
                    yield (*types, *across, *tile, NO_SCALES, PLAIN)


_BUILT = tuple(_variants())
GEMM = Kernel(
    "gemm/gemm_sm90.cu", "gemm_sm90",
    template="A B ACROSS_A ACROSS_B CONSUMERS WAVES COLS STAGES SLOTS SHIFTED SPLIT SCALES FINISH",
    args="a_map:tmap b_map:tmap out_map:tmap scale_a_map:tmap scale_b_map:tmap scale_a:ptr scale_b:ptr bias:ptr "
    "add:ptr out:ptr out_scale:ptr starts:ptr ends:ptr shared_sums:ptr arrived:ptr rows:i64 columns:i64 depth:i64 "
    "a_row_pitch:i64 a_depth_pitch:i64 a_group_pitch:i64 b_row_pitch:i64 b_depth_pitch:i64 b_group_pitch:i64 "
    "scale_rows:i64 scale_shifts:i64 out_pitch:i64 out_group_pitch:i64 out_scale_pitch:i64 add_pitch:i64 "
    "groups:i64 flags_and_band:i64",
    variants=list(_BUILT), max_registers=240, needs=("wgmma",),
)  # fmt: skip
KERNELS = (GEMM,)


def _token(matrix: Matrix) -> str:
    return matrix.token if matrix.token in FLOAT16 else "byte"


def _operand(name: str, matrix: Matrix, rows: int, k: int, groups: int, tile_rows: int, shifted: bool = False) -> Boxes:
    """Boxes of 128 bytes: of k and all rows of the tile, or, of an operand that lies across, of 64 rows and 64 of k."""
    size = int(BYTES[matrix.token])
    if shifted:  # pairs of rows, of which the second one begins 8 bytes early
        shift = 8 * matrix.halves
        sizes = (k + shift, 2, rows // 2)
        return Boxes(name, "byte", sizes, (matrix.pitch - shift, 2 * matrix.pitch), (128, 2, tile_rows // 2))
    sizes = (rows, k, groups) if matrix.across else (k, rows, groups)
    strides = box_strides(sizes, (matrix.pitch, matrix.group_pitch), size)
    box = (64, 64, 1) if matrix.across else (128 // size, tile_rows, 1)
    return Boxes(name, _token(matrix), sizes, strides, box)


def _split(name: str, b: Matrix, rows: int, k: int, box_rows: int) -> tuple[Boxes, Boxes]:
    """Return the tensor maps of even and of odd rows."""
    size = int(BYTES[b.token])
    pitch = b.pitch * size
    first = Boxes(name, _token(b), (k, -(-rows // 2), 1), (2 * pitch, 2 * pitch), (128 // size, box_rows, 1))
    return first, first._replace(sizes=(k, rows // 2, 1), offset=pitch)


def _scale_boxes(name: str, scales: Scales | None, rows: int, k: int, groups: int, tile_rows: int) -> Boxes | None:
    """Return boxes with a scale per row of the tile, or None if TMA cannot read these scales."""
    if not in_loop(scales, k) or scales.rows != 1 or scales.row_pitch != 1 or not scales.aligned:
        return None
    if scales.depth_pitch % 4 or scales.group_pitch % 4 or (groups > 1 and scales.group_pitch == 0):
        return None
    sizes = (rows, -(-k // scales.depth), groups)
    strides = box_strides(sizes, (scales.depth_pitch, scales.group_pitch), 4)
    return Boxes(name, "fp32", sizes, strides, (tile_rows, 1, 1), swizzle=False)


def _scale_arguments(scales: Scales | None, k: int) -> tuple[int, int, int, int, int]:
    """Return pitches by row, depth and group, the rows that a scale covers, and its depth as a shift of 64."""
    if scales is None:
        return 0, 0, 0, 0, 0
    shift = (scales.depth // 64).bit_length() - 1 if 0 < scales.depth < k else 31
    return scales.row_pitch if scales.rows else 0, scales.depth_pitch, scales.group_pitch, scales.rows, shift


def steps(
    product: Product, device: int, *, tile: Sequence[int] | None = None, names: Mapping[str, str] | None = None,
    sharing: int | None = None, grid: int = 0, overlap: bool = False,
) -> Steps:  # fmt: skip
    """Return the launches of a product that ``unsupported`` does not refuse.

    Args:
        product: What to multiply.
        device: CUDA ordinal, or -1.
        tile: Instead of the one that ``tile_choice`` gives, for tests and tuning.
        names: Tensors that take the place of "a", "b" or "scale_a".
        sharing: How many blocks share tiles along k, 0 for none, instead of what ``tile_choice`` says.
        grid: All blocks, if more than those that share (``Choice``).
        overlap: The launch may begin before the previous kernel ends, which is ours and lets it.
    """
    p, g = product, product.groups
    if p.m == 0 or p.n == 0 or (g is not None and g.count == 0):
        return Steps()
    scales, finish, count = loop_scales(p), finish_of(p), g.count if g else 0
    sms = device_info(device).sm_count
    if tile is None or sharing is None:
        chosen = _choice(p, scales, sms, None if tile is None else Tile(*tile))
        tile, sharing, grid = chosen if sharing is None else (chosen.tile, sharing, grid)
    tile = Tile(*tile)
    depth = _depth(p, tile)
    tiles = tile_count(tile, p.m, _b_rows(p)) if g is None else _grouped_tiles(p, g, tile)
    variant = (TYPES[p.a.token], TYPES[p.b.token], p.a.across, p.b.across, *tile, scales, finish)
    sharing = sharing_limit(sharing, tiles, depth * int(BYTES[p.a.token]), grid)
    grid = (grid or sharing) if sharing else max(min(sms, tiles), 1)
    launch = GEMM.bind(
        variant, device, grid, tile.threads, tile.shared(scales, count), resident=sharing > 0,
        overlap=overlap and not sharing,
    )  # fmt: skip
    arguments = _arguments(p, tile, scales, names or {}, sharing)
    if sharing:
        return Steps(
            Step(launch, *arguments),
            scratch={"shared_sums": Memory((grid, tile.rows, tile.cols), torch.float32)},
            zeros={"arrived": grid * tile.consumers},
            if_not_resident=lambda: steps(p, device, tile=tile, names=names, sharing=0),
        )
    if g is None or g.kind != "labels":
        return Steps(Step(launch, *arguments))
    return Steps(spans_of_rows(p, device), Step(launch, *arguments), zeros={"spans": 2 * count})


def candidates(product: Product, info: DeviceInfo) -> list[dict[str, Any]]:
    """Return the tiles and numbers of sharing blocks that can compute a product, for ``rtkernels tune``."""
    if product.m == 0 or product.n == 0:
        return []
    found = _choices(product, loop_scales(product), info.sm_count)
    return [{"tile": list(c.tile), "sharing": c.sharing, "grid": c.grid} for c in found]


def summary(product: Product, target: Target) -> str:
    """Return the tile that a product would get on an H200, for ``explain``."""
    tile, sharing, grid = _choice(product, loop_scales(product), 132)
    what = "the last ones" if grid else "them"
    split = ", even and odd rows of b separately" if tile.split else ""
    how = f", {sharing} blocks share {what} along k" if sharing else ", in ping-pong" if tile.waves > 1 else ""
    return f"{tile.rows} x {tile.cols} tiles, {tile.stages} stages{split}{how}"


def estimate(product: Product, sms: int) -> float:
    """Return the cycles that a dense product would take."""
    p, scales = product, loop_scales(product)
    return cycles(_choice(p, scales, sms), _size_of(p), scales, sms)


def gated_tiles(product: Product) -> int:
    """Return how many tiles a gated product has."""
    return tile_count(LARGE, product.m, _b_rows(product))


def _b_rows(p: Product) -> int:
    return 2 * p.n if p.gate is not None else p.n


def _depth(p: Product, tile: Tile) -> int:
    """Return the k that a tile goes through: where odd rows of b begin 16 bytes early, they end as much later."""
    return p.k + (16 // int(BYTES[p.b.token]) if tile.split else 0)


def _arguments(
    p: Product, tile: Tile, scales: int, names: Mapping[str, str], sharing: int = 0
) -> list[str | int | Boxes | Offset]:
    """Return the arguments of the kernel, in its order."""
    g, finish, count = p.groups, finish_of(p), p.groups.count if p.groups else 0
    groups_a = count if g and g.kind == "masked" else 1
    groups_b = count if g and g.kind != "depth" else 1
    groups_out = count if g and g.kind in ("masked", "depth") else 1
    a = _operand(names.get("a", "a"), p.a, p.m, p.k, groups_a, tile.rows, tile.shifted)
    box_rows = tile.cols // 2 if finish == GATED else tile.cols
    b = _operand(names.get("b", "b"), p.b, _b_rows(p), p.k, groups_b, box_rows, tile.shifted)
    out_bytes = int(BYTES[p.out.token])
    starts = p.accumulate and starts_from_result()
    accumulate = p.accumulate and not starts
    adds = accumulate and p.out.token == "fp32"  # TMA adds in the dtype of the result
    by_tma = p.out.aligned and p.n * out_bytes % 16 == 0 and p.add is None and (adds or not accumulate)
    by_tma = by_tma and (p.act is None or finish != PLAIN)
    out = a  # not used
    if by_tma:
        token = "byte" if out_bytes == 1 else p.out.token if p.out.token in FLOAT16 else "fp32"
        sizes = (p.n, p.m, groups_out)
        strides = box_strides(sizes, (p.out.pitch, p.out.group_pitch), out_bytes)
        out = Boxes("out", token, sizes, strides, (128 // out_bytes, 64, 1))
    a_scales = _scale_boxes("scale_a", p.scale_a, p.m, p.k, groups_a, tile.rows)
    if g and g.kind in ("rows", "labels") and g.align % 4:  # boxes begin at multiples of 16 bytes
        a_scales = None
    b_scales = _scale_boxes("scale_b", p.scale_b, p.n, p.k, groups_b, tile.cols) if scales == COLUMN_SCALES else None
    if tile.split:
        b, b_scales = _split(names.get("b", "b"), p.b, _b_rows(p), p.k, box_rows // 2)
    factors = p.bias is not None or any(s is not None and not in_loop(s, p.k) for s in (p.scale_a, p.scale_b))
    flags = (
        OUTPUTS[p.out.token] | (OUTPUTS[p.bias] if p.bias else 0) << 4 | (OUTPUTS[p.add] if p.add else 0) << 6
        | (ACTS[p.act] << 8 if finish == PLAIN else ACTS[p.gate or p.act] << 20)
        | accumulate << 12 | by_tma << 13 | (by_tma and adds) << 14
        | in_loop(p.scale_a, p.k) << 15 | in_loop(p.scale_b, p.k) << 16 | factors << 18
        | (a_scales is not None) << 24 | (b_scales is not None and not tile.split) << 25
        | (tile.shifted and p.a.halves) << 26 | (tile.shifted and p.b.halves) << 27
        | starts << 28
    )  # fmt: skip
    *a_pitches, a_rows, a_shift = _scale_arguments(p.scale_a, p.k)
    *b_pitches, b_rows, b_shift = _scale_arguments(p.scale_b, p.k)
    if g and g.kind == "masked" and p.scale_a is not None and a_pitches[2] == 0 and a_rows == 1:
        a_pitches[2] = p.m * a_pitches[0]
    if tile.split:  # rows of a in memory
        a_pitches[2] = p.a.pitch * int(BYTES[p.a.token])
    if tile.shifted:
        cuts: tuple[Any, Any] = tuple(_alone(p, names))
    else:
        cuts = (names.get("a", "a"), 0) if tile.split else _cuts(g)
    return [
        a, b, out, a_scales or a, b_scales or a,
        names.get("scale_a", "scale_a") if p.scale_a else 0, "scale_b" if p.scale_b else 0, "bias" if p.bias else 0,
        "add" if p.add else 0,
        "out", "out_scale" if p.quantized else 0, *cuts,
        *(("shared_sums", "arrived") if sharing else (0, 0)),
        p.m, p.n, _depth(p, tile), *a_pitches, *b_pitches,
        a_rows | b_rows << 32, a_shift | b_shift << 32, p.out.pitch, p.out.group_pitch, -(-p.m // 4) * 4, p.add_pitch,
        (_GROUPS[g.kind] if g else 0) | (count or sharing) << 32, flags | max(_BAND_ROWS // tile.rows, 1) << 32,
    ]  # fmt: skip


def _alone(p: Product, names: Mapping[str, str]) -> list[int | Offset]:
    """Return the arguments that are the last rows of a and b, if they have no pair."""
    sizes = {"a": (p.m, p.a.pitch), "b": (p.n, p.b.pitch)}
    return [
        Offset(names.get(name, name), (rows - 1) * pitch) if rows % 2 else 0 for name, (rows, pitch) in sizes.items()
    ]


def _cuts(g: Groups | None) -> tuple[str | int | Offset, str | int | Offset]:
    """Return the arguments that say where groups begin and end."""
    if g is None:
        return 0, 0
    if g.kind == "labels":
        return "spans", Offset("spans", 4 * g.count)
    return 0, "sizes" if g.kind == "masked" else "ends"


def _size_of(p: Product) -> Size:
    size, moved = int(BYTES[p.a.token]), is_shifted(p)
    of_a, of_b = loads(p.a.pitch * size), loads(p.b.pitch * size)
    of_split = loads(2 * p.b.pitch * size)
    return Size(p.m, _b_rows(p), p.k * size, of_a, of_b, moved and p.a.halves, moved and p.b.halves, of_split)


def _choice(p: Product, scales: int, sms: int, only: Tile | None = None) -> Choice:
    """Return the tile of a product, and how many blocks share its k."""
    return _choices(p, scales, sms, only)[0]


def _choices(p: Product, scales: int, sms: int, only: Tile | None = None) -> list[Choice]:
    """Return the tiles that can compute a product, and how many blocks share its k, in the order of their cycles."""
    g, m, n, finish = p.groups, p.m, p.n, finish_of(p)
    types = (TYPES[p.a.token], TYPES[p.b.token], p.a.across, p.b.across)
    known = SHIFTED_TILES if is_shifted(p) else GATED_TILES if finish == GATED else TILES[scales]
    tiles = [tile for tile in known if (*types, *tile, scales, finish) in _BUILT]
    if p.accumulate and starts_from_result():  # the others have no registers left
        tiles = [tile for tile in tiles if tile.cols != 224 and (scales != ROW_SCALES or tile.cols < 256)]
    if is_split(p) and g is None:
        more = SPLIT_GATED_TILES if finish == GATED else SPLIT_TILES
        tiles += [tile for tile in more if (*types, *tile, scales, finish) in _BUILT]
    if p.quantized is not None:  # scales cover 128 columns of a tile
        tiles = [LARGE]
    if finish == GATED and m > _GATED_ROWS and _b_rows(p) * p.k * BYTES[p.b.token] > _GATED_BYTES:
        large = TALL if m <= TALL.rows else LARGE
        tiles = [tile for tile in tiles if tile._replace(split=False) == large] or [LARGE]
    if g is not None:
        if g.kind in ("masked", "depth"):  # as if groups lay side by side
            m, n = (g.expected if g.kind == "masked" else 0) or m, n * g.count
        return [Choice(tile) for tile in ([only] if only else ranked_grouped(m, n, scales, finish, sms, tiles))]
    if scales == ROW_SCALES and in_loop(p.scale_b, p.k):  # a scale covers 128 columns of a tile
        tiles = [tile for tile in tiles if tile not in BETWEEN and tile.cols != 192]
    if only is not None:
        tiles = [only]
    whole = tiles if level() else (LARGE,) if p.a.across and p.b.across else ()  # sums along k must not depend on m
    return ranked(_size_of(p), scales, finish, sms, tiles, whole)


def _grouped_tiles(p: Product, g: Groups, tile: Tile) -> int:
    """Return how many tiles there may be at most."""
    if g.kind == "rows" or g.kind == "labels":
        return (-(-p.m // tile.rows) + g.count) * -(-_b_rows(p) // tile.cols)
    return g.count * tile_count(tile, p.m, p.n)
