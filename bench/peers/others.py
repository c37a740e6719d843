"""Products of DeepGEMM and batch_invariant_ops, fla's linear attention and TorchAO's fp8 training."""

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


def _fla_forward(q: Any, k: Any, v: Any, decay: Any, **_: Any) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    rate, scale = -decay, q.shape[-1] ** -0.5
    return lambda: chunk_simple_gla(q, k, v, g_gamma=rate, scale=scale)[0]


def _fla_backward(dy: Any, q: Any, k: Any, v: Any, decay: Any, **_: Any) -> Call:
    import torch
    from fla.ops.simple_gla import chunk_simple_gla

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = chunk_simple_gla(*leaves, g_gamma=-decay, scale=q.shape[-1] ** -0.5)[0]
    return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)


def _fla_delta_forward(q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return lambda: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def _fla_delta_backward(dy: Any, q: Any, k: Any, v: Any, g: Any, beta: Any, **_: Any) -> Call:
    import torch
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    out = chunk_gated_delta_rule(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)[0]
    return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)


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
    "lightning_attention_fwd": {"fla": _fla_forward},
    "lightning_attention_bwd": {"fla": _fla_backward},
    "gated_delta_rule_fwd": {"fla": _fla_delta_forward},
    "gated_delta_rule_bwd": {"fla": _fla_delta_backward},
    "fp8_linear_row": {"torchao": _torchao("rowwise")},
    "fp8_linear_tensor": {"torchao": _torchao("tensorwise")},
    "fp8_linear_block": {"torchao": absent("TorchAO trains with scales of tensors and rows")},
}
