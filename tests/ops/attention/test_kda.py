"""gated_delta_rule with a decay per channel (KDA): against the recurrence, states, packed sequences, steps."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from ops.attention.test_gated_delta_rule import BF16, FP16, check, check_strong_decays, random
from ops.attention.test_gated_delta_rule import inputs as inputs_of_heads
from support.attention_exact import assert_near
from support.compare import running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits
from torch import Tensor

from rtkernels import gated_delta_rule, gated_delta_rule_step
from rtkernels.ops.attention import gated_delta_rule_plan
from rtkernels.runtime.launch.plans import Plans


def inputs(tokens, heads, d_k, d_v, sequences, dtype, decay=0.1, key_heads=None) -> list[Tensor]:
    q, k, v, _, beta, state = inputs_of_heads(tokens, key_heads or heads, heads, d_k, d_v, sequences, dtype)
    return [q, k, v, -decay * random(tokens, heads, d_k, seed=3).abs(), beta, state]


# tokens, heads, widths of k and v, type
CASES = {
    "one": (1, 1, 8, 8, BF16),
    "a chunk less one": (63, 1, 16, 24, BF16),
    "a chunk and one": (65, 2, 64, 40, FP16),
    "wide": (70, 1, 96, 136, BF16),
    "as models": (130, 1, 128, 128, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    tokens, heads, d_k, d_v, dtype = CASES[name]
    check(inputs(tokens, heads, d_k, d_v, 1, dtype), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_packed_sequences(place: str) -> None:
    check(inputs(80, 2, 16, 16, 4, BF16), [0, 1, 1, 67, 77], place)


@at("cpu", "sm_80", "cuda")
def test_heads_that_share_keys(place: str) -> None:
    check(inputs(20, 6, 32, 16, 1, BF16, key_heads=2), None, place)


@at("sm_80")
@pytest.mark.parametrize("stages", (1, 2))
def test_less_shared_memory(stages: int, place: str) -> None:
    with mock.patch.object(gated_delta_rule_plan, "_MAX_STAGES", stages):
        Plans.forget_all()
        check(inputs(70, 1, 16, 16, 2, BF16), [0, 1, 70], place)
    Plans.forget_all()


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("decay", (0.0, 1e-6, 5.0, 20.0))
def test_decays(decay: float, place: str) -> None:
    check(inputs(70, 1, 16, 16, 1, BF16, decay), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_gradients_of_strong_decays(place: str) -> None:
    check_strong_decays(True, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_decays_that_differ_much(place: str) -> None:
    """Some channels forget everything between two tokens, others nothing."""
    tensors = inputs(70, 1, 16, 16, 1, BF16)
    tensors[3] = tensors[3] * torch.tensor([0.0, 0.1, 10.0, 1000.0]).repeat(4)
    check(tensors, None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_equal_keys(place: str) -> None:
    q, k, v, g, beta, state = inputs(70, 1, 16, 16, 1, BF16, 0.01)
    # dbeta is a difference of larger sums; keys times their decays are rounded, unlike those of the rule by heads.
    tensors = [q, k[:1].expand_as(k).contiguous(), v, g, torch.ones_like(beta), state]
    check(tensors, None, place, tolerance=2.0**-5)


@at("cpu", "sm_80", "cuda")
def test_without_norms(place: str) -> None:
    q, k, *others = inputs(66, 1, 16, 16, 1, BF16)
    check([q, k / 4, *others], None, place, l2norm=False)


@at("cpu", "sm_80", "cuda")
def test_equal_decays_are_those_of_a_head(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in inputs(70, 2, 32, 16, 1, BF16))
        rows, alone = [t.unsqueeze(0) for t in (q, k, v)], g[..., 0].unsqueeze(0)
        options = {"initial_state": state, "return_state": True, "l2norm": True}
        want = gated_delta_rule(*rows, alone, beta.unsqueeze(0), **options)
        got = gated_delta_rule(*rows, alone.unsqueeze(-1).expand(1, 70, 2, 32), beta.unsqueeze(0), **options)
        for a, b in zip(got, want, strict=True):
            assert_near(a, b.double(), 2.0**-6)


@at("cpu", "sm_80", "cuda")
def test_steps_are_the_whole(place: str) -> None:
    with running_on(place) as device:
        tensors = [t.to(device) for t in inputs(12, 4, 40, 40, 1, BF16)]
        rows, state = [t.view(2, 6, *t.shape[1:]) for t in tensors[:5]], random(2, 4, 40, 40, seed=6).to(device)
        want, final = gated_delta_rule(*rows, initial_state=state, return_state=True, l2norm=True)
        outs = [gated_delta_rule_step(*(t[:, i] for t in rows), state, l2norm=True) for i in range(6)]
        assert_near(torch.stack(outs, 1), want.double(), 2.0**-6)
        assert_near(state, final.double(), 2.0**-6)


@at("cpu", "sm_80", "cuda")
def test_a_decay_of_minus_infinity_forgets(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in inputs(20, 1, 16, 16, 1, BF16))
        g[10] = -torch.inf
        rows = [t.unsqueeze(0) for t in (q, k, v, g, beta)]
        out = gated_delta_rule(*rows, initial_state=state, l2norm=True)
        alone = gated_delta_rule(*(t[:, 10:].contiguous() for t in rows), l2norm=True)
        assert_near(out[:, 10:], alone.double(), 2.0**-6)


@at("sm_90", "cuda")
def test_equal_bits_twice(place: str) -> None:
    tensors = inputs(66, 2, 16, 16, 1, BF16)
    assert_equal_bits(check(tensors, None, place), check(tensors, None, place))


@at("cpu", "sm_80", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in inputs(0, 2, 16, 16, 1, BF16))
        rows = [t.unsqueeze(0) for t in (q, k, v, g, beta)]
        out, final = gated_delta_rule(*rows, initial_state=state, return_state=True)
        assert out.shape == (1, 0, 2, 16) and torch.equal(final, state)


_Q, _G = torch.ones(1, 4, 2, 16).bfloat16(), torch.zeros(1, 4, 2)
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "width": (
            lambda: gated_delta_rule(_Q, _Q, _Q, torch.zeros(1, 4, 2, 8), _G),
            r"g has shape \(1, 4, 2, 8\); expected \(1, 4, 2, 16\)",
        ),
        "step": (
            lambda: gated_delta_rule_step(*(_Q[:, 0],) * 3, torch.zeros(1, 2, 24), _G[:, 0], torch.zeros(1, 2, 16, 16)),
            r"g has shape \(1, 2, 24\); expected \(1, 2, 16\)",
        ),
    }
)
