"""Normalisation to fp8: gradients, errors, torch.compile and arrays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import assert_close, assert_same_bits, running_on
from support.norm_fp8_cases import EPS, LAYER_NORM_CASES, NormFp8, layer_norm_fp8, make, rms_norm_fp8
from support.places import at, error_tests, meta_on
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.norm import norm_fp8 as module
from rtkernels.ops.norm import norm_fp8_operators as operators

# ---- gradients ------------------------------------------------------------------------------------------------------


class _Multiplied(torch.autograd.Function):
    """Simulates a product with the codes: uses them, and returns the gradient in place of y."""

    @staticmethod
    def forward(ctx, q, scale, y):
        groups = q.float().unflatten(-1, (-1, 128)) * scale[..., None]
        return groups.flatten(-2)

    @staticmethod
    def backward(ctx, grad):
        return None, None, grad.to(torch.bfloat16)


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("layout", ("row", "both"))
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("keep", (False, True))
def test_gradients_are_those_of_rms_norm(place: str, layout: str, with_residual: bool, keep: bool) -> None:
    with running_on(place) as device:
        inputs = make("residual", torch.bfloat16, device)
        leaves, ours, theirs = [inputs.x, inputs.weight, inputs.residual][: 2 + with_residual], [], []
        dy, dsum = inputs.x * 3, inputs.x * 5
        for run, grads in ((rms_norm_fp8, ours), (rtkernels.rms_norm, theirs)):
            x, weight, *rest = (t.detach().clone().requires_grad_() for t in leaves)
            residual = rest[0] if rest else None
            if run is rms_norm_fp8:
                got = run(x, weight, eps=EPS, offset=1.0, residual=residual, layout=layout, keep=keep)
                assert not any(t.requires_grad for t in got[:5] if t is not None)
                y, total = got.y, got.sum
                if keep:
                    assert_close(y, rtkernels.rms_norm(x, weight, eps=EPS, offset=1.0, residual=residual)[0].double()
                                 if with_residual else rtkernels.rms_norm(x, weight, eps=EPS, offset=1.0).double(),
                                 c=2.0)  # fmt: skip
                else:
                    assert y.isnan().all() and y.untyped_storage().nbytes() == 2
                y = _Multiplied.apply(got.q, got.scale, y)
            else:
                y, total = result if isinstance(result := run(
                    x, weight, eps=EPS, offset=1.0, residual=residual), tuple) else (result, None)  # fmt: skip
            wanted = [(y, dy.to(y.dtype)), (total, dsum)][: 1 + with_residual]
            torch.autograd.backward(*map(list, zip(*wanted, strict=True)))
            grads += [t.grad for t in (x, weight, *rest)]
        for a, b in zip(ours, theirs, strict=True):
            assert_same_bits(a, b, "gradient")


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("with_residual", (False, True))
@pytest.mark.parametrize("smooth", (False, True))
def test_gradients_are_those_of_layer_norm(place: str, with_residual: bool, smooth: bool) -> None:
    with running_on(place) as device:
        inputs = make("residual", torch.bfloat16, device, LAYER_NORM_CASES)
        leaves = [inputs.x, inputs.weight, inputs.bias, inputs.residual][: 3 + with_residual]
        more = {"smooth": torch.ones(256, device=device), "calibrate": True} if smooth else {}
        found = []
        for fp8 in (True, False):
            x, weight, bias, *rest = own = [t.detach().clone().requires_grad_() for t in leaves]
            options = {"eps": EPS, "offset": 1.0, "residual": rest[0] if rest else None}
            if fp8:
                got = layer_norm_fp8(x, weight, bias, **options, **more)
                y, total = got.y, got.sum
            else:
                result = rtkernels.layer_norm(x, weight, bias, **options)
                y, total = result if with_residual else (result, None)
            pairs = [(y, inputs.x * 3), (total, inputs.x * 5)][: 1 + with_residual]
            torch.autograd.backward(*map(list, zip(*pairs, strict=True)))
            found.append([t.grad for t in own])
        for a, b in zip(*found, strict=True):
            assert_same_bits(a, b, "gradient")


def test_only_what_is_wanted() -> None:
    x, weight = torch.randn(4, 8), torch.randn(8, requires_grad=True)
    rms_norm_fp8(x, weight).y.sum().backward()
    assert x.grad is None and weight.grad is not None
    assert rms_norm_fp8(x, weight.detach()).y is None
    with torch.no_grad():
        assert rms_norm_fp8(x, weight).y is None
    x.requires_grad_()
    residual = torch.randn(4, 8, requires_grad=True)
    rms_norm_fp8(x, weight, residual=residual).sum.sum().backward()
    assert (x.grad == 1).all() and (residual.grad == 1).all()
    rstd = torch.ones(4)
    assert not rms_norm_fp8(x, weight, layout="transposed", rstd=rstd).scale_t.requires_grad


# ---- errors ---------------------------------------------------------------------------------------------------------


X = torch.ones(4, 8)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: rms_norm_fp8(X.double()), "x has dtype float64; expected one of bfloat16, float16, float32"),
    "no dimensions": (lambda: rms_norm_fp8(torch.tensor(1.0)), "x has no dimensions; expected at least one"),
    "weight shape": (lambda: rms_norm_fp8(X, torch.ones(7)), r"weight has shape \(7,\); expected \(8,\), the last"),
    "weight dtype": (lambda: rms_norm_fp8(X, torch.ones(8).half()), "weight has dtype float16; expected one of"),
    "residual shape": (
        lambda: rms_norm_fp8(X, residual=torch.ones(4, 7)),
        r"residual has shape \(4, 7\); expected \(4, 8\), that of x",
    ),
    "residual dtype": (
        lambda: rms_norm_fp8(X, residual=X.half()),
        "residual has dtype float16; expected float32, that of x",
    ),
    "layout": (
        lambda: rms_norm_fp8(X, layout="column"),
        "layout is 'column'; expected one of 'row', 'transposed', 'both'",
    ),
    "scale layout": (
        lambda: rms_norm_fp8(X, scale_layout="both"),
        "scale_layout is 'both'; expected one of 'row', 'column'",
    ),
    "no scales of rows": (
        lambda: rms_norm_fp8(X, layout="transposed", scale_layout="column"),
        "scale_layout 'column' is for the scales of rows; layout 'transposed' has none",
    ),
    "rstd residual": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4), layout="transposed", residual=X),
        "rstd cannot be combined with residual: pass the sum",
    ),
    "rstd dtype": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4).half(), layout="transposed"),
        "rstd has dtype float16; expected one of float32",
    ),
    "rstd shape": (
        lambda: rms_norm_fp8(X, rstd=torch.ones(4, 1), layout="transposed"),
        r"rstd has shape \(4, 1\); expected \(4,\), one per row of x",
    ),
    "keep": (
        lambda: rms_norm_fp8(X, layout="transposed", keep=True),
        "keep requires layout 'row' or 'both', not 'transposed'",
    ),
    "device": (
        lambda: operators.FORWARD.check(
            meta_on(0, X), meta_on(-1, torch.ones(8)), *[None] * 4, 1e-6, 0.0, "row", False, "row", False, False
        ),
        "weight has device index -1; expected 0, that of x",
    ),
    "no codes": (lambda: rms_norm_fp8(X, layout="none"), "expected one of 'row', 'transposed', 'both'"),
    "bias shape": (lambda: layer_norm_fp8(X, None, torch.ones(7)), r"bias has shape \(7,\); expected \(8,\)"),
    "bias dtype": (
        lambda: layer_norm_fp8(X.half(), torch.ones(8).half(), torch.ones(8)),
        "bias has dtype float32; expected float16, that of weight",
    ),
    "mean alone": (lambda: layer_norm_fp8(X, mean=torch.ones(4)), "mean and rstd must be given together"),
    "rstd alone": (lambda: layer_norm_fp8(X, rstd=torch.ones(4)), "mean and rstd must be given together"),
    "smooth layout": (lambda: rms_norm_fp8(X, smooth=torch.ones(8), layout="both"), "smooth requires layout 'row'"),
    "smooth shape": (lambda: rms_norm_fp8(X, smooth=torch.ones(7)), r"smooth has shape \(7,\); expected \(8,\)"),
    "smooth dtype": (lambda: rms_norm_fp8(X, smooth=torch.ones(8).half()), "smooth has dtype float16; expected one of"),
    "calibrate": (lambda: rms_norm_fp8(X, calibrate=True), "calibrate requires smooth"),
    "not a tensor": (lambda: rms_norm_fp8([1.0, 2.0]), "expected a torch.Tensor or an array with __dlpack__"),
    "mixed kinds": (
        lambda: rms_norm_fp8(X, np.ones(8, "f4")),
        "weight is a ndarray beside a torch.Tensor; expected all array arguments to be tensors",
    ),
}

test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


# ---- other ways to call it ------------------------------------------------------------------------------------------


@at("cpu", "cuda")
@pytest.mark.parametrize("dynamic", (False, True))
def test_torch_compile(place: str, dynamic: bool) -> None:
    def block(x: Tensor, weight: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        got = rms_norm_fp8(x * 2, weight, offset=1.0, residual=residual, layout="both", keep=True)
        smooth = layer_norm_fp8(x, weight.detach(), smooth=weight.detach().abs(), calibrate=True)
        return got.y, got.sum, got.scale * 2, got.scale_t, got.q.float(), got.q_t.float(), smooth.scale, smooth.amax

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for rows in (3, 4):
        tensors = [torch.randn(*shape, device=place) for shape in ((rows, 16), (16,), (rows, 16))]
        torch.testing.assert_close(compiled(*tensors), block(*tensors))
        grads = []
        for function in (compiled, block):
            leaves = [t.clone().requires_grad_() for t in tensors]
            y, total, *_ = function(*leaves)
            (y.square().sum() + total.sum()).backward()
            grads.append([t.grad for t in leaves])
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((2, 3, 8), dtype=np.float32)
    got = rms_norm_fp8(x, np.ones(8, "f4"), residual=x)
    want = rms_norm_fp8(torch.from_numpy(x), residual=torch.from_numpy(x))
    assert isinstance(got, NormFp8) and isinstance(got.scale, np.ndarray) and got.q_t is None
    np.testing.assert_array_equal(got.scale, want.scale.numpy())
    np.testing.assert_allclose(got.sum, 2 * x)


def test_bench_rows_agree_with_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = {"x": torch.randn(256, 384, generator=generator), "weight": torch.randn(384, generator=generator)}
    scales = set()
    for row in rows_of(module.OP.name):
        given = {**inputs, "rstd": torch.rand(256, generator=generator)} if row.name.endswith("_t") else inputs
        scales.add((row.name, tuple(row.ours(**given)[1].shape)))
        for ours, theirs in zip(row.ours(**given), row.torch(**given), strict=True):
            if ours.element_size() == 1:
                assert (ours.view(torch.uint8) == theirs.view(torch.uint8)).float().mean() > 0.999
            else:
                torch.testing.assert_close(ours, theirs)
    assert scales >= {("rms_norm_fp8_both", (256, 3)), ("rms_norm_fp8_both_column", (3, 256))}
