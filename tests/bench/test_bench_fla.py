"""Adapters of fla, called with stand-ins in plain torch: do they compute what the row does?"""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from bench import peers
from bench.measure.values import relative_error, tensors
from bench.rows import all_rows
from bench.rows.row import Row

ROWS = list(all_rows())


def _steps(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor | None, scale: float, state: Tensor) -> Any:
    """Token by token; decay [batch, length, heads, channels or 1], state [batch, heads, width of k, width of v]."""
    outs, dtype = [], v.dtype
    q, k = (t.double().repeat_interleave(v.shape[2] // t.shape[2], 2) for t in (q, k))
    v, state = v.double(), state.double()
    for t in range(q.shape[1]):
        state = decay[:, t].double().exp().unsqueeze(-1) * state
        update = v[:, t]
        if beta is not None:
            update = beta[:, t].double().unsqueeze(-1) * (update - (k[:, t].unsqueeze(-2) @ state).squeeze(-2))
        state = state + k[:, t].unsqueeze(-1) * update.unsqueeze(-2)
        outs.append(scale * (q[:, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outs, 1).to(dtype), state.float()


def _delta(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
    use_gate_in_kernel=False, A_log=None, dt_bias=None, use_beta_sigmoid_in_kernel=False,
):  # fmt: skip
    assert use_qk_l2norm_in_kernel and output_final_state == (initial_state is not None)
    q, k = (F.normalize(t.double(), dim=-1) for t in (q, k))
    g = -A_log.exp() * F.softplus(g.float() + dt_bias) if use_gate_in_kernel else g
    beta = beta.sigmoid() if use_beta_sigmoid_in_kernel else beta
    zero = torch.zeros(q.shape[0], v.shape[2], q.shape[3], v.shape[3])
    decay, state = g if g.dim() == 4 else g.unsqueeze(-1), zero if initial_state is None else initial_state
    return _steps(q, k, v, decay, beta, q.shape[3] ** -0.5, state)


def _simple(q, k, v, g, scale, initial_state=None, output_final_state=False, state_v_first=False):
    assert q.shape[2] == k.shape[2] == v.shape[2], "fla wants as many heads"
    assert output_final_state == state_v_first == (initial_state is not None)
    state = torch.zeros(q.shape[0], q.shape[2], q.shape[3], v.shape[3])
    state = state if initial_state is None else initial_state.mT
    out, state = _steps(q, k, v, g.unsqueeze(-1), None, scale, state)
    return out, state.mT


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("fla", "fla.ops", "fla.ops.gated_delta_rule", "fla.ops.kda", "fla.ops.simple_gla"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    rule, simple = sys.modules["fla.ops.gated_delta_rule"], sys.modules["fla.ops.simple_gla"]
    rule.chunk_gated_delta_rule = rule.fused_recurrent_gated_delta_rule = sys.modules["fla.ops.kda"].chunk_kda = _delta
    simple.chunk_simple_gla = simple.fused_recurrent_simple_gla = _simple


def _inputs(row: Row) -> dict[str, Any]:
    """Random inputs like the row's, with few tokens, heads and channels."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    batch, length, heads, groups, width, state = 2, 70, 4, 2, 16, 8
    step = row.name.endswith("_step")
    tokens = (batch,) if step else (batch, length)
    dy = {"dy": normal(*tokens, heads, width).bfloat16()} if row.name.endswith("_bwd") else {}
    if row.name.startswith("ssd"):
        keys = {name: normal(*tokens, groups, state).bfloat16() for name in "BC"}
        dt = torch.rand(*tokens, heads, generator=generator)
        given = {**dy, "x": normal(*tokens, heads, width).bfloat16(), "dt": dt, "A": -normal(heads).abs(), **keys}
        given["D"] = normal(heads)
        given |= {"g": given["A"] * dt} if dy else {}
        return given | ({"state": normal(batch, heads, width, state)} if step else {})
    width = 128 if step else width  # the scale of these rows is that of 128
    groups = heads if row.name.startswith("kda") else groups
    given = dy | {n: normal(*tokens, c, width).bfloat16() for n, c in (("q", groups), ("k", groups), ("v", heads))}
    if "raw gates" in row.shape:
        g, beta = normal(2, *tokens, heads).bfloat16()
        rate, bias = normal(2, heads)
        given |= {"g": g, "beta": beta, "rate": rate, "bias": bias}
    else:
        shape = (*tokens, heads, width) if row.name.startswith("kda") else (*tokens, heads)
        given |= {"g": -torch.rand(shape, generator=generator)}
        given |= {"beta": torch.rand(*tokens, heads, generator=generator)}
    return given | ({"state": normal(batch, heads, width, width)} if step else {})


CASES = {
    f"{row.name} {'raw' if 'raw gates' in row.shape else ''}": row
    for row in ROWS
    if row.name.startswith(("gated_delta_rule", "kda", "ssd"))
}


@pytest.mark.parametrize("name", CASES)
def test_fla_computes_the_row(name: str) -> None:
    """All results, of the second call where a state is updated."""
    row = CASES[name]
    inputs = _inputs(row)
    call = peers.adapters_of(row)["fla"](**{key: t.clone() for key, t in inputs.items()})
    wanted = row.torch(**inputs)
    got = call()
    if row.name.endswith("_step"):
        wanted, got = row.torch(**inputs), call()
    wanted, got = tensors(wanted), [t.reshape(w.shape) for t, w in zip(tensors(got), tensors(wanted), strict=True)]
    assert relative_error(got, wanted) < 0.02
