"""The column sum behind weight gradients, run by itself on the host and on the GPU."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_close, assert_same_bits
from support.places import emulated

import rtkernels
from rtkernels import emulator
from rtkernels.ops.shared import column_sum as module

SHAPES = ((1, 1), (3, 31), (132, 64), (17, 100), (300, 33))
MANY = (40, 16386)  # columns, so that a lane has two on any GPU


@emulated
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("order", ("forward", "reverse", 3))
def test_one_kernel_on_the_host(shape: tuple[int, int], order: str | int) -> None:
    rows, cols = shape
    partial = torch.randn(rows, cols)
    for pairs in (0, 1) if cols % 2 == 0 else (0,):
        out = torch.full((cols,), torch.nan)
        with rtkernels.emulate("sm_90", order):
            run = emulator.on_host(module._KERNEL, ("fp32",))
            run(-(-cols // (32 << pairs)), 256, [partial, out, rows, cols, pairs], 1024 << pairs)
        assert_close(out, partial.double().sum(0), scale=partial.double().abs().sum(0), c=4.0)


@emulated
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
@pytest.mark.parametrize("shape", (*SHAPES[:4], MANY), ids=str)
def test_as_a_function_on_the_host(shape: tuple[int, int], dtype: torch.dtype) -> None:
    partial = torch.randn(*shape)
    with rtkernels.emulate("sm_90"):
        out = module.column_sum(partial, dtype)
    assert_close(out, partial.double().sum(0), scale=partial.double().abs().sum(0), c=4.0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("shape", (*SHAPES, MANY), ids=str)
def test_on_the_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    partial = torch.randn(*shape, device="cuda")
    out = module.column_sum(partial, dtype)
    assert_close(out, partial.double().sum(0), scale=partial.double().abs().sum(0), c=4.0)
    assert_same_bits(out, module.column_sum(partial, dtype))
