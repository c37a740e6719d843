"""fla's linear attention: lightning attention, the gated delta rule, Kimi's delta attention and Mamba-2's scan.

Backward passes are autograd's of the call, whose graph is built in advance. Where fla wants as many heads of queries
and keys as of values, they are repeated: in advance in a forward, inside of the graph in a backward pass.
"""

from __future__ import annotations

from typing import Any

from bench.peers.base import Call, Table


def _backward(out: Any, leaves: list[Any], dy: Any) -> Call:
    import torch

    return lambda: torch.autograd.grad(out, leaves, dy, retain_graph=True)


def _lightning_forward(q: Any, k: Any, v: Any, decay: Any, **_: Any) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    rate, scale = -decay, q.shape[-1] ** -0.5
    return lambda: chunk_simple_gla(q, k, v, g_gamma=rate, scale=scale)[0]


def _lightning_backward(dy: Any, q: Any, k: Any, v: Any, decay: Any, **_: Any) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    out = chunk_simple_gla(*leaves, g_gamma=-decay, scale=q.shape[-1] ** -0.5)[0]
    return _backward(out, leaves, dy)


def _raw_gates(rate: Any, bias: Any) -> dict[str, Any]:
    """Options for raw gates: Qwen3-Next's ``A_log`` and ``dt_bias``."""
    if rate is None:
        return {}
    return {"use_gate_in_kernel": True, "A_log": rate, "dt_bias": bias, "use_beta_sigmoid_in_kernel": True}


def _delta_forward(q: Any, k: Any, v: Any, g: Any, beta: Any, rate: Any = None, bias: Any = None) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    raw = _raw_gates(rate, bias)
    return lambda: chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True, **raw)[0]


def _delta_backward(dy: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Call:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    out = chunk_gated_delta_rule(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)[0]
    return _backward(out, leaves, dy)


def _delta_step(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, rate: Any = None, bias: Any = None) -> Call:
    """fla returns the new state in other memory; it replaces the old one, as in fla's models."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, g, beta = (t.unsqueeze(1) for t in (q, k, v, g, beta))
    raw, kept = _raw_gates(rate, bias), [state]

    def call() -> tuple[Any, Any]:
        out, kept[0] = fused_recurrent_gated_delta_rule(
            q, k, v, g=g, beta=beta, initial_state=kept[0], output_final_state=True, use_qk_l2norm_in_kernel=True, **raw
        )
        return kept[0], out

    return call


def _kda_forward(q: Any, k: Any, v: Any, g: Any, beta: Any) -> Call:
    from fla.ops.kda import chunk_kda

    return lambda: chunk_kda(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]


def _kda_backward(dy: Any, q: Any, k: Any, v: Any, g: Any, beta: Any) -> Call:
    from fla.ops.kda import chunk_kda

    leaves = [t.detach().requires_grad_() for t in (q, k, v, g, beta)]
    out = chunk_kda(*leaves[:3], g=leaves[3], beta=leaves[4], use_qk_l2norm_in_kernel=True)[0]
    return _backward(out, leaves, dy)


def _per_head(x: Any, heads: int) -> Any:
    return x.repeat_interleave(heads // x.shape[-2], -2)


def _scan(attend: Any, x: Any, dt: Any, g: Any, keys: Any, queries: Any, skip: Any) -> Any:
    """Mamba-2's scan as linear attention: x times its time step are the values."""
    values = (x * dt.unsqueeze(-1)).to(x.dtype)
    return (attend(queries, keys, values, g=g, scale=1.0)[0] + skip.unsqueeze(-1) * x).to(x.dtype)


def _ssd_forward(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    keys, queries = (_per_head(t, x.shape[-2]) for t in (B, C))
    return lambda: _scan(chunk_simple_gla, x, dt, A * dt, keys, queries, D)


def _ssd_backward(dy: Any, x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, g: Any) -> Call:
    from fla.ops.simple_gla import chunk_simple_gla

    leaves = [t.detach().requires_grad_() for t in (x, dt, g, B, C)]
    x, dt, g, keys, queries = leaves
    keys, queries = (_per_head(t, x.shape[-2]) for t in (keys, queries))
    out = _scan(chunk_simple_gla, x, dt, g, keys, queries, D)
    return _backward(out, leaves, dy)


def _ssd_step(x: Any, dt: Any, A: Any, B: Any, C: Any, D: Any, state: Any) -> Call:
    from fla.ops.simple_gla import fused_recurrent_simple_gla

    keys, queries = (_per_head(t, x.shape[-2]).unsqueeze(1) for t in (B, C))
    kept = [state]

    def call() -> tuple[Any, Any]:
        values = (x * dt.unsqueeze(-1)).to(x.dtype).unsqueeze(1)
        out, kept[0] = fused_recurrent_simple_gla(
            queries, keys, values, g=(A * dt).unsqueeze(1), scale=1.0, initial_state=kept[0], output_final_state=True,
            state_v_first=True,
        )  # fmt: skip
        return kept[0], (out.squeeze(1) + D.unsqueeze(-1) * x).to(x.dtype)

    return call


ADAPTERS: Table = {
    "lightning_attention_fwd": {"fla": _lightning_forward},
    "lightning_attention_bwd": {"fla": _lightning_backward},
    "gated_delta_rule_fwd": {"fla": _delta_forward},
    "gated_delta_rule_bwd": {"fla": _delta_backward},
    "gated_delta_rule_step": {"fla": _delta_step},
    "kda_fwd": {"fla": _kda_forward},
    "kda_bwd": {"fla": _kda_backward},
    "ssd_fwd": {"fla": _ssd_forward},
    "ssd_bwd": {"fla": _ssd_backward},
    "ssd_step": {"fla": _ssd_step},
}
