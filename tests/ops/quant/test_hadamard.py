"""Hadamard transforms: against the matrix and bit for bit, gradients, fp8 along rows and columns, the way back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.fp8_cases import DEVICE_CODE, same_strides, wild
from support.fp8_reference import E4M3, E5M2, slow
from support.places import DTYPES, ORDERS, at, emulated, error_tests, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.quant import hadamard as module

hadamard, quantize_fp8_hadamard = rtkernels.hadamard, rtkernels.quantize_fp8_hadamard
BLOCKS = module.BLOCKS


def matrix(block: int) -> Tensor:
    """The orthonormal matrix, by its definition."""
    signs = [[(-1.0) ** bin(i & j).count("1") for j in range(block)] for i in range(block)]
    return torch.tensor(signs, dtype=torch.float64) / block**0.5


def exact(x: Tensor, block: int) -> Tensor:
    return (x.double().unflatten(-1, (-1, block)) @ matrix(block)).flatten(-2)


def staged(x: Tensor, block: int) -> np.ndarray:
    """The fp32 result in the documented order of additions, element by element of NumPy."""
    v = x.float().numpy().reshape(-1, block).copy()
    numbers, half = np.arange(block), 1
    with np.errstate(all="ignore"):
        while half < block:
            low, high = v[:, numbers & ~half], v[:, numbers | half]
            v = np.where(numbers & half, low - high, low + high).astype(np.float32)
            half *= 2
        return (v * np.float32(block**-0.5)).reshape(x.shape)


@pytest.mark.parametrize("block", BLOCKS)
@at()
def test_transform(place: str, block: int) -> None:
    for dtype in DTYPES:
        for shape in ((3, 2 * block), (5, 7, block), (block,), (70, 4 * block)):
            x = torch.randn(shape, generator=torch.Generator().manual_seed(block)).to(dtype)
            with running_on(place) as device:
                y, wide = hadamard(x.to(device), block), hadamard(x.to(device), block, dtype=torch.float32)
            np.testing.assert_array_equal(wide.cpu().numpy(), staged(x, block))
            assert_same_bits(y.cpu(), wide.cpu().to(dtype))
            size = exact(x.abs(), block).abs().amax()
            slack = 16 * ROUNDOFF[torch.float32] / ROUNDOFF[dtype]
            assert_close(y.cpu(), exact(x, block), scale=exact(x, block).abs() + slack * size, c=1.01)


@at()
def test_layouts(place: str) -> None:
    views = {
        "padded rows": torch.randn(6, 96)[:, :64],
        "misaligned": torch.randn(6 * 64 + 1)[1:].view(6, 64),
        "transposed": torch.randn(64, 6).t(),
        "no rows": torch.randn(0, 64),
        "no columns": torch.randn(3, 0),
    }
    for name, x in views.items():
        with running_on(place) as device:
            y = hadamard(same_strides(x, device), 32)
            q, scale = quantize_fp8_hadamard(same_strides(x, device), 32)
        assert y.is_contiguous() and y.shape == x.shape, name
        assert q.shape == x.shape and scale.shape == x.shape[:-1]
        if x.numel():
            np.testing.assert_array_equal(y.cpu().numpy(), staged(x.contiguous(), 32), err_msg=name)


@at("cpu", "sm_90", "cuda")
def test_gradient_and_inverse(place: str) -> None:
    with running_on(place) as device:
        x = torch.randn(4, 128, device=device, requires_grad=True)
        y = hadamard(x, 64)
        dy = torch.randn_like(y)
        y.backward(dy)
        assert_same_bits(x.grad, hadamard(dy, 64))
        torch.testing.assert_close(hadamard(y.detach(), 64), x.detach())
        half = torch.randn(4, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        hadamard(half, 32, dtype=torch.float32).sum().backward()
        assert half.grad.dtype == torch.bfloat16


# ---- fp8 ------------------------------------------------------------------------------------------------------------


def same(got: tuple[Tensor, Tensor], z: np.ndarray, dtype: torch.dtype, pow2: bool, what: str) -> None:
    codes, scales = slow(torch.from_numpy(z), "row", "row", dtype, pow2)
    np.testing.assert_array_equal(got[0].cpu().view(torch.uint8).numpy(), codes, err_msg=what)
    np.testing.assert_array_equal(got[1].cpu().numpy(), scales, err_msg=what)


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@at()
def test_codes(place: str, dtype: torch.dtype) -> None:
    for i, block in enumerate(BLOCKS):
        for rows, cols in ((5, block), (9, 3 * block), (40, 768)):
            x, code, pow2 = wild(rows, cols, dtype, seed=cols), (E4M3, E5M2)[i % 2], i > 1
            with running_on(place) as device:
                got = quantize_fp8_hadamard(x.to(device), block, dtype=code, pow2_scale=pow2)
            same(got, staged(x, block), code, pow2, f"{block}, {rows}x{cols}")


@at(*DEVICE_CODE)
def test_long_rows(place: str) -> None:
    for cols in (8192, 16384, 16640):
        x = wild(2, cols, torch.bfloat16)
        with running_on(place) as device:
            got = quantize_fp8_hadamard(x.to(device), 256)
        same(got, staged(x, 256), E4M3, False, f"{cols}")


@at("cpu", *DEVICE_CODE)
def test_transposed_codes(place: str) -> None:
    for rows, cols in ((64, 48), (70, 33)):
        x = wild(rows, cols, torch.bfloat16)
        with running_on(place) as device:
            got = quantize_fp8_hadamard(x.to(device), 64, transposed=True)
        z = torch.nn.functional.pad(x, (0, 0, 0, -rows % 64)).t().contiguous()
        same(got, staged(z, 64), E4M3, False, f"{rows}x{cols}")


@at()
@pytest.mark.parametrize("shape", ((64, 64), (70, 128), (1, 64), (0, 64)), ids=str)
def test_both_sides_from_one_call(shape: tuple[int, int], place: str) -> None:
    x = wild(*shape, torch.bfloat16)
    with running_on(place) as device:
        x = x.to(device)
        options = {"dtype": E5M2, "pow2_scale": True} if shape[0] == 70 else {}
        both = quantize_fp8_hadamard(x, 64, layout="both", **options)
        along, down = (quantize_fp8_hadamard(x, 64, transposed=side, **options) for side in (False, True))
        out = tuple(torch.empty_like(t) for t in both)
        given = quantize_fp8_hadamard(x, 64, layout="both", out=out, **options)
        for got, again, memory, want in zip(both, given, out, (*along, *down), strict=True):
            assert again is memory
            assert_same_bits(got, want)
            assert_same_bits(memory, want)
        assert both.q_t is both[2] and both.scale_t.shape == (64 * (shape[1] // 64),)


def test_the_recipe_for_a_matrix_of_the_caller() -> None:
    x, generator = torch.randn(5, 96).bfloat16(), torch.Generator().manual_seed(2)
    h = torch.linalg.qr(torch.randn(32, 32, generator=generator))[0]
    q, scale = rtkernels.quantize_fp8((x.float().unflatten(-1, (-1, 32)) @ h).flatten(-2), granularity="row")
    back = (q.float() * scale[:, None]).unflatten(-1, (-1, 32)) @ h.t()
    assert (back.flatten(-2) - x.float()).norm() < 0.04 * x.float().norm()
    signs = torch.randint(2, (96,), generator=generator).float() * 2 - 1
    q, scale = quantize_fp8_hadamard(x.float() * signs, 32)
    signed = torch.diag(signs[:32]) @ matrix(32).float()
    want = x[:, :32].float() @ signed
    assert ((q.float() * scale[:, None])[:, :32] - want).norm() < 0.04 * want.norm()


@at("cpu", *DEVICE_CODE)
@pytest.mark.parametrize("transposed", (False, True))
def test_there_and_back(place: str, transposed: bool) -> None:
    x = torch.randn(70, 128, generator=torch.Generator().manual_seed(1))
    with running_on(place) as device:
        q, scale = quantize_fp8_hadamard(x.to(device), 64, transposed=transposed)
        rows = 70 if transposed else None
        y = rtkernels.dequantize_fp8_hadamard(q, scale, 64, transposed=transposed, rows=rows, dtype=torch.float32)
    assert y.shape == x.shape and (y.cpu() - x).norm() < 0.04 * x.norm()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int) -> None:
    x = wild(9, 768, torch.bfloat16)
    with rtkernels.emulate("sm_90", order=order):
        np.testing.assert_array_equal(hadamard(x, 256, dtype=torch.float32).numpy(), staged(x, 256))
        same(quantize_fp8_hadamard(x, 256), staged(x, 256), E4M3, False, "codes")


# ---- errors, other ways to call it ----------------------------------------------------------------------------------

X = torch.ones(4, 64)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: hadamard(X.double()), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "block": (lambda: hadamard(X, 48), "block is 48; expected one of 32, 64, 128, 256"),
    "columns": (lambda: hadamard(X, 128), "x has 64 columns; expected a multiple of the block, 128"),
    "no dimensions": (lambda: hadamard(X[0, 0], 32), "x has no dimensions; expected at least one"),
    "result": (
        lambda: hadamard(X.bfloat16(), 32, dtype=torch.float16),
        "the result has dtype float16; expected one of bfloat16, float32",
    ),
    "codes": (
        lambda: quantize_fp8_hadamard(X, 32, dtype=torch.float16),
        "the result has dtype float16; expected one of",
    ),
    "transposed": (
        lambda: quantize_fp8_hadamard(X[None], 32, transposed=True),
        r"x has shape \(1, 4, 64\); transposed codes require two dimensions",
    ),
    "both": (
        lambda: quantize_fp8_hadamard(X[None], 32, layout="both"),
        r"x has shape \(1, 4, 64\); transposed codes require two dimensions",
    ),
    "both, transposed": (
        lambda: quantize_fp8_hadamard(X, 32, transposed=True, layout="both"),
        "transposed is True; expected False with layout 'both'",
    ),
    "layout": (lambda: quantize_fp8_hadamard(X, 32, layout="column"), "layout is 'column'; expected one of 'row', 'b"),
    "transposed block": (lambda: quantize_fp8_hadamard(X, 48, transposed=True), "block is 48; expected one of"),
    "not a tensor": (lambda: hadamard([1.0]), "expected a torch.Tensor or an array with __dlpack__"),
}


test_errors, test_launchers_raise_the_same_messages = error_tests(BAD)


@at("cpu", "cuda")
def test_torch_compile(place: str) -> None:
    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor) -> tuple[Tensor, ...]:
        return hadamard(x * 2, 32), *quantize_fp8_hadamard(x, 32, transposed=True)

    x = torch.randn(32, 64, device=place, requires_grad=True)
    y, q, scale = run(x)
    torch.testing.assert_close(y, hadamard(x * 2, 32))
    assert_same_bits(q, quantize_fp8_hadamard(x, 32, transposed=True)[0])
    y.sum().backward()
    assert not q.requires_grad and not scale.requires_grad and x.grad is not None


def test_numpy_in_numpy_out() -> None:
    x = np.ones((2, 32), np.float32)
    np.testing.assert_array_equal(hadamard(x, 32)[:, 1:], 0)


def test_bench_rows_agree_with_torch() -> None:
    x = torch.randn(4, 512).bfloat16()
    for row in rows_of(module.OP.name):
        got, want = row.ours(x=x), row.torch(x=x)
        for a, b in zip(*((t,) if isinstance(t, Tensor) else t for t in (got, want)), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0.07, atol=1e-6)


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; test_registry.py checks that it does."""
    with rtkernels.emulate("sm_90"):
        hadamard(X, 32)
        quantize_fp8_hadamard(X, 32)


@pytest.mark.gpu
def test_graph_capture() -> None:
    x = torch.randn(64, 512, device="cuda")

    def run() -> tuple[Tensor, ...]:
        return hadamard(x, 64), *quantize_fp8_hadamard(x, 64, transposed=True)

    replay = captured(run)
    x.copy_(torch.randn_like(x))
    assert_equal_bits(replay(), run())


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31() -> None:
    x = torch.zeros(2**16 + 1, 2**15, dtype=torch.bfloat16, device="cuda")
    x[-1] = torch.randn(2**15).bfloat16().cuda()
    np.testing.assert_array_equal(hadamard(x, 64)[-1].cpu().float().numpy(), hadamard(x[-1].cpu(), 64).float().numpy())
