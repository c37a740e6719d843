"""Functions inside of ``jax.jit``, on the CPU and on a GPU: results and gradients against torch."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch

import rtkernels
from rtkernels.errors import ArgumentError

jax = pytest.importorskip("jax")
jnp = jax.numpy
rj = pytest.importorskip("rtkernels.jax")


def _array(*shape: int, dtype: str = "float32", seed: int = 0) -> Any:
    return jnp.asarray(numpy.random.default_rng(seed).standard_normal(shape), dtype=dtype)


def _torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(numpy.array(array, dtype=numpy.float32)).to(getattr(torch, str(array.dtype)))


def _same(array: Any, tensor: torch.Tensor) -> None:
    assert tuple(array.shape) == tuple(tensor.shape) and str(array.dtype) == str(tensor.dtype).removeprefix("torch.")
    numpy.testing.assert_allclose(numpy.asarray(array, numpy.float32), tensor.float().numpy(), rtol=1e-6, atol=1e-6)


def test_functions_under_jit() -> None:
    x, w = _array(5, 64, dtype="bfloat16"), _array(64, dtype="bfloat16", seed=1)
    cos, sin = _array(5, 8, seed=2), _array(5, 8, seed=3)
    heads = _array(1, 5, 2, 16, seed=4)
    t = _torch
    for result, wanted in (
        (jax.jit(lambda a, b: rj.rms_norm(a, b, eps=1e-5) * 2)(x, w), rtkernels.rms_norm(t(x), t(w), eps=1e-5) * 2),
        (jax.jit(rj.layer_norm)(x, w, w), rtkernels.layer_norm(t(x), t(w), t(w))),
        (jax.jit(lambda a: rj.layer_norm(a, None, w))(x), rtkernels.layer_norm(t(x), None, t(w))),
        (jax.jit(lambda a: rj.glu(a, act="gelu_tanh"))(x), rtkernels.glu(t(x), act="gelu_tanh")),
        (jax.jit(rj.rope)(heads, cos, sin), rtkernels.rope(t(heads), t(cos), t(sin))),
        (jax.jit(rj.softmax)(x), rtkernels.softmax(t(x))),
    ):
        _same(result, wanted)
    q, scale = jax.jit(lambda a: rj.quantize_fp8(a, granularity="row"))(x)
    wanted = rtkernels.quantize_fp8(t(x), granularity="row")
    _same(q, wanted[0])
    _same(scale, wanted[1])
    _same(
        jax.jit(lambda a, s: rj.dequantize_fp8(a, s, granularity="row"))(q, scale),
        t(x).float().bfloat16() * 0 + rtkernels.dequantize_fp8(*wanted, granularity="row"),
    )


def test_one_registration_for_equal_calls() -> None:
    x = _array(3, 16)
    function = jax.jit(lambda a: rj.softmax(a))
    function(x)
    count = len(rj._targets)
    for i in range(4):
        _same(function(x + i), rtkernels.softmax(_torch(x + i)))
    jax.jit(lambda a: rj.softmax(a) + 1)(x)
    assert len(rj._targets) == count


def test_gradients() -> None:
    x, w = _array(4, 32), _array(32, seed=1)
    dx, dw = jax.jit(jax.grad(lambda a, b: (rj.rms_norm(a, b) ** 2).sum(), (0, 1)))(x, w)
    tx, tw = _torch(x).requires_grad_(), _torch(w).requires_grad_()
    (rtkernels.rms_norm(tx, tw) ** 2).sum().backward()
    _same(dx, tx.grad)
    _same(dw, tw.grad)
    gate = jax.grad(lambda a: rj.glu(a).sum())(x)
    tx.grad = None
    rtkernels.glu(tx).sum().backward()
    _same(gate, tx.grad)


def test_fp8_product() -> None:
    x, w = _array(6, 64, dtype="bfloat16"), _array(32, 64, dtype="bfloat16", seed=1)
    codes, scale = rj.quantize_fp8(w)
    scale_x = jnp.float32(4 / 448)
    y, pull = jax.vjp(jax.jit(rj.fp8_gemm), x, w, codes, scale_x, scale)
    exact = numpy.asarray(x, numpy.float32) @ numpy.asarray(w, numpy.float32).T
    assert (
        y.dtype == jnp.bfloat16
        and numpy.abs(numpy.asarray(y, numpy.float32) - exact).max() < 0.08 * numpy.abs(exact).max()
    )
    dx, dw, *rest = pull(jnp.ones_like(y))
    numpy.testing.assert_allclose(dx.astype(jnp.float32)[0], w.astype(jnp.float32).sum(0), rtol=0.02, atol=0.05)
    numpy.testing.assert_allclose(dw.astype(jnp.float32)[0], x.astype(jnp.float32).sum(0), rtol=0.02, atol=0.05)
    assert all(not jnp.any(r.astype(jnp.float32)) for r in rest)
    _same(jax.jit(rj.quantize_fp8_static)(x, scale_x), rtkernels.quantize_fp8(_torch(x), torch.tensor(4 / 448))[0])


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "uint8"])
def test_fp8_weights_by_rows_of_k(kind: str) -> None:
    x, w = _array(2, 3, 64, dtype="bfloat16"), _array(64, 32, dtype="bfloat16", seed=1)
    codes, scale = rj.quantize_fp8(w)
    codes = jax.lax.bitcast_convert_type(codes, kind) if kind == "uint8" else codes
    scale_x = jnp.float32(4 / 448)
    function = jax.jit(lambda *arrays: rj.fp8_gemm(*arrays, "kn"))
    y, pull = jax.vjp(function, x, w, codes, scale_x, scale)
    other = rj.fp8_gemm(x, w.T, rj.quantize_fp8(w.T)[0], scale_x, scale)
    assert y.shape == (2, 3, 32) and jnp.array_equal(y, other)
    dx, dw, *_ = pull(jnp.ones_like(y))
    assert dx.shape == x.shape and dw.shape == w.shape
    numpy.testing.assert_allclose(dx.astype(jnp.float32)[0, 0], w.astype(jnp.float32).sum(1), rtol=0.02, atol=0.05)
    numpy.testing.assert_allclose(dw.astype(jnp.float32)[:, 0], x.astype(jnp.float32).sum((0, 1)), rtol=0.02, atol=0.05)
    with pytest.raises(ArgumentError, match="layout is 'mn'"):
        rj.fp8_gemm(x, w, codes, scale_x, scale, "mn")


def test_own_functions_empty_arrays_and_errors() -> None:
    def shifted(a: torch.Tensor, b: torch.Tensor, by: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        return a + b + by, (a * b).t()

    x = _array(3, 4)
    total, product = jax.jit(lambda a: rj.as_jax(shifted)(a, a, by=1.0))(x)
    _same(total, 2 * _torch(x) + 1)
    _same(product, (_torch(x) ** 2).t())
    assert jax.jit(rj.softmax)(jnp.zeros((0, 4))).shape == (0, 4)
    with pytest.raises(Exception, match="ArgumentError: weight has shape"):  # raised by the handler, as an error of XLA
        jax.jit(rj.rms_norm)(x, _array(5))
    with pytest.raises(ArgumentError, match="dtype complex64"):
        rj.softmax(jnp.zeros(3, jnp.complex64))

    def failing(a: torch.Tensor) -> torch.Tensor:
        if not isinstance(a, torch._subclasses.FakeTensor):
            raise ValueError("not today")
        return a * 1

    with pytest.raises(Exception, match="ValueError: not today"):
        jax.block_until_ready(jax.jit(rj.as_jax(failing))(x))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    if not [d for d in jax.devices() if d.platform == "gpu"]:
        pytest.skip("this jax has no GPU")
    x, w = _array(1024, 2048, dtype="bfloat16"), _array(2048, dtype="bfloat16", seed=1)
    result = jax.jit(lambda a, b: rj.rms_norm(a, b) * 1)(x, w)
    wanted = rtkernels.rms_norm(_torch(x).cuda(), _torch(w).cuda()).cpu()
    _same(result, wanted)
