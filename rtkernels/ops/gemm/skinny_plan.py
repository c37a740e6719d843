"""Products of up to 64 rows that stream their weights at the speed of memory: kernel records and launches.

A backend of ``product``: weights of 16, 8 or 4 bits, activations of 16 bits or quantised, every target from sm_80 on.
"""

from __future__ import annotations

from typing import NamedTuple

from rtkernels.ops.gemm.product import BYTES, FLOAT16, INTEGERS, Matrix, Product, Scales
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel, Variant
from rtkernels.runtime.operator.plan import Offset, Step, Steps
from rtkernels.runtime.targets import Target

MAX_ROWS = 64

_WARPS = {1: (16, 8), 2: (16, 8), 4: (8,), 8: (8,)}  # of a block, by tiles of tokens
_UNIT_ROWS = 32  # weight rows that a warp works on at a time
_ROW_BYTES = 64  # of each of them
_RING = 3  # units of a warp
_ROW_WARPS = (1, 2, 4)  # warps of a block along the weight rows; the others are along k
_MAX_TILE_ROWS = 4 * _UNIT_ROWS
_CHUNK_ROUNDS = (2, 1)  # units of a warp from one chunk of activations to the next
_MAX_PARTS = 8  # blocks of a cluster, which share k
_BLOCKS = {(1, 8): (2, 1), (2, 8): (2, 1)}  # per SM, by tiles of tokens and warps
_TILES = (1, 2, 4, 8)  # of 8 tokens; a variant serves fewer, too

_CODES = {
    "bf16": "bf16", "fp16": "fp16", "e4m3": "e4m3", "e5m2": "e5m2", "int8": "int8_codes", "int4": "int4_codes",
    "uint4": "int4_codes", "e2m1": "e2m1_codes",
}  # fmt: skip
_ACTIVATIONS = {"bf16": 0, "fp16": 0, "e4m3": 1, "e5m2": 2, "int8": 3, "int4": 4, "uint4": 5}
_TYPES = {"bf16": 0, "fp16": 1, "fp32": 2, "int32": 3}
_ACTS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_SCALE_KINDS = {"fp32": 0, "e8m0": 1, "ue4m3": 2}


def _variants() -> list[Variant]:
    found: list[Variant] = [(math, math, tiles) for math in FLOAT16 for tiles in _TILES]
    for codes in ("e4m3", "int8_codes", "int4_codes", "e2m1_codes"):
        found += [(codes, math, tiles) for math in FLOAT16 for tiles in _TILES]
    return found + [("e5m2", math, _TILES[-1]) for math in FLOAT16]


_SKINNY = Kernel(
    "gemm/gemm_skinny.cu", "gemm_skinny", struct=True, template="Codes Math TILES", max_registers=255, tier="serve",
    args="a:ptr b:ptr scale_a:ptr scale_b:ptr global_scale:ptr bias:ptr add:ptr out:ptr m:i64 n:i64 k:i64 "
    "a_pitch:i64 b_pitch:i64 out_pitch:i64 add_pitch:i64 scale_a_row:i64 scale_a_word:i64 scale_b_row:i64 "
    "scale_b_word:i64 scale_b_shift:i64 shift_b:i64 count_a:i64 count_b:i64 words_a:i64 words_b:i64 group_shift:i64 "
    "period:i64 global_step:i64 flags:i64 types:i64 row_shift_:i64 part_rounds:i64 chunk_shift:i64 buffers:i64",
    variants=_variants(),
)  # fmt: skip

KERNELS = (_SKINNY,)


