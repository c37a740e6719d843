"""Products of up to 64 rows that stream their weights at the speed of memory: kernel records and launches.

A backend of ``product``: weights of 16, 8 or 4 bits, activations of 16 bits or quantised, every target from sm_80 on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from rtkernels.ops.gemm.product import BYTES, FLOAT16, INTEGERS, Matrix, Product, Scales
from rtkernels.runtime.launch.device import device_info, shared_limit
from rtkernels.runtime.launch.kernel import Kernel, Variant
from rtkernels.runtime.operator.plan import Memory, Offset, Step, Steps
from rtkernels.runtime.targets import Target

FIELDS = ("global_scale",)
MAX_ROWS = 64

_THREADS = 256
_TILE_ROWS = 128
_ROW_BYTES = 128  # of a weight row, in a stage
_SUM_PITCH = 132
_MAX_STAGES = {16: 3, 8: 3, 4: 4}  # by bits of a weight: more of them only take longer to fill (H200)
_MIN_STAGES = 2  # of a block, where k has as many
_MAX_PARTS = 8  # blocks that may share a tile: one of them adds all of their sums
_TILES = (1, 2, 4, 8)  # of 8 tokens; a variant serves fewer, too
_BLOCKS = {1: 2, 2: 2}  # that a multiprocessor has at a time, of these tiles

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
    "gemm/gemm_skinny.cu",
    "gemm_skinny",
    template="Codes Math TILES",
    args="a:ptr b:ptr scale_a:ptr scale_b:ptr global_scale:ptr bias:ptr add:ptr out:ptr partial:ptr tickets:ptr m:i64 "
    "n:i64 k:i64 a_pitch:i64 b_pitch:i64 out_pitch:i64 add_pitch:i64 scale_a_row:i64 scale_a_word:i64 scale_b_row:i64 "
    "scale_b_word:i64 scale_b_shift:i64 depth_a:i64 depth_b:i64 words_a:i64 words_b:i64 group_shift:i64 period:i64 "
    "global_step:i64 flags:i64 types:i64 stages:i64",
    variants=_variants(),
    max_registers=255,
    tier="serve",
)

KERNELS = (_SKINNY,)


class _Layout(NamedTuple):
    """A launch: its variant's tiles of tokens, blocks on a multiprocessor, tokens, and shared memory."""

    tiles: int
    blocks: int
    rows: int
    stages: int
    shared: int


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot make a product, None if it can."""
    p = product
    if p.groups is not None:
        return "no grouped products"
    if p.m > MAX_ROWS:
        return f"{p.m} rows of a; {MAX_ROWS} at the highest"
    if p.quantized is not None:
        return "no quantised results"
    if p.sums in ("fp16", "fast"):
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
    if -(-p.n // (_TILE_ROWS // 2)) * -(-p.k // 64) >= 1 << 22:
        return "more tiles than a launch counts"
    integers = _integer_sums(p)
    if p.out.token == "int32" and not (integers and p.scale_a is None and p.scale_b is None):
        return "int32 results of other than plain integer products"
    if p.out.token == "int32" and (p.bias or p.add or p.act or p.gate or p.accumulate or p.global_scale):
        return "int32 results with more than the sums"
    if p.gate is not None and (p.act is not None or p.add is not None):
        return "a gated product with an activation or a matrix to add"
    return _bad_scale_a(p) or _bad_scale_b(p) or (None if _layout(p, target) else "too little shared memory")


def _integer_sums(p: Product) -> bool:
    """Return True if the sums are integers: no scale varies along k."""
    along_k = _varies(p.scale_a, p.k) or _varies(p.scale_b, p.k)
    return p.a.token in INTEGERS and p.b.token in INTEGERS and not along_k


def _varies(scales: Scales | None, k: int) -> bool:
    """Return True if scales vary along k."""
    return scales is not None and 0 < scales.depth < k


def _stage_depth(p: Product) -> int:
    """Return how much of k a stage has."""
    return int(_ROW_BYTES / BYTES[p.b.token])


def _bad_scale_a(p: Product) -> str | None:
    s = p.scale_a
    if s is None:
        return None
    if s.token != "fp32" or s.swizzled:
        return f"no {s.token} scales of activations"
    if not _varies(s, p.k):
        return None if s.rows in (0, 1) else f"scales of a for {s.rows} rows"
    if s.depth != 128 or s.rows != 1 or _stage_depth(p) < 128:
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
    depth = _stage_depth(p)
    fits = s.depth % depth == 0 or (s.depth in (32, 64, 128) and depth % s.depth == 0)
    return None if fits and s.rows in (0, 1, 128) else where


def _words(p: Product) -> tuple[int, int]:
    """Return how many words of scales along k a stage has for a token, and for a weight row."""
    depth, s = _stage_depth(p), p.scale_b
    words_a = max(depth // 128, 1) if _varies(p.scale_a, p.k) else 0
    if s is None:
        return words_a, 0
    if s.token != "fp32":
        return words_a, depth // s.depth // 4
    return words_a, max(depth // s.depth, 1) if _varies(s, p.k) else 0


def _layout(p: Product, target: Target) -> _Layout | None:
    """Return how many tokens a launch takes and its shared memory, None if there is too little."""
    depth, (words_a, words_b) = _stage_depth(p), _words(p)
    converted = p.a.token not in FLOAT16
    smallest = _TILES[-1] if p.b.token == "e5m2" else min(t for t in _TILES if t * 8 >= min(p.m, MAX_ROWS))
    for tiles in sorted((t for t in _TILES if t <= smallest), reverse=True):
        tokens = tiles * 8
        stage = _TILE_ROWS * _ROW_BYTES + int(tokens * depth * BYTES[p.a.token]) + 512 * words_b + 4 * tokens * words_a
        rest = tokens * _SUM_PITCH * 4 + (tokens * depth * 4 if converted else 0)
        for blocks in sorted({_BLOCKS.get(tiles, 1), 1}, reverse=True):
            fit = ((shared_limit(target) + 1024) // blocks - 1280 - rest) // stage
            stages = min(fit, _MAX_STAGES[int(8 * BYTES[p.b.token])])
            if stages >= (3 if converted else 2) and (p.b.token != "e5m2" or tiles == smallest):
                return _Layout(tiles, blocks, min(tokens, p.m), stages, rest + stages * stage)
    return None


def _bytes(matrix: Matrix, elements: int) -> int:
    return int(elements * BYTES[matrix.token])


def steps(product: Product, device: int) -> Steps:
    """Return the launches of a product that ``unsupported`` accepts."""
    p, info = product, device_info(device)
    if p.m == 0 or p.n == 0:
        return Steps()
    layout = _layout(p, info.target)
    if layout is None:
        raise ValueError(f"the skinny kernel does not make this product: {unsupported(p, info.target)}")
    columns = _TILE_ROWS // 2 if p.gate else _TILE_ROWS
    tiles_n, k_stages = -(-p.n // columns), max(-(-p.k // _stage_depth(p)), 1)
    grid = min(layout.blocks * info.sm_count, tiles_n * min(-(-k_stages // _MIN_STAGES), _MAX_PARTS))
    shared_tiles = tiles_n * k_stages % grid != 0 or tiles_n % grid != 0
    fixed = _fixed(p)
    made = []
    for first in range(0, p.m, layout.rows):
        rows = min(layout.rows, p.m - first)
        math = p.a.token if p.a.token in FLOAT16 else "fp16"
        launch = _SKINNY.bind(
            (_CODES[p.b.token], math, layout.tiles),
            device,
            grid,
            _THREADS,
            layout.shared,
            ending=(rows, *fixed, layout.stages),
        )
        s = p.scale_a
        scale_a = 0 if s is None else 4 * first * s.row_pitch if s.rows else 0
        made.append(
            Step(
                launch, Offset("a", _bytes(p.a, first * p.a.pitch)), "b",
                Offset("scale_a", scale_a) if s is not None else 0, "scale_b" if p.scale_b is not None else 0,
                "global_scale" if p.global_scale else 0, "bias" if p.bias else 0,
                Offset("add", _bytes(Matrix(p.add, 0), first * p.add_pitch)) if p.add else 0,
                Offset("out", _bytes(p.out, first * p.out.pitch)),
                *(("partial", f"tickets_{first}") if shared_tiles else (0, 0)),
            )
        )  # fmt: skip
    if not shared_tiles:
        return Steps(*made)
    return Steps(
        *made,
        scratch={"partial": Memory((2 * grid, layout.rows, _TILE_ROWS), torch.float32)},
        zeros={f"tickets_{first}": tiles_n for first in range(0, p.m, layout.rows)},
    )


def _fixed(p: Product) -> tuple[int, ...]:
    """Return the arguments of the kernel from n to types."""
    a, b, depth = p.scale_a, p.scale_b, _stage_depth(p)
    words_a, words_b = _words(p)
    size_b = 1 if b is not None and b.token != "fp32" else 4
    depth_b = b.depth if b is not None and words_b else max(p.k, 1)
    group_shift = depth_b.bit_length() - 1 if depth_b < depth else 30
    period = min([depth // 64] + ([depth_b // 32] if 32 <= depth_b < depth else []) + ([4] if words_a else []))
    along = lambda s: s is not None and s.rows == 1  # noqa: E731
    flags = (
        p.a.aligned, p.b.aligned, True, _words_aligned(b), p.b.token == "int4", _integer_sums(p), p.gate is not None,
        p.accumulate, False, along(a), along(b),
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
        7 if b and b.rows == 128 else 0, 128, depth_b, words_a, words_b, group_shift, period,
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
    """Return the tile that a product would run, for people."""
    layout = _layout(product, target)
    if layout is None:
        return ""
    return f"128 weight rows x {layout.rows} tokens, {layout.stages} stages, tiles shared by blocks along k"
