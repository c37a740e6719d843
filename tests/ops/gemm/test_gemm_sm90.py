"""Products with wgmma and TMA: types, tiles, scales, epilogues and groups, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import products
from support.compare import FP8_SUMS, running_on
from support.places import at, emulated

import rtkernels
from rtkernels.ops.gemm import sm90_limits, sm90_plan, tile_choice
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.ops.gemm.tile_choice import Tile
from rtkernels.runtime import targets

BROAD, SMALL, ONE = tile_choice.LARGE, tile_choice.SMALL, tile_choice.ONE_WARPGROUP
SHIFTED_ONE, SHIFTED, SHIFTED_LARGE, SHIFTED_NARROW = tile_choice.SHIFTED_TILES
SQUARES, NARROW = tile_choice.SQUARE, tile_choice.NARROW
COLS_224, COLS_192, PINGPONG = tile_choice.COLS_224, tile_choice.COLS_192, tile_choice.PINGPONG
ROW, TENSOR, ALONG, SQUARE = (1, 0), (0, 0), (1, 128), (128, 128)

# m, n, k and what differs from a plain product of bf16.
DENSE: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "bf16": (70, 136, 200, {"tile": SMALL}),
    "bf16_one_element": (1, 1, 1, {"tile": SMALL}),
    "bf16_broad": (131, 264, 72, {"tile": BROAD}),
    "bf16_one_warpgroup": (70, 136, 160, {"tile": ONE}),
    "fp16_a_across": (170, 264, 100, {"a": "fp16", "out": "fp16", "across": (True, False), "tile": BROAD}),
    "bf16_b_across": (70, 264, 100, {"across": (False, True), "tile": BROAD}),
    "wgrad": (70, 136, 100, {"across": (True, True), "out": "fp32", "accumulate": True, "tile": SMALL}),
    "bias_add_act": (70, 138, 100, {"bias": "bf16", "add": "bf16", "act": "gelu", "narrow": 3, "tile": SMALL}),
    "all_steps": (70, 136, 100, {"bias": "fp16", "add": "fp32", "act": "silu", "accumulate": True, "tile": BROAD}),
    "fp8_rows_fast": (
        131,
        264,
        300,
        {"a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "bias": "bf16", "tile": BROAD},
    ),
    "fp8_tensor_fast": (
        300,
        130,
        144,
        {"a": "e4m3", "sums": "fast", "scale_a": TENSOR, "scale_b": TENSOR, "out": "fp32", "tile": BROAD},
    ),
    "fp8_promoted": (150, 130, 300, {"a": "e4m3", "scale_a": TENSOR, "scale_b": ROW, "out": "fp16", "tile": BROAD}),
    "fp8_mixed": (70, 64, 272, {"a": "e4m3", "b": "e5m2", "out": "fp32", "tile": SMALL}),
    "1d2d": (70, 136, 400, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": SMALL}),
    "1d2d_row_major": (
        300,
        136,
        272,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "contiguous": "depth", "tile": BROAD},
    ),
    "1d2d_broad": (150, 264, 272, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": BROAD}),
    "1d1d": (70, 136, 272, {"a": "e4m3", "scale_a": ALONG, "scale_b": ALONG, "tile": SMALL}),
    "1d1d_broad": (150, 264, 272, {"a": "e4m3", "scale_a": ALONG, "scale_b": ALONG, "tile": BROAD}),
    # Fewer blocks of k than blocks of the grid: some have no share.
    "1d1d_shared": (
        100,
        200,
        208,
        {
            "a": "e4m3",
            "scale_a": ALONG,
            "scale_b": ALONG,
            "out": "fp32",
            "accumulate": True,
            "tile": BROAD,
            "sharing": 4,
        },
    ),
    "1d1d_two_rounds_shared": (
        150,
        520,
        400,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": ALONG, "bias": "bf16", "tile": BROAD, "sharing": 4},
    ),
    # Blocks share k: equal parts, uneven ones, a whole round before them, more blocks than k has steps, a single tile.
    "bf16_shared": (131, 136, 1000, {"bias": "bf16", "tile": SMALL, "sharing": 8}),
    "bf16_shared_unevenly": (70, 300, 456, {"add": "bf16", "act": "silu", "tile": SMALL, "sharing": 5}),
    "bf16_shared_after_a_round": (131, 392, 456, {"out": "fp32", "accumulate": True, "tile": SMALL, "sharing": 5}),
    "bf16_one_tile_shared": (33, 40, 200, {"tile": ONE, "sharing": 7}),
    "bf16_odd_columns_shared": (70, 131, 520, {"tile": BROAD, "sharing": 3}),
    "bf16_224_shared": (70, 440, 264, {"tile": COLS_224, "sharing": 4}),
    "bf16_192_shared": (70, 200, 264, {"tile": COLS_192, "sharing": 4}),
    "wgrad_shared": (
        70,
        136,
        300,
        {"across": (True, True), "out": "fp32", "accumulate": True, "tile": SMALL, "sharing": 4},
    ),
    "b_across_shared": (70, 264, 300, {"across": (False, True), "tile": BROAD, "sharing": 4}),
    "fp8_rows_shared": (
        131,
        136,
        1000,
        {"a": "e4m3", "scale_a": ROW, "scale_b": ROW, "bias": "bf16", "tile": SMALL, "sharing": 8},
    ),
    "fp8_fast_shared": (
        70,
        264,
        600,
        {"a": "e4m3", "sums": "fast", "scale_a": TENSOR, "scale_b": TENSOR, "tile": BROAD, "sharing": 6},
    ),
    "1d2d_shared": (150, 264, 656, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": BROAD, "sharing": 7}),
    "1d2d_one_warpgroup_shared": (
        70,
        136,
        656,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": ONE, "sharing": 8},
    ),
    "int8_sums_shared": (70, 66, 656, {"a": "int8", "out": "int32", "accumulate": True, "tile": SMALL, "sharing": 3}),
    "int8_rows_shared": (70, 136, 656, {"a": "int8", "scale_a": ROW, "scale_b": ROW, "tile": SMALL, "sharing": 4}),
    # The first blocks share the last tiles; others have none of them.
    "bf16_last_shared": (131, 392, 456, {"bias": "bf16", "tile": SMALL, "sharing": 2, "grid": 7}),
    "fp8_last_shared": (
        70,
        1000,
        656,
        {"a": "e4m3", "scale_a": ROW, "scale_b": ROW, "tile": SMALL, "sharing": 4, "grid": 6},
    ),
    "gated_shared": (70, 136, 600, {"gate": "silu", "bias": "bf16", "tile": BROAD, "sharing": 6}),
    "gated_last_shared": (70, 400, 600, {"gate": "gelu", "out": "fp32", "tile": BROAD, "sharing": 3, "grid": 3}),
    "gated_small": (150, 136, 72, {"gate": "silu", "bias": "bf16", "tile": SMALL}),
    "gated_one_warpgroup": (70, 131, 200, {"gate": "gelu", "out": "fp32", "narrow": 1, "tile": ONE, "sharing": 4}),
    "gated_tall": (200, 72, 200, {"gate": "silu", "bias": "bf16", "tile": tile_choice.TALL, "sharing": 6}),
    # Ping-pong: one tile, an odd number of them on a block, a k of less than a stage and one longer than all.
    "bf16_pingpong": (300, 500, 200, {"bias": "bf16", "tile": PINGPONG}),
    "bf16_one_tile_pingpong": (70, 40, 1000, {"act": "silu", "tile": PINGPONG}),
    "fp32_pingpong": (600, 392, 24, {"out": "fp32", "accumulate": True, "tile": PINGPONG}),
    "bf16_odd_columns_pingpong": (300, 387, 72, {"tile": PINGPONG}),
    "fp8_fast_pingpong": (
        300,
        264,
        720,
        {"a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "tile": PINGPONG},
    ),
    "int8_pingpong": (300, 264, 272, {"a": "int8", "scale_a": ROW, "scale_b": ROW, "tile": PINGPONG}),
    "1d2d_one_warpgroup": (70, 136, 400, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": ONE}),
    "squares": (140, 136, 272, {"a": "e4m3", "scale_a": SQUARE, "scale_b": SQUARE, "tile": SMALL}),
    "int8_blocks": (140, 136, 600, {"a": "int8", "scale_a": (32, 256), "scale_b": (64, 256), "tile": SMALL}),
    "int8_rows": (140, 136, 160, {"a": "int8", "scale_a": ROW, "scale_b": ROW, "tile": BROAD}),
    "int8_sums": (70, 66, 160, {"a": "int8", "out": "int32", "accumulate": True, "tile": SMALL}),
    # Rows of results that TMA cannot store, in every type.
    "bf16_odd_columns": (131, 323, 72, {"tile": BROAD}),
    "fp16_odd_columns": (70, 67, 72, {"a": "fp16", "out": "fp16", "narrow": 2, "tile": ONE}),
    "fp32_odd_columns": (131, 131, 72, {"out": "fp32", "bias": "bf16", "tile": SMALL}),
    "int8_odd_columns": (70, 67, 160, {"a": "int8", "out": "int32", "tile": SMALL}),
    "1d2d_odd_columns": (131, 131, 272, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": SMALL}),
    "odd_columns_accumulated": (70, 67, 72, {"add": "fp32", "accumulate": True, "narrow": 2, "tile": SMALL}),
    "aligned_rows_odd_columns": (70, 67, 72, {"act": "relu", "narrow": 1, "tile": SMALL}),
    # The last box of 224 columns has 32 of 16 bits; in the second case it is cut, in the third one it is empty.
    "bf16_224": (131, 448, 72, {"bias": "bf16", "tile": COLS_224}),
    "fp16_224_cut": (70, 440, 72, {"a": "fp16", "out": "fp16", "narrow": 8, "tile": COLS_224}),
    "bf16_224_empty": (70, 416, 72, {"tile": COLS_224}),
    "bf16_224_odd": (70, 227, 72, {"act": "relu", "tile": COLS_224}),
    "fp8_224_promoted": (131, 232, 300, {"a": "e4m3", "scale_a": ROW, "scale_b": ROW, "tile": COLS_224}),
    "fp8_224_fast": (70, 232, 160, {"a": "e4m3", "sums": "fast", "out": "fp32", "tile": COLS_224}),
    "int8_224": (70, 232, 160, {"a": "int8", "out": "int32", "tile": COLS_224}),
    "bf16_192": (131, 200, 72, {"tile": COLS_192}),
    "fp8_192_promoted": (70, 200, 300, {"a": "e4m3", "scale_a": ROW, "scale_b": TENSOR, "tile": COLS_192}),
    "int8_192_added": (70, 392, 160, {"a": "int8", "out": "fp32", "accumulate": True, "tile": COLS_192}),
    "gated": (150, 136, 72, {"gate": "silu", "bias": "bf16", "tile": BROAD}),
    "gated_odd": (70, 131, 72, {"gate": "gelu", "out": "fp32", "narrow": 1, "tile": BROAD}),
    "gated_1d2d_quantized": (
        150,
        256,
        272,
        {
            "a": "e4m3",
            "scale_a": ALONG,
            "scale_b": SQUARE,
            "gate": "silu",
            "out": "e4m3",
            "quantized": "1x128",
            "tile": BROAD,
        },
    ),
    "bf16_square": (200, 392, 200, {"bias": "bf16", "act": "relu", "tile": SQUARES}),
    "bf16_square_shared": (131, 200, 456, {"out": "fp32", "accumulate": True, "tile": SQUARES, "sharing": 5}),
    "fp8_square": (193, 195, 272, {"a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "tile": SQUARES}),
    "int8_square": (140, 200, 160, {"a": "int8", "out": "int32", "tile": SQUARES}),
    "fp8_narrow": (70, 72, 272, {"a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "tile": NARROW}),
    "1d2d_narrow_shared": (
        70,
        200,
        656,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": NARROW, "sharing": 8},
    ),
    # Rows are odd multiples of 8 bytes apart: even and odd numbers of them, k that ends in a stage and behind one.
    "shifted": (
        70,
        136,
        392,
        {"a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "halves": "ab", "tile": SHIFTED_ONE},
    ),
    "shifted_small": (131, 259, 264, {"a": "e4m3", "sums": "fast", "bias": "bf16", "halves": "ab", "tile": SHIFTED}),
    "shifted_promoted": (67, 133, 520, {"a": "e4m3", "scale_a": ROW, "halves": "ab", "tile": SHIFTED}),
    "shifted_1d2d": (
        131,
        137,
        648,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "halves": "ab", "tile": SHIFTED},
    ),
    "shifted_1d2d_one": (
        3,
        2,
        136,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "halves": "ab", "tile": SHIFTED_ONE},
    ),
    "shifted_b": (33, 131, 392, {"a": "e4m3", "sums": "fast", "halves": "b", "tile": SHIFTED_ONE}),
    "shifted_a_shared": (33, 40, 904, {"a": "e4m3", "sums": "fast", "halves": "a", "tile": SHIFTED_ONE, "sharing": 5}),
    "shifted_1d2d_shared": (
        131,
        133,
        904,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "halves": "ab", "tile": SHIFTED, "sharing": 8},
    ),
    "shifted_large": (
        131,
        259,
        904,
        {"a": "e4m3", "sums": "fast", "halves": "ab", "tile": SHIFTED_LARGE, "sharing": 8},
    ),
    "shifted_large_promoted": (
        131,
        257,
        648,
        {"a": "e4m3", "scale_a": ROW, "scale_b": ROW, "halves": "ab", "tile": SHIFTED_LARGE, "sharing": 8},
    ),
    "shifted_narrow": (
        33,
        131,
        904,
        {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "halves": "ab", "tile": SHIFTED_NARROW, "sharing": 6},
    ),
    "shifted_last_shared": (
        131,
        387,
        904,
        {"a": "e4m3", "sums": "fast", "scale_a": ROW, "halves": "ab", "tile": SHIFTED, "sharing": 2, "grid": 7},
    ),
    "shifted_int8": (70, 67, 1000, {"a": "int8", "out": "int32", "halves": "ab", "tile": SHIFTED_ONE}),
    "shifted_int8_rows": (131, 131, 8, {"a": "int8", "scale_a": ROW, "scale_b": ROW, "halves": "ab", "tile": SHIFTED}),
    "quantized": (150, 264, 72, {"out": "e4m3", "quantized": "1x128", "act": "gelu_tanh", "tile": BROAD}),
    "quantized_odd": (70, 131, 72, {"out": "e5m2", "quantized": "1x128", "act": "relu", "tile": BROAD}),
}

# Kind, sizes of groups, n, k.
GROUPED: dict[str, tuple[str, list[int], int, int, dict[str, Any]]] = {
    "rows": ("rows", [5, 0, 130, 1], 40, 72, {"tile": SMALL}),
    "rows_aligned": ("rows", [5, 0, 130, 70], 136, 72, {"align": 128, "tile": SMALL}),
    "labels": ("labels", [5, 0, 130, 70], 136, 72, {"align": 128, "tile": SMALL}),
    "masked": ("masked", [5, 0, 70], 136, 72, {"m": 140, "tile": SMALL}),
    "rows_1d2d": ("rows", [5, 0, 130, 1], 136, 272, {"a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": SMALL}),
    "masked_1d2d": (
        "masked",
        [5, 0, 70],
        136,
        272,
        {"m": 140, "a": "e4m3", "scale_a": ALONG, "scale_b": SQUARE, "tile": SMALL},
    ),
    "masked_rows": (
        "masked",
        [5, 0, 70],
        136,
        272,
        {"m": 140, "a": "e4m3", "sums": "fast", "scale_a": ROW, "scale_b": ROW, "tile": BROAD},
    ),
    "wgrad": (
        "depth",
        [70, 0, 5, 64],
        136,
        0,
        {"m": 70, "across": True, "out": "fp32", "accumulate": True, "tile": SMALL},
    ),
    "wgrad_along_k": ("depth", [70, 0, 5, 61], 136, 0, {"m": 70, "align": 8, "out": "fp32", "tile": SMALL}),
    "wgrad_1d1d": (
        "depth",
        [128, 0, 200, 70],
        136,
        0,
        {
            "m": 70,
            "a": "e4m3",
            "align": 128,
            "scale_a": ALONG,
            "scale_b": ALONG,
            "out": "fp32",
            "accumulate": True,
            "tile": SMALL,
        },
    ),
}


def _slack(place: str, options: dict[str, Any]) -> dict[str, float]:
    return {"slack": FP8_SUMS} if place == "cuda" and options.get("a") == "e4m3" else {}


# Cases with a variant of their own, which takes longest to compile; other cases cover the same code.
SLOW = (
    "1d1d_two_rounds_shared",
    "1d1d_broad",
    "1d2d_one_warpgroup",
    "bf16_one_warpgroup",
    "fp16_a_across",
    "fp8_tensor_fast",
    "b_across_shared",
    "bf16_192_shared",
    "bf16_224_shared",
    "bf16_odd_columns_shared",
    "fp8_fast_pingpong",
    "fp8_fast_shared",
    "int8_blocks",
    "int8_pingpong",
    "int8_rows_shared",
    "int8_sums",
    "int8_sums_shared",
    "wgrad_shared",
    "fp8_mixed",
    "masked_rows",
    "rows_aligned",
)


def _cases(cases: dict[str, Any]) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in cases]


@at("sm_90", "cuda")
@pytest.mark.parametrize("case", _cases(DENSE))
def test_dense(place: str, case: str) -> None:
    torch.manual_seed(0)
    m, n, k, options = DENSE[case]
    with running_on(place) as device:
        products.dense(sm90_plan, m, n, k, device=device, **options, **_slack(place, options))


@at("sm_90", "cuda")
@pytest.mark.parametrize("case", _cases(GROUPED))
def test_grouped(place: str, case: str) -> None:
    torch.manual_seed(0)
    kind, sizes, n, k, options = GROUPED[case]
    with running_on(place) as device:
        products.grouped(sm90_plan, kind, sizes, n, k, device=device, **options, **_slack(place, options))


@emulated
@pytest.mark.parametrize("case", ("bf16", "1d2d"))
def test_in_every_order(case: str) -> None:
    torch.manual_seed(0)
    m, n, k, options = DENSE[case]
    for order in ("reverse", 3):
        with rtkernels.emulate("sm_90", order=order):
            products.dense(sm90_plan, m, n, k, **options)


@at("sm_90", "cuda")
@pytest.mark.parametrize("out", ("bf16", "fp32"))
def test_not_finite(place: str, out: str) -> None:
    """NaN and infinities reach the results of their rows, and no other."""
    with running_on(place) as device:
        a, b = torch.ones(70, 64, device=device), torch.ones(40, 64, device=device)
        a[3, 5], a[7, 1], a[9, 0], a[9, 1] = float("nan"), float("inf"), float("inf"), -float("inf")
        operands = {
            "a": a.bfloat16(),
            "b": b.bfloat16(),
            "out": torch.zeros(70, 40, device=device).to(products.DTYPES[out]),
        }
        product = Product(70, 40, 64, *(products.matrix(operands[name]) for name in ("a", "b", "out")))
        products.launch(sm90_plan, product, operands, operands["out"].device, tile=SMALL)
        got = operands["out"].float().cpu()
    expected = torch.full((70, 40), 64.0)
    expected[3], expected[7], expected[9] = float("nan"), float("inf"), float("nan")
    assert torch.equal(got.nan_to_num(nan=-1), expected.nan_to_num(nan=-1))


def test_what_is_unsupported() -> None:
    sm90, sm80 = targets.parse("sm_90a"), targets.parse("sm_80")
    bf16, fp8 = Matrix("bf16", 64), Matrix("e4m3", 64)
    plain = Product(64, 64, 64, bf16, bf16, bf16)
    eight = plain._replace(a=fp8, b=fp8)
    assert sm90_plan.unsupported(plain, sm90) is None
    assert sm90_plan.unsupported(eight, sm90) is None
    for product, target, reason in (
        (plain, sm80, "no wgmma"),
        (plain._replace(a=fp8), sm90, "no product"),
        (eight._replace(a=fp8._replace(across=True)), sm90, "along k"),
        (plain._replace(a=bf16._replace(aligned=False)), sm90, "16 bytes"),
        (plain._replace(k=0), sm90, "nothing to add up"),
        (plain._replace(sums="fp16"), sm90, "sums are"),
        (eight._replace(scale_a=Scales(1, 32), k=128), sm90, "power of two"),
        (eight._replace(scale_a=Scales(1, 32, token="e8m0")), sm90, "must be fp32"),
        (plain._replace(groups=Groups("rows", 513)), sm90, "at most 512"),
        (plain._replace(groups=Groups("depth", 2)), sm90, "multiples of 16 bytes"),
        (eight._replace(quantized="row", out=fp8), sm90, "more than a tile"),
        (plain._replace(out=fp8), sm90, "quantised"),
    ):
        assert reason in (sm90_plan.unsupported(product, target) or "")


def test_tiles_fit_in_shared_memory() -> None:
    variants = sm90_plan.GEMM.variants(targets.parse("sm_90a"))
    assert len(variants) == len(set(variants)) <= 117
    for variant in variants:
        tile = Tile(*variant[4:11])
        groups = tile_choice.MAX_GROUPS if tile in tile_choice._SLOWER else 0  # others are for dense results
        assert tile.shared(variant[11], groups) + 128 <= 227 * 1024


def test_tiles_between_fill_the_last_round() -> None:
    bf16, e4m3, out = Matrix("bf16", 1344), Matrix("e4m3", 1344), Matrix("bf16", 2624)
    product = Product(5003, 2624, 1344, bf16, bf16, out)
    rows, blocks = Scales(1, 0, 1), {"scale_a": Scales(1, 128, 1, 5004), "scale_b": Scales(128, 128, 11, 1)}

    def tile(sms: int = 132, **changed: Any) -> Tile:
        p = product._replace(**changed)
        return sm90_plan._choice(p, sm90_limits.loop_scales(p), sms).tile

    assert tile() in (PINGPONG, tile_choice.SQUARE) and tile(a=e4m3, b=e4m3, scale_a=rows, scale_b=rows) == COLS_224
    assert tile(a=e4m3, b=e4m3, **blocks) in (SMALL, BROAD)  # a scale covers 128 columns
    assert tile(b=bf16._replace(across=True)) in (SMALL, BROAD)  # not built
    assert tile(groups=Groups("rows", 2)) in (SMALL, BROAD) and tile(gate="silu") in (BROAD, tile_choice.TALL)
    assert tile(m=4096, n=4096, k=8192) == BROAD and tile(m=128) in (ONE, tile_choice.NARROW)


def test_chosen_tiles_are_built() -> None:
    built = {
        variant[4:]
        for variant in sm90_plan.GEMM.variants(targets.parse("sm_90a"))
        if variant[:4] == ("e4m3", "e4m3", False, False)
    }
    for scales in tile_choice.TILES:
        for m in (1, 64, 200, 1000, 4096, 100_000):
            for n in (8, 256, 4096):
                for k_bytes in (16, 512, 20_000):
                    chosen = tile_choice.choose(tile_choice.Size(m, n, k_bytes), scales, tile_choice.PLAIN, 132)
                    assert (*chosen.tile, scales, 0) in built and chosen.sharing <= 132
