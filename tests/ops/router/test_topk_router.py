"""topk_router: choices, probabilities, counts and gradients at every place it can run, ties, errors, compilation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from support.compare import ROUNDOFF, assert_close, assert_same_bits, running_on
from support.places import at, error_tests, order_test, short
from support.ways import assert_equal_bits, captured
from torch import Tensor

import rtkernels
from bench.rows import rows_of
from rtkernels.ops.router import topk_router as module

topk_router = rtkernels.topk_router


@dataclass
class Case:
    shape: tuple[int, ...]
    k: int
    options: dict[str, Any] = field(default_factory=dict)
    bias: bool = False
    change: Callable[[Tensor], Tensor] = lambda x: x


def _sigmoid(**more: Any) -> dict[str, Any]:
    return {"score": "sigmoid", "renormalize": True, "scale": 2.5, **more}


CASES: dict[str, Case] = {
    "softmax": Case((9, 256), 8),
    "softmax_renormalized": Case((3, 2, 256), 8, {"renormalize": True}),
    "softmax_after": Case((5, 256), 8, {"score_first": False, "scale": 0.5}),
    "softmax_after_many": Case((3, 256), 40, {"score_first": False}),
    "softmax_many": Case((3, 100), 64, {"renormalize": True, "eps": 0.25}),
    "softmax_eps": Case((4, 60), 5, {"renormalize": True, "eps": 0.1, "scale": 3.0}),
    "softmax_bias": Case((4, 60), 5, {"renormalize": True}, bias=True),
    "sigmoid": Case((5, 128), 6, {"score": "sigmoid"}),
    "sigmoid_after": Case((5, 96), 6, {"score": "sigmoid", "score_first": False}, bias=True),
    "sigmoid_bias": Case((5, 256), 8, _sigmoid(), bias=True),
    "groups_of_lanes": Case((9, 256), 8, _sigmoid(num_groups=32, top_groups=4), bias=True),
    "groups_of_some_lanes": Case((5, 256), 8, _sigmoid(num_groups=8, top_groups=4), bias=True),
    "groups_one_best": Case((5, 128), 4, _sigmoid(num_groups=4, top_groups=2, group_k=1)),
    "groups_odd": Case((5, 60), 6, _sigmoid(num_groups=12, top_groups=3), bias=True),
    "groups_three_best": Case((5, 90), 6, _sigmoid(num_groups=9, top_groups=2, score_first=False), bias=True),
    "groups_of_one": Case((4, 40), 3, _sigmoid(num_groups=40, top_groups=5)),
    "groups_all": Case((4, 40), 3, _sigmoid(num_groups=8)),
    "groups_softmax": Case((4, 160), 8, {"num_groups": 8, "top_groups": 2, "renormalize": True}, bias=True),
    "wide": Case((4, 384), 8, _sigmoid(), bias=True),
    "wide_softmax": Case((3, 1000), 50, {"num_groups": 10, "top_groups": 7}, bias=True),
    "wide_odd": Case((3, 301), 9, {"renormalize": True}),
    "most_experts": Case((2, 4096), 8),
    "few_experts": Case((37, 8), 2, {"score_first": False}),
    "one_expert": Case((3, 1), 1),
    "one_row": Case((64,), 6),
    "no_rows": Case((0, 64), 6),
    "ties": Case((6, 256), 8, change=lambda x: x.round()),
    "ties_wide": Case((3, 400), 12, change=lambda x: x.round()),
    "ties_groups": Case((6, 256), 8, {"num_groups": 32, "top_groups": 4, "score_first": False}, change=torch.round),
    "ties_odd_groups": Case((6, 60), 6, {"num_groups": 6, "top_groups": 2, "score_first": False}, change=torch.round),
    "equal": Case((3, 256), 8, _sigmoid(num_groups=32, top_groups=4), change=torch.zeros_like),
    "large": Case((3, 64), 4, {"renormalize": True}, change=lambda x: x * 100),
    "minus_infinity": Case((4, 64), 3, change=lambda x: torch.where(x > 0, x, -torch.inf)),
    "strided": Case((5, 64), 4, change=lambda x: torch.cat([x, x], -1)[:, :64]),
    "unaligned": Case((5, 256), 8, change=lambda x: torch.cat([x[:, :1], x], -1)[:, 1:]),
    "transposed": Case((40, 6), 3, change=lambda x: x.t()),
}


def make(name: str, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor | None, Case]:
    """Build the tensors of a case: the same numbers on every device."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    x = case.change(torch.randn(case.shape, generator=generator).to(dtype).to(device))
    bias = torch.randn(x.shape[-1], generator=generator).to(device) if case.bias else None
    return x, bias, case


