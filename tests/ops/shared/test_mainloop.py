"""Scheduler, pipeline, main loop and epilogue together: a persistent matrix product of the shared parts alone."""

from __future__ import annotations

import pytest
import torch
from support import device_probe
from support.compare import running_on
from support.places import at, emulated

import rtkernels
from rtkernels.runtime.layout import DTYPE_TOKEN

CASES = {"bf16_whole_depth": (torch.bfloat16, 4, False), "fp16_promoted": (torch.float16, 3, True)}
HALF_ULP = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def product(
    case: str, rows: int, columns: int, depth: int, *, grid: int = 1, promote: int = 1, device: str = "cpu"
) -> None:
    """Multiply random matrices and compare with fp64."""
    dtype, stages, promotes = CASES[case]
    token = DTYPE_TOKEN[dtype]
    torch.manual_seed(0)
    a, b = (torch.randn(n, -(-depth // 8) * 8).to(dtype).to(device) for n in (rows, columns))
    scale, bias = torch.rand(columns, device=device) + 0.5, torch.randn(columns, device=device)
    out = torch.full((rows, -(-columns // 8) * 8), 7.0, dtype=dtype, device=device)
    device_probe.launch(
        device_probe.MAINLOOP, (token, stages, promotes), out.device, grid, 384,
        lambda: device_probe.matrix_map(a.data_ptr(), token, rows, depth, a.shape[1], 128, 64),
        lambda: device_probe.matrix_map(b.data_ptr(), token, columns, depth, b.shape[1], 128, 64),
        lambda: device_probe.matrix_map(out.data_ptr(), token, rows, columns, out.shape[1], 64, 64),
        scale, bias, rows, columns, depth, promote, shared=1024 + stages * 32768 + 2 * 16384 + 16 * stages,
    )  # fmt: skip
    left, right, got = a[:, :depth].double(), b[:, :depth].double(), out.double()
    expected = left @ right.T * scale.double() + bias.double()
    magnitude = left.abs() @ right.abs().T * scale.double() + bias.double().abs()
    assert (got[:, columns:] == 7).all()
    error = (got[:, :columns] - expected).abs()
    assert (error <= HALF_ULP[dtype] * expected.abs() + 2.0**-17 * magnitude).all()


@at("sm_90", "cuda")
@pytest.mark.parametrize("case", CASES)
def test_products(place: str, case: str) -> None:
    with running_on(place) as device:
        for rows, columns, depth, grid, promote in ((1, 8, 1, 1, 1), (131, 136, 200, 2, 2), (70, 264, 328, 1, 4)):
            product(case, rows, columns, depth, grid=grid, promote=promote, device=device)


@emulated
@pytest.mark.parametrize("case", CASES)
def test_in_every_order(case: str) -> None:
    for order in ("reverse", 1):
        with rtkernels.emulate("sm_90", order=order):
            product(case, 20, 150, 330)
