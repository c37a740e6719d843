"""Products of 16-bit matrices, with and without what is added (family ``gemm``)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from rtkernels.aten.table import DTYPE, EMPTY, OPTION, NotHandled, Overload

_HALVES = (torch.bfloat16, torch.float16)


@cache
def _forward() -> Any:  # imported by the first call: `enable` is to be quick
    from rtkernels.ops.gemm.scaled_mm import FORWARD

    return FORWARD


def _product(a: Tensor, b: Tensor, layout: str, bias: Tensor | None = None, add: Tensor | None = None) -> Tensor:
    return _forward().launch(a, b, None, None, None, bias, add, "none", layout, None, None, a.dtype, "auto", "auto")


def _refused(a: Tensor, b: Tensor, columns: int) -> NotHandled | None:
    if a.dtype not in _HALVES or b.dtype != a.dtype:
        return DTYPE
    if a.numel() == 0 or b.numel() == 0:
        return EMPTY
    return None if a.dim() == 2 and b.dim() == columns and a.shape[1] == b.shape[0] else OPTION


def _mm(self: Tensor, mat2: Tensor) -> Any:
    refused = _refused(self, mat2, 2)
    return _product(self, mat2, "kn") if refused is None else refused


def _addmm(self: Tensor, mat1: Tensor, mat2: Tensor, beta: Any = 1, alpha: Any = 1) -> Any:
    refused = _refused(mat1, mat2, 2)
    if refused is not None or self.dtype != mat1.dtype:
        return refused or DTYPE
    if alpha != 1 or beta not in (0, 1):
        return OPTION
    rows, columns = mat1.shape[0], mat2.shape[1]
    if beta == 0:
        return _product(mat1, mat2, "kn")
    if self.shape in ((columns,), (1, columns)):
        return _product(mat1, mat2, "kn", bias=self.reshape(columns))
    return _product(mat1, mat2, "kn", add=self) if self.shape == (rows, columns) else OPTION


def _mv(self: Tensor, vec: Tensor) -> Any:
    refused = _refused(self, vec, 1)
    return _product(vec.unsqueeze(0), self, "nk").view(-1) if refused is None else refused


def rows() -> Iterator[Overload]:
    """Yield the overloads of products."""
    yield Overload("mm", "gemm", _mm, opinfo=("mm",), replays=True)
    yield Overload("addmm", "gemm", _addmm, opinfo=("addmm",), replays=True)
    yield Overload("mv", "gemm", _mv, opinfo=("mv",), replays=True)