def exact(x: Tensor, indices: Tensor, options: dict[str, Any]) -> Tensor:
    """Probabilities of the chosen experts, in fp64, by torch."""
    score, first = options.get("score", "softmax"), options.get("score_first", True)
    scale = options.get("scale", 1.0)
    if score == "softmax" and not first:
        return torch.softmax(x.gather(-1, indices), -1) * scale
    s = (torch.softmax(x, -1) if score == "softmax" else torch.sigmoid(x)).gather(-1, indices)
    return (
        s / (s.sum(-1, keepdim=True) + options.get("eps", 1e-20)) * scale if options.get("renormalize") else s * scale
    )


def chosen_by_loops(x: Tensor, bias: Tensor | None, case: Case) -> Tensor:
    """Choices of a matrix of fp32 logits, by the definition."""
    options = case.options
    first = options.get("score_first", True)
    groups = options.get("num_groups", 1)
    kept = options.get("top_groups", groups)
    of_group = options.get("group_k") or max(case.k // kept, 1)
    grouped = groups > 1 and kept < groups
    key = x
    if first and (bias is not None or grouped):
        key = torch.softmax(x, -1) if options.get("score", "softmax") == "softmax" else torch.sigmoid(x)
    if bias is not None:
        key = key + bias
    rows = []
    for row in key.tolist():
        size = len(row) // groups
        allowed = range(len(row))
        if grouped:
            parts = [sorted(row[g * size : (g + 1) * size], reverse=True)[:of_group] for g in range(groups)]
            sums = []
            for part in parts:
                total = torch.tensor(part[0])
                for more in part[1:]:
                    total = total + torch.tensor(more)
                sums.append(total.item())
            best = sorted(range(groups), key=lambda g: -sums[g])[:kept]
            allowed = [e for e in allowed if e // size in best]
        rows.append(sorted(allowed, key=lambda e: -row[e])[: case.k])
    return torch.tensor(rows, dtype=torch.int64).view(-1, case.k)


def check(x: Tensor, bias: Tensor | None, case: Case) -> tuple[Tensor, ...]:
    """Run forward and backward and hold every number to its budget; return all results and the gradient."""
    options = {**case.options, "bias": bias, "dense_probs": True, "routing_map": True}
    leaf = x.detach().requires_grad_()
    routing = topk_router(leaf, case.k, **options)
    lead, experts = x.shape[:-1], x.shape[-1]
    assert routing.probs.shape == routing.indices.shape == (*lead, case.k)
    assert routing.probs.dtype == torch.float32 and routing.indices.dtype == torch.int32
    flat = x.detach().float().reshape(-1, experts).cpu()
    indices = chosen_by_loops(flat, None if bias is None else bias.float().cpu(), case).view(*lead, case.k).to(x.device)
    assert torch.equal(routing.indices.long(), indices)
    wanted_map = torch.zeros(x.shape, dtype=torch.bool, device=x.device).scatter(-1, indices, True)
    assert torch.equal(routing.routing_map, wanted_map)
    assert torch.equal(routing.counts, wanted_map.reshape(-1, experts).sum(0).int())

    wide = x.detach().double().requires_grad_()
    probs = exact(wide, indices, case.options)
    spread = 4 + 2 * x.detach().double().nan_to_num(0, 0, 0).abs().amax().item() if x.numel() else 4
    assert_close(routing.probs.detach(), probs.detach(), c=4 * spread, what="probs")
    dense = torch.zeros_like(wide).scatter(-1, indices, probs)
    same = torch.zeros(x.shape, device=x.device).scatter(-1, indices, routing.probs.detach())
    assert_same_bits(routing.dense_probs.detach(), same, "dense_probs")
    alone = topk_router(x.detach(), case.k, **case.options, bias=bias)
    assert alone.dense_probs is None and alone.routing_map is None
    assert_same_bits(alone.probs, routing.probs.detach(), "probs without gradients")
    assert torch.equal(alone.counts, routing.counts)
    if x.numel() == 0:
        return ()

    generator = torch.Generator().manual_seed(1)
    g, g_dense = (torch.randn(s, generator=generator).to(x.device) for s in (probs.shape, x.shape))
    torch.autograd.backward((routing.probs, routing.dense_probs), (g, g_dense))
    torch.autograd.backward((probs, dense), (g.double(), g_dense.double()))
    both = g.double() + g_dense.double().gather(-1, indices)
    size = (both.abs() * probs.detach()).sum(-1, keepdim=True) * (1 + probs.detach().sum(-1, keepdim=True))
    slack = 8 * spread * ROUNDOFF[torch.float32] / ROUNDOFF[x.dtype]
    assert_close(leaf.grad, wide.grad, c=1.01, scale=wide.grad.abs() + slack * (size + wide.grad.abs()), what="dlogits")
    return *(t.detach() for t in routing), leaf.grad


@pytest.mark.parametrize("case", CASES)
@at()
def test_every_case(place: str, case: str) -> None:
    with running_on(place) as device:
        check(*make(case, torch.float32, device))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=short)
@at()
def test_every_dtype(place: str, dtype: torch.dtype) -> None:
    with running_on(place) as device:
        for case in ("softmax", "sigmoid_bias", "groups_of_lanes", "wide_odd", "few_experts", "softmax_after_many"):
            check(*make(case, dtype, device))


def emulated_coverage() -> None:
    """Run every kernel of the op in the emulator; test_registry.py checks that it does."""
    with running_on("sm_90") as device:
        for case in ("softmax", "sigmoid_bias"):
            check(*make(case, torch.float32, device))


test_thread_order_does_not_matter = order_test(
    lambda case: check(*make(case, torch.float32, "cpu")),
    *("groups_of_lanes", "groups_odd", "wide_softmax", "softmax_renormalized"),
)


@at("sm_90", "cuda")
def test_counts_of_many_calls(place: str) -> None:
    with running_on(place) as device:
        found = []
        for rows in range(1, 70):  # more than are cleared at once
            x = torch.full((rows, 64), -1.0, device=device)
            x[:, rows % 60] = 10
            with torch.inference_mode(rows == 1):
                found.append(topk_router(x, 1).counts)
        for rows, counts in enumerate(found, 1):
            assert counts[rows % 60] == rows and counts.sum() == rows
    x = torch.randn(4, 64, device=device, requires_grad=True)
    rtkernels.load_balancing_loss(x, counts=found[1], k=1).backward()


@at()
def test_nan(place: str) -> None:
    with running_on(place) as device:
        x = torch.randn(3, 64, device=device)
        x[1, 9] = torch.nan
        for options in ({}, {"score": "sigmoid", "bias": torch.zeros(64, device=device)}):
            routing = topk_router(x, 2, **options)
            assert routing.probs[1, 0].isnan() and not routing.probs[::2].isnan().any()
            assert (routing.indices[1] >= 0).all() and (routing.indices[1] < 64).all()
        assert topk_router(x, 2).indices[1, 0] == 9


@at("cpu", "sm_90", "cuda")
def test_gradient_of_one_output(place: str) -> None:
    with running_on(place) as device:
        x, g = torch.randn(2, 5, 40, device=device)
        grads = []
        for dense in (False, True):
            leaf = x.clone().requires_grad_()
            routing = topk_router(leaf, 3, renormalize=True, dense_probs=True)
            if dense:
                routing.dense_probs.backward(g)
            else:
                routing.probs.backward(g.gather(-1, routing.indices.long()))
            grads.append(leaf.grad)
        assert_same_bits(*grads)


def test_bias_gets_no_gradient_and_second_order_is_refused() -> None:
    x, bias = torch.randn(4, 8, requires_grad=True), torch.randn(8, requires_grad=True)
    probs = topk_router(x, 2, bias=bias).probs
    (first,) = torch.autograd.grad(probs.square().sum(), x, create_graph=True)
    assert torch.autograd.grad(topk_router(x, 2, bias=bias).probs.sum(), bias, allow_unused=True) == (None,)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


X = torch.ones(4, 12)
BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "dtype": (lambda: topk_router(X.double(), 2), "logits has dtype float64; expected one of bfloat16"),
    "no dimensions": (lambda: topk_router(torch.tensor(1.0), 1), "logits has no dimensions; expected at least one"),
    "experts": (lambda: topk_router(torch.ones(1, 4097), 1), "logits has 4097 experts; expected 1 to 4096"),
    "k": (lambda: topk_router(X, 13), "k is 13; expected 1 to 12 for rows of 12"),
    "score": (lambda: topk_router(X, 2, score="relu"), "score is 'relu'; expected 'softmax' or 'sigmoid'"),
    "all groups": (lambda: topk_router(X, 2, num_groups=5), "num_groups is 5; expected a divisor of the 12 experts"),
    "scale": (lambda: topk_router(X, 2, scale=torch.ones(2)), "scale is a Tensor; expected a number"),
    "wide bias": (lambda: topk_router(X, 2, bias=torch.ones(12).double()), "bias has dtype float64; expected one of"),
    "bias shape": (lambda: topk_router(X, 2, bias=torch.ones(11)), r"bias has shape \(11,\); expected \(12,\)"),
    "bias dtype": (lambda: topk_router(X, 2, bias=torch.ones(12).long()), "bias has dtype int64; expected one of"),
    "groups": (lambda: topk_router(X, 2, num_groups=5, top_groups=1), "num_groups is 5; expected a divisor of the 12"),
    "no groups": (lambda: topk_router(X, 2, num_groups=0), "num_groups is 0; expected a divisor"),
    "top groups": (lambda: topk_router(X, 2, num_groups=4, top_groups=5), "top_groups is 5; expected 1 to num_groups"),
    "too few": (lambda: topk_router(X, 5, num_groups=6, top_groups=2), "k is 5; expected at most 4, the experts of 2"),
    "group k": (
        lambda: topk_router(X, 2, num_groups=4, top_groups=2, group_k=4),
        "group_k is 4; expected 1 to 3, the experts of a group",
    ),
    "not a tensor": (lambda: topk_router([1.0, 2.0], 1), "expected a torch.Tensor or an array with __dlpack__"),
    "indices dtype": (
        lambda: module.BACKWARD(X, torch.zeros(4, 2), None, None, 0, 1.0, 0.0),
        "indices has dtype float32; expected int32",
    ),
}
test_error_messages, test_launchers_raise_the_same_messages = error_tests(BAD)


