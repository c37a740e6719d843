"""Arrays of other libraries in, the same kind out."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rtkernels
from rtkernels import interop
from rtkernels.errors import ArgumentError


def test_numpy_shares_memory() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert interop.to_torch(x).data_ptr() == x.ctypes.data
    tensor = torch.ones(3)
    assert interop.from_torch(tensor, "numpy").ctypes.data == tensor.data_ptr()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2), ids=str)
def test_types_numpy_lacks_cross_as_bits(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    tensor = torch.tensor([1.0, -2.0, 0.5]).to(dtype)
    bits = interop.from_torch(tensor, "numpy")
    assert bits.dtype == np.dtype(f"uint{8 * dtype.itemsize}")
    assert torch.equal(torch.from_numpy(bits).view(dtype).float(), tensor.float())


def test_ml_dtypes_round_trip() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.ones((2, 8), ml_dtypes.bfloat16)
    y = rtkernels.rms_norm(x)
    assert y.dtype == ml_dtypes.bfloat16 and (y.astype(np.float32) == 1).all()


def test_other_values_pass_through() -> None:
    x = np.ones((2, 4), np.float32)
    assert isinstance(rtkernels.rms_norm(x, eps=1e-3, offset=1.0), np.ndarray)


def test_not_an_array() -> None:
    with pytest.raises(ArgumentError, match=r"x is a list; expected a torch\.Tensor or an array"):
        rtkernels.rms_norm([1.0])


def test_arrays_that_run_backwards() -> None:
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ArgumentError, match=r"x has strides .* expected none below 0"):
        rtkernels.rms_norm(x[::-1])
    with pytest.raises(ArgumentError, match=r"weight has strides .* expected none below 0"):
        rtkernels.rms_norm(x, x[0, ::-1])


def test_arrays_that_torch_does_not_take() -> None:
    x = np.ones((2, 4), np.float32)
    with pytest.raises(ArgumentError, match=r"x is a numpy\.ndarray that torch\.from_dlpack does not take"):
        rtkernels.rms_norm(x.astype(object))
    with pytest.raises(ArgumentError, match=r"weight is a numpy\.ndarray that torch\.from_dlpack does not take"):
        rtkernels.rms_norm(x, np.array(["a"] * 4))


def test_the_argument_that_is_no_tensor_is_named() -> None:
    """Also where an option has the same value as what came in the place of a tensor."""
    x = torch.ones(2, 3, 2, 8)
    with pytest.raises(ArgumentError, match=r"^up is a str"):
        rtkernels.glu(x, "silu", act="silu")
    with pytest.raises(ArgumentError, match=r"^cos is a int, sin is a int"):
        rtkernels.rope(x, 1, 1)


def test_mixed_libraries() -> None:
    with pytest.raises(ArgumentError, match="arrays of different libraries in one call"):
        rtkernels.rms_norm(np.ones((2, 4), np.float32), torch.ones(4))


def test_unknown_library_gets_a_message() -> None:
    with pytest.raises(ArgumentError, match="results cannot be handed back as arrays of 'mystery'"):
        interop.from_torch(torch.ones(2), "mystery")


@pytest.mark.gpu
def test_cupy_in_cupy_out() -> None:
    import cupy

    x = cupy.random.standard_normal((64, 256), dtype=cupy.float32)
    with cupy.cuda.Stream(non_blocking=True):
        y = rtkernels.rms_norm(x * 2, cupy.ones(256, cupy.float32))
        assert isinstance(y, cupy.ndarray)
        wanted = x * 2 / cupy.sqrt(cupy.mean((x * 2) ** 2, axis=-1, keepdims=True) + 1e-6)
        cupy.testing.assert_allclose(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_jax_in_jax_out() -> None:
    import os

    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    jax = pytest.importorskip("jax")
    x = jax.random.normal(jax.random.key(0), (64, 256), dtype="bfloat16")
    y = rtkernels.glu(x)
    assert isinstance(y, jax.Array) and y.shape == (64, 128) and str(y.dtype) == "bfloat16"
    gate, up = x[:, :128].astype("float32"), x[:, 128:].astype("float32")
    assert abs(y.astype("float32") - gate * jax.nn.sigmoid(gate) * up).max() < 0.05
