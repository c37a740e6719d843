"""Products with mma.sync: every pair of operands, every scaling recipe, every epilogue and kind of groups."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support import gemm_cases as cases
from support.gemm_cases import FLOAT_ACTS, check, generator, result_memory

import rtkernels
from rtkernels.ops.gemm import mma_plan
from rtkernels.ops.gemm.product import Groups, Matrix, Product

TARGETS = ("sm_80", "sm_89", "sm_90")
plain = partial(cases.plain, mma_plan)


# ---- operands -------------------------------------------------------------------------------------------------------

SAME = ["bf16", "fp16", "int8", "uint8", "int4", "uint4", "e4m3", "e5m2", "e2m1"]
PAIRS = [
    *((t, t) for t in SAME),
    ("int8", "uint8"), ("uint8", "int8"), ("int4", "uint4"), ("uint4", "int4"), ("e4m3", "e5m2"), ("e5m2", "e4m3"),
    *((a, b) for a in ("bf16", "fp16") for b in ("e4m3", "e5m2", "int8", "uint8", "int4", "uint4", "e2m1")),
    ("int8", "int4"), ("int8", "uint4"), ("uint8", "int4"), ("e4m3", "e2m1"), ("e4m3", "int4"),
]  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_pairs(a: str, b: str, target: str) -> None:
    with rtkernels.emulate(target):
        plain(a, b, 33, 70, 160, out="fp32")
        plain(a, b, 3, 9, 37, out="fp32", operand_a={"aligned": False}, operand_b={"aligned": False})


@pytest.mark.parametrize(("across_a", "across_b"), [(False, True), (True, False), (True, True)])
@pytest.mark.parametrize("token", ["bf16", "fp16", "e4m3"])
def test_operands_with_rows_of_k(token: str, across_a: bool, across_b: bool) -> None:
    with rtkernels.emulate("sm_80"):
        for aligned in (True, False):
            plain(token, token, 67, 75, 100, out="fp32", operand_a={"across": across_a, "aligned": aligned},
                  operand_b={"across": across_b, "aligned": aligned})  # fmt: skip


@pytest.mark.parametrize("k", [0, 1, 7, 63, 64, 65, 129, 200])
@pytest.mark.parametrize("token", ["bf16", "int4", "e4m3"])
def test_any_depth(token: str, k: int) -> None:
    with rtkernels.emulate("sm_90"):
        plain(token, token, 5, 12, k)


@pytest.mark.parametrize(("m", "n"), [(1, 1), (1, 200), (130, 3), (64, 64), (65, 66)])
def test_any_size(m: int, n: int) -> None:
    with rtkernels.emulate("sm_90"):
        plain("bf16", "bf16", m, n, 72, operand_a={"padding": 24}, operand_b={"padding": 8})


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("a", "b"), [("bf16", "bf16"), ("fp16", "fp16"), ("int8", "int8"), ("int4", "int4"), ("e4m3", "e4m3")]
)
def test_large_tiles(a: str, b: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The 128x128 tiles, which the few emulated SMs choose only from four tiles on."""
    monkeypatch.setattr(mma_plan, "_tiles", large_tile)
    with rtkernels.emulate(target):
        plain(a, b, 140, 133, 200, out="fp32")
        if a in ("bf16", "fp16"):
            for across_a, across_b in ((False, True), (True, False), (True, True)):
                plain(a, b, 140, 133, 130, out="fp32", operand_a={"across": across_a}, operand_b={"across": across_b})


def large_tile(p, choice, target, by_element, layout, sm_count) -> list[int]:
    available = {v[5] for v in mma_plan.MMA.variants(target) if v[:5] == (*choice[:4], layout)}
    if choice.sum_depth:
        available.discard(mma_plan.PLAIN)
    if choice.sum_depth % int(128 / max(cases.BYTES[p.a.token], cases.BYTES[p.b.token])):
        available.discard(mma_plan.PROMOTED)
    return [mma_plan.SMALL if by_element else min(available, default=mma_plan.SMALL)]


def test_fp16_sums() -> None:
    with rtkernels.emulate("sm_80"):
        plain("fp16", "fp16", 20, 24, 96, sums="fp16", out="fp16")
        plain("fp16", "fp16", 20, 24, 96, sums="fp16", out="fp16", operand_b={"across": True})