@pytest.mark.parametrize("dense", (True, False))
@at("cpu", "cuda")
def test_torch_compile(place: str, dense: bool) -> None:
    def block(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        routing = topk_router(x * 2, 3, score="sigmoid", bias=bias, num_groups=4, top_groups=2, dense_probs=dense)
        probs = routing.probs.cumsum(-1)
        return probs.sum(-1, keepdim=True) + routing.dense_probs if dense else probs, routing.counts

    compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 4):
        x, bias = torch.randn(rows, 16, device=place), torch.randn(16, device=place)
        grads = []
        for function in (compiled, block):
            leaf = x.clone().requires_grad_()
            y, counts = function(leaf, bias)
            y.square().sum().backward()
            grads.append(leaf.grad)
            assert counts.sum() == 3 * rows
        torch.testing.assert_close(*grads)


def test_numpy_in_numpy_out() -> None:
    x = np.random.default_rng(0).standard_normal((3, 8), dtype=np.float32)
    routing = topk_router(x, 2, bias=np.zeros(8, dtype=np.float32), routing_map=True)
    assert isinstance(routing.probs, np.ndarray) and routing.dense_probs is None
    np.testing.assert_array_equal(routing.routing_map.sum(0), routing.counts)


def test_bench_rows_agree_with_torch() -> None:
    for row in rows_of(module.OP.name):
        if row.name == "group_topk_bwd" or row.name.startswith("softmax_router") or "g32" in row.shape:
            inputs = row.make("cpu", torch.Generator().manual_seed(0))
            ours, theirs = row.ours(**inputs), row.torch(**inputs)
            for a, b in zip(ours, theirs, strict=True) if isinstance(ours, tuple) else ((ours, theirs),):
                torch.testing.assert_close(a.double(), b.double(), rtol=1e-4, atol=1e-6)


