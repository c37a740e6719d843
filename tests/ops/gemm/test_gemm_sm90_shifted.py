"""8-bit operands whose rows are odd multiples of 8 bytes apart: random products, and one operand copied by ``pad``."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from support import products
from support.compare import poisoned, running_on
from support.places import at, emulated
from support.product_cases import assert_product, codes, exact

import rtkernels
from rtkernels import scaled_mm
from rtkernels.ops.gemm import pad_plan, sm90_limits, sm90_plan, tile_choice
from rtkernels.ops.gemm.product import Product
from rtkernels.runtime.launch.device import DeviceInfo


def _draw(rng: random.Random) -> tuple[int, int, int, dict[str, Any]]:
    """Return sizes and options of a product that moves rows, with any number of blocks that share k."""
    tile = rng.choice(tile_choice.SHIFTED_TILES)
    integer = rng.random() < 0.2
    options: dict[str, Any] = {"tile": tile, "halves": rng.choice(("ab", "a", "b")), "a": "int8" if integer else "e4m3"}
    blocks = not integer and tile.cols != 192 and rng.random() < 0.4
    if blocks:
        options |= {"scale_a": (1, 128), "scale_b": (128, 128), "contiguous": rng.choice(("rows", "depth"))}
    else:
        kinds = ((1, 0), (0, 0), None)
        options |= {"scale_a": rng.choice(kinds), "scale_b": rng.choice(kinds), "sums": rng.choice(("fp32", "fast"))}
    options |= {"out": rng.choice(("bf16", "fp32")), "narrow": rng.randint(0, 3)}
    options |= rng.choice(({}, {"bias": "bf16"}, {"add": "bf16", "act": "silu"}, {"accumulate": True}))
    m, n = rng.randint(2, rng.choice((9, 200))), rng.randint(2, rng.choice((9, 300)))
    m, n = rng.choice((m, m, tile.rows + 1)), rng.choice((n, n, tile.cols + 1))  # the last tile has a row, and no pair
    k = 8 + 16 * rng.randint(0, rng.choice((7, 60)))
    options["sharing"] = rng.randint(0, min(8, tile_choice.tile_count(tile, m, n) * -(-k // 128)))
    return m, n, k, options


def _in_nan(token: str, rows: int, k: int, *, halves: bool = False, **more: Any) -> torch.Tensor:
    """Return an operand with NaN between the ends of rows and the beginnings of the next ones."""
    made = _operand(token, rows, k, halves=halves, **more)
    if not halves and token == "e4m3":
        made.as_strided((rows, made.stride(0)), made.stride()).view(torch.uint8)[:, k:] = 0x7F
    return made


_operand = products.operand


@emulated
@pytest.mark.parametrize("seed", range(16))
def test_random_products(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "operand", _in_nan)
    torch.manual_seed(seed)
    rng = random.Random(seed)
    m, n, k, options = _draw(rng)
    with poisoned(), rtkernels.emulate("sm_90", order=rng.choice(("forward", "reverse", seed))):
        products.dense(sm90_plan, m, n, k, **options)


@at("sm_90", "cuda")
@pytest.mark.parametrize("copied", ("a", "b"))
@pytest.mark.parametrize("kind", ("e4m3", "int8"))
def test_one_operand_is_copied(place: str, kind: str, copied: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rows of the other one are moved, although k stays an odd multiple of 8."""
    seen: list[Product] = []

    def only(p: Product, info: DeviceInfo) -> list[str]:
        return [copied]

    own = sm90_plan.steps

    def steps(product: Product, device: int, **options: Any) -> Any:
        seen.append(product)
        return own(product, device, **options)

    monkeypatch.setattr(pad_plan, "_copied", only)
    monkeypatch.setattr(sm90_plan, "steps", steps)
    m, n, k = 67, 131, 1000
    a, b = codes(kind, m, k), codes(kind, n, k, seed=1)
    with running_on(place) as device:
        got = scaled_mm(a.codes.to(device), b.codes.to(device), backend="pad")
        assert_product(got, *exact(a.values, b.values), codes=a.codes)
    (product,) = seen
    assert product.k == k and sm90_limits.is_shifted(product)
    assert (product.a.halves, product.b.halves) == (copied == "b", copied == "a")
