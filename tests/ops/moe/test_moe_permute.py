"""Rows from tokens to experts and back: against loops over the definition, everywhere a kernel can run."""

from __future__ import annotations

import math

import pytest
import torch
from support.compare import assert_close, assert_same_bits, poisoned, running_on
from support.moe_permute_cases import close, numbers, on, routed
from support.places import DTYPES, ORDERS, at, emulated, error_tests
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from rtkernels.emulator import _launch
from rtkernels.ops.moe.moe_index_layout import MoeIndex, build, max_rows
from rtkernels.ops.moe.moe_permute import PROBS, UNPERMUTE, UNPERMUTE_BWD

moe_permute, moe_unpermute = rtkernels.moe_permute, rtkernels.moe_unpermute
E4M3 = torch.float8_e4m3fn
DEVICE_CODE = ("sm_80", "sm_90", "cuda")

# (tokens, experts, k, padding, columns): whole accesses, odd ones, many choices, more than 32, one expert, long rows.
CASES = {
    "plain": (13, 5, 3, 4, 64),
    "odd columns": (9, 6, 4, 16, 37),
    "halves": (7, 4, 2, 1, 36),
    "many choices": (5, 70, 67, 2, 40),
    "one expert": (40, 1, 1, 8, 16),
    "long rows": (3, 4, 2, 16, 4200),
}


def tiny(case: str) -> tuple[MoeIndex, int]:
    tokens, experts, top_k, pad, cols = CASES[case]
    return routed(tokens, experts, top_k, pad), cols


@pytest.mark.parametrize("case", CASES)
def test_reference_is_the_definition(case: str):
    index, cols = tiny(case)
    tokens, top_k = index.rows.shape
    x, probs, scale = numbers(tokens, cols), numbers(tokens, top_k, seed=2), numbers(tokens, 3, seed=3)
    got = moe_permute(x, index, probs=probs, scale=scale, dense_probs=False)
    want = torch.zeros(len(index.slots), cols)
    want_probs, want_scale = torch.zeros(len(index.slots)), torch.zeros(len(index.slots), 3)
    out = torch.zeros(tokens, cols, dtype=torch.float64)
    y = numbers(len(index.slots), cols, seed=4)
    for t in range(tokens):
        for j in range(top_k):
            row = int(index.rows[t, j])
            if row >= 0:
                want[row], want_probs[row], want_scale[row] = x[t], probs[t, j], scale[t]
                out[t] += probs[t, j].double() * y[row].double()
                assert index.slots[row] == t * top_k + j
    assert_same_bits(got.y, want)
    assert_same_bits(got.probs, want_probs)
    assert_same_bits(got.scale, want_scale)
    close(moe_unpermute(y, index, probs=probs, dense_probs=False), out, out.abs() + 3, top_k, "out")


