"""linghe's Triton kernels (0.3.0), called below its autograd functions."""

from __future__ import annotations

from typing import Any

from bench.peers import linghe_attention, linghe_fp8, linghe_gemm, linghe_moe, linghe_permute, linghe_router
from bench.peers.base import Absent, Call, Table, absent, silu_only

# ---- norms, gates, activations ------------------------------------------------------------------------------------


def _rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from linghe.utils.norm import triton_rms_norm_forward

    return lambda: triton_rms_norm_forward(x, weight, eps)[0]


def _rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from linghe.utils.norm import triton_rms_norm_backward, triton_rms_norm_forward

    rms = triton_rms_norm_forward(x, weight, eps)[1]
    return lambda: triton_rms_norm_backward(dy, x, weight, eps, rms)


def _gate_groups(groups: int, layout: str) -> dict[str, Any]:
    """linghe calls the number of groups ``group_size``."""
    if groups & (groups - 1):
        raise Absent("linghe's gate takes a power of two of groups")
    return {"group_size": groups, "transpose": layout == "sequence_first"}


def _gate_fwd(x: Any, gate: Any, weight: Any, groups: int, eps: float, layout: str, **_: Any) -> Call:
    from linghe.utils.gate import triton_group_rms_norm_gate_forward

    options = _gate_groups(groups, layout)
    return lambda: triton_group_rms_norm_gate_forward(x, gate, weight, eps=eps, **options)


def _gate_bwd(dy: Any, x: Any, gate: Any, weight: Any, groups: int, eps: float, layout: str, **_: Any) -> Call:
    from linghe.utils.gate import triton_group_rms_norm_gate_backward

    options = _gate_groups(groups, layout)
    return lambda: triton_group_rms_norm_gate_backward(dy, x, gate, weight, eps=eps, **options)


def _glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "linghe")
    from linghe.utils.silu import triton_weighted_silu_forward

    return lambda: triton_weighted_silu_forward(x)


def _glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "linghe")
    from linghe.utils.silu import triton_weighted_silu_backward

    return lambda: triton_weighted_silu_backward(dy, x)[0]


# ---- rope ---------------------------------------------------------------------------------------------------------


def _angles(tables: tuple[Any, Any]) -> Any:
    """The angles of the row's cosines and sines, twice over: linghe takes angles of the whole rotated half."""
    import torch

    cos, sin = tables
    angle = torch.atan2(sin, cos)
    return torch.cat((angle, angle), -1).contiguous()


def _qk_norm_rope_fwd(
    qkv: Any, q_weight: Any, k_weight: Any, tables: Any, q_heads: int, kv_heads: int, **_: Any
) -> Call:
    """linghe reads angles and takes cosine and sine in the kernel; the row's tables become angles beforehand."""
    from linghe.utils.rope import triton_qk_norm_and_half_rope_forward

    freqs = _angles(tables)
    options = {"H": q_heads, "h": kv_heads, "eps": 1e-6, "interleaved": True, "transposed": True}
    return lambda: triton_qk_norm_and_half_rope_forward(qkv, q_weight, k_weight, freqs, **options)


def _qk_norm_rope_bwd(dy: Any, qkv: Any, q_weight: Any, k_weight: Any, tables: Any, **_: Any) -> Call:
    """As the forward; heads are read from the incoming gradients."""
    from linghe.utils.rope import triton_qk_norm_and_half_rope_backward

    freqs = _angles(tables)
    options = {"eps": 1e-6, "interleaved": True, "transposed": True}
    return lambda: triton_qk_norm_and_half_rope_backward(*dy, qkv, q_weight, k_weight, freqs, **options)


# ---- losses, embedding --------------------------------------------------------------------------------------------


def _cross_entropy_fwd(logits: Any, labels: Any, **_: Any) -> Call:
    from linghe.utils.loss import triton_softmax_cross_entropy_forward

    return lambda: triton_softmax_cross_entropy_forward(logits, labels)[0]


def _cross_entropy_bwd(inplace: bool) -> Any:
    def prepare(dy: Any, logits: Any, labels: Any, **_: Any) -> Call:
        """In place the logits become the gradient, so the values drift from call to call, not the bytes."""
        from linghe.utils.loss import (
            triton_softmax_cross_entropy_backward,
            triton_softmax_cross_entropy_forward,
        )

        _, total, largest = triton_softmax_cross_entropy_forward(logits, labels)
        return lambda: triton_softmax_cross_entropy_backward(logits, labels, total, largest, dy, inplace=inplace)

    return prepare


def _cross_entropy_both(logits: Any, labels: Any, **_: Any) -> Call:
    """Forward, mean, backward with 1 / rows for every token: three steps, as under linghe's autograd function."""
    from linghe.utils.loss import (
        triton_softmax_cross_entropy_backward,
        triton_softmax_cross_entropy_forward,
    )

    rows = logits.shape[0]
    dy = labels.new_full((rows,), 1, dtype=logits.dtype).float() / rows

    def call() -> tuple[Any, Any]:
        loss, total, largest = triton_softmax_cross_entropy_forward(logits, labels)
        return loss.mean(), triton_softmax_cross_entropy_backward(logits, labels, total, largest, dy)

    return call


