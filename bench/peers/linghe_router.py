"""linghe's top-k, group-limited routing and z-loss."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Call, Table


def _topk(x: Any, k: int, **_: Any) -> Call:
    from linghe.utils.topk import triton_topk_forward

    return lambda: triton_topk_forward(x, k)


def _group_topk_fwd(logits: Any, k: int, bias: Any, num_groups: int, top_groups: int, scale: float, **_: Any) -> Call:
    from linghe.utils.topk import triton_group_topk_score_forward

    return lambda: triton_group_topk_score_forward(
        logits, k, expert_bias=bias, num_groups=num_groups, group_topk=top_groups, scaling_factor=scale
    )


def _group_topk_bwd(dy: Any, logits: Any, routing_map: Any, scale: float, **_: Any) -> Call:
    from linghe.utils.topk import triton_group_topk_score_backward

    return lambda: triton_group_topk_score_backward(dy, logits, routing_map, scaling_factor=scale)


def _z_loss_fwd(logits: Any, **_: Any) -> Call:
    from linghe.utils.loss import triton_moe_z_loss_forward

    return lambda: triton_moe_z_loss_forward(logits, coef=1.0)


def _z_loss_bwd(dy: Any, logits: Any, **_: Any) -> Call:
    from linghe.utils.loss import triton_moe_z_loss_backward

    return lambda: triton_moe_z_loss_backward(dy, logits, coef=1.0)


ADAPTERS: Table = {
    "topk": {"linghe": _topk},
    "topk_bf16": {"linghe": _topk},
    "group_topk_fwd": {"linghe": _group_topk_fwd},
    "group_topk_bwd": {"linghe": _group_topk_bwd},
    "z_loss_fwd": {"linghe": _z_loss_fwd},
    "z_loss_bwd": {"linghe": _z_loss_bwd},
}