@emulated
@pytest.mark.parametrize("order", ("forward", *ORDERS))
def test_rows_by_the_copy_engine(order: str | int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(_launch, "launched", set())  # of this test alone
    index = routed(21, 9, 5, 8)
    x, probs, scale = numbers(21, 40), numbers(21, 5, seed=2), numbers(21, 3, seed=3)
    want = moe_permute(x, index, probs=probs, scale=scale, dense_probs=False)
    with rtkernels.emulate("sm_90", order=order):
        got = moe_permute(x, index, probs=probs, scale=scale, dense_probs=False)
        assert {entry for _, entry in rtkernels.emulator.launched()} >= {"moe_permute_bulk"}
    for field, given, expected in zip(got._fields, got, want, strict=True):
        assert_same_bits(given, expected, field)


@at(*DEVICE_CODE)
@pytest.mark.parametrize("case", CASES)
def test_permute_on_the_device(case: str, place: str):
    index, cols = tiny(case)
    tokens, top_k = index.rows.shape
    experts = len(index.counts)
    for i, dtype in enumerate((*DTYPES, E4M3)):
        kind = DTYPES[(i + 1) % 3]
        dense = i % 2 == 1
        x, probs = numbers(tokens, cols, dtype=dtype), numbers(tokens, experts if dense else top_k, dtype=kind, seed=2)
        scale = None if i == 0 else numbers(tokens, 2, seed=3) if i % 2 else numbers(tokens, seed=3)
        want = moe_permute(x, index, probs=probs, scale=scale, dense_probs=dense)
        alone = moe_permute(x, index)
        with running_on(place) as device:
            options = {"probs": probs.to(device), "scale": None if scale is None else scale.to(device)}
            got = moe_permute(x.to(device), on(device, index), dense_probs=dense, **options)
            got_alone = moe_permute(x.to(device), on(device, index))
        assert_same_bits(got.y.cpu(), want.y, f"{dtype}")
        assert_same_bits(got_alone.cpu(), alone, f"{dtype}")
        assert_same_bits(got.probs.cpu(), want.probs, f"probs {kind}")
        assert (got.scale is None) == (scale is None)
        if scale is not None:
            assert_same_bits(got.scale.cpu(), want.scale, "scale")


@at(*DEVICE_CODE)
@pytest.mark.parametrize("case", CASES)
def test_unpermute_on_the_device(case: str, place: str):
    index, cols = tiny(case)
    tokens, top_k = index.rows.shape
    for i, dtype in enumerate(DTYPES):
        kind, dense = DTYPES[(i + 1) % 3], i == 1
        y = numbers(len(index.slots), cols, dtype=dtype)
        probs = numbers(tokens, len(index.counts) if dense else top_k, dtype=kind, seed=2)
        carried = numbers(len(index.slots), dtype=kind, seed=5)
        experts = index.experts if dense else None
        want, want_carried = UNPERMUTE(y, index.rows, None, None, carried)
        weights = (probs if experts is None else probs.gather(1, experts.clamp(min=0).long())).double()
        terms = torch.where((index.rows >= 0)[..., None], y.double()[index.rows.long()] * weights[..., None], 0)
        with running_on(place) as device:
            there = on(device, index)
            got, got_carried = UNPERMUTE(y.to(device), there.rows, None, None, carried.to(device))
            weighted = moe_unpermute(y.to(device), there, probs=probs.to(device), dense_probs=dense)
        assert_same_bits(got.cpu(), want, f"sum of {dtype}")  # the same fp32 additions in the same order
        assert_same_bits(got_carried.cpu(), want_carried, "carried")
        close(weighted.cpu(), terms.sum(1), terms.abs().sum(1), top_k, f"weighted sum of {dtype}")


@at(*DEVICE_CODE)
@pytest.mark.parametrize("case", CASES)
def test_backward_on_the_device(case: str, place: str):
    index, cols = tiny(case)
    tokens, top_k = index.rows.shape
    for i, dtype in enumerate(DTYPES):
        kind, dense = DTYPES[(i + 2) % 3], i == 2
        dout = numbers(tokens, cols, dtype=dtype)
        y = numbers(len(index.slots), cols, dtype=dtype, seed=7)
        probs = numbers(tokens, len(index.counts) if dense else top_k, dtype=kind, seed=2)
        experts = index.experts if dense else None
        want_dy, _ = UNPERMUTE_BWD(dout, None, index.rows, index.slots, probs, experts, True)
        exact = (dout.double()[:, None] * y.double()[index.rows.long()]).sum(-1)
        size = (dout.double()[:, None] * y.double()[index.rows.long()]).abs().sum(-1)
        exact, size = (torch.where(index.rows >= 0, t, 0) for t in (exact, size))
        with running_on(place) as device:
            there = on(device, index)
            more = None if experts is None else there.experts
            args = (there.rows, there.slots, probs.to(device), more)
            dy, dprobs = UNPERMUTE_BWD(dout.to(device), y.to(device), *args, True)
            only_dy, _ = UNPERMUTE_BWD(dout.to(device), None, *args, True)
            _, only_dprobs = UNPERMUTE_BWD(dout.to(device), y.to(device), *args, False)
            spread = PROBS(only_dprobs, None, there.experts, len(index.counts))
        assert_same_bits(dy.cpu(), want_dy, f"dy of {dtype}")
        assert_same_bits(only_dy.cpu(), want_dy, f"dy of {dtype} alone")
        close(dprobs.cpu(), exact, size, 32, f"dprobs {kind}")
        assert_same_bits(only_dprobs.cpu(), dprobs.cpu(), "dprobs alone")
        assert_same_bits(spread.cpu(), PROBS(dprobs.cpu(), None, index.experts, len(index.counts)), "spread")


def gradients(device: str, index: MoeIndex, x: Tensor, probs: Tensor, dense: bool) -> list[Tensor]:
    """Results and gradients of tokens that go to the experts, are transformed there, and come back weighted."""
    there = on(device, index)
    a = x.to(device).clone().requires_grad_()
    p, q = (probs.to(device).clone().requires_grad_() for _ in range(2))
    y, carried, _ = moe_permute(a, there, probs=p, dense_probs=dense)
    z = y * torch.linspace(-1, 2, y.shape[1], device=device).to(y.dtype) * (1 + carried[:, None].to(y.dtype))
    out = moe_unpermute(z, there, probs=q, dense_probs=dense) + moe_unpermute(z, there)
    out.backward(torch.linspace(0.5, 1, out.numel(), device=device).view(out.shape).to(out.dtype))
    return [out.detach(), a.grad, p.grad, q.grad]


@at("cpu", *DEVICE_CODE)
@pytest.mark.parametrize("dense", [False, True], ids=["compact", "dense"])
def test_gradients_are_those_of_autograd(dense: bool, place: str):
    index = routed(11, 6, 3, 8)
    x, probs = numbers(11, 40), numbers(11, 6 if dense else 3, seed=2)
    a, p, q = (t.double().clone().requires_grad_() for t in (x, probs, probs))
    there = index.rows >= 0
    weights = [t.gather(1, index.experts.clamp(min=0).long()) if dense else t for t in (p, q)]
    carried, weight = (torch.where(there, w, 0)[..., None] for w in weights)
    z = a[:, None] * torch.linspace(-1, 2, 40, dtype=torch.float64) * (1 + carried)
    out = (torch.where(there[..., None], z, 0) * (weight + 1)).sum(1)
    out.backward(torch.linspace(0.5, 1, out.numel()).view(out.shape).double())
    with running_on(place) as device:
        got = gradients(device, index, x, probs, dense)
    for name, one, exact in zip(("out", "dx", "dp", "dq"), got, (out, a.grad, p.grad, q.grad), strict=True):
        assert_close(one.cpu(), exact.detach(), c=40, scale=exact.detach().abs() + 10, what=name)


@at("cpu", *DEVICE_CODE)
def test_one_gradient_at_a_time(place: str):
    index = routed(9, 4, 2, 4)
    with running_on(place) as device:
        there = on(device, index)
        x, probs = numbers(9, 16).to(device), numbers(9, 2, seed=2).to(device)
        codes, p = x.to(E4M3), probs.clone().requires_grad_()
        y, carried, scale = moe_permute(codes, there, probs=p, scale=probs[:, 0].contiguous())
        assert carried.requires_grad and not y.requires_grad and not scale.requires_grad
        carried.sum().backward()
        assert_same_bits(p.grad.cpu(), (index.rows >= 0).float())
        a = x.clone().requires_grad_()
        y, carried, _ = moe_permute(a, there, probs=probs)
        y.sum().backward()
        assert_same_bits(a.grad.cpu(), (index.rows >= 0).sum(1).float()[:, None].expand(9, 16).contiguous())
        z = numbers(len(index.slots), 16, seed=3).to(device)
        q = probs.clone().requires_grad_()
        moe_unpermute(z, there, probs=q).sum().backward()
        b = z.clone().requires_grad_()
        moe_unpermute(b, there, probs=probs).sum().backward()
        full = probs.clone().requires_grad_()
        c = z.clone().requires_grad_()
        moe_unpermute(c, there, probs=full).sum().backward()
        assert_same_bits(q.grad, full.grad)
        assert_same_bits(b.grad, c.grad)
        assert_same_bits(b.grad[there.slots < 0], torch.zeros_like(b.grad[there.slots < 0]))


@at(*DEVICE_CODE)
def test_strides(place: str):
    index = routed(10, 4, 2, 4)
    count = len(index.slots)
    spaced = MoeIndex(*(t.repeat_interleave(2, -1)[..., ::2] if t.dim() else t for t in index))
    views = {
        "padded rows": lambda n: numbers(n, 96, dtype=torch.bfloat16)[:, :48],
        "misaligned": lambda n: numbers(n, 96, dtype=torch.bfloat16)[:, 1:49],
        "transposed": lambda n: numbers(48, n, dtype=torch.bfloat16).t(),
        "expanded": lambda n: numbers(1, 48, dtype=torch.bfloat16).expand(n, 48),
    }
    for name, view in views.items():
        x, y = view(10), view(count)
        want, back = moe_permute(x.contiguous(), index), moe_unpermute(y.contiguous(), index)
        with running_on(place) as device:
            for there in (on(device, index), MoeIndex(*(t.to(device) for t in spaced))):
                assert_same_bits(moe_permute(x.to(device), there).cpu(), want, name)
                assert_same_bits(moe_unpermute(y.to(device), there).cpu(), back, name)


@at("cpu", *DEVICE_CODE)
def test_rows_that_do_not_exist_are_dropped(place: str):
    # An index that is not from moe_index: nothing is read or written outside, and the rest is right.
    rows = torch.tensor([[0, 2**31 - 1], [-7, 3], [4, 1]], dtype=torch.int32)
    experts = torch.tensor([[0, 99], [-3, 1], [2**31 - 1, 0]], dtype=torch.int32)
    slots = torch.tensor([0, 5, -1, 3], dtype=torch.int32)
    counts, offsets = torch.zeros(3, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    index = MoeIndex(rows, experts, slots, counts, offsets, counts[0])
    x, probs = numbers(3, 24), numbers(3, 3)
    with running_on(place) as device:
        there = on(device, index)
        y, carried, _ = moe_permute(x.to(device), there, probs=probs.to(device))
        out = moe_unpermute(y, there, probs=probs.to(device))
        dy, dprobs = UNPERMUTE_BWD(x.to(device), y, there.rows, there.slots, probs.to(device), there.experts, True)
        dense = PROBS(dprobs, None, there.experts, 3)
    assert_same_bits(y.cpu(), torch.stack([x[0], x[2], torch.zeros(24), x[1]]))
    assert_same_bits(carried.cpu(), torch.stack([probs[0, 0], probs[2, 0], torch.tensor(0.0), probs[1, 1]]))
    weights = torch.stack([probs[0, 0], probs[1, 1], probs[2, 0]])
    assert_same_bits(out.cpu(), x * weights[:, None])
    assert_same_bits(dprobs.cpu() != 0, torch.tensor([[True, False], [False, True], [False, True]]))
    assert_same_bits(dense.cpu() != 0, torch.eye(3)[[0, 1, 0]].bool())
    assert_same_bits(dy.cpu()[[0, 3, 1]], x * weights[:, None])


@at("cpu", *DEVICE_CODE)
def test_fewer_rows_than_needed(place: str):
    index = routed(20, 4, 2, 4, rows=17)
    assert index.dropped > 0
    x = numbers(20, 16)
    with running_on(place) as device:
        y = moe_permute(x.to(device), on(device, index))
        out = moe_unpermute(y, on(device, index))
    kept = (index.rows >= 0).sum(1)
    assert_close(out.cpu(), x.double() * kept[:, None], c=2)


@at("cpu", *DEVICE_CODE)
def test_nothing_to_do(place: str):
    with running_on(place) as device:
        none = on(device, build(torch.zeros(0, 2, dtype=torch.int64), 3, 4, 8))
        assert not moe_permute(torch.ones(0, 16, device=device), none).any()
        assert moe_unpermute(torch.ones(8, 16, device=device), none).shape == (0, 16)
        index = on(device, build(torch.tensor([[0], [1]]), 2, 1, 0))
        y, p, _ = moe_permute(torch.ones(2, 16, device=device), index, probs=torch.ones(2, 1, device=device))
        assert y.shape == (0, 16) and p.shape == (0,)
        assert not moe_unpermute(y, index).any()
        index = on(device, build(torch.tensor([[0], [1]]), 2, 1, 2))
        y, p, _ = moe_permute(torch.ones(2, 0, device=device), index, probs=torch.ones(2, 1, device=device))
        assert y.shape == (2, 0) and (p == 1).all()
        assert moe_unpermute(y, index).shape == (2, 0)
        empty = on(device, build(torch.zeros(3, 0, dtype=torch.int64), 2, 1, 4))
        assert not moe_permute(torch.ones(3, 16, device=device), empty).any()
        assert not moe_unpermute(torch.ones(4, 16, device=device), empty).any()


@at("cpu", *DEVICE_CODE)
def test_nan_and_infinity_stay_with_their_token(place: str):
    index = routed(8, 3, 2)
    x = numbers(8, 16)
    x[0, 0], x[1, 1] = math.nan, math.inf
    with running_on(place) as device:
        probs = torch.ones(8, 2, device=device)
        y = moe_permute(x.to(device), on(device, index))
        y[index.slots < 0] = math.nan  # pad rows are never read
        out = moe_unpermute(y, on(device, index), probs=probs).cpu()
    assert out[2:].isfinite().all() and out[0, 0].isnan() and out[1, 1].isinf()


@emulated
@pytest.mark.parametrize("order", ORDERS)
def test_order_of_threads_does_not_matter(order: str | int):
    index = routed(13, 9, 7, 4)
    x, probs, y = numbers(13, 136), numbers(13, 7, seed=2), numbers(len(index.slots), 136, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        args = (x.to(dtype), y.to(dtype), index.rows, index.slots, probs, None, True)
        with rtkernels.emulate("sm_90"):
            want = (
                *UNPERMUTE_BWD(*args),
                moe_permute(x.to(dtype), index),
                moe_unpermute(y.to(dtype), index, probs=probs),
            )
        with rtkernels.emulate("sm_90", order=order), poisoned():
            got = *UNPERMUTE_BWD(*args), moe_permute(x.to(dtype), index), moe_unpermute(y.to(dtype), index, probs=probs)
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b, f"order {order}")


INDEX = routed(4, 3, 2)
SQUARE = routed(4, 3, 3)
X, Y = torch.ones(4, 8), torch.ones(len(INDEX.slots), 8)
BAD = {
    "dtype": (lambda: moe_permute(X.double(), INDEX), "x has dtype float64; expected one of"),
    "rank": (lambda: moe_permute(X[0], INDEX), r"x has shape \(8,\); expected two dimensions"),
    "tokens": (lambda: moe_permute(X[:3], INDEX), "index.rows has length 4; expected 3, that of x"),
    "rows": (lambda: moe_permute(X, INDEX._replace(rows=INDEX.rows.long())), "index.rows has dtype int64 and shape"),
    "index": (lambda: moe_permute(X, INDEX.rows), "index is a Tensor; expected a MoeIndex"),
    "scale": (lambda: moe_permute(X, INDEX, scale=X[:2]), r"scale has shape \(2, 8\); expected \(4,\) or"),
    "scale dtype": (lambda: moe_permute(X, INDEX, scale=X.half()), "scale has dtype float16; expected one of float32"),
    "probs": (
        lambda: moe_permute(X, INDEX, probs=X),
        r"probs has shape \(4, 8\); expected \(4, 2\), one per choice, or",
    ),
    "which": (lambda: moe_permute(X, SQUARE, probs=X[:, :3]), "as many choices as experts; expected dense_probs"),
    "probs dtype": (lambda: moe_permute(X, INDEX, probs=X[:, :2].double()), "probs has dtype float64; expected one of"),
    "y": (lambda: moe_unpermute(Y[1:], INDEX), "rows; expected 8, as many as index.slots"),
    "y dtype": (lambda: moe_unpermute(Y.to(E4M3), INDEX), "y has dtype float8_e4m3fn; expected one of"),
    "y rank": (lambda: moe_unpermute(Y[0], INDEX), r"y has shape \(8,\); expected two dimensions"),
}
test_errors, test_errors_in_the_launchers = error_tests(BAD)


def test_arrays_of_other_libraries():
    index = routed(6, 4, 2, 4)
    arrays = tuple(t.numpy() for t in index)
    x, probs = numbers(6, 16), numbers(6, 2)
    y, p, scale = moe_permute(x.numpy(), arrays, probs=probs.numpy())
    want = moe_permute(x, index, probs=probs)
    assert (y == want.y.numpy()).all() and (p == want.probs.numpy()).all() and scale is None
    assert (moe_unpermute(y, arrays) == moe_unpermute(want.y, index).numpy()).all()


def test_compile():
    index = routed(8, 4, 2, 4)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def run(x: Tensor, probs: Tensor, index: MoeIndex) -> Tensor:
        y, carried, _ = moe_permute(x * 2, index, probs=probs)
        return moe_unpermute(y * carried[:, None], index, probs=probs) + moe_unpermute(y, index)

    x, probs = numbers(8, 16).requires_grad_(), numbers(8, 2, seed=2).requires_grad_()
    out = run(x, probs, index)
    out.sum().backward()
    got = out.detach(), x.grad.clone(), probs.grad.clone()
    x.grad = probs.grad = None
    y, carried, _ = moe_permute(x * 2, index, probs=probs)
    (moe_unpermute(y * carried[:, None], index, probs=probs) + moe_unpermute(y, index)).sum().backward()
    assert_same_bits(got[1], x.grad)
    assert_same_bits(got[2], probs.grad)


@pytest.mark.gpu
def test_graph_replays_with_another_index():
    index = on("cuda", routed(300, 16, 4, 16))
    x, probs = numbers(300, 512, dtype=torch.bfloat16).cuda(), numbers(300, 4).cuda()

    def run() -> tuple[Tensor, ...]:
        y, carried, _ = moe_permute(x, index, probs=probs)
        return y, carried, moe_unpermute(y, index, probs=probs)

    replay = captured(run)
    for seed in (1, 2):
        for ours, new in zip(index, routed(300, 16, 4, 16, seed=seed), strict=True):
            ours.copy_(new)
        assert_equal_bits(replay(), run(), f"seed {seed}")


@pytest.mark.gpu
@pytest.mark.slow
def test_beyond_two_to_the_31_elements():
    tokens, cols = 2**18 + 100, 8200
    x = torch.zeros(tokens, cols, dtype=torch.bfloat16, device="cuda")
    x[-100:] = numbers(100, cols).cuda()
    index = build(torch.zeros(tokens, 1, dtype=torch.int64, device="cuda"), 2, 16, max_rows(tokens, 1, 2, 16))
    y = moe_permute(x, index)
    assert_same_bits(y[:tokens][-100:], x[-100:])
    assert not y[tokens:].any()
    assert_same_bits(moe_unpermute(y, index)[-100:], x[-100:])


def emulated_coverage() -> None:
    """Launch every kernel of the op in the emulator; the registry's test asks for it when this file has not run."""
    index = routed(4, 3, 2)
    with rtkernels.emulate("sm_90"):
        x, probs = numbers(4, 8), numbers(4, 2)
        y = moe_permute(x, index)
        moe_permute(x, routed(4, 9, 5))  # many rows for each token: another kernel
        moe_unpermute(y, index)
        _, dprobs = UNPERMUTE_BWD(x, y, index.rows, index.slots, probs, None, True)
        PROBS(dprobs, None, index.experts, 3)
