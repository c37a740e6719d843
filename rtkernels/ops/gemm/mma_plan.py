"""Products with mma.sync, for every target: which kernel variant takes a product, and how it is launched.

Device code: ``cuda_src/gemm/gemm_mma.cu`` (the product), ``gemm_mma_rows.cu`` (spans of labelled rows, quantised
results).
"""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch

from rtkernels.ops.gemm.mma_kernels import (
    MMA,
    PLAIN,
    PROMOTED,
    QUANTIZE,
    ROW_THREADS,
    SMALL,
    SPANS,
    has_fp8,
    has_int4,
    spans_of_rows,
)
from rtkernels.ops.gemm.product import BYTES, FLOAT16, FP8, INTEGERS, Matrix, Product, Scales
from rtkernels.runtime.invariance import starts_from_result
from rtkernels.runtime.launch.device import DeviceInfo, device_info
from rtkernels.runtime.layout import GRID_LIMIT, divisor
from rtkernels.runtime.operator.plan import Memory, Step, Steps
from rtkernels.runtime.targets import Target

_SIDE = {PLAIN: 128, PROMOTED: 128, SMALL: 64}
_THREADS = {PLAIN: 128, PROMOTED: 256, SMALL: 128}
_MAX_STAGES = {PLAIN: 3, PROMOTED: 4, SMALL: 4}
_WHOLE_DEPTH = 1 << 30  # of a stretch of k that never ends
_MAX_UNPACKED_DEPTH = 1 << 17  # products of 4-bit integers as bytes are 256 times too large: int32 sums of so many fit

_CODES = {"bf16": "bf16", "fp16": "fp16", "e4m3": "e4m3", "e5m2": "e5m2", "int8": "Int8Code", "uint8": "Uint8Code",
          "int4": "Int4Code", "uint4": "Uint4Code", "e2m1": "E2m1Code"}  # fmt: skip
_CODE_KINDS = {"e4m3": 0, "e5m2": 1, "int8": 2, "uint8": 3, "int4": 4, "uint4": 5, "e2m1": 6}
_TYPES = {None: 0, "bf16": 1, "fp16": 2, "fp32": 3, "int32": 4, "e4m3": 5, "e5m2": 6, "e2m1": 7, "int8": 8}
_SCALE_TOKENS = {"fp32": 1, "e8m0": 2, "ue4m3": 3}
_ACTIVATIONS = {None: 0, "relu": 1, "silu": 2, "gelu_tanh": 3, "gelu": 4}
_GROUP_KINDS = {"rows": 1, "labels": 2, "masked": 3, "depth": 4}
_BOUNDS = {"rows": "ends", "labels": "row_groups", "masked": "sizes", "depth": "ends"}
KERNELS = (MMA, SPANS, QUANTIZE)


# ---- what a product needs -------------------------------------------------------------------------------------------


class _Choice(NamedTuple):
    """The template arguments of a product except for its tile, and the stretch of k that is summed at a time."""

    left: str
    right: str
    math: str
    block_scales: bool
    sum_depth: int  # 0: all of k


def _of_block(scales: Scales | None) -> bool:
    """Return whether these are scales of a byte for 16 or 32 elements."""
    return scales is not None and scales.token != "fp32" and scales.rows == 1 and scales.depth in (16, 32)


def _depth_of(scales: Scales | None, product: Product) -> int:
    """Return how much of k has one scale, 0 for all."""
    if scales is None or scales.depth == 0:
        return 0
    whole = scales.depth >= product.k and scales.token == "fp32" and not _cuts_depth(product)
    return 0 if whole else scales.depth


def _cuts_depth(product: Product) -> bool:
    return product.groups is not None and product.groups.kind == "depth"


def _scaled_product(p: Product, target: Target) -> str | None:
    """Return the product that takes these scales itself, if the target has it; stages begin with a word of scales."""
    if "block_scaled_mma" not in target.features or _cuts_depth(p):
        return None
    kinds = {(p.a.token, scales.token, scales.depth) for scales in (p.scale_a, p.scale_b)}
    if len(kinds) > 1:
        return None
    names = {("e4m3", "e8m0", 32): "MathMxFp8", ("e2m1", "e8m0", 32): "MathMxFp4", ("e2m1", "ue4m3", 16): "MathNvFp4"}
    return names.get(kinds.pop())


