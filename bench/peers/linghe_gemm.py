"""linghe's GEMMs: for a router (fp32 results of bf16 operands, tf32 products in backward), and of fp8 by rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.peers.base import Absent, Call, Compared, Prepare, Table


def _functions(split: bool) -> tuple[Callable[..., Any], ...]:
    """Forward, gradient of x, gradient of weight; the second set splits the sums and adds them up with atomics."""
    from linghe.gemm import fp32_gemm as gemm

    if split:
        return (
            gemm.triton_split_fp32_gemm,
            gemm.triton_split_fp32_gemm_for_backward,
            gemm.triton_split_fp32_gemm_for_update,
        )
    return gemm.triton_fp32_gemm, gemm.triton_fp32_gemm_for_backward, gemm.triton_fp32_gemm_for_update


def _router(which: str, split: bool) -> Prepare:
    def prepare(x: Any, weight: Any, dy: Any = None, **_: Any) -> Call:
        forward, gradient_x, gradient_weight = _functions(split)
        if weight.dtype != x.dtype:
            raise Absent("linghe takes weights of x's dtype only")
        return {
            "fwd": lambda: forward(x, weight),
            "dx": lambda: gradient_x(dy, weight),
            "dw": lambda: gradient_weight(dy, x),
            "bwd": lambda: (gradient_x(dy, weight), gradient_weight(dy, x)),
        }[which]

    return prepare


def _norm_router(x: Any, weight: Any, router_weight: Any, **_: Any) -> Call:
    """Norm, logits and codes in one kernel."""
    from linghe.utils.norm import triton_rms_norm_fp32_gemm_block_quant_forward as together

    return Compared(lambda: together(x, weight, router_weight, eps=1e-6), lambda result: (result[2], result[0]))


def _scaled(a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **_: Any) -> Call:
    """fp8 with scales of rows; it computes whole tiles only."""
    import torch
    from linghe.gemm.channelwise_fp8_gemm import triton_scaled_mm

    (m, k), n = a.shape, b.shape[0]
    if a.dtype != torch.float8_e4m3fn or scale_a is None or scale_a.shape != (m, 1):
        raise Absent("linghe multiplies e4m3 with scales of rows")
    if m % 128 or n % 256 or k % 128:
        raise Absent("linghe computes whole tiles of 128 x 256 only")
    rows, columns = scale_a.view(-1), scale_b.view(-1)
    return lambda: triton_scaled_mm(a, b, rows, columns, out_dtype=torch.bfloat16)


_PRODUCTS = {
    f"router_gemm_{which}": {"linghe": _router(which, False), "linghe_split": _router(which, True)}
    for which in ("fwd", "dx", "dw", "bwd")
}
ADAPTERS: Table = {"scaled_mm": {"linghe": _scaled}, **_PRODUCTS, "norm_router_quant": {"linghe": _norm_router}}
