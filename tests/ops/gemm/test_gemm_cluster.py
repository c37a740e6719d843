"""Products of few rows by clusters of blocks: untuned sizes, epilogues, launches that overlap."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.inference import assert_captures
from torch import Tensor

import rtkernels
from rtkernels.ops.gemm import cluster_plan
from rtkernels.ops.gemm.product import Groups, Matrix, Product, Scales
from rtkernels.runtime import targets

PLACES = pytest.mark.parametrize("where", ("sm_90", pytest.param("cuda", marks=pytest.mark.gpu)))
E4M3 = torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _sms_of_an_h200(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device has 4 instead of 132, with which no tile would be shared by blocks."""
    if getattr(request.node, "callspec", None) is None or request.node.callspec.params.get("where") != "cuda":
        monkeypatch.setattr(cluster_plan, "_ROUND", cluster_plan._ROUND * 132 / 4)


def operands(m: int, n: int, k: int, dtype: torch.dtype, where: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(m * n + k)
    a, b = (torch.randn(rows, k, generator=generator) for rows in (m, n))
    both = a.to(dtype), (b / k**0.5).to(dtype)
    return tuple(t.cuda() for t in both) if where == "cuda" else both


def computed(where: str, function, *args, **options) -> Tensor:
    if where == "cuda":
        return function(*args, backend="cluster", **options).cpu()
    with rtkernels.emulate(where):
        return function(*args, backend="cluster", **options)


def near(found: Tensor, wanted: Tensor, tolerance: float = 1e-5) -> None:
    assert (found.double() - wanted.cpu()).abs().max() <= tolerance * wanted.abs().max()


# Tokens in one tile of 16, in two, in four; clusters of 2, 1 and 4; tails of n and k; warps without a step.
SIZES = ((10, 96, 1024), (1, 33, 24), (16, 70, 2056), (17, 40, 264), (50, 64, 512))


def test_blocks_share_tiles() -> None:
    def parts(m: int, n: int, k: int) -> int:
        matrix = Matrix("bf16", k)
        return cluster_plan.parts_of(Product(m, n, k, matrix, matrix, matrix), 4)

    assert [parts(*size) for size in SIZES] == [2, 1, 4, 1, 1]


@PLACES
@pytest.mark.parametrize("size", SIZES)
def test_sums(where: str, size: tuple[int, int, int]) -> None:
    a, b = operands(*size, torch.bfloat16, where)
    found = computed(where, rtkernels.scaled_mm, a, b, out_dtype=torch.float32)
    near(found, a.double() @ b.double().t())


@PLACES
def test_scales_bias_add_and_activation(where: str) -> None:
    a, b = operands(12, 80, 528, E4M3, where)
    scale_a, scale_b = torch.linspace(0.5, 2, 12, device=a.device), torch.linspace(1, 3, 80, device=a.device)
    bias = torch.linspace(-1, 1, 80, device=a.device)
    add = torch.linspace(-2, 2, 12 * 96, device=a.device).view(12, 96)[:, :80]
    given = {"bias": bias, "add": add, "act": "silu", "out_dtype": torch.float32}
    found = computed(where, rtkernels.scaled_mm, a, b, scale_a, scale_b, **given)
    sums = (a.double() @ b.double().t()) * scale_a[:, None] * scale_b + bias + add
    near(found, F.silu(sums))


@PLACES
def test_gated(where: str) -> None:
    a, b = operands(10, 80, 1040, torch.float16, where)
    gate, up = (a.double() @ b.double().t()).chunk(2, -1)
    found = computed(where, rtkernels.gated_mm, a, b, act="gelu_tanh", out_dtype=torch.float32)
    near(found, F.gelu(gate, approximate="tanh") * up)
    both = torch.tensor([0.5, 3.0], device=a.device)
    found = computed(where, rtkernels.gated_mm, a, b, global_scale=both, act="gelu_tanh", out_dtype=torch.float32)
    near(found, F.gelu(0.5 * gate, approximate="tanh") * 3.0 * up)


@PLACES
def test_results_that_are_added(where: str) -> None:
    a, b = operands(3, 40, 64, torch.bfloat16, where)
    out = torch.ones(3, 64, device=a.device)[:, :40]
    wanted = 1 + a.double() @ b.double().t()
    near(computed(where, rtkernels.scaled_mm, a, b, out=out, accumulate=True), wanted)


def test_not_a_number_stays_in_its_row_and_column() -> None:
    a, b = operands(4, 40, 128, torch.bfloat16, "sm_90")
    a[1, 5], b[7, 3] = torch.nan, torch.inf
    found = computed("sm_90", rtkernels.scaled_mm, a, b).isfinite()
    assert not found[1].any() and not found[:, 7].any() and found.sum() == 3 * 39


def test_what_it_does_not_make() -> None:
    sm_90 = targets.parse("sm_90a")
    bf16, e4m3 = Matrix("bf16", 64), Matrix("e4m3", 64)
    good = Product(10, 64, 64, bf16, bf16, bf16)
    refused = lambda **changed: cluster_plan.unsupported(good._replace(**changed), sm_90)  # noqa: E731
    assert refused() is None and "clusters" in cluster_plan.unsupported(good, targets.parse("sm_89"))
    assert "grouped" in refused(groups=Groups("rows", 2)) and "64 at the highest" in refused(m=65)
    assert "32 at the highest" in refused(m=33, a=e4m3, b=e4m3)
    assert "16 bytes" in refused(k=60) and "16 bytes" in refused(a=bf16._replace(aligned=False))
    assert "quantised" in refused(quantized="row") and "sums" in refused(sums="fp16")
    assert "operands" in refused(a=e4m3) and "summed" in refused(b=bf16._replace(across=True))
    assert "scales of b" in refused(a=e4m3, b=e4m3, scale_b=Scales(128, 32))
    assert "results" in refused(out=Matrix("int32", 64))


def test_a_launch_waits_for_the_one_before_it() -> None:
    """The emulator reports premature reads and writes."""
    a, b = operands(4, 64, 64, torch.bfloat16, "sm_90")
    with rtkernels.emulate("sm_90"):
        half = rtkernels.scaled_mm(a, b, backend="cluster")
        found = rtkernels.scaled_mm(half, b, backend="cluster", out_dtype=torch.float32)
    near(found, half.double() @ b.double().t())


@pytest.mark.gpu
def test_a_chain_of_overlapping_launches_in_a_graph() -> None:
    x, up = operands(10, 8192, 1024, torch.bfloat16, "cuda")
    _, down = operands(10, 1024, 4096, torch.bfloat16, "cuda")

    def chain() -> Tensor:
        y = x
        for _ in range(6):
            y = rtkernels.scaled_mm(rtkernels.gated_mm(rtkernels.rms_norm(y, scale=x[0]), up), down)
        return y

    assert_captures(chain)
