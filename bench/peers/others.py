"""Products of DeepGEMM and batch_invariant_ops, and TorchAO's fp8 training."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Table, absent


def _deepgemm(a: Any, b: Any, scale_a: Any = None, scale_b: Any = None, **_: Any) -> Call:
    """bf16, and e4m3 with scales of 1x128 and 128x128, which get its layout beforehand."""
    import deep_gemm
    import torch

    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=torch.bfloat16, device=a.device)
    if a.dtype == torch.bfloat16 and b.dtype == a.dtype and scale_a is None and scale_b is None:
        return lambda: deep_gemm.bf16_gemm_nt(a, b, out) or out
    blocks = (-(-n // 128), -(-k // 128))
    if a.dtype != torch.float8_e4m3fn or getattr(scale_b, "shape", None) != blocks or scale_a.shape != (m, blocks[1]):
        raise Absent("DeepGEMM multiplies bf16, and e4m3 with scales of 1x128 and 128x128")
    left = deep_gemm.get_mn_major_tma_aligned_tensor(scale_a)
    right = scale_b.contiguous()
    return lambda: deep_gemm.fp8_gemm_nt((a, left), (b, right), out) or out


def _torchao(recipe: str) -> Any:
    def prepare(x: Any, weight: Any, dy: Any, **_: Any) -> Call:
        """Forward and both gradients of its fp8 linear layer, compiled, as its documentation recommends."""
        import torch
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        n, k = weight.shape
        layer = torch.nn.Linear(k, n, bias=False, device=x.device, dtype=x.dtype)
        with torch.no_grad():
            layer.weight.copy_(weight)
        model = convert_to_float8_training(
            torch.nn.Sequential(layer), config=Float8LinearConfig.from_recipe_name(recipe)
        )  # fmt: skip
        compiled, leaf = torch.compile(model, dynamic=False), x.detach().requires_grad_()
        weights = list(model.parameters())

        def call() -> tuple[Any, ...]:
            y = compiled(leaf)
            return (y.detach(), *torch.autograd.grad(y, [leaf, *weights], dy))

        return call

    return prepare


def _batch_invariant_ops(a: Any, b: Any) -> Call:
    """The Triton product that Thinking Machines' package puts in the place of ``torch.mm``."""
    from batch_invariant_ops import matmul_persistent

    return lambda: matmul_persistent(a, b.t())


ADAPTERS: Table = {
    "invariant_mm": {"thinkingmachines": _batch_invariant_ops},
    "invariant_wgrad": {"thinkingmachines": absent("batch_invariant_ops has no sums over micro-batches")},
    "invariant_decode": {"thinkingmachines": absent("batch_invariant_ops has no attention")},
    "scaled_mm": {"deepgemm": _deepgemm},
    "fp8_linear_row": {"torchao": _torchao("rowwise")},
    "fp8_linear_tensor": {"torchao": _torchao("tensorwise")},
    "fp8_linear_block": {"torchao": absent("TorchAO trains with scales of tensors and rows")},
}
