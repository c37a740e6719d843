"""Products by torch's own calls: ``backend="torch"``."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from support.compare import assert_close

import rtkernels
from rtkernels import scaled_mm
from rtkernels.compat import gn
from rtkernels.errors import ArgumentError, UnsupportedDeviceError


def test_torch_backend() -> None:
    a, b = torch.randn(4, 6, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    bias, out = torch.randn(16).bfloat16(), torch.ones(4, 6, 16)
    wanted = F.relu(a.double() @ b.double().t() + bias.double())
    got = scaled_mm(a, b, bias=bias, act="relu", backend="torch")
    assert_close(got, wanted, c=4, scale=wanted.abs() + 20)
    scaled_mm(a, b, out=out, accumulate=True, backend="torch")
    torch.testing.assert_close(out, (a.float() @ b.float().t() + 1), rtol=2e-2, atol=2e-1)
    i, j = torch.randint(-9, 9, (32, 32), dtype=torch.int8), torch.randint(-9, 9, (16, 32), dtype=torch.int8)
    assert torch.equal(scaled_mm(i, j, backend="torch"), scaled_mm(i, j))
    with pytest.raises(ArgumentError, match="backend is 'torch', which has no product of int4 and int4"):
        scaled_mm(i, j, packed="int4", backend="torch")
    with pytest.raises(ArgumentError, match="expected 'auto' for quant_out and global_scale"):
        scaled_mm(a, b, quant_out="row", backend="torch")


def test_scales_of_floats() -> None:
    a, b = torch.randn(4, 6, 32).bfloat16(), torch.randn(16, 32).bfloat16()
    exact = a.double() @ b.double().t()
    sa, sb = torch.rand(4, 6) + 0.5, torch.rand(16) + 0.5
    for dtype in (torch.float32, torch.bfloat16):
        left, right = a.to(dtype), b.to(dtype)
        wanted = exact * sa.double()[..., None] * sb.double()
        got = scaled_mm(left, right, sa, sb, recipe="row", out_dtype=torch.float32, backend="torch")
        torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
        got = scaled_mm(left, right.t(), 0.5, b_layout="kn", out_dtype=torch.float32, backend="torch")
        torch.testing.assert_close(got.double(), 0.5 * exact, rtol=1e-5, atol=1e-5)
    with rtkernels.emulate("sm_90"), pytest.raises(UnsupportedDeviceError, match=r"torch has one: scaled_mm\(backend="):
        scaled_mm(a.float(), b.float())
    with pytest.raises(ArgumentError, match="expected scales of the tensor or of rows"):
        scaled_mm(a, b, torch.rand(4, 6, 2), recipe="tile", backend="torch")
    wanted = exact[0] * sa[0].double()[:, None] * sb.double()
    got = gn.mm(a[0].float(), b.float().t(), sa[0][:, None], sb[None])
    torch.testing.assert_close(got.double(), wanted, rtol=1e-5, atol=1e-5)
