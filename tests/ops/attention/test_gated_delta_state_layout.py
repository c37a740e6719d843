"""gated_delta_rule with states [v, k]: the results of states [k, v], with the last two dimensions swapped."""

from __future__ import annotations

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at

from rtkernels import gated_delta_rule
from rtkernels.errors import ArgumentError


def inputs(tokens: int, packed: bool, device: str) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor | None]:
    g = torch.Generator().manual_seed(0)
    lead = (tokens,) if packed else (1, tokens)
    q, k, v = (torch.randn(*lead, 2, width, generator=g).bfloat16() for width in (16, 16, 24))
    decay, beta = -torch.rand(*lead, 2, generator=g), torch.rand(*lead, 2, generator=g)
    ends = torch.tensor([0, 5, tokens], dtype=torch.int32, device=device) if packed else None
    state = torch.randn(2 if packed else 1, 2, 16, 24, generator=g)
    return [t.to(device) for t in (q, k, v, decay, beta)], state.to(device), ends


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("packed", (False, True))
def test_states_are_swapped(packed: bool, place: str) -> None:
    with running_on(place) as device:
        rows, state, ends = inputs(20, packed, device)
        results = []
        for layout in ("kv", "vk"):
            leaves = [t.detach().requires_grad_() for t in rows]
            given = (state.transpose(-1, -2).contiguous() if layout == "vk" else state.clone()).requires_grad_()
            options = {"initial_state": given, "cu_seqlens": ends, "return_state": True, "l2norm": True}
            out, final = gated_delta_rule(*leaves, state_layout=layout, **options)
            assert final.is_contiguous()
            weights = torch.linspace(-1, 1, state.numel(), device=device).view_as(state)
            ((final if layout == "kv" else final.transpose(-1, -2)) * weights).sum().add(out.float().sum()).backward()
            swap = (lambda t: t) if layout == "kv" else (lambda t: t.transpose(-1, -2).contiguous())
            results.append([out.detach(), swap(final.detach()), swap(given.grad), *(t.grad for t in leaves)])
        for got, want in zip(results[1], results[0], strict=True):
            if place == "cpu":  # torch adds in the order of strides
                torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
            else:
                assert_same_bits(got, want)


@at("cpu", "cuda")
def test_without_states_nothing_changes(place: str) -> None:
    with running_on(place) as device:
        rows, _, _ = inputs(9, False, device)
        assert_same_bits(gated_delta_rule(*rows, state_layout="vk"), gated_delta_rule(*rows))


def test_errors() -> None:
    rows, state, _ = inputs(3, False, "cpu")
    with pytest.raises(ArgumentError, match="state_layout is 'kk'; expected 'kv' or 'vk'"):
        gated_delta_rule(*rows, state_layout="kk")
    with pytest.raises(ArgumentError, match="initial_state has shape"):
        gated_delta_rule(*rows, initial_state=state, state_layout="vk")
    with pytest.raises(ArgumentError, match=r"expected \[batch, heads, \d+, \d+\] for state_layout='vk'"):
        gated_delta_rule(*rows, initial_state=state[0, 0, 0], state_layout="vk")