def _choose(p: Product, target: Target) -> _Choice | str:
    """Return the kernel variant, or why there is none."""
    a, b = p.a.token, p.b.token
    depth = gcd(_depth_of(p.scale_a, p), _depth_of(p.scale_b, p))
    byte_scales = [s for s in (p.scale_a, p.scale_b) if s is not None and s.token != "fp32"]
    ue4m3 = any(s.token == "ue4m3" for s in byte_scales)
    if a in FLOAT16 and b == a:
        if depth:
            return f"scales of {depth} elements of k; those of 16-bit operands cover all of k"
        math = "MathBf16" if a == "bf16" else "MathF16Sums" if p.sums == "fp16" else "MathF16"
        return _Choice(a, b, math, False, depth)
    if a in FLOAT16:
        if b in FLOAT16:
            return f"a is {a} and b is {b}; 16-bit operands must have the same type"
        math = "MathBf16" if a == "bf16" else "MathF16"
        exact = b in ("e2m1", "e4m3") if a == "bf16" else b == "e2m1" and ue4m3
        if p.scale_a is None and _of_block(p.scale_b) and exact:
            return _Choice(a, _CODES[b], math, True, 0)
        return _Choice(a, "AnyByteCode" if BYTES[b] == 1 else "AnyNibbleCode", math, False, depth)
    if b in FLOAT16:
        return f"a is {a} and b is {b}; of a mixed product a has 16 bits"
    if a in INTEGERS and b in INTEGERS:
        if BYTES[a] < BYTES[b]:
            return f"a is {a} and b is {b}; of mixed integers a has 8 bits"
        four = BYTES[a] == 0.5
        native = four and not (has_int4(target) and depth % 64)
        return _Choice(_CODES[a], _CODES[b], "MathInt4" if native else "MathInt8", False, depth)
    if a in FP8 and b in FP8:
        if a == b == "e4m3":
            if _of_block(p.scale_a) and _of_block(p.scale_b):
                return _Choice("e4m3", "e4m3", _scaled_product(p, target) or "MathBf16", True, 0)
            codes = "e4m3"
        else:
            codes = "AnyByteCode"
        if has_fp8(target) and p.sums != "fast":
            depth = gcd(depth, 128)
        return _Choice(codes, codes, "MathFp8", False, depth)
    if a == b == "e2m1" and _of_block(p.scale_a) and _of_block(p.scale_b):
        converted = "MathF16" if all(s.token == "ue4m3" for s in byte_scales) else "MathBf16"
        return _Choice("E2m1Code", "E2m1Code", _scaled_product(p, target) or converted, True, 0)
    if a == b == "e2m1":
        return _Choice("AnyNibbleCode", "AnyNibbleCode", "MathF16", False, depth)
    if a in FP8 and b in ("e2m1", "int4", "uint4"):
        return _Choice("AnyByteCode", "AnyNibbleCode", "MathF16", False, depth)
    others = "; torch has one: scaled_mm(backend='torch')" if a == b == "fp32" else ""
    return f"there is no product of {a} and {b}{others}"


def _unit_depth(choice: _Choice, target: Target) -> int:
    """Return what stretches of k with one scale must be multiples of."""
    return 64 if choice.math == "MathInt4" and has_int4(target) else 32


