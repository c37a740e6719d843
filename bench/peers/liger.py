"""Liger-Kernel's Triton kernels (0.8.5), called below its autograd functions."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Absent, Call, Compared, Table, absent, silu_only

# ---- norms, softmax, activations, rope ----------------------------------------------------------------------------


def _rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, weight, eps, 0.0, "llama", None)[0]


def _rms_norm_bwd(inplace: bool) -> Any:
    def prepare(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
        """In place is Liger's default: dX overwrites dY, which spares the zero fill of dX."""
        from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

        _, x, rstd, block, warps, mode = rms_norm_forward(x, weight, eps, 0.0, "llama", None)
        return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, mode, block, warps, inplace, None)

    return prepare


def _layer_norm_fwd(x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return lambda: layer_norm_forward(x, weight, bias, eps)[0]


def _layer_norm_bwd(dy: Any, x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    _, x, mean, rstd, *_settings = layer_norm_forward(x, weight, bias, eps)
    return lambda: layer_norm_backward(dy, x, weight, bias, mean, rstd)


def _softmax_fwd(x: Any, **_: Any) -> Call:
    from liger_kernel.ops.softmax import _softmax_forward

    return lambda: _softmax_forward(x)[0]


def _softmax_bwd(dy: Any, x: Any, y: Any, **_: Any) -> Call:
    from liger_kernel.ops.softmax import _softmax_backward, _softmax_forward

    settings = _softmax_forward(x)[1:]
    return lambda: _softmax_backward(dy, y, *settings)


def _glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "Liger-Kernel")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_forward

    return lambda: swiglu_fused_gate_up_forward(x)[1]


def _glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "Liger-Kernel")
    from liger_kernel.ops.swiglu import swiglu_fused_gate_up_backward

    return lambda: swiglu_fused_gate_up_backward(x, dy)


def _halves(x: Any) -> tuple[Any, Any]:
    gate, up = x.chunk(2, dim=-1)
    return gate.contiguous(), up.contiguous()


def _ab_glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    """Separate gate and up tensors, split beforehand: the same bytes in Liger's older layout."""
    from liger_kernel.ops.geglu import geglu_forward
    from liger_kernel.ops.swiglu import swiglu_forward

    forward = {"silu": swiglu_forward, "gelu_tanh": geglu_forward}.get(act)
    if forward is None:
        raise Absent(f"Liger-Kernel has no GLU for act={act!r}")
    gate, up = _halves(x)
    return lambda: forward(gate, up)[2]


def _ab_glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    """As above; Liger overwrites gate and up with their gradients, so the values drift, not the bytes."""
    import torch
    from liger_kernel.ops.geglu import geglu_backward
    from liger_kernel.ops.swiglu import swiglu_backward

    backward = {"silu": swiglu_backward, "gelu_tanh": geglu_backward}.get(act)
    if backward is None:
        raise Absent(f"Liger-Kernel has no GLU for act={act!r}")
    gate, up = _halves(x)
    return Compared(lambda: backward(gate, up, dy), lambda out: torch.cat(out, -1))


def _rope_fwd(q: Any, k: Any, tables: Any, **_: Any) -> Call:
    """Liger rotates q and k in place; it takes views with heads before tokens and returns views."""
    from liger_kernel.ops.rope import rope_forward

    q, k, dim = q.transpose(1, 2), k.transpose(1, 2), q.shape[-1]

    def call() -> tuple[Any, Any]:
        rotated = rope_forward(q, k, *tables, rotary_dim=dim)[:2]
        return rotated[0].transpose(1, 2), rotated[1].transpose(1, 2)

    return call


# ---- losses -------------------------------------------------------------------------------------------------------


def _cross_entropy(logits: Any, labels: Any, *, reduction: str, gradients: bool) -> Call:
    """Liger's kernel as ``cross_entropy_forward`` launches it, without that function's checks of the labels.

    Those read four numbers from the device, and a call that waits for it cannot be timed like the others.
    """
    import torch
    from liger_kernel.ops.cross_entropy import MAX_FUSED_SIZE, liger_cross_entropy_kernel

    rows, cols = logits.shape
    block = min(MAX_FUSED_SIZE, 1 << (cols - 1).bit_length())

    def call() -> tuple[Any, ...]:
        loss = torch.zeros(rows, dtype=logits.dtype, device=logits.device)
        liger_cross_entropy_kernel[(rows,)](
            X_ptr=logits,
            X_stride=logits.stride(-2),
            Y_ptr=labels,
            Y_stride=labels.stride(-1),
            weight_ptr=None,
            loss_ptr=loss,
            z_loss_ptr=None,
            loss_stride=loss.stride(-1),
            token_accuracy_ptr=None,
            token_accuracy_stride=0,
            predicted_tokens_ptr=None,
            predicted_tokens_stride=0,
            n_cols=cols,
            n_non_ignore=rows,
            sum_non_ignore_weight=rows,
            ignore_index=-100,
            weight_sum=0.0,
            lse_square_scale=0.0,
            label_smoothing=0.0,
            reduction=reduction,
            softcap=None,
            RETURN_Z_LOSS=False,
            RETURN_TOKEN_ACCURACY=False,
            RETURN_PREDICTED_TOKENS=False,
            BLOCK_SIZE=block,
            HAS_WEIGHT=False,
            HAS_SOFTCAPPING=False,
            HAS_GRADIENTS=gradients,
            num_warps=32,
        )
        return (loss if reduction == "none" else torch.sum(loss), logits) if gradients else (loss,)

    return call


