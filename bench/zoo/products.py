"""Products in bf16 on CPUs that have no instructions for them: there torch's take 200 times as long as in fp32."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

# Every result in the dtype of the first argument, but for the logarithms of an attention's sums, which are fp32.
_PRODUCTS = (
    "mm", "addmm", "bmm", "baddbmm", "convolution", "convolution_backward",
    "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
_FP32_RESULTS = {"_scaled_dot_product_flash_attention_for_cpu": (1,)}
_HALVES = (torch.bfloat16, torch.float16)


def are_slow() -> bool:
    """Return True if torch has no fast products in bf16 here, and lets its operators be exchanged."""
    return not torch.ops.mkldnn._is_mkldnn_bf16_supported() and hasattr(torch.library, "get_kernel")


def _wider(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _HALVES else value


def _in_fp32(name: str) -> Any:
    operator = getattr(torch.ops.aten, name).default
    kernel = torch.library.get_kernel(operator, "CPU")
    kept = _FP32_RESULTS.get(name, ())

    def product(keys: Any, *args: Any, **kwargs: Any) -> Any:
        dtype = next(a.dtype for a in args if isinstance(a, Tensor))
        if dtype not in _HALVES:
            return kernel.call_boxed(keys, *args, **kwargs)
        found = operator(*map(_wider, args), **{name: _wider(value) for name, value in kwargs.items()})
        if isinstance(found, Tensor):
            return found.to(dtype)
        return tuple(t if t is None or i in kept else t.to(dtype) for i, t in enumerate(found))

    return product


@contextlib.contextmanager
def rounded_once() -> Iterator[None]:
    """Compute products of bf16 in fp32 and round their results, as a GPU does, if torch's are slow here."""
    if not are_slow():
        yield
        return
    products = {name: _in_fp32(name) for name in _PRODUCTS}  # they read torch's kernels
    library = torch.library.Library("aten", "IMPL")
    try:
        for name, product in products.items():
            library.impl(name, product, "CPU", with_keyset=True)
        yield
    finally:
        library._destroy()
