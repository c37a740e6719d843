"""Operands whose rows are odd multiples of 16 bytes apart: even and odd rows of b are loaded separately."""

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
from rtkernels import explain, scaled_mm
from rtkernels.ops.gemm import sm90_limits, sm90_plan, tile_choice
from rtkernels.ops.gemm.product import Matrix, Product


def _in_nan(token: str, rows: int, k: int, **more: Any) -> torch.Tensor:
    """Return an operand whose rows are odd multiples of 16 bytes, with NaN between rows and before the first one."""
    dtype = products.DTYPES[token]
    pitch = k + 16 // dtype.itemsize * (2 if k * dtype.itemsize % 32 == 16 else 1)
    first = 32 // dtype.itemsize
    memory = torch.full((first + rows * pitch,), float("nan")).to(dtype)
    view = memory.as_strided((rows, k), (pitch, 1), first)
    view.copy_(products.codes(token, rows, k))
    return view


def _draw(rng: random.Random) -> tuple[int, int, int, dict[str, Any]]:
    """Return sizes and options of a product of such operands, with any number of blocks that share k."""
    token = rng.choice(("bf16", "fp16", "e4m3", "e4m3"))
    size = products.DTYPES[token].itemsize
    gated = token == "bf16" and rng.random() < 0.3
    tile = rng.choice(tile_choice.SPLIT_GATED_TILES if gated else tile_choice.SPLIT_TILES)
    options: dict[str, Any] = {"tile": tile, "a": token, "out": rng.choice(("bf16", "fp16", "fp32"))}
    if token == "e4m3":
        kinds = ((1, 0), (0, 0), None)
        options |= {"scale_a": rng.choice(kinds), "scale_b": rng.choice(kinds), "sums": rng.choice(("fp32", "fast"))}
    if gated:
        options |= {"gate": "silu", "bias": rng.choice((None, "bf16"))}
    else:
        options |= rng.choice(({}, {"bias": "bf16"}, {"add": "bf16", "act": "silu"}, {"accumulate": True}))
        options["narrow"] = rng.randint(0, 3)
    m, n = rng.randint(1, rng.choice((9, 200))), rng.randint(2, rng.choice((9, 300)))
    m, n = rng.choice((m, m, tile.rows + 1)), rng.choice((n, n, tile.cols + 1))
    n += n % 2 if gated else 0
    k = 16 // size * rng.randint(1, rng.choice((9, 70)))
    options["sharing"] = rng.randint(0, min(8, tile_choice.tile_count(tile, m, n) * -(-k * size // 128)))
    return m, n, k, options


@pytest.fixture(autouse=True)
def _rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "operand", _in_nan)


@emulated
@pytest.mark.parametrize("seed", range(24))
def test_random_products(seed: int) -> None:
    torch.manual_seed(seed)
    rng = random.Random(seed)
    m, n, k, options = _draw(rng)
    with poisoned(), rtkernels.emulate("sm_90", order=rng.choice(("forward", "reverse", seed))):
        products.dense(sm90_plan, m, n, k, **options)


@emulated
@pytest.mark.parametrize("token, vector", (("bf16", 8), ("e4m3", 16)))
def test_every_k(token: str, vector: int) -> None:
    """Every number of vectors up to three stages, so that odd rows end in each place of a stage."""
    with poisoned(), rtkernels.emulate("sm_90"):
        for k in range(vector, 25 * vector + 1, vector):
            for sums in ("fast", "fp32") if token == "e4m3" else ("fp32",):
                products.dense(sm90_plan, 5, 35, k, a=token, tile=tile_choice.SPLIT_TILES[3], sharing=0, sums=sums)


@emulated
def test_infinities() -> None:
    """An infinite last element of an even row, which lies before an odd one, stays in its own column."""
    a, b = torch.ones(3, 1000).bfloat16(), torch.ones(5, 1000).bfloat16()
    b[2, -1] = torch.inf
    b[4, 0] = torch.nan
    product = Product(3, 5, 1000, Matrix("bf16", 1000), Matrix("bf16", 1000), Matrix("fp32", 5))
    out = torch.full((3, 5), torch.nan)
    with rtkernels.emulate("sm_90"):
        products.launch(
            sm90_plan, product, {"a": a, "b": b, "out": out}, out.device, tile=tile_choice.SPLIT_TILES[3], sharing=0
        )
    assert torch.equal(out[:, [0, 1, 3]], torch.full((3, 3), 1000.0))
    assert out[:, 2].isposinf().all() and out[:, 4].isnan().all()


@at("sm_90", "cuda")
@pytest.mark.parametrize("k", (31, 49, 565, 642, 673, 1000, 1008))
@pytest.mark.parametrize("kind", ("e4m3", "bf16"))
def test_public_calls(place: str, kind: str, k: int) -> None:
    """Contiguous operands, some of which are padded or moved instead."""
    a, b = codes(kind, 67, k), codes(kind, 131, k, seed=1)
    with running_on(place) as device:
        got = scaled_mm(a.codes.to(device), b.codes.to(device))
        assert_product(got, *exact(a.values, b.values), codes=a.codes)


def _product(k: int, token: str = "bf16", pitch: int = 0, n: int = 4096, **more: Any) -> Product:
    rows = Matrix(token, pitch or k)
    return Product(4096, n, k, rows, rows, Matrix("bf16", n), **more)


def test_which_products_may_load_rows_separately() -> None:
    assert sm90_limits.is_split(_product(1000)) and sm90_limits.is_split(_product(1008, "e4m3"))
    assert not sm90_limits.is_split(_product(1008)) and not sm90_limits.is_split(_product(1024, "e4m3"))
    assert not sm90_limits.is_split(_product(1001, pitch=1016))  # k ends inside of a vector
    assert not sm90_limits.is_split(_product(1000, n=1))
    assert sm90_limits.is_split(_product(1000, gate="silu"))
    assert not sm90_limits.is_split(_product(1000, n=4097, gate="silu"))  # parity of the other half differs


def test_explained() -> None:
    a, b = (torch.empty(4096, 1000, dtype=torch.bfloat16, device="meta") for _ in "ab")
    assert "even and odd rows of b separately" in str(explain(scaled_mm, a, b, target="9.0").summary)
    a, b = (torch.empty(4096, 1008, dtype=torch.bfloat16, device="meta") for _ in "ab")
    assert "separately" not in str(explain(scaled_mm, a, b, target="9.0").summary)
