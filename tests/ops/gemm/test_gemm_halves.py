"""Operands of 8 bits with rows of multiples of 8 bytes and not of 16: few rows of them are loaded without a copy."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at
from torch import Tensor

import rtkernels
from rtkernels import explain, scaled_mm

E4M3 = torch.float8_e4m3fn


def _operands(kind: str, m: int, n: int, k: int, device: str) -> tuple[tuple[Tensor, ...], dict, Tensor, Tensor]:
    """Return operands with scales, options, and the result in fp64 with its magnitude."""
    generator = torch.Generator().manual_seed(m * n + k)

    def codes(rows: int) -> Tensor:
        if kind == "int8":
            return torch.randint(-128, 128, (rows, k), generator=generator).to(torch.int8).to(device)
        return torch.randn(rows, k, generator=generator).to(E4M3).to(device)

    a, b = codes(m), codes(n)
    if kind == "block":
        scales = (
            torch.rand(m, -(-k // 128), generator=generator) + 0.5,
            torch.rand(-(-n // 128), -(-k // 128), generator=generator) + 0.5,
        )
        factors = (
            scales[0].repeat_interleave(128, 1)[:, :k],
            scales[1].repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k],
        )
        recipe = "block_1x128_128x128"
    else:
        scales = torch.rand(m, 1, generator=generator) + 0.5, torch.rand(1, n, generator=generator) + 0.5
        factors, recipe = (scales[0], scales[1].t()), "row"
    x, y = a.double() * factors[0].to(device).double(), b.double() * factors[1].to(device).double()
    given = a, b, *(scale.to(device) for scale in scales)
    return given, {"recipe": recipe, "out_dtype": torch.float32}, x @ y.t(), x.abs() @ y.abs().t()


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("backend", ("auto", "skinny", "cluster"))
@pytest.mark.parametrize("kind", ("row", "block", "int8"))
@pytest.mark.parametrize("m, n, k", ((2, 33, 712), (15, 70, 136)))
def test_products(place: str, kind: str, backend: str, m: int, n: int, k: int) -> None:
    if backend == "cluster" and (kind != "row" or place == "sm_80"):
        pytest.skip("not a product of this backend")
    with running_on(place) as device:
        given, options, exact, magnitude = _operands(kind, m, n, k, device)
        found = scaled_mm(*given, backend=backend, **options)
        assert ((found.double() - exact).abs() <= 2.0**-12 * magnitude).all()


@pytest.mark.parametrize(
    "m, k, n, backend",
    ((2, 1000, 4096, "cluster"), (16, 1000, 16384, "skinny"), (17, 1000, 4096, "sm90"), (2, 1004, 4096, "pad")),
)
def test_few_rows_are_not_copied(m: int, k: int, n: int, backend: str) -> None:
    a, b = (torch.empty(rows, k, dtype=E4M3, device="meta") for rows in (m, n))
    scale = torch.empty((), device="meta")
    given = {"scale_a": scale, "scale_b": scale, "recipe": "tensor"}
    for more in ({}, {"acc": "fast"}):
        assert explain(rtkernels.scaled_mm, a, b, target="9.0", **given, **more).backend == backend
    assert explain(rtkernels.scaled_mm, a, b, target="8.0", **given).backend == {
        "cluster": "skinny",
        "sm90": "pad",
    }.get(backend, backend)


@at("sm_90", "cuda")
def test_a_single_row_may_have_any_pitch(place: str) -> None:
    with running_on(place) as device:
        a, b = torch.randn(1, 72, device=device)[:, :70].bfloat16(), torch.randn(40, 70, device=device).bfloat16()
        found = scaled_mm(a.as_strided((1, 70), (3, 1)), b, out_dtype=torch.float32)
        assert torch.allclose(found.double(), a.double() @ b.double().t(), atol=1e-4)
