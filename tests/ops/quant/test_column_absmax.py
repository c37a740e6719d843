"""Largest magnitudes of columns: the bits of a plain maximum at every layout."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.fp8_cases import DEVICE_CODE, VIEWS, same_strides, wild
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.quant import column_absmax as module

column_absmax = rtkernels.column_absmax
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def slow(x: Tensor, row: Tensor | None = None, column: Tensor | None = None) -> Tensor:
    """The definition, in NumPy and on the CPU."""
    if x.numel() == 0:
        return torch.zeros(x.shape[-1])
    z = x.float().reshape(-1, x.shape[-1]).numpy()
    with np.errstate(all="ignore"):
        if column is not None:
            z = z * column.numpy()
        if row is not None:
            z = z * row.numpy()[:, None]
    return torch.from_numpy(np.where(np.isfinite(z), np.abs(z), np.float32(0)).max(0))


def factors(x: Tensor) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(1)
    return torch.rand(x.shape[:-1].numel(), generator=g), torch.rand(x.shape[-1], generator=g) * 3


@pytest.mark.parametrize("dtype", (*DTYPES, *FP8), ids=short)
@at()
def test_every_layout(place: str, dtype: torch.dtype) -> None:
    for name, view in VIEWS.items():
        if dtype in FP8 and name != "misaligned" and "x" not in name:
            continue
        x = view(torch.float32 if dtype in FP8 else dtype)
        x = x.nan_to_num(0.0, 300.0, -300.0).clamp(-400, 400).to(dtype) if dtype in FP8 else x
        row, column = factors(x)
        with running_on(place) as device:
            moved = same_strides(x, device)
            plain = column_absmax(moved)
            both = column_absmax(moved, row_factor=row.to(device), column_factor=column.to(device))
            one = column_absmax(moved, row_factor=row.to(device))
        assert_same_bits(plain.cpu(), slow(x), name)
        assert_same_bits(both.cpu(), slow(x, row, column), f"{name}, factors")
        assert_same_bits(one.cpu(), slow(x, row), f"{name}, row factor")


@at(*DEVICE_CODE)
def test_many_rows(place: str) -> None:
    x = wild(700, 264, torch.bfloat16).view(7, 100, 264)
    with running_on(place) as device:
        assert_same_bits(column_absmax(x.to(device)).cpu(), slow(x))


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    x = wild(300, 264, torch.bfloat16)
    with rtkernels.emulate("sm_90", order=order):
        assert_same_bits(column_absmax(x), slow(x))


X = torch.ones(4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: column_absmax(X.double()), "x has dtype float64; expected one of"),
    "no dimensions": (lambda: column_absmax(X[0, 0]), "x has no dimensions; expected at least one"),
    "row": (
        lambda: column_absmax(X, row_factor=X[0]),
        r"row_factor has shape \(8,\); expected \(4,\), one per row of x",
    ),
    "column": (lambda: column_absmax(X, column_factor=X[:, 0]), r"column_factor has shape \(4,\); expected \(8,\)"),
    "factor dtype": (lambda: column_absmax(X, column_factor=X[0].half()), "column_factor has dtype float16"),
    "not a tensor": (lambda: column_absmax([1.0]), "expected a torch.Tensor or an array with __dlpack__"),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    compiled = torch.compile(lambda x: column_absmax(x * 2), fullgraph=True, backend="aot_eager")
    x = torch.randn(4, 8, device=place, requires_grad=True)
    got = compiled(x)
    assert not got.requires_grad
    torch.testing.assert_close(got, (2 * x.detach()).abs().amax(0))


def test_numpy_in_numpy_out() -> None:
    np.testing.assert_array_equal(column_absmax(np.float32([[1, -3], [2, 0]])), [2, 3])


def test_bench_rows_agree_with_torch() -> None:
    (row,) = rows_of(module.OP.name)
    x = torch.randn(4, 32)
    torch.testing.assert_close(row.ours(x=x), row.torch(x=x))


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        column_absmax(torch.ones(200, 8))  # in parts, and their maxima


@pytest.mark.gpu
def test_graph_capture() -> None:
    x = torch.randn(640, 128, device="cuda")
    replay = captured(lambda: column_absmax(x))
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), column_absmax(x))


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    x = torch.ones(2**16 + 1, 2**15, device="cuda", dtype=torch.bfloat16)
    x[-1, -1] = -3.0
    got = column_absmax(x)
    assert (got[:-1] == 1).all() and got[-1] == 3
