"""Torch's own matrix products while a level of batch invariance is in force.

cuBLAS chooses kernels, and how they split k, by the number of rows. Under a level, 16-bit products run on our kernels,
which then choose by columns and depth only; products of other dtypes run on torch's kernels in blocks of as many rows,
all of one shape and layout. Overrides are registered with the dispatcher once, at the first level above 0, and stay:
autograd's threads and compiled graphs go through it, too. At level 0 they call torch's kernels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rtkernels import emulator
from rtkernels.aten.registration import Lasting, torch_kernel
from rtkernels.errors import UnsupportedDeviceError
from rtkernels.runtime.invariance import level, refuse, state
from rtkernels.runtime.torch_private import below_versions

_HALVES = (torch.bfloat16, torch.float16)
_ROWS = 128  # of a block of torch's kernels
_OPTIONS = ("none", "kn", None, None)  # of scaled_mm: recipe, layout of b, packed, act

Native = Callable[..., Any]


def _ours(a: Tensor, b: Tensor) -> bool:
    return a.dtype in _HALVES and a.dtype == b.dtype and a.numel() > 0 and b.numel() > 0 and _launches(a)


def _launches(a: Tensor) -> bool:
    return a.is_cuda or emulator.active() is not None


def _product(a: Tensor, b: Tensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Return a @ b, plus a bias of one number per column, by our kernels."""
    from rtkernels.ops.gemm.scaled_mm import FORWARD

    return FORWARD.call(a, b, None, None, None, bias, None, *_OPTIONS, dtype, "auto", "auto")


def _in_blocks(native: Native, a: Tensor, b: Tensor, *more: Any) -> Tensor:
    """Return a @ b by torch's kernel for one number of rows; sums of one product are the same for any."""
    if a.shape[1] <= 1 or 0 in (*a.shape, *b.shape):
        return native(a, b, *more)
    parts = []
    for first in range(0, a.shape[0], _ROWS):
        rows = a[first : first + _ROWS]
        block = torch.zeros(_ROWS, a.shape[1], dtype=a.dtype, device=a.device)
        block[: rows.shape[0]] = rows
        parts.append(native(block, b, *more)[: rows.shape[0]])
    return torch.cat(parts)


def _mm(native: Native, a: Tensor, b: Tensor, *out_dtype: torch.dtype) -> Tensor:
    return _product(a, b, None, *out_dtype) if _ours(a, b) else _in_blocks(native, a, b, *out_dtype)