def unsupported(product: Product, target: Target) -> str | None:
    """Return why this backend cannot compute a product on a target, or None."""
    p = product
    choice = _choose(p, target)
    if isinstance(choice, str):
        return choice
    if choice.sum_depth % _unit_depth(choice, target):
        return f"scales of {choice.sum_depth} elements of k; expected a multiple of {_unit_depth(choice, target)}"
    for name, scales in (("scale_a", p.scale_a), ("scale_b", p.scale_b)):
        if scales is not None and scales.token != "fp32" and _depth_of(scales, p) == 0:
            return f"{name} is {scales.token} for all of k; scales of one byte cover 16 or 32 elements"
    if p.out.token == "int32" and (choice.math not in ("MathInt8", "MathInt4") or p.scale_a or p.scale_b):
        return "int32 results are those of integers without scales"
    unpacked = choice.math == "MathInt8" or not has_int4(target)
    if "int4" in (p.a.token, p.b.token) and choice.math in ("MathInt8", "MathInt4") and unpacked:
        if p.k >= _MAX_UNPACKED_DEPTH and choice.sum_depth == 0 and p.out.token == "int32":
            return f"k is {p.k}; int32 sums of int4 products hold fewer than {_MAX_UNPACKED_DEPTH}"
    if p.accumulate and starts_from_result() and not (p.a.token in FLOAT16 and p.sums == "fp32"):
        return f"accumulators of {p.a.token} products do not start from a result"
    if p.quantized and (p.accumulate or _cuts_depth(p)):
        return "a quantised result can neither be accumulated nor consist of groups of k"
    if p.quantized == "1x16" and (p.out.pitch % 2 or p.out.group_pitch % 2):
        return f"rows of {p.out.pitch} codes of 4 bits do not begin at a byte"
    if max(p.m, p.n, p.k, p.a.pitch, p.b.pitch) >= 1 << 31:
        return "a size or pitch has more than 31 bits"
    if _grid(p, SMALL) > GRID_LIMIT:
        return "there are more tiles than a grid has blocks"
    return None


# ---- the launch -----------------------------------------------------------------------------------------------------


def _bits(matrix: Matrix) -> int:
    return int(BYTES[matrix.token] * 8)


def _in_vectors(p: Product, operand: Matrix, is_a: bool, other: Matrix) -> bool:
    """Return whether the operand comes in vectors of 16 bytes, and not by its elements."""
    bits, groups = _bits(operand), p.groups
    if not operand.aligned:
        return False
    if operand.across:
        if operand.token not in FLOAT16 or other.token not in FLOAT16:
            return False
        if is_a and groups is not None and groups.kind in ("rows", "labels") and groups.align % 8:
            return False
        return is_a or not p.gate or p.n % 8 == 0
    if bits == 4 and (p.k % 2 or _cuts_depth(p)):
        return False
    return not _cuts_depth(p) or (groups.align * bits % 128 == 0 and groups.align % _depth_align(p) == 0)


def _depth_align(p: Product) -> int:
    """Return what the first k of a stage is a multiple of: where groups cut k, scales begin there."""
    align = 1
    if _cuts_depth(p):
        for scales in (p.scale_a, p.scale_b):
            if depth := _depth_of(scales, p):
                align = align * depth // gcd(align, depth)
    return align


