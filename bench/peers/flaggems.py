"""FlagGems' Triton kernels (5.0.2), called directly rather than through torch's dispatcher."""

from __future__ import annotations

import os
from typing import Any

from bench.peers.base import Absent, Call, Table, silu_only


def _flaggems() -> None:
    # Without it FlagGems looks for its vendor by running the tools of every vendor it knows.
    os.environ.setdefault("GEMS_VENDOR", "nvidia")
    import flag_gems  # noqa: F401


# ---- norms, softmax, activations, rope ----------------------------------------------------------------------------


def _rms_norm_fwd(x: Any, weight: Any, eps: float, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, [x.shape[-1]], weight, eps)[0]


def _rms_norm_bwd(dy: Any, x: Any, weight: Any, eps: float, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.rms_norm import rms_norm_backward, rms_norm_forward

    inv_rms = rms_norm_forward(x, [x.shape[-1]], weight, eps)[1]
    return lambda: rms_norm_backward(dy, x, inv_rms, [x.shape[-1]], weight, eps)


def _layer_norm_fwd(x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.layernorm import layer_norm

    return lambda: layer_norm(x, [x.shape[-1]], weight, bias, eps)[0]


def _layer_norm_bwd(dy: Any, x: Any, weight: Any, bias: Any, eps: float, **_: Any) -> Call:
    """Its forward saves mean and 1/std in x's dtype, so the gradient is that of rounded statistics."""
    _flaggems()
    from flag_gems.ops.layernorm import layer_norm, layer_norm_backward

    shape = [x.shape[-1]]
    _, mean, rstd = layer_norm(x, shape, weight, bias, eps)
    return lambda: layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, [True, True, True])


def _softmax_fwd(x: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.softmax import softmax

    return lambda: softmax(x, -1)


def _softmax_bwd(dy: Any, y: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.softmax import softmax_backward

    return lambda: softmax_backward(dy, y, -1, y.dtype)


def _glu_fwd(x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "FlagGems")
    _flaggems()
    from flag_gems.fused.swiglu import swiglu

    return lambda: swiglu(x)


def _glu_bwd(dy: Any, x: Any, act: str = "silu", **_: Any) -> Call:
    silu_only(act, "FlagGems")
    _flaggems()
    from flag_gems.fused.swiglu import dswiglu

    return lambda: dswiglu(dy, x)


def _rope_fwd(q: Any, k: Any, tables: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.fused.rotary_embedding import apply_rotary_pos_emb

    return lambda: apply_rotary_pos_emb(q, k, *tables)


# ---- losses, embedding --------------------------------------------------------------------------------------------


def _cross_entropy_fwd(logits: Any, labels: Any, **_: Any) -> Call:
    """Losses come back rounded to the logits' dtype."""
    _flaggems()
    from flag_gems.fused.cross_entropy_loss import cross_entropy_loss

    return lambda: cross_entropy_loss(logits, labels, reduction="none")


def _cross_entropy_bwd(dy: Any, logits: Any, labels: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.fused.cross_entropy_loss import cross_entropy_loss
    from torch.autograd import grad

    logits = logits.detach().requires_grad_()
    loss = cross_entropy_loss(logits, labels, reduction="none")
    dy = dy.to(loss.dtype)
    return lambda: grad(loss, logits, dy, retain_graph=True)


def _cross_entropy_both(logits: Any, labels: Any, **_: Any) -> Call:
    """Its backward reads the number of labels on the host, so its time includes that gap."""
    _flaggems()
    from flag_gems.fused.cross_entropy_loss import cross_entropy_loss
    from torch.autograd import grad

    logits = logits.detach().requires_grad_()

    def call() -> tuple[Any, ...]:
        loss = cross_entropy_loss(logits, labels, reduction="mean")
        return loss.detach(), *grad(loss, logits)

    return call


def _embedding_fwd(ids: Any, weight: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.embedding import embedding

    return lambda: embedding(weight, ids)


def _embedding_bwd(ids: Any, dy: Any, weight: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.embedding import embedding_backward

    return lambda: embedding_backward(dy, ids, weight.shape[0])


def _embedding_into(dy: Any, ids: Any, main_grad: Any, **_: Any) -> Call:
    """FlagGems cannot accumulate into an embedding's gradient; this is its index_add_, which synchronises."""
    _flaggems()
    from flag_gems.ops.index_add import index_add_

    dy = dy.to(main_grad.dtype)
    return lambda: index_add_(main_grad, 0, ids, dy)


# ---- fp8, transforms, moves ---------------------------------------------------------------------------------------


def _group(x: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.per_token_group_quant_fp8 import per_token_group_quant_fp8

    return lambda: per_token_group_quant_fp8(x, 128)


def _hadamard(block: int) -> Any:
    def prepare(x: Any, **_: Any) -> Call:
        """Blocks become rows, which is a view."""
        _flaggems()
        from flag_gems.ops.hadamard_transform import hadamard_transform

        blocks = x.view(-1, block)
        return lambda: hadamard_transform(blocks, block**-0.5).view(x.shape)

    return prepare


def _transpose(x: Any, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.t_copy import t_copy

    if x.dtype.itemsize == 1:
        raise Absent("FlagGems' t_copy is not meant for fp8")
    return lambda: t_copy(x)


def _topk(x: Any, k: int, **_: Any) -> Call:
    _flaggems()
    from flag_gems.ops.topk import topk

    return lambda: topk(x, k)


def _softmax_router(logits: Any, k: int, **_: Any) -> Call:
    """Without the tokens of each expert."""
    _flaggems()
    import torch
    from flag_gems.fused.topk_softmax import topk_softmax

    weights = torch.empty(len(logits), k, device=logits.device)
    indices, rows = (torch.empty(len(logits), k, dtype=torch.int32, device=logits.device) for _ in range(2))

    def call() -> tuple[Any, Any]:
        topk_softmax(weights, indices, rows, logits, renormalize=True)
        return weights, indices

    return call


ADAPTERS: Table = {
    "topk": {"flaggems": _topk},
    "topk_bf16": {"flaggems": _topk},
    "softmax_router_fwd": {"flaggems": _softmax_router},
    "rms_norm_fwd": {"flaggems": _rms_norm_fwd},
    "rms_norm_bwd": {"flaggems": _rms_norm_bwd},
    "layer_norm_fwd": {"flaggems": _layer_norm_fwd},
    "layer_norm_bwd": {"flaggems": _layer_norm_bwd},
    "softmax_fwd": {"flaggems": _softmax_fwd},
    "softmax_bwd": {"flaggems": _softmax_bwd},
    "glu_fwd": {"flaggems": _glu_fwd},
    "glu_bwd": {"flaggems": _glu_bwd},
    "rope_fwd": {"flaggems": _rope_fwd},
    "cross_entropy_fwd": {"flaggems": _cross_entropy_fwd},
    "cross_entropy_bwd": {"flaggems": _cross_entropy_bwd},
    "cross_entropy_fwdbwd": {"flaggems": _cross_entropy_both},
    "embedding_fwd": {"flaggems": _embedding_fwd},
    "embedding_bwd": {"flaggems": _embedding_bwd},
    "embedding_bwd_into": {"flaggems": _embedding_into},
    "embedding_bwd_into_fp32": {"flaggems": _embedding_into},
    "quantize_fp8_group": {"flaggems": _group},
    # The block is no input of the row, so these go by the whole label.
    "hadamard 8192x4096 block 64": {"flaggems": _hadamard(64)},
    "hadamard 8192x4096 block 256": {"flaggems": _hadamard(256)},
    "transpose": {"flaggems": _transpose},
}
