"""Products in plain torch: operands times scales in fp32, one product, the rest in fp32, rounded once.

Exact for integers. Runs anywhere; tests ask for fp64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rtkernels.ops.gemm.checks import Operand
from rtkernels.ops.gemm.product import BYTES, INTEGERS, Product, Scales
from rtkernels.ops.quant import pack

# ---- operands -------------------------------------------------------------------------------------------------------


def values(t: Tensor, operand: Operand, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an operand (of one group) as numbers ``[rows, k]``, without its scales."""
    token = operand.matrix.token
    t = pack.as_bytes(t) if BYTES[token] < 1 else t
    t = t.transpose(-2, -1) if operand.flipped else t
    t = pack.nibble_values(t, token, dtype) if BYTES[token] < 1 else t.to(dtype)
    return t.reshape(operand.rows, operand.k)


def scale_grid(t: Tensor, scales: Scales, rows: int, k: int, groups: int = 0) -> Tensor:
    """Return scales as fp32 ``[..., rows or 1, k or 1]``, one for each element or to be broadcast."""
    count = -(-rows // scales.rows) if scales.rows else 1
    blocks = -(-k // scales.depth) if scales.depth else 1
    if scales.swizzled:
        parts = t.reshape(max(groups, 1), -1)
        grid = torch.stack([pack.unswizzle_scales(part, count, blocks) for part in parts])
        grid = grid if groups else grid[0]
    else:
        raw = t.view(torch.uint8) if t.dtype.itemsize == 1 else t
        shape, stride = (count, blocks), (scales.row_pitch, scales.depth_pitch)
        if groups:
            shape, stride = (groups, *shape), (scales.group_pitch, *stride)
        grid = raw.as_strided(shape, stride, raw.storage_offset())
    if scales.token == "e8m0":
        grid = pack.e8m0_values(grid)
    elif scales.token == "ue4m3":
        grid = pack.e4m3_values(grid)
    if scales.rows > 1:
        grid = grid.repeat_interleave(scales.rows, -2)[..., :rows, :]
    if scales.depth > 1:
        grid = grid.repeat_interleave(scales.depth, -1)[..., :k]
    return grid


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None, exact: bool, dtype: torch.dtype
) -> Tensor:
    """Return ``a @ b.T`` of ``[.., m, k]`` and ``[.., n, k]`` with scales as ``scale_grid`` gives them.

    Scales of whole rows multiply the sums; if one varies along k, both multiply the operands.
    """
    along_k = any(scale is not None and scale.shape[-1] != 1 for scale in (scale_a, scale_b))
    if along_k:
        a = a if scale_a is None else a.to(dtype) * scale_a.to(dtype)
        b = b if scale_b is None else b.to(dtype) * scale_b.to(dtype)
        return a.to(dtype) @ b.to(dtype).transpose(-2, -1)
    if exact:  # sums of integers, which fp64 holds
        sums = a.double() @ b.double().transpose(-2, -1)
        if scale_a is None and scale_b is None:
            return sums
        sums = sums.to(dtype)
    else:
        sums = a.to(dtype) @ b.to(dtype).transpose(-2, -1)
    if scale_b is not None:
        sums = sums * scale_b.to(dtype).transpose(-2, -1)
    return sums if scale_a is None else sums * scale_a.to(dtype)


# ---- behind the sums ------------------------------------------------------------------------------------------------


def activated(x: Tensor, act: str | None) -> Tensor:
    """Return the activation of each element."""
    if act == "relu":
        return F.relu(x)
    if act == "silu":
        return F.silu(x)
    if act in ("gelu", "gelu_tanh"):
        return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")
    return x


def product(
    p: Product, left: Operand, right: Operand, a: Tensor, b: Tensor, scale_a: Tensor | None, scale_b: Tensor | None,
    global_scale: Tensor | None, bias: Tensor | None, add: Tensor | None, dtype: torch.dtype = torch.float32,
) -> Tensor:  # fmt: skip
    """Return a product without groups, ``[m, n]`` in `dtype` (fp64 for sums of integers), not rounded yet."""
    exact = left.matrix.token in INTEGERS and right.matrix.token in INTEGERS
    sums = multiply(
        values(a, left, dtype), values(b, right, dtype),
        None if scale_a is None else scale_grid(scale_a, p.scale_a, left.rows, left.k),
        None if scale_b is None else scale_grid(scale_b, p.scale_b, right.rows, right.k),
        exact, dtype,
    )  # fmt: skip
    if p.gate is not None:
        factors = (1, 1) if global_scale is None else global_scale.to(dtype).expand(2)
        gate, up = sums[:, : p.n] * factors[0], sums[:, p.n :] * factors[1]
        if bias is not None:
            gate, up = gate + bias[: p.n].to(dtype), up + bias[p.n :].to(dtype)
        return activated(gate, p.gate) * up
    if global_scale is not None:
        sums = sums * global_scale.to(dtype)
    if bias is not None:
        sums = sums + bias.to(dtype)
    if add is not None:
        sums = sums + add.reshape(p.m, p.n).to(dtype)
    return activated(sums, p.act)


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a result in its dtype; int32 ones never leave the range."""
    if dtype == torch.int32:
        x = x.clamp(-(2**31), 2**31 - 1)
    return x.to(dtype)
