"""ssd: values and gradients against the recurrence in float64, states, packed sequences, steps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from support.attention_exact import assert_near
from support.compare import poisoned, running_on
from support.places import at, error_tests
from support.ways import assert_equal_bits
from torch import Tensor

from rtkernels import ssd, ssd_step
from rtkernels.errors import ArgumentError

BF16, FP16 = torch.bfloat16, torch.float16
NAMES = ("out", "state", "dx", "ddt", "dA", "dB", "dC", "dD", "dbias", "dstate")
LIMIT = (0.05, 0.9)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def recurrence(x, dt, a, b, c, d, bias, state) -> tuple[Tensor, Tensor]:
    """One sequence [length, heads, width], token by token."""
    each = x.shape[1] // b.shape[1]
    b, c = (t.repeat_interleave(each, 1) for t in (b, c))
    time, outs = dt if bias is None else F.softplus(dt + bias).clamp(*LIMIT), []
    for t in range(x.shape[0]):
        state = torch.exp(a * time[t])[:, None, None] * state
        state = state + (time[t][:, None] * x[t]).unsqueeze(2) * b[t].unsqueeze(1)
        outs.append((state @ c[t].unsqueeze(2)).squeeze(2) + d[:, None] * x[t])
    return torch.stack(outs) if outs else x.new_zeros(x.shape), state


def exact(x, dt, a, b, c, d, bias, states, ends: list[int]) -> tuple[Tensor, Tensor]:
    parts = [
        recurrence(x[first:end], dt[first:end], a, b[first:end], c[first:end], d, bias, states[i])
        for i, (first, end) in enumerate(pairwise(ends))
    ]
    outs, finals = zip(*parts, strict=True)
    return torch.cat((*outs, x.new_zeros(x.shape[0] - ends[-1], *x.shape[1:]))), torch.stack(finals)


def inputs(tokens, groups, heads, d_state, width, sequences, dtype, rate=0.3) -> list[Tensor]:
    x = random(tokens, heads, width, dtype=dtype)
    b, c = (random(tokens, groups, d_state, seed=i, dtype=dtype) * d_state**-0.25 for i in (1, 2))
    dt, a, d, bias = random(tokens, heads, seed=3), -rate * random(heads, seed=4).abs(), random(heads, seed=5), None
    bias = random(heads, seed=6)
    return [x, dt, a, b, c, d, bias, random(sequences, heads, width, d_state, seed=7)]


def error_of(got: Tensor, want: Tensor) -> float:
    """Return the largest error, as a part of the largest value."""
    if not want.numel():
        return 0.0
    return float((got.detach().double() - want).abs().max() / want.abs().max().clamp(min=1e-30))


def check(tensors: list[Tensor], ends: list[int] | None, place: str):
    """Compare with the recurrence in float64: errors must not exceed those of torch with the inputs' dtype.

    Or one rounding to it: torch's own results may be exact, as those of a single token. Without ends the tokens are one
    sequence of a batch.
    """
    packed, tokens, dtype = ends is not None, tensors[0].shape[0], tensors[0].dtype
    with running_on(place) as device:

        def ours(x, dt, a, b, c, d, bias, states) -> tuple[Tensor, Tensor]:
            options = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": LIMIT, "return_state": True}
            if packed:
                cu = torch.tensor(ends, dtype=torch.int32, device=device)
                return ssd(x, dt, a, b, c, initial_state=states, cu_seqlens=cu, **options)
            x, dt, b, c = (t.unsqueeze(0) for t in (x, dt, b, c))
            out, final = ssd(x, dt, a, b, c, initial_state=states, **options)
            return out.squeeze(0), final

        def token_by_token(*values: Tensor) -> tuple[Tensor, Tensor]:
            return exact(*values, ends or [0, tokens])

        results = []
        for function, own in ((ours, None), (token_by_token, dtype), (token_by_token, torch.float64)):
            leaves = [(t if own is None else t.to(own)).to(device).requires_grad_() for t in tensors]
            with poisoned():
                found = function(*leaves)
                incoming = [random(*t.shape, seed=20 + i).to(dtype).to(t) for i, t in enumerate(found)]
                results.append((*(t.detach() for t in found), *torch.autograd.grad(found, leaves, incoming)))
        for what, got, torchs, want in zip(NAMES, *results, strict=True):
            ceiling = max(error_of(torchs, want), 2 * torch.finfo(dtype).eps)
            assert error_of(got, want) <= ceiling, f"{what}: {error_of(got, want)}, torch {error_of(torchs, want)}"
    return results[0]


# tokens, groups, heads, widths of B and x, type
CASES = {
    # Several heads: errors of dA are measured by the largest one, as each of them is a sum that cancels.
    "one": (1, 1, 4, 8, 8, BF16),
    "a chunk less one": (63, 1, 1, 16, 24, BF16),
    "a chunk and one": (65, 1, 2, 64, 40, FP16),
    "three heads of a group": (20, 2, 6, 32, 16, BF16),
    "wide": (70, 1, 1, 128, 64, BF16),
}


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    *sizes, dtype = CASES[name]
    check(inputs(*sizes, 1, dtype), None, place)


@at("cpu", "cuda")
def test_a_state_of_two_parts(place: str) -> None:
    check(inputs(70, 1, 2, 256, 16, 1, BF16), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
def test_packed_sequences(place: str) -> None:
    check(inputs(80, 1, 2, 16, 16, 4, BF16), [0, 1, 1, 67, 77], place)


@at("cpu", "sm_80", "cuda")
def test_rows_of_no_sequence_may_be_nan(place: str) -> None:
    used, ends, sums = 19, torch.tensor([0, 5, 5, 19], dtype=torch.int32), (2, 5, 6, 7)
    with running_on(place) as device:

        def gradients(rest: float) -> tuple[Tensor, ...]:
            tensors = inputs(24, 1, 2, 16, 16, 3, BF16)
            for i in (0, 1, 3, 4):  # x, dt, B, C
                tensors[i][used:] = rest
            leaves = [t.to(device).requires_grad_() for t in tensors]
            x, dt, a, b, c, d, bias, states = leaves
            options = {"D": d, "dt_bias": bias, "dt_softplus": True, "cu_seqlens": ends.to(device)}
            out = ssd(x, dt, a, b, c, initial_state=states, **options)
            return torch.autograd.grad(out, leaves, random(*out.shape, seed=9, dtype=BF16).to(device))

        got, expected = gradients(torch.nan), gradients(0.0)
    for i, (a, b) in enumerate(zip(got, expected, strict=True)):
        assert torch.equal(a, b), NAMES[2 + i]
        assert i in sums or not a[used:].any()


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("rate", (0.0, 1e-6, 60.0))
def test_decays(rate: float, place: str) -> None:
    check(inputs(70, 1, 1, 16, 16, 1, BF16, rate), None, place)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("decay", (1.0, 10.0, 30.0))
def test_gradients_of_strong_decays(decay: float, place: str) -> None:
    """What decays leave is far below what does not decay, and its gradient still has the precision of its operands.

    All numbers are positive, so nothing cancels: an error is at most that of four roundings to bfloat16, of U, of the
    state and its gradient, once as an operand and once as they are kept, and of the exponent, a sum over a chunk.
    """
    generator = torch.Generator().manual_seed(0)
    x, b, c, dout = (torch.rand(66, n, 16, generator=generator).add(0.5).to(BF16) for n in (2, 1, 1, 2))
    state, dstate = torch.rand(2, 1, 2, 16, 16, generator=generator).add(0.5).to(BF16).float()
    dt, a = torch.rand(66, 2, generator=generator) / 4 + 1, torch.tensor([-decay, -decay / 2])
    leaf = a.double().requires_grad_()
    found = recurrence(*(t.double() for t in (x, dt)), leaf, b.double(), c.double(), torch.zeros(2), None, state[0])
    (want,) = torch.autograd.grad(found, leaf, (dout.double(), dstate[0].double()))
    with running_on(place) as device, poisoned():
        leaf = a.to(device).requires_grad_()
        x, dt, b, c, dout = (t.unsqueeze(0).to(device) for t in (x, dt, b, c, dout))
        found = ssd(x, dt, leaf, b, c, initial_state=state.to(device), return_state=True)
        (got,) = torch.autograd.grad(found, leaf, (dout, dstate.to(device)))
    exponent = 8 * 64 * 1.25 * decay * 2.0**-24  # eight additions of fp32, and what they are sums of
    error = (got.cpu().double() / want - 1).abs().max()
    assert error <= 4 * 2.0**-8 + exponent, f"{error}"


def test_alone() -> None:
    """Without D, bias, softplus and limits."""
    x, dt, a, b, c, *_ = (t.double() if t.dtype == torch.float32 else t for t in inputs(9, 1, 2, 16, 8, 1, BF16))
    got = ssd(x[None], dt.abs()[None], a, b[None], c[None])[0]
    steps = torch.zeros(1, 2, 8, 16)
    want = [ssd_step(*(t[i : i + 1] for t in (x, dt.abs())), a, b[i : i + 1], c[i : i + 1], steps) for i in range(9)]
    assert_near(got, torch.cat(want).double(), 2.0**-6)


@at("cpu", "sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("d_state", (32, 136))
def test_steps_are_the_whole(d_state: int, place: str) -> None:
    with running_on(place) as device:
        x, dt, a, b, c, d, bias, _ = (t.to(device) for t in inputs(12, 2, 4, d_state, 40, 1, BF16))
        x, dt, b, c = (t.view(2, 6, *t.shape[1:]) for t in (x, dt, b, c))
        state = random(2, 4, 40, d_state, seed=6).to(device)
        options = {"D": d, "dt_bias": bias, "dt_softplus": True, "dt_limit": LIMIT}
        want, final = ssd(x, dt, a, b, c, initial_state=state, return_state=True, **options)
        outs = [ssd_step(x[:, i], dt[:, i], a, b[:, i], c[:, i], state, **options) for i in range(6)]
        assert_near(torch.stack(outs, 1), want.double(), 2.0**-6)
        assert_near(state, final.double(), 2.0**-6)


@at("cpu", "sm_80", "cuda")
def test_states_carry_on(place: str) -> None:
    with running_on(place) as device:
        x, dt, a, b, c, d, _, _ = (t.to(device) for t in inputs(90, 1, 1, 16, 16, 1, BF16))
        rows = [t.unsqueeze(0) for t in (x, dt, b, c)]

        def part(begin: int, end: int, state: Tensor | None) -> tuple[Tensor, Tensor]:
            x, dt, b, c = (t[:, begin:end] for t in rows)
            return ssd(x, dt, a, b, c, D=d, dt_softplus=True, initial_state=state, return_state=True)

        whole, final = part(0, 90, None)
        first, state = part(0, 33, None)
        second, last = part(33, 90, state)
        assert_near(torch.cat((first, second), 1), whole.double(), 2.0**-6)
        assert_near(last, final.double(), 2.0**-6)


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    test_steps_are_the_whole(32, "sm_80")
    test_steps_are_the_whole(32, "sm_90")


@at("sm_90", "cuda")
def test_equal_bits_twice(place: str) -> None:
    tensors = inputs(66, 1, 2, 16, 16, 1, BF16)
    assert_equal_bits(check(tensors, None, place), check(tensors, None, place))


@at("cpu", "sm_80", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        x, dt, a, b, c, d, _, state = (t.to(device) for t in inputs(0, 1, 2, 16, 16, 1, BF16))
        rows = [t.unsqueeze(0) for t in (x, dt, b, c)]
        out, final = ssd(rows[0], rows[1], a, *rows[2:], D=d, initial_state=state, return_state=True)
        assert out.shape == (1, 0, 2, 16) and torch.equal(final, state)


@pytest.mark.gpu
@at("cuda")
def test_many_tokens(place: str) -> None:
    """Offsets beyond 2^31 elements: tokens behind 61,000 of 128 heads of 64 times a state of 128."""
    with running_on(place) as device:
        tokens, heads = 70_000, 128
        x = torch.randn(1, tokens, heads, 64, device=device, dtype=BF16)
        b, c = torch.randn(2, 1, tokens, 1, 128, device=device, dtype=BF16) * 0.3
        dt, a = torch.rand(1, tokens, heads, device=device), -torch.ones(heads, device=device)
        whole = ssd(x, dt, a, b, c)
        last = slice(tokens - 200, tokens)
        alone = ssd(x[:, last], dt[:, last], a, b[:, last], c[:, last])
        assert_near(whole[:, -100:], alone[:, -100:].double(), 2.0**-6)


@error_tests
def test_errors(place: str) -> None:
    with running_on(place) as device:
        x, dt, a, b, c, d, _, state = (t.to(device) for t in inputs(8, 1, 2, 16, 16, 1, BF16))
        rows = [t.unsqueeze(0) for t in (x, dt, b, c)]

        def call(**changes):
            given = dict(zip(("x", "dt", "B", "C"), rows, strict=True)) | {"A": a} | changes
            return ssd(given.pop("x"), given.pop("dt"), given.pop("A"), given.pop("B"), given.pop("C"), **given)

        for changes, message in (
            ({"D": d[:1]}, "D has shape"),
            ({"A": a[:1]}, "A has shape"),
            ({"dt": rows[1][..., :1]}, "dt has shape"),
            ({"B": rows[2][..., :8]}, "C has shape"),
            ({"B": rows[2].float()}, "B has dtype"),
            ({"dt_limit": (1.0, 0.5)}, "dt_limit is"),
            ({"initial_state": state.transpose(-1, -2)[:, :1]}, "initial_state has shape"),
        ):
            with pytest.raises(ArgumentError, match=message):
                call(**changes)
