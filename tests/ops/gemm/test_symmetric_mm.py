"""Symmetric products: one triangle computed, both written, at odd sizes and in both orders of memory."""

from __future__ import annotations

import pytest
import torch
from support.compare import running_on
from support.places import at, emulated

import rtkernels
from rtkernels.errors import ArgumentError
from rtkernels.ops.gemm import symmetric_mm
from rtkernels.ops.gemm.symmetric_mm import SYMMETRIC_MM

DTYPES = (torch.bfloat16, torch.float16)


def operands(batch: int, n: int, k: int, dtype: torch.dtype, device: str, across: bool = False):
    g = torch.Generator().manual_seed(n + k)
    a = torch.randn(batch, n, k, generator=g).to(device, dtype)
    a = a.mT.contiguous().mT if across else a
    add = torch.randn(batch, n, n, generator=g).to(device, dtype)
    return a, add.tril() + add.tril(-1).mT


def check(out: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype) -> None:
    unit = torch.finfo(dtype).eps / 2
    assert ((out.double() - exact).abs() <= unit * exact.abs() * 1.01 + 1e-5 * exact.abs().amax()).all()
    assert torch.equal(out, out.mT)


@at()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "n", "k", "across"), [(2, 136, 72, False), (1, 264, 40, True), (1, 8, 8, False)])
def test_values(place, dtype, batch, n, k, across) -> None:
    with running_on(place) as device:
        a, add = operands(batch, n, k, dtype, device, across)
        out = SYMMETRIC_MM(a, None, add, 0.5, -2.0, 3.0)
    eye = torch.eye(n, dtype=torch.float64, device=out.device)
    check(out, 0.5 * a.double() @ a.double().mT - 2 * add.double() + 3 * eye, dtype)
    assert out.is_contiguous()


@at()
def test_two_matrices_that_commute(place) -> None:
    with running_on(place) as device:
        a = operands(1, 136, 136, torch.bfloat16, device)[1] * 0.1
        square = SYMMETRIC_MM(a, None, None, 1.0, 0.0, 0.0)
        out = SYMMETRIC_MM(a, square, None, 1.0, 0.0, 0.0)
    exact = a.double() @ square.double()
    assert ((out.double() - exact).norm() / exact.norm()) < 1e-2
    assert torch.equal(out[:, 64:, :64], out[:, :64, 64:].mT)  # blocks on the diagonal are stored as computed


@at()
@pytest.mark.parametrize(
    ("batch", "n", "k"), [(1, 7, 5), (0, 16, 16), (2, 0, 8), (1, 16, 0), (1, 12, 16)], ids=lambda x: str(x)
)
def test_sizes_without_a_kernel(place, batch, n, k) -> None:
    with running_on(place) as device:
        a, add = operands(batch, n, k, torch.bfloat16, device)
        out = SYMMETRIC_MM(a, None, add, 1.0, 1.0, 1.0)
    exact = a.double() @ a.double().mT + add.double() + torch.eye(n, dtype=torch.float64, device=out.device)
    assert out.shape == exact.shape
    if exact.numel():
        check(out, exact, torch.bfloat16)


def test_tiles() -> None:
    """A tile of 128 columns leaves fewer SMs without work where one of 256 has a short last round."""
    assert symmetric_mm.tile_columns(4096, 1, 132) == 128  # 528 tiles are four rounds
    assert symmetric_mm.tile_columns(4096, 16, 132) == 256


@emulated
@pytest.mark.parametrize("columns", [128, 256])
@pytest.mark.parametrize("across", [False, True])
def test_every_tile(columns, across, monkeypatch) -> None:
    monkeypatch.setattr(symmetric_mm, "tile_columns", lambda *_: columns)
    a, add = operands(1, 520 if columns == 256 else 392, 64, torch.bfloat16, "cpu", across)
    with rtkernels.emulate("sm_90"):
        out = SYMMETRIC_MM(a, None, add, 1.0, 1.0, 0.0)
    check(out, a.double() @ a.double().mT + add.double(), torch.bfloat16)


def test_wrong_arguments() -> None:
    a, add = operands(1, 16, 8, torch.bfloat16, "cpu")
    with pytest.raises(ArgumentError, match="a has shape"):
        SYMMETRIC_MM(a[0], None, None, 1.0, 0.0, 0.0)
    with pytest.raises(ArgumentError, match="b has shape"):
        SYMMETRIC_MM(a, a[:, :8], None, 1.0, 0.0, 0.0)
    with pytest.raises(ArgumentError, match="add has shape"):
        SYMMETRIC_MM(a, None, add[:, :8], 1.0, 0.0, 0.0)


@at()
def test_not_a_number_stays_in_its_rows(place) -> None:
    with running_on(place) as device:
        a, _ = operands(1, 136, 72, torch.bfloat16, device)
        a[0, 70, 3] = float("nan")
        out = SYMMETRIC_MM(a, None, None, 1.0, 0.0, 0.0)[0]
    assert out[70].isnan().all() and out[:, 70].isnan().all()
    rest = torch.arange(136, device=out.device) != 70
    assert not out[rest][:, rest].isnan().any()


def emulated_coverage() -> None:
    for dtype in DTYPES:
        a, add = operands(1, 136, 72, dtype, "cpu")
        with rtkernels.emulate("sm_90"):
            SYMMETRIC_MM(a, None, add, 1.0, 1.0, 0.0)