def _embedding_fwd(ids: Any, weight: Any, **_: Any) -> Call:
    from linghe.utils.emb import triton_embedding_forward

    return lambda: triton_embedding_forward(ids, weight.data_ptr(), weight.shape[1], weight.dtype)


def _embedding_bwd(ids: Any, dy: Any, weight: Any, **_: Any) -> Call:
    """linghe takes a batch dimension (here 1) and writes into zeros, which its autograd function also allocates."""
    import torch
    from linghe.utils.emb import triton_embedding_backward

    def call() -> Any:
        grad = torch.zeros_like(weight)
        triton_embedding_backward(dy[None], ids[None], grad.data_ptr(), grad.dtype)
        return grad

    return call


def _embedding_into(atomic: bool) -> Any:
    def prepare(dy: Any, ids: Any, main_grad: Any, **_: Any) -> Call:
        """Only the atomic kernel adds to main_grad; the other overwrites the rows it touches, which spares a read."""
        from linghe.utils.emb import triton_atomic_embedding_backward, triton_embedding_backward

        backward = triton_atomic_embedding_backward if atomic else triton_embedding_backward

        def call() -> Any:
            backward(dy[None], ids[None], main_grad.data_ptr(), main_grad.dtype)
            return main_grad

        return call

    return prepare


# ---- lists of tensors, reductions, moves --------------------------------------------------------------------------


def _norm(high_precision: bool) -> Any:
    def prepare(tensors: Any, **_: Any) -> Call:
        """linghe sums in fp64 unless told otherwise."""
        from linghe.utils.reduce import triton_batch_norm

        return lambda: triton_batch_norm(tensors, ord=2, norm=True, scalar=True, high_precision=high_precision)

    return prepare


def _count_zero(tensors: Any, **_: Any) -> Call:
    from linghe.utils.reduce import triton_batch_count_zero

    return lambda: triton_batch_count_zero(tensors)


def _scale(tensors: Any, **_: Any) -> Call:
    """In place, by the row's -1; the row compares nothing but a one."""
    import torch
    from linghe.utils.mul import triton_batch_scale

    def call() -> Any:
        triton_batch_scale(tensors, -1.0)
        return torch.ones(1)

    return call


def _column_absmax(x: Any, **_: Any) -> Call:
    from linghe.utils.reduce import triton_abs_max

    return lambda: triton_abs_max(x)


def _row_dot(x: Any, y: Any, **_: Any) -> Call:
    from linghe.utils.mul import triton_dot

    return lambda: triton_dot(x, y)


def _add(x: Any, y: Any, **_: Any) -> Call:
    """linghe has no factor: zeros replace the row's factor 0, so that x stays unchanged."""
    import torch
    from linghe.utils.add import triton_inplace_add

    zeros = torch.zeros_like(y)
    return lambda: triton_inplace_add(x, zeros)


def _transpose(x: Any, **_: Any) -> Call:
    from linghe.utils.transpose import triton_transpose

    return lambda: triton_transpose(x)


_NORMS = {"linghe": _norm(True), "linghe_fp32": _norm(False)}
_INTO = {"linghe": _embedding_into(False), "linghe_atomic": _embedding_into(True)}

ADAPTERS: Table = {
    **linghe_fp8.ADAPTERS,
    **linghe_attention.ADAPTERS,
    **linghe_gemm.ADAPTERS,
    **linghe_moe.ADAPTERS,
    **linghe_permute.ADAPTERS,
    **linghe_router.ADAPTERS,
    "rms_norm_fwd": {"linghe": _rms_norm_fwd},
    "rms_norm_bwd": {"linghe": _rms_norm_bwd},
    "gate_fwd": {"linghe": _gate_fwd},
    "gate_bwd": {"linghe": _gate_bwd},
    "glu_fwd": {"linghe": _glu_fwd},
    "glu_bwd": {"linghe": _glu_bwd},
    "qk_norm_rope_fwd": {"linghe": _qk_norm_rope_fwd},
    "qk_norm_rope_bwd": {"linghe": _qk_norm_rope_bwd},
    "rope_fwd": {"linghe": absent("linghe rotates half of every head only")},
    "cross_entropy_fwd": {"linghe": _cross_entropy_fwd},
    "cross_entropy_bwd": {"linghe": _cross_entropy_bwd(False), "linghe_inplace": _cross_entropy_bwd(True)},
    "cross_entropy_fwdbwd": {"linghe": _cross_entropy_both},
    "embedding_fwd": {"linghe": _embedding_fwd},
    "embedding_bwd": {"linghe": _embedding_bwd},
    "embedding_bwd_into": _INTO,
    "embedding_bwd_into_fp32": _INTO,
    "batch_grad_norm": _NORMS,
    "grad_norm": _NORMS,
    "batch_count_zero": {"linghe": _count_zero},
    "multi_scale": {"linghe": _scale},
    "column_absmax": {"linghe": _column_absmax},
    "row_dot_fwd": {"linghe": _row_dot},
    "add_in_place": {"linghe": _add},
    "transpose": {"linghe": _transpose},
    "transpose_heads": {"linghe": absent("linghe swaps the first two or the last two dimensions, not the middle")},
}
