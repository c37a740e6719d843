"""Raw gates of gated_delta_rule and its step: values and gradients against float64, layouts, sums, slots, states."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from ops.attention.test_gated_delta_rule import BF16, FP16, exact, random
from support.attention_exact import assert_near
from support.compare import assert_close, poisoned, running_on
from support.places import at, error_tests, order_test
from support.ways import assert_equal_bits
from torch import Tensor

from rtkernels import batch_invariant, gated_delta_rule, gated_delta_rule_step
from rtkernels.ops.attention.delta_gates import gates

F32 = torch.float32


def exact_gates(g, beta, A_log, dt_bias, bound: float, sigmoid: bool, factor: float) -> tuple[Tensor, Tensor]:
    """In the dtype of the arguments; a bound of 0 is none."""
    if A_log is not None:
        x = g if dt_bias is None else g + dt_bias.view(g.shape[beta.dim() - 1 :])
        rate = A_log.exp().view(-1, *[1] * (g.dim() - beta.dim()))
        g = bound * torch.sigmoid(rate * x) if bound else -rate * torch.nn.functional.softplus(x)
    return g, factor * (beta.sigmoid() if sigmoid else beta)


# Rows, heads, width (0: one number a head), types of g, beta, A_log and dt_bias, how g and beta lie in memory.
CASES = {
    "one": (1, 1, 0, BF16, BF16, F32, F32, "dense"),
    "heads": (300, 8, 0, BF16, F32, F32, BF16, "dense"),
    "odd heads": (70, 5, 0, FP16, FP16, BF16, F32, "dense"),
    "slices of a projection": (70, 8, 0, BF16, BF16, BF16, BF16, "slices"),
    "transposed": (33, 4, 0, F32, F32, F32, F32, "transposed"),
    "misaligned": (9, 4, 0, F32, BF16, F32, FP16, "misaligned"),
    "many heads": (3, 300, 0, F32, FP16, F32, F32, "dense"),
    "channels": (40, 3, 24, BF16, BF16, F32, F32, "dense"),
    "channels of a projection": (21, 2, 96, FP16, BF16, F32, BF16, "slices"),
    "many channels": (19, 9, 128, BF16, BF16, F32, F32, "dense"),
    "expanded channels": (6, 2, 16, F32, F32, F32, F32, "expanded"),
    "none": (0, 4, 16, BF16, F32, F32, F32, "dense"),
}


def laid_out(t: Tensor, how: str) -> Tensor:
    """Return the same numbers with other strides, differentiable."""
    if how == "slices":
        row = t.flatten(1)
        rows = torch.cat((row.new_full((row.shape[0], 8), torch.nan), row, torch.full_like(row, torch.nan)), 1)
        return rows[:, 8 : 8 + row.shape[1]].view(t.shape)
    if how == "transposed":
        return t.t().contiguous().t()
    return torch.cat((t.flatten()[:1], t.flatten()))[1:].view(t.shape) if how == "misaligned" else t


def given(rows: int, heads: int, width: int, *dtypes: torch.dtype) -> list[Tensor]:
    """Return raw g, beta, A_log and dt_bias."""
    own = (heads, width) if width else (heads,)
    shapes = ((rows, *own), (rows, heads), (heads,), own)
    return [random(*shape, seed=1 + i).to(dtype) for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))]


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("bound", (0.0, -5.0))
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, bound: float, place: str) -> None:
    *sizes, how = CASES[name]
    with running_on(place) as device:
        tensors, results = given(*sizes), []
        if how == "expanded":
            tensors[0] = tensors[0][..., :1].expand(tensors[0].shape)
        for function in (gates, exact_gates):
            own = [t.double() if function is exact_gates else t for t in tensors]
            leaves = [t.to(device).detach().requires_grad_() for t in own]
            first = [laid_out(t, how) for t in leaves[:2]]
            with poisoned():
                found = function(*first, *leaves[2:], bound, True, 2.0)
                incoming = [random(*t.shape, seed=9 + i).to(t) for i, t in enumerate(found)]
                results.append([*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)])
        names = ("decay", "strength", "dg", "dbeta", "dA_log", "ddt_bias")
        for what, got, want in zip(names, *results, strict=True):
            assert got.dtype == (F32 if what in names[:2] else tensors[names.index(what) - 2].dtype), what
            assert_near(got, want, 2.0**-19 if got.dtype == F32 else torch.finfo(got.dtype).eps, what)


@at("cpu", "sm_90", "cuda")
def test_long_sums(place: str) -> None:
    """Slices of rows; heads of one column and of several."""
    for sizes in ((5000, 12, 0), (700, 2, 40)):
        with running_on(place) as device:
            tensors = [t.to(device) for t in given(*sizes, *(F32,) * 4)]
            leaves, exactly = ([t.to(d).requires_grad_() for t in tensors] for d in (F32, torch.float64))
            found, want = gates(*leaves, 0.0, True, 1.0)[0], exact_gates(*exactly, 0.0, True, 1.0)[0]
            incoming = torch.ones_like(found)
            sums = torch.autograd.grad(found, leaves[2:], incoming)
            for got, right in zip(sums, torch.autograd.grad(want, exactly[2:], incoming.double()), strict=True):
                assert_close(got, right, c=16.0)  # all terms have one sign


@at("cpu", "sm_80", "cuda")
def test_parts(place: str) -> None:
    """Only one gate, or only some gradients: each has the bits of a call with everything."""
    with running_on(place) as device:
        g, beta, rate, bias = (t.to(device) for t in given(40, 4, 0, BF16, BF16, F32, F32))
        decay, strength = gates(g, beta, rate, bias, 0.0, True, 2.0)
        assert_equal_bits(gates(g, beta, rate, bias, 0.0, False, 1.0), (decay, beta.float()))
        assert_equal_bits(gates(g, beta, None, None, 0.0, True, 2.0), (g.float(), strength))
        assert_equal_bits(gates(g, beta, None, None, 0.0, False, 2.0)[1], 2 * beta.float())
        assert_close(gates(g, beta, rate, None, 0.0, True, 2.0)[0], exact_gates(
            g.double(), beta, rate.double(), None, 0.0, True, 2.0
        )[0], c=8.0)  # fmt: skip
        incoming, all_grads = (torch.ones_like(decay), torch.ones_like(strength)), None
        for needed in (15, 1, 2, 4, 8, 6, 9, 12):
            leaves = [t.clone().requires_grad_(bool(needed >> i & 1)) for i, t in enumerate((g, beta, rate, bias))]
            found = gates(*leaves, 0.0, True, 2.0)
            grads = torch.autograd.grad(found, [t for t in leaves if t.requires_grad], incoming)
            all_grads = all_grads or grads
            assert_equal_bits(grads, tuple(t for i, t in enumerate(all_grads) if needed >> i & 1))


@at("cpu", "sm_90", "cuda")
@pytest.mark.parametrize("bound", (0.0, -5.0))
def test_special_values(bound: float, place: str) -> None:
    inf, nan = torch.inf, torch.nan
    with running_on(place) as device:
        g = torch.tensor([-inf, -200.0, -30.0, 0.0, 19.9, 20.1, 3e38, inf, nan], device=device).view(-1, 1)
        beta = g.clone()
        rate, bias = torch.zeros(1, device=device), torch.ones(1, device=device)
        leaves = [t.requires_grad_() for t in (g, beta, rate, bias)]
        decay, strength = gates(*leaves, bound, True, 1.0)
        want, logits = exact_gates(*(t.double() for t in leaves), bound, True, 1.0)
        assert_close(decay, want.detach(), c=64.0)
        assert_close(strength, logits.detach(), c=64.0)
        incoming = torch.ones_like(decay)
        incoming[[0, 7, 8]] = 0.0  # a gradient of 0 stays 0
        grads = torch.autograd.grad((decay, strength), leaves, (incoming, incoming))
        assert all(t.isfinite().all() for t in grads)
        assert not grads[0][[0, 7, 8]].any() and not grads[1][[0, 7, 8]].any()


@at("cpu", "sm_80", "sm_90", "cuda")
def test_softplus_is_accurate_over_its_range(place: str) -> None:
    """Relative to each result: far below 0 the decay and its gradients are nearly e^x."""
    with running_on(place) as device:
        g = torch.linspace(-80.0, 30.0, 1103, device=device).view(-1, 1)
        leaves, exactly = ([t.to(d).requires_grad_() for t in (g, g[:1] * 0)] for d in (F32, torch.float64))
        decay = gates(leaves[0], g, leaves[1].view(1), None, 0.0, True, 1.0)[0]
        want = -torch.log1p(exactly[0].exp())
        assert_close(decay.detach(), want.detach(), c=16.0)
        got = torch.autograd.grad(decay, leaves[0], torch.ones_like(decay))[0]
        slope = -torch.sigmoid(exactly[0].detach())
        assert_close(got, slope, c=16.0)


def _ordered(width: int) -> tuple[Tensor, ...]:
    leaves = [t.requires_grad_() for t in given(150, 3, width, BF16, BF16, F32, F32)]
    found = gates(*leaves, 0.0, True, 1.0)
    return (*found, *torch.autograd.grad(found, leaves, [torch.ones_like(t) for t in found]))


test_in_every_order = order_test(_ordered, 0, 24)


# ---- the rule -------------------------------------------------------------------------------------------------------


def rule_inputs(tokens, key_heads, heads, d_k, d_v, sequences, channels) -> list[Tensor]:
    q, k, v = (
        random(tokens, count, width, seed=i, dtype=BF16)
        for i, (count, width) in enumerate(((key_heads, d_k), (key_heads, d_k), (heads, d_v)))
    )
    g, beta, rate, bias = given(tokens, heads, d_k if channels else 0, *(F32,) * 4)
    return [q, k, v, g - 2, beta, random(sequences, heads, d_k, d_v, seed=6), rate, bias]


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("bound", (None, -5.0))
@pytest.mark.parametrize("channels", (False, True))
@pytest.mark.parametrize("ends", (None, [0, 1, 1, 40]))
def test_rule(ends: list[int] | None, channels: bool, bound: float | None, place: str) -> None:
    tensors = rule_inputs(45, 2, 2 if channels else 4, 16, 24, 1 if ends is None else 3, channels)
    if ends is not None:
        tensors[3][40:], tensors[4][40:] = torch.nan, torch.inf  # of no sequence
    with running_on(place) as device:
        options = {"lower_bound": bound, "beta_sigmoid": True, "beta_scale": 2.0, "l2norm": True, "return_state": True}

        def ours(q, k, v, g, beta, state, rate, bias) -> tuple[Tensor, Tensor]:
            gate = {"A_log": rate, "dt_bias": bias, "initial_state": state, **options}
            if ends is not None:
                cu = torch.tensor(ends, dtype=torch.int32, device=device)
                return gated_delta_rule(q, k, v, g, beta, cu_seqlens=cu, **gate)
            out, final = gated_delta_rule(*(t.unsqueeze(0) for t in (q, k, v, g, beta)), **gate)
            return out.squeeze(0), final

        def exactly(q, k, v, g, beta, state, rate, bias) -> tuple[Tensor, Tensor]:
            g, beta = exact_gates(g, beta, rate, bias, bound or 0.0, True, 2.0)
            return exact(q, k, v, g, beta, state, ends or [0, 45], True)

        results = []
        for function in (ours, exactly):
            leaves = [(t if function is ours else t.double()).to(device).requires_grad_() for t in tensors]
            if function is exactly and ends is not None:
                leaves[3:5] = (t.detach().nan_to_num(0.0, 0.0, 0.0).requires_grad_() for t in leaves[3:5])
            with poisoned():
                found = function(*leaves)
                incoming = [random(*t.shape, seed=20 + i).to(BF16).to(t) for i, t in enumerate(found)]
                results.append((*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)))
        names = ("out", "state", "dq", "dk", "dv", "dg", "dbeta", "dstate", "dA_log", "ddt_bias")
        for what, got, want in zip(names, *results, strict=True):
            assert_near(got, want, 2.0**-5, what)  # with beta to 2


@at("cpu", "sm_80", "cuda")
def test_a_flat_bias(place: str) -> None:
    with running_on(place) as device:
        tensors = [t.to(device) for t in rule_inputs(9, 2, 2, 16, 16, 1, True)]
        rows, (state, rate, bias) = [t.unsqueeze(0) for t in tensors[:5]], tensors[5:]
        outs = [
            gated_delta_rule(*rows, initial_state=state, A_log=rate, dt_bias=t, beta_sigmoid=True)
            for t in (bias, bias.flatten())
        ]
        assert_equal_bits(*outs)


def test_not_batch_invariant() -> None:
    rows = [t.unsqueeze(0) for t in rule_inputs(9, 2, 2, 16, 16, 1, False)[:5]]
    rate = torch.zeros(2, requires_grad=True)
    with batch_invariant(3), pytest.raises(Exception, match="A_log or dt_bias is not batch-invariant"):
        gated_delta_rule(*rows, A_log=rate).sum().backward()


def test_compiled() -> None:
    *rows, _, rate, bias = rule_inputs(9, 2, 4, 16, 16, 1, False)
    leaves = [t.unsqueeze(0).requires_grad_() for t in rows] + [rate.requires_grad_(), bias.requires_grad_()]

    def run(q, k, v, g, beta, rate, bias) -> Tensor:
        return gated_delta_rule(q, k, v, g, beta, A_log=rate, dt_bias=bias, beta_sigmoid=True, l2norm=True)

    want, got = run(*leaves), torch.compile(run, fullgraph=True, backend="aot_eager")(*leaves)
    assert_equal_bits(got, want)
    dy = torch.ones_like(want)
    assert_equal_bits(*(torch.autograd.grad(t, leaves, dy) for t in (got, want)))


# ---- the step -------------------------------------------------------------------------------------------------------


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("bound", (None, -5.0))
@pytest.mark.parametrize("channels", (False, True))
def test_steps_are_the_whole(channels: bool, bound: float | None, place: str) -> None:
    with running_on(place) as device:
        tensors = [t.to(device) for t in rule_inputs(12, 2, 4, 32, 40, 2, channels)]
        rows, (state, rate, bias) = [t.view(2, 6, *t.shape[1:]) for t in tensors[:5]], tensors[5:]
        rows[3:5] = (t.bfloat16() for t in rows[3:5])
        gate = {"A_log": rate.bfloat16(), "dt_bias": bias, "lower_bound": bound, "beta_sigmoid": True}
        gate["beta_scale"] = 0.5
        want, final = gated_delta_rule(*rows, initial_state=state, return_state=True, l2norm=True, **gate)
        outs = [gated_delta_rule_step(*(t[:, i] for t in rows), state, l2norm=True, **gate) for i in range(6)]
        assert_near(torch.stack(outs, 1), want.double(), 2.0**-6)
        assert_near(state, final.double(), 2.0**-6)


def step_inputs(channels: bool, batch: int = 3) -> list[Tensor]:
    """Return q, k, v, g, beta and states [batch]; heads of v share keys."""
    return [t.view(t.shape[0], *t.shape[1:]) for t in rule_inputs(batch, 2, 4, 40, 72, batch, channels)[:6]]


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("channels", (False, True))
def test_step_with_any_strides(channels: bool, place: str) -> None:
    """Also of g and beta: expanded, transposed, slices; float64 and no g at all."""
    with running_on(place) as device:
        q, k, v, g, beta, state = (t.to(device) for t in step_inputs(channels))
        g, beta = -g.abs(), beta.sigmoid()
        want = gated_delta_rule_step(q, k, v, g, beta, after := state.clone(), l2norm=True)
        wide = torch.full((3, 2, *g.shape[1:]), torch.nan, device=device)
        wide[:, 1] = g
        for other, strengths in (
            (wide[:, 1], torch.cat((beta, beta), 1)[:, 4:]), (g.double(), beta.double()),
            (g.transpose(0, -1).contiguous().transpose(0, -1), beta.t().contiguous().t()),
        ):  # fmt: skip
            out = gated_delta_rule_step(q, k, v, other, strengths, own := state.clone(), l2norm=True)
            assert_equal_bits((out, own), (want, after))
        zeros = torch.zeros_like(beta)
        want = gated_delta_rule_step(q, k, v, zeros, beta[:, :1].expand(3, 4), after := state.clone())
        out = gated_delta_rule_step(q, k, v, None, beta[:, :1].expand(3, 4), own := state.clone())
        assert_equal_bits((out, own), (want, after))


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("dtype", (F32, BF16))
@pytest.mark.parametrize("channels", (False, True))
def test_slots(channels: bool, dtype: torch.dtype, place: str) -> None:
    with running_on(place) as device:
        *tensors, state = (t.to(device) for t in step_inputs(channels, 5))
        tensors[3] = -tensors[3].abs()
        pool = random(7, *state.shape[1:], seed=8).to(device, dtype)
        before, slots = pool.clone(), torch.tensor([6, -1, 0, 7, 3], dtype=torch.int32, device=device)
        out = gated_delta_rule_step(*tensors, pool, slots=slots, l2norm=True)
        own = before[[6, 0, 3]]
        want = gated_delta_rule_step(*(t[[0, 2, 4]] for t in tensors), own, l2norm=True)
        assert_equal_bits(out[[0, 2, 4]], want)
        assert_equal_bits(pool[[6, 0, 3]], own)
        assert_equal_bits(pool[[1, 2, 4, 5]], before[[1, 2, 4, 5]])
        assert not out[[1, 3]].any()


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("channels", (False, True))
def test_states_of_16_bits(channels: bool, place: str) -> None:
    """They are rounded once after each token."""
    with running_on(place) as device:
        *tensors, state = (t.to(device) for t in step_inputs(channels))
        tensors[3] = -tensors[3].abs()
        own, wide = state.to(BF16), state.to(BF16).float()
        for _ in range(3):
            out = gated_delta_rule_step(*tensors, own, l2norm=True)
            assert_equal_bits(out, gated_delta_rule_step(*tensors, wide, l2norm=True))
            wide = wide.to(BF16).float()
            assert_equal_bits(own.float(), wide)


@at("cpu", "sm_80", "cuda")
def test_no_sequences(place: str) -> None:
    with running_on(place) as device:
        tensors = [t.to(device)[:0] for t in step_inputs(False)[:5]]
        pool, slots = torch.ones(2, 4, 40, 72, device=device), torch.zeros(0, dtype=torch.int32, device=device)
        assert gated_delta_rule_step(*tensors, pool[:0].clone()).shape == (0, 4, 72)
        assert gated_delta_rule_step(*tensors, pool, slots=slots).shape == (0, 4, 72)
        assert (pool == 1).all()


_Q, _V, _G = torch.ones(1, 4, 2, 16).bfloat16(), torch.ones(1, 4, 4, 16).bfloat16(), torch.zeros(1, 4, 4)
_rule = partial(gated_delta_rule, _Q, _Q, _V, _G, _G)
_step = partial(gated_delta_rule_step, _Q[0], _Q[0], _V[0], _G[0], _G[0])
_POOL = torch.zeros(4, 4, 16, 16)
test_errors_on_the_cpu, test_errors_in_the_launchers = error_tests(
    {
        "A_log": (lambda: _rule(A_log=torch.ones(2)), r"A_log has shape \(2,\); expected \(4,\), that of heads of v"),
        "types": (lambda: _rule(A_log=torch.ones(4, dtype=torch.int32)), "A_log has dtype int32; expected a floating"),
        "types of a step": (
            lambda: _step(_POOL[:4], A_log=torch.ones(4), dt_bias=torch.ones(4, dtype=torch.complex64)),
            "dt_bias has dtype complex64; expected a floating",
        ),
        "dt_bias": (
            lambda: _rule(A_log=torch.ones(4), dt_bias=torch.ones(4, 16)),
            r"dt_bias has shape \(4, 16\); expected \(4,\)",
        ),
        "dt_bias alone": (lambda: _rule(dt_bias=torch.ones(4)), "dt_bias is given, but A_log is None"),
        "bound alone": (lambda: _step(_POOL, lower_bound=-5.0), "lower_bound is given, but A_log is None"),
        "bound": (lambda: _rule(A_log=torch.ones(4), lower_bound=0.5), "lower_bound is 0.5; expected a negative"),
        "no g": (
            lambda: gated_delta_rule(_Q, _Q, _V, None, _G, A_log=torch.ones(4)), "A_log is given, but g is None"
        ),
        "factor": (lambda: _step(_POOL, beta_scale=torch.inf), "beta_scale is inf; expected a finite number"),
        "g": (
            lambda: gated_delta_rule(_Q, _Q, _V, _G[..., :2], _G, A_log=torch.ones(4)),
            r"g has shape \(1, 4, 2\); expected \(1, 4, 4\)",
        ),
        "slots": (
            lambda: _step(_POOL, slots=torch.zeros(3, dtype=torch.int32)), r"slots is torch.int32 \(3,\); expected"
        ),
        "slots of 64 bits": (lambda: _step(_POOL, slots=torch.zeros(4, dtype=torch.int64)), "slots is torch.int64"),
        "state": (
            lambda: _step(torch.zeros(9, 4, 16, 8), slots=torch.zeros(4, dtype=torch.int32)),
            r"state has shape \(9, 4, 16, 8\); expected \(9, 4, 16, 16\)",
        ),
        "state's type": (lambda: _step(_POOL.half()), "state has dtype float16; expected one of float32, bfloat16"),
    }
)  # fmt: skip
