"""Products with weights as the left operand of wgmma: sizes, epilogues, clusters, when they are chosen."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from support.inference import assert_captures
from torch import Tensor

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import swapped_plan
from rtkernels.ops.gemm.backend import PRODUCTS
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.runtime import targets
from rtkernels.runtime.launch.device import DeviceInfo, device_info

PLACES = pytest.mark.parametrize("where", ("sm_90", pytest.param("cuda", marks=pytest.mark.gpu)))
E4M3 = torch.float8_e4m3fn


def operands(m: int, n: int, k: int, dtype: torch.dtype, where: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    both = a.to(dtype), (b / k**0.5).to(dtype)
    return tuple(t.cuda() for t in both) if where == "cuda" else both


def cut(monkeypatch: pytest.MonkeyPatch, consumers: int, parts: int) -> None:
    """Let all launches have so many warpgroups and blocks of a cluster."""
    own = swapped_plan.shape_of
    monkeypatch.setattr(swapped_plan, "shape_of", lambda p, sms: own(p, sms)._replace(consumers=consumers, parts=parts))


def computed(where: str, function, *args, **options) -> Tensor:
    if where == "cuda":
        return function(*args, backend="swapped", **options).cpu()
    with rtkernels.emulate(where):
        return function(*args, backend="swapped", **options)


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert (found.double() - wanted.cpu()).abs().max() <= tolerance * wanted.abs().max()


# m, n, k, warpgroups, parts: every tile of tokens, tails of n and k, blocks without a step, rings that go round.
SIZES = (
    (10, 70, 1032, 1, 1), (16, 33, 264, 1, 4), (17, 130, 520, 1, 2), (9, 64, 64, 1, 8), (50, 70, 648, 1, 2),
    (64, 140, 520, 2, 4), (70, 65, 264, 2, 2), (130, 40, 136, 2, 2),
)  # fmt: skip


@PLACES
@pytest.mark.parametrize("size", SIZES)
def test_sums(where: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, consumers, parts = size
    cut(monkeypatch, consumers, parts)
    a, b = operands(m, n, k, torch.bfloat16, where)
    found = computed(where, rtkernels.scaled_mm, a, b, out_dtype=torch.float32)
    near(found, a.double() @ b.double().t())


@PLACES
@pytest.mark.parametrize("size", ((12, 80, 528, 1, 2), (100, 130, 272, 2, 1)))
def test_scales_bias_add_and_activation(where: str, size: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    m, n, k, consumers, parts = size
    cut(monkeypatch, consumers, parts)
    a, b = operands(m, n, k, E4M3, where)
    scale_a, scale_b = torch.linspace(0.5, 2, m, device=a.device), torch.linspace(1, 3, n, device=a.device)
    bias = torch.linspace(-1, 1, n, device=a.device)
    add = torch.linspace(-2, 2, m * (n + 16), device=a.device).view(m, n + 16)[:, :n]
    given = {"bias": bias, "add": add, "act": "silu", "out_dtype": torch.float32}
    found = computed(where, rtkernels.scaled_mm, a, b, scale_a, scale_b, **given)
    sums = (a.double() @ b.double().t()) * scale_a[:, None] * scale_b + bias + add
    tolerance = 1e-3 if where == "cuda" else 1e-5  # tensor cores keep 14 bits of e4m3 sums, until 128 of k are added
    near(found, F.silu(sums), tolerance)
    one = torch.tensor(0.5, device=a.device)
    near(computed(where, rtkernels.scaled_mm, a, b, one, one, acc="fast", out_dtype=torch.float32),
         0.25 * (a.double() @ b.double().t()), tolerance)  # fmt: skip


@PLACES
@pytest.mark.parametrize("cuts", ((1, 2), (2, 1)))
def test_gated(where: str, cuts: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    cut(monkeypatch, *cuts)
    a, b = operands(40, 156, 528, torch.float16, where)
    gate, up = (a.double() @ b.double().t()).chunk(2, -1)
    found = computed(where, rtkernels.gated_mm, a, b, act="gelu_tanh", out_dtype=torch.float32)
    near(found, F.gelu(gate, approximate="tanh") * up)


@PLACES
def test_results_that_are_added(where: str) -> None:
    a, b = operands(11, 40, 64, torch.bfloat16, where)
    out = torch.ones(11, 64, device=a.device)[:, :40]
    wanted = 1 + a.double() @ b.double().t()
    near(computed(where, rtkernels.scaled_mm, a, b, out=out, accumulate=True), wanted)


@PLACES
def test_strides_and_poisoned_outputs(where: str) -> None:
    a, b = operands(13, 72, 264, torch.bfloat16, where)
    a, b = (torch.cat((t, torch.full_like(t[:, :8], torch.nan)), -1)[:, :264] for t in (a, b))
    out = torch.full((13, 75), torch.nan, device=a.device)
    found = computed(where, rtkernels.scaled_mm, a, b, out=out[:, 1:73])
    near(found, a.double() @ b.double().t())
    assert out[:, 0].isnan().all() and out[:, 73:].isnan().all()


def test_not_a_number_stays_in_its_row_and_column() -> None:
    a, b = operands(12, 40, 128, torch.bfloat16, "sm_90")
    a[1, 5], b[7, 3] = torch.nan, torch.inf
    found = computed("sm_90", rtkernels.scaled_mm, a, b).isfinite()
    assert not found[1].any() and not found[:, 7].any() and found.sum() == 11 * 39


def test_what_it_does_not_compute() -> None:
    sm_90 = targets.parse("sm_90a")
    bf16, e4m3 = Matrix("bf16", 64), Matrix("e4m3", 64)
    good = Product(10, 64, 64, bf16, bf16, bf16)
    refused = lambda norm=False, **changed: swapped_plan.unsupported(good._replace(**changed), sm_90, norm)  # noqa: E731
    assert refused() is None and refused(norm=True) is None
    assert "wgmma" in swapped_plan.unsupported(good, targets.parse("sm_89"))
    assert "grouped" in refused(groups=Groups("rows", 2))
    assert "9 to 256" in refused(m=257) and "9 to 256" in refused(m=8)
    assert "9 to 128" in refused(m=129, a=e4m3, b=e4m3) and "9 to 64" in refused(norm=True, m=65)
    assert "16 bytes" in refused(a=bf16._replace(aligned=False)) and "16 bytes" in refused(norm=True, k=60)
    assert "quantised" in refused(quantized="row") and "sums" in refused(sums="fp16")
    assert "operands" in refused(a=e4m3) and "summed" in refused(b=bf16._replace(across=True))
    assert "scales of b" in refused(a=e4m3, b=e4m3, scale_b=Scales(128, 32)) and "steps" in refused(k=0)
    fp16 = Matrix("fp16", 64)
    assert "results" in refused(out=Matrix("int32", 64)) and "bf16 rows" in refused(norm=True, a=fp16, b=fp16)
    with pytest.raises(ArgumentError, match="backend is 'swaped'"):
        rtkernels.scaled_mm(torch.zeros(1, 1), torch.zeros(1, 1), backend="swaped")


def _product(m: int, n: int, k: int, token: str = "bf16", **more) -> Product:
    matrix = Matrix(token, k)
    return Product(m, n, k, matrix, matrix, Matrix("bf16", n), **more)


def _h200() -> DeviceInfo:
    return replace(device_info(-1), sm_count=132, target=targets.parse("sm_90a"))


def test_when_it_is_chosen() -> None:
    info = _h200()
    for product, wanted in (
        (_product(16, 1536, 4608), "swapped"),
        (_product(16, 9216, 1536), "sm90"),
        (_product(10, 24576, 4096), "skinny"),
        (_product(64, 9216, 1536), "sm90"),
        (_product(17, 2048, 5632, "e4m3"), "swapped"),
        (_product(64, 24576, 4096, "e4m3"), "sm90"),
        (_product(17, 4096, 14344), "sm90"),  # whose rows begin inside of sectors
        (_product(65, 4096, 4096), "sm90"),
        (_product(8, 4096, 4096), "decode"),
    ):
        assert PRODUCTS.choose(product, info).backend.name == wanted, product
    gated = _product(64, 2048, 14336, gate="silu")
    assert swapped_plan.unsupported(gated, info.target) is None and not swapped_plan.preferred(gated, info)


def test_few_tiles_share_k() -> None:
    for product, tiles, blocks in ((_product(32, 2560, 1536), 40, 80), (_product(32, 28672, 4096), 448, 448)):
        shape = swapped_plan.shape_of(product, 132)
        assert shape.tiles(product) == tiles and shape.tiles(product) * shape.parts == blocks
    found = swapped_plan.candidates(_product(64, 2560, 1536), _h200())
    assert {"consumers": 2, "parts": 4} in found and len(found) == 8


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches_in_a_graph() -> None:
    x, up = operands(32, 8192, 1024, torch.bfloat16, "cuda")
    _, down = operands(32, 1024, 4096, torch.bfloat16, "cuda")

    def chain() -> Tensor:
        y = x
        for _ in range(6):
            y = rtkernels.rms_norm(y, scale=x[0])
            y = rtkernels.gated_mm(y, up, backend="swapped")
            y = rtkernels.scaled_mm(y, down, backend="swapped")
        return y

    assert_captures(chain)
