"""Lion: the published update, moments of every kind, and states of other optimizers."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from support.compare import assert_same_bits, running_on
from support.places import at
from torch import Tensor
from torch.nn import Parameter

from rtkernels.errors import ArgumentError
from rtkernels.ops.multi import dynamic_codes
from rtkernels.optim import AdamW, Lion

B16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
KINDS = ("fp32", "bf16", "8bit")
OPTIONS = (
    {},
    {"lr": 0.05, "betas": (0.8, 0.95), "weight_decay": 0.3},
    {"lr": 0.01, "betas": (0.0, 0.5), "maximize": True},
)


def published(weights: list[Tensor], averages: list[Tensor], grads: list[Tensor], options: dict) -> None:
    """One step as in the paper's listing, in the dtype of the tensors."""
    lr, (beta1, beta2) = options.get("lr", 1e-4), options.get("betas", (0.9, 0.99))
    for w, m, g in zip(weights, averages, grads, strict=True):
        g = -g if options.get("maximize") else g
        w.mul_(1 - lr * options.get("weight_decay", 0.0))
        w.sub_(lr * torch.sign(m * beta1 + g * (1 - beta1)))
        m.mul_(beta2).add_(g, alpha=1 - beta2)


def parameters(device: str, dtype: torch.dtype) -> list[Parameter]:
    g = torch.Generator().manual_seed(3)
    shapes = ((33, 7), (4100,), (), (0, 3), (64, 80), (2, 3, 4), (5001,))
    leaves = [torch.randn(shape, generator=g).to(device, dtype) for shape in shapes]
    leaves[4] = leaves[4].t().contiguous().t()  # dense, but not contiguous
    unaligned = torch.zeros(100, device=device, dtype=dtype)[1:70]
    return [Parameter(t) for t in (*leaves, unaligned.copy_(torch.randn(69, generator=g)))]


def set_grads(params: list[Parameter], step: int) -> None:
    g = torch.Generator().manual_seed(100 + step)
    for p in params:
        grad = torch.randn(p.shape, generator=g).to(p.device, p.dtype)
        p.grad = torch.empty_like(p).copy_(grad)


@at()
@pytest.mark.parametrize("options", OPTIONS, ids=("defaults", "other", "maximize"))
def test_the_published_update(place: str, options: dict) -> None:
    with running_on(place) as device:
        ours = parameters(device, F32)
        weights = [p.detach().clone(memory_format=torch.preserve_format) for p in ours]
        averages = [torch.zeros_like(w) for w in weights]
        optimizer = Lion(ours, **options)
        for step in range(4):
            set_grads(ours, step)
            held = list(range(len(ours)))
            if step == 2:  # a parameter without a gradient keeps its state
                ours[1].grad = None
                held.remove(1)
            assert optimizer.step() is None
            some = ([t[i] for i in held] for t in (weights, averages, [p.grad for p in ours]))
            published(*some, options)
            for p, w, m in zip(ours, weights, averages, strict=True):
                torch.testing.assert_close(optimizer.state[p]["exp_avg"], m, rtol=1e-6, atol=1e-7)
                torch.testing.assert_close(p.detach(), w, rtol=1e-6, atol=1e-7)


@at("cpu", "sm_80", "cuda")
def test_sums_that_cancel_have_no_sign(place: str) -> None:
    """0.5 m + 0.5 g of opposite numbers, for which a fused product would leave its rounding error."""
    with running_on(place) as device:
        p = Parameter(torch.ones(3, device=device))
        optimizer = Lion([p], lr=0.5, betas=(0.9, 0.1))
        first = torch.tensor([0.1, 0.7, 1e-20], device=device)
        p.grad = first.clone()
        optimizer.step()
        average = optimizer.state[p]["exp_avg"].clone()
        p.grad = -(average * 0.9) / (1 - 0.9)
        wanted = torch.sign(average * 0.9 + p.grad * (1 - 0.9))
        optimizer.step()
    assert torch.equal(p.detach(), 0.5 - 0.5 * wanted)


