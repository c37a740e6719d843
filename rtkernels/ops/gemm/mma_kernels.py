"""Kernels of the products with mma.sync: ``cuda_src/gemm/gemm_mma.cu``, and what goes before and after it."""

from __future__ import annotations

from collections.abc import Iterator

from rtkernels.ops.gemm.product import Product
from rtkernels.runtime.launch.device import device_info
from rtkernels.runtime.launch.kernel import Kernel, Variant
from rtkernels.runtime.operator.plan import Step
from rtkernels.runtime.targets import Target

# Tiles of the kernel template; the last two have fp32 sums besides the accumulators.
PLAIN, PROMOTED, SMALL = 0, 1, 2
ROW_THREADS = 128  # of a block of the kernels that work on rows


def has_int4(target: Target) -> bool:
    """Return whether tensor cores multiply 4-bit integers."""
    return target.capability < (9, 0)


def has_fp8(target: Target) -> bool:
    """Return whether mma.sync multiplies fp8 numbers at full speed."""
    return target.capability == (8, 9) or target.capability >= (12, 0)


def _variants(target: Target) -> Iterator[Variant]:
    """Yield template arguments: codes of a and b, type of the products, scales of blocks, layout, tile."""
    unpacks = "wgmma" in target.features  # products of large tiles that need conversions go to wgmma (``unpack_plan``)
    for token, math in (("bf16", "MathBf16"), ("fp16", "MathF16")):
        for layout in range(4):
            yield token, token, math, False, layout, PLAIN
            yield token, token, math, False, layout, SMALL
        for codes in ("AnyByteCode", "AnyNibbleCode"):
            if target.capability >= (9, 0) and not unpacks:  # for others it takes more registers than a thread has
                yield token, codes, math, False, 0, PROMOTED
            yield token, codes, math, False, 0, SMALL
        for codes in ("E2m1Code", "e4m3") if token == "bf16" else ("E2m1Code",):
            if not unpacks:
                yield token, codes, math, True, 0, PROMOTED
            yield token, codes, math, True, 0, SMALL
    for tile in (PLAIN, SMALL):
        yield "fp16", "fp16", "MathF16Sums", False, 0, tile
        if tile == PLAIN and unpacks:
            continue
        yield "E2m1Code", "E2m1Code", "MathF16", True, 0, tile
        yield "E2m1Code", "E2m1Code", "MathBf16", True, 0, tile
        yield "e4m3", "e4m3", "MathBf16", True, 0, tile
    if "block_scaled_mma" in target.features:  # shared memory has room for one block: the tile with more warps
        for tile in (PROMOTED, SMALL):
            yield "e4m3", "e4m3", "MathMxFp8", True, 0, tile
            yield "E2m1Code", "E2m1Code", "MathMxFp4", True, 0, tile
            yield "E2m1Code", "E2m1Code", "MathNvFp4", True, 0, tile
    for tile in (PLAIN, PROMOTED, SMALL):
        yield "Int8Code", "Int8Code", "MathInt8", False, 0, tile
        yield "Int4Code", "Int4Code", "MathInt4", False, 0, tile
        yield "e4m3", "e4m3", "MathFp8", False, 0, tile
        if tile == SMALL or (tile == PROMOTED and not has_fp8(target)):  # with four products to choose from, it spills
            yield "AnyByteCode", "AnyByteCode", "MathFp8", False, 0, tile
    for left in ("Int", "Uint"):
        for right in ("Int", "Uint"):
            if (left, right) != ("Int", "Int"):
                yield f"{left}8Code", f"{right}8Code", "MathInt8", False, 0, SMALL
                yield f"{left}4Code", f"{right}4Code", "MathInt4", False, 0, SMALL
            if has_int4(target):  # stretches of k that the 4-bit product is too long for
                yield f"{left}4Code", f"{right}4Code", "MathInt8", False, 0, SMALL
            yield f"{left}8Code", f"{right}4Code", "MathInt8", False, 0, SMALL
    yield "AnyByteCode", "AnyNibbleCode", "MathF16", False, 0, SMALL
    yield "AnyNibbleCode", "AnyNibbleCode", "MathF16", False, 0, SMALL


_SCALE_NUMBERS = " ".join(
    f"scale_{side}_{name}:i64" for side in "ab" for name in ("rows", "depth", "row_pitch", "depth_pitch", "group")
)
MMA = Kernel(
    "gemm/gemm_mma.cu", "gemm_mma", struct=True, template="A B MATH BLOCK_SCALES LAYOUT TILE", max_registers=255,
    args="a:ptr b:ptr scale_a:ptr scale_b:ptr global_scale:ptr bias:ptr add:ptr out:ptr out_scale:ptr bounds:ptr m:i64 "
    "n:i64 k:i64 a_pitch:i64 b_pitch:i64 out_pitch:i64 add_pitch:i64 a_group:i64 b_group:i64 out_group:i64 "
    f"add_group:i64 {_SCALE_NUMBERS} out_scale_pitch:i64 out_scale_group:i64 sum_depth:i64 k_align:i64 group_kind:i64 "
    "group_count:i64 stages:i64 options:i64",
    variants=_variants,
)  # fmt: skip
QUANTIZE = Kernel(
    "gemm/gemm_mma_rows.cu", "gemm_quantize", template="THREADS", max_registers=64,
    args="whole:ptr out:ptr out_scale:ptr bounds:ptr rows:i64 columns:i64 out_pitch:i64 out_group:i64 scale_pitch:i64 "
    "scale_group:i64 span:i64 type:i64 group_kind:i64 group_count:i64",
    variants=[(ROW_THREADS,)],
)  # fmt: skip
SPANS = Kernel(
    "gemm/gemm_mma_rows.cu", "gemm_spans", template="THREADS", max_registers=32,
    args="labels:ptr spans:ptr rows:i64 count:i64", variants=[(ROW_THREADS,)],
)  # fmt: skip


def spans_of_rows(product: Product, device: int) -> Step:
    """Return the launch that finds first and last rows of labelled groups: "spans", int32 zeros [2, count] before."""
    blocks = min(-(-product.m // ROW_THREADS), 8 * device_info(device).sm_count)
    launch = SPANS.bind((ROW_THREADS,), device, blocks, ROW_THREADS, overlap=True)
    return Step(launch, "row_groups", "spans", product.m, product.groups.count)