@pytest.mark.parametrize(
    ("a", "b"), [("int8", "int8"), ("uint8", "int8"), ("int4", "int4"), ("uint4", "uint4"), ("int8", "int4")]
)
@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
def test_int32_results(a: str, b: str, target: str) -> None:
    with rtkernels.emulate(target):
        plain(a, b, 20, 35, 200, out="int32", sums="int32")
        plain(a, b, 20, 35, 200, out="int32", sums="int32", accumulate=True)


# ---- scales ---------------------------------------------------------------------------------------------------------

RECIPES = {
    "tensor": ({"per_rows": 0, "depth": 0}, {"per_rows": 0, "depth": 0}),
    "row": ({"per_rows": 1, "depth": 0}, {"per_rows": 1, "depth": 0}),
    "1d2d": ({"per_rows": 1, "depth": 128, "columns_first": True}, {"per_rows": 128, "depth": 128}),
    "1d1d": ({"per_rows": 1, "depth": 128}, {"per_rows": 1, "depth": 128, "columns_first": True}),
    "bb": ({"per_rows": 128, "depth": 128}, {"per_rows": 128, "depth": 128}),
    "tile_32": ({"per_rows": 4, "depth": 32}, {"per_rows": 16, "depth": 32}),
    "tile_64": ({"per_rows": 3, "depth": 64}, {"per_rows": 32, "depth": 64}),
    "tile_256": ({"per_rows": 1, "depth": 256}, {"per_rows": 64, "depth": 256}),
    "tile_k": ({"per_rows": 16, "depth": 0}, {"per_rows": 32, "depth": 0}),
    "mixed_depths": ({"per_rows": 1, "depth": 64}, {"per_rows": 1, "depth": 128}),
    "one_side": (None, {"per_rows": 1, "depth": 32}),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("token", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes(recipe: str, token: str, target: str) -> None:
    scale_a, scale_b = RECIPES[recipe]
    with rtkernels.emulate(target):
        plain(token, token, 35, 140, 328, out="fp32", scale_a=scale_a, scale_b=scale_b)


@pytest.mark.parametrize("recipe", ["1d2d", "tile_32", "tile_256"])
@pytest.mark.parametrize("token", ["int8", "e4m3"])
def test_recipes_of_large_tiles(recipe: str, token: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_plan, "_tiles", large_tile)
    scale_a, scale_b = RECIPES[recipe]
    with rtkernels.emulate("sm_90"):
        plain(token, token, 140, 150, 328, out="fp32", scale_a=scale_a, scale_b=scale_b)


MX, NV = {"per_rows": 1, "depth": 32, "token": "e8m0"}, {"per_rows": 1, "depth": 16, "token": "ue4m3"}
BLOCKS = {"mxfp8": ("e4m3", MX), "mxfp8_e5m2": ("e5m2", MX), "mxfp4": ("e2m1", MX), "nvfp4": ("e2m1", NV)}


@pytest.mark.parametrize("target", [*TARGETS, "sm_120"])
@pytest.mark.parametrize("swizzled", [False, True])
@pytest.mark.parametrize("recipe", BLOCKS)
def test_block_scales(recipe: str, swizzled: bool, target: str) -> None:
    token, scales = BLOCKS[recipe]
    with rtkernels.emulate(target):
        for k in (320, 72):
            scales = scales | {"swizzled": swizzled}
            plain(token, token, 35, 140, k, out="fp32", scale_a=scales, scale_b=scales, global_scale=1)


def test_block_scales_of_any_alignment() -> None:
    with rtkernels.emulate("sm_90"):
        for scales in (NV | {"aligned": False}, NV | {"columns_first": True}):
            plain("e2m1", "e2m1", 20, 30, 100, out="fp32", scale_a=scales, scale_b=scales)


@pytest.mark.parametrize("target", ["sm_90", "sm_120"])
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp4", "nvfp4"])
def test_block_scales_of_large_tiles(recipe: str, target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_plan, "_tiles", large_tile)
    token, scales = BLOCKS[recipe]
    with rtkernels.emulate(target):
        plain(token, token, 140, 150, 320, out="fp32", scale_a=scales, scale_b=scales)
        plain("bf16", token, 140, 150, 136, out="fp32", scale_b=scales)


WEIGHTS = [
    ("int8", {"per_rows": 1, "depth": 0}), ("e4m3", {"per_rows": 1, "depth": 0}),
    ("int4", {"per_rows": 1, "depth": 64}), ("int8", {"per_rows": 1, "depth": 128}),
    ("uint4", {"per_rows": 1, "depth": 32, "columns_first": True}),
    ("e4m3", {"per_rows": 128, "depth": 128}), ("e2m1", NV), ("e2m1", MX), ("e4m3", MX), ("e5m2", MX),
    ("e2m1", {"per_rows": 1, "depth": 0}),
]  # fmt: skip


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("a", ["bf16", "fp16"])
@pytest.mark.parametrize(("b", "scales"), WEIGHTS)
def test_quantised_weights(a: str, b: str, scales: dict, target: str) -> None:
    with rtkernels.emulate(target):
        plain(a, b, 35, 140, 200, out="fp32", scale_b=scales)
        plain(a, b, 3, 9, 75, out="fp32", scale_b=scales, operand_a={"aligned": False}, operand_b={"aligned": False})


@pytest.mark.parametrize(("b", "scales"), [WEIGHTS[0], ("int4", {"per_rows": 1, "depth": 128})])
def test_quantised_weights_of_large_tiles(b: str, scales: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mma_plan, "_tiles", large_tile)
    with rtkernels.emulate("sm_90"):
        plain("bf16", b, 140, 150, 200, out="fp32", scale_b=scales)


# ---- endings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("act", ["relu", "silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("out", ["bf16", "fp16", "fp32"])
def test_activations(act: str, out: str) -> None:
    with rtkernels.emulate("sm_90"):
        plain("bf16", "bf16", 20, 41, 64, out=out, act=act, bias="fp32", add="bf16")


@pytest.mark.parametrize("bias", [None, "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("add", [None, "bf16", "fp16", "fp32"])
@pytest.mark.parametrize("n", [40, 41])
def test_bias_and_add(bias: str | None, add: str | None, n: int) -> None:
    with rtkernels.emulate("sm_90"):
        plain("bf16", "bf16", 20, n, 64, bias=bias, add=add, accumulate=True)


@pytest.mark.parametrize("gate", ["silu", "gelu", "relu"])
@pytest.mark.parametrize("n", [24, 41, 70])
def test_gated(gate: str, n: int) -> None:
    with rtkernels.emulate("sm_90"):
        plain("bf16", "bf16", 20, n, 72, out="fp32", gate=gate, bias="bf16")
        plain("bf16", "bf16", 20, n, 72, out="fp32", gate=gate, operand_b={"across": True})
        rows = {"per_rows": 1, "depth": 0}
        plain("e4m3", "e4m3", 20, n, 72, out="bf16", gate=gate, scale_a=rows, scale_b=rows, global_scale=2)
        plain("e4m3", "e4m3", 20, n, 300, out="bf16", gate=gate, scale_a=RECIPES["1d1d"][0], scale_b=RECIPES["1d1d"][1])
        plain("e2m1", "e2m1", 20, n, 72, out="bf16", gate=gate, scale_a=NV, scale_b=NV)


@pytest.mark.parametrize("quantized", ["1x128", "row", "1x16"])
@pytest.mark.parametrize("gate", [None, "silu"])
@pytest.mark.parametrize("large", [False, True])
def test_quantised_results(quantized: str, gate: str | None, large: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if large:
        monkeypatch.setattr(mma_plan, "_tiles", large_tile)
    m, n, k = 35, 272, 72
    random = generator()
    left = cases.operand("bf16", m, k, random)
    right = cases.operand("bf16", n * (2 if gate else 1), k, random)
    if quantized == "row":  # one of small numbers
        left.tensor[3] *= 2.0**-9
        left.values[3] *= 2.0**-9
    exact = left.values @ right.values.T
    if gate:
        exact = FLOAT_ACTS[gate](exact[:, :n]) * exact[:, n:]
    span = {"1x128": 128, "row": n, "1x16": 16}[quantized]
    if quantized == "1x16":
        out, matrix = torch.full((m, n // 2), 255, dtype=torch.uint8), Matrix("e2m1", n)
        scale = torch.full((m, n // 16), 255, dtype=torch.uint8)
    else:
        out, matrix = torch.full((m, n), 255, dtype=torch.uint8), Matrix("e4m3", n)
        columns, pitch = -(-n // span), -(-m // 4) * 4
        scale = torch.full((columns * pitch,), -1.0).as_strided((m, columns), (1, pitch if quantized == "1x128" else 0))
    product = Product(m, n, k, left.matrix, right.matrix, matrix, gate=gate, quantized=quantized)
    with rtkernels.emulate("sm_90"):
        cases.run(mma_plan, product, {"a": left.tensor, "b": right.tensor, "out": out, "out_scale": scale})
    factors = cases.byte_values(scale, "ue4m3") if quantized == "1x16" else scale.double()
    expanded = factors.repeat_interleave(span, 1)[:, :n]
    amax = torch.stack([part.abs().amax(1) for part in exact.split(span, 1)], 1)
    largest, error = (6.0, 2.0**-3) if quantized == "1x16" else (448.0, 2.0**-7)
    assert torch.allclose(factors, amax / largest, rtol=error, atol=1e-6)
    if quantized == "1x16":
        values = cases.nibble_values(torch.stack((out & 15, out >> 4), 2).view(m, n), "e2m1")
        assert ((values * expanded - exact).abs() <= expanded * 1.001 + 0.26 * exact.abs() + 1e-3).all()
    else:
        values = out.view(torch.float8_e4m3fn).double()
        assert ((values * expanded - exact).abs() <= exact.abs() * 2.0**-4 + expanded * 2.0**-9 + 1e-3).all()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("a", "b"), [("bf16", "bf16"), ("e4m3", "e4m3"), ("e5m2", "e5m2"), ("bf16", "e4m3"), ("bf16", "e5m2")]
)
def test_nan_and_infinity(a: str, b: str, target: str) -> None:
    random = generator()
    left, right = cases.operand(a, 20, 80, random), cases.operand(b, 24, 80, random)
    special = {"bf16": [float("nan"), float("inf")], "e4m3": [float("nan")], "e5m2": [float("nan"), float("inf")]}
    for i, number in enumerate(special[a]):
        left.tensor[3 + i, 7], left.values[3 + i, 7] = number, number
    for i, number in enumerate(special[b]):
        right.tensor[5 + i, 70], right.values[5 + i, 70] = number, number
    out, matrix = result_memory("fp32", 20, 24)
    with rtkernels.emulate(target):
        cases.run(mma_plan, Product(20, 24, 80, left.matrix, right.matrix, matrix),
                  {"a": left.tensor, "b": right.tensor, "out": out})  # fmt: skip
    wanted = left.values @ right.values.T
    check(out, wanted, (left.values.abs() @ right.values.abs().T).nan_to_num(0.0, posinf=0.0), "fp32")


# ---- groups ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rows", "labels"])
@pytest.mark.parametrize(("token", "recipe"), [("bf16", None), ("e4m3", "1d2d"), ("int8", "row"), ("e2m1", "nvfp4")])
def test_groups_of_rows(kind: str, token: str, recipe: str | None) -> None:
    sizes, n, k = [5, 0, 70, 1, 0, 64, 3], 70, 136
    random = generator()
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + size + (3 if kind == "labels" else 0))
    rows = starts[-1] + 4
    left = cases.operand(token, rows, k, random)
    right = cases.operand(token, n, k, random, groups=len(sizes))
    out, matrix = result_memory("fp32", rows, n)
    tensors, described = {"a": left.tensor, "b": right.tensor, "out": out}, {}
    x, y = left.values, right.values
    if recipe is not None:
        given = (BLOCKS[recipe][1],) * 2 if recipe in BLOCKS else RECIPES[recipe]
        sa = cases.scaling(rows, k, random, **given[0])
        sb = cases.scaling(n, k, random, groups=len(sizes), **given[1])
        tensors |= {"scale_a": sa.tensor, "scale_b": sb.tensor}
        described = {"scale_a": sa.scales, "scale_b": sb.scales}
        x, y = x * sa.values, y * sb.values
    wanted = torch.full((rows, n), 77.0, dtype=torch.float64)
    labels = torch.full((rows,), -1, dtype=torch.int32)
    magnitude = torch.ones_like(wanted)
    for g, size in enumerate(sizes):
        span = slice(starts[g], starts[g] + size)
        wanted[span], labels[span] = x[span] @ y[g].T, g
        magnitude[span] = x[span].abs() @ y[g].abs().T
    if kind == "rows":
        tensors["ends"] = torch.tensor(starts[1:], dtype=torch.int32)
    else:
        tensors["row_groups"] = labels
    product = Product(rows, n, k, left.matrix, right.matrix, matrix, **described, groups=Groups(kind, len(sizes)))
    with rtkernels.emulate("sm_90"):
        cases.run(mma_plan, product, tensors)
    check(out, wanted, magnitude, "fp32")


@pytest.mark.parametrize(("token", "recipe"), [("bf16", None), ("e4m3", "1d2d"), ("e4m3", "row")])
def test_masked_groups(token: str, recipe: str | None) -> None:
    sizes, m, n, k = [5, 0, 70, 66], 70, 40, 136
    random = generator()
    left = cases.operand(token, m, k, random, groups=4)
    right = cases.operand(token, n, k, random, groups=4)
    out, matrix = result_memory("bf16", 4, m, n)
    tensors, described = {"a": left.tensor, "b": right.tensor, "out": out}, {}
    x, y = left.values, right.values
    if recipe is not None:
        sa = cases.scaling(m, k, random, groups=4, **RECIPES[recipe][0])
        sb = cases.scaling(n, k, random, groups=4, **RECIPES[recipe][1])
        tensors |= {"scale_a": sa.tensor, "scale_b": sb.tensor}
        described = {"scale_a": sa.scales, "scale_b": sb.scales}
        x, y = x * sa.values, y * sb.values
    tensors["sizes"] = torch.tensor(sizes, dtype=torch.int32)
    wanted, magnitude = x @ y.transpose(1, 2), x.abs() @ y.abs().transpose(1, 2)
    for g, size in enumerate(sizes):
        wanted[g, size:] = 77.0
    product = Product(m, n, k, left.matrix, right.matrix, matrix, **described, groups=Groups("masked", 4))
    with rtkernels.emulate("sm_90"):
        cases.run(mma_plan, product, tensors)
    check(out, wanted, magnitude, "bf16")


@pytest.mark.parametrize(
    ("token", "across", "recipe", "align"),
    [("bf16", True, None, 1), ("bf16", False, None, 1), ("bf16", False, None, 8), ("e4m3", False, "1d1d", 128),
     ("e4m3", False, "1d1d", 16), ("e4m3", False, "1d1d", 1), ("int4", False, "row", 1)],
)  # fmt: skip
def test_groups_of_depth(token: str, across: bool, recipe: str | None, align: int) -> None:
    sizes = {1: [5, 0, 130, 1, 64], 8: [8, 0, 136, 40], 16: [16, 0, 144, 48], 128: [128, 0, 256, 128]}[align]
    m, n, k, count = 40, 36, sum(sizes) + 3, len(sizes)
    random = generator()
    left = cases.operand(token, m, k, random, across=across)
    right = cases.operand(token, n, k, random, across=across)
    out, matrix = result_memory("fp32", count, m, n)
    tensors, described = {"a": left.tensor, "b": right.tensor, "out": out}, {}
    x, y = left.values, right.values
    if recipe is not None:
        sa = cases.scaling(m, k, random, **RECIPES[recipe][0])
        sb = cases.scaling(n, k, random, **RECIPES[recipe][1])
        tensors |= {"scale_a": sa.tensor, "scale_b": sb.tensor}
        described = {"scale_a": sa.scales, "scale_b": sb.scales}
        x, y = x * sa.values, y * sb.values
    ends = torch.tensor(sizes).cumsum(0)
    tensors["ends"] = ends.to(torch.int32)
    wanted = torch.stack([x[:, e - s : e] @ y[:, e - s : e].T for s, e in zip(sizes, ends.tolist(), strict=True)]) + 77
    product = Product(m, n, k, left.matrix, right.matrix, matrix, **described, accumulate=True,
                      groups=Groups("depth", count, align))  # fmt: skip
    with rtkernels.emulate("sm_90"):
        cases.run(mma_plan, product, tensors)
    check(out, wanted, wanted.abs() + 100, "fp32")


# ---- what there is not ----------------------------------------------------------------------------------------------


def test_unsupported_products_say_why() -> None:
    from rtkernels.runtime import targets

    def reason(a: str, b: str, **rest) -> str | None:
        given = {"out": Matrix("bf16", 64)} | rest
        return mma_plan.unsupported(Product(64, 64, 64, Matrix(a, 64), Matrix(b, 64), **given), targets.parse("sm_90a"))

    assert reason("bf16", "bf16") is None
    assert "same type" in reason("bf16", "fp16")
    assert "a has 16 bits" in reason("int8", "bf16")
    assert "a has 8 bits" in reason("int4", "int8")
    assert "no product" in reason("int8", "e4m3")
    assert "int32" in reason("bf16", "bf16", out=Matrix("int32", 64))


def test_the_same_bits_in_any_order() -> None:
    random = generator()
    left, right = cases.operand("bf16", 70, 136, random), cases.operand("bf16", 70, 136, random)
    results = []
    for order in ("forward", "reverse", 3):
        out, matrix = result_memory("fp32", 70, 70)
        with rtkernels.emulate("sm_90", order=order):
            cases.run(mma_plan, Product(70, 70, 136, left.matrix, right.matrix, matrix),
                      {"a": left.tensor, "b": right.tensor, "out": out})  # fmt: skip
        results.append(out)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", ["rows", "labels", "masked"])
@pytest.mark.parametrize("quantized", ["row", "1x128"])
def test_quantised_results_of_groups(kind: str, quantized: str) -> None:
    """Codes and scales of rows that exist; the others are left alone."""
    sizes, m, n, k = [5, 0, 20], 24, 130, 40
    count, masked = len(sizes), kind == "masked"
    random = generator()
    left = cases.operand("bf16", m if masked else 40, k, random, groups=count if masked else 0)
    right = cases.operand("bf16", n, k, random, groups=count)
    rows = m if masked else 40
    lead = (count,) if masked else ()
    out = torch.full((*lead, rows, n), 255, dtype=torch.uint8)
    pitch = -(-rows // 4) * 4
    scale = torch.full((*lead, 2 if quantized == "1x128" else 1, pitch if quantized == "1x128" else rows), -1.0)
    tensors = {"a": left.tensor, "b": right.tensor, "out": out, "out_scale": scale}
    exact = torch.full((*lead, rows, n), torch.nan, dtype=torch.float64)
    if masked:
        tensors["sizes"] = torch.tensor(sizes, dtype=torch.int32)
        for g, size in enumerate(sizes):
            exact[g, :size] = left.values[g, :size] @ right.values[g].T
    else:
        labels, first = torch.full((rows,), -1, dtype=torch.int32), 0
        for g, size in enumerate(sizes):
            exact[first : first + size] = left.values[first : first + size] @ right.values[g].T
            labels[first : first + size], first = g, first + size + (2 if kind == "labels" else 0)
        if kind == "labels":
            tensors["row_groups"] = labels
        else:
            tensors["ends"] = torch.tensor(sizes).cumsum(0).to(torch.int32)
    matrix = Matrix("e4m3", n, group_pitch=rows * n if masked else 0)
    product = Product(rows, n, k, left.matrix, right.matrix, matrix, quantized=quantized, groups=Groups(kind, count))
    with rtkernels.emulate("sm_90"):
        cases.run(mma_plan, product, tensors)
    missing = exact.isnan()
    assert (out[missing] == 255).all()
    span = 128 if quantized == "1x128" else n
    expanded = scale.transpose(-1, -2)[..., :rows, :].double().repeat_interleave(span, -1)[..., :n]
    assert (expanded[missing] == -1).all()
    values = out.view(torch.float8_e4m3fn).double() * expanded
    error = (values - exact).abs() - exact.abs() * 2.0**-4 - expanded * 2.0**-9 - 1e-3
    assert (error[~missing] <= 0).all()