@at("sm_80", "sm_90", "cuda")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [(B16, {}), (F16, {"master": False}), (B16, {"master": False, "stochastic": True, "seed": 9}), (F32, {})],
    ids=("bf16", "fp16_alone", "bf16_stochastic", "fp32"),
)
def test_kernels_are_the_reference(place: str, kind: str, dtype: torch.dtype, options: dict) -> None:
    expected, ours = [], []
    for where, found in (("cpu", expected), (place, ours)):
        with running_on(where) as device:
            params = parameters(device, dtype)
            optimizer = Lion(params, lr=1e-2, weight_decay=0.1, state=kind, **options)
            set_grads(params, 0)
            averages = {i: {"exp_avg": p.grad.float() * 0.1, "step": 3} for i, p in enumerate(params)}
            optimizer.load_state_dict({**optimizer.state_dict(), "state": averages})
            set_grads(params, 1)
            optimizer.step()
            found += [(p.detach().cpu(), {k: v.cpu() for k, v in optimizer.state[p].items()}) for p in params]
    for (p, state), (q, other) in zip(ours, expected, strict=True):
        assert state.keys() == other.keys()
        torch.testing.assert_close(p, q)
        for name, value in state.items():
            if value.dtype == torch.uint8:
                distance = (value.int() - other[name].int()).abs()
                assert distance.max() <= 1 and (distance > 0).float().mean() < 0.01
            else:
                torch.testing.assert_close(value, other[name])


@at("cpu", "sm_80", "cuda")
def test_small_updates_are_not_lost(place: str) -> None:
    for options in ({}, {"master": False, "stochastic": True}):
        with running_on(place) as device:
            p = Parameter(torch.ones(4096, device=device, dtype=B16))
            optimizer = Lion([p], lr=1e-4, **options)
            for _ in range(60):
                p.grad = torch.ones_like(p)
                optimizer.step()
        exact = optimizer.state[p].get("master", p.detach().float())
        assert abs(exact.mean().item() - (1 - 60e-4)) < 4e-4


@at("cpu", "sm_80", "cuda")
def test_odd_gradients_reach_the_weights(place: str) -> None:
    with running_on(place) as device:
        p = Parameter(torch.ones(4, device=device))
        p.grad = torch.tensor([math.nan, math.inf, -math.inf, 0.0], device=device)
        Lion([p], lr=0.5).step()
    assert p[0].isnan() and p[1:].tolist() == [0.5, 1.5, 1.0]


@at("cpu", "sm_80", "cuda")
def test_rate_as_a_tensor_and_skipped_steps(place: str) -> None:
    with running_on(place) as device:
        lr = torch.tensor(0.5, device=device)
        p, q = (Parameter(torch.ones(9, device=device)) for _ in range(2))
        mine, other = Lion([p], lr=lr), Lion([q], lr=0.5)
        mine.grad_scale = torch.tensor(8.0, device=device)
        for rate in (0.5, 0.125):
            lr.fill_(rate)
            other.param_groups[0]["lr"] = rate
            for one, scale in ((p, 8.0), (q, 1.0)):
                one.grad = torch.full((9,), scale, device=device)
            mine.found_inf = torch.zeros((), device=device)
            mine.step()
            other.step()
            mine.found_inf = torch.ones((), device=device)
            mine.step()
    assert_same_bits(p.detach(), q.detach())
    assert float(mine.state[p]["step"]) == 2.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", ({}, {"master": False, "stochastic": True}), ids=("master", "stochastic"))
def test_200_steps_against_fp32(kind: str, options: dict) -> None:
    g = torch.Generator().manual_seed(0)
    target = torch.randn(80, 64, generator=g)
    losses = []
    for given in ({}, {"state": kind, **options}):
        p = Parameter(torch.zeros(80, 64, dtype=B16))
        optimizer = Lion([p], lr=2e-2, **given)
        for _ in range(200):
            p.grad = (p.detach().float() - target).to(B16)
            optimizer.step()
        losses.append((p.float() - target).square().mean().item())
    assert losses[1] < 2 * losses[0] + 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_saved_and_loaded(kind: str) -> None:
    ours = parameters("cpu", B16)
    first = Lion(ours, state=kind)
    set_grads(ours, 0)
    first.step()
    others = [Parameter(p.detach().clone(memory_format=torch.preserve_format)) for p in ours]
    second = Lion(others)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for params, optimizer in ((ours, first), (others, second)):
        set_grads(params, 1)
        optimizer.step()
    for p, q in zip(ours, others, strict=True):
        assert_same_bits(p.detach(), q.detach())
        for name, value in first.state[p].items():
            assert_same_bits(value, second.state[q][name], name)


