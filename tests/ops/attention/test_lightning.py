"""lightning_attention: values and gradients against the recurrence in float64, states, packed sequences, steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from support.attention_exact import assert_near
from support.compare import poisoned, relative_error, running_on
from support.places import at, emulated, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels import ArgumentError, emulate, lightning_attention, lightning_attention_step
from rtkernels.ops.attention import lightning_plan, lightning_reference
from rtkernels.runtime.launch.plans import Plans

BF16, FP16 = torch.bfloat16, torch.float16


def random(*shape: int, seed: int = 0, dtype: torch.dtype = BF16, device: str = "cpu") -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def exact(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, state: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """The recurrence, row by row, in float64: [batch, length, heads, width]."""
    q, k, v = (t.double().transpose(1, 2) for t in (q, k, v))
    factor = torch.exp(-decay.double()).view(1, -1, 1, 1)
    s = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if state is None else state.double()
    rows = []
    for t in range(q.shape[2]):
        s = factor * s + k[:, :, t, :, None] * v[:, :, t, None, :]
        rows.append(scale * (q[:, :, t, None] @ s).squeeze(2))
    out = torch.stack(rows, 1) if rows else q.new_zeros(q.shape[0], 0, q.shape[1], v.shape[-1])
    return out, s


# batch, length, heads, width, width of v, type, with states
CASES: dict[str, tuple[int, int, int, int, int, torch.dtype, bool]] = {
    "one": (1, 1, 1, 8, 8, BF16, True),
    "less than a chunk": (2, 17, 2, 64, 64, BF16, True),
    "chunks": (1, 130, 2, 64, 72, BF16, True),
    "128": (1, 70, 3, 128, 128, BF16, False),
    "fp16": (1, 70, 2, 40, 24, FP16, True),
}
BY_WGMMA = (1, 130, 2, 128, 72, BF16, True)


def rates(heads: int, device: str) -> Tensor:
    return torch.tensor([0.3, 0.0, 4.0])[:heads].to(device)  # a strong decay underflows within a chunk


@contextmanager
def short_segments() -> Iterator[None]:
    """Sequences of a chunk and more are cut into segments."""
    with mock.patch.object(lightning_plan, "SEGMENT_ROWS", 20):
        Plans.forget_all()
        yield
    Plans.forget_all()


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients(name: str, place: str) -> None:
    check(name, place)


@at("sm_90", "cuda")
@pytest.mark.parametrize("segmented", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_by_wgmma(segmented: bool, place: str) -> None:
    with mock.patch.dict(CASES, wgmma=BY_WGMMA), short_segments() if segmented else nullcontext():
        check("wgmma", place)


@emulated
@pytest.mark.slow
def test_by_wgmma_in_every_order() -> None:
    q, k, v = (random(1, 130, 1, 128, seed=i) for i in range(3))
    results = []
    for order in ("forward", "reverse", 7):
        with emulate("sm_90", order), poisoned():
            results.append(lightning_attention(q, k, v, rates(1, "cpu"), return_state=True))
    for other in results[1:]:
        assert_equal_bits(other, results[0], "order")


@at("sm_80", "cuda")
def test_segments(place: str) -> None:
    with short_segments():
        check_packed((0, 5, 5, 135), 1, place)
        if place == "cuda":
            check("chunks", place)


def check(name: str, place: str) -> None:
    batch, length, heads, width, width_v, dtype, states = CASES[name]
    with running_on(place) as device:
        shapes = (width, width, width_v)
        leaves = [random(batch, length, heads, w, seed=i, dtype=dtype, device=device) for i, w in enumerate(shapes)]
        if states:
            leaves.append(random(batch, heads, width, width_v, seed=5, dtype=torch.float32, device=device))
        decay, results = rates(heads, device), []
        for function in (lightning_attention, exact):
            given = [t.clone().requires_grad_() for t in leaves]
            state = given[3] if states else None
            with poisoned():
                if function is exact:
                    result = exact(*given[:3], decay, state, width**-0.5)
                else:
                    result = lightning_attention(*given[:3], decay, initial_state=state, return_state=True)
                result = result if states else result[:1]
                grads = [random(*t.shape, seed=20 + i, device=device).to(t.dtype) for i, t in enumerate(result)]
                results.append((*result, *torch.autograd.grad(result, given, grads)))
        names = ("out", "state") if states else ("out",)
        for what, got, want in zip((*names, "dq", "dk", "dv", "dstate"), *results, strict=False):
            assert_near(got, want, 2.0**-6, f"{name}, {what}")


@at("cpu", "sm_80", "cuda")
def test_packed_sequences(place: str) -> None:
    check_packed((0, 5, 5, 80), 2, place)


def check_packed(ends: tuple[int, ...], heads: int, place: str) -> None:
    tokens = ends[-1] + 4
    with running_on(place) as device:
        q, k, v = (random(tokens, heads, 64, seed=i, device=device).requires_grad_() for i in range(3))
        states = random(3, heads, 64, 64, seed=4, dtype=torch.float32, device=device).requires_grad_()
        cu, decay = torch.tensor(ends, dtype=torch.int32, device=device), rates(heads, device)
        g, gs = (
            random(tokens, heads, 64, seed=5, device=device),
            random(3, heads, 64, 64, seed=6, device=device).float(),
        )
        with poisoned():
            out, final = lightning_attention(q, k, v, decay, initial_state=states, cu_seqlens=cu, return_state=True)
            got = torch.autograd.grad((out, final), (q, k, v, states), (g, gs))
        for b in range(3):
            rows = slice(*ends[b : b + 2])
            parts = [t.detach()[rows].unsqueeze(0).requires_grad_() for t in (q, k, v)]
            state = states.detach()[b : b + 1].requires_grad_()
            want, want_final = exact(*parts, decay, state, 0.125)
            want = want + 0.0 * state.sum()  # a sequence without rows depends on nothing
            grads = torch.autograd.grad(
                (want, want_final), (*parts, state), (g[rows].double().unsqueeze(0), gs[b : b + 1].double()),
                allow_unused=True,
            )  # fmt: skip
            assert_near(out[rows], want[0], 2.0**-6, "out")
            assert_near(final[b], want_final[0], 2.0**-6, "state")
            for what, all_rows, grad in zip(("dq", "dk", "dv"), got, grads, strict=False):
                if grad is not None:
                    assert_near(all_rows[rows], grad[0], 2.0**-6, what)
            assert_near(got[3][b], grads[3][0], 2.0**-6, "dstate")
        assert not out[ends[-1] :].any() and not any(t[ends[-1] :].any() for t in got[:3])


@at("cpu", "sm_80", "cuda")
def test_empty(place: str) -> None:
    with running_on(place) as device:
        q = random(2, 0, 2, 16, device=device)
        state = random(2, 2, 16, 16, dtype=torch.float32, device=device)
        out, final = lightning_attention(q, q, q, rates(2, device), initial_state=state, return_state=True)
        assert out.shape == (2, 0, 2, 16)
        torch.testing.assert_close(final, state)
        for shape in ((2, 3, 0, 16), (0, 3, 2, 16)):
            q = random(*shape, device=device).requires_grad_()
            out, final = lightning_attention(q, q, q, rates(shape[2], device), return_state=True)
            (grad,) = torch.autograd.grad((out, final), q, (out, final))
            assert out.shape == grad.shape == shape and final.shape == (shape[0], shape[2], 16, 16)


def behind(t: Tensor) -> Tensor:
    """A contiguous copy whose address is no multiple of 16."""
    memory = torch.empty(t.numel() + 1, dtype=t.dtype, device=t.device)
    return memory[1:].view(t.shape).copy_(t)


@at("sm_80", "cuda")
def test_states_at_any_address(place: str) -> None:
    """Kernels read and write states in vectors of 16 bytes; later calls are replays."""
    with running_on(place) as device:
        q, decay = random(1, 2, 16, device=device), rates(2, device)
        state = random(1, 2, 16, 16, seed=4, dtype=torch.float32, device=device)
        other = behind(state)
        for given in (state, other, state, other):
            results = lightning_attention_step(q, q, q, decay, given)
        assert_equal_bits(state, other)
        assert results.isfinite().all() and other.data_ptr() % 16
        rows = random(1, 65, 1, 16, device=device)
        states = random(1, 1, 16, 16, seed=4, dtype=torch.float32, device=device)
        outputs = []
        with short_segments():
            for move in (lambda t: t, behind):
                x, s = rows.clone().requires_grad_(), move(states).requires_grad_()
                out, final = lightning_attention(x, x, x, rates(1, device), initial_state=s, return_state=True)
                grads = torch.autograd.grad((out, final), (x, s), (out.detach(), move(final.detach())))
                outputs.append((out.detach(), final.detach(), *grads))
        assert_equal_bits(*outputs)


@at("cpu", "sm_80", "cuda")
def test_steps_continue_a_sequence(place: str) -> None:
    with running_on(place) as device:
        q, k, v = (random(2, 9, 3, w, seed=i, device=device) for i, w in enumerate((40, 40, 136 - 8)))
        decay = rates(3, device)
        want, want_state = exact(q, k, v, decay, None, 40**-0.5)
        state = torch.zeros(2, 3, 40, 128, device=device)
        for t in range(9):
            out = lightning_attention_step(q[:, t], k[:, t], v[:, t], decay, state)
            assert_near(out, want[:, t], 2.0**-7, f"token {t}")
        assert_near(state, want_state, 1e-5, "state")


def emulated_coverage() -> None:
    """Run every kernel in the emulator."""
    with emulate("sm_80"):
        q = random(6, 1, 16).requires_grad_()
        cu = torch.tensor([0, 4], dtype=torch.int32)
        lightning_attention(q, q, q, torch.ones(1), cu_seqlens=cu).float().sum().backward()
        with torch.no_grad():
            lightning_attention_step(q[:1], q[:1], q[:1], torch.ones(1), torch.zeros(1, 1, 16, 16))
            with short_segments():
                q = random(1, 65, 1, 16)
                lightning_attention(q, q, q, torch.ones(1))
    q = random(1, 64, 1, 72)
    with emulate("sm_90"):
        lightning_attention(q, q, q, rates(1, "cpu"))


def test_parts_continue_each_other() -> None:
    q, k, v = (random(1, 20, 2, 16, seed=i) for i in range(3))
    decay = rates(2, "cpu")
    whole = lightning_attention(q, k, v, decay)
    first, state = lightning_attention(*(t[:, :7] for t in (q, k, v)), decay, return_state=True)
    second = lightning_attention(*(t[:, 7:] for t in (q, k, v)), decay, initial_state=state)
    assert_near(torch.cat((first, second), 1), whole.double(), 2.0**-8)


def test_with_group_norm_and_gate() -> None:
    """A block of linear-attention models: ``group_rms_norm_gate`` takes the output as it is."""
    q = random(2, 6, 4, 16).requires_grad_()
    out = lightning_attention(q, q, q, torch.full((4,), 0.1)).flatten(2)
    gate, weight = random(2, 6, 64, seed=2), torch.ones(64, dtype=BF16)
    y = rtkernels.group_rms_norm_gate(out, gate, weight, groups=4)
    y.float().sum().backward()
    assert y.shape == (2, 6, 64) and q.grad is not None and q.grad.isfinite().all()


def test_reference_by_finite_differences() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, 2, 3), (1, 4, 2, 3), (1, 4, 2, 5), (1, 2, 3, 5))
    q, k, v, state = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    decay = torch.tensor([0.3, 1.0])

    def run(*given: Tensor) -> tuple[Tensor, Tensor]:
        return lightning_reference.forward(*given[:3], decay, given[3], None, 0.7)

    out, final = run(q, k, v, state)
    g, gf = torch.randn_like(out), torch.randn_like(final)
    grads = lightning_reference.backward(g, gf, q, k, v, decay, state, None, 0.7)
    for which, grad in enumerate(grads):
        for place in range(0, grad.numel(), 3):
            ends = []
            for move in (1e-5, -1e-5):
                given = [t.clone() for t in (q, k, v, state)]
                given[which].view(-1)[place] += move
                moved = run(*given)
                ends.append(((moved[0] * g).sum() + (moved[1] * gf).sum()).item())
            assert abs((ends[0] - ends[1]) / 2e-5 - grad.reshape(-1)[place].item()) < 1e-6


def test_threads_in_any_order_give_the_same_bits() -> None:
    results = []
    for order in ("forward", "reverse"):
        with emulate("sm_80", order):
            q = random(1, 70, 1, 64).requires_grad_()
            out = lightning_attention(q, q, q, torch.full((1,), 0.1))
            results.append((out, *torch.autograd.grad(out, (q,), torch.ones_like(out))))
    assert_equal_bits(*results)


@pytest.mark.slow
def test_compiles_without_graph_breaks() -> None:
    q = random(1, 6, 2, 16)

    def block(x: Tensor) -> Tensor:
        out, state = lightning_attention(x, 2 * x, x + 1, torch.ones(2), return_state=True)
        return out.float().sum() + state.square().sum()

    plain, other = q.clone().requires_grad_(), q.clone().requires_grad_()
    block(plain).backward()
    torch.compile(block, fullgraph=True, backend="aot_eager")(other).backward()
    torch.testing.assert_close(other.grad, plain.grad)


@pytest.mark.gpu
def test_captured() -> None:
    q, k, v = (random(2, 200, 3, 128, seed=i, device="cuda") for i in range(3))
    decay = rates(3, "cuda")
    replay = captured(lambda: lightning_attention(q, k, v, decay, return_state=True))
    assert_equal_bits(replay(), lightning_attention(q, k, v, decay, return_state=True))


def bad(message: str, **changes: Any) -> tuple[Any, str]:
    def call() -> None:
        q = random(1, 3, 2, 16)
        lightning_attention(**({"q": q, "k": q, "v": q, "decay": torch.ones(2)} | changes))

    return call, message


BAD = {
    "dtype": bad("q has dtype float32", q=torch.zeros(1, 3, 2, 16)),
    "width": bad("q has heads of 136 elements", q=random(1, 3, 2, 136), k=random(1, 3, 2, 136)),
    "k": bad("k has shape", k=random(1, 4, 2, 16)),
    "decay": bad("decay has shape", decay=torch.ones(3)),
    "decay with a gradient": bad("decay requires grad", decay=torch.ones(2, requires_grad=True)),
    "state": bad("initial_state has shape", initial_state=torch.zeros(1, 2, 16, 8)),
    "scale": bad("scale is 0.0", scale=0.0),
    "ends": bad("q has shape .*3 dimensions", cu_seqlens=torch.zeros(2, dtype=torch.int32)),
}
test_bad_arguments, test_bad_arguments_in_the_launchers = error_tests(BAD)


# A result in fp16 has four roundings to fp16 behind it: of the state, of products within a chunk, of decayed rows and
# its own. They are independent, so together they are at most twice one of them; one rounding to bf16 is eight of them.
@at("sm_80", "cuda")
@pytest.mark.parametrize("case", ["plain", "wide", "large state", "small state", "large products"])
def test_fp16_has_the_error_of_fp16(case: str, place: str) -> None:
    width, heads = (128, 1) if case == "wide" else (64, 2)
    with running_on(place) as device:
        leaves = [random(1, 150, heads, width, seed=i, dtype=FP16, device=device) for i in range(3)]
        decay = torch.tensor([0.02, 0.0])[:heads].to(device)  # the state before a chunk matters
        state = None
        if case == "large state":  # beyond what fp16 holds, as the sum of a long sequence may be
            state = 2e6 * random(1, heads, width, width, seed=7, dtype=torch.float32, device=device)
            leaves[0] *= 2.0**-8
        if case == "small state":
            state = 1e-9 * random(1, heads, width, width, seed=7, dtype=torch.float32, device=device)
            leaves[2] = (leaves[2].float() * 2.0**-20).half()
            leaves[1] = (leaves[1].float() * 2.0**-8).half()
            leaves[0] *= 2.0**10
        if case == "large products":  # of q and k, before they are scaled
            leaves[0] *= 100
            leaves[1] *= 100
            leaves[2] *= 2.0**-6
        results = []
        for function in (lightning_attention, exact):
            given = [t.to(torch.float64 if function is exact else FP16).clone().requires_grad_() for t in leaves]
            with poisoned():
                if function is exact:
                    out = exact(*given, decay, state, width**-0.5)[0]
                else:
                    out = lightning_attention(*given, decay, initial_state=state)
                grads = torch.autograd.grad(
                    out, given, random(*out.shape, seed=9, dtype=FP16, device=device).to(out.dtype)
                )
            results.append((out.detach(), *grads) if case in ("plain", "wide") else (out.detach(),))
        for what, got, want in zip(("out", "dq", "dk", "dv"), *results, strict=False):
            one = relative_error(want.to(FP16), want)
            assert got.isfinite().all()
            error = relative_error(got, want)
            assert error <= 2 * one, f"{case}, {what}: {error:.2e}, one rounding is {one:.2e}"


@at("sm_80", "cuda")
def test_fp16_state_with_infinities(place: str) -> None:
    """A non-finite element affects only its own column, and does not set the scale of the others."""
    with running_on(place) as device:
        q, k, v = (random(1, 70, 1, 64, seed=i, dtype=FP16, device=device) for i in range(3))
        state = 1e6 * random(1, 1, 64, 64, seed=7, dtype=torch.float32, device=device)
        decay = torch.tensor([0.1]).to(device)
        plain = lightning_attention(2.0**-8 * q, k, v, decay, initial_state=state)
        state[0, 0, 3, 5], state[0, 0, 7, 9] = torch.inf, torch.nan
        got = lightning_attention(2.0**-8 * q, k, v, decay, initial_state=state)
        others = [column for column in range(64) if column not in (5, 9)]
        assert_equal_bits(got[..., others], plain[..., others], "other columns")
        assert not got[..., 5].isfinite().any()
        assert got[..., 9].isnan().all()


# ---- float32 operands -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, 1, 5, 128, 129, 300])
@pytest.mark.parametrize("with_state", [False, True])
def test_float32_operands(length: int, with_state: bool) -> None:
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(2, length, 3, d, generator=g) for d in (16, 16, 24)]
    given += [torch.randn(2, 3, 16, 24, generator=g)] if with_state else []
    decay = torch.tensor([0.0, 0.1, 1.3])

    def results(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in given]
        state = leaves[3] if with_state else None
        if dtype == torch.float32:
            y, final = rtkernels.lightning_attention(*leaves[:3], decay, initial_state=state, return_state=True)
        else:
            each = [
                lightning_reference._one(*(t[b] for t in leaves[:3]), decay, None if state is None else state[b], 0.25)
                for b in range(2)
            ]
            y, final = (torch.stack(parts) for parts in zip(*each, strict=True))
        seeds = torch.Generator().manual_seed(1)
        grads = [torch.randn(t.shape, generator=seeds).to(dtype) for t in (y, final)]
        return [y, final, *torch.autograd.grad([y, final], leaves, grads)]

    for got, exact in zip(results(torch.float32), results(torch.float64), strict=True):
        assert got.dtype == torch.float32 and got.shape == exact.shape
        got, exact = got.detach(), exact.detach()
        assert got.numel() == 0 or float((got - exact).abs().max()) < 2e-6 * max(float(exact.abs().max()), 1.0) * 8


def test_float32_operands_that_do_not_fit() -> None:
    q, decay = torch.randn(2, 9, 3, 16), torch.ones(3)
    for told, arguments, kw in (
        ("cu_seqlens is given", (q, q, q, decay), {"cu_seqlens": torch.tensor([0, 9], dtype=torch.int32)}),
        ("k is torch.bfloat16", (q, q.bfloat16(), q, decay), {}),
        ("k and v have shapes", (q, q[:, :8], q, decay), {}),
        ("decay has shape", (q, q, q, decay[:2]), {}),
        ("initial_state has shape", (q, q, q, decay), {"initial_state": torch.zeros(2, 3, 16, 8)}),
    ):
        with pytest.raises(ArgumentError, match=told):
            rtkernels.lightning_attention(*arguments, **kw)
    with rtkernels.batch_invariant(1), pytest.raises(ArgumentError, match="not batch-invariant"):
        rtkernels.lightning_attention(q, q, q, decay)