class _Layout(NamedTuple):
    """A launch: its variant's tiles of tokens, blocks per SM, tokens, and the arrangement of a block's warps."""

    tiles: int
    blocks: int
    rows: int
    warps: int
    row_warps: int
    chunk: int
    buffers: int
    shared: int


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product, or None."""
    p = product
    if p.groups is not None:
        return "no grouped products"
    if p.m > MAX_ROWS:
        return f"{p.m} rows of a; {MAX_ROWS} at the highest"
    if p.quantized is not None:
        return "no quantised results"
    if p.sums == "fp16":
        return f"no sums of kind {p.sums!r}"
    if p.b.token not in _CODES:
        return f"no weights of type {p.b.token}"
    if p.a.token not in _ACTIVATIONS:
        return f"no activations of type {p.a.token}"
    if p.b.token in FLOAT16 and p.a.token != p.b.token:
        return f"no {p.a.token} activations with {p.b.token} weights"
    if p.a.across or p.b.across:
        return "rows of memory are those of the summed dimension"
    for name, matrix in (("a", p.a), ("b", p.b)):
        if BYTES[matrix.token] < 1 and matrix.pitch % 2:
            return f"rows of {name} begin inside of a byte"
    if BYTES[p.a.token] < 1 and p.k % 2:
        return "an odd k of 4-bit activations"
    if p.out.token not in _TYPES:
        return f"no results of type {p.out.token}"
    if p.n >= _UNIT_ROWS // 2 << 16 or max(p.k, p.a.pitch, p.b.pitch) >= 1 << 24:
        return "more tiles than a launch counts"
    integers = _integer_sums(p)
    if p.out.token == "int32" and not (integers and p.scale_a is None and p.scale_b is None):
        return "int32 results of other than plain integer products"
    if p.out.token == "int32" and (p.bias or p.add or p.act or p.gate or p.accumulate or p.global_scale):
        return "int32 results with more than the sums"
    if p.gate is not None and (p.act is not None or p.add is not None):
        return "a gated product with an activation or a matrix to add"
    return _bad_scale_a(p) or _bad_scale_b(p) or (None if _layouts(p, target) else "too little shared memory")


def _integer_sums(p: Product) -> bool:
    """Return True if the sums are integers: no scale varies along k."""
    along_k = _varies(p.scale_a, p.k) or _varies(p.scale_b, p.k)
    return p.a.token in INTEGERS and p.b.token in INTEGERS and not along_k


def _varies(scales: Scales | None, k: int) -> bool:
    """Return True if scales vary along k."""
    return scales is not None and 0 < scales.depth < k


def _unit_depth(p: Product) -> int:
    """Return how much of k a unit has."""
    return int(_ROW_BYTES / BYTES[p.b.token])


def _bad_scale_a(p: Product) -> str | None:
    s = p.scale_a
    if s is None:
        return None
    if s.token != "fp32" or s.swizzled:
        return f"no {s.token} scales of activations"
    if not _varies(s, p.k):
        return None if s.rows in (0, 1) else f"scales of a for {s.rows} rows"
    if s.depth != 128 or s.rows != 1 or p.b.token in FLOAT16:
        return f"scales of a for {s.rows} x {s.depth}"
    return None


def _bad_scale_b(p: Product) -> str | None:
    s = p.scale_b
    if s is None:
        return None
    where = f"scales of b for {s.rows} x {s.depth}"
    if s.token not in _SCALE_KINDS:
        return f"no {s.token} scales of weights"
    if s.token == "ue4m3":
        good = p.b.token == "e2m1" and s.depth == 16 and s.rows == 1 and (s.swizzled or s.depth_pitch == 1 or p.k <= 16)
        return None if good else where
    if s.token == "e8m0":
        good = (
            BYTES[p.b.token] <= 1 and s.depth == 32 and s.rows == 1 and (s.swizzled or s.depth_pitch == 1 or p.k <= 32)
        )
        return None if good else where
    if s.swizzled:
        return "swizzled fp32 scales"
    if not _varies(s, p.k):
        return None if s.rows in (0, 1) else where
    depth = _unit_depth(p)
    fits = s.depth >= 32 and s.depth & (s.depth - 1) == 0 and (s.depth >= depth or s.depth <= 128)
    return None if fits and s.rows in (0, 1, 128) else where


def _words(p: Product, chunk: int) -> tuple[int, int]:
    """Return how many words of scales along k a chunk has for a token, and a unit for a weight row."""
    depth, s = _unit_depth(p), p.scale_b
    words_a = chunk // 128 if _varies(p.scale_a, p.k) else 0
    if s is None:
        return words_a, 0
    if s.token != "fp32":
        return words_a, max(depth // s.depth // 4, 1)
    return words_a, max(depth // s.depth, 1) if _varies(s, p.k) else 0


def _layouts(p: Product, target: Target) -> list[_Layout]:
    """Return what launches may look like, one for each number of warps along the rows; none if memory is too small."""
    smallest = _TILES[-1] if p.b.token == "e5m2" else min(t for t in _TILES if t * 8 >= min(p.m, MAX_ROWS))
    for tiles in sorted((t for t in _TILES if t <= smallest), reverse=True):
        if p.b.token == "e5m2" and tiles != smallest:
            break
        shapes = [(warps, row_warps) for warps in _WARPS[tiles] for row_warps in _ROW_WARPS]
        found = [layout for shape in shapes if (layout := _layout(p, target, tiles, *shape))]
        if found:
            return found
    return []


def _layout(p: Product, target: Target, tiles: int, warps: int, row_warps: int) -> _Layout | None:
    """Return the largest chunks of activations that fit, None if none do."""
    tokens, along_k = 8 * tiles, warps // row_warps
    rows, tile_rows = min(tokens, p.m), row_warps * _UNIT_ROWS
    # Sums of warps, and of the blocks of a cluster.
    sums = 4 * (along_k * tokens * (tile_rows + 4) + rows * tile_rows + 2 * 32 * _MAX_PARTS)
    for blocks in _BLOCKS.get((tiles, warps), (1,)):
        for chunk_rounds in _CHUNK_ROUNDS:
            chunk = chunk_rounds * along_k * _unit_depth(p)
            words_a, words_b = _words(p, chunk)
            ring = warps * _RING * (_UNIT_ROWS * _ROW_BYTES + 4 * _UNIT_ROWS * words_b)
            pitch = -(-2 * chunk // 128) * 128 + 64
            copied = pitch if p.a.token in FLOAT16 else int(chunk * BYTES[p.a.token])
            buffers = 1 - (1 - _RING) // chunk_rounds
            chunks = buffers * (rows * copied + 4 * tokens * words_a)
            shared = max(ring + chunks + (0 if p.a.token in FLOAT16 else rows * pitch), sums)
            if shared <= (shared_limit(target) + 1024) // blocks - 1024 - 8 * _MAX_TILE_ROWS:
                return _Layout(tiles, blocks, rows, warps, row_warps, chunk, buffers, shared)
    return None


def _shape(p: Product, target: Target, sm_count: int) -> tuple[_Layout, int]:
    """Return the layout and the number of parts of k with the lowest `_cost`."""
    highest = _MAX_PARTS if "cluster" in target.features else 1
    shapes = [(layout, parts) for layout in _layouts(p, target) for parts in range(1, highest + 1)]
    if not shapes:
        raise ValueError(f"the skinny kernel does not make this product: {unsupported(p, target)}")
    return min(shapes, key=lambda shape: _cost(p, *shape, sm_count))


def _cost(p: Product, layout: _Layout, parts: int, sm_count: int) -> float:
    """Return the cost of a shape in bytes that one SM could read in the same time: 30 000 per us on an H200."""
    tile_rows = layout.row_warps * _UNIT_ROWS
    tiles = -(-p.n // (tile_rows // 2 if p.gate else tile_rows))
    weights = tiles * tile_rows * p.k * BYTES[p.b.token]
    activations = tiles * layout.rows * p.k * BYTES[p.a.token]  # L2 delivers four in the time of one weight
    # Few warps have too few loads in flight and, with many tokens, too much to multiply.
    warps = min(tiles * parts / sm_count, layout.blocks) * layout.warps
    cost = (weights + 0.25 * activations) / sm_count * max(1.0, 13.0 / warps) ** (0.4 if layout.tiles == 1 else 0.7)
    # Clusters of three and more leave some SMs without a block. In the last round a block has an SM to itself and
    # reads faster; in earlier rounds, the start of a block is hidden behind the loop of another one.
    rounds = tiles * parts / (layout.blocks * sm_count * (1.0 if parts <= 2 else 0.85))
    if rounds > 1.0:
        cost += 0.37 * weights / (tiles * parts) * (-rounds % 1.0)
        cost += (-(-rounds // 1.0) - 1.0) * (60_000 if layout.blocks == 1 or parts > 1 else 30_000)
    return cost + 12_000 * (parts - 1)


def _bytes(matrix: Matrix, elements: int) -> int:
    return int(elements * BYTES[matrix.token])


def steps(product: Product, device: int) -> Steps:
    """Return the launches of a product that ``unsupported`` accepts."""
    p, info = product, device_info(device)
    if p.m == 0 or p.n == 0:
        return Steps()
    layout, parts = _shape(p, info.target, info.sm_count)
    tiles_n = -(-p.n // (layout.row_warps * _UNIT_ROWS // (2 if p.gate else 1)))
    fixed, row_shift = _fixed(p, layout.chunk), layout.row_warps.bit_length() - 1
    part_rounds = -(-p.k // (_unit_depth(p) * (layout.warps // layout.row_warps) * parts))
    steps = []
    for first in range(0, p.m, layout.rows):
        rows = min(layout.rows, p.m - first)
        math = p.a.token if p.a.token in FLOAT16 else "fp16"
        launch = _SKINNY.bind(
            (_CODES[p.b.token], math, layout.tiles),
            device,
            (parts, tiles_n),
            32 * layout.warps,
            layout.shared,
            cluster=parts,
            ending=(rows, *fixed, row_shift, part_rounds, layout.chunk.bit_length() - 1, layout.buffers),
        )
        s = p.scale_a
        scale_a = 0 if s is None else 4 * first * s.row_pitch if s.rows else 0
        steps.append(
            Step(
                launch, Offset("a", _bytes(p.a, first * p.a.pitch)), "b",
                Offset("scale_a", scale_a) if s is not None else 0, "scale_b" if p.scale_b is not None else 0,
                "global_scale" if p.global_scale else 0, "bias" if p.bias else 0,
                Offset("add", _bytes(Matrix(p.add, 0), first * p.add_pitch)) if p.add else 0,
                Offset("out", _bytes(p.out, first * p.out.pitch)),
            )
        )  # fmt: skip
    return Steps(*steps)


def _fixed(p: Product, chunk: int) -> tuple[int, ...]:
    """Return the arguments of the kernel from n to types."""
    a, b, depth = p.scale_a, p.scale_b, _unit_depth(p)
    words_a, words_b = _words(p, chunk)
    size_b = 1 if b is not None and b.token != "fp32" else 4
    depth_b = b.depth if b is not None and words_b else max(p.k, 1)
    group_shift = depth_b.bit_length() - 1 if depth_b < depth else 30
    period = min(depth, depth_b if depth_b >= 32 else depth) // 32
    along = lambda s: s is not None and s.rows == 1  # noqa: E731
    flags = (
        p.a.aligned, p.b.aligned, True, _words_aligned(b), p.b.token == "int4", _integer_sums(p), p.gate is not None,
        p.accumulate, p.b.halves, along(a), along(b), p.a.halves,
    )  # fmt: skip
    kind = 0 if b is None else _SCALE_KINDS[b.token] + 4 * b.swizzled
    types = (
        _TYPES.get(p.bias, 0), _TYPES.get(p.add, 0), _TYPES[p.out.token], _ACTS[p.gate if p.gate else p.act],
        _ACTIVATIONS[p.a.token], kind,
    )  # fmt: skip
    return (
        p.n, p.k, _bytes(p.a, p.a.pitch), _bytes(p.b, p.b.pitch), p.out.pitch, p.add_pitch,
        4 * a.row_pitch if a else 0, 4 * a.depth_pitch if a else 0,
        size_b * b.row_pitch if b and b.rows else 0, _word_pitch(b),
        7 if b and b.rows == 128 else 0, depth_b.bit_length() - 1, -(-p.k // 128), -(-p.k // depth_b), words_a, words_b,
        group_shift, period,
        max(p.global_scale - 1, 0),
        sum(bool(value) << i for i, value in enumerate(flags)), sum(value << 4 * i for i, value in enumerate(types)),
    )  # fmt: skip


def _word_pitch(s: Scales | None) -> int:
    """Return the bytes from one word of a row's scales to the next: one fp32 number, or four bytes."""
    if s is None:
        return 0
    return 512 if s.swizzled else 4 * s.depth_pitch if s.token == "fp32" else 4


def _words_aligned(s: Scales | None) -> bool:
    return s is None or s.token == "fp32" or s.swizzled or (s.aligned and s.row_pitch % 4 == 0)


def summary(product: Product, target: Target) -> str:
    """Return the tile of a product, for ``explain``."""
    layouts = _layouts(product, target)
    return (
        f"weights in rings of {_RING} units, {layouts[0].rows} tokens, k shared by warps and clusters"
        if layouts
        else ""
    )