def _cross_entropy_fwd(logits: Any, labels: Any, **_: Any) -> Call:
    return _cross_entropy(logits, labels, reduction="none", gradients=False)


def _cross_entropy_both(logits: Any, labels: Any, **_: Any) -> Call:
    """The gradient overwrites the logits, so the values drift from call to call, not the bytes."""
    return _cross_entropy(logits, labels, reduction="mean", gradients=True)


def _linear_cross_entropy(fp32: bool) -> Any:
    def prepare(hidden: Any, weight: Any, labels: Any, **_: Any) -> Call:
        """Gradients of a bf16 weight are summed over chunks in bf16 unless fp32 is asked for.

        Counts its labels on the host, so its time includes that gap.
        """
        import torch
        from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

        def call() -> tuple[Any, Any, Any]:
            # As inside of its autograd function: with grad mode on it allocates every product.
            with torch.no_grad():
                found = fused_linear_cross_entropy_forward(
                    hidden,
                    weight,
                    labels,
                    accum_dtype=torch.float32 if fp32 else None,
                    compute_gradients=True,
                    weight_requires_grad=True,
                )
            return found[0], found[4], found[5]

        return call

    return prepare


def _kl_div(x: Any, target: Any, **_: Any) -> Call:
    """Forward and backward as its autograd function runs them, except for a comparison of dy with 1 on the host."""
    import torch
    from liger_kernel.ops.kl_div import MAX_FUSED_SIZE, _kldiv_kernel_backward, get_num_warps, kldiv_forward_triton

    rows, cols = x.shape
    block = min(MAX_FUSED_SIZE, 1 << (cols - 1).bit_length())

    def call() -> tuple[Any, Any]:
        loss = kldiv_forward_triton(x, target, log_target=True, reduction="batchmean", eps=1e-10)
        dx = torch.empty_like(target)
        _kldiv_kernel_backward[(rows,)](
            target,
            target.stride(0),
            dx,
            dx.stride(0),
            cols,
            BLOCK_SIZE=block,
            num_warps=get_num_warps(block),
            log_target=True,
        )
        return loss, dx / rows

    return call


def _jsd(x: Any, target: Any, **_: Any) -> Call:
    """The forward computes the gradient too; the backward for dy = 1 returns it unchanged."""
    from liger_kernel.ops.jsd import jsd_forward

    return lambda: jsd_forward(x, target, None, 0.5, -100, False)


# ---- embedding ----------------------------------------------------------------------------------------------------


def _embedding_fwd(ids: Any, weight: Any, **_: Any) -> Call:
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    return lambda: LigerEmbeddingFunction.apply(weight, ids)


def _embedding_bwd(ids: Any, dy: Any, weight: Any, **_: Any) -> Call:
    import torch
    from liger_kernel.ops.experimental.embedding import LigerEmbeddingFunction

    weight = weight.detach().requires_grad_()
    out = LigerEmbeddingFunction.apply(weight, ids)
    return lambda: torch.autograd.grad(out, weight, dy, retain_graph=True)


ADAPTERS: Table = {
    "rms_norm_fwd": {"liger": _rms_norm_fwd},
    "rms_norm_bwd": {"liger": _rms_norm_bwd(False), "liger_inplace": _rms_norm_bwd(True)},
    "layer_norm_fwd": {"liger": _layer_norm_fwd},
    "layer_norm_bwd": {"liger": _layer_norm_bwd},
    "softmax_fwd": {"liger": _softmax_fwd},
    "softmax_bwd": {"liger": _softmax_bwd},
    "glu_fwd": {"liger": _glu_fwd, "liger_ab": _ab_glu_fwd},
    "glu_bwd": {"liger": _glu_bwd, "liger_ab": _ab_glu_bwd},
    "rope_fwd": {"liger": _rope_fwd},
    "cross_entropy_fwd": {"liger": _cross_entropy_fwd},
    "cross_entropy_bwd": {"liger": absent("Liger-Kernel makes the gradient in the forward; see cross_entropy_fwdbwd")},
    "cross_entropy_fwdbwd": {"liger": _cross_entropy_both},
    "linear_cross_entropy": {"liger": _linear_cross_entropy(False), "liger_fp32": _linear_cross_entropy(True)},
    "kl_div": {"liger": _kl_div},
    "jsd": {"liger": _jsd},
    "embedding_fwd": {"liger": _embedding_fwd},
    "embedding_bwd": {"liger": _embedding_bwd},
}