def _sums(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b, in fp32 if a and b have 16 bits."""
    return _product(a, b, dtype=torch.float32) if _ours(a, b) else torch.mm(a, b)


def _added(base: Tensor, sums: Tensor, beta: Any, alpha: Any) -> Tensor:
    """Return ``beta base + alpha sums``, rounded once; a beta of 0 hides NaN, as in torch."""
    result = sums if alpha == 1 else sums * alpha
    if beta != 0:
        kept = base.to(result.dtype) if base.is_floating_point() else base
        result = result + (kept if beta == 1 else kept * beta)
    return result.to(base.dtype)


def _addmm(native: Native, base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if not (_ours(a, b) and base.dtype == a.dtype):
        return _added(base, torch.mm(a, b), beta, alpha)
    if base.dim() == 1 and base.shape[0] == b.shape[1] and alpha == beta == 1:
        return _product(a, b, base)
    return _added(base, _sums(a, b), beta, alpha)


def _addmm_dtype(
    native: Native, base: Tensor, a: Tensor, b: Tensor, out_dtype: torch.dtype, *, beta: Any = 1, alpha: Any = 1
) -> Tensor:
    sums = _product(a, b, dtype=out_dtype) if _ours(a, b) else _in_blocks(torch.mm, a, b, out_dtype)
    return _added(base, sums, beta, alpha)


def _addmm_activation(
    native: Native, base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1, use_gelu: bool = False
) -> Tensor:
    result = torch.addmm(base, a, b, beta=beta, alpha=alpha)
    return torch.nn.functional.gelu(result, approximate="tanh") if use_gelu else torch.relu(result)


def _bmm(native: Native, a: Tensor, b: Tensor) -> Tensor:
    if a.shape[2] <= 1 or a.shape[0] == 0 or a.dim() != 3 or b.dim() != 3:
        return native(a, b)
    return torch.stack([torch.mm(x, y) for x, y in zip(a, b, strict=True)])


def _baddbmm(native: Native, base: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    if a.shape[0] == 0:
        return native(base, a, b, beta=beta, alpha=alpha)
    return _added(base, torch.stack([_sums(x, y) for x, y in zip(a, b, strict=True)]), beta, alpha)


def _mv(native: Native, matrix: Tensor, vector: Tensor) -> Tensor:
    return torch.mm(vector.unsqueeze(0), matrix.t()).squeeze(0)


def _addmv(native: Native, base: Tensor, matrix: Tensor, vector: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    return _added(base, _sums(vector.unsqueeze(0), matrix.t()).squeeze(0), beta, alpha)


_RULES: dict[str, Callable[..., Tensor]] = {
    "mm": _mm, "mm.dtype": _mm, "addmm": _addmm, "addmm.dtype": _addmm_dtype,
    "_addmm_activation": _addmm_activation, "bmm": _bmm, "baddbmm": _baddbmm, "mv": _mv, "addmv": _addmv,
}  # fmt: skip
# Overload with out=, and the one that computes the same.
_OUT = {
    "mm.out": "mm", "mm.dtype_out": "mm.dtype", "addmm.out": "addmm", "addmm.dtype_out": "addmm.dtype",
    "_addmm_activation.out": "_addmm_activation", "bmm.out": "bmm", "baddbmm.out": "baddbmm", "addmv.out": "addmv",
}  # fmt: skip
_IN_PLACE = {"addmm_": "addmm", "baddbmm_": "baddbmm", "addmv_": "addmv"}
_REFUSED = ("_scaled_mm", "_scaled_mm_v2", "_grouped_mm", "_scaled_grouped_mm")


def _kernels(key: str) -> dict[str, Native]:
    found: dict[str, Native] = {}
    for name in (*_RULES, *_OUT, *_IN_PLACE, *_REFUSED):
        with contextlib.suppress(RuntimeError):  # this torch has no such overload, or no kernel of it for the key
            found[name] = torch_kernel(name, key)
    return {name: _override(name, native, found) for name, native in found.items()}


_KERNELS = Lasting(_kernels)


def install() -> None:
    """Register the overrides, unless they are: for CUDA tensors, and while emulating for CPU tensors, too."""
    if not hasattr(torch.library, "get_kernel"):
        raise UnsupportedDeviceError(
            f"torch {torch.__version__} has no torch.library.get_kernel, without which its products cannot be made "
            f"batch-invariant; use a later torch"
        )
    _KERNELS.install()


def _override(name: str, native: Native, kernels: dict[str, Native]) -> Callable[..., Any]:
    plain = _OUT.get(name) or _IN_PLACE.get(name) or name
    rule, inner = _RULES.get(plain), kernels.get(plain, native)

    def override(*args: Any, **kwargs: Any) -> Any:
        if not state.highest or not level():
            return native(*args, **kwargs)
        if rule is None:
            refuse(f"torch.{name}", "torch's kernels for it choose by the number of rows")
        out = args[0] if name in _IN_PLACE else kwargs.pop("out", None)
        if out is None:
            return rule(inner, *args, **kwargs)
        return out if _multiplied_into(out, name, args, kwargs) else _written(out, rule(inner, *args, **kwargs))

    return override


def _multiplied_into(out: Tensor, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Multiply, or add a product in fp32, without memory for the product; return False if that cannot be."""
    from rtkernels.ops.gemm.scaled_mm import IN_PLACE

    adds = name == "addmm.dtype_out" and args[0] is out and out.dtype == torch.float32 and not kwargs
    a, b = args[1:3] if name == "addmm.dtype_out" else args[:2]
    if not (adds or name in ("mm.out", "mm.dtype_out")) or not _ours(a, b):
        return False
    if out.shape != (a.shape[0], b.shape[1]) or out.stride(1) != 1 or out.data_ptr() & 15:
        return False
    with below_versions():
        IN_PLACE.call(out, a, b, None, None, None, None, None, *_OPTIONS, None, "auto", "auto", adds)
    return True


def _written(out: Tensor, result: Tensor) -> Tensor:
    with below_versions():  # the dispatcher has counted what the call writes
        if out.shape != result.shape:
            out.resize_(result.shape)
        return out.copy_(result)