def _grid(p: Product, tile: int) -> int:
    side = _SIDE[tile]
    tiles_n, tiles_m = -(-p.n * (2 if p.gate else 1) // side), -(-p.m // side)
    if p.groups is None:
        return tiles_m * tiles_n
    if p.groups.kind in ("rows", "labels"):
        return (tiles_m + p.groups.count) * tiles_n
    return p.groups.count * tiles_m * tiles_n


def _tiles(p: Product, choice: _Choice, target: Target, by_element: bool, layout: int, sm_count: int) -> list[int]:
    """Return the tiles that exist: a large one first if that leaves work for all SMs."""
    available = {v[5] for v in MMA.variants(target) if v[:5] == (*choice[:4], layout)}
    if choice.sum_depth:
        available.discard(PLAIN)
    if choice.sum_depth % int(128 / max(BYTES[p.a.token], BYTES[p.b.token])):  # the stage of a large tile
        available.discard(PROMOTED)
    if by_element or p.m <= 64 or p.n * (2 if p.gate else 1) <= 64:
        return [SMALL]
    large = PLAIN if PLAIN in available else PROMOTED if PROMOTED in available else SMALL
    few_rows = p.groups is not None and p.groups.kind == "masked" and 0 < p.groups.expected <= 64
    found = [large, SMALL] if _grid(p, large) >= sm_count * 2 // 3 and not few_rows else [SMALL, large]
    return list(dict.fromkeys(found))


def _stages(tokens: tuple[str, str], choice: _Choice, tile: int, table: int, limit: int) -> tuple[int, int]:
    """Return how many stages the ring has, and the shared memory of a block (as ``MmaShape`` cuts it)."""
    bits = [int(BYTES[token] * 8) for token in tokens]
    depth, side = 1024 // max(bits), _SIDE[tile]
    stage, floats = side * depth * sum(bits) // 8, 0
    if choice.block_scales:
        stage += 2 * side * max(4, depth // 16)
    elif tile != PLAIN and min(bits) < 16:
        floats = 2 * side * 4 * (depth // 32 if tile == SMALL else 1)
    two_blocks = tile == SMALL or (tile == PLAIN and limit >= 160 << 10)
    budget = limit // 2 - 2048 if two_blocks else limit - 1024
    count = max(2, min(_MAX_STAGES[tile], (budget - floats) // (stage + floats)))
    return count, max(count * stage + (count + 1) * floats, side * (side + 8) * 4, table)


def _scale_numbers(scales: Scales | None, p: Product) -> tuple[int, ...]:
    if scales is None:
        return 0, 0, 0, 0, 0
    depth = _depth_of(scales, p)
    return (
        divisor(scales.rows) if scales.rows else 0,
        divisor(depth) if depth else 0,
        scales.row_pitch, scales.depth_pitch, scales.group_pitch,
    )  # fmt: skip


def _scale_option(scales: Scales | None) -> int:
    if scales is None:
        return 0
    in_words = scales.swizzled or (scales.aligned and scales.depth_pitch == 1 and scales.row_pitch % 4 == 0)
    in_words = in_words and scales.group_pitch % 4 == 0
    return _SCALE_TOKENS[scales.token] | (4 if scales.swizzled else 0) | (8 if in_words else 0)


def _packed(*fields: int) -> int:
    """Return options of four bits each, the first one lowest."""
    return sum(field << (4 * i) for i, field in enumerate(fields))


def candidates(product: Product, info: DeviceInfo) -> list[dict[str, Any]]:
    """Return the tiles that can compute a product, for ``rtkernels tune``."""
    choice = _choose(product, info.target)
    layout, by_element = _layout(product, choice)
    return [{"tile": tile} for tile in _tiles(product, choice, info.target, any(by_element), layout, info.sm_count)]


def steps(product: Product, device: int, *, tile: int | None = None) -> Steps:
    """Return the launches of a product.

    Args:
        product: One for which ``unsupported`` gives None.
        device: CUDA ordinal, or -1.
        tile: One of ``candidates`` instead of the first one.
    """
    p, info, groups = product, device_info(device), product.groups
    if p.m == 0 or p.n == 0 or (groups is not None and groups.count == 0):
        return Steps()
    choice = _choose(p, info.target)
    layout, by_element = _layout(p, choice)
    if tile is None:
        tile = _tiles(p, choice, info.target, any(by_element), layout, info.sm_count)[0]
    fused = p.quantized == "1x16" or (p.quantized == "1x128" and tile != SMALL and not p.gate)
    kind, count, bounds = 0, 0, 0
    if groups is not None:
        kind, count, bounds = _GROUP_KINDS[groups.kind], groups.count, _BOUNDS[groups.kind]
    after, scratch, zeros, before = [], {}, {}, []
    if p.quantized and not fused:
        rows = p.m * (count if kind == 3 else 1)
        scratch["whole"] = Memory((rows, p.n), torch.float32)
        after.append(_quantize_step(p, rows, kind, count, bounds, device))
    if kind == 2:
        zeros["spans"] = 2 * count
        before.append(spans_of_rows(p, device))
        bounds = "spans"
    table = 12 * (count + 1) if kind in (1, 2) else 0
    stages, shared = _stages((p.a.token, p.b.token), choice, tile, table, info.shared_per_block)
    numbers = _numbers(p, choice, by_element, fused, kind, count, stages)
    variant = (*choice[:4], layout, tile)
    launch = MMA.bind(variant, device, _grid(p, tile), _THREADS[tile], shared, overlap=True, ending=numbers)
    tensors = ("a", "b", "scale_a" if p.scale_a else 0, "scale_b" if p.scale_b else 0,
               "global_scale" if p.global_scale else 0, "bias" if p.bias else 0, "add" if p.add else 0,
               "whole" if after else "out", "out_scale" if fused else 0, bounds)  # fmt: skip
    return Steps(*before, Step(launch, *tensors), *after, scratch=scratch, zeros=zeros)


def _layout(p: Product, choice: _Choice) -> tuple[int, list[bool]]:
    """Return which operands come in vectors across k (a bit each), and which ones by their elements."""
    layout, by_element = 0, [False, False]
    for i, (operand, other) in enumerate(((p.a, p.b), (p.b, p.a))):
        if not _in_vectors(p, operand, i == 0, other):
            by_element[i] = True
        elif operand.across:
            layout |= 1 << i
    if choice.math == "MathF16Sums" and layout:  # this one has no transposed variants
        by_element, layout = [b or bool(layout >> i & 1) for i, b in enumerate(by_element)], 0
    return layout, by_element


def _quantize_step(p: Product, rows: int, kind: int, count: int, bounds: str | int, device: int) -> Step:
    """Return the launch that quantises a complete result in memory."""
    span = {"row": 0, "1x128": 128, "1x16": 16}[p.quantized]
    launch = QUANTIZE.bind((ROW_THREADS,), device, rows, ROW_THREADS, overlap=True)
    return Step(
        launch, "whole", "out", "out_scale", bounds, p.m, p.n, p.out.pitch, p.out.group_pitch if kind == 3 else 0,
        *_out_scale_pitches(p), span, _TYPES[p.out.token], kind, count,
    )  # fmt: skip


def _numbers(
    p: Product, choice: _Choice, by_element: list[bool], fused: bool, kind: int, count: int, stages: int
) -> tuple[int, ...]:
    """Return the kernel's arguments after its tensors."""
    out = p.out if p.quantized is None or fused else Matrix("fp32", p.n, group_pitch=p.m * p.n)
    starts = p.accumulate and starts_from_result()
    options = _packed(
        by_element[0] | by_element[1] << 1 | p.a.across << 2 | p.b.across << 3,
        _CODE_KINDS.get(p.a.token, 0), _CODE_KINDS.get(p.b.token, 0),
        _scale_option(p.scale_a), _scale_option(p.scale_b),
        _TYPES[out.token], _TYPES[p.bias], _TYPES[p.add], _ACTIVATIONS[p.act], _ACTIVATIONS[p.gate],
        {"1x128": 1, "1x16": 2}[p.quantized] if fused else 0, p.global_scale, int(p.accumulate and not starts),
        int(starts),
    )  # fmt: skip
    own_matrices = kind in (3, 4)  # every group has a result of its own
    return (
        p.m, p.n, p.k, p.a.pitch, p.b.pitch, out.pitch, p.add_pitch,
        p.a.group_pitch if kind == 3 else 0, p.b.group_pitch if kind in (1, 2, 3) else 0,
        out.group_pitch if own_matrices else 0, p.m * p.add_pitch if own_matrices else 0,
        *_scale_numbers(p.scale_a, p), *_scale_numbers(p.scale_b, p), *_out_scale_pitches(p),
        choice.sum_depth or _WHOLE_DEPTH, _depth_align(p), kind, count, stages, options,
    )  # fmt: skip


def _out_scale_pitches(p: Product) -> tuple[int, int]:
    """Return the distances of scales of the result: from row to row or, of "1x128", column to column; and of groups."""
    masked = p.groups is not None and p.groups.kind == "masked"
    if p.quantized == "1x128":
        pitch = -(-p.m // 4) * 4
        return pitch, pitch * -(-p.n // 128) if masked else 0
    if p.quantized == "1x16":
        return -(-p.n // 16), p.m * -(-p.n // 16) if masked else 0
    return 1, p.m if masked else 0