# ---- on the GPU -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name", ("softmax", "groups_of_lanes", "groups_of_some_lanes", "groups_odd", "wide", "few_experts")
)
def test_many_rows(name: str) -> None:
    case = CASES[name]
    x = torch.randn(5000, case.shape[-1], device="cuda")
    bias = torch.randn(case.shape[-1], device="cuda") if case.bias else None
    routing = topk_router(x, case.k, bias=bias, routing_map=True, **case.options)
    assert torch.equal(routing.counts, routing.routing_map.sum(0).int())
    on_cpu = topk_router(x.cpu(), case.k, bias=None if bias is None else bias.cpu(), **case.options)
    differ = (routing.indices.cpu() != on_cpu.indices).any(-1)  # scores that differ by a rounding may swap
    assert differ.float().mean() < 2e-3
    torch.testing.assert_close(routing.probs.cpu()[~differ], on_cpu.probs[~differ], rtol=1e-5, atol=1e-7)


@pytest.mark.gpu
def test_streams_have_their_own_counters() -> None:
    xs = [torch.randn(20000, 256, device="cuda") for _ in range(4)]
    wanted = [topk_router(x, 8).counts for x in xs]
    torch.cuda.synchronize()
    streams, got = [torch.cuda.Stream() for _ in xs], []
    for _ in range(5):
        for x, stream in zip(xs, streams, strict=True):
            with torch.cuda.stream(stream):
                got.append(topk_router(x, 8).counts)
    torch.cuda.synchronize()
    for i, counts in enumerate(got):
        assert torch.equal(counts, wanted[i % 4])


@pytest.mark.gpu
def test_graph_capture_and_replay() -> None:
    x = torch.randn(3000, 256, device="cuda")
    replay = captured(lambda: topk_router(x, 8, renormalize=True)[:3])
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        assert_equal_bits(replay(), topk_router(x, 8, renormalize=True)[:3])
