"""gated_delta_rule: values and gradients against the recurrence in float64, states, packed sequences, steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from unittest import mock

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits
from torch import Tensor

from rtkernels import gated_delta_rule, gated_delta_rule_step
from rtkernels.ops.attention import gated_delta_rule_plan, gated_delta_rule_scans
from rtkernels.runtime.launch.plans import Plans

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recurrence(q, k, v, g, beta, state, scale: float, l2norm: bool) -> tuple[Tensor, Tensor]:
    """One sequence [length, heads, width], token by token."""
    each = v.shape[1] // q.shape[1]
    if l2norm:
        q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + 1e-6) for t in (q, k))
    q, k = (t.repeat_interleave(each, 1) for t in (q, k))
    outs = []
    for t in range(q.shape[0]):
        state = torch.exp(g[t]).unflatten(0, (-1, 1) if g.dim() == 2 else (-1,)).unsqueeze(-1) * state
        update = beta[t][:, None] * (v[t] - (k[t].unsqueeze(1) @ state).squeeze(1))
        state = state + k[t].unsqueeze(2) * update.unsqueeze(1)
        outs.append(scale * (q[t].unsqueeze(1) @ state).squeeze(1))
    return torch.stack(outs) if outs else v.new_zeros(v.shape), state


def exact(q, k, v, g, beta, states, ends: list[int], l2norm: bool) -> tuple[Tensor, Tensor]:
    parts = [
        recurrence(*(t[first:end] for t in (q, k, v, g, beta)), states[b], q.shape[-1] ** -0.5, l2norm)
        for b, (first, end) in enumerate(pairwise(ends))
    ]
    outs, finals = zip(*parts, strict=True)
    return torch.cat((*outs, v.new_zeros(v.shape[0] - ends[-1], *v.shape[1:]))), torch.stack(finals)


def inputs(tokens, key_heads, heads, d_k, d_v, sequences, dtype, decay=0.1) -> list[Tensor]:
    q, k, v = (
        random(tokens, count, width, seed=i, dtype=dtype)
        for i, (count, width) in enumerate(((key_heads, d_k), (key_heads, d_k), (heads, d_v)))
    )
    g, beta = -decay * random(tokens, heads, seed=3).abs(), random(tokens, heads, seed=4).sigmoid()
    return [q, k, v, g, beta, random(sequences, heads, d_k, d_v, seed=5)]


def check(tensors: list[Tensor], ends: list[int] | None, place: str, l2norm: bool = True, tolerance: float = 2.0**-6):
    """Compare with the recurrence; without ends the tokens are one sequence of a batch."""
    packed, tokens = ends is not None, tensors[0].shape[0]
    with running_on(place) as device:

        def ours(*values: Tensor) -> tuple[Tensor, Tensor]:
            *rows, states = values
            if packed:
                cu = torch.tensor(ends, dtype=torch.int32, device=device)
                return gated_delta_rule(*rows, initial_state=states, cu_seqlens=cu, return_state=True, l2norm=l2norm)
            rows = (t.unsqueeze(0) for t in rows)
            out, final = gated_delta_rule(*rows, initial_state=states, return_state=True, l2norm=l2norm)
            return out.squeeze(0), final

        results = []
        for function in (ours, lambda *values: exact(*values, ends or [0, tokens], l2norm)):
            leaves = [(t if function is ours else t.double()).to(device).requires_grad_() for t in tensors]
            with poisoned():
                found = function(*leaves)
                incoming = [random(*t.shape, seed=20 + i).to(tensors[0].dtype).to(t) for i, t in enumerate(found)]
                results.append((*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)))
        for what, got, want in zip(NAMES, *results, strict=True):
            assert_near(got, want, tolerance, what)
    return results[0]


# tokens, key heads, heads, widths of k and v, type
CASES = {
    "one": (1, 1, 1, 8, 8, BF16),
    "a chunk less one": (63, 1, 1, 16, 24, BF16),
    "a chunk and one": (65, 1, 2, 64, 40, FP16),
    "three heads of a key head": (20, 2, 6, 32, 16, BF16),
    "wide": (70, 1, 1, 96, 136, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    tokens, key_heads, heads, d_k, d_v, dtype = CASES[name]
    check(inputs(tokens, key_heads, heads, d_k, d_v, 1, dtype), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_packed_sequences(place: str) -> None:
    check(inputs(80, 1, 2, 16, 16, 4, BF16), [0, 1, 1, 67, 77], place)


@at("sm_80")
@pytest.mark.parametrize("stages", (1, 2))
def test_less_shared_memory(stages: int, place: str) -> None:
    with mock.patch.object(gated_delta_rule_plan, "_MAX_STAGES", stages):
        Plans.forget_all()
        check(inputs(70, 1, 1, 16, 16, 2, BF16), [0, 1, 70], place)
    Plans.forget_all()


@contextmanager
def wgmma_scans(stages: int, processors: int) -> Iterator[None]:
    """Let scans with wgmma have so many stages, and a device so many SMs."""
    info = gated_delta_rule_scans.device_info

    def fewer(device: int):
        return dataclasses.replace(info(device), sm_count=processors)

    with (
        mock.patch.object(gated_delta_rule_scans, "_MAX_STAGES", stages),
        mock.patch.object(gated_delta_rule_scans, "device_info", fewer),
    ):
        Plans.forget_all()
        yield
    Plans.forget_all()


@at("sm_90", "cuda")
@pytest.mark.parametrize("stages", (2, 3))
def test_two_groups_of_columns(stages: int, place: str) -> None:
    """Blocks with two consumer warpgroups; the last one of three has no columns."""
    with wgmma_scans(stages, 1):
        check(inputs(200, 1, 1, 16, 136, 3, BF16), [0, 1, 1, 199], place)


@at("sm_90", "cuda")
def test_groups_do_not_change_bits(place: str) -> None:
    tensors = inputs(70, 1, 2, 16, 72, 1, BF16)
    with wgmma_scans(2, 7):  # fewer than twice its four tiles: gradients by wgmma, too
        alone = check(tensors, None, place)
    with wgmma_scans(2, 1):
        assert_equal_bits(check(tensors, None, place), alone)


@contextmanager
def without_wgmma() -> Iterator[None]:
    """Let all kernels be those of GPUs without wgmma."""
    with (
        mock.patch.object(gated_delta_rule_scans, "by_wgmma", lambda *_: False),
        mock.patch.object(gated_delta_rule_scans, "grads", gated_delta_rule_plan.grads),
    ):
        Plans.forget_all()
        yield
    Plans.forget_all()


@at("cuda")
def test_kernels_without_wgmma(place: str) -> None:
    with without_wgmma():
        check(inputs(200, 2, 4, 96, 136, 1, BF16), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("decay", (0.0, 1e-6, 20.0))
def test_decays(decay: float, place: str) -> None:
    check(inputs(70, 1, 1, 16, 16, 1, BF16, decay), None, place)


def check_strong_decays(channels: bool, place: str) -> None:
    """Compare gradients of decays as test_ssd.py does: of positive numbers, with values that the state hardly corrects.

    Sums are rounded to fp32 relative to the largest gradients, those of the decays that leave most.
    """
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.rand(66, 2, 16, generator=generator).add(0.5) for _ in range(4))
    q, k, v, dout = (t.to(BF16) for t in (q, k / 16, v, dout))
    state, dstate = torch.rand(2, 1, 2, 16, 16, generator=generator).add(0.5).to(BF16).float()
    g, beta = torch.rand(66, 2, *[16] * channels, generator=generator) / 4 + 1, torch.full((66, 2), 0.5)
    g = -g * torch.tensor([30.0, 15.0]).view(2, *[1] * channels)
    leaf = g.double().requires_grad_()
    found = recurrence(*(t.double() for t in (q, k, v)), leaf, beta.double(), state[0].double(), 1.0, False)
    (want,) = torch.autograd.grad(found, leaf, (dout.double(), dstate[0].double()))
    with running_on(place) as device, poisoned():
        leaf = g.unsqueeze(0).to(device).requires_grad_()
        q, k, v, beta, dout = (t.unsqueeze(0).to(device) for t in (q, k, v, beta, dout))
        found = gated_delta_rule(q, k, v, leaf, beta, scale=1.0, initial_state=state.to(device), return_state=True)
        (got,) = torch.autograd.grad(found, leaf, (dout, dstate.to(device)))
    for head in range(2):
        largest = want[:, head].abs().max()
        assert_near(got[0, :, head].cpu().double() / largest, want[:, head] / largest, 6 * 2.0**-8, f"head {head}")


@at("cpu", "sm_80", "sm_90", "cuda")
def test_gradients_of_strong_decays(place: str) -> None:
    check_strong_decays(False, place)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("beta", (1.0, 2.0))
def test_equal_keys(beta: float, place: str) -> None:
    """M has entries of beta everywhere; products of it grow, the inverse does not."""
    q, k, v, g, _, state = inputs(70, 1, 1, 16, 16, 1, BF16, 0.01)
    tensors = [q, k[:1].expand_as(k).contiguous(), v, g, torch.full_like(g, beta), state]
    # With beta 2 each token reflects the state, and roundings of rows of a chunk to bf16 add up.
    check(tensors, None, place, tolerance=2.0**-4 if beta == 2.0 else 2.0**-6)


# beta at least, log decay, share of a key that is its own
REFLECTIONS = {"equal keys": (2.0, -0.001, 0.0), "strengths that differ": (1.5, 0.0, 0.0), "alike": (2.0, -0.001, 0.1)}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", REFLECTIONS)
def test_reflections(name: str, place: str) -> None:
    """T has entries near 2 of alternating signs. With it in 16 bits errors of states grow threefold per chunk."""
    least, decay, share = REFLECTIONS[name]
    q, k, v, g, beta, state = inputs(300, 1, 1, 16, 16, 1, BF16)
    k = (k[:1] + share * k).to(BF16)
    tensors = [q, k, v, torch.full_like(g, decay), least + (2.0 - least) * beta, state]
    with wgmma_scans(2, 1):  # gradients by wgmma, too
        check(tensors, None, place, tolerance=2.0**-3)


@at("sm_90", "cuda")
def test_packed_sequences_with_three_heads_of_a_key_head(place: str) -> None:
    tensors = inputs(80, 2, 6, 16, 72, 4, BF16)
    ends = [0, 1, 1, 67, 77]
    assert_equal_bits(check(tensors, ends, place), check(tensors, ends, place))


@at("sm_90", "cuda")
def test_wide_keys_and_strong_decays(place: str) -> None:
    check(inputs(70, 1, 2, 128, 16, 1, BF16, 20.0), None, place)


@at("sm_90")
def test_gradients_inside_chunks_are_by_wgmma(place: str) -> None:
    """With a decay per head and a correction by the state; others have the kernels of all GPUs."""
    kernels = []
    of_all = gated_delta_rule_plan.grads
    with mock.patch.object(gated_delta_rule_plan, "grads", lambda *call: (kernels.append(call[0]), of_all(*call))[1]):
        Plans.forget_all()
        check(inputs(20, 1, 1, 16, 16, 1, BF16), None, place)
    Plans.forget_all()
    assert not kernels


@at("sm_80", "cuda")
def test_reflections_without_wgmma(place: str) -> None:
    """Sums of products by T and K^T nearly cancel: with right operands in one part dv is off by 2^-2."""
    q, k, v, g, _, state = inputs(300, 1, 2, 96, 136, 1, BF16)
    tensors = [q, k[:1].expand_as(k).contiguous(), v, torch.full_like(g, -0.001), torch.full_like(g, 2.0), state]
    with without_wgmma():
        check(tensors, None, place, tolerance=2.0**-4)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_without_norms(place: str) -> None:
    q, k, *others = inputs(66, 1, 1, 16, 16, 1, BF16)
    check([q, k / 4, *others], None, place, l2norm=False)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_a_decay_of_minus_infinity_forgets(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in inputs(20, 1, 1, 16, 16, 1, BF16))
        g[10] = -torch.inf
        rows = [t.unsqueeze(0) for t in (q, k, v, g, beta)]
        out = gated_delta_rule(*rows, initial_state=state, l2norm=True)
        alone = gated_delta_rule(*(t[:, 10:].contiguous() for t in rows), l2norm=True)
        assert_near(out[:, 10:], alone.double(), 2.0**-6)


@at("cpu", "sm_80", "cuda")
def test_steps_are_the_whole(place: str) -> None:
    with running_on(place) as device:
        tensors = [t.to(device) for t in inputs(12, 2, 4, 32, 40, 1, BF16)]
        rows, state = [t.view(2, 6, *t.shape[1:]) for t in tensors[:5]], random(2, 4, 32, 40, seed=6).to(device)
        want, final = gated_delta_rule(*rows, initial_state=state, return_state=True, l2norm=True)
        outs = [gated_delta_rule_step(*(t[:, i] for t in rows), state, l2norm=True) for i in range(6)]
        assert_near(torch.stack(outs, 1), want.double(), 2.0**-6)
        assert_near(state, final.double(), 2.0**-6)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_states_carry_on(place: str) -> None:
    with running_on(place) as device:
        *rows, _ = (t.to(device).unsqueeze(0) for t in inputs(90, 1, 1, 16, 16, 1, BF16))
        whole, final = gated_delta_rule(*rows, return_state=True, l2norm=True)
        first, state = gated_delta_rule(*(t[:, :33] for t in rows), return_state=True, l2norm=True)
        second, last = gated_delta_rule(*(t[:, 33:] for t in rows), initial_state=state, return_state=True, l2norm=True)
        assert_near(torch.cat((first, second), 1), whole.double(), 2.0**-6)
        assert_near(last, final.double(), 2.0**-6)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    from ops.attention import test_gated_delta_segments, test_kda

    test_gated_delta_segments.test_packed_sequences(64, "sm_90")
    test_packed_sequences("sm_80")
    test_packed_sequences("sm_90")
    test_steps_are_the_whole("sm_90")
    test_kda.test_packed_sequences("sm_90")
    test_kda.test_steps_are_the_whole("sm_90")


@at("sm_90", "cuda")
def test_equal_bits_twice(place: str) -> None:
    tensors = inputs(66, 1, 2, 16, 16, 1, BF16)
    assert_equal_bits(check(tensors, None, place), check(tensors, None, place))


@at("cpu", "sm_80", "sm_90", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in inputs(0, 1, 2, 16, 16, 1, BF16))
        rows = [t.unsqueeze(0) for t in (q, k, v, g, beta)]
        out, final = gated_delta_rule(*rows, initial_state=state, return_state=True)
        assert out.shape == (1, 0, 2, 16) and torch.equal(final, state)


def test_compiled() -> None:
    rows = [t.unsqueeze(0) for t in inputs(9, 1, 2, 16, 16, 1, BF16)[:5]]
    rows[0].requires_grad_()
    want = gated_delta_rule(*rows, l2norm=True)
    got = torch.compile(lambda *r: gated_delta_rule(*r, l2norm=True), fullgraph=True, backend="aot_eager")(*rows)
    assert_equal_bits(got, want)
    dy = torch.ones_like(want)
    assert_equal_bits(torch.autograd.grad(got, rows[0], dy)[0], torch.autograd.grad(want, rows[0], dy)[0])


_Q, _V, _G = torch.ones(1, 4, 2, 16).bfloat16(), torch.ones(1, 4, 4, 16).bfloat16(), torch.zeros(1, 4, 4)
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "dimensions": (lambda: gated_delta_rule(_Q[0], _Q, _V, _G, _G), r"q has shape \(4, 2, 16\); expected 4 dim"),
        "heads": (
            lambda: gated_delta_rule(_Q, _Q, _V[:, :, :3], _G[..., :3], _G[..., :3]),
            "v has 3 heads; expected a multiple of the 2 heads of q and k",
        ),
        "width": (lambda: gated_delta_rule(_Q[..., :4], _Q[..., :4], _V, _G, _G), "q has heads of 4 elements"),
        "g": (lambda: gated_delta_rule(_Q, _Q, _V, _G[..., :2], _G), r"g has shape \(1, 4, 2\); expected \(1, 4, 4\)"),
        "state": (
            lambda: gated_delta_rule(_Q, _Q, _V, _G, _G, initial_state=torch.ones(1, 2, 16, 16)),
            r"initial_state has shape \(1, 2, 16, 16\); expected \(1, 4, 16, 16\)",
        ),
        "step": (
            lambda: gated_delta_rule_step(_Q[:, 0], _Q[:, 0], _V[:, 0], None, _G[:, 0], torch.ones(1, 4, 16, 8)),
            r"state has shape \(1, 4, 16, 8\); expected \(1, 4, 16, 16\)",
        ),
    }
)