def test_states_of_other_optimizers() -> None:
    base = torch.randn(70, 64, generator=torch.Generator().manual_seed(0))
    groups = [{"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "params": [0]}]
    codes, scale = dynamic_codes.encode(base, "8bit", True)
    of_bitsandbytes = {
        "state1": codes, "absmax1": scale, "qmap1": dynamic_codes.dynamic_map(True), "step": 7,
    }  # fmt: skip
    for state, step in (({"exp_avg": base}, 0.0), (of_bitsandbytes, 7.0)):
        for kind in KINDS:
            p = Parameter(torch.zeros(70, 64))
            optimizer = Lion([p], state=kind)
            optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
            found = optimizer.state[p]
            if kind == "8bit":
                value = dynamic_codes.decode(found["state1"], found["absmax1"], True)
                assert state is not of_bitsandbytes or torch.equal(found["state1"], codes)
            else:
                value = found["exp_avg"].float()
            assert (value - base).norm() < 0.02 * base.norm() and float(found["step"]) == step
    with pytest.raises(ArgumentError, match="the state of a parameter has exp_avg_sq; expected one moment"):
        optimizer.load_state_dict({"state": {0: {"exp_avg": base, "exp_avg_sq": base}}, "param_groups": groups})
    with pytest.raises(ArgumentError, match="expected two moments"):
        AdamW([p]).load_state_dict({"state": {0: {"exp_avg": base, "step": 1}}, "param_groups": groups})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, "lr is -1.0; expected a number of at least 0"),
        ({"betas": (0.9, 1.0)}, r"betas\[1\] is 1.0; expected a number from 0 to below 1"),
        ({"weight_decay": math.nan}, "weight_decay is nan"),
        ({"state": "fp8"}, "state is 'fp8'; expected 'fp32', 'bf16', '8bit'"),
        ({"stochastic": True}, "stochastic is True, and so is master"),
    ],
)
def test_wrong_options(options: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Lion([Parameter(torch.ones(3))], **options)


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("make", (Lion, AdamW))
def test_a_group_of_every_dtype_and_size(place: str, make: type) -> None:
    """As if every parameter had an optimizer of its own."""
    dtypes = (B16, F32, F16, B16, F32)
    shapes = ((70, 64), (4096,), (5001,), (3,), (0, 4))
    for options in ({"state": "8bit"}, {"state": "8bit", "master": False}, {}):
        with running_on(place) as device:
            g = torch.Generator().manual_seed(0)
            values = [torch.randn(s, generator=g).to(device, d) for s, d in zip(shapes, dtypes, strict=True)]
            grads = [torch.randn(s, generator=g).to(device) for s in shapes]
            together, alone = ([Parameter(v.clone()) for v in values] for _ in range(2))
            optimizers = [make(together, lr=1e-2, **options), *(make([p], lr=1e-2, **options) for p in alone)]
            for params in (together, alone):
                for i, (p, grad) in enumerate(zip(params, grads, strict=True)):
                    p.grad = None if i == 3 else grad.to(p.dtype)
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(together, alone, strict=True):
            assert_same_bits(p.detach(), q.detach())
        assert together[3] not in optimizers[0].state


@at("cpu", "sm_80", "cuda")
@pytest.mark.parametrize("options", ({}, {"state": "8bit", "master": False}), ids=("fp32", "8bit"))
def test_bad_parameters(place: str, options: dict) -> None:
    with running_on(place) as device:
        for make in (Lion, AdamW):
            double = Parameter(torch.ones(3, device=device, dtype=torch.float64))
            gaps = Parameter(torch.ones(80, 128, device=device)[:, :64])
            same = Parameter(torch.ones(1, device=device).expand(5000))
            sparse = Parameter(torch.ones(80, 64, device=device))
            turned = Parameter(torch.ones(80, 64, device=device))
            for p, grad, message in (
                (double, torch.ones_like(double), r"a parameter is torch\.float64"),
                (gaps, torch.ones(80, 64, device=device), r"weights\[0\] has shape \(80, 64\) and strides \(128, 1\)"),
                (same, torch.ones(5000, device=device), r"weights\[0\] has shape \(5000,\) and strides \(0,\)"),
                (sparse, torch.ones_like(sparse).to_sparse(), r"grads\[0\] has layout torch\.sparse_coo"),
                (
                    turned,
                    torch.ones(64, 80, device=device).t(),
                    r"grads\[0\] has strides \(1, 80\); expected \(64, 1\)",
                ),
            ):
                p.grad = grad
                with pytest.raises(ArgumentError, match=message):
                    make([p], **options).step()


@pytest.mark.gpu
def test_captured_steps() -> None:
    params = [Parameter(torch.randn(100, 80, device="cuda").bfloat16()) for _ in range(2)]
    with torch.no_grad():
        params[1].copy_(params[0])
    rates = [torch.tensor(1e-2, device="cuda") for _ in params]
    optimizers = [
        Lion([p], lr=lr, state="8bit", master=False, stochastic=True) for p, lr in zip(params, rates, strict=True)
    ]
    for p, optimizer in zip(params, optimizers, strict=True):
        p.grad = torch.ones_like(p)
        optimizer.step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers[0].step()
    for rate in (1e-2, 1e-3):
        for lr in rates:
            lr.fill_(rate)
        graph.replay()
        optimizers[1].step()
        assert torch.equal(*params)
